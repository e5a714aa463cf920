"""What an attempt changed: whole text files, the only thing that crosses from a rollout to grading."""

from __future__ import annotations

import difflib
import os
from collections.abc import Iterator, Sequence
from pathlib import Path

from woodshed.records import Patch
from woodshed.sandbox import Change, Sandbox

LEFTOVERS = ("__pycache__", ".pytest_cache", ".hypothesis", ".mypy_cache", ".ruff_cache")
"""Folders that tools leave behind; nobody wrote them on purpose."""
MOST_FILES = 1000
MOST_BYTES = 8 << 20
"""Of all files of a patch together; a single one may be larger where `max_bytes` is."""
MOST_SKIPPED = 200
MOST_PAIRS = 4_000_000
"""Lines before times lines after; more are shown as replaced instead of compared, which takes the product in time."""


def extract(sandbox: Sandbox, original: Path, *, max_bytes: int, allowed: Sequence[str] = ()) -> Patch:
    """The changes of a sandbox against `original`, the host folder with the workspace as it was given.

    Bounded whatever the attempt left behind: `max_bytes` bounds each file, MOST_FILES and MOST_BYTES all of them, and
    what does not cross is named in `Patch.skipped`, with the reason. Where not all fit, files at or below the `allowed`
    paths come first, and what is new comes last.

    Raises:
        SandboxError: the sandbox was lost.
    """
    files: dict[str, str | None] = {}
    skipped: dict[str, str] = {}
    left = max(MOST_BYTES, max_bytes)

    def rank(change: Change) -> tuple[bool, bool]:
        inside = any(change.path == place or change.path.startswith(f"{place}/") for place in allowed)
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
        elif len(files) == MOST_FILES or (change.kind != "deleted" and change.size > left):
            skipped[name] = f"past {MOST_FILES} files or {max(MOST_BYTES, max_bytes)} bytes"
        elif change.kind == "deleted":
            files[name] = None
        else:
            text = _text(sandbox, name, skipped)
            if text is not None:
                files[name] = text
                left -= change.size
    files = {path: files[path] for path in sorted(files)}
    return Patch(files, _shortened(skipped), "".join(_diff(files, original)))


def _text(sandbox: Sandbox, path: str, skipped: dict[str, str]) -> str | None:
    try:
        return sandbox.read(path).decode("utf-8")
    except UnicodeDecodeError:
        skipped[path] = "not UTF-8"
    except OSError as error:  # it may not be read, or its path is too long to name
        skipped[path] = f"cannot be read: {error.strerror}"
    return None


def _shortened(skipped: dict[str, str]) -> dict[str, str]:
    """At most MOST_SKIPPED of them, and how many more there are."""
    if len(skipped) <= MOST_SKIPPED:
        return skipped
    return {**dict(list(skipped.items())[:MOST_SKIPPED]), "...": f"and {len(skipped) - MOST_SKIPPED} more"}


def _diff(files: dict[str, str | None], original: Path) -> Iterator[str]:
    for path, text in files.items():
        before = _original(original / path)
        old = _quoted(f"a/{path}") if before is not None else "/dev/null"
        new = _quoted(f"b/{path}") if text is not None else "/dev/null"
        # Split at \n alone: a patch counts other line separators as part of the line.
        for line in _unified(_lines(before or ""), _lines(text or ""), old, new):
            yield line if line.endswith("\n") else f"{line}\n\\ No newline at end of file\n"


def _original(file: Path) -> str | None:
    try:
        known = file.is_file() and not file.is_symlink()
        return file.read_bytes().decode("utf-8", errors="backslashreplace") if known else None
    except OSError:  # a path that is too long to name
        return None


def _unified(before: list[str], after: list[str], old: str, new: str) -> Iterator[str]:
    if not before or not after or len(before) * len(after) <= MOST_PAIRS:
        yield from difflib.unified_diff(before, after, old, new)
    elif before != after:
        yield f"--- {old}\n+++ {new}\n@@ -1,{len(before)} +1,{len(after)} @@\n"
        yield from (f"-{line}" for line in before)
        yield from (f"+{line}" for line in after)


def _quoted(path: str) -> str:
    """A path as git writes it in a patch: quoted where a control character would end the line."""
    if path.isprintable() and '"' not in path:
        return path
    inner = "".join(c if c.isprintable() and c not in '"\\' else _escaped(c) for c in path)
    return f'"{inner}"'


def _escaped(character: str) -> str:
    return "".join(f"\\{byte:03o}" for byte in character.encode())


def _lines(text: str) -> list[str]:
    lines = text.split("\n")
    return [f"{line}\n" for line in lines[:-1]] + ([lines[-1]] if lines[-1] else [])
