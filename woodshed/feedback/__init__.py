"""Targeted feedback: detectors find faulty turns, and each of these gets one short hint."""

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
from woodshed.tokens.schema import foreign_tool

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
    """Find nothing: the critic works without a rule."""
    yield from ()


NAMED: Part[Detector] = Part("detector", {**DETECTORS, **BEHAVIOURS, critic.DETECTOR: _silent}, OwnDetector)
"""Detectors that a recipe may name."""


def write(
    groups: Iterable[Group],
    tasks: Iterable[Task],
    codec: Codec,
    *,
    tools: Sequence[ToolSpec] = TOOLS,
    detectors: Mapping[str, Detector] = DETECTORS,
) -> list[Hint]:
    """One hint per faulty turn, in the order of rollouts and turns.

    Rollouts that lost their sandbox are skipped.

    Raises:
        KeyError: a group's task is not among `tasks`.
    """
    task_of = {task.id: task for task in tasks}
    return [
        hint
        for group in groups
        for rollout in group.rollouts
        if rollout.ended != "sandbox_lost"
        for hint in _hints(task_of[group.task_id], rollout, codec, _offered(rollout) or tools, detectors)
    ]


def _offered(rollout: Rollout) -> list[ToolSpec]:
    """The tools of an agent of others."""
    offered = rollout.tools or ()
    return [foreign_tool(tool["name"], tool["description"], tool["parameters"]) for tool in offered]


def choose(hints: Iterable[Hint], detectors: Sequence[str] = ()) -> list[Hint]:
    """The hints of these detectors; all hints if none is named."""
    return [hint for hint in hints if not detectors or hint.detector in detectors]


def named(detectors: Sequence[str]) -> dict[str, Detector]:
    """The active detectors: all call faults, and those of the others that are named.

    Raises:
        RecipeError: an unknown detector, or one of the user's own that cannot be used.
    """
    chosen = {name: NAMED.resolve(name) for name in detectors if name not in DETECTORS}
    order = [*BEHAVIOURS, *(name for name in chosen if name not in BEHAVIOURS)]
    return DETECTORS | {name: chosen[name] for name in order if name in chosen}


def _hints(
    task: Task,
    rollout: Rollout,
    codec: Codec,
    tools: Sequence[ToolSpec],
    detectors: Mapping[str, Detector],
) -> Iterator[Hint]:
    faults: dict[int, tuple[str, Fault]] = {}
    for name, detector in detectors.items():
        for fault in contained(
            functools.partial(_faults, detector, task, rollout), functools.partial(_unread, rollout, name)
        ):
            faults.setdefault(fault.turn, (name, fault))
    for turn, (name, fault) in sorted(faults.items(), key=lambda item: item[0]):
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
    """Warn of a detector that failed on an attempt, which gets no hints of it."""
    warnings.warn(f"{rollout.id}: detector {detector!r} could not read the attempt: {error}", stacklevel=2)
    return []


def _tool(fault: Fault, tools: Sequence[ToolSpec]) -> str | None:
    """The tool that the faulty call names, also if the call could not be parsed."""
    if fault.call is None:
        return None
    return fault.call.tool or next((spec.name for spec in tools if spec.name in fault.call.raw), None)
