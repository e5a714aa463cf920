"""Curves of a page: Plotly figures over the steps of training, a line per variant.

A line is a variant's mean over its seeds. Its interval is the range of the seeds, or, where there is one seed, the 95%
interval over tasks that the metric came with: a band over neighbouring steps, a bar at points that stand apart, since
nothing was measured between them. A metric that never changes is named and not drawn. The first three
colours are of Okabe and Ito's; all of them, and the brighter ones that the browser takes in the dark, are far from one
another for colour-blind people, too. Lines differ in marker as well.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from woodshed.report.curve_list import CURVES, FAMILIES, Unit
from woodshed.report.gather import Point, RunRecords, number
from woodshed.report.variants import Variant
from woodshed.report.visible import label

COLOURS = ("#0072b2", "#d55e00", "#009e73", "#2d2a6e", "#4b5402", "#a773fb", "#0a1e04", "#9a2a76")
DASHES = ("solid", "dash", "dot", "dashdot")
MARKERS = ("circle", "square", "diamond", "cross", "x", "triangle-up", "star", "hexagon")
MAX_MARKED = 40  # points of a line beyond which markers only blur it
FEW_STEPS = 8  # up to this many every step has its tick, and an interval is drawn at its point
MAX_INTERVALS = 4  # lines of a chart beyond which their intervals hide one another
MAX_MAPS = 4  # curriculum pictures on a page

Series = Mapping[int, Point]  # step -> value, low, high


@dataclass(frozen=True)
class Chart:
    """One figure with its caption."""

    title: str
    figure: dict[str, Any]
    """Plotly's data and layout."""
    meaning: str = ""
    """A sentence on the quantity."""
    height: int = 220


def charts(variants: Sequence[Variant], constant: list[str] | None = None) -> list[Chart]:
    """All charts of these variants, in reading order; `constant` receives what did not change and has no chart."""
    wanted: list[Wanted] = [
        (each.title, each.meaning, each.unit, _lines(variants, each.phase, each.metrics)) for each in CURVES
    ]
    for variant in variants:  # these have many lines: a chart for every variant
        wanted += _of_variant(variant, f": {variant.name}" if len(variants) > 1 else "")
    wanted += [
        (
            "flagged rollouts",
            "Share of each step's attempts with a sign of cheating.",
            True,
            _flagged(variants),
        ),
        ("sampled tokens a second", "Of all attempts of a step together.", "", _throughput(variants)),
        ("mean level of the tasks drawn", "From 0, a branch, to 6, a sub-package.", "", _levels(variants)),
    ]
    figures = []
    for title, meaning, unit, lines in wanted:
        means = [(name, colour, dash, average(seeds)) for name, colour, dash, seeds in lines]
        if figure := chart(title, means, meaning, unit):
            figures.append(figure)
        elif constant is not None and (said := _throughout(means)):
            constant.append(f"{title}: {said}")
    return figures


Wanted = tuple[str, str, Unit, Iterable["Labelled"]]  # title, meaning, unit, lines


def _of_variant(variant: Variant, suffix: str) -> list[Wanted]:
    wanted: list[Wanted] = [
        (
            each.title + suffix,
            each.meaning,
            each.unit,
            _lines([variant], "train", _family([variant], each.prefix), each.missing),
        )
        for each in FAMILIES
    ]
    for phase, side in (("train", ""), ("eval", ", held out")):
        title = f"solved: on average, by any of k attempts, by the most promising of k{side}{suffix}"
        meaning = (
            "More attempts at a task find what one misses; the most promising is chosen without its verdict."
        )
        wanted.append((title, meaning, "share", _lines([variant], phase, _passes(variant, phase))))
    meaning = (
        "How much likelier the hint makes the faulty message: below 0 it speaks against it, as it should."
    )
    wanted.append((f"hint gain by class, nats a turn{suffix}", meaning, "", _gains(variant)))
    return wanted


Labelled = tuple[
    str, int, int, list[Series]
]  # name, number of its colour, number of its dash, a series per seed
Mean = tuple[str, int, int, Mapping[int, Point]]  # the same with the mean over the seeds


def chart(title: str, means: Sequence[Mean], meaning: str = "", unit: Unit = "") -> Chart | None:
    """A figure of several lines; None if no line has two points, or none of them changes."""
    longest = max((len(mean) for *_, mean in means), default=0)
    if longest < 2 or _throughout(means):
        return None
    traces: list[dict[str, Any]] = []
    for name, colour, dash, mean in means:
        if mean:
            traces += _traces(name, mean, colour, dash, has_interval=len(means) <= MAX_INTERVALS)
    names = [trace["name"] for trace in traces if trace.get("name")]
    legend = 18 * len(names) if len(names) > 1 else 0  # pixels below the plot
    ticks = {"dtick": 1} if longest <= FEW_STEPS and _is_dense(means) else {}
    span = {"range": [0, 1]} if unit else {"rangemode": "tozero"}
    percent = {"tickformat": ".0%"} if unit == "share" else {}
    layout = {
        "margin": {"l": 46, "r": 8, "t": 8, "b": 42 + legend},
        "xaxis": {"title": {"text": "step", "standoff": 8}, "zeroline": False, **ticks},
        "yaxis": {"automargin": True, **span, **percent},
        "showlegend": bool(legend),
        "legend": {"orientation": "h", "yref": "container", "y": 0, "yanchor": "bottom", "x": 0},
        "hovermode": "x unified",
    }
    return Chart(title, {"data": traces, "layout": layout}, meaning, 226 + legend)


def _throughout(means: Sequence[Mean]) -> str:
    """The values of lines of which none changes, "0.4" or "mean 0.4, largest 2"; "" where one does, or none is long."""
    values = [(name, [value for value, _, _ in mean.values()]) for name, *_, mean in means if mean]
    if max((len(several) for _, several in values), default=0) < 2:
        return ""
    if any(max(several) - min(several) > 1e-9 * max(map(abs, several)) for _, several in values):
        return ""
    if len({several[0] for _, several in values}) == 1:
        return short(values[0][1][0])
    return ", ".join(f"{name} {short(several[0])}" for name, several in values)


def _is_dense(means: Sequence[Mean]) -> bool:
    """True if neighbouring points of every line are one step apart."""
    return all(b - a == 1 for *_, mean in means for a, b in pairwise(mean))


def average(seeds: Sequence[Series]) -> dict[int, Point]:
    """Mean over the seeds that have a step, with their range; of one seed the value with its own interval."""
    points_of: dict[int, Point] = {}
    for step in sorted({step for series in seeds for step in series}):
        points = [series[step] for series in seeds if step in series and math.isfinite(series[step][0])]
        values = [value for value, _, _ in points]
        if len(values) > 1:
            points_of[step] = (sum(values) / len(values), min(values), max(values))
        elif values:
            points_of[step] = points[0]
    return points_of


def curriculum_maps(runs: Sequence[RunRecords]) -> list[Chart]:
    """Per run, the mean reward of every task it practised on, step by step, easiest tasks at the bottom."""
    return [figure for run in runs[:MAX_MAPS] if (figure := _map(run)) is not None]


def short(value: float) -> str:
    """A number in at most about six characters: "0.0312", "412", "3.1e-07"."""
    if value == 0 or not math.isfinite(value):
        return f"{value:.0f}"
    if abs(value) >= 1e6 or abs(value) < 1e-4:
        return f"{value:.1e}"
    if abs(value) >= 100:
        return f"{value:.0f}"
    return f"{value:.3g}"


# -- lines -------------------------------------------------------------------------------------------------------------


def _named(variants: Sequence[Variant], variant: Variant, line: str) -> str:
    return ": ".join(part for part in (variant.name if len(variants) > 1 else "", line) if part)


def _lines(
    variants: Sequence[Variant], phase: str, metrics: Mapping[str, str], missing: float | None = None
) -> Iterable[Labelled]:
    """Several metrics: a colour each and the variants in dashes; one metric: a colour per variant."""
    for a, variant in enumerate(variants):
        for m, (metric, line) in enumerate(metrics.items()):
            seeds: list[Series] = [
                {
                    step: points.get(metric, (missing or 0.0, None, None))
                    for step, points in run.metrics.get(phase, {}).items()
                    if metric in points or missing is not None
                }
                for run in variant.runs
            ]
            yield _named(variants, variant, line), m if len(metrics) > 1 else a, a, seeds


def _family(variants: Sequence[Variant], prefix: str) -> dict[str, str]:
    names = {
        name: name.removeprefix(prefix)
        for variant in variants
        for run in variant.runs
        for points in run.metrics.get("train", {}).values()
        for name in points
        if name.startswith(prefix)
    }
    return dict(sorted(names.items()))


def _passes(variant: Variant, phase: str) -> dict[str, str]:
    """The average solve rate, pass@k and best@k for the largest k of a phase; nothing where tasks have one attempt."""
    runs = variant.runs
    names = {n for run in runs for points in run.metrics.get(phase, {}).values() for n in points}
    sizes = [int(name.removeprefix("passes pass@")) for name in names if name.startswith("passes pass@")]
    k = max(sizes, default=1)
    lines = {"solved": "average"} | {f"passes {kind}@{k}": f"{kind}@{k}" for kind in ("pass", "best")}
    return lines if k > 1 else {}


def _gains(variant: Variant) -> Iterable[Labelled]:
    for d, name in enumerate(sorted({name for run in variant.runs for name in run.gains})):
        seeds: list[Series] = [
            {step: (gain, None, None) for step, gain in run.gains.get(name, {}).items()}
            for run in variant.runs
        ]
        yield name, d, 0, seeds


def _flagged(variants: Sequence[Variant]) -> Iterable[Labelled]:
    """Share of rollouts that any monitor flagged; nothing if there was no flag."""
    for a, variant in enumerate(variants):
        if any(line.flags for run in variant.runs for line in run.lines):
            seeds = [_by_step(run, lambda line: float(bool(line.flags))) for run in variant.runs]
            yield _named(variants, variant, ""), a, a, seeds


def _levels(variants: Sequence[Variant]) -> Iterable[Labelled]:
    for a, variant in enumerate(variants):
        seeds: list[Series] = []
        for run in variant.runs:
            levels = {line.task.id: number(line.task.level) for line in run.tasks}
            seeds.append(_by_step(run, lambda line, known=levels: known.get(line.task_id, math.nan)))
        yield _named(variants, variant, ""), a, a, seeds


def _throughput(variants: Sequence[Variant]) -> Iterable[Labelled]:
    for a, variant in enumerate(variants):
        seeds: list[Series] = []
        for run in variant.runs:
            tokens: dict[int, int] = {}
            for line in run.lines:
                if line.phase == "train":
                    tokens[line.step] = tokens.get(line.step, 0) + line.tokens
            seconds = {
                step: points["seconds attempts"][0]
                for step, points in run.metrics.get("train", {}).items()
                if "seconds attempts" in points
            }
            seeds.append(
                {s: (tokens[s] / t, None, None) for s, t in seconds.items() if s in tokens and t > 0}
            )
        yield _named(variants, variant, ""), a, a, seeds


def _by_step(run: RunRecords, value: Any) -> Series:
    """Mean of a value over the rollouts of every step of training."""
    values_of: dict[int, list[float]] = {}
    for line in run.lines:
        if line.phase == "train" and math.isfinite(figure := value(line)):
            values_of.setdefault(line.step, []).append(figure)
    return {step: (sum(values) / len(values), None, None) for step, values in sorted(values_of.items())}


# -- traces ------------------------------------------------------------------------------------------------------------


def _traces(name: str, mean: Series, colour: int, dash: int, *, has_interval: bool) -> list[dict[str, Any]]:
    """A line with its intervals: a band where steps follow one another closely, else a bar at each measured point."""
    shown, again = (
        colour % len(COLOURS),
        colour // len(COLOURS),
    )  # colours that come again differ in dash and marker
    line: dict[str, Any] = {
        "type": "scatter",
        "mode": "lines+markers" if len(mean) <= MAX_MARKED else "lines",
        "name": label(name),
        "x": list(mean),
        "y": [float(f"{value:.5g}") for value, _, _ in mean.values()],
        "line": {"color": COLOURS[shown], "width": 2, "dash": DASHES[(dash + again) % len(DASHES)]},
        "marker": {"symbol": MARKERS[(shown + 3 * again) % len(MARKERS)], "size": 6},
    }
    ends = [
        (step, low, high) for step, (_, low, high) in mean.items() if low is not None and high is not None
    ]
    if not has_interval or not ends:
        return [line]
    if len(ends) <= FEW_STEPS or not _is_dense([(name, 0, 0, mean)]):
        sides = {"array": lambda v, low, high: high - v, "arrayminus": lambda v, low, high: v - low}
        reach = {
            side: [
                0.0 if low is None or high is None else float(f"{max(way(v, low, high), 0.0):.5g}")
                for v, low, high in mean.values()
            ]
            for side, way in sides.items()
        }
        line["error_y"] = {"type": "data", "symmetric": False, "thickness": 1.2, "width": 4, **reach}
        return [line]
    return [_band(ends, shown), line]


def _band(ends: Sequence[tuple[int, float, float]], colour: int) -> dict[str, Any]:
    steps = [step for step, _, _ in ends]
    edge = [*(high for _, _, high in ends), *(low for _, low, _ in reversed(ends))]
    return {
        "type": "scatter",
        "mode": "lines",
        "x": steps + steps[::-1],
        "y": [float(f"{value:.5g}") for value in edge],
        "fill": "toself",
        "fillcolor": COLOURS[colour],
        "opacity": 0.18,
        "line": {"width": 0},
        "hoverinfo": "skip",
        "showlegend": False,
    }


def _map(run: RunRecords) -> Chart | None:
    cells: dict[str, dict[int, list[float]]] = {}
    names: dict[str, str] = {}
    for line in run.lines:
        if line.phase == "train" and line.reward is not None and not line.is_void:
            cells.setdefault(line.task_id, {}).setdefault(line.step, []).append(line.reward)
            names[line.task_id] = line.task_name
    steps = sorted({step for row in cells.values() for step in row})
    if len(steps) < 2:
        return None
    levels = {line.task.id: line.task.level for line in run.tasks}
    order = sorted(cells, key=lambda task: (levels.get(task, 0), min(cells[task]), names[task]))
    shown = [label(f"{names[task]}, level {levels.get(task, '?')}") for task in order]
    trace = {
        "type": "heatmap",
        "x": steps,
        "y": list(range(len(order))),
        "z": [[_mean(cells[task].get(step)) for step in steps] for task in order],
        "text": [[name] * len(steps) for name in shown],
        "hovertemplate": "%{text}<br>step %{x}: mean reward %{z:.2f}<extra></extra>",
        "colorscale": [[0, "#8C96A3"], [1, "#E69F00"]],  # distinct for colour-blind readers
        "zmin": 0,
        "zmax": 1,
        "xgap": 1,
        "ygap": 1 if len(order) <= 100 else 0,
        "colorbar": {"title": {"text": "mean reward"}, "thickness": 10},
    }
    ticks = (
        {"tickvals": list(range(len(order))), "ticktext": shown}
        if len(order) <= 30
        else {"showticklabels": False}
    )
    layout = {
        "margin": {"l": 8, "r": 8, "t": 8, "b": 36},
        "xaxis": {"title": {"text": "step"}, "showgrid": False, "zeroline": False},
        "yaxis": {"automargin": True, "showgrid": False, "zeroline": False, **ticks},
    }
    height = 90 + min(max(len(order) * 14, 120), 520)
    return Chart(
        f"{run.name}: mean reward of practised tasks by step",
        {"data": [trace], "layout": layout},
        "Tasks from easy at the bottom to hard; grey earned nothing, orange everything, empty was not drawn.",
        height,
    )


def _mean(values: Sequence[float] | None) -> float | None:
    return round(sum(values) / len(values), 3) if values else None
