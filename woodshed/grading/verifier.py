"""The one way to a verdict: `grade` asks the verifier that a task names, whoever calls it.

Rollouts, proofs of tasks, regrading and the cheat suite call `grade`; what a task folder ships in tests/ decides by the
same lines (`decision`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Protocol

from pydantic import Field

from woodshed.boundary import contained
from woodshed.grading.command_verifier import CommandVerifier
from woodshed.grading.pytest_verifier import PytestVerifier, run_once
from woodshed.parts import Part, wrong_result
from woodshed.records import Patch, Task, Verdict
from woodshed.sandbox import BUBBLEWRAP, SandboxProvider
from woodshed.settings import Settings


class Verifier(Protocol):
    """Grades a patch to a task, in sandboxes of its own."""

    def grade(self, task: Task, patch: Patch, sandboxes: SandboxProvider) -> Verdict:
        """The verdict, without the id of a rollout: "invalid" where the patch is not to blame.

        Raises:
            TaskError: the task's environment cannot be built, or its folder is damaged.
        """
        ...


VERIFIER: Part[Verifier] = Part("verifier", {}, like=Verifier)
"""A verifier of the user's own, as a recipe names it. A task names one of ours only: a task folder is data."""


class GradingSettings(Settings):
    """Settings for grading attempts."""

    verifier: Annotated[str, VERIFIER] | None = None
    """A `Verifier` of your own as package.module:name, for every task; by default the one that a task names."""

    shaped: bool = False
    """Reward the share of passed tests (fail-to-pass share times pass-to-pass share, at most 0.9) instead of 0 or 1.
    Of the fail-to-pass tests only those count that ask for more than a name (`Task.stub_passes`), and that are
    isolated or have a decoy. A share takes the same runs and checks as the whole."""
    jobs: int = Field(default=2, ge=1)
    """Verifications at the same time."""
    timeout_s: float | None = Field(default=None, gt=0)
    """Seconds for one verification's tests; None takes each task's own."""


@dataclass(frozen=True)
class OwnVerifier:
    """A verifier of the user's own, by its import path."""

    name: str

    def grade(self, task: Task, patch: Patch, sandboxes: SandboxProvider) -> Verdict:
        """Its verdict; "invalid" where it raised, perhaps over what the patch holds.

        Raises:
            RecipeError: it cannot be used, or returned something else than a verdict on this task.
        """
        verifier = VERIFIER.resolve(self.name)

        def broken(error: str) -> Verdict:
            return Verdict(
                "", task.id, "invalid", 0.0, False, {}, (), f"verifier {self.name!r} failed: {error}"
            )

        verdict = contained(lambda: verifier.grade(task, patch, sandboxes), broken)
        if not (isinstance(verdict, Verdict) and verdict.task_id == task.id and 0 <= verdict.reward <= 1):
            wanted = f"a Verdict on task {task.id} with a reward from 0 to 1"
            raise wrong_result("verifier", self.name, verdict, wanted)
        return verdict


def verifier_of(task: Task, settings: GradingSettings) -> Verifier:
    """The verifier that the settings name, else the one that the task names.

    Raises:
        RecipeError: one of the user's own cannot be used.
    """
    if settings.verifier is not None:
        return OwnVerifier(settings.verifier)
    if task.verifier == "command":
        return CommandVerifier(timeout_s=settings.timeout_s)
    return PytestVerifier(settings.shaped, settings.timeout_s)


def grade(
    task: Task,
    patch: Patch,
    sandboxes: SandboxProvider = BUBBLEWRAP,
    settings: GradingSettings | None = None,
) -> Verdict:
    """Grade a patch: "invalid" where the sandbox is at fault, which is no reward, not a reward of 0.

    Raises:
        TaskError: the task's environment cannot be built, or its folder is damaged.
    """
    return verifier_of(task, settings or GradingSettings()).grade(task, patch, sandboxes)


def outcomes_of(task: Task, patch: Patch, sandboxes: SandboxProvider = BUBBLEWRAP) -> Verdict:
    """Outcomes of a patch of one's own in a single ordinary run of all tests, for proofs: no reward is at stake.

    Raises:
        TaskError: as `grade`.
    """
    return grade(task, patch, sandboxes) if task.verifier == "command" else run_once(task, patch, sandboxes)
