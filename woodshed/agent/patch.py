"""Changes of an attempt as whole text files: all that grading receives of a rollout."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from pathlib import Path

from woodshed.pysource import syntax
from woodshed.records import Patch
from woodshed.sandbox import Change, Sandbox
from woodshed.tasks.diff import unified

LEFTOVERS = ("__pycache__", ".pytest_cache", ".hypothesis", ".mypy_cache", ".ruff_cache")
"""Folders that tools create as a side effect."""
MOST_FILES = 1000
MOST_BYTES = 8 << 20
"""Limit for all files of a patch together; or `max_bytes`, if that is larger."""
MOST_SKIPPED = 200
NO_SOURCE = "not Python source"
"""Beginning of the reason for skipping a Python file that no interpreter could read."""


def extract(sandbox: Sandbox, original: Path, *, max_bytes: int, allowed: Sequence[str] = ()) -> Patch:
    """The changes of a sandbox against `original`, the host folder with the original workspace.

    The size is bounded: `max_bytes` limits each file, MOST_FILES and MOST_BYTES all of them. Skipped files are named in
    `Patch.skipped`, with the reason. Files at or below the `allowed` paths come first, new files last.

    Raises:
        SandboxError: the sandbox was lost.
    """
    files: dict[str, str | None] = {}
    skipped: dict[str, str] = {}
    bytes_left, num_read = max(MOST_BYTES, max_bytes), 0

    def rank(change: Change) -> tuple[bool, bool]:
        inside = any(
            change.path == allowed_path or change.path.startswith(f"{allowed_path}/")
            for allowed_path in allowed
        )
        return not inside, change.kind == "added"

    for change in sorted(sandbox.diff(), key=rank):  # stable: by path among equals
        if change.file_type == "dir" or set(change.path.split("/")) & set(LEFTOVERS):
            continue
        name = os.fsencode(change.path).decode("utf-8", "backslashreplace")
        if name != change.path:
            skipped[name] = "its name is not UTF-8"
        elif change.kind != "deleted" and change.file_type != "file":
            skipped[name] = "not a regular file"
        elif change.kind != "deleted" and change.size > max_bytes:
            skipped[name] = "too large"
        elif num_read == MOST_FILES or (change.kind != "deleted" and change.size > bytes_left):
            skipped[name] = f"past {MOST_FILES} files or {max(MOST_BYTES, max_bytes)} bytes"
        elif change.kind == "deleted":
            files[name] = None
            num_read += 1
        else:  # files that turn out not to be text count, too
            num_read, bytes_left = num_read + 1, bytes_left - change.size
            text = _text(sandbox, name, skipped, change.size)
            if text is not None:
                files[name] = text
    files = {path: files[path] for path in sorted(files)}
    return Patch(files, _shortened(skipped), "".join(_diff(files, original)))


def _text(sandbox: Sandbox, path: str, skipped: dict[str, str], size: int) -> str | None:
    try:
        return syntax.read(path, sandbox.read(path, size))
    except syntax.UnreadableError as error:
        skipped[path] = f"{NO_SOURCE}: {error}" if path.endswith(".py") else str(error)
    except OSError as error:  # no permission, or a path that is too long
        skipped[path] = f"cannot be read: {error.strerror}"
    return None


def _shortened(skipped: dict[str, str]) -> dict[str, str]:
    """At most MOST_SKIPPED of the paths, and the number of the rest."""
    if len(skipped) <= MOST_SKIPPED:
        return skipped
    return {**dict(list(skipped.items())[:MOST_SKIPPED]), "...": f"and {len(skipped) - MOST_SKIPPED} more"}


def _diff(files: dict[str, str | None], original: Path) -> Iterator[str]:
    for path, text in files.items():
        yield unified(path, _original(path, original / path), text)


def _original(path: str, file: Path) -> str | None:
    try:
        data = file.read_bytes() if file.is_file() and not file.is_symlink() else None
        return None if data is None else syntax.read(path, data)
    except syntax.UnreadableError:
        return file.read_bytes().decode("utf-8", errors="backslashreplace")
    except OSError:  # a path that is too long
        return None
