"""Call formats that families of models were trained on, as their chat templates and documentation write them.

Every format is three things: where a call begins, a reader of its name and arguments, and where it ends. Reading works
on the text and never raises. Writing is checked by reading: what would come back as another call is refused, since
formats without quoting (XML parameters) cannot hold every text.

    hermes          <tool_call>, then {"name": ..., "arguments": ...} on a line; Qwen2.5, Qwen3, Hermes
    qwen3-coder     <tool_call>, <function=NAME>, <parameter=KEY> on lines of their own; Qwen3-Coder, Qwen3.5
    glm-4.5         <tool_call>NAME, then <arg_key> and <arg_value> on lines of their own; glm-4.7 writes no newlines
    minimax-m2      <minimax:tool_call>, <invoke name="NAME">, <parameter name="KEY">
    llama-json      {"name": ..., "parameters": ...} as the whole message
    llama-pythonic  [name(key="value"), ...] as the whole message; Llama 4
    mistral-json    [TOOL_CALLS] [{"name": ..., "arguments": ..., "id": ...}]
    mistral         [TOOL_CALLS]name[ARGS]{...}; mistral-id has an id between name and arguments
    deepseek-v3     sections of tokens, the arguments in a fence of Markdown; deepseek-v3.1 has none
    kimi-k2         sections of tokens, with an id that counts the calls
    harmony         a message to functions.NAME on the commentary channel; gpt-oss
"""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from woodshed.pysource import syntax
from woodshed.records import Call, ErrorKind
from woodshed.tokens.codec.reading import argument_value, checked, is_sound, read_call, read_json, verdict
from woodshed.tokens.schema import ToolSpec, is_a, kinds


class CallBody(NamedTuple):
    """A call that could be read."""

    name: str
    arguments: dict[str, Any]
    end: int
    """Position behind the arguments, before what closes the call."""
    id: str = ""
    """Id that the policy wrote, where the format has one."""


Reader = Callable[[str, int, Sequence[ToolSpec]], CallBody | None]
"""(text, position behind what begins a call, tools) to the call, or None; may raise ValueError."""


@dataclass(frozen=True)
class FamilyCodec:
    """The calls of one family of models."""

    name: str
    begins: re.Pattern[str]
    read: Reader
    ends: re.Pattern[str]
    """End of a call; may be empty where the message's end closes it."""
    write: Callable[[str, Mapping[str, Any]], str]
    more: re.Pattern[str] | None = None
    """Separator of two calls inside one pair of brackets."""
    call_id: str = "call{index:05}"
    """Id of a call for chat templates, of its `name` and `index`."""
    describes: bool = False
    """The chat template writes calls, but does not list the tools."""
    preamble: str = ""
    """Form of PROSE before a call, where the two cannot simply follow each other."""

    def describe(self, tools: Sequence[ToolSpec]) -> str:
        if not self.describes or not tools:
            return ""  # the model's own chat template lists the tools
        listed = [dumped(tool.schema) for tool in tools]
        return "\n".join(
            ["Tools:", *listed, f"Call a tool by writing {self.write('TOOL', {'ARGUMENT': 'VALUE'})}"]
        )

    def parse(
        self, text: str, tools: Sequence[ToolSpec], *, truncated: bool = False
    ) -> tuple[str, tuple[Call, ...], ErrorKind | None]:
        calls: list[Call] = []
        prose: list[str] = []
        position = 0
        while match := self.begins.search(text, position):
            prose.append(text[position : match.start()])
            start, inside = match.start(), match.end()
            while True:
                call, position, inside = self._next(len(calls), text, start, inside, tools, truncated)
                calls.append(call)
                if not inside:
                    break
                start = position
        prose.append(text[position:])
        return "".join(prose).strip(), tuple(calls), verdict(calls, truncated)

    def _next(
        self, index: int, text: str, start: int, inside: int, tools: Sequence[ToolSpec], truncated: bool
    ) -> tuple[Call, int, int]:
        """(a call, where it ends, where the next one begins inside the same brackets or 0)."""
        try:
            body = self.read(text, inside, tools)
            body = body if body and is_sound(body.name) and is_sound(body.arguments) else None
        except (ValueError, RecursionError, MemoryError, SyntaxError):
            body = None
        if body is not None:
            if closing := self.ends.match(text, body.end):
                return self._call(index, text[start : closing.end()], body, tools), closing.end(), 0
            if self.more and (following := self.more.match(text, body.end)):
                end = following.end()
                return self._call(index, text[start:end], body, tools), end, end
        end, closed = self._recover(text, max(inside, start + 1))
        kind: ErrorKind = "truncated" if truncated and not closed else "unparseable"
        return Call(f"call_{index}", body.name if body else "", {}, text[start:end], kind), end, 0

    def _call(self, index: int, raw: str, body: CallBody, tools: Sequence[ToolSpec]) -> Call:
        call = read_call(index, raw, body.name, body.arguments, tools)
        return Call(body.id or call.id, call.tool, call.arguments, raw, call.error_kind)

    def _recover(self, text: str, inside: int) -> tuple[int, bool]:
        """End of an unparsable call: behind what closes it, before the next call, or at the end of the text."""
        closing, following = self.ends.search(text, inside), self.begins.search(text, inside)
        if closing and closing[0] and (not following or closing.start() <= following.start()):
            return closing.end(), True
        return (following.start(), True) if following else (len(text), False)

    def format(self, name: str, arguments: Mapping[str, Any], tools: Sequence[ToolSpec]) -> str:
        checked(name, arguments, tools)
        text = self.write(name, arguments)
        _, calls, _ = self.parse(text, tools)
        if len(calls) != 1 or calls[0].error_kind or calls[0].arguments != dict(arguments):
            raise ValueError(f"{name}: the arguments cannot be written in the {self.name} format")
        return text


def dumped(value: Any) -> str:
    """JSON as chat templates write it."""
    return json.dumps(value, ensure_ascii=False, allow_nan=False)


# --- JSON -------------------------------------------------------------------------------------------------------


def _object(key: str) -> Reader:
    """Reader of an object with the name, the arguments under `key`, and perhaps an id."""

    def read(text: str, position: int, tools: Sequence[ToolSpec]) -> CallBody | None:
        body, end = read_json(text, position)
        if not isinstance(body, dict) or not body.keys() <= {"name", key, "id", "type"}:
            return None
        name, arguments, written = body.get("name"), body.get(key, {}), body.get("id", "")
        if not (isinstance(name, str) and isinstance(arguments, dict) and isinstance(written, str)):
            return None
        return CallBody(name, arguments, end, written)

    return read


def _headed(head: str) -> Reader:
    """Reader of a name (group `name`, perhaps also `id`) before a JSON object of arguments."""
    pattern = re.compile(head)

    def read(text: str, position: int, tools: Sequence[ToolSpec]) -> CallBody | None:
        if (match := pattern.match(text, position)) is None:
            return None
        arguments, end = read_json(text, match.end())
        written = match.groupdict().get("id") or ""
        return CallBody(match["name"], arguments, end, written) if isinstance(arguments, dict) else None

    return read


# --- parameters between tags ------------------------------------------------------------------------------------


def _tagged(head: str, parameter: str, tail: str) -> Reader:
    """Reader of a name (group `name`) and parameters (groups `key`, `value`) up to a tail.

    A value is what its schema asks for, text where that is a string: formats without quotes do not say. It may hold
    tags; it ends before the first closing tag behind which another parameter or the tail stands.
    """
    first, each, last = re.compile(head), re.compile(parameter, re.DOTALL), re.compile(tail)

    def read(text: str, position: int, tools: Sequence[ToolSpec]) -> CallBody | None:
        if (match := first.match(text, position)) is None:
            return None
        name, at = match["name"], match.end()
        spec = next((tool for tool in tools if tool.name == name), None)
        arguments: dict[str, Any] = {}
        while pair := each.match(text, at):
            if pair["key"] in arguments:
                return None
            arguments[pair["key"]] = _typed(pair["value"], spec, pair["key"])
            at = pair.end()
        end = last.match(text, at)
        return CallBody(name, arguments, end.end()) if end else None

    return read


_CONSTANTS = {"True": True, "False": False, "None": None}
"""Chat templates write values that are no text as Python does."""


def _typed(value: str, spec: ToolSpec | None, key: str) -> Any:
    if spec is None:
        return value
    wanted = kinds(spec.parameters.get("properties", {}).get(key, {}))
    constant = _CONSTANTS.get(value.strip(), value)
    if "string" not in wanted and constant is not value and any(is_a(constant, kind) for kind in wanted):
        return constant
    return argument_value(value, spec, key)


def _written(value: Any) -> str:
    return value if isinstance(value, str) else dumped(value)


def _pythonic(value: Any) -> str:
    """As Jinja's `string` filter writes what is no text, no list and no object."""
    return str(value) if value is None or isinstance(value, bool) else _written(value)


def _qwen3_coder(name: str, arguments: Mapping[str, Any]) -> str:
    lines = [f"<parameter={key}>\n{_pythonic(value)}\n</parameter>\n" for key, value in arguments.items()]
    return f"<tool_call>\n<function={name}>\n{''.join(lines)}</function>\n</tool_call>"


def _minimax(name: str, arguments: Mapping[str, Any]) -> str:
    lines = [f'<parameter name="{key}">{_written(value)}</parameter>\n' for key, value in arguments.items()]
    return f'<minimax:tool_call>\n<invoke name="{name}">\n{"".join(lines)}</invoke>\n</minimax:tool_call>'


def _glm(line: str) -> Callable[[str, Mapping[str, Any]], str]:
    def write(name: str, arguments: Mapping[str, Any]) -> str:
        pairs = [
            f"<arg_key>{key}</arg_key>{line}<arg_value>{_written(value)}</arg_value>{line}"
            for key, value in arguments.items()
        ]
        return f"<tool_call>{name}{line}{''.join(pairs)}</tool_call>"

    return write


# --- Python -----------------------------------------------------------------------------------------------------

_PIECE = re.compile(r'"(?:\\.|[^"\\])*"|\'(?:\\.|[^\'\\])*\'|[()\[\]{}]|[^"\'()\[\]{}]+', re.DOTALL)


def _expression(text: str, position: int, tools: Sequence[ToolSpec]) -> CallBody | None:
    """Reader of `name(key=literal, ...)`."""
    depth, end = 0, position
    while piece := _PIECE.match(text, end):
        end = piece.end()
        depth += (piece[0] in "([{") - (piece[0] in ")]}")
        if depth <= 0 and piece[0] in ")]}":
            break
    else:
        return None
    node = syntax.parse(_escaped(text[position:end]), mode="eval").body
    if not isinstance(node, ast.Call) or node.args or not isinstance(node.func, ast.Name | ast.Attribute):
        return None
    if any(keyword.arg is None for keyword in node.keywords):
        return None
    values = {str(keyword.arg): ast.literal_eval(keyword.value) for keyword in node.keywords}
    try:
        return CallBody(ast.unparse(node.func), json.loads(dumped(values)), end)
    except TypeError:  # bytes and sets are no arguments
        return None


def _escaped(text: str) -> str:
    """Python source whose strings, but raw ones, double the backslashes that Python warns of and keeps ("\\d")."""
    known = "\\\n'\"abfnrtvxuUN01234567"
    pieces = [piece[0] for piece in _PIECE.finditer(text)]
    for number, piece in enumerate(pieces):
        if piece[0] in "\"'" and not pieces[number - 1][-1].isalpha():
            pieces[number] = re.sub(
                r"\\(.)", lambda m: m[0] if m[1] in known else f"\\{m[0]}", piece, flags=re.DOTALL
            )
    return "".join(pieces)


def _literal(value: Any) -> str:
    return dumped(value) if isinstance(value, str) else repr(value)


def _python_call(name: str, arguments: Mapping[str, Any]) -> str:
    return f"[{name}({', '.join(f'{key}={_literal(value)}' for key, value in arguments.items())})]"


# --- the families -----------------------------------------------------------------------------------------------


def _codec(
    name: str, begins: str, read: Reader, ends: str, write: str | Callable[..., str], **others: Any
) -> FamilyCodec:
    """A codec; a written form is a text in which NAME and ARGUMENTS stand for the call."""
    if isinstance(write, str):
        form = write

        def filled(name: str, arguments: Mapping[str, Any]) -> str:
            return form.replace("NAME", name, 1).replace("ARGUMENTS", dumped(dict(arguments)), 1)

        write = filled
    return FamilyCodec(name, re.compile(begins), read, re.compile(ends), write, **others)


_NAME = r"(?P<name>[^\s<>\[\]|{}=:]+)"
_DEEPSEEK = (
    "<\uff5ctool\u2581calls\u2581begin\uff5c>",
    "<\uff5ctool\u2581call\u2581begin\uff5c>",
    "<\uff5ctool\u2581sep\uff5c>",
    "<\uff5ctool\u2581call\u2581end\uff5c>",
    "<\uff5ctool\u2581calls\u2581end\uff5c>",
)
_SECTION, _BEGIN, _SEP, _END, _SECTION_END = _DEEPSEEK
_KIMI = r"(?P<id>(?:functions\.)?(?P<name>[^\s<>:]+):\d+)\s*<\|tool_call_argument_begin\|>\s*"

FAMILIES: tuple[FamilyCodec, ...] = (
    _codec(
        "hermes",
        r"<tool_call>",
        _object("arguments"),
        r"\s*</tool_call>",
        '<tool_call>\n{"name": "NAME", "arguments": ARGUMENTS}\n</tool_call>',
    ),
    _codec(
        "qwen3-coder",
        r"<tool_call>",
        _tagged(
            r"\s*<function=(?P<name>[^\s<>]+)>\s*",
            r"<parameter=(?P<key>[^\s<>]+)>\n?(?P<value>.*?)\n?</parameter>\s*(?=<parameter=|</function>)",
            r"</function>",
        ),
        r"\s*</tool_call>",
        _qwen3_coder,
    ),
    *(
        _codec(
            name,
            r"<tool_call>",
            _tagged(
                rf"\s*{_NAME}\s*(?=<arg_key>|</tool_call>)",
                r"<arg_key>(?P<key>[^<>]+)</arg_key>\s*<arg_value>(?P<value>.*?)</arg_value>\s*"
                r"(?=<arg_key>|</tool_call>)",
                r"",
            ),
            r"\s*</tool_call>",
            _glm(line),
        )
        for name, line in (("glm-4.5", "\n"), ("glm-4.7", ""))
    ),
    _codec(
        "minimax-m2",
        r"<minimax:tool_call>",
        _tagged(
            r'\s*<invoke name="(?P<name>[^"]+)">\s*',
            r'<parameter name="(?P<key>[^"]+)">(?P<value>.*?)</parameter>\s*(?=<parameter name=|</invoke>)',
            r"</invoke>",
        ),
        r"\s*</minimax:tool_call>",
        _minimax,
        more=re.compile(r"\s*(?=<invoke name=)"),
    ),
    _codec(
        "mistral-json",
        r"\[TOOL_CALLS\]\s*\[\s*",
        _object("arguments"),
        r"\s*\]",
        '[TOOL_CALLS] [{"name": "NAME", "arguments": ARGUMENTS, "id": "call00000"}]',
        more=re.compile(r"\s*,\s*"),
    ),
    *(
        _codec(
            name,
            r"\[TOOL_CALLS\](?!\s*\[)",
            _headed(rf"\s*{_NAME}\s*(?:\[CALL_ID\]\s*(?P<id>[^\s\[\]]+)\s*)?\[ARGS\]\s*"),
            r"",
            f"[TOOL_CALLS]NAME{call_id}[ARGS]ARGUMENTS",
        )
        for name, call_id in (("mistral", ""), ("mistral-id", "[CALL_ID]call00000"))
    ),
    _codec(
        "deepseek-v3",
        rf"(?:{_SECTION}\s*)?{_BEGIN}(?=\s*function{_SEP})",
        _headed(rf"\s*function{_SEP}{_NAME}\s*```json\s*"),
        rf"\s*```\s*{_END}(?:\s*{_SECTION_END})?",
        f"{_SECTION}{_BEGIN}function{_SEP}NAME\n```json\nARGUMENTS\n```{_END}{_SECTION_END}",
    ),
    _codec(
        "deepseek-v3.1",
        rf"(?:{_SECTION}\s*)?{_BEGIN}",
        _headed(rf"\s*{_NAME}\s*{_SEP}\s*"),
        rf"\s*{_END}(?:\s*{_SECTION_END})?",
        f"{_SECTION}{_BEGIN}NAME{_SEP}ARGUMENTS{_END}{_SECTION_END}",
    ),
    _codec(
        "kimi-k2",
        r"(?:<\|tool_calls_section_begin\|>\s*)?<\|tool_call_begin\|>",
        _headed(rf"\s*{_KIMI}"),
        r"\s*<\|tool_call_end\|>(?:\s*<\|tool_calls_section_end\|>)?",
        "<|tool_calls_section_begin|><|tool_call_begin|>functions.NAME:0<|tool_call_argument_begin|>ARGUMENTS"
        "<|tool_call_end|><|tool_calls_section_end|>",
        call_id="functions.{name}:{index}",
    ),
    _codec(
        "harmony",
        r"(?:<\|start\|>assistant)?(?:<\|channel\|>\w+)? to=functions\.",
        _headed(rf"{_NAME}\s*(?:<\|channel\|>\w+)?\s*(?:<\|constrain\|>)?\s*(?:json)?\s*<\|message\|>\s*"),
        r"(?=\s*(?:<\|call\|>|\Z))",
        " to=functions.NAME<|channel|>commentary json<|message|>ARGUMENTS",
        preamble="<|channel|>commentary<|message|>PROSE<|end|><|start|>assistant",
    ),
    _codec(
        "llama-json",
        r"(?:<\|python_tag\|>\s*)?(?:(?<=\n)|\A|(?<=<\|python_tag\|>))(?=\{\s*\"name\"\s*:)",
        _object("parameters"),
        r"(?!\s*;\s*\{)",
        '{"name": "NAME", "parameters": ARGUMENTS}',
        more=re.compile(r"\s*;\s*"),
    ),
    _codec(
        "llama-pythonic",
        r"(?:<\|python_start\|>\s*)?(?:(?<=\n)|\A|(?<=<\|python_start\|>))\[(?=[^\W\d][\w.]*\()",
        _expression,
        r"\s*\](?:\s*<\|python_end\|>)?",
        _python_call,
        more=re.compile(r"\s*,\s*"),
    ),
)
"""In the order in which they are tried."""
