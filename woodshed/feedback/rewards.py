"""Auxiliary rewards: amounts added to a reward for behaviour, whatever the result of the attempt.

Composer 2 report (arXiv 2603.24477, section 4.2): rewards for style and communication and penalties for poor use of
tools are added to the result of the tests. Everything here is counted by rules from the attempt itself and is off by
default, because policies exploit such rewards.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Mapping
from typing import Annotated

from pydantic import Field

from woodshed.agent import todo
from woodshed.boundary import contained
from woodshed.feedback.behaviours import BEHAVIOURS, words_outside_calls
from woodshed.feedback.detectors import DETECTORS, Detector, is_untested
from woodshed.parts import Part
from woodshed.records import CALL_FAULTS, Rollout, Task
from woodshed.settings import Settings

Count = Callable[[Task, Rollout], int]


def _turns_found(detector: Detector) -> Count:
    return lambda task, rollout: len({fault.turn for fault in detector(task, rollout)})


TERMS: dict[str, Count] = {
    "tested": lambda task, rollout: int(rollout.ended == "finished" and not is_untested(rollout)),
    "invalid_calls": lambda task, rollout: sum(turn.error_kind in CALL_FAULTS for turn in rollout.turns),
    "open_todos": lambda task, rollout: todo.count_open(todo.current(rollout.turns)),
    "message_words": lambda task, rollout: sum(words_outside_calls(turn) for turn in rollout.turns),
    **{name: _turns_found(detector) for name, detector in (DETECTORS | BEHAVIOURS).items()},
}
"""Reward terms by name: finishing after a command on the last change; faulty turns; items left open in the to-do
list; words outside of calls;
and turns that a detector finds."""

TERM: Part[Count] = Part("reward term", TERMS)
"""Reward terms that a recipe may name; each counts something in an attempt."""


class RewardSettings(Settings):
    """Auxiliary rewards; none by default."""

    terms: dict[Annotated[str, TERM], float] = Field(default_factory=dict)
    """Name to the amount added to an attempt's reward for each occurrence; negative for a penalty. Names: tested,
    invalid_calls, open_todos, message_words, a detector (untested, unfinished, long_message, ...), or
    package.module:name of your own."""


def auxiliary(task: Task, rollout: Rollout, terms: Mapping[str, float]) -> dict[str, float]:
    """Name to the amount that each term adds to the attempt's reward, zeros included.

    A count that fails on an attempt adds no reward; a penalty counts every turn then.
    """

    def counted(name: str) -> float:
        count = TERM.resolve(name)(task, rollout)
        if not isinstance(count, int | float) or not math.isfinite(count):
            raise TypeError(f"reward term {name!r} returned {count!r}; it must return a number")
        return count

    def value(name: str, amount: float) -> float:
        worst = min(0.0, amount * max(1, len(rollout.turns)))
        return contained(lambda: amount * counted(name), lambda error: _failed(rollout, error, worst))

    return {name: value(name, amount) for name, amount in terms.items()}


def _failed(rollout: Rollout, error: str, value: float) -> float:
    warnings.warn(f"{rollout.id}: a reward term could not be counted: {error}", stacklevel=2)
    return value
