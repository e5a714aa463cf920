"""Prompt of an attempt. It is short, because every token costs time on a CPU."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Literal

from woodshed import documents
from woodshed.agent.output import clip, printable
from woodshed.records import RecipeError, Task
from woodshed.tasks import workspace

Effort = Literal["low", "medium", "high"]

EFFORT: dict[Effort, str] = {
    "low": "Effort: low. Do only what is needed and be brief.",
    "medium": "Effort: medium. Work with care and without detours.",
    "high": "Effort: high. Take your time: look around and test more than once.",
}
"""Sentence of the prompt for each level of effort."""


AGENTS_FILE = "AGENTS.md"
"""File at the root of a repository in which it tells agents its rules."""
AGENTS_CHARS = 4000
"""Characters of it that the prompt holds."""


def system_prompt(*, max_calls: int = 1, path: Path | None = None) -> str:
    """The rules for the agent. The renderer adds the forms of the tools.

    Args:
        path: a file that holds other rules.

    Raises:
        RecipeError: the file cannot be read.
    """
    if path is not None:
        remedy = "agent.system_prompt must name a file of text"
        try:
            return documents.read(path, RecipeError, remedy).strip()
        except FileNotFoundError:
            raise RecipeError(f"{path} is not there; {remedy}") from None
    if max_calls == 1:
        rule = "Each message is one call and nothing else"
    else:
        rule = f"Each message holds up to {max_calls} calls, made in order"
    return (
        f"You are a coding agent. Do the task in the repository by calling tools. {rule}. "
        "Paths are relative to the repository root. Read before you edit, run the tests, then finish."
    )


def user_prompt(task: Task) -> str:
    """The instruction of the task, which names the command that runs its tests, behind the rules of its repository."""
    rules = clip(_agents_file(workspace(task) / AGENTS_FILE), AGENTS_CHARS)
    return "\n\n".join(filter(None, [rules and f"{AGENTS_FILE}:\n{rules}", task.instruction.strip()]))


def _agents_file(path: Path) -> str:
    """Text of a regular file; "" where there is none. A link is not followed: it may lead out of the repository."""
    if path.is_symlink() or not path.is_file():
        return ""
    return printable(path.read_text("utf-8", errors="replace")).strip()


def with_effort(task: Task, level: Effort) -> Task:
    """The same task with a level of effort in its instruction."""
    return replace(task, instruction=f"{task.instruction.strip()}\n\n{EFFORT[level]}\n")
