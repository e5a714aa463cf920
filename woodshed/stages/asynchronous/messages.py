"""Messages between collector and trainer, through the run folder.

collector    draws -> attempts, verdicts, flags, hints, reward terms -> collected
trainer      published (weights of a version) -> taken (after the checkpoint that has learned from a step)
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from woodshed.experience import Experience
from woodshed.records import Flag, Group, Rollout, RunError, Verdict
from woodshed.runs.folder import RunDir


@dataclass(frozen=True)
class Draw:
    """Tasks of one step."""

    groups: tuple[int, ...]
    """Numbers of its groups, counted over the run; () where no task was left."""
    task_ids: tuple[str, ...]
    seed: int
    version: int
    """Version of the policy that sampled when it was drawn."""
    choice: dict[str, Any] = field(default_factory=dict)
    """State of the choice of tasks after the draw (`Choosing.state`)."""
    told: dict[str, Any] = field(default_factory=dict)
    """Metrics of the pool."""
    dry: str = ""
    """The reason for which no task was drawn; "" where some were."""


@dataclass(frozen=True)
class Collected:
    """The end of a step's or an evaluation's attempts: all of them are kept, graded, watched and annotated."""

    idle_s: float = 0.0
    """Seconds since the one before in which places for attempts were free and none was admitted, times their share."""
    replayed: int = 0
    """Attempts since then that went on from their journal after a kill."""
    restarted: int = 0
    """Attempts since then that began again, since their sandbox did not return what the journal had."""


@dataclass(frozen=True)
class Publication:
    """Weights for the engines."""

    version: int
    """Optimizer steps behind them."""
    folder: str
    """Below the run folder."""
    kind: Literal["adapter", "full", "delta"]
    is_measured: bool
    """The policy is evaluated by them, before later ones are loaded."""
    is_last: bool
    """No step follows."""


@dataclass(frozen=True)
class Taken:
    """A step that a checkpoint has learned from."""

    groups: tuple[int, ...]
    versions: tuple[int, int]
    """Oldest and newest version that sampled its attempts."""


def prolong(run: RunDir, steps: int) -> None:
    """Take the end of a run back that goes on to more steps, before anybody reads that none follows.

    Args:
        steps: of the whole run.
    """
    offers = [offer for _, _, offer in run.read("published", Publication)]
    if offers and offers[-1].is_last and offers[-1].version < steps:
        publish_again(run, replace(offers[-1], is_last=False))


def publish_again(run: RunDir, offer: Publication) -> None:
    """Note weights, or another meaning of weights that were noted before, under the next part of their version."""
    parts = sum(step == offer.version for _, step, _ in run.batches("published"))
    run.append("published", [offer], "train", offer.version, part=parts)


def read_experience(run: RunDir, phase: str, step: int, task_ids: Sequence[str], attempts: int) -> Experience:
    """All attempts of a step or an evaluation, from the run folder.

    A part of `rollouts` and `verdicts` is one attempt, a part of `flags` one group.

    Raises:
        RunError: a part is missing.
    """
    groups: list[Group] = []
    verdicts: dict[str, Verdict] = {}
    flags: list[Flag] = []
    for place, task_id in enumerate(task_ids):
        members: list[Rollout] = []
        for part in range(place * attempts, (place + 1) * attempts):
            members += run.find("rollouts", Rollout, phase, step, part=part) or []
            for verdict in run.find("verdicts", Verdict, phase, step, part=part) or []:
                verdicts[verdict.rollout_id] = verdict
        if len(members) != attempts or not all(made.id in verdicts for made in members):
            raise RunError(
                f"{run.path}: group {place} of {phase} {step} is complete by collected.jsonl, and attempts or verdicts "
                "of it are missing; its records were changed. Start another run"
            )
        groups.append(Group(task_id, tuple(members)))
        flags += run.find("flags", Flag, phase, step, part=place) or []
    return Experience(groups, verdicts, flags)
