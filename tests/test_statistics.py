"""Intervals and tests against scipy and statsmodels on random data, closed forms, and coverage by simulation."""

from __future__ import annotations

import importlib.util
import itertools
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
from scipy import stats

from woodshed.evals import statistics

RNG = np.random.default_rng(11)


def test_share_of_single_attempts_is_wilsons_interval():
    oracle = pytest.importorskip("statsmodels.stats.proportion")
    for solved in (3, 40, 500, 997):
        found = statistics.mean([1.0] * solved + [0.0] * (1000 - solved), range(1000), is_share=True)
        low, high = oracle.proportion_confint(solved, 1000, method="wilson")
        assert found.low == pytest.approx(low, abs=2e-4)  # normal against t, n against n - 1
        assert found.high == pytest.approx(high, abs=2e-4)


def test_count_is_the_percentile_bootstrap():
    values = RNG.gamma(2.0, 50.0, size=150)
    found = statistics.mean(values.tolist(), range(150))
    oracle = stats.bootstrap((values,), np.mean, method="percentile", n_resamples=4000, rng=1)
    reach = oracle.confidence_interval.high - oracle.confidence_interval.low
    assert found.low == pytest.approx(oracle.confidence_interval.low, abs=0.05 * reach)
    assert found.high == pytest.approx(oracle.confidence_interval.high, abs=0.05 * reach)


def test_paired_difference_is_the_paired_bootstrap():
    before, after = RNG.normal(10, 3, 120), RNG.normal(11, 3, 120)
    sides = [{i: (float(x), 1.0) for i, x in enumerate(side)} for side in (before, after)]
    found = statistics.difference(*sides)
    oracle = stats.bootstrap(
        (before, after),
        lambda b, a, axis: (a - b).mean(axis),
        paired=True,
        method="percentile",
        n_resamples=4000,
        rng=1,
    )
    reach = oracle.confidence_interval.high - oracle.confidence_interval.low
    assert found.low == pytest.approx(oracle.confidence_interval.low, abs=0.05 * reach)
    assert found.high == pytest.approx(oracle.confidence_interval.high, abs=0.05 * reach)


def test_standard_error_is_exact_for_single_attempts_and_right_for_ratios():
    part, whole = RNG.binomial(5, 0.3, 400).astype(float), RNG.integers(3, 9, 400).astype(float)
    ones = np.ones(400)
    assert statistics.standard_error([(part, ones)], [1.0]) == pytest.approx(stats.sem(part))
    rows = np.stack([part, whole])
    ratios = [np.divide(*rows[:, RNG.integers(0, 400, 400)].sum(1)) for _ in range(4000)]
    assert statistics.standard_error([(part, whole)], [1.0]) == pytest.approx(np.std(ratios), rel=0.05)


def test_mcnemar_equals_statsmodels():
    oracle = pytest.importorskip("statsmodels.stats.contingency_tables")
    for _ in range(50):
        before, after = RNG.integers(0, 2, (2, 30))
        sides = [{i: (float(x), 1.0) for i, x in enumerate(side)} for side in (before, after)]
        found = statistics.record(*sides)
        assert found.up == ((before == 0) & (after == 1)).sum()
        table = [[int(((before == i) & (after == j)).sum()) for j in (0, 1)] for i in (0, 1)]
        assert found.p_value == pytest.approx(oracle.mcnemar(table, exact=True).pvalue)
    assert statistics.Record(0, 0, 5).p_value == 1.0


@pytest.mark.parametrize("num_tasks", [10, 30, 200])
def test_detectable_difference_equals_a_power_calculation(num_tasks: int):
    oracle = pytest.importorskip("statsmodels.stats.power")
    gains = RNG.normal(0, 1, num_tasks)
    sides = [{i: (0.0, 1.0) for i in range(num_tasks)}, {i: (float(g), 1.0) for i, g in enumerate(gains)}]
    effect = oracle.TTestPower().solve_power(nobs=num_tasks, alpha=0.05, power=0.8)
    assert statistics.difference(*sides).detectable == pytest.approx(effect * gains.std(ddof=1), rel=0.015)


def test_arms_of_one_seed_are_students_paired_t():
    before, after = RNG.normal(5, 1, (2, 40))
    sides = [[{i: (float(x), 1.0) for i, x in enumerate(side)}] for side in (before, after)]
    found = statistics.difference_over_seeds(*sides)
    oracle = stats.ttest_rel(after, before).confidence_interval(0.95)
    assert (found.low, found.high) == (pytest.approx(oracle.low), pytest.approx(oracle.high))


def test_arms_whose_tasks_are_alike_are_welchs_t():
    """Where every task of a run has the same rate, seeds are the only chance there is."""
    rates = [RNG.normal(0.4, 0.05, 4), RNG.normal(0.5, 0.02, 3)]
    sides = [[{i: (float(r), 1.0) for i in range(25)} for r in arm] for arm in rates]
    found = statistics.difference_over_seeds(*sides)
    oracle = stats.ttest_ind(rates[1], rates[0], equal_var=False).confidence_interval(0.95)
    assert (found.low, found.high) == (pytest.approx(oracle.low), pytest.approx(oracle.high))
    single = statistics.rate_over_seeds(sides[0])
    mean = stats.t.interval(0.95, 3, rates[0].mean(), stats.sem(rates[0]))
    assert (single.low, single.high) == (pytest.approx(mean[0]), pytest.approx(mean[1]))


@pytest.mark.parametrize("k", [1, 2, 3])
def test_best_of_k_equals_trying_every_draw(k: int):
    """Attempts that the selector cannot tell apart are chosen among at random."""
    scores, rewards = [[1, 2, 2, 5], [0, 0, 0, 0], [3, 1, 2, 2]], [[1, 0, 1, 0], [1, 0, 0, 0], [0.5, 1, 0, 1]]
    expected = []
    for task_scores, task_rewards in zip(scores, rewards, strict=True):
        chosen = []
        for draw in itertools.combinations(range(4), k):
            top = max(task_scores[i] for i in draw)
            chosen.append(np.mean([task_rewards[i] for i in draw if task_scores[i] == top]))
        expected.append(np.mean(chosen))
    assert statistics.best_of_k(scores, rewards, k).value == pytest.approx(np.mean(expected))
    with pytest.raises(ValueError, match="k = 5"):
        statistics.best_of_k(scores, rewards, 5)


def test_solves_that_did_not_change_are_not_certain_to_stay():
    """Some tasks are solved on both sides, none differs: the bootstrap alone would answer [0, 0]."""
    same = {i: (float(i < 6), 1.0) for i in range(30)}
    found = statistics.difference(same, same, is_share=True)
    assert found.value == 0 and found.high == pytest.approx(1 - 0.025 ** (1 / 30))
    assert found.detectable is not None and found.detectable > 0


def test_few_tasks_that_differ_do_not_make_it_clear():
    """Two tasks won of thirty is p = 0.5 by McNemar; the interval must agree that this can be nothing."""
    before = {i: (float(i < 6), 1.0) for i in range(30)}
    after = {i: (float(i < 8), 1.0) for i in range(30)}
    found = statistics.difference(before, after, is_share=True)
    assert not found.is_clear and found.low is not None and found.high is not None and found.value is not None
    assert found.low < 0 < found.value < found.high


@pytest.fixture(scope="module")
def benchmark() -> ModuleType:
    path = Path(__file__).parent.parent / "benchmarks" / "interval_coverage.py"
    spec = importlib.util.spec_from_file_location("interval_coverage", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize(("num_tasks", "attempts", "rate"), [(30, 4, 0.5), (60, 1, 0.2), (120, 4, 0.8)])
def test_coverage_of_rates_and_changes(
    benchmark: ModuleType, monkeypatch, num_tasks: int, attempts: int, rate: float
):
    """A slice of benchmarks/interval_coverage.py: 93% to 97%, plus 2.5 standard errors of 400 trials."""
    monkeypatch.setattr(statistics, "RESAMPLES", 1000)
    monkeypatch.setattr(benchmark, "NESTED_RESAMPLES", 1)
    held = benchmark.one_policy(num_tasks, attempts, rate, 6.0, 400)
    assert 0.903 <= held["rate"] <= 0.99 and 0.903 <= held["change"] <= 0.995


def test_coverage_of_arms(benchmark: ModuleType):
    assert 0.9 <= benchmark.two_arms(60, 2, 3, 0.04, 200) <= 0.995
