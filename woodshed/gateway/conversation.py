"""Conversations of agents of others, in whatever protocol they came, and their tokens.

A conversation is rendered by the same renderer as our own attempts: the opening prompt by `start`, and what follows a
message of the policy by `extend`. Messages that the policy did not sample here (history of an agent that was edited or
made up) are written in its format and stand in the context only.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from woodshed.records import Call, Observation
from woodshed.tokens.renderer import ContextTokens, Renderer
from woodshed.tokens.schema import ToolSpec, foreign_tool

Role = Literal["system", "user", "assistant", "tool"]


class RefusedError(Exception):
    """A request that is not answered; the agent is told why in its own protocol."""

    def __init__(self, message: str, *, status: int = 400, code: str = "invalid_request_error") -> None:
        super().__init__(message)
        self.status, self.code = status, code


@dataclass(frozen=True)
class AgentCall:
    """A call as agent and gateway tell each other of it."""

    id: str
    name: str
    arguments: str
    """JSON of an object."""


@dataclass(frozen=True)
class AgentMessage:
    """One message of a conversation."""

    role: Role
    text: str
    calls: tuple[AgentCall, ...] = ()
    call_id: str = ""
    """Of a tool's message: the call that it answers."""

    @property
    def key(self) -> tuple[object, ...]:
        """Parts that agents keep when they send a message again: space at its ends, ids of calls and the spelling of
        their arguments are not among them."""
        calls = tuple((call.name, _canonical(call.arguments)) for call in self.calls)
        return self.role, self.text.strip(), calls


@dataclass(frozen=True)
class AgentRequest:
    """One model call of an agent."""

    messages: tuple[AgentMessage, ...]
    tools: tuple[ToolSpec, ...] = ()
    max_tokens: int | None = None
    streams: bool = False
    model: str = ""
    """Name by which the agent called the model."""


@dataclass(frozen=True)
class Reply:
    """The policy's message as the agent reads it."""

    id: str
    text: str
    calls: tuple[AgentCall, ...]
    finish_reason: Literal["stop", "length"]
    prompt_tokens: int
    sampled_tokens: int

    @property
    def message(self) -> AgentMessage:
        return AgentMessage("assistant", self.text, self.calls)


def check(request: AgentRequest) -> None:
    """Refuse a conversation that cannot be answered by a message of the assistant.

    Raises:
        RefusedError: no message, or the last one is the assistant's (a prefill).
    """
    spoken = [message for message in request.messages if message.role != "system"]
    if not spoken:
        raise RefusedError("the request has no message of the user")
    if spoken[-1].role == "assistant":
        raise RefusedError(
            "the last message is the assistant's; messages that are begun for it are not supported"
        )


def whole_prompt(request: AgentRequest, renderer: Renderer, written: Mapping[str, str]) -> ContextTokens:
    """The tokens of a whole conversation, up to the opening of the assistant's next message.

    Args:
        written: text of calls that the policy wrote, by the ids that agents know them by.
    """
    system = "\n\n".join(message.text for message in request.messages if message.role == "system")
    rest = [message for message in request.messages if message.role != "system"]
    first, rest = _until_assistant(rest)
    user = "\n\n".join(message.text for message in first)
    context = renderer.start(system, user, request.tools)
    ids = list(context.ids)
    while rest:
        texts, calls, agent_calls = [], list[Call](), list[AgentCall]()
        while rest and rest[0].role == "assistant":
            message, rest = rest[0], rest[1:]
            texts += [message.text] if message.text else []
            for call in message.calls:
                raw = written.get(call.id) or _written(call, request.tools, renderer)
                calls.append(Call(f"call_{len(calls)}", call.name, {}, raw))
                agent_calls.append(call)
                texts.append(raw)
        sampled = renderer.encode_message("\n".join(texts))
        answers, rest = _until_assistant(rest)
        context = answered(renderer, sampled, "stop", answers, calls, agent_calls)
        ids += [*sampled, *context.ids]
    return ContextTokens(tuple(ids), context.opening)


def answered(
    renderer: Renderer,
    sampled: Sequence[int],
    finish_reason: Literal["stop", "length"],
    answers: Sequence[AgentMessage],
    calls: Sequence[Call],
    agent_calls: Sequence[AgentCall],
) -> ContextTokens:
    """Tokens behind a message of the policy: results of its calls, or what the user said."""
    observations = observed(answers, calls, agent_calls)
    return renderer.extend(sampled, finish_reason, observations, calls if observations[0].call_id else ())


def observed(
    answers: Sequence[AgentMessage], calls: Sequence[Call], agent_calls: Sequence[AgentCall]
) -> list[Observation]:
    """One result for each call, in their order; one without a call where none was answered.

    What the user said besides stands behind the last result.
    """
    known = {call.id for call in agent_calls}
    results = {each.call_id: each.text for each in answers if each.role == "tool" and each.call_id in known}
    rest = [each.text for each in answers if not (each.role == "tool" and each.call_id in known)]
    if not results:
        return [Observation("", "\n\n".join(rest))]
    texts = [results.get(call.id, "") for call in agent_calls]
    texts[-1] = "\n\n".join([texts[-1], *rest])
    return [Observation(call.id, text) for call, text in zip(calls, texts, strict=True)]


def _until_assistant(messages: Sequence[AgentMessage]) -> tuple[list[AgentMessage], list[AgentMessage]]:
    """(messages before the assistant's next one, the rest)."""
    end = next((n for n, message in enumerate(messages) if message.role == "assistant"), len(messages))
    return list(messages[:end]), list(messages[end:])


def _written(call: AgentCall, tools: Sequence[ToolSpec], renderer: Renderer) -> str:
    """A call that the policy did not write, in its format; as JSON where that has no such call."""
    try:
        return renderer.codec.format(call.name, json.loads(call.arguments), tools)
    except (ValueError, TypeError, AttributeError, RecursionError):
        return json.dumps({"name": call.name, "arguments": call.arguments}, ensure_ascii=False)


def _canonical(arguments: str) -> str:
    try:
        return json.dumps(json.loads(arguments), sort_keys=True)
    except (ValueError, RecursionError):
        return arguments


# --- reading what agents send --------------------------------------------------------------------------------------


def table(value: Any, name: str) -> dict[str, Any]:
    """An object of JSON. Raises RefusedError."""
    if not isinstance(value, dict):
        raise RefusedError(f"{name} must be an object, not {repr(value)[:60]}")
    return value


def items(value: Any, name: str) -> list[Any]:
    """A list of JSON; [] for null. Raises RefusedError."""
    if value is not None and not isinstance(value, list):
        raise RefusedError(f"{name} must be a list, not {repr(value)[:60]}")
    return value or []


def word(value: Any, name: str) -> str:
    """A text of JSON. Raises RefusedError."""
    if not isinstance(value, str):
        raise RefusedError(f"{name} must be a text, not {repr(value)[:60]}")
    return value


def count(value: Any, name: str) -> int | None:
    """A number of tokens, or None. Raises RefusedError."""
    if value is not None and (type(value) is not int or value < 1):
        raise RefusedError(f"{name} must be a whole number of at least 1, not {repr(value)[:60]}")
    return value


def text_of(content: Any, name: str) -> str:
    """The text of a message: a text, or a list of parts that all are.

    Raises:
        RefusedError: an image, or something else that the policy cannot read.
    """
    if content is None or isinstance(content, str):
        return content or ""
    return "\n".join(_part(part, name) for part in items(content, name))


def _part(part: Any, name: str) -> str:
    kind = table(part, name).get("type", "text")
    if kind not in ("text", "input_text", "output_text"):
        raise RefusedError(f"{name} holds a part of type {str(kind)[:40]!r}; the policy reads text only")
    return word(part.get("text"), f"{name}.text")


def tool_of(name: Any, description: Any, parameters: Any) -> ToolSpec:
    """A tool of an agent. Raises RefusedError."""
    schema = table(parameters if parameters is not None else {"type": "object"}, "a tool's parameters")
    for each in table(schema.get("properties") or {}, "a tool's properties").values():
        table(each, "a tool's property")
    for each in items(schema.get("required"), "a tool's required"):
        word(each, "a tool's required")
    return foreign_tool(word(name, "a tool's name"), str(description or ""), schema)


def refuse_unsupported(body: Mapping[str, Any], values: Mapping[str, Sequence[Any]]) -> None:
    """Refuse what a gateway cannot do without changing what was sampled.

    Args:
        values: by field, those of its values that ask for nothing.

    Raises:
        RefusedError: names the field.
    """
    for name, harmless in values.items():
        if body.get(name) is not None and body[name] not in harmless:
            raise RefusedError(f"{name} = {repr(body[name])[:60]} is not supported; leave it out")


def event(data: Mapping[str, Any] | str, name: str = "") -> str:
    """A server-sent event."""
    text = data if isinstance(data, str) else json.dumps(data, ensure_ascii=False)
    return f"event: {name}\ndata: {text}\n\n" if name else f"data: {text}\n\n"


def pieces(text: str, size: int = 2048) -> Iterator[str]:
    """A text in pieces for a stream."""
    for start in range(0, len(text), size):
        yield text[start : start + size]
