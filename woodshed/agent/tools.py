"""The tools of the agent, the same in training, evaluation and deployment: six of ours, and any of the user's own.

A tool is a `ToolSpec` (its description for the policy) and a function from arguments to text. An error of a call is an
observation with a typed `error_kind`; only a lost sandbox raises (`SandboxError`). Observations are short, since the
policy reads every character, and have no random parts.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import json
import posixpath
import re
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field, field_validator

from woodshed.agent import mcp, pasting, todo
from woodshed.agent.effects import EDITOR
from woodshed.agent.nearest import closest
from woodshed.agent.output import LINE_CHARS, clean, clip, cut, printable, short
from woodshed.agent.specs import OTHERS, SIX, TOOLS
from woodshed.agent.workspace_files import (
    MOST_BYTES,
    Outcome,
    RefusedCallError,
    encode,
    execute,
    exists,
    inside,
    load,
    missing,
    refuse_odd_text,
    store,
)
from woodshed.boundary import contained
from woodshed.parts import Part, misfit, wrong_result
from woodshed.records import Call, ErrorKind, Observation, RecipeError
from woodshed.sandbox import Sandbox
from woodshed.settings import Settings
from woodshed.tokens.codec import Codec, ToolSpec, problem
from woodshed.tokens.schema import mismatch


@dataclass(frozen=True)
class Tool:
    """A tool of the user's own."""

    spec: ToolSpec
    """Name, arguments and form, as the policy sees them."""
    run: Callable[..., Any]
    """Carries out a call: takes the sandbox, `ToolSettings` and the arguments by name, and returns the text that the
    policy reads. What it raises is read by the policy as the tool's error, which is no fault of the call."""


class ToolPart(Part[Tool | ToolSpec]):
    """Tools that a recipe may name, those of MCP servers included."""

    def form(self, name: str) -> str:
        return name if name.startswith(mcp.PREFIX) and name.endswith(".py") else super().form(name)

    def resolve(self, name: str) -> Tool | ToolSpec:
        return mcp.tools_of(name)[0] if name.startswith(mcp.PREFIX) else super().resolve(name)


NAMED = ToolPart("tool", {spec.name: spec for spec in (*TOOLS, *OTHERS)}, like=Tool)
"""Tools that a recipe may name."""


READ_LINES = 40
"""Lines of a file that are shown by default."""
SEARCH_HITS = 20
"""Limit of the hits shown of a search."""


class ToolSettings(Settings):
    """Limits on the text that the policy reads back from one call."""

    command_timeout_s: float = Field(default=20.0, gt=0)
    """Seconds before a shell command is killed."""
    output_chars: int = Field(default=1200, ge=1)
    """Characters shown of a command's output: the first half and the last half."""
    offered: tuple[Annotated[str, NAMED], ...] = SIX
    """Tools that the agent may call: those above, bash, str_replace_editor, todo; a `Tool` of your own as
    package.module:name. "finish" must be among them.
    mcp:PATH.py offers the tools of an MCP server in one file, which runs inside the sandbox."""

    @field_validator("offered")
    @classmethod
    def _can_finish(cls, names: tuple[str, ...]) -> tuple[str, ...]:
        if "finish" not in names:
            raise ValueError("the tool 'finish' is missing, by which an attempt ends")
        return names

    @property
    def specs(self) -> tuple[ToolSpec, ...]:
        """The offered tools as the policy sees them.

        Raises:
            RecipeError: as `toolbox`.
        """
        return tuple(tool.spec for tool in toolbox(self.offered).values())


FINISHED = "finished"
"""Observation of an executed `finish`."""

SEARCH = Path(__file__).with_name("search.py")

SHELL_ENV = {
    "PYTEST_ADDOPTS": "--tb=short --no-header --disable-warnings -p no:cacheprovider -o console_output_style=classic",
    "CI": "",  # if it is set, pytest prints every comparison in full
}
"""Variables added to the sandbox's environment: a passing test run prints two lines and writes nothing to the
workspace."""


def run(call: Call, sandbox: Sandbox, settings: ToolSettings) -> Observation:
    """Execute one well-formed call (`call.error_kind` is None).

    Raises:
        SandboxError: the sandbox was lost; the attempt is void.
    """
    started = time.perf_counter()
    error_kind: ErrorKind | None = None
    try:
        text, error_kind = toolbox(settings.offered)[call.tool].run(sandbox, settings, **call.arguments)
    except RefusedCallError as refusal:
        text, error_kind = f"error: {refusal}", refusal.error_kind
    return Observation(call.id, text, error_kind, time.perf_counter() - started)


def refuse(call: Call, codec: Codec, tools: Sequence[ToolSpec] = TOOLS) -> Observation:
    """Error observation for a call that the codec could not accept (`call.error_kind` is set)."""
    text = f"error: {clip(printable(problem(call, tools)), 200)}"
    known = next((spec.name for spec in tools if spec.name in call.raw), "")
    if call.error_kind != "unknown_tool" and known:
        text += f"; write\n{form(known, codec, tools)}"
    return Observation(call.id, text, call.error_kind)


def form(tool: str, codec: Codec, tools: Sequence[ToolSpec] = TOOLS) -> str:
    """The call of `tool` as the policy should write it, with made-up arguments."""
    return codec.format(tool, next(spec.example for spec in tools if spec.name == tool), tools)


def toolbox(offered: tuple[str, ...]) -> dict[str, Tool]:
    """The offered tools by the name that the policy calls, in order.

    Raises:
        RecipeError: a tool of the user's own cannot be used, or two have one name.
    """
    tools: dict[str, Tool] = {}
    for name in offered:
        for tool in _tools_of(name):
            if tool.spec.name in tools:
                raise RecipeError(f"tool {name!r}: another offered tool is named {tool.spec.name!r}, too")
            tools[tool.spec.name] = tool
    return tools


def _tools_of(name: str) -> list[Tool]:
    """The tools of one entry of `ToolSettings.offered`. Raises RecipeError."""
    if name.startswith(mcp.PREFIX):
        specs = mcp.tools_of(name)
        return [Tool(spec, functools.partial(mcp.call, name, spec.name)) for spec in specs]
    part = NAMED.resolve(name)
    if not isinstance(part, Tool):
        return [Tool(part, _RUN[part.name])]
    if fault := _unusable(part):
        raise RecipeError(f"tool {name!r} {fault}")
    return [Tool(part.spec, functools.partial(_run_own, part))]


def _unusable(tool: Tool) -> str:
    """Reason why a tool cannot be called as its spec says, or ""."""
    spec = tool.spec
    if not isinstance(spec, ToolSpec) or not isinstance(spec.parameters, dict):
        return f"has the spec {spec!r}; it must be a ToolSpec with a JSON schema"
    properties = spec.parameters.get("properties", {})
    if odd := [n for n in (*spec.inline, *spec.blocks, *filter(None, [spec.rest])) if n not in properties]:
        return f"writes {odd[0]!r} in its plain form, which its parameters do not have"
    if fault := mismatch(spec.example, spec.parameters):
        return f"has an example that does not fit its parameters: {fault}"
    for names in (spec.parameters.get("required", ()), properties):
        if fault := misfit(tool.run, _called_with(names)):
            return f"has a 'run' that {fault}"
    return ""


def _called_with(names: Iterable[str]) -> inspect.Signature:
    """Signature of a tool's function: sandbox and settings by position, arguments by name."""
    given = [inspect.Parameter(name, inspect.Parameter.POSITIONAL_ONLY) for name in ("sandbox", "settings")]
    named = [inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY) for name in names]
    return inspect.Signature([*given, *named])


def _run_own(tool: Tool, sandbox: Sandbox, settings: ToolSettings, **arguments: Any) -> Outcome:
    """Call a tool of the user's own. What it raises, the policy reads; it may be about the arguments.

    Raises:
        RecipeError: it returned something else than text.
    """

    def broken(error: str) -> str:
        raise RefusedCallError("nonzero_exit", f"{tool.spec.name} failed: {clip(printable(error), 200)}")

    text = contained(lambda: tool.run(sandbox, settings, **arguments), broken)
    if not isinstance(text, str):
        raise wrong_result("tool", tool.spec.name, text, "the text that the policy reads")
    return clip(clean(text.encode("utf-8", "backslashreplace")), settings.output_chars), None


# One function per tool.


def _read_file(
    sandbox: Sandbox, settings: ToolSettings, path: str, start: int = 1, count: int = READ_LINES
) -> Outcome:
    path = inside(path, sandbox)
    data = load(path, sandbox)
    name = short(path)
    if b"\0" in data[:8192]:
        raise RefusedCallError("bad_path", f"{name} is a binary file of {len(data)} bytes")
    lines = pasting.lines_of(data)
    if not lines:
        return f"{name} is empty", None
    if not 1 <= start <= len(lines) or count < 1:
        asked = "" if max(abs(start), abs(count)) > sys.maxsize else f", not {count} from {start} on"
        raise RefusedCallError("bad_arguments", f"{name} has lines 1-{len(lines)}{asked}")
    shown = lines[start - 1 : start - 1 + count]
    header = f"lines {start}-{start + len(shown) - 1} of {len(lines)}"
    return "\n".join([header, *(cut(line) for line in shown)]), None


def _edit_file(sandbox: Sandbox, settings: ToolSettings, path: str, old: str, new: str) -> Outcome:
    """Replace the only `old` by `new`, with the line ends around it. Every other byte stays."""
    path = inside(path, sandbox)
    if not old.strip():
        return _create(sandbox, path, old, new)
    if old == new:
        raise RefusedCallError("bad_arguments", "old and new are the same text")
    data, name = load(path, sandbox), short(path)
    encode(old + new)
    matches = pasting.find(data, old)
    if not matches:
        raise RefusedCallError("old_missing", f"old text is not in {name}{closest(data, old)}")
    lines = [len(pasting.ENDS.findall(data, 0, match.start)) + 1 for match in matches[:8]]
    if len(matches) > 1:
        listed = ", ".join(map(str, lines)) + (", ..." if len(matches) > 8 else "")
        count = f"{len(matches)} times" + (" or more" if len(matches) == pasting.MAX_MATCHES else "")
        raise RefusedCallError("old_ambiguous", f"old text occurs {count} in {name}, at lines {listed}")
    store(path, pasting.spliced(data, matches[0], new), sandbox)
    return f"edited {name} at line {lines[0]}", None


def _create(sandbox: Sandbox, path: str, old: str, new: str) -> Outcome:
    """An edit with empty `old`, which is allowed only for a new or empty file."""
    if old:
        raise RefusedCallError("bad_arguments", "old holds only whitespace")
    if exists(path, sandbox) and load(path, sandbox):
        raise RefusedCallError(
            "bad_arguments", f"old is empty, but {short(path)} exists; give the text to replace"
        )
    return _write_file(sandbox, ToolSettings(), path, new)


def _write_file(sandbox: Sandbox, settings: ToolSettings, path: str, content: str) -> Outcome:
    """Write a file. An existing one keeps its kind of line ends and its byte order mark, which the policy does not
    see."""
    path, data = inside(path, sandbox), encode(content)
    with contextlib.suppress(OSError):
        data = pasting.like(data, sandbox.read(path, MOST_BYTES))
    store(path, data, sandbox)
    return f"wrote {short(path)}", None


GNU = re.compile(r"\\[|<>(){}+?]")
"""Operators of grep that are plain text for Python."""


def _search(sandbox: Sandbox, settings: ToolSettings, pattern: str, path: str = ".") -> Outcome:
    """Lines that match a regular expression, in file order; an invalid expression is searched for as plain text."""
    path = inside(path, sandbox)
    if not pattern:
        raise RefusedCallError("bad_arguments", "the pattern is empty")
    refuse_odd_text(pattern)
    limits = [str(SEARCH_HITS), str(LINE_CHARS)]
    argv = ["python3", "-I", "-S", "-c", SEARCH.read_text("utf-8"), pattern, path, *limits]
    result = execute(argv, sandbox, timeout_s=settings.command_timeout_s, max_output=4 << 20)
    if result.outcome == "timeout":
        message = f"killed after {settings.command_timeout_s:g} s; search below a narrower path or for less"
        return message, "timeout"
    if result.outcome != "ok":
        raise RefusedCallError(
            "bad_arguments", f"the search ended early ({result.outcome}): take a simpler pattern"
        )
    answer = json.loads(result.stdout)
    if not answer["hits"]:
        if not exists(path, sandbox):
            raise RefusedCallError("bad_path", missing(path, sandbox))
        if answer["fault"]:
            message = (
                f"no regular expression of Python ({short(answer['fault'])}), and as plain text not there"
            )
            raise RefusedCallError("bad_arguments", message)
        gnu = GNU.search(pattern)
        return f"no hits; {gnu[0]} is a plain {gnu[0][1]} in Python" if gnu else "no hits", None
    shown = [
        cut(f"{short(name)}:{number}:{line}", length - len(line))
        for name, number, line, length in answer["hits"]
    ]
    more = [f"[{answer['total'] - len(shown)} more hits]"] if answer["total"] > len(shown) else []
    note = [f"[plain text, no regular expression: {short(answer['fault'])}]"] if answer["fault"] else []
    return "\n".join(note + shown + more), None


def _shell(sandbox: Sandbox, settings: ToolSettings, command: str) -> Outcome:
    """A fresh, non-login shell at the workspace root, without a terminal and without input."""
    if not command.strip():
        raise RefusedCallError("bad_arguments", "the command is empty")
    refuse_odd_text(command)
    # The outer shell merges both streams in order of writing and leaves the inner one's messages as they are.
    argv = ["/bin/bash", "-c", 'exec /bin/bash -c "$0" 2>&1', command]
    result = execute(argv, sandbox, env=SHELL_ENV, timeout_s=settings.command_timeout_s)
    text = clean(result.stdout + result.stderr)
    if result.outcome in (
        "timeout",
        "oom",
        "limit",
    ):  # the amount of output is random: keep only the beginning
        text = text[: settings.output_chars // 2]
        text += "\n[cut]" if len(text) == settings.output_chars // 2 else ""
    text = clip(text, settings.output_chars)
    ends = {
        "ok": "" if text else "(no output)",
        "nonzero": f"exit code {result.exit_code}",
        "oom": "killed: out of memory",
        "timeout": (killed := f"killed: more than {settings.command_timeout_s:g} s or too much output"),
        "limit": killed,  # which of the two comes first is random
    }
    text = "\n".join(part for part in (text, ends[result.outcome]) if part)
    kinds: dict[str, ErrorKind] = {
        "nonzero": "nonzero_exit",
        "oom": "nonzero_exit",
        "timeout": "timeout",
        "limit": "timeout",
    }
    return text, kinds.get(result.outcome)


def _edit_as_asked(
    sandbox: Sandbox, settings: ToolSettings, command: str, path: str, **given: Any
) -> Outcome:
    """The editor that models of several families were trained on; it does what our own tools do."""
    path = posixpath.relpath(path, sandbox.workspace) if path.startswith("/") else path
    new = given.get("new_str", "")
    if command == "str_replace":
        return _edit_file(sandbox, settings, path, given.get("old_str", ""), new)
    if command == "create":
        return _write_file(sandbox, settings, path, given.get("file_text", new))
    if command == "insert":
        return _insert(sandbox, path, given.get("insert_line"), new)
    path, shown = inside(path, sandbox), given.get("view_range", ())
    if len(shown) not in (0, 2):
        raise RefusedCallError("bad_arguments", "view_range is the first and the last line")
    if execute(["test", "-d", path], sandbox, timeout_s=10).outcome == "ok":
        names = execute(["find", path, "-maxdepth", "2", "-not", "-path", "*/.*"], sandbox, timeout_s=10)
        return clip(clean(b"\n".join(sorted(names.stdout.splitlines()))), settings.output_chars), None
    first, last = shown or (1, READ_LINES)
    count = READ_LINES if last == -1 else last - first + 1
    return _read_file(sandbox, settings, path, first, count)


def _insert(sandbox: Sandbox, path: str, line: int | None, text: str) -> Outcome:
    """Insert whole lines behind a line, 0 for the beginning."""
    path = inside(path, sandbox)
    data, name = load(path, sandbox), short(path)
    lines = data.splitlines(keepends=True)
    if line is None or line > len(lines):
        raise RefusedCallError("bad_arguments", f"insert_line must be 0 to {len(lines)} in {name}")
    added = encode(text if text.endswith("\n") else f"{text}\n")
    if line and not lines[line - 1].endswith((b"\n", b"\r")):
        lines[line - 1] += b"\n"
    store(
        path,
        b"".join([*lines[:line], pasting.like(added, data.removeprefix(pasting.MARK)), *lines[line:]]),
        sandbox,
    )
    return f"inserted into {name} behind line {line}", None


def _todo(sandbox: Sandbox, settings: ToolSettings, items: str) -> Outcome:
    return todo.write_list(items)


def _finish(sandbox: Sandbox, settings: ToolSettings) -> Outcome:
    return FINISHED, None


_RUN: dict[str, Callable[..., Outcome]] = {
    "read_file": _read_file,
    "edit_file": _edit_file,
    "write_file": _write_file,
    "search": _search,
    "shell": _shell,
    "finish": _finish,
    "bash": _shell,
    EDITOR: _edit_as_asked,
    todo.NAME: _todo,
}
