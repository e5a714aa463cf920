"""Reward against tokens, by the effort that prompts asked for: what a level costs, and what it gains."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

from woodshed.report.curves import COLOURS, MARKERS, Chart
from woodshed.report.gather import Line, RunRecords

LEVELS = ("low", "medium", "high")
POINTS = 5
"""Most points of a level, each the mean of as many attempts."""
FEWEST = 4
"""Attempts that a point takes at least."""


def charts(runs: Sequence[RunRecords]) -> list[Chart]:
    """A chart for every run whose prompts asked for effort."""
    return [chart for run in runs if (chart := _chart(run, f": {run.name}" if len(runs) > 1 else ""))]


def _chart(run: RunRecords, suffix: str) -> Chart | None:
    traces: list[dict[str, Any]] = []
    for number, level in enumerate(LEVELS):
        points = points_of([line for line in run.lines if line.effort == level])
        if points:
            traces.append(
                {
                    "type": "scatter",
                    "mode": "lines+markers",
                    "name": level,
                    "x": [tokens for tokens, _ in points],
                    "y": [reward for _, reward in points],
                    "line": {"color": COLOURS[number]},
                    "marker": {"symbol": MARKERS[number], "size": 7},
                }
            )
    if not traces:
        return None
    layout = {
        "margin": {"l": 46, "r": 8, "t": 8, "b": 60},
        "xaxis": {"title": {"text": "sampled tokens", "standoff": 8}, "rangemode": "tozero"},
        "yaxis": {"automargin": True, "range": [0, 1]},
        "showlegend": True,
        "legend": {"orientation": "h", "yref": "container", "y": 0, "yanchor": "bottom", "x": 0},
    }
    meaning = (
        "Of practice attempts, by the effort that their prompts asked for; each point is as many attempts."
    )
    return Chart(
        f"reward against tokens, by effort{suffix}", {"data": traces, "layout": layout}, meaning, 262
    )


def points_of(lines: Sequence[Line]) -> list[tuple[float, float]]:
    """(mean tokens, mean reward) of attempts with equally many in each point, from few tokens to many."""
    judged = sorted(
        (line.tokens, line.reward) for line in lines if line.reward is not None and not line.is_void
    )
    count = min(POINTS, max(1, len(judged) // FEWEST))
    edges = [len(judged) * n // count for n in range(count + 1)]
    parts = [judged[begin:end] for begin, end in pairwise(edges) if end > begin]
    return [
        (
            math.fsum(tokens for tokens, _ in part) / len(part),
            math.fsum(reward for _, reward in part) / len(part),
        )
        for part in parts
    ]
