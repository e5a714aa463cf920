"""Public figures of `evals` against exact arithmetic: near 0 and 1, ties, equal values, nothing at all, huge counts."""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Sequence
from dataclasses import replace
from fractions import Fraction
from typing import Any

import pytest
from test_comparison import attempt

from woodshed.evals import measures, statistics
from woodshed.evals.statistics import Difference, Estimate

NEAR_ONE = math.nextafter(1.0, 0.0)
NEAR_ZERO = 5e-324
TRICKY = (0.0, NEAR_ZERO, 1e-300, 1e-17, 1e-9, 0.1, 1 / 3, 0.5, 0.7, 1 - 1e-9, NEAR_ONE, 1.0)


def is_sound(found: Estimate, exact: Fraction | None, *, share: bool) -> None:
    """The exact value, and an interval that is finite, contains it, and has width where it is a share."""
    if exact is None:
        assert found.value is found.low is found.high is None
        return
    assert found.value is not None
    assert abs(Fraction(found.value) - exact) <= Fraction(1, 10**12) * max(abs(exact), Fraction(1, 10**300))
    if found.low is None or found.high is None:
        assert found.low is found.high is None and found.num_tasks < 2
        return
    assert math.isfinite(found.low) and math.isfinite(found.high)
    assert found.low <= found.value <= found.high
    if share:
        assert 0.0 <= found.low < found.high <= 1.0
    assert found.detectable is None or found.detectable > 0


def columns(random_: random.Random) -> tuple[list[float], list[float], list[int]]:
    """Attempts of a few tasks: values of one or two kinds, so that ties and equal tasks are common."""
    kinds = [random_.choice(TRICKY) for _ in range(random_.randint(1, 3))]
    tasks = [n for n in range(random_.randint(0, 9)) for _ in range(random_.randint(1, 4))]
    wholes = [random_.choice((1.0, 1.0, 3.0, 0.0)) if random_.random() < 0.3 else 1.0 for _ in tasks]
    return [random_.choice(kinds) * whole for whole in wholes], wholes, tasks


def exact_rate(parts: Sequence[float], wholes: Sequence[float]) -> Fraction | None:
    whole = sum(map(Fraction, wholes))
    return sum(map(Fraction, parts)) / whole if whole else None


def test_rates_and_means_are_exact_and_their_intervals_hold_them():
    random_ = random.Random(0)
    for _ in range(400):
        parts, wholes, tasks = columns(random_)
        is_sound(statistics.rate(parts, wholes, tasks), exact_rate(parts, wholes), share=True)
        values = [part / whole if whole else part for part, whole in zip(parts, wholes, strict=True)]
        exact = exact_rate(values, [1.0] * len(values))
        is_sound(statistics.mean(values, tasks, is_share=True), exact, share=True)
    for _ in range(40):
        parts, wholes, tasks = columns(random_)
        found = statistics.rate([1e6 * part for part in parts], wholes, tasks, is_share=False)
        exact = exact_rate(parts, wholes)
        is_sound(replace(found, low=None, high=None, num_tasks=1), exact and exact * 10**6, share=False)


@pytest.mark.parametrize("value", TRICKY)
@pytest.mark.parametrize("tasks", [2, 3, 7, 16, 1000])
def test_equal_tasks_are_as_sure_as_each_other_whatever_they_equal(value: float, tasks: int):
    """Floating point alone must not make the interval of equal figures narrow: 0.1 is not surer than 0.5."""
    found = statistics.mean([value] * tasks, range(tasks), is_share=True)
    is_sound(found, Fraction(value), share=True)
    assert found.low is not None and found.high is not None
    assert found.high - found.low > 0.4 / tasks
    mirrored = statistics.mean([1.0 - value] * tasks, range(tasks), is_share=True)
    assert mirrored.low == pytest.approx(1 - found.high, abs=1e-9)


@pytest.mark.parametrize("tasks", [2, 8, 16, 50])
def test_all_but_rounding_solved_is_as_all_solved(tasks: int):
    """What ended a run: one task's best@k a rounding below 1, all others 1."""
    whole = statistics.mean([1.0] * tasks, range(tasks), is_share=True)
    for low in (NEAR_ONE, 1 - 2e-16, 1 - 1e-15):
        found = statistics.mean([low] + [1.0] * (tasks - 1), range(tasks), is_share=True)
        assert (found.low, found.high) == (pytest.approx(whole.low), pytest.approx(1.0))
    none = statistics.mean([0.0] * tasks, range(tasks), is_share=True)
    found = statistics.mean([NEAR_ZERO] + [0.0] * (tasks - 1), range(tasks), is_share=True)
    assert (found.low, found.high) == (pytest.approx(0.0), pytest.approx(none.high))


def test_sums_are_exact():
    random_ = random.Random(1)
    for _ in range(100):
        parts, wholes, tasks = columns(random_)
        found = statistics.sums(parts, wholes, tasks)
        assert list(found) == list(dict.fromkeys(tasks))
        for task, pair in found.items():
            rows = [i for i, t in enumerate(tasks) if t == task]
            for total, column in zip(pair, (parts, wholes), strict=True):
                assert total == pytest.approx(float(sum(Fraction(column[i]) for i in rows)), rel=1e-14)


def test_differences_records_and_arms_are_exact():
    random_ = random.Random(2)
    for _ in range(200):
        made = [statistics.sums(*columns(random_)) for _ in range(random_.randint(2, 4))]
        cut = random_.randint(1, len(made) - 1)
        before, after = made[:cut], made[cut:]
        common = set.intersection(*(set(side) for side in made))
        figures = [
            exact_rate(
                [side[t][0] for side in arm for t in common], [side[t][1] for side in arm for t in common]
            )
            for arm in (before, after)
        ]
        exact = None if figures[0] is None or figures[1] is None else figures[1] - figures[0]
        for found in (
            statistics.difference_over_seeds(before, after, is_share=True),
            statistics.difference_over_seeds(before, after),
        ):
            sound_difference(found, exact)
        one = statistics.rate_over_seeds(before, is_share=True)
        own = set.intersection(*(set(side) for side in before))
        parts, wholes = zip(*(side[t] for side in before for t in own), strict=True) if own else ((), ())
        is_sound(one, exact_rate(parts, wholes), share=True)
        kept = statistics.record(before[0], after[0])
        signs = [
            Fraction(after[0][t][0]) / Fraction(after[0][t][1])
            - Fraction(before[0][t][0]) / Fraction(before[0][t][1])
            for t in set(before[0]) & set(after[0])
            if before[0][t][1] and after[0][t][1]
        ]
        close = Fraction(1, 10**12)
        assert kept.up == sum(sign > close for sign in signs)
        assert kept.down == sum(sign < -close for sign in signs)
        assert kept.up + kept.down + kept.same == len(signs)


def sound_difference(found: Difference, exact: Fraction | None) -> None:
    if exact is None:
        assert found.value is found.low is found.high is None and not found.is_clear
        return
    assert found.value == pytest.approx(float(exact), abs=1e-12)
    if found.low is not None and found.high is not None:
        assert math.isfinite(found.low) and math.isfinite(found.high) and found.low <= found.high
    assert found.detectable is None or found.detectable > 0


def test_equal_sides_differ_by_nothing_even_where_they_were_added_in_another_order():
    """0.1 + 0.2 and 0.3 differ by floating point; that is no finding."""
    before = {n: (0.1 + 0.2, 1.0) for n in range(12)}
    after = {n: (0.3, 1.0) for n in range(12)}
    for is_share in (False, True):
        found = statistics.difference(before, after, is_share=is_share)
        assert found.value == pytest.approx(0, abs=1e-12) and not found.is_clear
        seeds = statistics.difference_over_seeds([before, before], [after, before], is_share=is_share)
        assert not seeds.is_clear
    assert statistics.record(before, after) == statistics.Record(0, 0, 12)


def test_a_tiny_spread_over_seeds_is_no_error():
    side = {n: (1e-90 * (n + 1), 1.0) for n in range(5)}
    more = {n: (1e-90 * (n + 2), 1.0) for n in range(5)}
    found = statistics.difference_over_seeds([side, more], [more, side])
    assert found.low is not None and math.isfinite(found.low)
    assert statistics.difference(side, more).value == pytest.approx(1e-90, rel=1e-9)


@pytest.mark.parametrize(
    ("up", "down"), [(0, 0), (1, 0), (3, 3), (9, 2), (0, 40), (400, 350), (30_000, 29_000)]
)
def test_the_sign_test_is_exact(up: int, down: int):
    count, fewer = up + down, min(up, down)
    term, tail = 1, 1  # of C(n, 0), C(n, 1), ...
    for k in range(1, fewer + 1):
        term = term * (count - k + 1) // k
        tail += term
    exact = min(Fraction(1), Fraction(2 * tail, 2**count)) if count else Fraction(1)
    assert statistics.Record(up, down, 5).p_value == pytest.approx(float(exact), rel=1e-9)


def drawn(task: Sequence[tuple[Any, float]], k: int) -> Fraction:
    """Mean reward of the best of every k, those that tie chosen at random."""
    worth = Fraction(0)
    for chosen in itertools.combinations(task, k):
        top = max(score for score, _ in chosen)
        tied = [Fraction(reward) for score, reward in chosen if score == top]
        worth += sum(tied, Fraction(0)) / len(tied)
    return worth / math.comb(len(task), k)


def test_pass_at_k_pass_hat_k_and_best_of_k_equal_trying_every_draw():
    random_ = random.Random(3)
    for _ in range(150):
        k, tasks = random_.randint(1, 4), []
        for _ in range(random_.randint(1, 5)):
            rewards = [random_.choice((0.0, 0.1, NEAR_ONE, 1.0, 1.0)) for _ in range(random_.randint(k, 7))]
            tasks.append([((random_.randint(0, 2), random_.random() < 0.5), reward) for reward in rewards])
        scores, rewards = ([[pair[i] for pair in task] for task in tasks] for i in (0, 1))
        exact = sum((drawn(task, k) for task in tasks), Fraction(0)) / len(tasks)
        is_sound(statistics.best_of_k(scores, rewards, k), exact, share=True)
        solved, counts = [sum(r == 1.0 for r in task) for task in rewards], list(map(len, rewards))
        hat = [Fraction(math.comb(c, k), math.comb(n, k)) for c, n in zip(solved, counts, strict=True)]
        at = [1 - Fraction(math.comb(n - c, k), math.comb(n, k)) for c, n in zip(solved, counts, strict=True)]
        is_sound(statistics.pass_hat_k(solved, counts, k), sum(hat, Fraction(0)) / len(hat), share=True)
        is_sound(statistics.pass_at_k(solved, counts, k), sum(at, Fraction(0)) / len(at), share=True)


@pytest.mark.parametrize("ties", [(2, 3, 3), (8,), (1,) * 8, (3, 5), (7, 1)])
@pytest.mark.parametrize("k", [1, 2, 4, 8])
def test_the_best_of_attempts_that_were_all_solved_is_1_exactly(ties: tuple[int, ...], k: int):
    scores = [[rank for rank, count in enumerate(ties) for _ in range(count)]] + [list(range(8))] * 15
    found = statistics.best_of_k(scores, [[1.0] * 8] * 16, k)
    assert found.value == 1.0 and found.low is not None and 0 < found.low < 1 and found.high == 1.0


def test_huge_counts_neither_overflow_nor_round_to_certainty():
    found = statistics.pass_at_k([10**6 - 1, 1], [10**6, 10**6], 500)
    exact = [1.0, float(Fraction(500, 10**6))]
    assert found.value == pytest.approx(sum(exact) / 2, rel=1e-9)
    many = statistics.rate([1e15] * 3 + [1e15 - 1], [1e15] * 4, range(4))
    assert many.value is not None and many.value < 1 and many.low is not None and many.low < many.value
    assert statistics.mean([1e300, 1e300], [0, 1]).value == pytest.approx(1e300)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_what_is_no_number_is_named_and_never_averaged(bad: float):
    with pytest.raises(ValueError, match=r"task b: (nan|-?inf) of 1.0"):
        statistics.mean([0.5, bad], ["a", "b"])
    with pytest.raises(ValueError, match=r"0.5 of (nan|-?inf)"):
        statistics.sums([0.5], [bad], ["a"])
    with pytest.raises(ValueError, match="cannot be ranked"):
        statistics.best_of_k([[1, 2]], [[0.0, bad]], 1)
    if math.isnan(bad):
        for score in (bad, (1.0, bad)):
            with pytest.raises(ValueError, match="cannot be ranked"):
                statistics.best_of_k([[score, score]], [[0.0, 1.0]], 1)
    with pytest.raises(ValueError, match=r"-1\.0"):
        statistics.rate([0.0], [-1.0], ["a"])


def test_nothing_at_all_has_no_figure():
    nothing = statistics.rate([], [], [])
    assert (nothing.value, nothing.low, nothing.num_tasks) == (None, None, 0)
    assert statistics.pass_at_k([], [], 1).value is None and statistics.best_of_k([], [], 1).value is None
    for is_share in (True, False):
        assert statistics.difference({}, {}, is_share=is_share).value is None
        assert statistics.difference({"a": (1.0, 1.0)}, {"b": (1.0, 1.0)}, is_share=is_share).value is None
        assert statistics.difference_over_seeds([], [], is_share=is_share).value is None
        assert statistics.difference_over_seeds([{"a": (1.0, 1.0)}], [], is_share=is_share).value is None
        assert statistics.rate_over_seeds([], is_share=is_share).value is None
    assert statistics.record({}, {}).p_value == 1.0
    assert measures.compare([], [])[0].change.value is None
    assert measures.summary([]).passes == {}


def graded(task: int, solved: int, attempts: int, promises: Sequence[float]) -> list[measures.Graded]:
    made = [attempt(task, n < solved) for n in range(attempts)]
    return [
        measures.Graded(replace(r, id=f"{r.id}-{n}", turns=(replace(r.turns[0], logps=(promise,)),)), v)
        for n, ((r, v), promise) in enumerate(zip(made, promises, strict=True))
    ]


def test_a_step_in_which_nearly_all_is_solved_is_summed_up():
    """16 tasks x 8 attempts, all solved, promises tied at random: 63 % of such steps divided by zero."""
    random_ = random.Random(4)
    for _ in range(12):
        groups = [graded(n, 8, 8, [-random_.randint(1, 3) / 4 for _ in range(8)]) for n in range(16)]
        if random_.random() < 0.5:
            groups[0] = graded(0, 7, 8, [-0.5] * 8)
        made = [one for group in groups for one in group]
        found = measures.summary(made)
        rows = measures.compare(made, made)
        for estimate in (*found.passes.values(), *found.estimates.values()):
            assert estimate.value is None or math.isfinite(estimate.value)
        assert not any(row.change.is_clear for row in rows)


def test_a_damaged_reward_is_void_and_a_damaged_log_prob_is_no_promise():
    made = graded(0, 2, 2, [-0.5, math.nan]) + graded(1, 2, 2, [-0.5, -0.25])
    assert measures.promise(made[1])[-1] == -math.inf
    assert made[0].verdict is not None
    made[0] = replace(made[0], verdict=replace(made[0].verdict, reward=math.nan))
    found = measures.summary(made)
    assert found.num_void == 1 and found.estimates["reward"].value == 1.0
