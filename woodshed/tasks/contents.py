"""Files of a task by what they are, so that nobody else joins a path into its folder."""

from __future__ import annotations

from pathlib import Path

from woodshed.pysource import syntax
from woodshed.records import Patch, Task, TaskError
from woodshed.tasks.diff import unified
from woodshed.tasks.paths import text_of, tree


def workspace(task: Task) -> Path:
    """Folder of the repository as the agent sees it, with the gap in it."""
    return task.folder / "environment" / "workspace"


def original(task: Task, path: str) -> Path:
    """A file as the workspace shows it before any attempt; it may not exist."""
    return workspace(task) / path


def hidden_tests(task: Task) -> Path:
    """Folder of the original tests and configuration: a layer to lay over the workspace."""
    return task.folder / "tests" / "files"


def grading_files(task: Task) -> Path:
    """Folder of all that a verifier elsewhere is given: test.sh and the files beside it."""
    return task.folder / "tests"


def gold_folder(task: Task) -> Path:
    """Folder of the gold patch's whole files: a layer to lay over the workspace."""
    return task.folder / "solution" / "files"


def gold_files(task: Task) -> dict[str, Path | None]:
    """The whole files of the gold patch on disk, by workspace-relative path; None for one that it deletes."""
    deletes = task.folder / "solution" / "deletes"
    gone = dict.fromkeys(text_of(deletes).splitlines() if deletes.exists() else ())
    return {**dict(tree(gold_folder(task))), **gone}


def gold_patch(task: Task) -> Patch:
    """The patch that solves the task.

    Raises:
        TaskError: a gold file that is no text.
    """
    new = {path: None if file is None else _source(path, file) for path, file in gold_files(task).items()}
    diff = []
    for path, text in sorted(new.items()):
        before = original(task, path)
        diff.append(unified(path, _source(path, before) if before.exists() else None, text))
    return Patch(files=new, diff="".join(diff))


def protected_files(task: Task) -> dict[str, bytes]:
    """Original tests and configuration, by workspace-relative path."""
    return {path: file.read_bytes() for path, file in tree(hidden_tests(task))}


def _source(path: str, file: Path) -> str:
    try:
        return syntax.read(path, file.read_bytes())
    except syntax.UnreadableError as error:
        raise TaskError(f"{file}: {error}") from None
