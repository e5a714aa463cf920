"""Tools of MCP servers, which run inside the sandbox like everything else that a policy can reach.

A recipe offers `mcp:PATH.py`: a server in one file, whose text goes into the sandbox with every call, is started there
and asked over its stdin and stdout. A server outside of the sandbox would act with the rights of the person who trains,
for a policy that tries whatever pays. So a server here has no network and no keys, sees the workspace that commands
see, and keeps nothing between two calls but what it writes there.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from woodshed import documents
from woodshed.agent.output import clean, clip, printable, short
from woodshed.agent.workspace_files import Outcome, RefusedCallError, execute
from woodshed.records import RecipeError
from woodshed.sandbox import Sandbox, SandboxSettings, SandboxSpec
from woodshed.tokens.codec import ToolSpec

PREFIX = "mcp:"
CLIENT = Path(__file__).with_name("mcp_client.py")
LISTING_S = 30.0
MOST_BYTES = 1 << 20
EXAMPLES: dict[str, Any] = {
    "string": "text",
    "integer": 1,
    "number": 1,
    "boolean": True,
    "array": [],
    "object": {},
}


def tools_of(name: str) -> tuple[ToolSpec, ...]:
    """The tools of a server, as it lists them in a sandbox of its own.

    Args:
        name: `mcp:PATH.py`.

    Raises:
        RecipeError: the file cannot be read, or the server does not answer as the protocol says.
        SandboxError: no sandbox could be opened.
    """
    return _listed(name, source_of(name))


def source_of(name: str) -> str:
    """Text of a server's file. Raises RecipeError."""
    path = Path(name.removeprefix(PREFIX))
    remedy = f"agent.tools.offered has {name!r}, which must name a server in one Python file"
    try:
        return documents.read(path, RecipeError, remedy, most=MOST_BYTES)
    except FileNotFoundError:
        raise RecipeError(f"{path} is not there; {remedy}") from None


@functools.cache
def _listed(name: str, source: str) -> tuple[ToolSpec, ...]:
    """Tools by the server's own answer, in a sandbox of the default provider: the recipe's is not read yet."""
    with SandboxSettings().create().open(SandboxSpec(())) as sandbox:
        try:
            answer = _ask(source, "tools/list", {}, sandbox, timeout_s=LISTING_S)
            specs = tuple(_spec(tool) for tool in answer["tools"])
        except RefusedCallError as error:
            raise RecipeError(f"{name}: {error}") from None
        except (KeyError, TypeError, AttributeError) as error:
            raise RecipeError(f"{name} lists its tools in another form than MCP's: {error!r}") from None
    if not specs:
        raise RecipeError(f"{name} lists no tools")
    return specs


def _spec(tool: Mapping[str, Any]) -> ToolSpec:
    """A tool as the policy sees it; its arguments are words of the plain form, required ones first."""
    schema = {"properties": {}, "required": [], **tool["inputSchema"], "additionalProperties": False}
    properties, required = schema["properties"], list(schema["required"])
    inline = (*required, *(name for name in properties if name not in required))
    example = {name: _example(properties[name]) for name in required}
    return ToolSpec(
        str(tool["name"]), str(tool.get("description", "")).strip(), schema, inline, example=example
    )


def _example(schema: Mapping[str, Any]) -> Any:
    """A value that fits the schema of an argument."""
    kind = schema.get("type", "string")
    value = schema["enum"][0] if schema.get("enum") else EXAMPLES[kind if isinstance(kind, str) else kind[0]]
    return schema.get("minimum", value) if kind in ("integer", "number") else value


def call(name: str, tool: str, sandbox: Sandbox, settings: Any, **arguments: Any) -> Outcome:
    """Call a tool of a server that is started in the attempt's sandbox."""
    params = {"name": tool, "arguments": arguments}
    answer = _ask(source_of(name), "tools/call", params, sandbox, timeout_s=settings.command_timeout_s)
    content = answer.get("content")
    parts = [part for part in content if isinstance(part, dict)] if isinstance(content, list) else []
    texts = [str(part["text"]) if "text" in part else f"[{short(str(part.get('type')))}]" for part in parts]
    text = clip(clean("\n".join(texts).encode("utf-8", "backslashreplace")), settings.output_chars)
    return text or "(no output)", "nonzero_exit" if answer.get("isError") is True else None


def _ask(
    source: str, method: str, params: Mapping[str, Any], sandbox: Sandbox, *, timeout_s: float
) -> dict[str, Any]:
    """Result of one request. Raises RefusedCallError where there is none."""
    argv = ["python3", "-I", "-S", "-c", CLIENT.read_text("utf-8")]
    request = json.dumps({"server": source, "method": method, "params": params}).encode()
    result = execute(argv, sandbox, stdin=request, timeout_s=timeout_s, channel=True)
    if result.outcome == "timeout":
        raise RefusedCallError("timeout", f"the server took more than {timeout_s:g} s")
    try:
        answer = json.loads(result.channel)
    except ValueError:
        answer = {"error": "the server did not answer"}
    if not isinstance(answer, dict) or "error" in answer:
        why = answer.get("error") if isinstance(answer, dict) else "its answer is no object"
        raise RefusedCallError("nonzero_exit", clip(printable(str(why)), 200))
    return answer
