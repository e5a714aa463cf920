"""Calls of a policy that thinks before it speaks."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from woodshed.records import Call, ErrorKind
from woodshed.tokens.codec.reading import Codec
from woodshed.tokens.schema import ToolSpec

OPENING, CLOSING = "<think>", "</think>"
ANALYSIS = re.compile(r"(?:<\|channel\|>analysis<\|message\|>.*?<\|end\|><\|start\|>assistant)+", re.DOTALL)
"""Thoughts of gpt-oss: messages of their own before the one that is answered."""


@dataclass(frozen=True)
class ThoughtfulCodec:
    """A codec that reads calls behind the thought only.

    A thought that was not closed ends where the first call begins.
    """

    inner: Codec
    opened: bool = False
    """The prompt has opened the thought."""

    @property
    def name(self) -> str:
        return self.inner.name

    def describe(self, tools: Sequence[ToolSpec]) -> str:
        return self.inner.describe(tools)

    def parse(
        self, text: str, tools: Sequence[ToolSpec], *, truncated: bool = False
    ) -> tuple[str, tuple[Call, ...], ErrorKind | None]:
        return self.inner.parse(text[self.thought(text) :], tools, truncated=truncated)

    def format(self, name: str, arguments: Mapping[str, Any], tools: Sequence[ToolSpec]) -> str:
        return self.inner.format(name, arguments, tools)

    def thought(self, text: str) -> int:
        """Length of the thought at the beginning of a message, tags included; 0 where none was closed."""
        return length(text, opened=self.opened, calls=(None,))


def length(text: str, *, opened: bool, calls: Sequence[object]) -> int:
    """Length of the thought at the beginning of a message, tags included.

    Args:
        opened: the prompt has opened the thought.
        calls: those of the message; without any, a thought that was not closed is all of it.
    """
    if analysis := ANALYSIS.match(text):
        return analysis.end()
    if not opened and not text.lstrip().startswith(OPENING):
        return 0
    if CLOSING in text:
        return text.find(CLOSING) + len(CLOSING)
    return 0 if calls else len(text)
