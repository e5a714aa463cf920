"""The tasks of a run's steps: drawn by the curriculum, which learns from attempts, and grown while the run goes on."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from woodshed import synthesis
from woodshed.curriculum import Curriculum, CurriculumSettings, create, draw
from woodshed.experience import Experience
from woodshed.monitors import flag_policy
from woodshed.records import Task
from woodshed.runs.folder import RunDir
from woodshed.sandbox import SandboxSettings
from woodshed.synthesis.task_generator import TaskGenerator


class Choosing:
    """A choice of tasks, and the generator of more of them where the recipe grows its pool."""

    def __init__(
        self,
        run: RunDir,
        practice: Sequence[Task],
        settings: CurriculumSettings,
        sandbox: SandboxSettings,
        *,
        seed: int,
        attempts: int,
    ) -> None:
        """
        Args:
            attempts: per task and step, the size of a group.
        """
        self.practice = practice
        self.choice = create(
            practice,
            settings,
            seed=seed,
            attempts=attempts,
            revalidate=lambda task: not synthesis.check(task, sandbox.create()),
        )
        self.generator = TaskGenerator(run, seed=seed, sandbox=sandbox) if settings.grow else None

    def restore(self, curriculum: dict[str, Any], growth: dict[str, Any]) -> None:
        """Go on from what `state` gave."""
        if self.generator is not None and isinstance(self.choice, Curriculum):
            self.generator.restore(growth, self.choice)
        self.choice.restore(curriculum)

    def state(self) -> dict[str, Any]:
        """Everything that `restore` needs, as JSON values."""
        growth = self.generator.state() if self.generator is not None else {}
        return {"curriculum": self.choice.state(), "growth": growth}

    def draw(self, count: int) -> list[Task]:
        """The next tasks, checked.

        Raises:
            RecipeError: as `curriculum.draw`.
        """
        return draw(self.choice, self.practice, count)

    def observe(self, attempts: Experience) -> None:
        """Learn from how the attempts of a step ended."""
        verdicts = list(attempts.verdicts.values())
        self.choice.observe(verdicts, attempts.rollouts)
        for proof in flag_policy.quarantined(attempts.flags, attempts.rollouts, self.practice):
            self.choice.quarantine(proof.tasks(self.practice), proof.reason)
        if self.generator is not None and isinstance(self.choice, Curriculum):
            self.generator.poll(self.choice, verdicts)

    def told(self) -> Mapping[str, Any]:
        """Metrics of the pool."""
        return {"curriculum": self.choice.counts(), "repeated_tasks": self.choice.repeated}

    def close(self) -> None:
        """End the generator's process."""
        if self.generator is not None:
            self.generator.close()
