"""The choice of the next tasks as the stage `rl` asks for it: what a curriculum of the user's own must do."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, Protocol

from woodshed.parts import Part
from woodshed.records import Rollout, Task, Verdict
from woodshed.settings import Settings


class TaskChoice(Protocol):
    """Choice of the next tasks; its state is part of every checkpoint."""

    @property
    def repeated(self) -> int:
        """Tasks of the last draw that an earlier one had drawn."""
        ...

    def draw(self, count: int) -> list[Task]:
        """The next `count` different tasks; the same for the same seed and past."""
        ...

    def why_dry(self, count: int) -> str:
        """The reason for which a step cannot have `count` tasks; "" where it can."""
        ...

    def observe(self, verdicts: Iterable[Verdict], rollouts: Iterable[Rollout] = ()) -> None:
        """Learn from how attempts ended."""
        ...

    def quarantine(self, tasks: Iterable[Task], reason: str) -> None:
        """Draw these tasks no more: a way around them is proven."""
        ...

    def counts(self) -> dict[str, int]:
        """Tasks by what becomes of them, for the metrics."""
        ...

    def state(self) -> dict[str, Any]:
        """Everything that `restore` needs, as JSON values."""
        ...

    def restore(self, state: dict[str, Any]) -> None: ...


class OpenChoice(Protocol):
    """A function that opens a choice of tasks."""

    def __call__(
        self,
        tasks: Sequence[Task],
        settings: Settings,
        *,
        seed: int,
        attempts: int,
        revalidate: Callable[[Task], bool],
    ) -> TaskChoice:
        """Open a choice among tasks.

        Args:
            settings: `CurriculumSettings`.
            attempts: per task and step, the size of a group.
            revalidate: says if a task that was never solved is still sound.
        """
        ...


EVEN = "even"
KIND: Part[OpenChoice | None] = Part(
    "curriculum", {"posterior": None, EVEN: None}, like=OpenChoice.__call__.__get__(object())
)
"""A choice of tasks as a recipe names it: `pool.Curriculum`, or a function of the user's own."""
