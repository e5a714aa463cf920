"""One policy's attempts at one suite, as a run folder holds them."""

from __future__ import annotations

import functools
from collections.abc import Iterable
from dataclasses import dataclass

from woodshed.evals import measures
from woodshed.evals.measures import Graded, Row, Summary
from woodshed.records import Flag, Rollout, Verdict
from woodshed.rundir import RunDir


@dataclass(frozen=True)
class Evaluation:
    """All attempts of one policy at one suite."""

    step: int
    """Optimizer steps behind the policy."""
    graded: tuple[Graded, ...]

    @functools.cached_property
    def summary(self) -> Summary:
        """Every measure with its interval."""
        return measures.summary(self.graded)


def from_run(run: RunDir, phase: str = "eval") -> list[Evaluation]:
    """The attempts of one phase that a run folder holds, one evaluation per step, oldest first.

    Raises:
        ValueError: a record of another version.
    """
    verdicts = [verdict for _, _, verdict in run.read("verdicts", Verdict)]
    made = [made for made in run.read("rollouts", Rollout) if made[0] == phase]
    return from_records(made, verdicts, flags=flags(run))


def from_records(
    rollouts: Iterable[tuple[str, int, Rollout]],
    verdicts: Iterable[Verdict],
    *,
    flags: Iterable[Flag] | None = None,
) -> list[Evaluation]:
    """Rollouts of one phase as (phase, step, rollout), an evaluation per step."""
    steps: dict[int, list[Rollout]] = {}
    for _, step, rollout in rollouts:
        steps.setdefault(step, []).append(rollout)
    verdicts, flags = list(verdicts), None if flags is None else list(flags)
    return [
        Evaluation(step, tuple(measures.pair(steps[step], verdicts, flags=flags))) for step in sorted(steps)
    ]


def flags(run: RunDir) -> list[Flag] | None:
    """What monitors raised in a run; None where no monitor looked."""
    if not (run.path / "flags.jsonl").exists():
        return None
    return [flag for _, _, flag in run.read("flags", Flag)]


def before_after(before: Evaluation, after: Evaluation) -> list[Row]:
    """Every measure on both sides, the difference paired by task."""
    return measures.compare(before.graded, after.graded)
