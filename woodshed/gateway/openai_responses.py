"""OpenAI's responses: requests read, replies written."""

from __future__ import annotations

import time
from collections.abc import Iterator
from itertools import count as counting
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
from woodshed.gateway.openai_chat import ROLES

PATH = "/v1/responses"
UNSUPPORTED = {"previous_response_id": (), "conversation": (), "background": (False,), "prompt": ()}


def read(body: dict[str, Any]) -> AgentRequest:
    """The request. Tools that the server would run itself are not offered to the policy.

    Raises:
        RefusedError: it cannot be read, or refers to what only OpenAI keeps (previous_response_id).
    """
    refuse_unsupported(body, UNSUPPORTED)
    kind = table(table(body.get("text") or {}, "text").get("format") or {}, "text.format").get("type", "text")
    if kind != "text":
        raise RefusedError(f"text.format = {str(kind)[:40]!r} is not supported; leave it out")
    given = body.get("input")
    written = [{"role": "user", "content": given}] if isinstance(given, str) else items(given, "input")
    messages: list[AgentMessage] = []
    if body.get("instructions"):
        messages.append(AgentMessage("system", word(body["instructions"], "instructions")))
    for each in written:
        _add(messages, table(each, "input"))
    tools = [table(each, "tools") for each in items(body.get("tools"), "tools")]
    return AgentRequest(
        tuple(messages),
        tuple(
            tool_of(tool.get("name"), tool.get("description"), tool.get("parameters"))
            for tool in tools
            if tool.get("type") == "function"
        ),
        count(body.get("max_output_tokens"), "max_output_tokens"),
        body.get("stream") is True,
        str(body.get("model", "")),
    )


def _add(messages: list[AgentMessage], item: dict[str, Any]) -> None:
    """Add an item; a text and the calls behind it are one message of the assistant."""
    kind = item.get("type", "message")
    if kind == "message":
        role = ROLES.get(str(item.get("role")))
        if role is None:
            raise RefusedError(
                f"a message has role {str(item.get('role'))[:40]!r}; known are {', '.join(ROLES)}"
            )
        messages.append(AgentMessage(role, text_of(item.get("content"), "content")))  # type: ignore[arg-type]
    elif kind == "function_call":
        name, arguments = word(item.get("name"), "name"), word(item.get("arguments"), "arguments")
        call = AgentCall(str(item.get("call_id", "")), name, arguments)
        last = (
            messages.pop() if messages and messages[-1].role == "assistant" else AgentMessage("assistant", "")
        )
        messages.append(AgentMessage("assistant", last.text, (*last.calls, call)))
    elif kind == "function_call_output":
        output = item.get("output")
        messages.append(AgentMessage("tool", text_of(output, "output"), call_id=str(item.get("call_id", ""))))
    elif kind != "reasoning":  # which no policy here wrote
        raise RefusedError(f"input holds an item of type {str(kind)[:40]!r}, which is not supported")


def answer(reply: Reply, model: str) -> dict[str, Any]:
    """The whole reply."""
    is_cut = reply.finish_reason == "length"
    return {
        "id": f"resp_{reply.id}",
        "object": "response",
        "created_at": int(time.time()),
        "model": model,
        "status": "incomplete" if is_cut else "completed",
        "incomplete_details": {"reason": "max_output_tokens"} if is_cut else None,
        "error": None,
        "output": _output(reply),
        "parallel_tool_calls": True,
        "tool_choice": "auto",
        "tools": [],
        "usage": {
            "input_tokens": reply.prompt_tokens,
            "input_tokens_details": {"cached_tokens": 0},
            "output_tokens": reply.sampled_tokens,
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": reply.prompt_tokens + reply.sampled_tokens,
        },
    }


def _output(reply: Reply) -> list[dict[str, Any]]:
    output: list[dict[str, Any]] = []
    if reply.text or not reply.calls:
        part = {"type": "output_text", "text": reply.text, "annotations": []}
        message = {"type": "message", "id": f"msg_{reply.id}", "role": "assistant", "status": "completed"}
        output.append(message | {"content": [part]})
    for call in reply.calls:
        names = {"id": f"fc_{call.id}", "call_id": call.id, "name": call.name, "arguments": call.arguments}
        output.append({"type": "function_call", "status": "completed", **names})
    return output


def events(reply: Reply, model: str) -> Iterator[str]:
    """The reply as a stream."""
    whole, numbers = answer(reply, model), counting()

    def told(kind: str, **data: Any) -> str:
        return event({"type": kind, "sequence_number": next(numbers), **data}, kind)

    begun = {**whole, "status": "in_progress", "output": [], "usage": None, "incomplete_details": None}
    yield told("response.created", response=begun)
    yield told("response.in_progress", response=begun)
    for index, item in enumerate(whole["output"]):
        place = {"item_id": item["id"], "output_index": index}
        empty = {"content": []} if item["type"] == "message" else {"arguments": ""}
        begun_item = {**item, "status": "in_progress", **empty}
        yield told("response.output_item.added", output_index=index, item=begun_item)
        if item["type"] == "message":
            part, inside = item["content"][0], place | {"content_index": 0}
            yield told("response.content_part.added", **inside, part={**part, "text": ""})
            for piece in pieces(part["text"]):
                yield told("response.output_text.delta", **inside, delta=piece, logprobs=[])
            yield told("response.output_text.done", **inside, text=part["text"], logprobs=[])
            yield told("response.content_part.done", **inside, part=part)
        else:
            arguments = item["arguments"]
            yield told("response.function_call_arguments.delta", **place, delta=arguments)
            yield told(
                "response.function_call_arguments.done", **place, arguments=arguments, name=item["name"]
            )
        yield told("response.output_item.done", output_index=index, item=item)
    yield told(f"response.{whole['status']}", response=whole)
