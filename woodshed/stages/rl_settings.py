"""Settings of the stage `rl` and of its evaluations, which its collector reads without torch."""

from __future__ import annotations

from typing import Any

from pydantic import Field, field_validator

from woodshed.agent.prompt import Effort
from woodshed.settings import Settings


class RLSettings(Settings):
    """The stage `rl`: reinforcement learning with targeted feedback."""

    steps: int = Field(default=6, ge=1)
    """Optimizer steps of RL and targeted feedback."""
    tasks_per_step: int = Field(default=6, ge=1)
    """Different tasks in one step."""
    staleness: int = Field(default=0, ge=0, le=64)
    """Most steps that a token may be behind the step that learns from it. 0: attempts are made between two updates.
    Above: a process of their own makes them all the time, through servers (engine.kind = process, vllm or http)."""

    @field_validator("steps", mode="before")
    @classmethod
    def _at_least_one(cls, steps: Any) -> Any:
        if steps == 0:
            raise ValueError("a stage has at least one step; leave 'rl' out of `stages` to do without it")
        return steps


class EvaluationSettings(Settings):
    """Measurements on the held-out tasks: those of the stage `evaluate`, and those before and after `rl`."""

    attempts: int = Field(default=1, ge=1)
    """Attempts per held-out task."""
    limit: int = Field(default=0, ge=0)
    """Held-out tasks used, a seeded sample spread over their repositories; 0 uses all."""
    every: int = Field(default=0, ge=0)
    """`rl` also evaluates after every so many steps; 0 evaluates before and after only."""
    effort: Effort | None = None
    """Effort that the prompts of evaluations ask for (low, medium, high); unset, they say nothing."""
