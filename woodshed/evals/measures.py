"""What is measured of a policy's attempts, and how the figures are written for people.

A measure is a ratio of two sums over attempts. To add one, add a line to `MEASURES`; tables, reports and intervals
follow. An attempt whose sandbox was lost, or that could not be graded for want of infrastructure, says nothing about
the policy: it is counted as void, shown, and enters no figure.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from woodshed.evals import statistics
from woodshed.evals.statistics import Difference, Estimate
from woodshed.feedback.detectors import is_untested
from woodshed.records import CALL_FAULTS, Flag, Rollout, Turn, Verdict, to_json


@dataclass(frozen=True)
class Graded:
    """A rollout and what grading found; the verdict is None where nobody has judged yet."""

    rollout: Rollout
    verdict: Verdict | None
    flags: tuple[Flag, ...] | None = None
    """What monitors raised; None where no monitor looked."""

    @property
    def is_void(self) -> bool:
        """Whether the infrastructure failed, so that this attempt says nothing about the policy."""
        invalid = self.verdict is not None and self.verdict.status == "invalid"
        return invalid or self.rollout.ended == "sandbox_lost"


@dataclass(frozen=True)
class Measure:
    """part / whole, summed over attempts."""

    key: str
    label: str
    kind: Literal["share", "score", "count"]
    """Shares and scores lie in [0, 1], a share is written in percent; a count has no ceiling."""
    better: Literal["lower", "higher", ""]
    part: Callable[[Graded], float]
    whole: Callable[[Graded], float]
    of: str = "attempts"
    """What the whole counts."""


def is_fault(turn: Turn) -> bool:
    """Whether the policy called wrongly at this turn."""
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
    Measure("untested", "untested finishes", "share", "lower", _untested, _one),
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


@dataclass(frozen=True)
class Summary:
    """Every measure of one set of attempts."""

    estimates: dict[str, Estimate]
    """Measure key to its figure."""
    faults: dict[str, Estimate]
    """Call fault to its share of turns; kinds that did not occur are left out, the most frequent come first."""
    ended: dict[str, int]
    """Why attempts ended."""
    num_tasks: int
    num_attempts: int
    num_void: int
    """Attempts that say nothing and enter no figure."""


@dataclass(frozen=True)
class Row:
    """One measure before and after."""

    measure: Measure
    before: Estimate
    after: Estimate
    change: Difference


def pair(
    rollouts: Iterable[Rollout], verdicts: Iterable[Verdict], *, flags: Iterable[Flag] | None = None
) -> list[Graded]:
    """Each rollout with its verdict and its flags; `flags` is None where no monitor looked."""
    found = {verdict.rollout_id: verdict for verdict in verdicts}
    raised: dict[str, tuple[Flag, ...]] = {}
    for flag in flags or ():
        raised[flag.rollout_id] = (*raised.get(flag.rollout_id, ()), flag)
    watched = flags is not None
    return [Graded(r, found.get(r.id), raised.get(r.id, ()) if watched else None) for r in rollouts]


def summarize(
    rollouts: Iterable[Rollout], verdicts: Iterable[Verdict], *, flags: Iterable[Flag] | None = None
) -> dict[str, Any]:
    """What a run folder keeps as metrics: `summary` as plain values, measures by their keys at the top."""
    found = summary(pair(rollouts, verdicts, flags=flags))
    plain = to_json(found)
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
    )


def compare(before: Sequence[Graded], after: Sequence[Graded]) -> list[Row]:
    """Every measure on both sides, and the difference paired by task. Void attempts enter neither."""
    before, after = ([attempt for attempt in side if not attempt.is_void] for side in (before, after))
    rows = []
    for measure in MEASURES:
        change = statistics.difference(
            _sums(measure, before), _sums(measure, after), is_share=measure.kind != "count"
        )
        rows.append(Row(measure, _estimate(measure, before), _estimate(measure, after), change))
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

    return _estimate(Measure(kind, kind, "share", "lower", count, _turns, "turns"), attempts)


def write_figure(measure: Measure, value: float | None) -> str:
    """A figure as people read it: "19.0%", "0.42", "412"."""
    if value is None:
        return "-"
    if measure.kind == "share":
        return f"{100 * value:.1f}%"
    return f"{value:.0f}" if abs(value) >= 100 else f"{value:.2f}"


def write_estimate(measure: Measure, estimate: Estimate) -> str:
    """Figure and interval: "19.0% [15.1, 23.4]"."""
    return _with_interval(measure, estimate.value, estimate.low, estimate.high)


def write_change(measure: Measure, change: Difference) -> str:
    """Difference and interval, signed; a change in shares is in percentage points."""
    return _with_interval(measure, change.value, change.low, change.high, sign=True)


def write_counts(measure: Measure, estimate: Estimate) -> str:
    """What the figure was counted from: "83 / 437 turns"; the whole alone where the part is not a count."""
    if measure.kind == "share":
        return f"{estimate.part:.0f} / {estimate.whole:.0f} {measure.of}"
    return f"{estimate.whole:.0f} {measure.of}"


def _with_interval(
    measure: Measure, value: float | None, low: float | None, high: float | None, sign: bool = False
) -> str:
    text = write_figure(measure, value)
    if value is not None and sign:
        text = f"{'+' if value > 0 else ''}{text}"
        text = text.replace("%", " pp")
    if low is None or high is None:
        return text
    ends = [write_figure(measure, end).removesuffix("%") for end in (low, high)]
    return f"{text} [{', '.join(f'+{e}' if sign and not e.startswith('-') else e for e in ends)}]"
