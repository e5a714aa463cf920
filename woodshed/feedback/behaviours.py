"""Detectors of unwanted behaviour in turns whose calls are valid. Each is used only if a recipe names it.

They are separate from the call faults because teams differ: unwanted behaviour in one is usual in another.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

from woodshed.agent.effects import effect
from woodshed.feedback.detectors import Detector, Fault, executed
from woodshed.records import Rollout, Task, Turn

LONG_WORDS = 60  # largest number of words outside of calls in a last message
COMMENT_LINES = 5  # fewer comment lines are normal

_LEFT_OPEN = re.compile(r"^\+(?!\+\+).*(\b(?:TODO|FIXME|XXX)\b|NotImplementedError)", re.MULTILINE)
_FILE_WORK = re.compile(r"^\s*(cat|head|tail|sed|awk|grep|find|ls|tee)\b|>\s*\S+\.\w+")


def unfinished(task: Task, rollout: Rollout) -> Iterator[Fault]:
    """Finishing with a to-do or a stub in the patch."""
    if rollout.ended == "finished" and _LEFT_OPEN.search(rollout.patch.diff):
        yield Fault(len(rollout.turns) - 1)


def comment_reasoning(task: Task, rollout: Rollout) -> Iterator[Fault]:
    """Reasoning in comments: an edit that is mostly comment lines."""
    for index, turn in enumerate(rollout.turns):
        for call, observation in executed(turn):
            text = effect(call).new
            lines = [line.strip() for line in text.splitlines() if line.strip()]
            comments = sum(line.startswith("#") for line in lines)
            if observation.error_kind is None and comments >= COMMENT_LINES and 2 * comments > len(lines):
                yield Fault(index, call)
                break


def terminal_only(task: Task, rollout: Rollout) -> Iterator[Fault]:
    """Reading and writing files only through the shell, at the first such turn."""
    first: Fault | None = None
    for index, turn in enumerate(rollout.turns):
        for call, _seen in executed(turn):
            done = effect(call)
            if done.kind in ("read", "write"):
                return
            if _FILE_WORK.search(done.command):
                first = first or Fault(index, call)
    if first:
        yield first


def long_message(task: Task, rollout: Rollout) -> Iterator[Fault]:
    """A last message with many words outside of its calls."""
    if rollout.turns and words_outside_calls(rollout.turns[-1]) > LONG_WORDS:
        yield Fault(len(rollout.turns) - 1)


def words_outside_calls(turn: Turn) -> int:
    """Number of words in a message outside its calls."""
    text = turn.text
    for call in turn.calls:
        text = text.replace(call.raw, "", 1)
    return len(text.split())


def out_of_bounds(task: Task, rollout: Rollout) -> Iterator[Fault]:
    """A change outside of the task's allowed paths."""
    for index, turn in enumerate(rollout.turns):
        for call, observation in executed(turn):
            done = effect(call)
            path = done.path.removeprefix("./")
            inside = any(path == allowed or path.startswith(f"{allowed}/") for allowed in task.allowed_paths)
            if done.kind == "write" and observation.error_kind is None and not inside:
                yield Fault(index, call)
                break


BEHAVIOURS: dict[str, Detector] = {
    "unfinished": unfinished,
    "comment_reasoning": comment_reasoning,
    "terminal_only": terminal_only,
    "long_message": long_message,
    "out_of_bounds": out_of_bounds,
}
"""Detector by name, as in the hints."""
