"""Task sets of other formats, read by a function of the user's own and written as task folders.

The function is named on the command line, never in a recipe or a task set: those are data of somebody else. What it
reads is kept as ordinary folders, so that everything behind it (proof, leak scan, attempts, grading) knows one format.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import get_type_hints

from pydantic import TypeAdapter, ValidationError

from woodshed.parts import Part, wrong_result
from woodshed.records import Environment, Task, TaskError
from woodshed.tasks.folder import claimed, write
from woodshed.tasks.paths import is_inside


@dataclass(frozen=True)
class ForeignTask:
    """A task of another format, read. Files are bytes by workspace-relative path."""

    name: str
    """Letters, digits, ".", "_" and "-", unique in its set."""
    instruction: str
    environment: Environment
    workspace: Mapping[str, bytes]
    """The repository as the agent sees it, with the gap in it."""
    tests: Mapping[str, bytes]
    """Original test and configuration files that the workspace does not show, or shows otherwise."""
    gold: Mapping[str, bytes | None]
    """Whole files of the gold patch; None for one that it deletes."""
    fail_to_pass: tuple[str, ...]
    """pytest node ids that fail before the gold patch and pass after it."""
    pass_to_pass: tuple[str, ...] = ()
    """pytest node ids that pass before and after."""
    allowed_paths: tuple[str, ...] = ()
    """Files or folders whose changes cross over to grading; empty takes the files of the gold patch."""
    test_command: str = "python -m pytest -q"

    def record(self) -> Task:
        """The task without its id and folder, which `folder.write` fills in."""
        target = next(iter(self.gold), "")
        return Task(
            id="",
            name=self.name,
            folder=Path(),
            instruction=self.instruction,
            environment=self.environment,
            allowed_paths=self.allowed_paths or tuple(self.gold),
            fail_to_pass=self.fail_to_pass,
            pass_to_pass=self.pass_to_pass,
            operator="foreign",
            level=2,
            target_path=target,
            target_symbol="",
            target_lines=(1, 1 + self.workspace.get(target, b"").count(b"\n")),
            test_command=self.test_command,
        )


Read = Callable[[Path], Iterable[ForeignTask]]


def _example(source: Path) -> Iterable[ForeignTask]:
    return ()


FORMAT: Part[Read] = Part("task format", {}, like=_example)
"""A format as a command names it: a function from a path to tasks."""


def import_tasks(format_name: str, source: Path, out: Path) -> Iterator[Task]:
    """Write every task that a format reads in `source` as a folder below `out`.

    Raises:
        RecipeError: the format cannot be used, or returned something else than tasks.
        TaskError: there is no source; a task that no folder can hold, which is named.
    """
    read = FORMAT.resolve(format_name)
    if not source.exists():
        raise TaskError(f"there is nothing at {source}")
    found = read(source)
    if not isinstance(found, Iterable):
        raise wrong_result("task format", format_name, found, "an iterable of ForeignTask")
    with claimed(out):
        for given in found:
            if not isinstance(given, ForeignTask):
                raise wrong_result("task format", format_name, given, "an iterable of ForeignTask")
            _refuse_odd(format_name, given)
            with tempfile.TemporaryDirectory(prefix=".make-", dir=out) as scratch:
                workspace = Path(scratch, "workspace")
                for path, data in given.workspace.items():
                    (workspace / path).parent.mkdir(parents=True, exist_ok=True)
                    (workspace / path).write_bytes(data)
                yield write(
                    given.record(), out / given.name, workspace=workspace, tests=given.tests, gold=given.gold
                )


def _refuse_odd(format_name: str, given: ForeignTask) -> None:
    """Check what is not checked when the folder is read again: types, and names that become paths.

    Raises:
        TaskError: names the field.
    """
    for name, kind in get_type_hints(ForeignTask).items():
        try:
            TypeAdapter(kind).validate_python(getattr(given, name), strict=True)
        except ValidationError as error:
            mistake = error.errors()[0]
            where = ".".join(map(str, (name, *mistake["loc"])))
            raise TaskError(
                f"task format {format_name!r} read {where} = {mistake['input']!r}: {mistake['msg'].lower()}"
            ) from None
    if Path(given.name).name != given.name:
        raise TaskError(
            f"task format {format_name!r} read a task named {given.name!r}, which is no folder's name"
        )
    if odd := [path for path in given.workspace if not is_inside(path)]:
        raise TaskError(f"{given.name}: {odd[0]!r} is not a relative path inside the workspace")
