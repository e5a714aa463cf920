"""The difference of two texts as git writes it."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterator

MOST_PAIRS = 4_000_000
"""Pairs of lines above which a file is shown as wholly replaced: the time to compare grows with their number."""


def unified(path: str, before: str | None, after: str | None) -> str:
    """The difference of two versions of a file (None: not there) as git writes it.

    Lines end at \\n alone, as a patch counts them: other line separators are part of the line.
    """
    old = _quoted(f"a/{path}") if before is not None else "/dev/null"
    new = _quoted(f"b/{path}") if after is not None else "/dev/null"
    lines = _changes(_lines(before or ""), _lines(after or ""), old, new)
    return "".join(
        line if line.endswith("\n") else f"{line}\n\\ No newline at end of file\n" for line in lines
    )


def _changes(before: list[str], after: list[str], old: str, new: str) -> Iterator[str]:
    if not before or not after or len(before) * len(after) <= MOST_PAIRS:
        yield from difflib.unified_diff(before, after, old, new)
    elif before != after:
        yield f"--- {old}\n+++ {new}\n@@ -1,{len(before)} +1,{len(after)} @@\n"
        yield from (f"-{line}" for line in before)
        yield from (f"+{line}" for line in after)


def _lines(text: str) -> list[str]:
    return re.findall(r"[^\n]*\n|[^\n]+", text)


def _quoted(path: str) -> str:
    """A path as git writes it in a patch: quoted where a control character would end the line."""
    if path.isprintable() and '"' not in path:
        return path
    inner = "".join(c if c.isprintable() and c not in '"\\' else _escaped(c) for c in path)
    return f'"{inner}"'


def _escaped(character: str) -> str:
    return "".join(f"\\{byte:03o}" for byte in character.encode())
