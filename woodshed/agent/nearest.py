"""The text most like one that is not there: a path, or lines of a file. An attempt brings both sides, of any size."""

from __future__ import annotations

import difflib
import heapq
from collections.abc import Iterable

from woodshed.agent import pasting
from woodshed.agent.output import QUOTED_CHARS, cut

MOST_COMPARED = 1 << 20
"""Characters that are looked at to find the nearest text."""
MOST_RATIOS = 200
"""Texts that are compared in earnest, and lines in which an invisible difference is looked for."""


def nearest(wanted: str, texts: Iterable[str], least: float) -> str:
    """The text most like another one, of those of a similarity of at least `least` (`difflib`); "" if there is none.

    Comparing costs up to the cube of a text's length, and an attempt brings both: so texts longer than QUOTED_CHARS are
    compared by their beginnings, the most promising ones first, and the rest of very many is not looked at.
    """
    matcher = difflib.SequenceMatcher(None, b=wanted[:QUOTED_CHARS])
    left, promising = MOST_COMPARED, []
    for text in dict.fromkeys(texts):
        left -= min(len(text), QUOTED_CHARS) + 1
        if left < 0:
            break
        matcher.set_seq1(text[:QUOTED_CHARS])
        if matcher.real_quick_ratio() >= least and (bound := matcher.quick_ratio()) >= least:
            promising.append((bound, text))
    best = (least, "")
    for bound, text in heapq.nlargest(MOST_RATIOS, promising):
        if bound < best[0]:
            break
        matcher.set_seq1(text[:QUOTED_CHARS])
        best = max(best, (matcher.ratio(), text))
    return best[1]


def closest(data: bytes, old: str) -> str:
    """The lines that look most like `old`, found by its longest line, and the first difference that cannot be seen."""
    lines, wanted = pasting.lines_of(data), old.replace("\r\n", "\n").strip("\n").split("\n")
    anchor = max(range(len(wanted)), key=lambda n: len(wanted[n].strip()))
    stripped = [line.strip() for line in lines]
    near = nearest(wanted[anchor].strip(), stripped, 0.6)
    if not near:
        return ""
    first = max(0, stripped.index(near) - anchor)
    shown = lines[first : first + min(len(wanted), 6)]
    where = f"line {first + 1}" if len(shown) == 1 else f"lines {first + 1}-{first + len(shown)}"
    last = len(wanted) - 1
    unseen = (
        f"; in line {first + n + 1}, {said}"
        for n, (line, other) in enumerate(zip(lines[first:], wanted[:MOST_RATIOS], strict=False))
        if (said := pasting.difference(line, other, begins=n > 0, ends=n < last))
    )
    told = next(unseen, "")
    return "\n".join([f"{told}; closest, {where}:", *(cut(line) for line in shown)])
