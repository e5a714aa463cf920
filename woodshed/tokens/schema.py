"""Schema of a tool as a policy sees it, and validation of arguments against it."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class ToolSpec:
    """A tool as the policy sees it, with its place in the plain format."""

    name: str
    description: str
    """One short sentence; a small model reads every word of it."""
    parameters: dict[str, Any]
    """JSON schema of an object, `additionalProperties` false."""
    inline: tuple[str, ...] = ()
    """Parameters written as words of the header line, in this order (quoted as in a shell)."""
    rest: str | None = None
    """The parameter that takes the raw text after the inline words, up to the closing tag."""
    blocks: tuple[str, ...] = ()
    """Multi-line parameters (one or two), written between the fences, in this order."""
    example: Mapping[str, Any] = field(default_factory=dict)
    """Arguments that show the form of a call, in error observations and in hints."""

    def __post_init__(self) -> None:
        assert len(self.blocks) <= 2 and not (self.rest and self.blocks), f"{self.name}: no plain form"

    @property
    def schema(self) -> dict[str, Any]:
        """The tool in the function-calling form that chat templates take."""
        return {"name": self.name, "description": self.description, "parameters": self.parameters}


EXAMPLES = {"string": "text", "integer": 1, "number": 1, "boolean": True, "array": [], "object": {}}


def foreign_tool(name: str, description: str, parameters: Mapping[str, Any]) -> ToolSpec:
    """A tool of an agent of others, as function-calling describes it: its arguments are words in the plain format, or
    the rest of the line where it takes one text."""
    properties = parameters.get("properties") or {}
    example = {}
    for key in parameters.get("required", ()):
        schema = properties.get(key) or {}
        values = schema.get("enum") or [EXAMPLES.get(kind) for kind in kinds(schema)] or ["text"]
        example[key] = values[0]
    is_text = len(properties) == 1 and all(kinds(schema) == ["string"] for schema in properties.values())
    return ToolSpec(
        name,
        description,
        dict(parameters),
        inline=() if is_text else tuple(properties),
        rest=next(iter(properties)) if is_text else None,
        example=example,
    )


_TYPES: dict[str, tuple[type, ...]] = {
    "string": (str,),
    "integer": (int,),
    "number": (int, float),
    "boolean": (bool,),
    "array": (list,),
    "object": (dict,),
    "null": (type(None),),
}


def mismatch(arguments: Mapping[str, Any], schema: Mapping[str, Any]) -> str | None:
    """The first way in which arguments break their schema (missing, extra, mistyped, out of range), or None."""
    properties = schema.get("properties", {})
    for name in schema.get("required", ()):
        if name not in arguments:
            return f"argument {name!r} is missing"
    for name, value in arguments.items():
        if name not in properties:
            return f"argument {name!r} is not known; known are {', '.join(properties) or 'none'}"
        if fault := _value_mismatch(name, value, properties[name]):
            return fault
    return None


def mend(arguments: Mapping[str, Any], schema: Mapping[str, Any]) -> dict[str, Any] | None:
    """The arguments without unknown names, and with text read as the type that the schema wants; None where that does
    not fit the schema either."""
    properties = schema.get("properties", {})
    mended = {
        name: _as_wanted(value, properties[name]) for name, value in arguments.items() if name in properties
    }
    return None if mismatch(mended, schema) else mended


def _as_wanted(value: Any, schema: Mapping[str, Any]) -> Any:
    wanted = kinds(schema)
    if not wanted or any(is_a(value, kind) for kind in wanted):
        return value
    if "string" in wanted:
        return value if isinstance(value, dict | list) else json.dumps(value)
    try:
        read = json.loads(value) if isinstance(value, str) else value
    except (ValueError, RecursionError):
        return value
    return int(read) if "integer" in wanted and isinstance(read, float) and read.is_integer() else read


def _value_mismatch(name: str, value: Any, schema: Mapping[str, Any]) -> str | None:
    wanted = kinds(schema)
    if wanted and not any(is_a(value, kind) for kind in wanted):
        return f"argument {name!r} must be {' or '.join(wanted)}, not {_shown(value)}"
    if "enum" in schema and value not in schema["enum"]:
        return f"argument {name!r} must be one of {schema['enum']}, not {_shown(value)}"
    if isinstance(value, int | float) and value < schema.get("minimum", value):
        return f"argument {name!r} must be at least {schema['minimum']}, not {_shown(value)}"
    if isinstance(value, list) and "items" in schema:
        faults = (_value_mismatch(f"{name}[{i}]", item, schema["items"]) for i, item in enumerate(value))
        return next((fault for fault in faults if fault), None)
    return None


def kinds(schema: Mapping[str, Any]) -> list[str]:
    kinds = schema.get("type", [])
    return [kinds] if isinstance(kinds, str) else kinds


def is_a(value: Any, kind: str) -> bool:
    if isinstance(value, bool):  # a bool is an int in Python, not in JSON
        return kind == "boolean"
    if isinstance(value, float) and not math.isfinite(value):  # 1e999
        return False
    return isinstance(value, _TYPES.get(kind, (object,)))


def _shown(value: Any) -> str:
    text = json.dumps(value, ensure_ascii=True, default=str)
    return text if len(text) <= 60 else text[:57] + "..."
