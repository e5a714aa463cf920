"""Thoughts of earlier messages, as chat templates keep or drop them while a conversation grows.

Templates of thinking models leave thoughts out of messages that others follow: some once the user speaks (results of
calls are no message of the user), some at once. Which, and what stands in their place, is found by rendering probe
conversations, of which each thought is a sentinel.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from woodshed.records import ModelError
from woodshed.tokens.chat_template import ChatTemplate, Message, mark, said
from woodshed.tokens.codec import thoughts

Kind = Literal["called", "said"]
"""A message whose calls are answered by their results, or one that a message of the user answers."""
Called = Callable[[int], Sequence[Message]]
"""The number of a message to a message with a call, and its result."""


@dataclass(frozen=True)
class ThoughtRules:
    """The messages that lose their thoughts."""

    own: frozenset[Kind]
    """Those that lose it as soon as they are answered."""
    earlier: frozenset[tuple[Kind, Kind]]
    """(a message that is answered, an earlier one that loses its thought then)."""
    heads: Mapping[Kind, str]
    """Text from the end of what stands before such a message to its prose or its call."""

    def dropped(self, kinds: Sequence[Kind]) -> list[bool]:
        """Say of each message of a conversation if it has lost its thought, once the last one is answered."""
        dropped: list[bool] = []
        for kind in kinds:
            earlier = zip(dropped, kinds, strict=False)
            dropped = [was or (kind, before) in self.earlier for was, before in earlier]
            dropped.append(kind in self.own)
        return dropped


NOTHING_DROPPED = ThoughtRules(frozenset(), frozenset(), {})


def find_rules(
    template: ChatTemplate, called: Called | None, first_call: Callable[[str], str], *, is_regular: bool
) -> ThoughtRules:
    """The rules of a template.

    Args:
        called: None where calls are messages like any other.
        first_call: the text of the first call in a rendered text.
        is_regular: every message of the policy begins with the same text.
    """
    if not any(sign in template.source for sign in (thoughts.CLOSING, "reasoning_content", "thinking")):
        return NOTHING_DROPPED
    pairs: list[tuple[Kind, Kind]] = [
        (earlier, last) for earlier in _kinds(called) for last in _kinds(called)
    ]
    as_fields = any(mark("t0") in _conversation(template, pair, called, "fields", cut=1) for pair in pairs)
    texts = {pair: _conversation(template, pair, called, "fields" if as_fields else "text") for pair in pairs}
    own: set[Kind] = set()
    lost: set[tuple[Kind, Kind]] = set()
    for (earlier, last), text in texts.items():
        own |= {last} if text and mark("t1") not in text else set()
        lost |= {(last, earlier)} if text and mark("t0") not in text else set()
    heads: dict[Kind, str] = {}
    for last, earlier in lost:
        heads[earlier] = _head(
            template, _conversation(template, (earlier, last), called), earlier, first_call
        )
    if (own or lost) and not (is_regular and own <= heads.keys() and all(heads.values())):
        warnings.warn(
            f"{template.name}: the chat template drops earlier thoughts, and what it leaves of a message is not found "
            "in its text; here they stay in the context",
            stacklevel=2,
        )
        return NOTHING_DROPPED
    return ThoughtRules(frozenset(own), frozenset(lost), heads)


def _kinds(called: Called | None) -> tuple[Kind, ...]:
    return ("called", "said") if called else ("said",)


def _conversation(
    template: ChatTemplate,
    kinds: Sequence[Kind],
    called: Called | None,
    thinking: Literal["fields", "text", ""] = "",
    *,
    cut: int | None = None,
) -> str:
    """The template's text for messages of these kinds, with thoughts in fields of their own, in the text, or without
    any, each with its answer; "" where it refuses them.

    Args:
        cut: number of messages behind the base, where they are not all.
    """
    messages: list[Message] = []
    for number, kind in enumerate(kinds):
        thought = mark(f"t{number}")
        if kind == "called" and called is not None:
            message, *answers = called(number)
        else:
            message, answers = said("assistant", f"a{number}"), [said("user", f"o{number}")]
        if thinking == "fields":  # the names that templates know
            message = {**message, "reasoning_content": thought, "thinking": thought}
        elif thinking == "text":
            content = f"{thoughts.OPENING}\n{thought}\n{thoughts.CLOSING}\n\n{message['content']}"
            message = {**message, "content": content}
        messages += [message, *answers]
    try:
        return template.text([*template.base, *messages[:cut]])
    except ModelError:
        return ""


def _head(template: ChatTemplate, text: str, kind: Kind, first_call: Callable[[str], str]) -> str:
    """Text before the first message of the policy in a conversation; "" where it is not found."""
    before, opening = template.text(template.base, opened=False), template.opening(template.base)
    content = first_call(text[len(before) :]) if kind == "called" else mark("a0")
    if not text.startswith(before) or not content or content not in text:
        return ""
    head = text[len(before) : text.index(content, len(before))]
    return head + opening if opening and content.startswith(opening) else head
