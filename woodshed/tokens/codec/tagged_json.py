"""Calls as one JSON object between an opening and a closing tag."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from woodshed.records import Call, ErrorKind
from woodshed.tokens.codec.reading import checked, is_sound, is_utf8, read_call, read_json, recover, verdict
from woodshed.tokens.schema import ToolSpec


@dataclass(frozen=True)
class JsonCodec:
    """One JSON object per call, between an opening and a closing tag.

    The object is read by a JSON decoder, not by looking for the closing tag, so tags and braces inside strings are
    text.
    """

    name: str = "json"
    opening: str = "<call>"
    closing: str = "</call>"

    def describe(self, tools: Sequence[ToolSpec]) -> str:
        if not tools:
            return ""
        example = f'{self.opening}{{"name": "tool", "arguments": {{...}}}}{self.closing}'
        lines = [f"Call a tool by writing {example}. Tools:"]
        for tool in tools:
            required = tool.parameters.get("required", ())
            names = [
                f"{name}: {schema.get('type', 'any')}{'' if name in required else '?'}"
                for name, schema in tool.parameters.get("properties", {}).items()
            ]
            lines.append(f"{tool.name}({', '.join(names)}): {tool.description}")
        return "\n".join(lines)

    def parse(
        self, text: str, tools: Sequence[ToolSpec], *, truncated: bool = False
    ) -> tuple[str, tuple[Call, ...], ErrorKind | None]:
        calls: list[Call] = []
        prose: list[str] = []
        position = 0
        while (start := text.find(self.opening, position)) >= 0:
            prose.append(text[position:start])
            body, end, closed = self._body(text, start + len(self.opening))
            raw = text[start:end]
            if body is None:
                kind: ErrorKind = "truncated" if truncated and not closed else "unparseable"
                calls.append(Call(f"call_{len(calls)}", "", {}, raw, kind))
            else:
                calls.append(read_call(len(calls), raw, body["name"], body.get("arguments", {}), tools))
            position = end
        prose.append(text[position:])
        return "".join(prose).strip(), tuple(calls), verdict(calls, truncated)

    def _body(self, text: str, start: int) -> tuple[dict[str, Any] | None, int, bool]:
        """(the object or None, where the call ends in the text, whether it was closed)."""
        try:
            body, end = read_json(text, start)
            tail = len(text) - len(text[end:].lstrip())
            sound = (
                isinstance(body, dict)
                and body.keys() <= {"name", "arguments"}
                and isinstance(body.get("name"), str)
                and isinstance(body.get("arguments", {}), dict)
                and is_sound(body)
            )
            if text.startswith(self.closing, tail):
                return (body if sound else None), tail + len(self.closing), True
        except (ValueError, RecursionError):
            pass
        return recover(text, start, self.opening, self.closing)

    def format(self, name: str, arguments: Mapping[str, Any], tools: Sequence[ToolSpec]) -> str:
        checked(name, arguments, tools)
        body = json.dumps({"name": name, "arguments": dict(arguments)}, ensure_ascii=False, allow_nan=False)
        if not is_utf8(body):
            raise ValueError(f"{name}: the arguments hold a lone surrogate, which is not text")
        return f"{self.opening}{body}{self.closing}"
