"""A policy against a suite: attempts made, judged in fresh sandboxes, and put in figures.

`evaluate` makes them; `from_run` finds those that a run folder already holds, so that a report needs nothing else.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
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

    phase: str
    step: int
    rollouts: tuple[Rollout, ...]
    verdicts: Mapping[str, Verdict]
    """By rollout id; an attempt without one has not been judged."""

    @property
    def graded(self) -> list[Graded]:
        return measures.pair(self.rollouts, self.verdicts)

    @property
    def summary(self) -> Summary:
        return measures.summarize(self.rollouts, self.verdicts)


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
    return Evaluation(phase, step, tuple(r for group in groups for r in group.rollouts), verdicts)


def from_run(run: RunDir, phase: str) -> list[Evaluation]:
    """What a run folder holds of one phase, one evaluation per step, oldest first."""
    rollouts: dict[int, list[Rollout]] = {}
    for found, step, record in run.read("rollouts", Rollout):
        if found == phase:
            rollouts.setdefault(step, []).append(record)
    verdicts = {v.rollout_id: v for found, _, v in run.read("verdicts", Verdict) if found == phase}
    return [Evaluation(phase, step, tuple(rollouts[step]), verdicts) for step in sorted(rollouts)]


def before_after(before: Evaluation, after: Evaluation) -> list[Row]:
    """Every measure on both sides, the difference paired by task."""
    return measures.compare(before.graded, after.graded)
