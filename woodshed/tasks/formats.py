"""Task sets of other formats, written as task folders: Harbor's, or those that a function of the user's own reads.

Such a function is named on the command line, never in a recipe or a task set: those are data of somebody else. What it
reads is kept as ordinary folders, so that everything behind it (proof, leak scan, attempts, grading) knows one format.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import get_type_hints

from pydantic import TypeAdapter, ValidationError

from woodshed.parts import Part, wrong_result
from woodshed.records import Task, TaskError
from woodshed.sandbox import BUBBLEWRAP, SandboxProvider
from woodshed.tasks import harbor
from woodshed.tasks.folder import claimed, write
from woodshed.tasks.foreign import ForeignTask
from woodshed.tasks.paths import is_inside
from woodshed.tasks.solution import solved

__all__ = ["FORMAT", "ForeignTask", "import_tasks"]


Read = Callable[[Path], Iterable[ForeignTask | TaskError]]
"""A reader of a format, which gives the reason in the place of a task that cannot be read."""


def _example(source: Path) -> Iterable[ForeignTask]:
    return ()


FORMAT: Part[Read] = Part("task format", {"harbor": harbor.read}, like=_example)
"""A format as a command names it: a function from a path to tasks."""


def import_tasks(
    format_name: str, source: Path, out: Path, sandboxes: SandboxProvider = BUBBLEWRAP
) -> Iterator[Task | TaskError]:
    """Write every task that a format reads in `source` as a folder below `out`; for one that cannot be read or whose
    solution fails, the reason comes instead.

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
            if isinstance(given, TaskError):
                yield given
                continue
            if not isinstance(given, ForeignTask):
                raise wrong_result("task format", format_name, given, "an iterable of ForeignTask")
            _refuse_odd(format_name, given)
            if given.solution:
                try:
                    given = solved(given, sandboxes)
                except TaskError as error:
                    yield error
                    continue
            with tempfile.TemporaryDirectory(prefix=".make-", dir=out) as scratch:
                workspace = Path(scratch, "workspace")
                for path, data in given.workspace.items():
                    (workspace / path).parent.mkdir(parents=True, exist_ok=True)
                    (workspace / path).write_bytes(data)
                workspace.mkdir(exist_ok=True)
                yield write(
                    given.record(),
                    out / given.name,
                    workspace=workspace,
                    tests=given.tests,
                    gold=given.gold,
                    command_tests=given.command_tests,
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
    if odd := [path for path in (*given.workspace, *given.solution) if not is_inside(path)]:
        raise TaskError(f"{given.name}: {odd[0]!r} is not a relative path inside the workspace")
