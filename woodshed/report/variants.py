"""Variants on a page: runs grouped by recipe, with the figures of each group.

Runs whose recipes differ in nothing but name, note and seed are seeds of one variant; so are runs that were named
together. Variants are named by the settings in which they differ. Where a variant has several seeds, they are a level
above the tasks (`statistics.difference_over_seeds`): its interval says what another seed would give.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from woodshed.evals import comparison, passes, statistics
from woodshed.evals.measures import Figure, Measure, pass_figure
from woodshed.evals.statistics import Difference, Estimate, Sums
from woodshed.report.gather import SOLVED, Line, RunRecords

IGNORED_SETTINGS = ("name", "note", "seed", "runs")
MAX_DIFFERENCES = 3  # more settings than this do not make a readable name

Seeds = Sequence[Sequence[Line]]  # attempts of one evaluation, a list per seed


@dataclass(frozen=True)
class Variant:
    """One way of training (or one evaluation), in one or several seeds."""

    name: str
    runs: tuple[RunRecords, ...]

    def sides(self) -> tuple[Seeds, Seeds]:
        """Attempts of the first and of the last evaluation; the second is empty where no seed has two.

        Once a seed has two evaluations, those that have only one so far enter neither side.
        """
        evaluations = [list(run.evaluations().values()) for run in self.runs]
        if any(len(several) > 1 for several in evaluations):
            complete = [several for several in evaluations if len(several) > 1]
            return [several[0] for several in complete], [several[-1] for several in complete]
        return [several[0] for several in evaluations if several], []

    def doubts(self, other: Variant) -> tuple[list[str], list[str]]:
        """Reasons that forbid a comparison of both variants' runs, and cautions; the other may be this one."""
        runs = {run.path: run.manifest for run in (*self.runs, *other.runs)}
        return comparison.doubts([(str(path), manifest) for path, manifest in runs.items()])

    @property
    def num_copies(self) -> int:
        """Runs that repeat another one's recipe and seed: they are no further seeds."""
        return len(self.runs) - len({_key(run, ("name", "note", "runs")) for run in self.runs})

    @property
    def num_unpaired(self) -> int:
        """Tasks that some seed did not attempt, or has only void attempts at; they enter no figure."""
        before, after = self.sides()
        tasks = [{line.task_id for line in lines if not line.is_void} for lines in (*before, *after)]
        return len(set.union(*tasks) - set.intersection(*tasks)) if len(before) > 1 else 0


@dataclass(frozen=True)
class VariantRow:
    """One measure of one variant."""

    measure: Figure
    before: Estimate
    after: Estimate | None
    change: Difference | None
    seeds: tuple[tuple[float | None, ...], ...]
    """Before and after, the figure of every seed alone; () where there is one seed."""


def by_recipe(groups: Sequence[Sequence[RunRecords]]) -> list[Variant]:
    """The variants in order of appearance. A group of several is a variant; single ones are matched by their
    recipes."""
    grouped: dict[str, list[RunRecords]] = {}
    for number, group in enumerate(groups):
        key = _key(group[0], IGNORED_SETTINGS) if len(group) == 1 else f"group {number}"
        grouped.setdefault(key, []).extend(group)
    flat = [_flat(group[0].settings) for group in grouped.values()]
    names = {name for settings in flat for name in settings} - set(IGNORED_SETTINGS)
    differing = sorted(n for n in names if len({json.dumps(s.get(n), default=str) for s in flat}) > 1)
    return [
        Variant(_name(group, settings, differing), tuple(group))
        for group, settings in zip(grouped.values(), flat, strict=True)
    ]


def _key(run: RunRecords, without: Sequence[str]) -> str:
    settings = {name: value for name, value in run.settings.items() if name not in without}
    return json.dumps(settings, sort_keys=True, default=str)


def _name(group: Sequence[RunRecords], settings: Mapping[str, Any], differing: Sequence[str]) -> str:
    if differing and len(differing) <= MAX_DIFFERENCES:
        return ", ".join(f"{name} = {settings.get(name)}" for name in differing)
    return " + ".join(run.name for run in group)


def _flat(tree: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for name, value in tree.items():
        flat |= _flat(value, f"{prefix}{name}.") if isinstance(value, Mapping) else {prefix + name: value}
    return flat


def rows(variant: Variant, measures: Sequence[Measure]) -> list[VariantRow]:
    """Measures of a variant: first evaluation, last one, and the change, paired by task."""
    before, after = variant.sides()
    if not before:
        return []
    table_rows = []
    for measure in measures:
        by_seed = [tuple(estimate(measure, [lines]).value for lines in side) for side in (before, after)]
        table_rows.append(
            VariantRow(
                measure,
                estimate(measure, before),
                estimate(measure, after) if after else None,
                change(measure, before, after) if after else None,
                tuple(by_seed) if len(before) > 1 else (),
            )
        )
    return table_rows


def pass_rows(variant: Variant) -> list[VariantRow]:
    """pass@k and best@k of a variant, where its tasks have several attempts; like `rows`."""
    sides = variant.sides()
    tables = [[passes.by_task(_tries(lines)) for lines in side] for side in sides]
    table_rows = []
    for name in passes.headline(table for side in tables for table in side):
        before, after = ([table[name] for table in side] for side in tables)
        table_rows.append(
            VariantRow(
                pass_figure(name),
                passes.estimate(before),
                passes.estimate(after) if after else None,
                statistics.difference_over_seeds(before, after, is_share=True) if after else None,
                tuple(tuple(passes.estimate([seed]).value for seed in side) for side in (before, after))
                if len(before) > 1
                else (),
            )
        )
    return table_rows


def _tries(lines: Sequence[Line]) -> list[passes.Try]:
    judged = [line for line in lines if line.result in SOLVED]
    return [passes.Try(line.task_id, line.result == "solved", line.promise) for line in judged]


def against(first: Variant, other: Variant, measures: Sequence[Measure]) -> list[tuple[Measure, Difference]]:
    """Measures of another variant minus the first one's, at the last evaluation of each, paired by task."""
    ends = [after or before for before, after in (first.sides(), other.sides())]
    if not all(ends):
        return []
    return [(measure, change(measure, *ends)) for measure in measures]


def estimate(measure: Measure, seeds: Seeds) -> Estimate:
    """A measure over attempts; void ones enter no figure."""
    is_share = measure.kind != "count"
    if len(seeds) > 1:
        return statistics.rate_over_seeds([_sums(measure, lines) for lines in seeds], is_share=is_share)
    return statistics.rate(*_columns(measure, seeds[0]), is_share=is_share)


def change(measure: Measure, before: Seeds, after: Seeds) -> Difference:
    """Change, after minus before, paired by task."""
    is_share = measure.kind != "count"
    sides = [[_sums(measure, lines) for lines in seeds] for seeds in (before, after)]
    if max(map(len, sides)) > 1:
        return statistics.difference_over_seeds(*sides, is_share=is_share)
    return statistics.difference(sides[0][0], sides[1][0], is_share=is_share)


def _sums(measure: Measure, lines: Sequence[Line]) -> Sums:
    return statistics.sums(*_columns(measure, lines))


def _columns(measure: Measure, lines: Sequence[Line]) -> tuple[list[float], list[float], list[str]]:
    counted = [line for line in lines if not line.is_void]
    pairs = [line.sums[measure.key] for line in counted]
    return [part for part, _ in pairs], [whole for _, whole in pairs], [line.task_id for line in counted]
