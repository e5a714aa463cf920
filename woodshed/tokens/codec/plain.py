"""Calls as a line of words, with the code outside of JSON."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from woodshed.records import Call, ErrorKind
from woodshed.tokens.codec.reading import argument_value, checked, is_utf8, read_call, recover, verdict
from woodshed.tokens.schema import ToolSpec

OPENING, _CLOSING = "<call>", "</call>"
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
        if not tools:
            return ""
        return "\n".join(["Call a tool by writing:", *(f"{_usage(t)}  {t.description}" for t in tools)])

    def parse(
        self, text: str, tools: Sequence[ToolSpec], *, truncated: bool = False
    ) -> tuple[str, tuple[Call, ...], ErrorKind | None]:
        calls: list[Call] = []
        prose: list[str] = []
        position = 0
        while (start := text.find(OPENING, position)) >= 0:
            prose.append(text[position:start])
            inner, end, closed = _span(text, start + len(OPENING))
            call = self._read(len(calls), text[start:end], inner, tools)
            if call is None:
                kind: ErrorKind = "truncated" if truncated and not closed else "unparseable"
                name = (inner if inner is not None else text[start + len(OPENING) : end]).split()[:1]
                call = Call(
                    f"call_{len(calls)}", "".join(name).removesuffix(_CLOSING), {}, text[start:end], kind
                )
            calls.append(call)
            position = end
        prose.append(text[position:])
        return "".join(prose).strip(), tuple(calls), verdict(calls, truncated)

    def _read(self, index: int, raw: str, inner: str | None, tools: Sequence[ToolSpec]) -> Call | None:
        """The call between the tags, or None where it cannot be read."""
        match = _HEAD.match(inner) if inner is not None and is_utf8(inner) else None
        if match is None:
            return None
        name, remainder = match.groups()
        spec = next((tool for tool in tools if tool.name == name), None)
        arguments = {} if spec is None else _arguments(spec, remainder)
        return None if arguments is None else read_call(index, raw, name, arguments, tools)

    def format(self, name: str, arguments: Mapping[str, Any], tools: Sequence[ToolSpec]) -> str:
        spec = checked(name, arguments, tools)
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
        text = f"{OPENING}{text}{_CLOSING}"
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
    return f"{OPENING}{text}{_CLOSING}"


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
    _, end, closed = recover(text, start, OPENING, _CLOSING)
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
            arguments[name] = argument_value(shlex.split(match[1])[0], spec, name)
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
        arguments[name] = argument_value(word, spec, name)
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


def fence_fault(raw: str) -> str:
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
