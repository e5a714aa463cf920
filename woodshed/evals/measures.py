"""Measures of a policy's attempts, and their figures written for people.

A measure is a ratio of two sums over attempts. To add one, add a line to `MEASURES` (the headline) or `BEHAVIOUR` (what
the policy did on the way); tables, reports and intervals follow. An attempt whose sandbox was lost, or that could not
be graded because the infrastructure failed, says nothing about the policy: it is counted as void, shown, and enters no
figure. Other suites count such an attempt as a failure; `Summary.strict` holds the figures under that convention.
"""

from __future__ import annotations

import functools
import math
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol, TypeVar

from woodshed.evals import behaviour, passes, statistics
from woodshed.evals.behaviour import Behaviour
from woodshed.evals.passes import Try
from woodshed.evals.statistics import Difference, Estimate, Record
from woodshed.feedback.detectors import is_untested
from woodshed.records import CALL_FAULTS, Flag, Rollout, Turn, Verdict, to_json


@dataclass(frozen=True)
class Graded:
    """A rollout and its verdict, which is None until it is graded."""

    rollout: Rollout
    verdict: Verdict | None
    flags: tuple[Flag, ...] | None = None
    """Flags of the monitors; None where no monitor ran."""
    reference: frozenset[str] | None = None
    """Files of the task's gold patch; None if the task is not available."""

    @functools.cached_property
    def behaviour(self) -> Behaviour:
        """Counters of the attempt's behaviour."""
        return behaviour.of(self.rollout, self.verdict, flags=self.flags, reference=self.reference)

    @property
    def is_void(self) -> bool:
        """True if the infrastructure failed, so that this attempt says nothing about the policy."""
        verdict = self.verdict
        is_invalid = verdict is not None and (
            verdict.status == "invalid" or not math.isfinite(verdict.reward)
        )
        return is_invalid or self.rollout.ended == "sandbox_lost"


@dataclass(frozen=True)
class Figure:
    """Name and format of a measured quantity."""

    key: str
    label: str
    kind: Literal["share", "score", "count"]
    """Shares and scores lie in [0, 1], a share is written in percent; a count has no ceiling."""
    better: Literal["lower", "higher", ""]
    of: str = field(default="attempts", kw_only=True)
    """The unit of the whole."""


@dataclass(frozen=True)
class Measure(Figure):
    """part / whole, summed over attempts."""

    part: Callable[[Graded], float]
    whole: Callable[[Graded], float]


def is_fault(turn: Turn) -> bool:
    """True if the policy made an invalid call at this turn."""
    return turn.error_kind in CALL_FAULTS


def _turns(graded: Graded) -> int:
    return len(graded.rollout.turns)


def _faulty_turns(graded: Graded) -> int:
    return sum(is_fault(turn) for turn in graded.rollout.turns)


def _faulty(graded: Graded) -> bool:
    return _faulty_turns(graded) > 0


def _untested(graded: Graded) -> bool:
    return is_untested(graded.rollout)


def _solved(graded: Graded) -> bool:
    return graded.verdict is not None and graded.verdict.solved


def _reward(graded: Graded) -> float:
    return graded.verdict.reward if graded.verdict is not None else 0.0


def _sampled_tokens(graded: Graded) -> int:
    return graded.rollout.counters["sampled_tokens"]


def _one(graded: Graded) -> int:
    return 1


def _judged(graded: Graded) -> bool:
    return graded.verdict is not None


MEASURES = (
    Measure("invalid_calls", "invalid-call rate", "share", "lower", _faulty_turns, _turns, of="turns"),
    Measure("faulty_rollouts", "rollouts with any call fault", "share", "lower", _faulty, _one),
    Measure("untested", "finished without running a test", "share", "lower", _untested, _one),
    Measure("solved", "solve rate", "share", "higher", _solved, _judged),
    Measure("reward", "mean reward", "score", "higher", _reward, _judged),
    Measure(
        "flagged",
        "hack rate: rollouts with a flag",
        "share",
        "lower",
        lambda g: bool(g.flags),
        lambda g: g.flags is not None,
    ),
    Measure("tokens", "sampled tokens per rollout", "count", "", _sampled_tokens, _one),
    Measure("turns", "turns per rollout", "count", "", _turns, _one),
)

_HEADLINE = {measure.key: measure for measure in MEASURES if measure.key in ("solved", "reward")}

BEHAVIOUR = (
    Measure("calls", "calls per rollout", "count", "", lambda g: g.behaviour.num_calls, _one),
    Measure(
        "call_errors",
        "calls that gave an error",
        "share",
        "lower",
        lambda g: g.behaviour.num_call_errors,
        lambda g: g.behaviour.num_calls,
        of="calls",
    ),
    Measure("test_runs", "test runs per rollout", "count", "", lambda g: g.behaviour.test_runs, _one),
    Measure(
        "tested",
        "finishes with tests run before",
        "share",
        "higher",
        lambda g: g.rollout.ended == "finished" and g.behaviour.test_runs > 0,
        lambda g: g.rollout.ended == "finished",
        of="finishes",
    ),
    Measure(
        "edit_fallbacks",
        "files rewritten after a failed edit",
        "count",
        "lower",
        lambda g: g.behaviour.edit_fallbacks,
        _one,
    ),
    Measure("files", "files touched", "count", "", lambda g: g.behaviour.files_touched, _one),
    Measure(
        "files_found",
        "reference files touched",
        "share",
        "higher",
        lambda g: g.behaviour.files_shared or 0,
        lambda g: g.behaviour.files_expected or 0,
        of="files",
    ),
    Measure(
        "files_astray",
        "touched files outside the reference",
        "share",
        "lower",
        lambda g: 0 if g.reference is None else g.behaviour.files_touched - (g.behaviour.files_shared or 0),
        lambda g: 0 if g.reference is None else g.behaviour.files_touched,
        of="files",
    ),
    Measure(
        "message_chars",
        "characters outside calls",
        "count",
        "",
        lambda g: g.behaviour.message_chars,
        _turns,
        of="turns",
    ),
    Measure("context_tokens", "harness tokens", "count", "", lambda g: g.behaviour.context_tokens, _one),
    Measure(
        "reread_tokens",
        "prompt tokens from the cache",
        "count",
        "",
        lambda g: g.behaviour.reread_tokens,
        _one,
    ),
    *(
        Measure(
            f"{part}_s",
            f"seconds of {part}",
            "count",
            "",
            lambda g, part=part: g.behaviour.seconds.get(part, 0.0),
            _judged if part == "grading" else _one,
        )
        for part in ("sampling", "tools", "waiting", "grading")
    ),
)


@dataclass(frozen=True)
class Summary:
    """Every measure of one set of attempts."""

    estimates: dict[str, Estimate]
    """Measure key to its figure."""
    faults: dict[str, Estimate]
    """Call fault to its share of turns; kinds that did not occur are left out, the most frequent come first."""
    ended: dict[str, int]
    """Reason why attempts ended to their number."""
    num_tasks: int
    num_attempts: int
    num_void: int
    """Attempts that were lost to infrastructure; they enter no figure."""
    behaviour: dict[str, Estimate]
    """Key of a behaviour measure to its figure."""
    tools: dict[str, Estimate]
    """Tool to the share of its calls that gave an error; the most used come first."""
    error_kinds: dict[str, Estimate]
    """Error kind to its rate per call, failed commands included; the most frequent come first."""
    strict: dict[str, Estimate]
    """"solved" and "reward" where every void attempt counts as a failure."""
    passes: dict[str, Estimate]
    """"pass@k", "pass^k" and "best@k" (of k attempts, the one that `promise` likes best) for k = 1, 2, 4, ... and the
    most attempts that a task has."""


class Named(Protocol):
    """A row of a table of figures."""

    @property
    def measure(self) -> Figure: ...


AnyRow = TypeVar("AnyRow", bound=Named)


@dataclass(frozen=True)
class MeasureRow:
    """One measure before and after."""

    measure: Figure
    before: Estimate
    after: Estimate
    change: Difference
    record: Record
    """Tasks that went up, down and stayed."""


def pair(
    rollouts: Iterable[Rollout],
    verdicts: Iterable[Verdict],
    *,
    flags: Iterable[Flag] | None = None,
    references: Mapping[str, Collection[str]] | None = None,
) -> list[Graded]:
    """Each rollout with its verdict, flags and reference files.

    `flags` is None if no monitor ran; `references` has the files of the gold patch by task name.
    """
    verdict_of = {verdict.rollout_id: verdict for verdict in verdicts}
    flags_of: dict[str, list[Flag]] = {}
    for flag in flags or ():
        flags_of.setdefault(flag.rollout_id, []).append(flag)
    files_of = {name: frozenset(files) for name, files in (references or {}).items()}
    return [
        Graded(
            rollout,
            verdict_of.get(rollout.id),
            None if flags is None else tuple(flags_of.get(rollout.id, ())),
            files_of.get(rollout.task_name),
        )
        for rollout in rollouts
    ]


def summarize(
    rollouts: Iterable[Rollout], verdicts: Iterable[Verdict], *, flags: Iterable[Flag] | None = None
) -> dict[str, Any]:
    """Metrics that a run folder keeps: `summary` as plain values, measures by their keys at the top.

    Seconds of attempts stay out: they are in the records, and metrics of equal runs are equal.
    """
    figures = summary(pair(rollouts, verdicts, flags=flags))
    plain = to_json(figures)
    plain["behaviour"] = {key: value for key, value in plain["behaviour"].items() if not key.endswith("_s")}
    return plain.pop("estimates") | plain


def summary(graded: Sequence[Graded]) -> Summary:
    """Every measure with its interval."""
    attempts = [attempt for attempt in graded if not attempt.is_void]
    kinds = Counter(str(t.error_kind) for a in attempts for t in a.rollout.turns if is_fault(t))
    return Summary(
        estimates={measure.key: _estimate(measure, attempts) for measure in MEASURES},
        faults={kind: _fault_share(kind, attempts) for kind, _ in kinds.most_common()},
        ended=dict(Counter(attempt.rollout.ended for attempt in graded).most_common()),
        num_tasks=len({attempt.rollout.task_id for attempt in graded}),
        num_attempts=len(graded),
        num_void=len(graded) - len(attempts),
        behaviour={measure.key: _estimate(measure, attempts) for measure in BEHAVIOUR},
        tools=_by_name(attempts, lambda b: b.calls, lambda b: b.call_errors, "calls"),
        error_kinds=_by_name(attempts, lambda b: b.error_kinds, lambda b: b.error_kinds, "all calls"),
        strict={key: _strict(measure, graded) for key, measure in _HEADLINE.items()},
        passes=passes.estimates(tries(attempts)),
    )


def promise(graded: Graded) -> tuple[float, ...]:
    """Promise of an attempt without knowledge of its verdict: more is better, compared left to right.

    In this order: it finished by itself, ran tests, ran them after its last change, made few faults, and its tokens had
    high log-probs.
    """
    turns = graded.rollout.turns
    logps = [logp for turn in turns for logp in turn.logps]
    sureness = sum(logps) / max(len(logps), 1)
    return (
        float(graded.rollout.ended == "finished"),
        float(graded.behaviour.test_runs > 0),
        float(not is_untested(graded.rollout)),
        -float(_faulty_turns(graded)),
        -math.inf if math.isnan(sureness) else sureness,
    )


def tries(attempts: Iterable[Graded]) -> list[Try]:
    """Judged attempts, as `passes` takes them; void ones left out."""
    judged = [attempt for attempt in attempts if _judged(attempt) and not attempt.is_void]
    return [Try(attempt.rollout.task_id, _solved(attempt), promise(attempt)) for attempt in judged]


def pass_figure(name: str) -> Figure:
    """The figure that a name of `passes` stands for."""
    kind, k = name[:5], name[5:]
    labels = {
        "pass@": f"solved by any of {k}",
        "pass^": f"solved by all of {k}",
        "best@": f"solved by the most promising of {k}",
    }
    return Figure(name, f"{name}: {labels[kind]}", "share", "higher", of="tasks")


def _strict(measure: Measure, graded: Sequence[Graded]) -> Estimate:
    """A headline figure where a void attempt is a failure, not an attempt that never was."""
    parts = [0.0 if g.is_void else float(measure.part(g)) for g in graded]
    wholes = [1.0 if g.is_void else float(measure.whole(g)) for g in graded]
    return statistics.rate(parts, wholes, [g.rollout.task_id for g in graded])


def _by_name(
    attempts: Sequence[Graded],
    all_of: Callable[[Behaviour], Mapping[str, int]],
    bad_of: Callable[[Behaviour], Mapping[str, int]],
    unit: Literal["calls", "all calls"],
) -> dict[str, Estimate]:
    """Name to its errors per call of the same name ("calls"), or per call of any."""
    names = sum((Counter(all_of(a.behaviour)) for a in attempts), Counter()).most_common()

    def measure(name: str) -> Measure:
        def whole(graded: Graded) -> int:
            return (
                graded.behaviour.num_calls if unit == "all calls" else all_of(graded.behaviour).get(name, 0)
            )

        def part(graded: Graded) -> int:
            return bad_of(graded.behaviour).get(name, 0)

        return Measure(name, name, "share" if unit == "calls" else "count", "lower", part, whole, of="calls")

    return {name: _estimate(measure(name), attempts) for name, _ in names}


def compare(before: Sequence[Graded], after: Sequence[Graded]) -> list[MeasureRow]:
    """Every headline measure on both sides, and the difference paired by task. Void attempts enter neither."""
    return compare_seeds([before], [after])


def compare_seeds(before: Sequence[Sequence[Graded]], after: Sequence[Sequence[Graded]]) -> list[MeasureRow]:
    """Compare variants of several runs that differ in their seed only; the interval is then over seeds and tasks."""
    sides = [[[a for a in run if not a.is_void] for run in side] for side in (before, after)]
    rows = []
    for measure in MEASURES:
        seeds = [[_sums(measure, run) for run in side] for side in sides]
        pooled = [[attempt for run in side for attempt in run] for side in sides]
        totals = [_sums(measure, side) for side in pooled]
        if max(map(len, sides)) > 1:
            figures = [statistics.rate_over_seeds(side, is_share=measure.kind != "count") for side in seeds]
            change = statistics.difference_over_seeds(*seeds, is_share=measure.kind != "count")
        else:
            figures = [_estimate(measure, side) for side in pooled]
            change = statistics.difference(*totals, is_share=measure.kind != "count")
        rows.append(MeasureRow(measure, figures[0], figures[1], change, statistics.record(*totals)))
    return beside_the_average(rows, _pass_rows(sides))


def beside_the_average(rows: Sequence[AnyRow], pass_rows: Sequence[AnyRow]) -> list[AnyRow]:
    """Rows with pass@k and best@k behind the solve rate."""
    position = next((n for n, row in enumerate(rows) if row.measure.key == "solved"), len(rows) - 1) + 1
    return [*rows[:position], *pass_rows, *rows[position:]]


def _pass_rows(sides: Sequence[Sequence[Sequence[Graded]]]) -> list[MeasureRow]:
    """pass@k and best@k of both sides, where tasks have several attempts."""
    tables = [[passes.by_task(tries(run)) for run in side] for side in sides]
    rows = []
    for name in passes.headline(table for side in tables for table in side):
        seeds = [[table[name] for table in side] for side in tables]
        totals = [passes.pooled(side) for side in seeds]
        change = statistics.difference_over_seeds(*seeds, is_share=True)
        figures = [passes.estimate(side) for side in seeds]
        rows.append(MeasureRow(pass_figure(name), figures[0], figures[1], change, statistics.record(*totals)))
    return rows


def _columns(measure: Measure, attempts: Sequence[Graded]) -> tuple[list[float], list[float], list[str]]:
    """Parts, wholes and tasks, one each per attempt."""
    parts = [float(measure.part(attempt)) for attempt in attempts]
    wholes = [float(measure.whole(attempt)) for attempt in attempts]
    return parts, wholes, [attempt.rollout.task_id for attempt in attempts]


def _estimate(measure: Measure, attempts: Sequence[Graded]) -> Estimate:
    return statistics.rate(*_columns(measure, attempts), is_share=measure.kind != "count")


def _sums(measure: Measure, attempts: Sequence[Graded]) -> statistics.Sums:
    return statistics.sums(*_columns(measure, attempts))


def _fault_share(kind: str, attempts: Sequence[Graded]) -> Estimate:
    def count(attempt: Graded) -> int:
        return sum(turn.error_kind == kind for turn in attempt.rollout.turns)

    return _estimate(Measure(kind, kind, "share", "lower", count, _turns, of="turns"), attempts)


def write_figure(measure: Figure, value: float | None) -> str:
    """A figure as people read it: "19.0%", "0.42", "412"."""
    if value is None:
        return "-"
    if measure.kind == "share":
        return f"{100 * value:.1f}%"
    return f"{value:.0f}" if abs(value) >= 100 else f"{value:.2f}"


def write_estimate(measure: Figure, estimate: Estimate) -> str:
    """Figure and interval: "19.0% [15.1, 23.4]"."""
    return _with_interval(measure, estimate.value, estimate.low, estimate.high)


def write_change(measure: Figure, change: Difference) -> str:
    """Difference and interval, signed; a change in shares is in percentage points."""
    return _with_interval(measure, change.value, change.low, change.high, sign=True)


def write_detectable(measure: Figure, detectable: float | None) -> str:
    """The smallest difference that shows: "8.1 pp", "0.12"; "none" if even the largest possible difference would
    not."""
    if measure.kind != "count" and detectable is not None and detectable > 1:
        return "none"
    return write_figure(measure, detectable).replace("%", " pp")


def write_counts(measure: Figure, estimate: Estimate) -> str:
    """The counts behind a figure, as in "83 / 437 turns"; the total alone if the part is not a count."""
    if measure.kind == "share" and float(estimate.part).is_integer():
        return f"{estimate.part:.0f} / {estimate.whole:.0f} {measure.of}"
    return f"{estimate.whole:.0f} {measure.of}"


def _with_interval(
    measure: Figure, value: float | None, low: float | None, high: float | None, sign: bool = False
) -> str:
    text = write_figure(measure, value)
    if value is not None and sign:
        text = f"{'+' if value > 0 else ''}{text}"
        text = text.replace("%", " pp")
    if low is None or high is None:
        return text
    ends = [write_figure(measure, end).removesuffix("%") for end in (low, high)]
    return f"{text} [{', '.join(f'+{e}' if sign and not e.startswith('-') else e for e in ends)}]"
