"""The part of a patch that reaches the tests, and the lines that it brings. Standard library only."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path

from woodshed.pysource import syntax
from woodshed.records import Patch, Task
from woodshed.tasks import contents, paths

MAX_PATCH_CHARS = 4_000_000

MAX_PATCH_FILES = 1000
MOST_NOTES = 50

LINE_END = re.compile(rb"\r\n|\r|\n")
"""What ends a line for Python: a patch that counts otherwise must not hide where its code stands."""


def crossing(task: Task, patch: Patch) -> tuple[dict[str, bytes | None], dict[str, str]]:
    """The files of a patch that may reach the tests (None: deleted), and the others with the reason.

    Only files in the task's allowed paths cross, and never tests, configuration, or what Python runs at start.
    """
    taken: dict[str, bytes | None] = {}
    left = dict(patch.skipped)
    originals = {str(path) for path in protected_paths(task)}
    size = 0
    for path, text in sorted(patch.files.items()):
        if not paths.is_clean(path):
            left[path] = "not a plain path inside the workspace"
        elif not contents.is_allowed(task, path):
            left[path] = "outside the allowed paths"
        elif path in originals or paths.is_protected(path):
            left[path] = "a test, or configuration"
        elif any(str(parent) in taken for parent in Path(path).parents):
            left[path] = "below a file"
        elif size + len(text or "") > MAX_PATCH_CHARS or len(taken) == MAX_PATCH_FILES:
            left[path] = f"past {MAX_PATCH_CHARS} characters or {MAX_PATCH_FILES} files"
        else:
            size += len(text or "")
            try:
                taken[path] = None if text is None else syntax.write(path, text)
            except (UnicodeError, LookupError):
                left[path] = (
                    "no text in the encoding that it declares" if syntax.is_source(path) else "not UTF-8"
                )
    return taken, left


def added_lines(task: Task, path: str, data: bytes) -> list[int]:
    """Numbers (from 1, as Python counts) of the lines of a patched file that are nowhere in the original one."""
    original = contents.original(task, path)
    known = set(LINE_END.split(original.read_bytes())) if original.is_file() else set()
    return [number for number, line in enumerate(LINE_END.split(data), 1) if line not in known]


def lay(layer: Path, taken: Mapping[str, bytes | None]) -> list[str]:
    """Write files as a layer; the paths that are to be deleted."""
    layer.mkdir(exist_ok=True)
    layer.chmod(0o755)  # becomes the mode of /workspace
    for path, data in taken.items():
        if data is not None:
            target = layer / path
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_bytes(data)
    return [path for path, data in taken.items() if data is None]


def protected_paths(task: Task) -> list[Path]:
    root = contents.hidden_tests(task)
    return [file.relative_to(root) for file in sorted(root.rglob("*")) if not file.is_dir()]


def left_behind(left: Mapping[str, str]) -> list[str]:
    """A note for each of the first files that did not cross, with the reason."""
    return [f"left behind: {path[:200]} ({reason})" for path, reason in list(left.items())[:MOST_NOTES]]
