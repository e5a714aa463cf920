"""Targeted feedback: detectors find the faulty turns, and each gets one short hint."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence

from woodshed.agent.tools import TOOLS
from woodshed.boundary import contained
from woodshed.feedback import critic
from woodshed.feedback.behaviours import BEHAVIOURS
from woodshed.feedback.detectors import DETECTORS, Detector, Fault, OwnDetector, with_hint
from woodshed.feedback.hints import CLASSES, PLACEBOS, hint_text
from woodshed.parts import Part
from woodshed.records import Group, Hint, Rollout, Task
from woodshed.tokens.codec import Codec, ToolSpec

__all__ = [
    "BEHAVIOURS",
    "CLASSES",
    "DETECTORS",
    "NAMED",
    "PLACEBOS",
    "Detector",
    "Fault",
    "choose",
    "hint_text",
    "named",
    "with_hint",
    "write",
]


def _silent(task: Task, rollout: Rollout) -> Iterator[Fault]:
    """No rule finds what the critic does."""
    yield from ()


NAMED: Part[Detector] = Part("detector", {**DETECTORS, **BEHAVIOURS, critic.DETECTOR: _silent}, OwnDetector)
"""A detector as a recipe names it."""


def write(
    groups: Iterable[Group],
    tasks: Iterable[Task],
    codec: Codec,
    *,
    tools: Sequence[ToolSpec] = TOOLS,
    detectors: Mapping[str, Detector] = DETECTORS,
) -> list[Hint]:
    """One hint per faulty turn, in the order of rollouts and turns.

    Rollouts that lost their sandbox are passed over.

    Raises:
        KeyError: a group's task is not among `tasks`.
    """
    known = {task.id: task for task in tasks}
    return [
        hint
        for group in groups
        for rollout in group.rollouts
        if rollout.ended != "sandbox_lost"
        for hint in _hints(known[group.task_id], rollout, codec, tools, detectors)
    ]


def choose(hints: Iterable[Hint], detectors: Sequence[str] = ()) -> list[Hint]:
    """The hints of these detectors; all of them where none is named."""
    return [hint for hint in hints if not detectors or hint.detector in detectors]


def named(detectors: Sequence[str]) -> dict[str, Detector]:
    """The detectors that look: the call faults always, and of the others those that are named.

    Raises:
        RecipeError: there is no such detector, or one of the user's own cannot be used.
    """
    asked = {name: NAMED.resolve(name) for name in detectors if name not in DETECTORS}
    order = [*BEHAVIOURS, *(name for name in asked if name not in BEHAVIOURS)]
    return DETECTORS | {name: asked[name] for name in order if name in asked}


def _hints(
    task: Task,
    rollout: Rollout,
    codec: Codec,
    tools: Sequence[ToolSpec],
    detectors: Mapping[str, Detector],
) -> Iterator[Hint]:
    spoken: dict[int, tuple[str, Fault]] = {}
    for name, detector in detectors.items():
        for fault in contained(
            functools.partial(_faults, detector, task, rollout), functools.partial(_unread, rollout, name)
        ):
            spoken.setdefault(fault.turn, (name, fault))
    for turn, (name, fault) in sorted(spoken.items(), key=lambda item: item[0]):
        tool = _tool(fault, tools)
        text = hint_text(name, tools=tools, codec=codec, tool=tool, test_command=task.test_command)
        yield Hint(rollout.id, turn, name, text)


def _faults(detector: Detector, task: Task, rollout: Rollout) -> list[Fault]:
    """The faults that a detector yields.

    Raises:
        TypeError: it yields something else, or a turn that is not there.
    """
    faults = list(detector(task, rollout))
    if odd := [f for f in faults if not (isinstance(f, Fault) and f.turn in range(len(rollout.turns)))]:
        raise TypeError(f"yielded {odd[0]!r}; it must yield a Fault of one of {len(rollout.turns)} turns")
    return faults


def _unread(rollout: Rollout, detector: str, error: str) -> list[Fault]:
    """No hints of a detector that broke on an attempt: a hint at a wrong turn would teach what is wrong."""
    warnings.warn(f"{rollout.id}: detector {detector!r} could not read the attempt: {error}", stacklevel=2)
    return []


def _tool(fault: Fault, tools: Sequence[ToolSpec]) -> str | None:
    """The tool that the faulty call names, also where the call could not be read."""
    if fault.call is None:
        return None
    return fault.call.tool or next((spec.name for spec in tools if spec.name in fault.call.raw), None)
