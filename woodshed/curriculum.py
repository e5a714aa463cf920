"""Which tasks come next.

Every task is drawn once before any is drawn again, in an order shuffled by the run's seed, and never twice in one
step: the policy gradient is single-epoch (Composer 2 report, section 4.1). What was observed per task is kept, so
that later samplers can weigh by difficulty.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Sequence
from typing import Any

from woodshed.records import RecipeError, Task, Verdict


class Curriculum:
    """Draws tasks and remembers how attempts at them ended; its state goes into every checkpoint."""

    def __init__(self, tasks: Sequence[Task], *, seed: int) -> None:
        self._tasks = {task.id: task for task in tasks}
        self._seed = seed
        self._epoch = 0
        self._queue: list[str] = []
        self._observed: dict[str, list[int]] = {}
        self._quarantined: dict[str, str] = {}

    def draw(self, count: int) -> list[Task]:
        """The next `count` different tasks.

        Raises:
            RecipeError: fewer tasks than one step needs.
        """
        if count > len(self._tasks):
            raise RecipeError(
                f"training.tasks_per_step = {count}, but there are only {len(self._tasks)} training tasks; "
                "make more tasks or lower it"
            )
        if count > (left := len(self._tasks) - len(self._quarantined)):
            reasons = "; ".join(dict.fromkeys(self._quarantined.values()))
            raise RecipeError(
                f"training.tasks_per_step = {count}, but {left} of {len(self._tasks)} tasks are not in quarantine "
                f"({reasons}). Close that hole, make the tasks again and start another run"
            )
        drawn: list[str] = []
        while len(drawn) < count:
            if not self._queue:
                self._queue = self._next_epoch(last=drawn)
            drawn.append(self._queue.pop(0))
        return [self._tasks[task] for task in drawn]

    def observe(self, verdicts: Iterable[Verdict]) -> None:
        """Count attempts and solves; invalid verdicts say nothing about a task."""
        for verdict in verdicts:
            if verdict.status == "graded":
                counts = self._observed.setdefault(verdict.task_id, [0, 0])
                counts[0] += 1
                counts[1] += verdict.solved

    def quarantine(self, tasks: Iterable[Task], reason: str) -> None:
        """Draw these tasks no more: a way around them is proven."""
        self._quarantined |= {task.id: reason for task in tasks if task.id in self._tasks}
        self._queue = [task for task in self._queue if task not in self._quarantined]

    def state(self) -> dict[str, Any]:
        return {
            "epoch": self._epoch,
            "queue": self._queue,
            "observed": self._observed,
            "quarantined": self._quarantined,
        }

    def restore(self, state: dict[str, Any]) -> None:
        self._epoch = state["epoch"]
        self._queue = list(state["queue"])
        self._observed = {task: list(counts) for task, counts in state["observed"].items()}
        self._quarantined = dict(state.get("quarantined", {}))

    def _next_epoch(self, *, last: Sequence[str]) -> list[str]:
        """All tasks in a new order; those that the current step holds already come last."""
        order = sorted(task for task in self._tasks if task not in self._quarantined)
        random.Random(f"{self._seed}/{self._epoch}").shuffle(order)
        self._epoch += 1
        return sorted(order, key=lambda task: task in last)
