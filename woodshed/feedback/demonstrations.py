"""Demonstrations that a teacher sees before the first turn: the solution, or an example of a good answer.

Unlike a hint, a demonstration holds what the policy could not have known. It is for learning a subject (SDFT, arXiv
2601.19897; OPSD, arXiv 2601.18734), not for saying where an attempt went wrong.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from woodshed.records import Hint, Rollout, Task
from woodshed.tasks import folder

SOLUTION, EXAMPLE = "solution", "example"


def solutions(rollouts: Sequence[Rollout], tasks: Mapping[str, Task]) -> list[Hint]:
    """Solution of each attempt's task; "" if a task has none, which packing counts.

    Raises:
        KeyError: an attempt's task is not among `tasks`.
    """
    diffs = {made.task_id: folder.gold_patch(tasks[made.task_id]).diff.strip() for made in rollouts}
    texts = {
        task_id: diff and f"A solution of the task:\n{diff}\n\nWork towards it step by step with the tools."
        for task_id, diff in diffs.items()
    }
    return [Hint(made.id, 0, SOLUTION, texts[made.task_id]) for made in rollouts]


def example(rollout: Rollout, text: str) -> Hint:
    """A demonstration for the one answer that `rollout` holds."""
    return Hint(rollout.id, 0, EXAMPLE, f"An example of a good answer:\n{text}\n\nNow answer the same way.")
