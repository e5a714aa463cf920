"""Curves of a page as Plotly figures: plain dictionaries, drawn in the browser by the plotly.min.js of the package.

A line is a variant's mean over its seeds. The band around it is the range of the seeds, or, where there is one seed,
the 95% interval over tasks that the metric came with. Colours are those of Okabe and Ito, which colour-blind people
tell apart; lines differ in dash and marker as well. The browser swaps the colours for brighter ones in the dark.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from woodshed.report.gather import Point, RunRecords, number
from woodshed.report.variants import Variant
from woodshed.report.visible import label

COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#B8860B", "#56B4E9", "#7F7F7F", "#6A3D9A")
DASHES = ("solid", "dash", "dot", "dashdot")
MARKERS = ("circle", "square", "diamond", "cross", "x", "triangle-up", "star", "hexagon")
MAX_MARKED = 40  # points of a line beyond which markers only blur it
FEW_STEPS = 8  # up to this many every step has its tick
MAX_BANDS = 4  # lines of a chart beyond which their bands hide one another
MAX_MAPS = 4  # curriculum pictures on a page

Series = Mapping[int, Point]  # step -> value, low, high


@dataclass(frozen=True)
class Chart:
    """One figure with its caption."""

    title: str
    figure: dict[str, Any]
    """Plotly's data and layout."""
    height: int = 220


CURVES: tuple[tuple[str, str, Mapping[str, str]], ...] = (
    ("invalid-call rate, held out", "eval", {"invalid_calls": ""}),
    ("solve rate, held out", "eval", {"solved": ""}),
    ("mean reward, held out", "eval", {"reward": ""}),
    ("mean reward", "train", {"reward": ""}),
    ("invalid-call rate", "train", {"invalid_calls": ""}),
    ("rollouts with any call fault", "train", {"faulty_rollouts": ""}),
    ("effort: sampled tokens a rollout", "train", {"tokens": ""}),
    ("effort: turns a rollout", "train", {"turns": ""}),
    ("targeted divergence", "train", {"kl_loss": ""}),
    ("gradient norms", "train", {"rl_grad_norm": "policy gradient", "kl_grad_norm": "targeted"}),
    ("divergence from the start, nats a token", "train", {"kl_to_start": ""}),
    ("entropy, nats a token", "train", {"entropy": ""}),
    (
        "sampler against trainer, gap",
        "train",
        {"logp_gap_mean": "mean", "logp_gap_max": "largest of one token"},
    ),
    ("tasks that an earlier step had drawn", "train", {"repeated_tasks": ""}),
    ("seconds a step", "train", {"seconds attempts": "attempts", "seconds update": "update"}),
    ("sft: loss, nats a token", "sft", {"sft_loss": ""}),
    ("distillation: divergence", "distill", {"kl_loss": ""}),
    (
        "distillation: log-prob of demonstrations, nats a token",
        "distill",
        {"demonstrated_logp": "learned from", "earlier_logp": "earlier ones"},
    ),
)
"""Title, phase, {metric: name of its line}; a metric that no run has is left out."""

FAMILIES = (
    ("invalid calls by fault, share of turns", "faults ", 0.0),
    ("tasks of the pool by state", "curriculum ", None),
    ("cost", "cost ", None),
    ("auxiliary rewards and effort, mean a rollout", "reward_terms ", None),
)
"""Title, prefix, value at steps without the metric: a line for every training metric with that prefix."""


def charts(variants: Sequence[Variant]) -> list[Chart]:
    """All charts of these variants, in reading order."""
    figures = [chart(title, _lines(variants, phase, metrics)) for title, phase, metrics in CURVES]
    for variant in variants:  # these have many lines: a chart for every variant
        suffix = f": {variant.name}" if len(variants) > 1 else ""
        for title, prefix, missing in FAMILIES:
            figures.append(
                chart(title + suffix, _lines([variant], "train", _family([variant], prefix), missing))
            )
        for phase, side in (("train", ""), ("eval", ", held out")):
            title = f"solved: on average, by any of k attempts, by the most promising of k{side}{suffix}"
            figures.append(chart(title, _lines([variant], phase, _passes(variant, phase))))
        figures.append(chart("hint gain by class, nats a turn" + suffix, _gains(variant)))
    figures += [
        chart("flagged rollouts", _flagged(variants)),
        chart("sampled tokens a second", _throughput(variants)),
        chart("mean level of the tasks drawn", _levels(variants)),
    ]
    return [figure for figure in figures if figure is not None]


Labelled = tuple[
    str, int, int, list[Series]
]  # name, number of its colour, number of its dash, a series per seed


def chart(title: str, lines: Iterable[Labelled]) -> Chart | None:
    """A figure of several lines, or None if no line has two points."""
    means = [(name, colour, dash, average(seeds)) for name, colour, dash, seeds in lines]
    longest = max((len(mean) for *_, mean in means), default=0)
    traces: list[dict[str, Any]] = []
    for name, colour, dash, mean in means:
        if mean:
            band = _band(mean, colour) if len(means) <= MAX_BANDS else []
            traces += [*band, _line(name, mean, colour, dash)]
    if longest < 2:
        return None
    names = [trace["name"] for trace in traces if trace.get("name")]
    legend = 18 * len(names) if len(names) > 1 else 0  # pixels below the plot
    ticks = {"dtick": 1} if longest <= FEW_STEPS else {}
    layout = {
        "margin": {"l": 46, "r": 8, "t": 8, "b": 42 + legend},
        "xaxis": {"title": {"text": "step", "standoff": 8}, "zeroline": False, **ticks},
        "yaxis": {"rangemode": "tozero", "automargin": True},
        "showlegend": bool(legend),
        "legend": {"orientation": "h", "yref": "container", "y": 0, "yanchor": "bottom", "x": 0},
        "hovermode": "x unified",
    }
    return Chart(title, {"data": traces, "layout": layout}, 226 + legend)


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


def _line(name: str, mean: Series, colour: int, dash: int) -> dict[str, Any]:
    return {
        "type": "scatter",
        "mode": "lines+markers" if len(mean) <= MAX_MARKED else "lines",
        "name": label(name),
        "x": list(mean),
        "y": [float(f"{value:.5g}") for value, _, _ in mean.values()],
        "line": {"color": COLOURS[colour % len(COLOURS)], "width": 2, "dash": DASHES[dash % len(DASHES)]},
        "marker": {"symbol": MARKERS[colour % len(MARKERS)], "size": 6},
    }


def _band(mean: Series, colour: int) -> list[dict[str, Any]]:
    ends = [
        (step, low, high) for step, (_, low, high) in mean.items() if low is not None and high is not None
    ]
    if len(ends) < 2:
        return []
    steps = [step for step, _, _ in ends]
    edge = [float(f"{high:.5g}") for _, _, high in ends] + [
        float(f"{low:.5g}") for _, low, _ in reversed(ends)
    ]
    return [
        {
            "type": "scatter",
            "mode": "lines",
            "x": steps + steps[::-1],
            "y": edge,
            "fill": "toself",
            "fillcolor": COLOURS[colour % len(COLOURS)],
            "opacity": 0.18,
            "line": {"width": 0},
            "hoverinfo": "skip",
            "showlegend": False,
        }
    ]


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
        height,
    )


def _mean(values: Sequence[float] | None) -> float | None:
    return round(sum(values) / len(values), 3) if values else None
