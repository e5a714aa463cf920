"""The tools of the agent, the same in training, evaluation and deployment: six of ours, and any of the user's own.

A tool is a `ToolSpec` (its description for the policy) and a function from arguments to text. An error of a call is an
observation with a typed `error_kind`; only a lost sandbox raises (`SandboxError`). Observations are short, since the
policy reads every character, and have no random parts.
"""

from __future__ import annotations

import contextlib
import errno
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

from woodshed.agent import pasting
from woodshed.agent.nearest import closest, nearest
from woodshed.agent.output import LINE_CHARS, clean, clip, cut, printable, short
from woodshed.boundary import contained
from woodshed.parts import Part, misfit, wrong_result
from woodshed.records import Call, ErrorKind, Observation, RecipeError, SandboxError
from woodshed.sandbox import Result, Sandbox
from woodshed.settings import Settings
from woodshed.tokens.codec import Codec, ToolSpec, problem
from woodshed.tokens.schema import mismatch


def _schema(required: Sequence[str] = (), **properties: str) -> dict[str, Any]:
    kinds = {name: {"type": kind} for name, kind in properties.items()}
    return {"type": "object", "properties": kinds, "required": list(required), "additionalProperties": False}


TOOLS: tuple[ToolSpec, ...] = (
    ToolSpec(
        name="read_file",
        description="Show lines of a file.",
        parameters=_schema(["path"], path="string", start="integer", count="integer"),
        inline=("path", "start", "count"),
        example={"path": "package/module.py", "start": 1, "count": 40},
    ),
    ToolSpec(
        name="edit_file",
        description="Replace text that occurs exactly once in a file.",
        parameters=_schema(["path", "old", "new"], path="string", old="string", new="string"),
        inline=("path",),
        blocks=("old", "new"),
        example={"path": "package/module.py", "old": "old text", "new": "new text"},
    ),
    ToolSpec(
        name="write_file",
        description="Write a whole file.",
        parameters=_schema(["path", "content"], path="string", content="string"),
        inline=("path",),
        blocks=("content",),
        example={"path": "package/module.py", "content": "new text"},
    ),
    ToolSpec(
        name="search",
        description="Find lines that match a Python regex, below a path.",
        parameters=_schema(["pattern"], pattern="string", path="string"),
        inline=("pattern", "path"),
        example={"pattern": "name", "path": "package"},
    ),
    ToolSpec(
        name="shell",
        description="Run a shell command.",
        parameters=_schema(["command"], command="string"),
        rest="command",
        example={"command": "python -m pytest -q"},
    ),
    ToolSpec(
        name="finish",
        description="End the work.",
        parameters=_schema(),
    ),
)

SIX = tuple(spec.name for spec in TOOLS)


@dataclass(frozen=True)
class Tool:
    """A tool of the user's own."""

    spec: ToolSpec
    """Name, arguments and form, as the policy sees them."""
    run: Callable[..., Any]
    """Carries out a call: takes the sandbox, `ToolSettings` and the arguments by name, and returns the text that the
    policy reads. What it raises is read by the policy as the tool's error, which is no fault of the call."""


NAMED: Part[Tool | ToolSpec] = Part("tool", {spec.name: spec for spec in TOOLS}, like=Tool)
"""Tools that a recipe may name."""


READ_LINES = 40
"""Lines of a file that are shown by default."""
SEARCH_HITS = 20
"""Limit of the hits shown of a search."""
MOST_BYTES = 4 << 20
"""Size of the largest file that is read or edited; a shell command shows parts of larger ones."""


class ToolSettings(Settings):
    """Limits on the text that the policy reads back from one call."""

    command_timeout_s: float = Field(default=20.0, gt=0)
    """Seconds before a shell command is killed."""
    output_chars: int = Field(default=1200, ge=1)
    """Characters shown of a command's output: the first half and the last half."""
    offered: tuple[Annotated[str, NAMED], ...] = SIX
    """Tools that the agent may call; a `Tool` of your own as package.module:name. "finish" must be among them."""

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


Outcome = tuple[str, ErrorKind | None]
"""The text that the policy reads, and the error kind or None."""


class _RefusalError(Exception):
    """A call that cannot be executed as written."""

    def __init__(self, error_kind: ErrorKind, text: str) -> None:
        super().__init__(text)
        self.error_kind: ErrorKind = error_kind


def run(call: Call, sandbox: Sandbox, settings: ToolSettings) -> Observation:
    """Execute one well-formed call (`call.error_kind` is None).

    Raises:
        SandboxError: the sandbox was lost; the attempt is void.
    """
    started = time.perf_counter()
    error_kind: ErrorKind | None = None
    try:
        text, error_kind = toolbox(settings.offered)[call.tool].run(sandbox, settings, **call.arguments)
    except _RefusalError as refusal:
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
        part = NAMED.resolve(name)
        if not isinstance(part, Tool):
            tool = Tool(part, _RUN[part.name])
        elif fault := _unusable(part):
            raise RecipeError(f"tool {name!r} {fault}")
        else:
            tool = Tool(part.spec, functools.partial(_run_own, part))
        if tool.spec.name in tools:
            raise RecipeError(f"tool {name!r}: another offered tool is named {tool.spec.name!r}, too")
        tools[tool.spec.name] = tool
    return tools


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
        raise _RefusalError("nonzero_exit", f"{tool.spec.name} failed: {clip(printable(error), 200)}")

    text = contained(lambda: tool.run(sandbox, settings, **arguments), broken)
    if not isinstance(text, str):
        raise wrong_result("tool", tool.spec.name, text, "the text that the policy reads")
    return clip(clean(text.encode("utf-8", "backslashreplace")), settings.output_chars), None


# One function per tool.


def _read_file(
    sandbox: Sandbox, settings: ToolSettings, path: str, start: int = 1, count: int = READ_LINES
) -> Outcome:
    path = _inside(path, sandbox)
    data = _load(path, sandbox)
    name = short(path)
    if b"\0" in data[:8192]:
        raise _RefusalError("bad_path", f"{name} is a binary file of {len(data)} bytes")
    lines = pasting.lines_of(data)
    if not lines:
        return f"{name} is empty", None
    if not 1 <= start <= len(lines) or count < 1:
        asked = "" if max(abs(start), abs(count)) > sys.maxsize else f", not {count} from {start} on"
        raise _RefusalError("bad_arguments", f"{name} has lines 1-{len(lines)}{asked}")
    shown = lines[start - 1 : start - 1 + count]
    header = f"lines {start}-{start + len(shown) - 1} of {len(lines)}"
    return "\n".join([header, *(cut(line) for line in shown)]), None


def _edit_file(sandbox: Sandbox, settings: ToolSettings, path: str, old: str, new: str) -> Outcome:
    """Replace the only `old` by `new`, with the line ends around it. Every other byte stays."""
    path = _inside(path, sandbox)
    if not old.strip():
        return _create(sandbox, path, old, new)
    if old == new:
        raise _RefusalError("bad_arguments", "old and new are the same text")
    data, name = _load(path, sandbox), short(path)
    _encode(old + new)
    matches = pasting.find(data, old)
    if not matches:
        raise _RefusalError("old_missing", f"old text is not in {name}{closest(data, old)}")
    lines = [len(pasting.ENDS.findall(data, 0, match.start)) + 1 for match in matches[:8]]
    if len(matches) > 1:
        listed = ", ".join(map(str, lines)) + (", ..." if len(matches) > 8 else "")
        count = f"{len(matches)} times" + (" or more" if len(matches) == pasting.MAX_MATCHES else "")
        raise _RefusalError("old_ambiguous", f"old text occurs {count} in {name}, at lines {listed}")
    _store(path, pasting.spliced(data, matches[0], new), sandbox)
    return f"edited {name} at line {lines[0]}", None


def _create(sandbox: Sandbox, path: str, old: str, new: str) -> Outcome:
    """An edit with empty `old`, which is allowed only for a new or empty file."""
    if old:
        raise _RefusalError("bad_arguments", "old holds only whitespace")
    if _exists(path, sandbox) and _load(path, sandbox):
        raise _RefusalError(
            "bad_arguments", f"old is empty, but {short(path)} exists; give the text to replace"
        )
    return _write_file(sandbox, ToolSettings(), path, new)


def _write_file(sandbox: Sandbox, settings: ToolSettings, path: str, content: str) -> Outcome:
    """Write a file. An existing one keeps its kind of line ends and its byte order mark, which the policy does not
    see."""
    path, data = _inside(path, sandbox), _encode(content)
    with contextlib.suppress(OSError):
        data = pasting.like(data, sandbox.read(path, MOST_BYTES))
    _store(path, data, sandbox)
    return f"wrote {short(path)}", None


GNU = re.compile(r"\\[|<>(){}+?]")
"""Operators of grep that are plain text for Python."""


def _search(sandbox: Sandbox, settings: ToolSettings, pattern: str, path: str = ".") -> Outcome:
    """Lines that match a regular expression, in file order; an invalid expression is searched for as plain text."""
    path = _inside(path, sandbox)
    if not pattern:
        raise _RefusalError("bad_arguments", "the pattern is empty")
    _argument(pattern)
    limits = [str(SEARCH_HITS), str(LINE_CHARS)]
    argv = ["python3", "-I", "-S", "-c", SEARCH.read_text("utf-8"), pattern, path, *limits]
    result = _exec(argv, sandbox, timeout_s=settings.command_timeout_s, max_output=4 << 20)
    if result.outcome == "timeout":
        message = f"killed after {settings.command_timeout_s:g} s; search below a narrower path or for less"
        return message, "timeout"
    if result.outcome != "ok":
        raise _RefusalError(
            "bad_arguments", f"the search ended early ({result.outcome}): take a simpler pattern"
        )
    answer = json.loads(result.stdout)
    if not answer["hits"]:
        if not _exists(path, sandbox):
            raise _RefusalError("bad_path", _missing(path, sandbox))
        if answer["fault"]:
            message = (
                f"no regular expression of Python ({short(answer['fault'])}), and as plain text not there"
            )
            raise _RefusalError("bad_arguments", message)
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
        raise _RefusalError("bad_arguments", "the command is empty")
    _argument(command)
    # The outer shell merges both streams in order of writing and leaves the inner one's messages as they are.
    argv = ["/bin/bash", "-c", 'exec /bin/bash -c "$0" 2>&1', command]
    result = _exec(argv, sandbox, env=SHELL_ENV, timeout_s=settings.command_timeout_s)
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


def _finish(sandbox: Sandbox, settings: ToolSettings) -> Outcome:
    return FINISHED, None


_RUN: dict[str, Callable[..., Outcome]] = {
    "read_file": _read_file,
    "edit_file": _edit_file,
    "write_file": _write_file,
    "search": _search,
    "shell": _shell,
    "finish": _finish,
}


# Files and paths.


def _inside(path: str, sandbox: Sandbox) -> str:
    """The path relative to the workspace."""
    _argument(path, "bad_path")
    whole = posixpath.normpath(posixpath.join(sandbox.workspace, path))
    if not path.strip() or posixpath.commonpath([whole, sandbox.workspace]) != sandbox.workspace:
        raise _RefusalError("bad_path", f"{short(path)!r} is not a path inside {sandbox.workspace}")
    return posixpath.relpath(whole, sandbox.workspace)


def _load(path: str, sandbox: Sandbox) -> bytes:
    try:
        return sandbox.read(path, MOST_BYTES)
    except IsADirectoryError:
        raise _RefusalError("bad_path", f"{short(path)} is a folder") from None
    except FileNotFoundError:
        raise _RefusalError("bad_path", _missing(path, sandbox)) from None
    except OSError as error:
        why = f"cannot be read: {error.strerror}"
        if error.errno == errno.EFBIG:
            why = f"is larger than {MOST_BYTES >> 20} MB; use shell commands on it"
        raise _RefusalError("bad_path", f"{short(path)} {why}") from None


def _store(path: str, data: bytes, sandbox: Sandbox) -> None:
    try:
        sandbox.write(path, data)
    except IsADirectoryError:
        raise _RefusalError("bad_path", f"{short(path)} is a folder") from None
    except OSError as error:
        raise _RefusalError("bad_path", f"{short(path)} cannot be written: {error.strerror}") from None


def _exists(path: str, sandbox: Sandbox) -> bool:
    return (
        _exec(["test", "-e", posixpath.join(sandbox.workspace, path)], sandbox, timeout_s=10).outcome == "ok"
    )


def _missing(path: str, sandbox: Sandbox) -> str:
    """Error text for a file that does not exist, with the nearest name."""
    listing = _exec(
        ["find", ".", "-name", ".git", "-prune", "-o", "-type", "f", "-print"], sandbox, timeout_s=10
    )
    names = sorted(name.removeprefix("./") for name in listing.stdout.decode("utf-8", "replace").splitlines())
    same = [name for name in names if posixpath.basename(name) == posixpath.basename(path)]
    near = same[0] if same else nearest(path, names, 0.7)
    return f"no file {short(path)}" + (f"; there is {short(near)}" if near else "")


def _exec(argv: Sequence[str], sandbox: Sandbox, **options: Any) -> Result:
    result = sandbox.exec(argv, **options)
    if result.outcome == "sandbox_lost":
        raise SandboxError(f"the sandbox was lost while it ran {argv[0]}")
    return result


def _encode(text: str, error_kind: ErrorKind = "bad_arguments") -> bytes:
    try:
        return text.encode("utf-8")
    except UnicodeEncodeError:  # a lone surrogate, which JSON can spell
        raise _RefusalError(error_kind, "the text holds a character that UTF-8 cannot write") from None


def _argument(text: str, error_kind: ErrorKind = "bad_arguments") -> None:
    """Refuse what cannot be an argument of a process."""
    if "\0" in text or len(_encode(text, error_kind)) > 100_000:
        raise _RefusalError(error_kind, "the text holds a null character or is too long")
