"""Calls of a policy that thinks before it speaks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from woodshed.records import Call, ErrorKind
from woodshed.tokens.codec.reading import Codec
from woodshed.tokens.schema import ToolSpec

OPENING, CLOSING = "<think>", "</think>"


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
        if not self.opened and not text.lstrip().startswith(OPENING):
            return 0
        return text.find(CLOSING) + len(CLOSING) if CLOSING in text else 0
