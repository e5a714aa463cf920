"""The difference of two texts as git writes it."""

from __future__ import annotations

import difflib
import re


def unified(path: str, before: str | None, after: str | None) -> str:
    """The difference of two versions of a file (None: not there) as git writes it.

    Lines end at \\n alone, as a patch counts them: other line separators are part of the line.
    """
    names = (
        f"a/{path}" if before is not None else "/dev/null",
        f"b/{path}" if after is not None else "/dev/null",
    )
    old, new = (re.findall(r"[^\n]*\n|[^\n]+", text or "") for text in (before, after))
    lines = difflib.unified_diff(old, new, *names)
    return "".join(
        line if line.endswith("\n") else f"{line}\n\\ No newline at end of file\n" for line in lines
    )
