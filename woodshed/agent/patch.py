"""What an attempt changed: whole text files, the only thing that crosses from a rollout to grading."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from woodshed import syntax
from woodshed.records import Patch
from woodshed.sandbox import Sandbox
from woodshed.tasks.diff import unified

LEFTOVERS = ("__pycache__", ".pytest_cache", ".hypothesis", ".mypy_cache", ".ruff_cache")
"""Folders that tools leave behind; nobody wrote them on purpose."""


def extract(sandbox: Sandbox, original: Path, *, max_bytes: int) -> Patch:
    """The changes of a sandbox against `original`, the host folder with the workspace as it was given.

    `max_bytes` bounds each file. What does not cross is named in `Patch.skipped`, with the reason.

    Raises:
        SandboxError: the sandbox was lost.
    """
    files: dict[str, str | None] = {}
    skipped: dict[str, str] = {}
    for change in sandbox.diff():
        if change.file_type == "dir" or set(change.path.split("/")) & set(LEFTOVERS):
            continue
        if change.kind == "deleted":
            files[change.path] = None
        elif change.file_type != "file":
            skipped[change.path] = "not a regular file"
        else:
            try:
                data = sandbox.read(change.path)
                if len(data) > max_bytes:
                    skipped[change.path] = "too large"
                else:
                    files[change.path] = syntax.read(change.path, data)
            except syntax.UnreadableError as error:
                skipped[change.path] = str(error)
            except OSError as error:  # a process that the attempt left behind took it away
                skipped[change.path] = f"cannot be read: {error.strerror}"
    return Patch(files, skipped, "".join(_diff(files, original)))


def _diff(files: dict[str, str | None], original: Path) -> Iterator[str]:
    for path, text in files.items():
        source = original / path
        known = source.is_file() and not source.is_symlink()
        yield unified(path, _shown(path, source.read_bytes()) if known else None, text)


def _shown(path: str, data: bytes) -> str:
    try:
        return syntax.read(path, data)
    except syntax.UnreadableError:
        return data.decode("utf-8", errors="backslashreplace")
