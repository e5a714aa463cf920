"""One line on what the figures of a run show and what they do not show.

A change is shown where its 95% interval, paired by task, excludes zero; every other one is named with what was counted,
so that a figure that fell cannot hide one that stayed. Fewer tasks than `FEW` show nothing: five that all go one way
are still p = 0.0625 by the exact test.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Protocol

from woodshed.evals.measures import Figure, write_figure
from woodshed.evals.statistics import Difference, Estimate

HEADLINE = ("solved", "reward", "invalid_calls")
"""Keys of the measures in the line, the most important first."""

FEW = 6  # tasks


class ComparedMeasure(Protocol):
    """A measure before and after."""

    @property
    def measure(self) -> Figure: ...
    @property
    def before(self) -> Estimate: ...
    @property
    def after(self) -> Estimate | None: ...
    @property
    def change(self) -> Difference | None: ...


def conclude(rows: Iterable[ComparedMeasure], *, num_seeds: int = 1) -> str:
    """The line; empty if nothing was measured twice."""
    row_of = {row.measure.key: row for row in rows}
    headline = [row_of[key] for key in HEADLINE if key in row_of]
    if not any(row.after for row in headline):
        return ""
    unmeasured = [row.measure.label for row in headline if row.change is None or row.change.value is None]
    measured = [row for row in headline if row.measure.label not in unmeasured]
    shown = [r for r in measured if r.change and r.change.is_clear and r.change.num_tasks >= FEW]
    unclear = [row for row in measured if row not in shown]
    scope = "one seed" if num_seeds == 1 else f"{num_seeds} seeds"
    parts = [
        f"Shown ({scope}): {_list([_moved(row) for row in shown])}."
        if shown
        else f"Shown ({scope}): nothing."
    ]
    if unclear:
        parts.append(
            f"Not shown, because within noise: a change in {_list([_stayed(row) for row in unclear])}."
        )
    if unmeasured:
        parts.append(f"Not measured: {_list(unmeasured)}.")
    return " ".join(parts)


def _moved(row: ComparedMeasure) -> str:
    value = (row.change.value if row.change else None) or 0.0
    better = (value < 0) == (row.measure.better == "lower")
    verb = "fell" if value < 0 else "rose"
    return f"{row.measure.label} {verb} from {_sides(row, ' to ')}{'' if better else ', which is worse'}"


def _stayed(row: ComparedMeasure) -> str:
    return f"{row.measure.label} ({_sides(row, ' before, ')} after)"


def _sides(row: ComparedMeasure, between: str) -> str:
    return between.join(_said(row.measure, side) for side in (row.before, row.after) if side)


def _said(measure: Figure, figure: Estimate) -> str:
    """A share of attempts as a count, anything else as it is written."""
    if measure.key == "solved" and figure.whole:
        return f"{figure.part:.0f} of {figure.whole:.0f}"
    return write_figure(measure, figure.value)


def _list(parts: Sequence[str]) -> str:
    return "; ".join(parts[:-1]) + "; and " + parts[-1] if len(parts) > 2 else " and ".join(parts)
