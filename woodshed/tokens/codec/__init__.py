"""Codecs of tool calls: a policy's calls as text, and the parsing of that text.

A codec turns `(name, arguments)` into the text the policy should write, and any text at all into calls. Reading never
raises: a call that is wrong comes back as a `Call` with an `error_kind`, because a faulty turn is what the policy
learns from.

Formats of ours, and those that families of models were trained on (`families`):

    plain    code stays outside JSON: half the tokens and no escaping, the best start for a small model.
                 <call>edit_file toolz/dicttoolz.py
                 <<<<
                 old text
                 ====
                 new text
                 >>>>
                 </call>
             Text with such a line of its own takes longer fences, all of one length, as in Markdown.
    json     <call>{"name": "read_file", "arguments": {"path": "a.py"}}</call>

The tags of `plain` and `json` are ordinary text. A model whose <tool_call> tokens were never trained cannot learn
them from a few examples; it learns text tags at once.
"""

from __future__ import annotations

from collections.abc import Sequence

from woodshed.boundary import described
from woodshed.parts import Part
from woodshed.records import Call, RecipeError
from woodshed.tokens.codec.families import FAMILIES
from woodshed.tokens.codec.plain import OPENING, PlainCodec, fence_fault
from woodshed.tokens.codec.reading import Codec
from woodshed.tokens.codec.tagged_json import JsonCodec
from woodshed.tokens.schema import ToolSpec, mismatch


def problem(call: Call, tools: Sequence[ToolSpec]) -> str:
    """Fault of a call, in one line that the policy can act on; "" for a valid one."""
    names = ", ".join(tool.name for tool in tools)
    match call.error_kind:
        case None:
            return ""
        case "unknown_tool":
            return f"there is no tool {call.tool!r}; the tools are {names}"
        case "bad_arguments":
            spec = next((tool for tool in tools if tool.name == call.tool), None)
            fault = mismatch(call.arguments, spec.parameters) if spec else None
            return f"{call.tool}: {fault or 'the arguments cannot be read'}"
        case "truncated":
            return "the call was cut off at the token limit"
        case _:
            fault = fence_fault(call.raw) if call.raw.startswith(OPENING) else ""
            return f"the call cannot be read{fault and ': '}{fault}"


def refuse_lossy(codec: Codec, tools: Sequence[ToolSpec]) -> None:
    """Check that the example of every tool, written as a call, is read back as that call.

    Raises:
        RecipeError: names the tool, and what came back.
    """
    for tool in tools:
        try:
            text = codec.format(tool.name, tool.example, tools)
            _, calls, error_kind = codec.parse(text, tools)
            found = [(call.tool, dict(call.arguments), call.error_kind) for call in calls]
            is_told = isinstance(codec.describe(tools), str)
        except Exception as error:
            raise RecipeError(
                f"codec {codec.name!r} cannot write and read a call of {tool.name} with {dict(tool.example)}: "
                f"{described(error)}"
            ) from error
        if not is_told or error_kind is not None or found != [(tool.name, dict(tool.example), None)]:
            raise RecipeError(
                f"codec {codec.name!r} writes a call of {tool.name} with {dict(tool.example)} as {text!r}, and reads "
                f"{found} in it; `parse` must give back what `format` was given, and `describe` return text"
            )


CODECS: dict[str, Codec] = {
    "plain": PlainCodec(),
    "json": JsonCodec(),
    **{codec.name: codec for codec in FAMILIES},
}
"""By the name that a recipe gives."""
CODEC: Part[Codec | None] = Part("codec", {"auto": None, "native": None, **CODECS}, like=Codec)
"""A codec as a recipe names it: one of ours, or an object of the user's; "auto" and "native" depend on the model."""
