"""Demonstrations that a teacher sees before the first turn: the solution, or an example of a good answer.

Unlike a hint, a demonstration contains what the policy could not have known. It teaches a subject (SDFT, arXiv
2601.19897; OPSD, arXiv 2601.18734), and does not correct a fault of an attempt.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from woodshed.records import Hint, Rollout, Task
from woodshed.tasks import folder

SOLUTION, EXAMPLE = "solution", "example"


def solutions(rollouts: Sequence[Rollout], tasks: Mapping[str, Task]) -> list[Hint]:
    """The solution of each attempt's task as a demonstration; "" if a task has none.

    Raises:
        KeyError: an attempt's task is not among `tasks`.
    """
    diffs = {rollout.task_id: folder.gold_patch(tasks[rollout.task_id]).diff.strip() for rollout in rollouts}
    texts = {
        task_id: diff and f"A solution of the task:\n{diff}\n\nWork towards it step by step with the tools."
        for task_id, diff in diffs.items()
    }
    return [Hint(rollout.id, 0, SOLUTION, texts[rollout.task_id]) for rollout in rollouts]


def example(rollout: Rollout, text: str) -> Hint:
    """A demonstration for the single answer of `rollout`."""
    return Hint(rollout.id, 0, EXAMPLE, f"An example of a good answer:\n{text}\n\nNow answer the same way.")
