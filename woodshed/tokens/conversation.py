"""One conversation as token ids: a prompt that grows by what is said, and begins anew where it must be rewritten.

Within a segment nothing is rendered or tokenised again: the prompt of a message is the prompt of the one before it, its
sampled ids, and what came back. A segment ends where the chat template drops thoughts that stand in it, and where a
summary takes its place.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Literal

from woodshed.records import Break, Call, Observation, Turn
from woodshed.tokens.renderer import AnsweredMessage, ContextTokens, Renderer
from woodshed.tokens.schema import ToolSpec


class Conversation:
    """The messages of an attempt."""

    def __init__(self, renderer: Renderer, system: str, user: str, tools: Sequence[ToolSpec]) -> None:
        self._renderer = renderer
        self._exchanges: list[AnsweredMessage] = []
        self._opening = renderer.start(system, user, tools)
        self.context: ContextTokens = self._opening
        """Tokens before the next message that were not in the prompt of the one before it."""
        self.prompt: list[int] = list(self.context.ids)
        """The whole prompt of the next message."""
        self.segment = 0
        """Number of the segment that the next message belongs to."""
        self.begins: Break | Literal[""] = ""
        """Why that segment begins with the next message, where it does."""

    def add(
        self,
        sampled_ids: Sequence[int],
        finish_reason: Literal["stop", "length"],
        observations: Sequence[Observation],
        calls: Sequence[Call],
    ) -> None:
        """Go on behind a message and its answer."""
        answer = self._renderer.extend(sampled_ids, finish_reason, observations, calls)
        self._exchanges.append(AnsweredMessage(tuple(sampled_ids), tuple(calls), answer))
        self.prompt += sampled_ids
        whole = self._renderer.without_thoughts(self._opening, self._exchanges)
        if whole is None or list(whole.ids[: len(self.prompt)]) == self.prompt:
            self.context, self.begins = answer, ""
            self.prompt += answer.ids
        else:
            self._begin(whole, "thoughts")

    def restart(self, system: str, user: str, tools: Sequence[ToolSpec]) -> None:
        """Open the next segment behind a summary."""
        self._exchanges = []
        self._opening = self._renderer.start(system, user, tools)
        self._begin(self._opening, "summary")

    def resume(self, turns: Sequence[Turn], following: Turn) -> None:
        """Take up a recorded segment before the turn `following`; thoughts of the turns before it are never dropped."""
        self.segment, self.begins = following.segment, following.begins
        self.context = self._opening = ContextTokens(following.context_ids, following.opening)
        self.prompt = [i for turn in turns for i in (*turn.context_ids, *turn.sampled_ids)]
        self.prompt += following.context_ids
        self._exchanges = []

    def _begin(self, context: ContextTokens, begins: Break) -> None:
        """Open the next segment with a whole prompt."""
        self.context, self.begins, self.segment = context, begins, self.segment + 1
        self.prompt = list(context.ids)

    def copy(self) -> Conversation:
        """The same conversation, which goes on by itself."""
        twin = copy.copy(self)
        twin.prompt, twin._exchanges = list(self.prompt), list(self._exchanges)
        return twin
