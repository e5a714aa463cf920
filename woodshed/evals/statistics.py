"""Figures with intervals, for attempts that come several to a task.

Everything is a ratio of sums: solved attempts / attempts, faulty turns / turns, tokens / rollouts. Attempts
at one task resemble each other, so the task is the unit of chance: intervals resample whole tasks, each with
all of its attempts. (Resampling attempts inside a task as well would count their spread twice and make the
intervals too wide.)

Intervals are 95%, percentile bootstrap, widened for few tasks as in Hesterberg (2015), "What Teachers Should
Know About the Bootstrap" (the expanded percentile interval). Where every task gave the same 0 or 1 there is
nothing to resample; then the interval is the exact binomial one with the number of tasks as its n, which is
cautious.

Seeds are fixed: the same data gives the same interval.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import NormalDist
from typing import Any

import numpy as np

CONFIDENCE = 0.95
RESAMPLES = 4000
_CHUNK = 250  # resamples drawn at once: bounds memory for suites of thousands of tasks


@dataclass(frozen=True)
class Estimate:
    """A figure, its interval, and what it was counted from."""

    value: float | None
    """part / whole, or None where whole is 0."""
    low: float | None
    """Ends of the 95% interval, or None where fewer than two tasks leave nothing to say."""
    high: float | None
    part: float
    whole: float
    num_tasks: int
    num_attempts: int


@dataclass(frozen=True)
class Difference:
    """After minus before, paired by task."""

    value: float | None
    low: float | None
    high: float | None
    num_tasks: int
    """Tasks that both sides attempted; the others do not enter."""

    @property
    def is_clear(self) -> bool:
        """Whether the interval excludes zero."""
        return self.low is not None and self.high is not None and (self.low > 0 or self.high < 0)


def rate(
    parts: Sequence[float], wholes: Sequence[float], tasks: Sequence[Hashable], *, is_share: bool = True
) -> Estimate:
    """Sum of parts / sum of wholes over attempts; `tasks` names each attempt's task.

    `is_share` says that every part lies between 0 and its whole by nature (faulty turns / turns).
    """
    part_N, whole_N = _by_task(parts, wholes, tasks)
    part, whole = float(part_N.sum()), float(whole_N.sum())
    value = _ratio(part, whole)
    low, high = _interval([(part_N, whole_N)], [1.0], value, is_share)
    return Estimate(value, low, high, part, whole, len(part_N), len(parts))


def mean(values: Sequence[float], tasks: Sequence[Hashable], *, is_share: bool = False) -> Estimate:
    """Mean over attempts. `is_share` says that values lie in [0, 1] by nature (a reward, a solve)."""
    return rate(values, [1.0] * len(values), tasks, is_share=is_share)


Sums = Mapping[Any, tuple[float, float]]
"""Task -> (part, whole), summed over its attempts."""


def sums(parts: Sequence[float], wholes: Sequence[float], tasks: Sequence[Hashable]) -> Sums:
    """Per-task sums, in order of first appearance."""
    totals: dict[Hashable, tuple[float, float]] = {}
    for part, whole, task in zip(parts, wholes, tasks, strict=True):
        before = totals.get(task, (0.0, 0.0))
        totals[task] = (before[0] + part, before[1] + whole)
    return totals


def difference(before: Sums, after: Sums, *, is_share: bool = False) -> Difference:
    """rate(after) - rate(before) on the tasks that both have, each task resampled with both of its sides."""
    common = sorted(set(before) & set(after), key=str)
    sides = [
        np.array([side[task] for task in common], dtype=float).reshape(-1, 2).T for side in (after, before)
    ]
    values = [_ratio(part_N.sum(), whole_N.sum()) for part_N, whole_N in sides]
    if values[0] is None or values[1] is None:
        return Difference(None, None, None, len(common))
    value = values[0] - values[1]
    low, high = _interval([(part_N, whole_N) for part_N, whole_N in sides], [1.0, -1.0], value, is_share)
    return Difference(value, low, high, len(common))


def pass_at_k(solved: Sequence[int], attempts: Sequence[int], k: int) -> Estimate:
    """Chance that at least one of k attempts solves a task: unbiased, mean over tasks.

    1 - C(n - c, k) / C(n, k): Chen et al. (2021), "Evaluating Large Language Models Trained on Code", 2.1.

    Raises:
        ValueError: a task has fewer than k attempts.
    """
    return _per_task([1.0 - _draws(n - c, n, k) for c, n in zip(solved, attempts, strict=True)], attempts)


def pass_hat_k(solved: Sequence[int], attempts: Sequence[int], k: int) -> Estimate:
    """Chance that all of k attempts solve a task (pass^k): unbiased, mean over tasks.

    C(c, k) / C(n, k), Yao et al. (2024), "tau-bench".

    Raises:
        ValueError: a task has fewer than k attempts.
    """
    return _per_task([_draws(c, n, k) for c, n in zip(solved, attempts, strict=True)], attempts)


def _per_task(values: Sequence[float], attempts: Sequence[int]) -> Estimate:
    return replace(mean(values, range(len(values)), is_share=True), num_attempts=sum(attempts))


def _draws(good: int, total: int, k: int) -> float:
    """Chance that k draws without replacement from `total` are all among the `good` ones."""
    if not 1 <= k <= total:
        raise ValueError(f"k = {k} needs at least k attempts at every task, and one has {total}")
    return math.comb(good, k) / math.comb(total, k)


def _by_task(
    parts: Sequence[float], wholes: Sequence[float], tasks: Sequence[Hashable]
) -> tuple[np.ndarray, np.ndarray]:
    table = np.array(list(sums(parts, wholes, tasks).values()), dtype=float).reshape(-1, 2)
    return table[:, 0], table[:, 1]


def _ratio(part: float, whole: float) -> float | None:
    return float(part / whole) if whole else None


def _interval(
    sides: Sequence[tuple[np.ndarray, np.ndarray]],
    signs: Sequence[float],
    value: float | None,
    is_share: bool,
) -> tuple[float | None, float | None]:
    """Expanded percentile interval of sum(sign * part / whole), tasks resampled together on all sides."""
    num_tasks = len(sides[0][0])
    if value is None or num_tasks < 2:
        return None, None
    if is_share and _is_constant(sides):
        return _exact(value, num_tasks, paired=len(sides) > 1)
    draws = _resample(sides, signs, num_tasks)
    draws = draws[np.isfinite(draws)]
    tail = _expanded_tail(num_tasks)
    low, high = np.quantile(draws, [tail, 1 - tail])
    return float(low), float(high)


def _is_constant(sides: Sequence[tuple[np.ndarray, np.ndarray]]) -> bool:
    """Whether every task says the same 0 or 1 on every side."""
    return all(bool(np.all(part_N == 0)) or bool(np.all(part_N == whole_N)) for part_N, whole_N in sides)


def _exact(value: float, num_tasks: int, *, paired: bool) -> tuple[float, float]:
    """Clopper-Pearson ends for 0 of n or n of n; for a paired difference, that reach to both sides."""
    reach = 1 - ((1 - CONFIDENCE) / 2) ** (1 / num_tasks)
    floor = -1.0 if paired else 0.0
    return max(value - reach, floor), min(value + reach, 1.0)


def _resample(
    sides: Sequence[tuple[np.ndarray, np.ndarray]], signs: Sequence[float], num_tasks: int
) -> np.ndarray:
    rng = np.random.default_rng(0)
    draws = []
    for _ in range(RESAMPLES // _CHUNK):
        weights_BN = rng.multinomial(num_tasks, np.full(num_tasks, 1 / num_tasks), size=_CHUNK)
        with np.errstate(divide="ignore", invalid="ignore"):  # a resample may hold no turns at all
            draws.append(
                sum(
                    sign * ((weights_BN @ part_N) / (weights_BN @ whole_N))
                    for sign, (part_N, whole_N) in zip(signs, sides, strict=True)
                )
            )
    return np.concatenate(draws)


def _expanded_tail(num_tasks: int) -> float:
    """Tail of the percentile interval that reaches as far as Student's t with the unbiased variance would."""
    degrees = num_tasks - 1
    z = NormalDist().inv_cdf(1 - (1 - CONFIDENCE) / 2)
    # Student's t quantile by its expansion in 1 / degrees (Abramowitz & Stegun 26.7.5).
    t = (
        z
        + (z**3 + z) / (4 * degrees)
        + (5 * z**5 + 16 * z**3 + 3 * z) / (96 * degrees**2)
        + (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / (384 * degrees**3)
    )
    return NormalDist().cdf(-t * math.sqrt(num_tasks / degrees))
