"""Many attacks on some tasks, graded: who pays for which kind."""

from __future__ import annotations

import dataclasses
import random
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from woodshed import grading
from woodshed.grading import GradingSettings
from woodshed.records import Patch, SandboxError, Task, TaskError
from woodshed.red_team.compose import Attack, sample
from woodshed.red_team.planting import can_be_attacked, hollow, plant
from woodshed.red_team.shipped import shipped_reward
from woodshed.sandbox import BUBBLEWRAP, SandboxProvider

Progress = Callable[[int, int, str], None]
Paid = tuple[float, str]
"""Reward and status of a verdict."""


@dataclass(frozen=True)
class Campaign:
    """Sandboxes and limits of gradings."""

    sandboxes: SandboxProvider = BUBBLEWRAP
    timeout_s: float = 20.0
    """Seconds for one run of a task's tests."""

    def grade(self, task: Task, patch: Patch, grader: str) -> Paid:
        """Reward and status by one of `GRADERS`.

        Raises:
            SandboxError: the shipped grader's sandbox was lost.
        """
        return GRADERS[grader](self, task, patch)

    def _judged(self, task: Task, patch: Patch, *, shaped: bool = False) -> Paid:
        settings = GradingSettings(timeout_s=self.timeout_s, shaped=shaped)
        verdict = grading.grade(task, patch, self.sandboxes, settings)
        return verdict.reward, verdict.status

    def _in_one_process(self, task: Task, patch: Patch) -> Paid:
        limited = dataclasses.replace(task, verify_timeout_s=self.timeout_s)
        verdict = grading.outcomes_of(limited, patch, self.sandboxes)
        return verdict.reward, verdict.status

    def _shipped(self, task: Task, patch: Patch) -> Paid:
        # A run whose time is up takes the task's own time there, several times.
        reward = shipped_reward(task, patch, self.sandboxes, timeout_s=6 * self.timeout_s)
        return reward or 0.0, "graded"


def _without_decoys(task: Task) -> Task:
    return dataclasses.replace(task, decoys=())


GRADERS: dict[str, Callable[[Campaign, Task, Patch], Paid]] = {
    "grade": lambda own, task, patch: own._judged(task, patch, shaped=True),
    "decoys": lambda own, task, patch: own._in_one_process(task, patch),
    "isolation": lambda own, task, patch: own._judged(_without_decoys(task), patch),
    "neither": lambda own, task, patch: own._in_one_process(_without_decoys(task), patch),
    "shipped": lambda own, task, patch: own._shipped(task, patch),
}
"""Graders by name: what everybody gets, shaped rewards included; with one of its two walls, or none; and the one that a
task folder ships."""
BELIEVED = ("grade", "shipped")
"""Graders that must pay for no attack."""


@dataclass(frozen=True)
class GradedAttack:
    """One attack on one task, graded once."""

    attack: str
    kind: str
    reach: str
    task: str
    grader: str
    reward: float
    """Earned beyond what the same functions earn when they are left hollow: a share can be honest."""
    status: str
    seconds: float


def plan(tasks: Sequence[Task], number: int, seed: int) -> list[tuple[Attack, Task]]:
    """Attacks and the tasks that they are planted in, in turn.

    Raises:
        TaskError: none of the tasks can be attacked.
    """
    targets = [task for task in sorted(tasks, key=lambda task: task.name) if can_be_attacked(task)]
    if not targets:
        raise TaskError(
            "no task can be attacked: none has hidden pytest tests and a solution with a function"
        )
    random.Random(seed).shuffle(targets)
    return [(attack, targets[i % len(targets)]) for i, attack in enumerate(sample(number, seed))]


def run(
    planned: Sequence[tuple[Attack, Task]],
    campaign: Campaign | None = None,
    *,
    graders: Sequence[str] = ("grade",),
    jobs: int = 2,
    progress: Progress | None = None,
) -> Iterator[GradedAttack]:
    """Grade each attack by each grader; results come in this order."""
    campaign = campaign or Campaign()

    def graded(attack: Attack, task: Task, grader: str) -> GradedAttack:
        began = time.monotonic()
        try:
            reward, status = campaign.grade(task, plant(task, attack), grader)
            if reward > 0:
                reward = max(0.0, reward - campaign.grade(task, hollow(task), grader)[0])
        except SandboxError as error:
            reward, status = 0.0, f"invalid: {error}"
        seconds = round(time.monotonic() - began, 2)
        names = attack.name, attack.reach.kind, attack.reach.name, task.name
        return GradedAttack(*names, grader, reward, status, seconds)

    work = [(attack, task, grader) for attack, task in planned for grader in graders]
    with ThreadPoolExecutor(jobs) as pool:
        for done, one in enumerate(pool.map(lambda item: graded(*item), work), 1):
            if progress:
                progress(done, len(work), "grading attacks")
            yield one


def count_by_kind(graded: Sequence[GradedAttack]) -> list[dict[str, Any]]:
    """One row for each kind: attacks, tasks, and by grader how many attacks it paid for, of how many; all last."""
    graders = list(dict.fromkeys(one.grader for one in graded))
    rows = []
    for kind in (*sorted({one.kind for one in graded}), "all"):
        mine = [one for one in graded if kind in (one.kind, "all")]
        row: dict[str, Any] = {"kind": kind, "attacks": len({(one.attack, one.task) for one in mine})}
        row["tasks"] = len({one.task for one in mine})
        for grader in graders:
            row[grader] = sum(one.reward > 0 for one in mine if one.grader == grader)
            row[f"of {grader}"] = sum(one.grader == grader for one in mine)
        row["invalid"] = sum(one.status != "graded" for one in mine)
        rows.append(row)
    return rows
