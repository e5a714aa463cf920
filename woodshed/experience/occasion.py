"""Attempts that are made together: their settings, their occasion, and what comes of them."""

from __future__ import annotations

from dataclasses import dataclass, field

from pydantic import Field

from woodshed.agent.attempt import AgentSettings
from woodshed.grading import GradingSettings
from woodshed.monitors.flag_policy import MonitorSettings
from woodshed.records import Flag, Group, Rollout, Verdict
from woodshed.sandbox import SandboxSettings
from woodshed.settings import Settings


class RolloutSettings(Settings):
    """Settings for attempts that are made together."""

    attempts: int = Field(default=4, ge=1)
    """Attempts at each task: the group that shares a baseline."""
    max_in_flight: int = Field(default=24, ge=1)
    """Most attempts at the same time."""
    tool_threads: int = Field(default=2, ge=1)
    """Sandboxes that work at the same time."""
    repeatable: bool = True
    """Attempts go in rounds and waves, so that runs repeat bit for bit. Otherwise a message is sampled as soon as its
    attempt is ready, and attempts are graded while others are made."""
    watch: bool = True
    """Keep which files each attempt reads, writes and runs (`Rollout.accesses`). Chosen on its cost: some 3% of a
    test run."""


@dataclass(frozen=True)
class HarnessSettings:
    """Settings of the harness between a policy and its experience."""

    rollout: RolloutSettings
    agent: AgentSettings
    grading: GradingSettings
    monitors: MonitorSettings
    sandbox: SandboxSettings = field(default_factory=SandboxSettings)


@dataclass(frozen=True)
class Occasion:
    """Occasion on which attempts are made, and the number of attempts at each task."""

    phase: str
    step: int
    attempts: int
    seed: int


@dataclass(frozen=True)
class Experience:
    """Attempts, what grading found and what monitors suspect."""

    groups: list[Group]
    verdicts: dict[str, Verdict]
    """By rollout id."""
    flags: list[Flag]

    @property
    def rollouts(self) -> list[Rollout]:
        return [rollout for group in self.groups for rollout in group.rollouts]
