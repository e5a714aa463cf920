"""Verdicts on many attempts at once, also while others are still being made."""

from __future__ import annotations

import dataclasses
import json
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, as_completed
from typing import Literal

from woodshed.grading.patches import crossing
from woodshed.grading.verifier import GradingSettings, grade
from woodshed.records import Ended, Environment, Group, Outcome, Rollout, Task, TaskError, Verdict
from woodshed.sandbox import BUBBLEWRAP, Revocable, SandboxProvider
from woodshed.tasks import environment

Progress = Callable[[int, int, str], None]

LOST: dict[Ended, tuple[Literal["graded", "invalid"], str]] = {
    "sandbox_lost": ("invalid", "the attempt's sandbox was lost"),
    "sandbox_broken": ("graded", "the attempt's own commands ended its sandbox"),
}
"""Ends of attempts that left no patch: status and detail of their verdicts."""


class Judging:
    """Verdicts on attempts while others are still being made. The same patch to the same task is run once.

    As a context manager. Whatever is raised inside closes the sandboxes of the verifications that run.
    """

    def __init__(
        self,
        tasks: Iterable[Task],
        settings: GradingSettings | None = None,
        sandboxes: SandboxProvider = BUBBLEWRAP,
    ) -> None:
        self.settings = settings or GradingSettings()
        self._tasks = {task.id: task for task in tasks}
        self._ready: set[Environment] = set()
        self._running: dict[str, Future[Verdict]] = {}
        self._of: dict[str, Future[Verdict]] = {}
        self._sandboxes = Revocable(sandboxes)
        self._pool = ThreadPoolExecutor(self.settings.jobs, thread_name_prefix="judging")

    def __enter__(self) -> Judging:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is not None:
            self._sandboxes.close()
        self._pool.shutdown(cancel_futures=True)

    def know(self, tasks: Iterable[Task]) -> None:
        """Judge attempts at these tasks as well."""
        self._tasks |= {task.id: task for task in tasks}

    def add(self, rollout: Rollout) -> Future[Verdict]:
        """Begin the verdict on an attempt, if nobody has. Attempts with equal patches share it, and its rollout id is
        of none of them.

        Raises:
            TaskError: its task is not among the tasks.
        """
        self._prepare([rollout])
        if rollout.id in self._of:
            return self._of[rollout.id]
        task = self._tasks[rollout.task_id]
        taken, _ = crossing(task, rollout.patch)
        key = json.dumps([task.id, {p: None if data is None else data.hex() for p, data in taken.items()}])
        key = key if rollout.ended not in LOST else rollout.id
        if key not in self._running:
            self._running[key] = self._pool.submit(self._grade, task, rollout)
        self._of[rollout.id] = self._running[key]
        return self._of[rollout.id]

    def verdicts(
        self, rollouts: Sequence[Rollout], *, progress: Progress | None = None
    ) -> dict[str, Verdict]:
        """By rollout id, in the order of the attempts, each of which is added.

        Raises:
            TaskError: as `add`.
        """
        self._prepare(rollouts, progress)
        for rollout in rollouts:
            self.add(rollout)
        waiting, done = Counter(self._of[rollout.id] for rollout in rollouts), 0
        for future in as_completed(waiting):
            done += waiting[future]
            if progress:
                progress(done, len(rollouts), "judging")
        return {r.id: dataclasses.replace(self._of[r.id].result(), rollout_id=r.id) for r in rollouts}

    def _prepare(self, rollouts: Sequence[Rollout], progress: Progress | None = None) -> None:
        """All tasks are known, and their environments built, before the first test runs."""
        if unknown := sorted({r.task_name for r in rollouts if r.task_id not in self._tasks}):
            raise TaskError(
                f"attempts at {', '.join(unknown)} cannot be judged: no such task, or it was changed since. "
                "Judge with the task set that they were made with."
            )
        for needed in {self._tasks[r.task_id].environment for r in rollouts} - self._ready:
            environment.prepare(needed, progress=progress)
            self._ready.add(needed)

    def _grade(self, task: Task, rollout: Rollout) -> Verdict:
        if rollout.ended not in LOST:
            return grade(task, rollout.patch, self._sandboxes, self.settings)
        missing: dict[str, Outcome] = dict.fromkeys((*task.fail_to_pass, *task.pass_to_pass), "missing")
        status, why = LOST[rollout.ended]
        return Verdict("", task.id, status, 0.0, False, missing, (), why)


def judge(
    attempts: Iterable[Group | Rollout],
    tasks: Iterable[Task],
    settings: GradingSettings | None = None,
    sandboxes: SandboxProvider = BUBBLEWRAP,
    *,
    progress: Progress | None = None,
) -> dict[str, Verdict]:
    """Verdicts by rollout id. The same patch to the same task is run once.

    Raises:
        TaskError: an attempt at a task that is not among the tasks.
    """
    rollouts = [r for a in attempts for r in (a.rollouts if isinstance(a, Group) else (a,))]
    with Judging(tasks, settings, sandboxes) as judging:
        return judging.verdicts(rollouts, progress=progress)
