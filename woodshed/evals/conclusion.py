"""A few sentences on what the figures of a run show and what they do not show.

A change is shown where its 95% interval, paired by task, excludes zero; every other one is named with what was counted,
so that a figure that fell cannot hide one that stayed. Fewer tasks than `FEW` show nothing: five that all go one way
are still p = 0.0625 by the exact test.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Literal, Protocol

from woodshed.evals.measures import Figure, write_figure
from woodshed.evals.statistics import Difference, Estimate

HEADLINE = ("solved", "reward", "invalid_calls")
"""Keys of the measures that are always named, the most important first."""
WATCHED = ("flagged", "untested")
"""Keys of those that are named where they moved."""
FEW = 6  # tasks

Standing = Literal["better", "worse", "changed", "within noise", "too few tasks", "not measured"]


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


def standing(measure: Figure, change: Difference | None) -> Standing:
    """Standing of a change, in the same words in every table and sentence."""
    if change is None or change.value is None:
        return "not measured"
    if change.num_tasks < FEW:
        return "too few tasks"
    if not change.is_clear:
        return "within noise"
    if not measure.better:
        return "changed"
    return "better" if (change.value < 0) == (measure.better == "lower") else "worse"


def why_unclear(row: ComparedMeasure) -> str:
    """Reason why a change is not shown although the intervals of both sides do not touch; "" where they do, or it is.

    A side's interval says how well its figure alone is known. The change is judged by the tasks that changed, of which
    few prove nothing however alike they are, and by how unlike the seeds are.
    """
    before, after, change = row.before, row.after, row.change
    if after is None or change is None or standing(row.measure, change) != "within noise":
        return ""
    if None in (before.low, before.high, after.low, after.high) or not _are_apart(before, after):
        return ""
    if change.num_changed is not None and change.num_changed < FEW:
        number = f"only {change.num_changed} of {_counted(change.num_tasks, 'task')} changed"
        return f"the intervals do not touch, but {number}, and fewer than {FEW} may be chance"
    return "the intervals do not touch, but tasks or seeds changed too differently to say so of others"


def _are_apart(one: Estimate, other: Estimate) -> bool:
    return (one.high or 0.0) < (other.low or 0.0) or (other.high or 0.0) < (one.low or 0.0)


def conclude(
    rows: Iterable[ComparedMeasure], *, num_seeds: int = 1, sides: tuple[str, str] = ("before", "after")
) -> str:
    """Say what got better, what got worse and what stayed within noise; "" if nothing was measured twice."""
    row_of = {row.measure.key: row for row in rows}
    headline = [row_of[key] for key in HEADLINE if key in row_of]
    if not any(row.after for row in headline):
        return ""
    watched = [row_of[key] for key in WATCHED if key in row_of]
    moved = {
        verdict: [row for row in (*headline, *watched) if standing(row.measure, row.change) == verdict]
        for verdict in ("better", "worse")
    }
    stayed = {
        verdict: [row for row in headline if standing(row.measure, row.change) == verdict]
        for verdict in ("within noise", "too few tasks", "not measured")
    }
    num_tasks = max((row.change.num_tasks for row in headline if row.change), default=0)
    parts = [_moves(moved["better"], moved["worse"])]
    if stayed["within noise"]:
        parts.append(f"Within noise: {_list([_stayed(row, sides) for row in stayed['within noise']])}.")
    if stayed["too few tasks"]:
        parts.append(
            f"Too few tasks to tell: {_list([_stayed(row, sides) for row in stayed['too few tasks']])}."
        )
    if stayed["not measured"]:
        parts.append(f"Not measured: {_list([row.measure.label for row in stayed['not measured']])}.")
    parts.append(f"{_counted(num_tasks, 'task')}, {_counted(num_seeds, 'seed')}.")
    return " ".join(parts)


def _moves(better: Sequence[ComparedMeasure], worse: Sequence[ComparedMeasure]) -> str:
    if not better and not worse:
        return "Nothing moved beyond noise."
    said = [
        f"{name} beyond noise: {_list([_moved(row) for row in rows])}."
        if rows
        else f"Nothing got {name.lower()} beyond noise."
        for name, rows in (("Better", better), ("Worse", worse))
    ]
    return " ".join(said if better else reversed(said))  # what moved comes first


def _moved(row: ComparedMeasure) -> str:
    value = (row.change.value if row.change else None) or 0.0
    return f"{row.measure.label} {'fell' if value < 0 else 'rose'} from {_sides(row, ' to ')}"


def _stayed(row: ComparedMeasure, sides: tuple[str, str]) -> str:
    return f"{row.measure.label} ({_sides(row, f' {sides[0]}, ')} {sides[1]})"


def _sides(row: ComparedMeasure, between: str) -> str:
    return between.join(_said(row.measure, side) for side in (row.before, row.after) if side)


def _said(measure: Figure, figure: Estimate) -> str:
    """A share of attempts as a count, anything else as it is written."""
    if measure.key == "solved" and figure.whole:
        return f"{figure.part:.0f} of {figure.whole:.0f}"
    return write_figure(measure, figure.value)


def _counted(number: int, what: str) -> str:
    return f"{number} {what}{'s' if number != 1 else ''}"


def _list(parts: Sequence[str]) -> str:
    return "; ".join(parts[:-1]) + "; and " + parts[-1] if len(parts) > 2 else " and ".join(parts)
