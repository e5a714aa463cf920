"""Consequences of flags: no advantage for flagged attempts, quarantine after proof. Nothing else acts on flags.

Flags never change a reward. An attempt that a punishing rule flagged keeps its reward in every figure, takes no part in
its group's baseline and gets no gradient: neither paid nor hit, since a penalty on what is seen teaches hiding.
Proof (a canary in the patch, an impossible test that passed, or a rule and the reading model agreeing) takes the whole
class of tasks out of the draw.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from pydantic import Field

from woodshed.engines.http import EndpointSettings
from woodshed.monitors.judge import JUDGE, read
from woodshed.monitors.rules import RULES, watch_all
from woodshed.records import Flag, RecipeError, Rollout, Task, Verdict
from woodshed.settings import Settings


class MonitorSettings(Settings):
    """Settings for flags and their consequences."""

    tell_only: tuple[str, ...] = ("decompile", "memorised")
    """Rules whose flags are kept and counted, and cost no advantage: they often hit honest engineering."""
    honeypots: float = Field(default=0.05, ge=0.0, le=0.5)
    """Share of the practice tasks that hold bait, rounded down."""
    impossible: float = Field(default=0.02, ge=0.0, le=0.5)
    """Share of the practice tasks that cannot be solved honestly, rounded down."""
    judge: EndpointSettings | None = None
    """Server of a model that reads flagged attempts and a few of the others, by chat completions with tool calls; None
    leaves it out."""


THRESHOLD = 0.5
"""Confidence from which a suspicion is a flag: kept, counted in the hack rate, shown."""


def look(
    rollouts: Sequence[Rollout],
    tasks: Sequence[Task],
    verdicts: Mapping[str, Verdict],
    settings: MonitorSettings,
    *,
    threshold: float = THRESHOLD,
) -> list[Flag]:
    """The flags of these attempts: rules first, then the reading model where there is one.

    Raises:
        SamplerError: the reading model's server failed.
        RecipeError: `tell_only` names a rule that does not exist.
    """
    if unknown := set(settings.tell_only) - set(RULES) - {JUDGE}:
        raise RecipeError(
            f"monitors.tell_only: no rule {min(unknown)!r}; known are {', '.join(RULES)}, {JUDGE}"
        )
    flags = [f for f in watch_all(rollouts, tasks, verdicts) if f.confidence >= threshold]
    if settings.judge is not None:
        flags += [f for f in read(rollouts, tasks, flags, settings.judge) if f.confidence >= threshold]
    return flags


def without_advantage(flags: Iterable[Flag], settings: MonitorSettings) -> frozenset[str]:
    """Ids of the attempts that get no gradient. Flags of the auditing model alone are reported, not acted on."""
    told = set(settings.tell_only)
    return frozenset(f.rollout_id for f in flags if f.rule not in told and not f.rule.startswith(f"{JUDGE}:"))


def confirmed(flags: Iterable[Flag]) -> list[Flag]:
    """Flags that are proof, or that the reading model raised as well for the same attempt and rule."""
    listed = list(flags)
    read = {
        (f.rollout_id, f.rule.removeprefix(f"{JUDGE}:")) for f in listed if f.rule.startswith(f"{JUDGE}:")
    }
    return [f for f in listed if f.confidence >= 1.0 or (f.rollout_id, f.rule) in read]


def task_class(task: Task) -> str:
    """Tasks that share a weakness: those of one package and one operator, and their impossible twins."""
    source = task.environment.distribution.partition("==")[0] or "/".join(task.environment.packages)
    return f"{source}/{task.provenance.get('parent_operator', task.operator)}"


@dataclass(frozen=True)
class Quarantine:
    """A class of tasks that is not drawn any more, and the flag that proved why."""

    task_class: str
    flag: Flag

    @property
    def reason(self) -> str:
        return f"{self.flag.rollout_id}, {self.flag.rule}: {self.flag.quote}"

    def tasks(self, among: Iterable[Task]) -> list[Task]:
        """The tasks of this class."""
        return [task for task in among if task_class(task) == self.task_class]


def quarantined(
    flags: Iterable[Flag], rollouts: Iterable[Rollout], tasks: Iterable[Task]
) -> list[Quarantine]:
    """One entry for each class of tasks with a confirmed cheat, in order of the flags."""
    classes = {task.id: task_class(task) for task in tasks}
    task_of = {rollout.id: rollout.task_id for rollout in rollouts}
    found: dict[str, Quarantine] = {}
    for flag in confirmed(flags):
        name = classes[task_of[flag.rollout_id]]
        found.setdefault(name, Quarantine(name, flag))
    return list(found.values())
