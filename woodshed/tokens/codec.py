"""Codecs of tool calls: a policy's calls as text, and the parsing of that text.

A codec turns `(name, arguments)` into the text the policy should write, and any text at all into calls. Reading never
raises: a call that is wrong comes back as a `Call` with an `error_kind`, because a faulty turn is what the policy
learns from.

Three formats:

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
    hermes   the same JSON between <tool_call> tags, for models that were trained on them.

The tags of `plain` and `json` are ordinary text. A model whose <tool_call> tokens were never trained cannot learn
them from a few examples; it learns text tags at once.
"""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from woodshed.boundary import described
from woodshed.parts import Part
from woodshed.records import Call, ErrorKind, RecipeError
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
            fault = _fence_fault(call.raw) if call.raw.startswith(_OPENING) else ""
            return f"the call cannot be read{fault and ': '}{fault}"


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


def _checked(name: str, arguments: Mapping[str, Any], tools: Sequence[ToolSpec]) -> ToolSpec:
    """The tool of a call about to be written, or ValueError."""
    spec = next((tool for tool in tools if tool.name == name), None)
    if spec is None:
        raise ValueError(f"no tool {name!r} among {[tool.name for tool in tools]}")
    if fault := mismatch(arguments, spec.parameters):
        raise ValueError(f"{name}: {fault}")
    return spec


# --- JSON between tags ------------------------------------------------------------------------------------------


def _no_constants(text: str) -> Any:
    raise ValueError(f"{text} is not JSON")


_DECODER = json.JSONDecoder(parse_constant=_no_constants)


@dataclass(frozen=True)
class JsonCodec:
    """One JSON object per call, between an opening and a closing tag.

    The object is read by a JSON decoder, not by looking for the closing tag, so tags and braces inside strings are
    text.
    """

    name: str = "json"
    opening: str = "<call>"
    closing: str = "</call>"
    newlines: bool = False
    """The trained form of `hermes` has the object on a line of its own."""

    def describe(self, tools: Sequence[ToolSpec]) -> str:
        if self.name == "hermes":
            return ""  # the model's own chat template lists the tools
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
        begin = len(text) - len(text[start:].lstrip())
        try:
            body, end = _DECODER.raw_decode(text, begin)
            tail = len(text) - len(text[end:].lstrip())
            sound = (
                isinstance(body, dict)
                and body.keys() <= {"name", "arguments"}
                and isinstance(body.get("name"), str)
                and isinstance(body.get("arguments", {}), dict)
                and not _is_deep(body)
                and _is_utf8(body)
            )
            if text.startswith(self.closing, tail):
                return (body if sound else None), tail + len(self.closing), True
        except (ValueError, RecursionError):
            pass
        return _recover(text, start, self.opening, self.closing)

    def format(self, name: str, arguments: Mapping[str, Any], tools: Sequence[ToolSpec]) -> str:
        _checked(name, arguments, tools)
        body = json.dumps({"name": name, "arguments": dict(arguments)}, ensure_ascii=False, allow_nan=False)
        if not _is_utf8(body):
            raise ValueError(f"{name}: the arguments hold a lone surrogate, which is not text")
        line = "\n" if self.newlines else ""
        return f"{self.opening}{line}{body}{line}{self.closing}"


def _recover(text: str, start: int, opening: str, closing: str) -> tuple[None, int, bool]:
    """End of an unparsable call: behind its closing tag, before the next call's line, or at the end of the text."""
    end = text.find(closing, start)
    following = text.find("\n" + opening, start)
    if end >= 0 and (following < 0 or end < following):
        return None, end + len(closing), True
    return None, (following + 1 if following >= 0 else len(text)), following >= 0


DEEPEST = 32
"""Lists and objects inside each other; what is deeper is unparseable, since not everything that reads it could."""


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


def _is_utf8(value: Any) -> bool:
    """False for text with lone surrogates, which no file and no JSON line can hold."""
    try:
        (value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)).encode("utf-8")
    except (UnicodeEncodeError, RecursionError):
        return False
    return True


# --- code outside JSON ------------------------------------------------------------------------------------------

_OPENING, _CLOSING = "<call>", "</call>"
_BEGIN = re.compile(r"<{4,}")
_FENCE = 4
"""The shortest fences; longer ones where the text holds a line that is one."""
_HEAD = re.compile(r"\s*(\S+)[ \t]*(.*)", re.DOTALL)
_WORD = re.compile(r"""[ \t]*((?:[^\s'"\\]|\\.|'[^']*'|"(?:\\.|[^"\\])*")+)""", re.DOTALL)


@dataclass(frozen=True)
class PlainCodec:
    """A header line with the tool's name and words, then the multi-line parameters between fence lines.

    Inside the fences everything is text, except a line that is a fence of the same length. A block holds lines, so it
    has no newline at its end unless an empty line says so.
    """

    name: str = "plain"

    def describe(self, tools: Sequence[ToolSpec]) -> str:
        return "\n".join(["Call a tool by writing:", *(f"{_usage(t)}  {t.description}" for t in tools)])

    def parse(
        self, text: str, tools: Sequence[ToolSpec], *, truncated: bool = False
    ) -> tuple[str, tuple[Call, ...], ErrorKind | None]:
        calls: list[Call] = []
        prose: list[str] = []
        position = 0
        while (start := text.find(_OPENING, position)) >= 0:
            prose.append(text[position:start])
            inner, end, closed = _span(text, start + len(_OPENING))
            call = self._read(len(calls), text[start:end], inner, tools)
            if call is None:
                kind: ErrorKind = "truncated" if truncated and not closed else "unparseable"
                name = (inner if inner is not None else text[start + len(_OPENING) : end]).split()[:1]
                call = Call(
                    f"call_{len(calls)}", "".join(name).removesuffix(_CLOSING), {}, text[start:end], kind
                )
            calls.append(call)
            position = end
        prose.append(text[position:])
        return "".join(prose).strip(), tuple(calls), verdict(calls, truncated)

    def _read(self, index: int, raw: str, inner: str | None, tools: Sequence[ToolSpec]) -> Call | None:
        """The call between the tags, or None where it cannot be read."""
        match = _HEAD.match(inner) if inner is not None and _is_utf8(inner) else None
        if match is None:
            return None
        name, remainder = match.groups()
        spec = next((tool for tool in tools if tool.name == name), None)
        arguments = {} if spec is None else _arguments(spec, remainder)
        return None if arguments is None else read_call(index, raw, name, arguments, tools)

    def format(self, name: str, arguments: Mapping[str, Any], tools: Sequence[ToolSpec]) -> str:
        spec = _checked(name, arguments, tools)
        words = [name]
        given = [key for key in spec.inline if key in arguments]
        if given != list(spec.inline[: len(given)]):
            raise ValueError(f"{name}: the plain format cannot skip {spec.inline[len(given) - 1]!r}")
        words += [shlex.quote(_written(arguments[key])) for key in given]
        if spec.rest is not None and spec.rest in arguments:
            words.append(arguments[spec.rest])
        text = " ".join(words)
        if given_blocks := [key for key in spec.blocks if key in arguments]:
            if given_blocks != list(spec.blocks):
                raise ValueError(f"{name}: the plain format needs all of {', '.join(spec.blocks)}")
            parts = [_lines(arguments[key]) for key in spec.blocks]
            begin, split, end = _fences(parts)
            text += f"\n{begin}\n" + f"{split}\n".join(parts) + f"{end}\n"
        text = f"{_OPENING}{text}{_CLOSING}"
        _, calls, _ = self.parse(text, tools)
        if len(calls) != 1 or calls[0].error_kind or calls[0].arguments != dict(arguments):
            raise ValueError(
                f"{name}: the arguments cannot be written in the plain format (a tag, or space around a word)"
            )
        return text


def _usage(tool: ToolSpec) -> str:
    required = tool.parameters.get("required", ())
    words = [name if name in required else f"[{name}]" for name in tool.inline]
    text = " ".join([tool.name, *words, *([tool.rest] if tool.rest else [])])
    if tool.blocks:
        begin, split, end = _fences(tool.blocks)
        text += f"\n{begin}\n" + f"\n{split}\n".join(tool.blocks) + f"\n{end}\n"
    return f"{_OPENING}{text}{_CLOSING}"


def _span(text: str, start: int) -> tuple[str | None, int, bool]:
    """(text between the tags or None, where the call ends, whether it was closed).

    A closing tag inside fences is text, so when the line after the header opens a block, the call ends behind the
    fence that closes it.
    """
    header_end = text.find("\n", start)
    if header_end >= 0 and _CLOSING not in text[start:header_end]:
        position = header_end + 1
        begin = end = None
        for line in text[position:].split("\n"):
            fence = line.rstrip()
            if begin is None and _BEGIN.fullmatch(fence):
                begin, end = fence, ">" * len(fence)
            elif begin in (None, fence):
                break  # no block here, or a second one inside the first: not closed
            position += len(line) + 1
            if fence == end:
                closing = len(text) - len(text[position:].lstrip())
                if text.startswith(_CLOSING, closing):
                    return text[start:closing], closing + len(_CLOSING), True
                break
    _, end, closed = _recover(text, start, _OPENING, _CLOSING)
    inner = text[start : end - len(_CLOSING)] if closed and text.endswith(_CLOSING, start, end) else None
    return inner, end, closed


def _arguments(spec: ToolSpec, remainder: str) -> dict[str, Any] | None:
    """Arguments from what follows the tool's name; None where words or blocks cannot be read.

    Words beyond the known ones are kept under their number ("#3"), which the schema then refuses.
    """
    arguments: dict[str, Any] = {}
    header, _, body = remainder.partition("\n")
    if spec.rest is not None:
        for name in spec.inline:
            if (match := _WORD.match(remainder)) is None:
                break
            arguments[name] = _value(shlex.split(match[1])[0], spec, name)
            remainder = remainder[match.end() :]
        if remainder.strip():
            arguments[spec.rest] = remainder.strip()
        return arguments
    try:
        words = shlex.split(header)
    except ValueError:
        return None
    for number, word in enumerate(words):
        name = spec.inline[number] if number < len(spec.inline) else f"#{number + 1}"
        arguments[name] = _value(word, spec, name)
    if not body.strip():
        return arguments
    blocks = _blocks(body, len(spec.blocks))
    if blocks is None:
        return None
    return arguments | dict(zip(spec.blocks, blocks, strict=True))


def _blocks(body: str, count: int) -> list[str] | None:
    """The texts between the fences: one, or two around a splitting line."""
    lines = body.split("\n")
    fences = [line.rstrip() for line in lines]
    while fences and not fences[-1]:
        fences.pop()
    if not count or len(fences) < 2 or not _BEGIN.fullmatch(fences[0]):
        return None
    split, end = "=" * len(fences[0]), ">" * len(fences[0])
    if fences[-1] != end or end in fences[:-1]:
        return None
    inside = lines[1 : len(fences) - 1]
    if count == 1:
        return ["\n".join(inside)]
    splits = [i for i, fence in enumerate(fences[1:-1]) if fence == split]
    if len(splits) != 1:
        return None
    return ["\n".join(inside[: splits[0]]), "\n".join(inside[splits[0] + 1 :])]


def _fences(texts: Sequence[str]) -> tuple[str, str, str]:
    """The shortest fences that are no line of the texts."""
    lines = {line.rstrip() for text in texts for line in text.split("\n")}
    size = _FENCE
    while not lines.isdisjoint(fences := ("<" * size, "=" * size, ">" * size)):
        size += 1
    return fences


def _fence_fault(raw: str) -> str:
    """Line of an unparsable call that was taken for a fence and was perhaps meant as text; "" if none."""
    lines = [line.rstrip() for line in raw.split("\n")]
    begin = next((n for n, line in enumerate(lines) if _BEGIN.fullmatch(line)), None)
    if begin is None:
        return ""
    size, seen = len(lines[begin]), set[str]()
    for number, line in enumerate(lines[begin + 1 :], 1):
        if line in seen or line == lines[begin]:
            longer = ", ".join(sign * (size + 1) for sign in "<=>")
            return f"line {number} of its text is {line}, which is a fence; around such text write {longer}"
        if line in ("=" * size, ">" * size):
            seen.add(line)
    return ""


def _lines(value: str) -> str:
    return value + "\n" if value else ""


def _written(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)


def _value(word: str, spec: ToolSpec, name: str) -> Any:
    """A word as the type its schema asks for; the word itself where it is not one."""
    wanted = kinds(spec.parameters.get("properties", {}).get(name, {})) or ["string"]
    if "string" in wanted:
        return word
    try:
        value = json.loads(word, parse_constant=_no_constants)
    except (ValueError, RecursionError):
        return word
    return value if any(is_a(value, kind) for kind in wanted) else word


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
    "hermes": JsonCodec("hermes", "<tool_call>", "</tool_call>", newlines=True),
}
"""By the name that a recipe gives."""
CODEC: Part[Codec | None] = Part("codec", {"auto": None, "native": None, **CODECS}, like=Codec)
"""A codec as a recipe names it: one of ours, or an object of the user's; "auto" and "native" depend on the model."""
