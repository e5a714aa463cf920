"""One policy's attempts at one suite, as a run folder holds them."""

from __future__ import annotations

from dataclasses import dataclass

from woodshed.evals import measures
from woodshed.evals.measures import Graded, Row, Summary
from woodshed.records import Rollout, Verdict
from woodshed.rundir import RunDir


@dataclass(frozen=True)
class Evaluation:
    """All attempts of one policy at one suite."""

    step: int
    """Optimizer steps behind the policy."""
    graded: tuple[Graded, ...]

    @property
    def summary(self) -> Summary:
        """Every measure with its interval."""
        return measures.summary(self.graded)


def from_run(run: RunDir, phase: str = "eval") -> list[Evaluation]:
    """The attempts of one phase that a run folder holds, one evaluation per step, oldest first.

    Raises:
        ValueError: a record of another version.
    """
    verdicts = [verdict for found, _, verdict in run.read("verdicts", Verdict) if found == phase]
    rollouts: dict[int, list[Rollout]] = {}
    for found, step, record in run.read("rollouts", Rollout):
        if found == phase:
            rollouts.setdefault(step, []).append(record)
    return [Evaluation(step, tuple(measures.pair(rollouts[step], verdicts))) for step in sorted(rollouts)]


def before_after(before: Evaluation, after: Evaluation) -> list[Row]:
    """Every measure on both sides, the difference paired by task."""
    return measures.compare(before.graded, after.graded)
