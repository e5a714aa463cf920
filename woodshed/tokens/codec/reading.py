"""Protocol of codecs, and what reading and writing calls has in common."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from woodshed.records import Call, ErrorKind
from woodshed.tokens.schema import ToolSpec, is_a, kinds, mismatch


class Codec(Protocol):
    """Text to calls and back."""

    @property
    def name(self) -> str: ...

    def describe(self, tools: Sequence[ToolSpec]) -> str:
        """Description of the call format for the system message; "" if the chat template gives it itself."""
        ...

    def parse(
        self, text: str, tools: Sequence[ToolSpec], *, truncated: bool = False
    ) -> tuple[str, tuple[Call, ...], ErrorKind | None]:
        """(prose, every call including faulty ones in order, the turn's first error). Never raises.

        With `truncated` (the turn hit its token limit) the turn's error is "truncated", and so is that of a call
        which was not closed.
        """
        ...

    def format(self, name: str, arguments: Mapping[str, Any], tools: Sequence[ToolSpec]) -> str:
        """The call as the policy should write it: `parse(format(x)) == x`.

        Raises:
            ValueError: the arguments do not fit the schema, or cannot be expressed in this format.
        """
        ...


def read_call(index: int, raw: str, name: str, arguments: dict[str, Any], tools: Sequence[ToolSpec]) -> Call:
    """A call that could be read, checked against the tools."""
    spec = next((tool for tool in tools if tool.name == name), None)
    kind: ErrorKind | None = None
    if spec is None:
        kind = "unknown_tool"
    elif mismatch(arguments, spec.parameters):
        kind = "bad_arguments"
    return Call(id=f"call_{index}", tool=name, arguments=arguments, raw=raw, error_kind=kind)


def verdict(calls: Sequence[Call], truncated: bool) -> ErrorKind | None:
    if truncated:
        return "truncated"
    if not calls:
        return "no_call"
    return next((call.error_kind for call in calls if call.error_kind), None)


def checked(name: str, arguments: Mapping[str, Any], tools: Sequence[ToolSpec]) -> ToolSpec:
    """The tool of a call about to be written.

    Raises:
        ValueError: there is no such tool, or the arguments do not fit it.
    """
    spec = next((tool for tool in tools if tool.name == name), None)
    if spec is None:
        raise ValueError(f"no tool {name!r} among {[tool.name for tool in tools]}")
    if fault := mismatch(arguments, spec.parameters):
        raise ValueError(f"{name}: {fault}")
    return spec


def _no_constants(text: str) -> Any:
    raise ValueError(f"{text} is not JSON")


_DECODER = json.JSONDecoder(parse_constant=_no_constants)


def read_json(text: str, position: int) -> tuple[Any, int]:
    """(the JSON value that stands at a position, where it ends).

    Raises:
        ValueError, RecursionError: there is none.
    """
    return _DECODER.raw_decode(text, len(text) - len(text[position:].lstrip()))


DEEPEST = 32
"""Lists and objects inside each other; what is deeper is unparseable, since not everything that reads it could."""


def is_sound(value: Any) -> bool:
    """True for a value of JSON that is not too deep, and whose text a file can hold."""
    return not _is_deep(value) and is_utf8(value)


def _is_deep(value: Any) -> bool:
    level = [value]
    for _ in range(DEEPEST):
        level = [
            item
            for outer in level
            if isinstance(outer, dict | list)
            for item in (outer.values() if isinstance(outer, dict) else outer)
        ]
    return bool(level)


def is_utf8(value: Any) -> bool:
    """False for text with lone surrogates, which no file and no JSON line can hold."""
    try:
        (value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)).encode("utf-8")
    except (UnicodeEncodeError, RecursionError):
        return False
    return True


def recover(text: str, start: int, opening: str, closing: str) -> tuple[None, int, bool]:
    """End of an unparsable call: behind its closing tag, before the next call's line, or at the end of the text."""
    end = text.find(closing, start)
    following = text.find("\n" + opening, start)
    if end >= 0 and (following < 0 or end < following):
        return None, end + len(closing), True
    return None, (following + 1 if following >= 0 else len(text)), following >= 0


def argument_value(word: str, spec: ToolSpec, name: str) -> Any:
    """A word as the type its schema asks for; the word itself where it is not one."""
    wanted = kinds(spec.parameters.get("properties", {}).get(name, {})) or ["string"]
    if "string" in wanted:
        return word
    try:
        value = json.loads(word, parse_constant=_no_constants)
    except (ValueError, RecursionError):
        return word
    return value if any(is_a(value, kind) for kind in wanted) else word
