"""Sources of experience: what the loop of the stage `rl` asks of whoever makes attempts.

With staleness 0 this process makes them between two updates (`rl.Inline`); above it, another process makes them all the
time, and the run folder lies between them (`asynchronous.source.Tailing`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from woodshed import feedback
from woodshed.experience import Experience
from woodshed.feedback import demonstrations
from woodshed.learning.checkpoint import TrainState
from woodshed.records import Hint, RewardTerms, Rollout, Task
from woodshed.stages.recipe import Recipe
from woodshed.stages.session import Clock


@dataclass(frozen=True)
class StepExperience:
    """A step's attempts with hints and rewards: what it learns from."""

    attempts: Experience
    hints: Sequence[Hint]
    """Those that are trained on."""
    reward_terms: Sequence[RewardTerms]
    disabled_hints: dict[str, str]
    """Classes of hints that are not trained on, with the reason."""


class ExperienceSource(Protocol):
    """Attempts for every step, by the newest weights that it was given."""

    def publish(self, state: TrainState, *, is_last: bool) -> None:
        """Have later attempts made by the policy's weights.

        Args:
            is_last: no step follows: these weights are measured, and no attempts are made for training.
        """
        ...

    def measure(self, state: TrainState, *, is_last: bool) -> None:
        """Have these weights measured on the held-out tasks; without such tasks, nothing.

        Args:
            is_last: come back only when all that was to be measured is.
        """
        ...

    def take(self, state: TrainState, clock: Clock) -> StepExperience:
        """Attempts that the step learns from; waits until they are there."""
        ...

    def learned(self, state: TrainState, seen: StepExperience) -> tuple[Mapping[str, Any], dict[str, Any]]:
        """(metrics of the choice of tasks, fields of the state that the next step goes on from): the step was taken."""
        ...

    def why_dry(self, step: int) -> str:
        """The reason for which a step cannot have tasks; "" where it can."""
        ...

    def close(self) -> None: ...


def hints_to_learn(
    recipe: Recipe, hints: Sequence[Hint], rollouts: Sequence[Rollout], tasks: Sequence[Task]
) -> list[Hint]:
    """The hints of the detectors that are trained on, or the solutions that a teacher of whole attempts reads."""
    if recipe.feedback.form.scope == "rollout":
        return demonstrations.solutions(rollouts, {task.id: task for task in tasks})
    return feedback.choose(hints, recipe.feedback.detectors)


def is_measured(recipe: Recipe, step: int) -> bool:
    """True if the policy is evaluated before this step: at the beginning, at the end, and as the recipe says."""
    every = recipe.evaluation.every
    return step in (0, recipe.rl.steps) or bool(every and step % every == 0)
