"""Figures of several attempts at a task: solved by any of k, by all of k, by the most promising of k.

The estimators are the unbiased ones of `statistics`; here they are taken task by task, so that two policies can be
compared in pairs. A task with fewer than k attempts does not enter the figures of k: void attempts are few, and a curve
over the steps of a run must not change its k at a step that lost one.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from woodshed.evals import statistics
from woodshed.evals.statistics import Estimate, Sums


@dataclass(frozen=True)
class Try:
    """One judged attempt."""

    task_id: str
    solved: bool
    promise: Any
    """A rank given without its verdict; anything that compares, more is better."""


def by_task(tries: Iterable[Try]) -> dict[str, Sums]:
    """Task by task, pass@k, pass^k and best@k for k = 1, 2, 4, ... and the most attempts that a task has."""
    tasks: dict[str, list[Try]] = {}
    for attempts in tries:
        tasks.setdefault(attempts.task_id, []).append(attempts)
    sums: dict[str, Sums] = {}
    for k in _sizes(max(map(len, tasks.values()), default=0)):
        figures = {task: _figures(attempts, k) for task, attempts in tasks.items() if len(attempts) >= k}
        for place, name in enumerate(("pass@", "pass^", "best@")):
            sums[f"{name}{k}"] = {task: (values[place], 1.0) for task, values in figures.items()}
    return sums


def estimates(tries: Iterable[Try]) -> dict[str, Estimate]:
    """The means over tasks of `by_task`."""
    attempts = list(tries)
    counts = Counter(attempt.task_id for attempt in attempts)
    return {
        name: replace(estimate([sums]), num_attempts=sum(counts[task] for task in sums))
        for name, sums in by_task(attempts).items()
    }


def estimate(seeds: Sequence[Sums]) -> Estimate:
    """Mean over tasks of one name of `by_task`; of several runs of a variant, over seeds and tasks."""
    if len(seeds) > 1:
        return statistics.rate_over_seeds(seeds, is_share=True)
    values = [part for part, _ in seeds[0].values()]
    return statistics.mean(values, list(seeds[0]), is_share=True)


def pooled(seeds: Sequence[Sums]) -> Sums:
    """Sums of several runs added up, task by task."""
    names = [task for sums in seeds for task in sums]
    parts, wholes = (
        zip(*(pair for sums in seeds for pair in sums.values()), strict=True) if names else ((), ())
    )
    return statistics.sums(parts, wholes, names)


def headline(runs: Iterable[Mapping[str, Sums]]) -> tuple[str, ...]:
    """The two names to show beside the average, pass@k and best@k for the largest k that all runs have; () for 1."""
    sizes = [max((_size(name) for name in run), default=1) for run in runs]
    k = min(sizes, default=1)
    return (f"pass@{k}", f"best@{k}") if k > 1 else ()


def _size(name: str) -> int:
    return int(name.partition("@")[2] or 1)


def _sizes(most: int) -> list[int]:
    return sorted({2**power for power in range(most.bit_length())} | {most}) if most else []


def _figures(attempts: Sequence[Try], k: int) -> tuple[float, float, float]:
    """The three figures of one task."""
    solved, count = [sum(attempt.solved for attempt in attempts)], [len(attempts)]
    rewards = [[float(attempt.solved) for attempt in attempts]]
    estimates = (
        statistics.pass_at_k(solved, count, k),
        statistics.pass_hat_k(solved, count, k),
        statistics.best_of_k([[attempt.promise for attempt in attempts]], rewards, k),
    )
    values = [attempt.value for attempt in estimates]
    return values[0] or 0.0, values[1] or 0.0, values[2] or 0.0
