"""Figures with intervals, for attempts that come several to a task and runs that come several to a variant.

Everything is a ratio of sums: solved attempts / attempts, faulty turns / turns, tokens / rollouts. Attempts
at one task resemble each other, so the task is the unit of chance: intervals look at whole tasks, each with
all of its attempts. (Resampling attempts inside resampled tasks as well would count their spread twice:
`benchmarks/interval_coverage.py` shows by how much.) 95% intervals, four kinds, each where it holds:

- a share: Wilson's (1927) score interval with the effective number of attempts of a clustered sample (Korn and
  Graubard 1998) and Student's t with the number of tasks. Stays in [0, 1], right also for rare events;
- a count, and a difference in counts paired by task: percentile bootstrap of tasks, widened for few tasks as in
  Hesterberg (2015), "What Teachers Should Know About the Bootstrap" (the expanded percentile interval);
- a difference in shares: Student's t of the tasks' gains; where fewer tasks differ than an exact test could tell from
  chance, with half a task added to each of the four ways a pair can end (Agresti and Min 2005);
- where every task gave the same 0 or 1, or none differs: the exact binomial bound with the number of tasks as its n.

Several runs of one variant under different seeds are the level above: `difference_over_seeds`. What is random has a
fixed seed: the same data gives the same interval. Letters: N tasks, S seeds (runs) of a variant, B resamples.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import Any

import numpy as np
from scipy import special

CONFIDENCE = 0.95
MIN_DEGREES = 5
"""Degrees of freedom from which the smallest detectable difference is estimated."""
POWER = 0.8
"""Chance that the interval of a difference as large as `detectable` excludes zero."""
RESAMPLES = 4000
_CHUNK = 250  # resamples drawn at once: bounds memory for suites of thousands of tasks
_KEPT_TASKS = 600  # up to this many tasks all draws are kept between calls: at most 20 MB
_FEW = 6  # tasks that differ; five that all go one way are still p = 0.0625 by McNemar's exact test
_ROUNDING = 1e-12  # relative: figures that are closer than this differ by floating point only


@dataclass(frozen=True)
class Estimate:
    """A figure, its interval, and what it was counted from."""

    value: float | None
    """part / whole, or None where whole is 0."""
    low: float | None
    """Ends of the 95% interval, or None where fewer than two tasks allow no interval."""
    high: float | None
    part: float
    whole: float
    num_tasks: int
    num_attempts: int
    detectable: float | None = None
    """Smallest true difference to a second run like this one that would show 4 times in 5, without any pairing."""


@dataclass(frozen=True)
class Difference:
    """Difference, after minus before, paired by task."""

    value: float | None
    low: float | None
    high: float | None
    num_tasks: int
    """Tasks that both sides attempted; the others do not enter."""
    detectable: float | None = None
    """Smallest true difference that would show 4 times in 5 on these tasks, paired: less than this is noise here."""
    num_changed: int | None = None
    """Of the tasks those on which the sides differ; None for a count."""

    @property
    def is_clear(self) -> bool:
        """True if the interval excludes zero by more than rounding."""
        if self.low is None or self.high is None:
            return False
        return self.low > _ROUNDING or self.high < -_ROUNDING


@dataclass(frozen=True)
class Record:
    """Number of common tasks for which the second side's rate is higher, lower and equal."""

    up: int
    down: int
    same: int

    @property
    def p_value(self) -> float:
        """Exact two-sided test that going up and going down are equally likely.

        McNemar (1947) where every task has one attempt; the sign test on tasks where there are more.
        """
        fewer, unlike = min(self.up, self.down), self.up + self.down
        return min(1.0, 2.0 * float(special.bdtr(fewer, unlike, 0.5))) if unlike else 1.0


def rate(
    parts: Sequence[float], wholes: Sequence[float], tasks: Sequence[Hashable], *, is_share: bool = True
) -> Estimate:
    """Sum of parts / sum of wholes over attempts; `tasks` names each attempt's task.

    `is_share` says that every part lies between 0 and its whole by nature (faulty turns / turns).

    Raises:
        ValueError: a part or whole is not finite, or a whole is negative.
    """
    part_N, whole_N = _by_task(parts, wholes, tasks)
    part, whole = float(part_N.sum()), float(whole_N.sum())
    value = _ratio(part, whole)
    if value is None or len(part_N) < 2:
        return Estimate(value, None, None, part, whole, len(part_N), len(parts))
    side, degrees = (part_N, whole_N), len(part_N) - 1
    error = _beyond_rounding(standard_error([side], [1.0]), value)
    low, high = _share_interval(value, side, error, degrees) if is_share else _bootstrap([side], [1.0])
    detectable = _detectable(math.sqrt(2) * error, degrees) if error else (high - low or None)
    return Estimate(value, low, high, part, whole, len(part_N), len(parts), detectable)


def mean(values: Sequence[float], tasks: Sequence[Hashable], *, is_share: bool = False) -> Estimate:
    """Mean over attempts. `is_share` says that values lie in [0, 1] by nature (a reward, a solve)."""
    return rate(values, [1.0] * len(values), tasks, is_share=is_share)


Sums = Mapping[Any, tuple[float, float]]
"""Task -> (part, whole), summed over its attempts."""


def sums(parts: Sequence[float], wholes: Sequence[float], tasks: Sequence[Hashable]) -> Sums:
    """Per-task sums, in order of first appearance.

    Raises:
        ValueError: a part or whole is not finite, or a whole is negative.
    """
    totals: dict[Hashable, tuple[float, float]] = {}
    for part, whole, task in zip(parts, wholes, tasks, strict=True):
        if not (math.isfinite(part) and math.isfinite(whole) and whole >= 0):
            raise ValueError(f"task {task}: {part} of {whole} is not a figure that can be counted")
        before = totals.get(task, (0.0, 0.0))
        totals[task] = (before[0] + part, before[1] + whole)
    return totals


def difference(before: Sums, after: Sums, *, is_share: bool = False) -> Difference:
    """rate(after) - rate(before) on the tasks that both have, each task as a pair."""
    change = difference_over_seeds([before], [after], is_share=is_share)
    if is_share or change.low is None:
        return change
    common = _common([before, after])
    low, high = _bootstrap([_side([side], common) for side in (after, before)], [1.0, -1.0])
    return replace(change, low=low, high=high)


def record(before: Sums, after: Sums) -> Record:
    """Direction of change of each common task; tasks with nothing to count on a side are left out."""
    gains = [
        after[task][0] / after[task][1] - before[task][0] / before[task][1]
        for task in set(before) & set(after)
        if before[task][1] and after[task][1]
    ]
    up, down = sum(gain > 1e-12 for gain in gains), sum(gain < -1e-12 for gain in gains)
    return Record(up, down, len(gains) - up - down)


def rate_over_seeds(seeds: Sequence[Sums], *, is_share: bool = False) -> Estimate:
    """Figure of a variant over its seeds; the interval says what another seed on other such tasks would give."""
    common = _common(seeds)
    side = _side(seeds, common)
    part, whole = float(side[0].sum()), float(side[1].sum())
    value = _ratio(part, whole)
    if value is None or len(common) < 2:
        return Estimate(value, None, None, part, whole, len(common), len(seeds))
    variance = float(np.var(_pull(*side).mean(0), ddof=1)) / len(common)
    error, degrees = _crossed([side], variance)
    error = _beyond_rounding(error, value)
    if is_share:
        low, high = _share_interval(value, side, error, degrees)
    else:
        low, high = value - _t(degrees) * error, value + _t(degrees) * error
    detectable = _detectable(math.sqrt(2) * error, degrees) if error else (high - low or None)
    return Estimate(value, low, high, part, whole, len(common), len(seeds), detectable)


def difference_over_seeds(
    before: Sequence[Sums], after: Sequence[Sums], *, is_share: bool = False
) -> Difference:
    """rate(after) - rate(before) where each side is several runs under different seeds on the same tasks.

    Seeds and tasks are crossed, not nested: every seed meets every task. Variances of the mean add up as in a two-way
    layout with random effects, tasks paired over the sides, seeds not; the interval is Student's t with the degrees of
    freedom of Satterthwaite (1946). (Resampling two or three seeds cannot work: their bootstrap variance is half or
    two thirds of the true one.) With one seed on a side, nothing is known about other seeds, and only tasks count.
    """
    common = _common([*before, *after])
    sides = [_side(seeds, common) for seeds in (after, before)]
    values = [_ratio(part_SN.sum(), whole_SN.sum()) for part_SN, whole_SN in sides]
    if values[0] is None or values[1] is None:
        return Difference(None, None, None, len(common))
    value = values[0] - values[1]
    if len(common) < 2:
        return Difference(value, None, None, len(common))
    if is_share:
        num_changed, middle, variance = _over_tasks(value, sides)
        error, degrees = _crossed(sides, variance)
        error = _beyond_rounding(error, values[0], values[1])
        low, high = _gain_interval(value, sides, middle, error, degrees)
    else:
        num_changed, task_N = None, _pull(*sides[0]).mean(0) - _pull(*sides[1]).mean(0)
        error, degrees = _crossed(sides, float(np.var(task_N, ddof=1)) / len(common))
        low, high = value - _t(degrees) * error, value + _t(degrees) * error
    detectable = _detectable(error, degrees) if error else (high - value or None)
    return Difference(value, low, high, len(common), detectable, num_changed)


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


def best_of_k(scores: Sequence[Sequence[Any]], rewards: Sequence[Sequence[float]], k: int) -> Estimate:
    """Mean reward of the attempt that a selector likes best among k: unbiased, mean over tasks.

    `scores[i][j]` is what the selector gives attempt j at task i (anything that compares), `rewards[i][j]` what it was
    worth. Over all sets of k attempts, the one with rank r (from 0, worst first) is the best C(r, k - 1) times; those
    that the selector cannot tell apart share their ranks.

    Raises:
        ValueError: a task has fewer than k attempts; a score or reward is NaN, a reward is infinite.
    """
    values = [_best(list(zip(s, r, strict=True)), k) for s, r in zip(scores, rewards, strict=True)]
    return _per_task(values, [len(task) for task in rewards])


def _best(attempts: list[tuple[Any, float]], k: int) -> float:
    """In fractions: rewards that are all 1 average to 1, not to the number below it."""
    _draws(0, len(attempts), k)  # k attempts are there
    for score, reward in attempts:
        if _has_nan(score) or not math.isfinite(reward):
            raise ValueError(f"score {score} with reward {reward} cannot be ranked")
    ordered = sorted(attempts, key=lambda attempt: attempt[0])
    value, rank = Fraction(0), 0
    for _, tied in itertools.groupby(ordered, key=lambda attempt: attempt[0]):
        rewards = [Fraction(reward) for _, reward in tied]
        chances = sum(math.comb(r, k - 1) for r in range(rank, rank + len(rewards)))
        value += chances * sum(rewards) / len(rewards)
        rank += len(rewards)
    return float(value / math.comb(len(ordered), k))


def _has_nan(score: Any) -> bool:
    return any(map(_has_nan, score)) if isinstance(score, (tuple, list)) else score != score


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


def _common(sides: Sequence[Sums]) -> list[Any]:
    return sorted(set.intersection(*(set(side) for side in sides)), key=str) if sides else []


def _side(seeds: Sequence[Sums], tasks: Sequence[Any]) -> Side:
    """Parts and wholes of every seed and task."""
    table = np.array([[seed[task] for task in tasks] for seed in seeds], dtype=float)
    table = table.reshape(len(seeds), len(tasks), 2)
    return table[:, :, 0], table[:, :, 1]


def _ratio(part: float, whole: float) -> float | None:
    return float(part / whole) if whole else None


# -- intervals over tasks ----------------------------------------------------------------------------------------

Side = tuple[np.ndarray, np.ndarray]  # part, whole: (N) or (S, N)


def standard_error(sides: Sequence[Side], signs: Sequence[float]) -> float:
    """Standard error of sum(sign * part / whole) over tasks that all sides share, by the delta method."""
    pulls = [sign * _pull(part_N, whole_N) for sign, (part_N, whole_N) in zip(signs, sides, strict=True)]
    return float(np.std(sum(pulls), ddof=1) / math.sqrt(len(sides[0][0])))


def _pull(part: np.ndarray, whole: np.ndarray) -> np.ndarray:
    """Influence of each cell on the ratio of sums, times the number of cells: (S, N) or (N)."""
    return (part - part.sum() / whole.sum() * whole) / whole.mean()


def _detectable(error: float, degrees: float) -> float | None:
    """Difference that a test at 5% finds with `POWER`; within a percent of the noncentral t from 10 tasks on.

    None for fewer tasks than `MIN_DEGREES` + 1, whose spread says nothing about what they could show.
    """
    if degrees < MIN_DEGREES:
        return None
    return error * (_t(degrees) + float(special.stdtrit(degrees, POWER)))


def _t(degrees: float) -> float:
    return float(special.stdtrit(degrees, 1 - (1 - CONFIDENCE) / 2))


def _beyond_rounding(error: float, *figures: float) -> float:
    """A standard error, or 0 where it is only what floating point left of equal figures."""
    return error if error > _ROUNDING * max(map(abs, figures)) else 0.0


def _share_interval(share: float, side: Side, error: float, degrees: float) -> tuple[float, float]:
    """Wilson's, or the exact bound where all tasks say 0 or all say 1. Contains `share` and lies in [0, 1]."""
    num_tasks = side[0].shape[-1]
    if _is_constant([side]):
        return _exact(share, num_tasks, paired=False)
    size = share * (1 - share) / error**2 if error else num_tasks  # attempts that were worth as much alone
    t = _t(degrees)
    middle, shrunk = share + t**2 / (2 * size), 1 + t**2 / size
    reach = t * math.sqrt(share * (1 - share) / size + t**2 / (4 * size**2))
    return max(min((middle - reach) / shrunk, share), 0.0), min(max((middle + reach) / shrunk, share), 1.0)


def _over_tasks(value: float, sides: Sequence[Side]) -> tuple[int, float, float]:
    """Tasks that differ, middle and variance over tasks of the first side less the second, whose difference is
    `value`."""
    with np.errstate(divide="ignore", invalid="ignore"):
        rates = [np.nan_to_num(part_SN / whole_SN).mean(0) for part_SN, whole_SN in sides]
    gain_N = np.abs(rates[0] - rates[1])
    pulls = [_pull(part_SN, whole_SN).mean(0) for part_SN, whole_SN in sides]
    pull_N, num_differ = value + pulls[0] - pulls[1], int((gain_N > 1e-12).sum())
    if not num_differ:
        return num_differ, value, 0.0
    if num_differ >= _FEW:
        return num_differ, value, float(np.var(pull_N, ddof=1)) / len(pull_N)
    more = len(pull_N) + 2  # one goes up by half and down by half, the other stays
    middle, square = float(pull_N.sum()) / more, float((pull_N**2).sum() + gain_N.max() ** 2) / more
    return num_differ, middle, (square - middle**2) / more


def _gain_interval(
    value: float, sides: Sequence[Side], middle: float, error: float, degrees: float
) -> tuple[float, float]:
    """Interval of a difference in shares: Student's t around `middle`, or the exact bound if nothing differs."""
    if _is_constant(sides) or not error:
        return _exact(value, sides[0][0].shape[-1], paired=True)
    return max(middle - _t(degrees) * error, -1.0), min(middle + _t(degrees) * error, 1.0)


def _bootstrap(sides: Sequence[Side], signs: Sequence[float]) -> tuple[float, float]:
    """Expanded percentile interval of sum(sign * part / whole), tasks resampled together on all sides."""
    num_tasks = sides[0][0].shape[-1]
    draws = _resample([(part.reshape(-1), whole.reshape(-1)) for part, whole in sides], signs, num_tasks)
    tail = _expanded_tail(num_tasks)
    low, high = np.quantile(draws[np.isfinite(draws)], [tail, 1 - tail])
    return float(low), float(high)


def _is_constant(sides: Sequence[Side]) -> bool:
    """True if every task has the same value, 0 or 1, on every side, up to rounding."""
    return all(
        bool(np.all(np.abs(part_N) <= _ROUNDING * whole_N))
        or bool(np.all(np.abs(whole_N - part_N) <= _ROUNDING * whole_N))
        for part_N, whole_N in sides
    )


def _exact(value: float, num_tasks: int, *, paired: bool) -> tuple[float, float]:
    """Clopper-Pearson ends for 0 of n or n of n; for a paired difference, that reach to both sides."""
    reach = 1 - ((1 - CONFIDENCE) / 2) ** (1 / num_tasks)
    floor = -1.0 if paired else 0.0
    return max(value - reach, floor), min(value + reach, 1.0)


def _resample(sides: Sequence[Side], signs: Sequence[float], num_tasks: int) -> np.ndarray:
    draws = []
    for weights_BN in _all_weights(num_tasks, RESAMPLES) if num_tasks <= _KEPT_TASKS else _weights(num_tasks):
        with np.errstate(divide="ignore", invalid="ignore"):  # a resample may hold no turns at all
            draws.append(
                sum(
                    sign * ((weights_BN @ part_N) / (weights_BN @ whole_N))
                    for sign, (part_N, whole_N) in zip(signs, sides, strict=True)
                )
            )
    return np.concatenate(draws)


def _weights(num_tasks: int) -> Iterator[np.ndarray]:
    """Number of times that each resample holds each task, a block of resamples at a time; always the same ones."""
    rng = np.random.default_rng(0)
    for _ in range(RESAMPLES // _CHUNK):
        yield rng.multinomial(num_tasks, np.full(num_tasks, 1 / num_tasks), size=_CHUNK).astype(float)


@functools.lru_cache(maxsize=2)
def _all_weights(num_tasks: int, _resamples: int) -> list[np.ndarray]:
    return list(_weights(num_tasks))


def _expanded_tail(num_tasks: int) -> float:
    """Tail of the percentile interval that reaches as far as Student's t with the unbiased variance would."""
    return float(special.ndtr(-_t(num_tasks - 1) * math.sqrt(num_tasks / (num_tasks - 1))))


# -- tasks and seeds ---------------------------------------------------------------------------------------------


def _crossed(sides: Sequence[Side], variance: float) -> tuple[float, float]:
    """Standard error and degrees of freedom, once the seeds of each side are added to the variance over tasks."""
    num_tasks = sides[0][0].shape[1]
    components = [(variance, num_tasks - 1)]  # variance of the mean, its degrees of freedom
    for pull_SN in (_pull(part_SN, whole_SN) for part_SN, whole_SN in sides):
        num_seeds = len(pull_SN)
        if num_seeds > 1:
            seed_S = pull_SN.mean(1)
            residual_SN = pull_SN - seed_S[:, None] - pull_SN.mean(0) + pull_SN.mean()
            residual = float((residual_SN**2).sum()) / ((num_seeds - 1) * (num_tasks - 1))
            extra = (
                float(np.var(seed_S, ddof=1)) - residual / num_tasks
            )  # the residual is in the tasks' part already
            components.append((max(extra, 0.0) / num_seeds, num_seeds - 1))
    total = sum(v for v, _ in components)
    degrees = 1 / sum((v / total) ** 2 / nu for v, nu in components) if total else num_tasks - 1
    return math.sqrt(total), degrees
