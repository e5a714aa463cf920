"""Detectors: rules that find the faulty turns that a hint could have prevented.

A detector reads a whole rollout and yields the turns with its fault. The text of the hint is in `feedback.hints`.
"""

from __future__ import annotations

import functools
import json
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Protocol

from woodshed.agent.effects import effect
from woodshed.agent.patch import NO_SOURCE
from woodshed.pysource import syntax
from woodshed.records import CALL_FAULTS, Call, ErrorKind, Observation, Rollout, Task, Turn


@dataclass(frozen=True)
class Fault:
    """One faulty turn."""

    turn: int
    """Index into Rollout.turns."""
    call: Call | None = None
    """The faulty call; None for a fault of the whole turn."""


Detector = Callable[[Task, Rollout], Iterator[Fault]]


class OwnDetector(Protocol):
    """A detector of the user's own, with the text of its hint."""

    @property
    def hint(self) -> str:
        """The text after "Reminder: ", which `hints.hint_text` adds."""
        ...

    def __call__(self, task: Task, rollout: Rollout) -> Iterator[Fault]: ...


def with_hint(text: str) -> Callable[[Detector], Detector]:
    """Decorate a detector with the text of its hint.

    The text follows "Reminder: " and contains only what is known before the faulty turn.
    """

    def named(detect: Detector) -> Detector:
        setattr(detect, "hint", text)  # noqa: B010 (a function has no such attribute for a type checker)
        return detect

    return named


def by_error(error_kind: ErrorKind) -> Detector:
    """A detector of turns whose first call fault is of this kind."""

    def detect(task: Task, rollout: Rollout) -> Iterator[Fault]:
        for index, turn in enumerate(rollout.turns):
            if turn.error_kind == error_kind:
                by_call = dict(zip((o.call_id for o in turn.observations), turn.observations, strict=True))
                faulty = (c for c in turn.calls if c.id in by_call and by_call[c.id].error_kind == error_kind)
                yield Fault(index, next(faulty, None))

    return detect


def repeated(task: Task, rollout: Rollout) -> Iterator[Fault]:
    """A call that failed before, repeated without an action in between that could change its result."""
    failed: set[str] = set()
    for index, turn in enumerate(rollout.turns):
        again: Call | None = None
        for call, observation in executed(turn):
            if observation.error_kind is None:
                if effect(call).kind != "read":
                    failed.clear()
            elif (key := _key(call)) in failed:
                again = again or call
            else:
                failed.add(key)
        if again:
            yield Fault(index, again)


def syntax_error(task: Task, rollout: Rollout) -> Iterator[Fault]:
    """Finishing while a changed Python file does not parse."""
    patch = rollout.patch
    is_broken = any(_broken(path, text) for path, text in patch.files.items())
    is_broken |= any(reason.startswith(NO_SOURCE) for reason in patch.skipped.values())
    if rollout.turns and rollout.ended == "finished" and is_broken:
        yield Fault(len(rollout.turns) - 1)


def is_untested(rollout: Rollout) -> bool:
    """True if the policy finished without having run a command since its last change, or at all. Unknown, and False, of
    agents of others, whose tools have other names."""
    tested = rollout.tools is not None
    for turn in rollout.turns:
        for call, observation in executed(turn):
            kind = effect(call).kind
            if kind == "command" and call.error_kind is None:
                tested = True
            elif kind == "write" and observation.error_kind is None:
                tested = False
    return rollout.ended == "finished" and not tested


def untested(task: Task, rollout: Rollout) -> Iterator[Fault]:
    """Finishing without having run a command since the last change, or at all."""
    if rollout.turns and is_untested(rollout):
        yield Fault(len(rollout.turns) - 1)


DETECTORS: dict[str, Detector] = {
    "truncated": by_error("truncated"),
    "repeated": repeated,
    **{kind: by_error(kind) for kind in CALL_FAULTS if kind != "truncated"},
    "syntax_error": syntax_error,
    "untested": untested,
}
"""Detector by name, as in the hints. If several find the same turn, the first in this order gives the hint."""


def executed(turn: Turn) -> Iterator[tuple[Call, Observation]]:
    """The calls of a turn with their observations, without the calls that were not tried."""
    for call, observation in zip(turn.calls, turn.observations, strict=False):
        if observation.error_kind != "too_many_calls" and not observation.text.startswith("not executed"):
            yield call, observation


def _key(call: Call) -> str:
    """Key for comparing calls; calls that could not be parsed are compared as text."""
    return json.dumps([call.tool, call.arguments] if call.arguments else [call.raw], sort_keys=True)


def _broken(path: str, text: str | None) -> bool:
    return text is not None and path.endswith(".py") and not _parses(text)


@functools.lru_cache(maxsize=64)
def _parses(text: str) -> bool:
    """True if the text is valid Python. Cached, since many attempts write the same file."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # invalid escapes are allowed
        try:
            syntax.parse(text)
        except (SyntaxError, ValueError, RecursionError, MemoryError):
            return False
    return True
