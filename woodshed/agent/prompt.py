"""Prompt of an attempt. It is short, because every token costs time on a CPU."""

from __future__ import annotations

from dataclasses import replace
from typing import Literal

from woodshed.records import Task

Effort = Literal["low", "medium", "high"]

EFFORT: dict[Effort, str] = {
    "low": "Effort: low. Do only what is needed and be brief.",
    "medium": "Effort: medium. Work with care and without detours.",
    "high": "Effort: high. Take your time: look around and test more than once.",
}
"""Sentence of the prompt for each level of effort."""


def system_prompt(*, max_calls: int = 1) -> str:
    """The rules for the agent. The renderer adds the forms of the tools."""
    if max_calls == 1:
        rule = "Each message is one call and nothing else"
    else:
        rule = f"Each message holds up to {max_calls} calls, made in order"
    return (
        f"You are a coding agent. Do the task in the repository by calling tools. {rule}. "
        "Paths are relative to the repository root. Read before you edit, run the tests, then finish."
    )


def user_prompt(task: Task) -> str:
    """The instruction of the task, which names the command that runs its tests."""
    return task.instruction.strip()


def with_effort(task: Task, level: Effort) -> Task:
    """The same task with a level of effort in its instruction."""
    return replace(task, instruction=f"{task.instruction.strip()}\n\n{EFFORT[level]}\n")
