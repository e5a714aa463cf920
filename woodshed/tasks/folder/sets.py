"""Sets of tasks: several folders, read together or added to."""

from __future__ import annotations

import fcntl
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from woodshed.records import RunError, Task, TaskError
from woodshed.runs.files import created
from woodshed.runs.folder import RunDir
from woodshed.tasks.folder.reading import REQUIRED, load


def task_folders(path: Path) -> list[Path]:
    """A task folder, or every task folder in a folder of them, by name; also those that `load` refuses.

    Raises:
        TaskError: nothing there.
    """
    if not path.is_dir():
        raise TaskError(
            f"no task set at {path}. Make one with `woodshed tasks make SOURCE --out {path}`, or, where a recipe names "
            "it, as the first lines of the recipe say."
        )
    if any((path / name).exists() for name in REQUIRED[:2]):
        return [path]
    inner = sorted(child for child in path.iterdir() if child.is_dir() and not child.name.startswith("."))
    folders = [child for child in inner if any((child / name).exists() for name in REQUIRED[:4])]
    if not folders and any((child / "recipe.toml").is_file() for child in inner):
        raise TaskError(
            f"{path} holds runs, not tasks; name the tasks of one, such as {inner[0] / 'tasks' / 'train'}"
        )
    beside = [child for child in inner if any(child.glob("*/task.toml"))]
    if not folders and beside:
        raise TaskError(f"{path} holds no task, but folders of tasks: name one, such as {beside[0]}")
    if not folders:
        raise TaskError(
            f"{path} holds no task: expected folders with a task.toml. "
            f"Make some with `woodshed tasks make SOURCE --out {path}`."
        )
    return folders


def refuse_run(out: Path) -> None:
    """Check that new tasks do not go into a run.

    Raises:
        TaskError: `out` is a run folder or lies in one.
    """
    for place in (out, *out.absolute().parents):
        if (place / "recipe.toml").is_file() and (place / "manifest.json").is_file():
            raise TaskError(f"{out} lies in the run {place}, which keeps its own tasks; name another --out")


@contextmanager
def claimed(out: Path) -> Iterator[None]:
    """A folder of tasks that no other process adds to meanwhile.

    It is made where it is not there, and not left behind empty; what a killed process left unfinished in it goes.

    Raises:
        TaskError: another process is adding to it.
    """
    with created(out):
        descriptor = os.open(out, os.O_RDONLY | os.O_DIRECTORY)
        try:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise TaskError(
                    f"another process is making tasks in {out}; wait for it, or name another --out"
                ) from None
            for leftover in [*out.glob(".make-*"), *out.glob(".harden-*")]:
                shutil.rmtree(leftover, ignore_errors=True)
            yield
        finally:
            os.close(descriptor)


def load_set(*paths: Path) -> list[Task]:
    """Every task in these task folders, or folders of them, in the order of the paths, then by name.

    Raises:
        TaskError: nothing there, any task that `load` refuses, two tasks of one name, or one task twice.
    """
    tasks: dict[str, Task] = {}
    for folder in (folder for path in paths for folder in task_folders(path)):
        task = load(folder)
        if task.name in tasks:
            raise TaskError(
                f"two tasks are named {task.name!r}: {tasks[task.name].folder} and {folder}. Names tell attempts "
                "apart in a run, so rename one of the folders."
            )
        if twin := next((known for known in tasks.values() if known.id == task.id), None):
            raise TaskError(
                f"{twin.folder} and {folder} are the same task (id {task.id}): its attempts would count twice. "
                "Delete one of the folders."
            )
        tasks[task.name] = task
    return list(tasks.values())


def of_run(run: RunDir) -> dict[str, Task]:
    """The tasks that a run kept, by id.

    Raises:
        RunError: it holds none.
        TaskError: one that `load` refuses.
    """
    found = sorted(path.parent for path in (run.path / "tasks").glob("*/*/task.toml"))
    if not found:
        raise RunError(f"{run.path} does not hold its tasks (in {run.path / 'tasks'}); restore them")
    return {task.id: task for task in map(load, found)}
