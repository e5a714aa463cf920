"""OpenAI's chat completions: requests read, replies written."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

from woodshed.gateway.conversation import (
    AgentCall,
    AgentMessage,
    AgentRequest,
    RefusedError,
    Reply,
    count,
    event,
    items,
    pieces,
    refuse_unsupported,
    table,
    text_of,
    tool_of,
    word,
)

PATH = "/v1/chat/completions"
ROLES = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant", "tool": "tool"}
UNSUPPORTED = {"n": (1,), "stop": ((), [], ""), "response_format": ({"type": "text"},), "functions": ([],)}


def read(body: dict[str, Any]) -> AgentRequest:
    """The request. Raises RefusedError."""
    refuse_unsupported(body, UNSUPPORTED)
    tools = []
    for each in items(body.get("tools"), "tools"):
        function = table(table(each, "tools").get("function"), "tools.function")
        tools.append(tool_of(function.get("name"), function.get("description"), function.get("parameters")))
    limit = body.get("max_completion_tokens", body.get("max_tokens"))
    return AgentRequest(
        tuple(_message(table(each, "messages")) for each in items(body.get("messages"), "messages")),
        tuple(tools),
        count(limit, "max_tokens"),
        body.get("stream") is True,
        str(body.get("model", "")),
    )


def _message(each: dict[str, Any]) -> AgentMessage:
    role = ROLES.get(str(each.get("role")))
    if role is None:
        raise RefusedError(f"a message has role {str(each.get('role'))[:40]!r}; known are {', '.join(ROLES)}")
    calls = []
    for call in items(each.get("tool_calls"), "tool_calls"):
        function = table(table(call, "tool_calls").get("function"), "tool_calls.function")
        name = word(function.get("name"), "tool_calls.function.name")
        arguments = word(function.get("arguments", "{}"), "tool_calls.function.arguments")
        calls.append(AgentCall(str(call.get("id", "")), name, arguments))
    text = text_of(each.get("content"), "content")
    return AgentMessage(role, text, tuple(calls), str(each.get("tool_call_id", "")))  # type: ignore[arg-type]


def answer(reply: Reply, model: str) -> dict[str, Any]:
    """The whole reply."""
    message: dict[str, Any] = {"role": "assistant", "content": reply.text or None}
    if reply.calls:
        message["tool_calls"] = _calls(reply)
    choice = {"index": 0, "message": message, "finish_reason": _reason(reply), "logprobs": None}
    return _head(reply, model, "chat.completion") | {"choices": [choice], "usage": _usage(reply)}


def events(reply: Reply, model: str) -> Iterator[str]:
    """The reply as a stream."""
    head = _head(reply, model, "chat.completion.chunk")

    def chunk(delta: dict[str, Any], reason: str | None = None) -> str:
        return event({**head, "choices": [{"index": 0, "delta": delta, "finish_reason": reason}]})

    yield chunk({"role": "assistant", "content": ""})
    for piece in pieces(reply.text):
        yield chunk({"content": piece})
    for index, call in enumerate(_calls(reply)):
        yield chunk({"tool_calls": [{"index": index, **call}]})
    yield chunk({}, _reason(reply))
    yield event({**head, "choices": [], "usage": _usage(reply)})
    yield event("[DONE]")


def failure(error: RefusedError) -> dict[str, Any]:
    """An error as clients of this protocol read it."""
    return {
        "error": {"message": str(error), "type": "invalid_request_error", "code": error.code, "param": None}
    }


def _head(reply: Reply, model: str, kind: str) -> dict[str, Any]:
    return {"id": f"chatcmpl-{reply.id}", "object": kind, "created": int(time.time()), "model": model}


def _calls(reply: Reply) -> list[dict[str, Any]]:
    return [
        {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
        for call in reply.calls
    ]


def _reason(reply: Reply) -> str:
    return "length" if reply.finish_reason == "length" else "tool_calls" if reply.calls else "stop"


def _usage(reply: Reply) -> dict[str, int]:
    return {
        "prompt_tokens": reply.prompt_tokens,
        "completion_tokens": reply.sampled_tokens,
        "total_tokens": reply.prompt_tokens + reply.sampled_tokens,
    }
