"""Search for the text most similar to a missing one: a path, or lines of a file. Attempts supply both texts, which
may be of any size."""

from __future__ import annotations

import difflib
import heapq
from collections.abc import Iterable

from woodshed.agent import pasting
from woodshed.agent.output import QUOTED_CHARS, cut

MOST_COMPARED = 1 << 20
"""Limit of the characters that are compared to find the nearest text."""
MOST_RATIOS = 200
"""Limit of the texts whose exact similarity is computed, and of the lines searched for an invisible difference."""


def nearest(wanted: str, texts: Iterable[str], least: float) -> str:
    """The text most similar to `wanted`, with a ratio (`difflib`) of at least `least`; "" if there is none.

    A comparison takes up to cubic time in the length of the texts. So only the first QUOTED_CHARS characters are
    compared, the most promising texts first, and texts past MOST_COMPARED characters are ignored.
    """
    matcher = difflib.SequenceMatcher(None, b=wanted[:QUOTED_CHARS])
    chars_left, promising = MOST_COMPARED, []
    for text in dict.fromkeys(texts):
        chars_left -= min(len(text), QUOTED_CHARS) + 1
        if chars_left < 0:
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
    """The lines most similar to `old`, found by its longest line, and the first invisible difference."""
    lines, wanted = pasting.lines_of(data), old.replace("\r\n", "\n").strip("\n").split("\n")
    anchor = max(range(len(wanted)), key=lambda n: len(wanted[n].strip()))
    stripped = [line.strip() for line in lines]
    near = nearest(wanted[anchor].strip(), stripped, 0.6)
    if not near:
        return ""
    first = max(0, stripped.index(near) - anchor)
    shown = lines[first : first + min(len(wanted), 6)]
    span = f"line {first + 1}" if len(shown) == 1 else f"lines {first + 1}-{first + len(shown)}"
    last = len(wanted) - 1
    unseen = (
        f"; in line {first + n + 1}, {text}"
        for n, (line, other) in enumerate(zip(lines[first:], wanted[:MOST_RATIOS], strict=False))
        if (text := pasting.difference(line, other, begins=n > 0, ends=n < last))
    )
    first_difference = next(unseen, "")
    return "\n".join([f"{first_difference}; closest, {span}:", *(cut(line) for line in shown)])
