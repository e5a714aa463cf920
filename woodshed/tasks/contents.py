"""Files of a task by what they are, so that nobody else joins a path into its folder. Standard library only."""

from __future__ import annotations

from pathlib import Path

from woodshed import documents
from woodshed.pysource import syntax
from woodshed.pysource.api_compat import Api, SourceTree, api_of, stem_of
from woodshed.records import Patch, Task, TaskError
from woodshed.tasks.diff import unified
from woodshed.tasks.paths import text_of, tree


def workspace(task: Task) -> Path:
    """Folder of the repository as the agent sees it, with the gap in it."""
    return task.folder / "environment" / "workspace"


def original(task: Task, path: str) -> Path:
    """A file as the workspace shows it before any attempt; it may not exist."""
    return workspace(task) / path


def is_allowed(task: Task, path: str) -> bool:
    """True if a solution may change the file of a path, as far as the task's allowed paths say."""
    return any(path == allowed or path.startswith(f"{allowed}/") for allowed in task.allowed_paths)


def hidden_tests(task: Task) -> Path:
    """Folder of the original tests and configuration: a layer to lay over the workspace."""
    return task.folder / "tests" / "files"


def grading_files(task: Task) -> Path:
    """Folder of all that a verifier elsewhere is given: test.sh and the files beside it."""
    return task.folder / "tests"


def isolated_tests(task: Task) -> tuple[str, tuple[str, ...]] | None:
    """The tests, fail-to-pass and some others, that pass with the original code in another process than theirs, and the
    version of the grader that found them (`grading.isolated_tests`); None where nobody has looked.

    Raises:
        TaskError: what is noted there has another form, as an earlier version left it.
    """
    try:
        known = documents.read_json(grading_files(task) / "expected.json", TaskError).get("isolated")
    except FileNotFoundError:
        known = None
    if known is None:
        return None
    by, tests = (known.get("by"), known.get("tests")) if isinstance(known, dict) else (None, None)
    if not (isinstance(by, str) and isinstance(tests, list) and all(isinstance(test, str) for test in tests)):
        raise TaskError(
            f"{grading_files(task)}/expected.json: `isolated` is {str(known)[:60]!r}, not the isolated tests and the "
            "version that found them. Make the task again with `woodshed tasks make`."
        )
    return by, tuple(test for test in (*task.fail_to_pass, *task.pass_to_pass) if test in set(tests))


def shown_files(tests: Path) -> Path:
    """Folder of the files that a solution may change, as the agent was given them, for a verifier elsewhere."""
    return tests / "shown"


def lay_out_for_grading(tests: Path, home: Path) -> None:
    """Make a folder that looks like a task's, as far as the files tell that a verifier elsewhere is given."""
    (home / "environment").mkdir(parents=True)
    (home / "environment" / "workspace").symlink_to(shown_files(tests))
    (home / "tests").symlink_to(tests)


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


def original_api(task: Task) -> Api:
    """The definitions of the modules that the gold patch changes."""
    shown, gold = workspace(task), gold_files(task)

    def read(path: str) -> str | None:
        file = gold[path] if path in gold else shown / path
        try:
            return None if file is None else syntax.legible(file.read_bytes())
        except (OSError, ValueError):  # none there, or no name that a file could have
            return None

    stems = {stem_of(path) for path in gold if path.endswith(".py")}
    return api_of(SourceTree(read, task.environment.source_roots), sorted(stems))


def protected_files(task: Task) -> dict[str, bytes]:
    """Original tests and configuration, by workspace-relative path."""
    return {path: file.read_bytes() for path, file in tree(hidden_tests(task))}


def _source(path: str, file: Path) -> str:
    try:
        return syntax.read(path, file.read_bytes())
    except syntax.UnreadableError as error:
        raise TaskError(f"{file}: {error}") from None
