"""Runs side by side: which of them are seeds of one arm, and what the arms' figures are.

Runs whose recipes differ in nothing but name, note and seed are seeds of one arm. Arms are named by the settings in
which they differ.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from woodshed.evals import statistics
from woodshed.evals.measures import MEASURES, Measure
from woodshed.evals.statistics import Difference, Estimate
from woodshed.report.gather import Line, Story

NOT_AN_ARM = ("name", "note", "seed", "runs")
MAX_DIFFERENCES = 3  # more settings than this do not make a readable name


@dataclass(frozen=True)
class Arm:
    """One way of training (or one evaluation), in one or several seeds."""

    name: str
    stories: tuple[Story, ...]

    def sides(self) -> tuple[list[Line], list[Line]]:
        """Attempts of the first and of the last evaluation, seeds pooled; the second is empty where there is one."""
        before: list[Line] = []
        after: list[Line] = []
        for story in self.stories:
            found = list(story.evaluations().values())
            before += found[0] if found else []
            after += found[-1] if len(found) > 1 else []
        return before, after


@dataclass(frozen=True)
class Row:
    """One measure of one arm."""

    measure: Measure
    before: Estimate
    after: Estimate | None
    change: Difference | None


def arms(stories: Sequence[Story]) -> list[Arm]:
    """The arms in order of appearance."""
    groups: dict[str, list[Story]] = {}
    for story in stories:
        kept = {name: value for name, value in story.settings.items() if name not in NOT_AN_ARM}
        groups.setdefault(json.dumps(kept, sort_keys=True, default=str), []).append(story)
    flat = [_flat(group[0].settings) for group in groups.values()]
    names = {name for settings in flat for name in settings} - set(NOT_AN_ARM)
    differing = sorted(n for n in names if len({json.dumps(s.get(n), default=str) for s in flat}) > 1)
    return [
        Arm(_name(group, settings, differing), tuple(group))
        for group, settings in zip(groups.values(), flat, strict=True)
    ]


def _name(group: Sequence[Story], settings: Mapping[str, Any], differing: Sequence[str]) -> str:
    if differing and len(differing) <= MAX_DIFFERENCES:
        return ", ".join(f"{name} = {settings.get(name)}" for name in differing)
    return " + ".join(story.name for story in group)


def _flat(tree: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for name, value in tree.items():
        flat |= _flat(value, f"{prefix}{name}.") if isinstance(value, Mapping) else {prefix + name: value}
    return flat


def rows(arm: Arm) -> list[Row]:
    """Every measure of an arm: first evaluation, last one, and the change, paired by task."""
    before, after = arm.sides()
    if not before:
        return []
    return [
        Row(
            measure,
            estimate(measure, before),
            estimate(measure, after) if after else None,
            change(measure, before, after) if after else None,
        )
        for measure in MEASURES
    ]


def against(first: Arm, other: Arm) -> list[tuple[Measure, Difference]]:
    """Every measure of another arm minus the first one's, at the last evaluation of each, paired by task."""
    ends = [after or before for before, after in (first.sides(), other.sides())]
    if not all(ends):
        return []
    return [(measure, change(measure, *ends)) for measure in MEASURES]


def estimate(measure: Measure, lines: Sequence[Line]) -> Estimate:
    """A measure over attempts; void ones enter no figure."""
    return statistics.rate(*_columns(measure, lines), is_share=measure.kind != "count")


def change(measure: Measure, before: Sequence[Line], after: Sequence[Line]) -> Difference:
    """After minus before, paired by task."""
    sides = [statistics.sums(*_columns(measure, lines)) for lines in (before, after)]
    return statistics.difference(*sides, is_share=measure.kind != "count")


def _columns(measure: Measure, lines: Sequence[Line]) -> tuple[list[float], list[float], list[str]]:
    kept = [line for line in lines if not line.is_void]
    pairs = [line.sums[measure.key] for line in kept]
    return [part for part, _ in pairs], [whole for _, whole in pairs], [line.task_id for line in kept]
