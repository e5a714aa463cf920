"""Figures and intervals: closed forms, coverage by simulation, and what counts as what."""

from __future__ import annotations

import itertools
import json
import math
from typing import Literal

import numpy as np
import pytest

from woodshed.evals import measures, statistics
from woodshed.evals.measures import MEASURES, write_change, write_counts, write_estimate
from woodshed.feedback.detectors import is_untested
from woodshed.records import CALL_FAULTS, Call, Ended, ErrorKind, Observation, Patch, Rollout, Turn, Verdict

# -- statistics --------------------------------------------------------------------------------------------------


def test_rate_is_a_ratio_of_sums():
    estimate = statistics.rate([1, 0, 3], [4, 2, 6], ["a", "a", "b"])
    assert estimate.value == pytest.approx(4 / 12)
    assert (estimate.part, estimate.whole, estimate.num_tasks, estimate.num_attempts) == (4, 12, 2, 3)


def test_interval_of_a_mean_approaches_students_t():
    """With many tasks of one attempt each, the bootstrap must agree with mean +- t * s / sqrt(n)."""
    values = np.random.default_rng(3).normal(5, 2, size=200)
    estimate = statistics.mean(values.tolist(), range(200))
    reach = 1.972 * values.std(ddof=1) / math.sqrt(200)  # t quantile for 199 degrees of freedom
    assert estimate.low is not None and estimate.high is not None
    assert estimate.low == pytest.approx(values.mean() - reach, abs=0.1 * reach)
    assert estimate.high == pytest.approx(values.mean() + reach, abs=0.1 * reach)


def test_attempts_at_one_task_are_not_independent():
    """Repeating every attempt ten times adds no information, so the interval must not shrink."""
    values, tasks = [0.0, 1.0, 1.0, 0.0, 1.0, 0.0], list("abcdef")
    once = statistics.mean(values, tasks, is_share=True)
    tenfold = statistics.mean(values * 10, tasks * 10, is_share=True)
    assert (once.low, once.high) == (tenfold.low, tenfold.high)


def test_same_data_same_interval():
    values = np.random.default_rng(0).random(60).tolist()
    assert statistics.mean(values, range(60)) == statistics.mean(values, range(60))


def test_nothing_seen_is_not_certainty():
    """0 of n: the exact binomial bound 1 - .025^(1/n), with tasks as n."""
    none = statistics.rate([0] * 40, [5] * 40, [i // 2 for i in range(40)])
    assert (none.value, none.low) == (0, 0)
    assert none.high == pytest.approx(1 - 0.025 ** (1 / 20))
    every = statistics.mean([1.0] * 10, range(10), is_share=True)
    assert (every.value, every.high) == (1, 1)
    assert every.low == pytest.approx(0.025 ** (1 / 10))


def test_too_little_to_say():
    assert statistics.mean([1.0, 0.0], ["a", "a"]).low is None
    assert statistics.rate([], [], []).value is None
    assert statistics.rate([0.0], [0.0], ["a"]).value is None
    assert statistics.difference({}, {"a": (1, 1)}).value is None


@pytest.mark.parametrize(("num_tasks", "attempts"), [(30, 4), (60, 2)])
def test_coverage(num_tasks: int, attempts: int, monkeypatch: pytest.MonkeyPatch):
    """The interval holds the truth about 95 times in 100, for faulty turns / turns with tasks that differ."""
    monkeypatch.setattr(statistics, "RESAMPLES", 1000)
    rng, hits, trials = np.random.default_rng(7), 0, 600
    tasks = np.repeat(np.arange(num_tasks), attempts).tolist()
    for _ in range(trials):
        rates_N = np.repeat(rng.beta(2, 8, num_tasks), attempts)
        turns_N = rng.integers(3, 8, len(tasks))
        estimate = statistics.rate(rng.binomial(turns_N, rates_N).tolist(), turns_N.tolist(), tasks)
        assert estimate.low is not None and estimate.high is not None
        hits += estimate.low <= 0.2 <= estimate.high
    assert 0.925 <= hits / trials <= 0.975  # 0.95 +- 2.8 standard errors


def test_difference_is_paired():
    """Where tasks differ much and the change is the same at each, pairing sees it and two intervals would not."""
    levels = np.random.default_rng(1).uniform(0.1, 0.8, 40)
    before = {i: (level, 1.0) for i, level in enumerate(levels)}
    after = {i: (level + 0.1, 1.0) for i, level in enumerate(levels)}
    change = statistics.difference(before, after)
    assert change.value == pytest.approx(0.1)
    assert change.low == pytest.approx(0.1) and change.high == pytest.approx(0.1)
    assert change.is_clear and change.num_tasks == 40


def test_difference_leaves_out_tasks_without_a_partner():
    change = statistics.difference({"a": (0, 2), "b": (2, 2), "c": (2, 2)}, {"a": (2, 2), "b": (2, 2)})
    assert (change.value, change.num_tasks) == (0.5, 2)


def test_no_change_seen_is_not_certainty():
    same = {i: (0.0, 1.0) for i in range(30)}
    change = statistics.difference(same, same, is_share=True)
    assert change.value == 0 and not change.is_clear
    assert change.high == pytest.approx(1 - 0.025 ** (1 / 30))


@pytest.mark.parametrize("k", [1, 2, 5])
def test_pass_at_k_equals_trying_every_draw(k: int):
    solved, attempts = [0, 1, 3, 5], [5, 5, 5, 5]
    any_of, all_of = [], []
    for c, n in zip(solved, attempts, strict=True):
        draws = list(itertools.combinations([True] * c + [False] * (n - c), k))
        any_of.append(np.mean([any(draw) for draw in draws]))
        all_of.append(np.mean([all(draw) for draw in draws]))
    assert statistics.pass_at_k(solved, attempts, k).value == pytest.approx(np.mean(any_of))
    assert statistics.pass_hat_k(solved, attempts, k).value == pytest.approx(np.mean(all_of))


def test_pass_at_k_needs_k_attempts():
    with pytest.raises(ValueError, match="k = 3 needs at least k attempts"):
        statistics.pass_at_k([1], [2], 3)


# -- measures ----------------------------------------------------------------------------------------------------


def turn(kind: ErrorKind | None = None, tool: str = "shell", tokens: int = 3) -> Turn:
    fault = kind if kind in CALL_FAULTS else None
    call = Call("1", tool, {}, "", fault)
    seen = Observation("1", "", kind)
    return Turn(
        (1, 2), 1, (5,) * tokens, (-0.5,) * tokens, ((0, tokens),), "stop", "", (call,), (seen,), fault
    )


def attempt(task: str, n: int, *turns: Turn, ended: Ended = "finished") -> Rollout:
    return Rollout(f"eval-0-{task}-{n}", task, task, n, 0, turns, Patch({}), ended, 1.0)


def verdict(rollout: Rollout, solved: bool, status: Literal["graded", "invalid"] = "graded") -> Verdict:
    return Verdict(rollout.id, rollout.task_id, status, float(solved), solved, {})


def test_summary_counts():
    rollouts = [
        attempt("a", 0, turn("no_call"), turn(), turn(tool="finish")),
        attempt("a", 1, turn(tool="edit_file"), turn(tool="finish"), ended="finished"),
        attempt("b", 0, turn("nonzero_exit"), turn("bad_path"), turn("no_call"), ended="max_turns"),
    ]
    graded = measures.pair(rollouts, [verdict(r, r.id == "eval-0-a-0") for r in rollouts])
    summary = measures.summary(graded)
    figures = summary.estimates
    assert (figures["invalid_calls"].part, figures["invalid_calls"].whole) == (
        3,
        8,
    )  # a failed command is news
    assert (figures["faulty_rollouts"].part, figures["faulty_rollouts"].whole) == (2, 3)
    assert (figures["untested"].part, figures["untested"].whole) == (1, 3)
    assert (figures["solved"].part, figures["solved"].whole) == (1, 3)
    assert figures["tokens"].value == pytest.approx(8)
    assert {kind: e.part for kind, e in summary.faults.items()} == {"no_call": 2, "bad_path": 1}
    assert (summary.num_tasks, summary.num_attempts, summary.num_void) == (2, 3, 0)
    assert summary.ended == {"finished": 2, "max_turns": 1}


def test_void_attempts_are_counted_and_enter_no_figure():
    good, lost, invalid = (attempt("a", n, turn(), ended="finished") for n in range(3))
    lost = attempt("a", 1, turn("no_call"), ended="sandbox_lost")
    verdicts = [verdict(good, True), verdict(invalid, False, "invalid")]
    summary = measures.summary(measures.pair([good, lost, invalid], verdicts))
    assert (summary.num_attempts, summary.num_void) == (3, 2)
    assert (summary.estimates["solved"].part, summary.estimates["solved"].whole) == (1, 1)
    assert summary.estimates["invalid_calls"].part == 0


def test_attempts_that_nobody_judged_have_no_solve_rate():
    metrics = json.loads(json.dumps(measures.summarize([attempt("a", 0, turn())], [])))
    assert metrics["solved"]["value"] is None
    assert metrics["turns"]["value"] == 1
    assert metrics["num_attempts"] == 1


def test_before_and_after_as_written():
    before = measures.pair([attempt(t, 0, turn("no_call"), turn()) for t in "abcdef"], [])
    after = measures.pair([attempt(t, 0, turn(), turn()) for t in "abcdef"], [])
    row = measures.compare(before, after)[0]
    assert row.measure.key == "invalid_calls"
    assert write_estimate(row.measure, row.before).startswith("50.0% [")
    assert write_counts(row.measure, row.before) == "6 / 12 turns"
    assert write_change(row.measure, row.change).startswith("-50.0 pp [")
    tokens = next(m for m in MEASURES if m.key == "tokens")
    assert write_change(tokens, statistics.Difference(3.5, -1.0, 8.0, 9)) == "+3.50 [-1.00, +8.00]"
    assert write_estimate(tokens, statistics.rate([], [], [])) == "-"


def test_finishing_without_a_command_that_ran():
    finish = turn(tool="finish")
    assert is_untested(attempt("a", 0, turn("bad_arguments"), finish)), "a refused call ran nothing"
    assert is_untested(attempt("a", 0, turn(), turn(tool="edit_file"), finish)), (
        "the change came after the test"
    )
    assert not is_untested(attempt("a", 0, turn(tool="edit_file"), turn("nonzero_exit"), finish))
    assert not is_untested(attempt("a", 0, turn(tool="edit_file"), ended="max_turns"))
