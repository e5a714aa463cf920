"""Small curves as SVG geometry: no plotting library, a few hundred bytes each, readable in print and in the dark."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

WIDTH, HEIGHT = 250, 76  # pixels of the drawing; labels stand outside


@dataclass(frozen=True)
class Line:
    """One series, ready to draw."""

    name: str
    points: str
    """ "x,y x,y": an SVG polyline."""
    dots: tuple[tuple[float, float], ...]
    last: str
    """Its newest value, as people read it."""


@dataclass(frozen=True)
class Curve:
    """Several series over the same steps."""

    title: str
    lines: tuple[Line, ...]
    low: str
    high: str
    first_step: int
    last_step: int


def draw(title: str, series: Mapping[str, Sequence[tuple[int, float]]]) -> Curve | None:
    """Series of (step, value) in one frame, or None where there is nothing to see. Not-a-numbers are left out."""
    kept = {name: [(x, y) for x, y in points if math.isfinite(y)] for name, points in series.items()}
    kept = {name: points for name, points in kept.items() if points}
    if not kept:
        return None
    steps = [x for points in kept.values() for x, _ in points]
    values = [y for points in kept.values() for _, y in points]
    low, high = _frame(values)
    lines = tuple(_line(name, points, min(steps), max(steps), low, high) for name, points in kept.items())
    return Curve(title, lines, short(low), short(high), min(steps), max(steps))


def short(value: float) -> str:
    """A number in at most about six characters: "0.0312", "412", "3.1e-07"."""
    if value == 0 or not math.isfinite(value):
        return f"{value:.0f}"
    if abs(value) >= 1e6 or abs(value) < 1e-4:
        return f"{value:.1e}"
    if abs(value) >= 100:
        return f"{value:.0f}"
    return f"{value:.3g}"


def _frame(values: Sequence[float]) -> tuple[float, float]:
    """Lowest and highest ordinate; a curve of one sign starts at zero, so that heights compare honestly."""
    low, high = min(*values, 0.0), max(*values, 0.0)
    return (low, high) if high > low else (low, low + 1.0)


def _line(
    name: str, points: Sequence[tuple[int, float]], first: int, last: int, low: float, high: float
) -> Line:
    span = max(last - first, 1)
    dots = tuple(
        (round((x - first) / span * WIDTH, 1), round((high - y) / (high - low) * HEIGHT, 1))
        for x, y in points
    )
    return Line(name, " ".join(f"{x:g},{y:g}" for x, y in dots), dots, short(points[-1][1]))
