"""Summaries that the policy writes when its context grows full, and with which the next segment opens.

Composer 2 is trained inside its own summaries: a trigger by tokens, a short question, and a condensed context with some
state, all under the one reward of the attempt (arXiv 2603.24477; cursor.com/blog/self-summarization). So good summaries
are learned like any other message, and are as short as pays.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from woodshed.records import Observation

QUESTION = (
    "Your context is nearly full. Write a summary for yourself now, without a call: what you know, what you changed, "
    "what is left to do. It takes the place of everything above but the task."
)
QUESTION_TOKENS = 128
"""Room that is kept for the question, in any tokenizer."""
MIN_TURNS = 2
"""Turns between two summaries: a segment that is full after fewer only condenses, and ends the attempt."""


@dataclass(frozen=True)
class CarriedState:
    """State of an attempt that a new segment opens with."""

    summaries: tuple[str, ...]
    """All so far; the last one speaks for those before it."""
    plan: str
    """To-do list, or ""."""
    tokens_left: int
    turns_left: int

    def opening(self, instruction: str) -> str:
        """The user's message of the new segment."""
        head = f"You are at work on this; summary {len(self.summaries)}, which you wrote when your context was full:"
        parts = [instruction, f"{head}\n{self.summaries[-1] or '(nothing)'}"]
        parts += [f"Your to-do list:\n{self.plan}"] if self.plan else []
        parts.append(f"Left: {self.turns_left} messages, {self.tokens_left} tokens.")
        return "\n\n".join(parts)


def asked(observations: Sequence[Observation]) -> tuple[Observation, ...]:
    """The observations of a turn with the question behind the last one."""
    last = observations[-1]
    return (*observations[:-1], replace(last, text=f"{last.text}\n\n{QUESTION}"))


def trigger(tokens: int, context_length: int, turn_tokens: int) -> int:
    """Length of a prompt from which on the policy is asked: `tokens`, or earlier where the context would not hold the
    question, a message before it and the summary."""
    return min(tokens, context_length - 2 * turn_tokens - QUESTION_TOKENS)
