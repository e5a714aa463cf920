"""The one way to a verdict: `grade` asks the verifier that a task names, whoever calls it.

Rollouts, proofs of tasks, regrading and the cheat suite call `grade`; what a task folder ships in tests/ decides by the
same lines (`decision`).
"""

from __future__ import annotations

from typing import Protocol

from pydantic import Field

from woodshed.grading.command_verifier import CommandVerifier
from woodshed.grading.decision import Isolation
from woodshed.grading.pytest_verifier import PytestVerifier
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


class GradingSettings(Settings):
    """Settings for grading attempts."""

    shaped: bool = False
    """Reward the share of passed tests (fail-to-pass share times pass-to-pass share, at most 0.9) instead of 0 or 1.
    Of the fail-to-pass tests only those count that ask for more than a name (`Task.stub_passes`)."""
    jobs: int = Field(default=2, ge=1)
    """Verifications at the same time."""
    timeout_s: float | None = Field(default=None, gt=0)
    """Seconds for one verification's tests; None takes each task's own."""
    isolate_tests: Isolation = "suspect"
    """Run the fail-to-pass tests of what passed a second time, tests and code under test in two processes: "always"
    (high stakes), "never", or where the patch mentions frames, the collector, pytest or comparisons of its own."""


def verifier_of(task: Task, settings: GradingSettings) -> Verifier:
    """The verifier that the task names."""
    if task.verifier == "command":
        return CommandVerifier(timeout_s=settings.timeout_s)
    return PytestVerifier(settings.shaped, settings.timeout_s, settings.isolate_tests)


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
