"""Messages for servers that take and return text: their tokens are three bytes of it each.

The agent, its budgets and its records count token ids, so messages to a chat endpoint have ids, too, from which the
text comes back. They are nobody's tokens: nothing can be trained on them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Literal

from woodshed.records import Call, Observation, RecipeError
from woodshed.tokens.codec import CODEC, CODECS
from woodshed.tokens.codec.families import FamilyCodec
from woodshed.tokens.codec.reading import Codec
from woodshed.tokens.renderer import AnsweredMessage, ContextTokens, joined
from woodshed.tokens.schema import ToolSpec

ROLES = ("system", "user", "assistant")
"""Ids 0, 1 and 2 begin a message of this role."""
END = 3
"""Ends a message of the assistant."""
BYTES = 3


class TextRenderer:
    """Messages to ids that stand for text, and back."""

    stop_ids = frozenset({END})
    vocab_size = END + 1 + 257**BYTES
    system_hints = True

    def __init__(self, codec: str = "auto") -> None:
        """Choose the call format, plain with codec "auto".

        Raises:
            RecipeError: a format that the chat template of a model has to describe.
        """
        chosen = CODECS["plain"] if codec == "auto" else CODEC.resolve(codec)
        if chosen is None or isinstance(chosen, FamilyCodec):
            raise RecipeError(
                f"codec = {codec!r} needs the chat template of a model, and a chat endpoint takes text only; take "
                "plain or json"
            )
        self.codec: Codec = chosen

    def start(self, system: str, user: str, tools: Sequence[ToolSpec]) -> ContextTokens:
        system = "\n\n".join(text for text in (system, self.codec.describe(tools)) if text)
        return ContextTokens((0, *_ids(system), 1, *_ids(user), 2), 1)

    def extend(
        self,
        sampled_ids: Sequence[int],
        finish_reason: Literal["stop", "length"],
        observations: Sequence[Observation],
        calls: Sequence[Call],
    ) -> ContextTokens:
        end = () if sampled_ids and sampled_ids[-1] == END else (END,)
        return ContextTokens((*end, 1, *_ids(joined(observations)), 2), 1)

    def without_thoughts(
        self, opening: ContextTokens, exchanges: Sequence[AnsweredMessage]
    ) -> ContextTokens | None:
        return None

    def hint(self, text: str, *, placement: Literal["system", "user"] = "system") -> tuple[int, ...]:
        return (ROLES.index(placement), *_ids(text))

    def encode_message(self, text: str) -> tuple[int, ...]:
        return (*_ids(text), END)

    def decode(self, ids: Sequence[int]) -> str:
        data = b"".join(_bytes(token) for token in ids if token > END)
        return data.decode("utf-8", errors="replace")

    def spoken(self, text: str) -> str:
        return text.strip()

    def messages(self, ids: Sequence[int]) -> list[dict[str, str]]:
        """The conversation that a prompt stands for, without the opening at its end."""
        starts = [place for place, token in enumerate(ids) if token < END]
        ends = [*starts[1:], len(ids)]
        parts = [
            (ROLES[ids[start]], self.decode(ids[start + 1 : end]))
            for start, end in zip(starts, ends, strict=True)
        ]
        return [{"role": role, "content": text} for role, text in parts[:-1]]


def _ids(text: str) -> Iterator[int]:
    data = text.encode("utf-8", errors="replace")
    for start in range(0, len(data), BYTES):
        digits = [byte + 1 for byte in data[start : start + BYTES]]
        yield END + sum(digit * 257**place for place, digit in enumerate(digits))


def _bytes(token: int) -> bytes:
    number, digits = token - END, []
    while number:
        number, digit = divmod(number, 257)
        digits.append(digit - 1)
    return bytes(digits)
