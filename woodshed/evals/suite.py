"""A policy against a suite: attempts made, judged in fresh sandboxes, and put in figures.

`evaluate` makes them; `from_run` finds those that a run folder already holds, so that a report needs nothing else.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from woodshed import grading, rollout
from woodshed.agent.attempt import AgentSettings
from woodshed.evals import measures
from woodshed.evals.measures import Graded, Row, Summary
from woodshed.grading import GradingSettings
from woodshed.inference.sampler import Sampler
from woodshed.records import Rollout, Task, Verdict
from woodshed.rollout import RolloutSettings
from woodshed.rundir import RunDir

Progress = Callable[[int, int, str], None]


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


def evaluate(
    tasks: Sequence[Task],
    sampler: Sampler,
    rollout_settings: RolloutSettings,
    agent_settings: AgentSettings,
    grading_settings: GradingSettings,
    *,
    phase: str = "eval",
    step: int = 0,
    attempts: int = 1,
    seed: int = 0,
    progress: Progress | None = None,
) -> Evaluation:
    """Attempt every task `attempts` times and judge the patches.

    Raises:
        SandboxError, SamplerError: the machine or the engine failed; nothing is returned.
    """
    groups = rollout.collect(
        sampler,
        tasks,
        rollout_settings,
        agent_settings,
        phase=phase,
        step=step,
        attempts=attempts,
        seed=seed,
        progress=progress,
    )
    verdicts = grading.judge(groups, tasks, grading_settings, progress=progress)
    rollouts = [made for group in groups for made in group.rollouts]
    return Evaluation(step, tuple(measures.pair(rollouts, verdicts.values())))


def from_run(run: RunDir, phase: str = "eval") -> list[Evaluation]:
    """The attempts of one phase that a run folder holds, one evaluation per step, oldest first."""
    verdicts = [verdict for found, _, verdict in run.read("verdicts", Verdict) if found == phase]
    rollouts: dict[int, list[Rollout]] = {}
    for found, step, record in run.read("rollouts", Rollout):
        if found == phase:
            rollouts.setdefault(step, []).append(record)
    return [Evaluation(step, tuple(measures.pair(rollouts[step], verdicts))) for step in sorted(rollouts)]


def before_after(before: Evaluation, after: Evaluation) -> list[Row]:
    """Every measure on both sides, the difference paired by task."""
    return measures.compare(before.graded, after.graded)
