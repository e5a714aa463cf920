"""Reading and writing of figures for the documents.

Values that a file holds as [lowest, median, highest] are written with their spread. Bars stand beside the figure that
they judge, and whether one is met is worked out here.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parent.parent / "results"


@functools.cache
def load(name: str) -> Any:
    """One file of results.

    Raises:
        FileNotFoundError: there is none of that name.
    """
    return json.loads((RESULTS / f"{name}.json").read_text(encoding="utf-8"))


def table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A table of Markdown."""
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def percent(share: float) -> str:
    return f"{100 * share:.1f} %"


def interval(share: Mapping[str, float]) -> str:
    return f"{percent(share['value'])} [{100 * share['low']:.1f}, {100 * share['high']:.1f}]"


def points(change: Sequence[float]) -> str:
    """A change of a share with the ends of its interval, in percentage points."""
    value, low, high = (f"{100 * end:+.1f}" for end in change)
    return f"{value} pp [{low}, {high}]"


def spread(value: float | Sequence[float], digits: int = 2) -> str:
    """A number, or the median of three with the lowest and highest."""
    if isinstance(value, int | float):
        return f"{value:,.{digits}f}"
    low, median, high = (f"{end:,.{digits}f}" for end in value)
    return f"{median} ({low} to {high})"


def middle(value: float | Sequence[float]) -> float:
    return float(value) if isinstance(value, int | float) else float(value[1])


def judged(is_met: bool) -> str:
    return "met" if is_met else "**missed**"


def counted(share: Mapping[str, float]) -> str:
    """A share with its interval and what it was counted from."""
    return f"{interval(share)}, {share['part']:.0f} of {share['whole']:.0f}"
