"""Cost of an attempt, as six counters, and the concave penalty on their weighted sum.

Composer 2 report (arXiv 2603.24477, section 4.2): C(x) = ((1 + kx)^(1-q) - 1) / (k (1-q)), x a weighted sum of
thinking tokens, tool-call tokens, tool-output tokens, final-message tokens, calls and turns. The first tokens cost
most, so easy work becomes short and hard work keeps its room.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping

from pydantic import Field

from woodshed.agent.prompt import Effort
from woodshed.records import Rollout
from woodshed.settings import Settings
from woodshed.tokens.renderer import Renderer
from woodshed.tokens.token_kinds import token_kinds

# The report gives no values; these are ours.
K = 1e-3
"""Scale on which the penalty flattens: its slope is 1 at no effort and 2^-q at 1/k."""
Q = 0.5
"""Strength of the flattening: 0 is linear, 1 logarithmic; above 1 it has a ceiling, 1 / (k (q - 1))."""
PER = 2000.0
"""The penalty is divided by this, so that it lies in the range of a reward."""
COUNTER_WEIGHTS = {
    "thinking_tokens": 1.0,  # outside of calls
    "call_tokens": 1.0,  # a call's tags included
    "output_tokens": 0.1,  # given back by tools
    "message_tokens": 1.0,  # of a closing message without a call
    "calls": 10.0,
    "turns": 10.0,
}
LEVEL_FACTORS: dict[Effort, float] = {"low": 4.0, "medium": 1.0, "high": 0.25}
"""Effort that a prompt asked for to a factor on the penalty."""


class EffortSettings(Settings):
    """The effort penalty, which is one at about 3,000 tokens and weight 1."""

    weight: float = Field(default=0.0, ge=0)
    """Factor on the penalty, which is taken off the reward; 0 counts nothing."""
    levels: tuple[Effort, ...] = ()
    """Efforts that prompts ask for (low, medium, high), one for each group, in turn. Empty: prompts say nothing."""

    def level(self, step: int, group: int) -> Effort | None:
        """The effort that the prompt of a step's n-th group asks for.

        One level a group, so that its attempts share a baseline; over steps every level comes equally often.
        """
        return self.levels[(step + group) % len(self.levels)] if self.levels else None


def concave(x: float, *, k: float, q: float) -> float:
    """C_{k,q}(x) for x >= 0; its limit log(1 + kx) / k at q = 1."""
    if abs(q - 1.0) < 1e-12:
        return math.log1p(k * x) / k
    return math.expm1((1.0 - q) * math.log1p(k * x)) / (k * (1.0 - q))


def counters(rollout: Rollout, renderer: Renderer) -> dict[str, int]:
    """The six counters, from the sampled ids themselves. Words without a call count as a closing message in the last
    turn, else as thinking."""
    counted = dict.fromkeys(COUNTER_WEIGHTS, 0)
    for number, turn in enumerate(rollout.turns):
        is_last = number == len(rollout.turns) - 1
        for kind in token_kinds(turn, renderer):
            if kind in ("call", "template"):
                counted["call_tokens"] += 1
            elif kind == "message" and is_last:
                counted["message_tokens"] += 1
            else:
                counted["thinking_tokens"] += 1
        is_answer = number > 0 and not turn.begins  # what opens a segment is no new output of a tool
        counted["output_tokens"] += len(turn.context_ids) - turn.opening if is_answer else 0
        counted["calls"] += len(turn.calls)
        counted["turns"] += 1
    return counted


def penalties(
    rollouts: Iterable[Rollout],
    renderer: Renderer,
    settings: EffortSettings,
    asked: Mapping[str, Effort] | None = None,
) -> dict[str, float]:
    """Rollout id to what its effort takes off its reward; nothing where the weight is 0.

    Args:
        asked: task id to the effort that its prompt asked for; it scales the weight.
    """
    if not settings.weight:
        return {}
    found = {}
    for rollout in rollouts:
        x = sum(COUNTER_WEIGHTS[name] * count for name, count in counters(rollout, renderer).items())
        level = (asked or {}).get(rollout.task_id)
        weight = settings.weight * (LEVEL_FACTORS[level] if level else 1.0)
        found[rollout.id] = weight * concave(x, k=K, q=Q) / PER
    return found
