"""Anthropic's messages: requests read, replies written."""

from __future__ import annotations

import json
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

PATH = "/v1/messages"
COUNT_PATH = "/v1/messages/count_tokens"
THOUGHTS = ("thinking", "redacted_thinking")


def read(body: dict[str, Any]) -> AgentRequest:
    """The request. Tools that the server would run itself are not offered to the policy. Raises RefusedError."""
    refuse_unsupported(body, {"stop_sequences": ([],)})
    messages: list[AgentMessage] = []
    if system := text_of(body.get("system"), "system"):
        messages.append(AgentMessage("system", system))
    for each in items(body.get("messages"), "messages"):
        messages += _messages(table(each, "messages"))
    tools = [table(each, "tools") for each in items(body.get("tools"), "tools")]
    return AgentRequest(
        tuple(messages),
        tuple(
            tool_of(tool.get("name"), tool.get("description"), tool.get("input_schema"))
            for tool in tools
            if tool.get("type") in (None, "custom")
        ),
        count(body.get("max_tokens"), "max_tokens"),
        body.get("stream") is True,
        str(body.get("model", "")),
    )


def _messages(each: dict[str, Any]) -> list[AgentMessage]:
    """A message; of the user's, results of tools are messages of their own."""
    role, content = each.get("role"), each.get("content")
    if role not in ("user", "assistant"):
        raise RefusedError(f"a message has role {str(role)[:40]!r}; known are user, assistant")
    blocks = [{"type": "text", "text": content}] if isinstance(content, str) else items(content, "content")
    texts, calls, results = [], list[AgentCall](), list[AgentMessage]()
    for block in blocks:
        kind = table(block, "content").get("type")
        if kind == "tool_use" and role == "assistant":
            arguments = json.dumps(table(block.get("input"), "tool_use.input"), ensure_ascii=False)
            calls.append(
                AgentCall(str(block.get("id", "")), word(block.get("name"), "tool_use.name"), arguments)
            )
        elif kind == "tool_result" and role == "user":
            text = text_of(block.get("content"), "tool_result.content")
            results.append(AgentMessage("tool", text, call_id=str(block.get("tool_use_id", ""))))
        elif kind not in THOUGHTS:
            texts.append(text_of([block], "content"))
    text = "\n".join(texts)
    if role == "assistant":
        return [AgentMessage("assistant", text, tuple(calls))]
    return [*results, *([AgentMessage("user", text)] if text or not results else [])]


def answer(reply: Reply, model: str) -> dict[str, Any]:
    """The whole reply."""
    return {
        "id": f"msg_{reply.id}",
        "type": "message",
        "role": "assistant",
        "model": model,
        "content": _blocks(reply),
        "stop_reason": _reason(reply),
        "stop_sequence": None,
        "usage": {"input_tokens": reply.prompt_tokens, "output_tokens": reply.sampled_tokens},
    }


def _blocks(reply: Reply) -> list[dict[str, Any]]:
    texts = [{"type": "text", "text": reply.text}] if reply.text or not reply.calls else []
    calls = [
        {"type": "tool_use", "id": call.id, "name": call.name, "input": json.loads(call.arguments)}
        for call in reply.calls
    ]
    return [*texts, *calls]


def _reason(reply: Reply) -> str:
    return "max_tokens" if reply.finish_reason == "length" else "tool_use" if reply.calls else "end_turn"


def events(reply: Reply, model: str) -> Iterator[str]:
    """The reply as a stream."""

    def told(kind: str, **data: Any) -> str:
        return event({"type": kind, **data}, kind)

    whole = answer(reply, model)
    usage = {"input_tokens": reply.prompt_tokens, "output_tokens": 0}
    yield told("message_start", message={**whole, "content": [], "stop_reason": None, "usage": usage})
    for index, block in enumerate(whole["content"]):
        if block["type"] == "text":
            yield told("content_block_start", index=index, content_block={"type": "text", "text": ""})
            for piece in pieces(block["text"]):
                yield told("content_block_delta", index=index, delta={"type": "text_delta", "text": piece})
        else:
            yield told("content_block_start", index=index, content_block={**block, "input": {}})
            arguments = json.dumps(block["input"], ensure_ascii=False)
            for piece in pieces(arguments):
                delta = {"type": "input_json_delta", "partial_json": piece}
                yield told("content_block_delta", index=index, delta=delta)
        yield told("content_block_stop", index=index)
    delta = {"stop_reason": whole["stop_reason"], "stop_sequence": None}
    yield told("message_delta", delta=delta, usage={"output_tokens": reply.sampled_tokens})
    yield told("message_stop")


def failure(error: RefusedError) -> dict[str, Any]:
    """An error as clients of this protocol read it."""
    kinds = {401: "authentication_error", 403: "permission_error", 404: "not_found_error", 500: "api_error"}
    return {
        "type": "error",
        "error": {"type": kinds.get(error.status, "invalid_request_error"), "message": str(error)},
    }
