"""Model calls of one attempt, recorded as turns: exact token ids, in segments.

A call that extends the context of an earlier one continues its segment, so that its prompt is that one's prompt and
message and what came since, token by token. Any other call (compaction, a sub-agent, an edited history) opens a new
one. Nothing that was sampled is tokenised again, whatever the agent sends back.
"""

from __future__ import annotations

import json
import secrets
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from woodshed.agent.attempt import turn_seed
from woodshed.boundary import contained
from woodshed.engines import expert_log
from woodshed.engines.engine import Sample, SampleRequest
from woodshed.gateway.conversation import (
    AgentCall,
    AgentRequest,
    RefusedError,
    Reply,
    answered,
    check,
    observed,
    whole_prompt,
)
from woodshed.records import Break, Call, Ended, ErrorKind, Turn, WoodshedError
from woodshed.tokens.codec.thoughts import ThoughtfulCodec
from woodshed.tokens.renderer import ContextTokens, Renderer
from woodshed.tokens.schema import ToolSpec, mismatch

Key = tuple[object, ...]
READABLE = (None, "unknown_tool", "bad_arguments")
"""Faults of calls that an agent is told as they are: it refuses them itself."""


@dataclass(frozen=True)
class Quota:
    """Most that one attempt may use of a gateway; what is beyond is refused."""

    turns: int
    turn_tokens: int
    """Sampled tokens of one message."""
    sampled_tokens: int
    """Of all messages."""
    seconds: float
    """From the first call's permission on."""


@dataclass(frozen=True)
class SampledMessage:
    """A message of the policy in its place."""

    num_messages: int
    """Messages of the conversation up to it, itself included."""
    num_ids: int
    """Tokens of the conversation up to it, itself included."""
    ids: tuple[int, ...]
    finish_reason: Literal["stop", "length"]
    calls: tuple[Call, ...]
    agent_calls: tuple[AgentCall, ...]
    turn: int
    """Index of its turn."""


@dataclass(frozen=True)
class KnownContext:
    """The conversation of a segment as far as it is known."""

    tools: tuple[ToolSpec, ...]
    keys: tuple[Key, ...]
    """Messages as agents send them again."""
    ids: tuple[int, ...]
    sampled: tuple[SampledMessage, ...]


@dataclass(frozen=True)
class Extension:
    """The place at which a call goes on with a known conversation."""

    segment: int
    context: KnownContext
    last: SampledMessage
    """The policy's message that the call answers."""


@dataclass(frozen=True)
class PendingCall:
    """A model call that was permitted and is being sampled."""

    number: int
    """Place among the attempt's calls."""
    request: AgentRequest
    sample_request: SampleRequest
    added: ContextTokens
    """Tokens that the prompt has beyond the conversation that it extends."""
    extends: Extension | None
    began: float


@dataclass
class Recording:
    """The model calls of one attempt. Only one thread at a time, the gateway's, calls its methods."""

    attempt_id: str
    renderer: Renderer
    context_length: int
    quota: Quota
    seed: int = 0
    turns: list[Turn] = field(default_factory=list)
    """In the order in which they were sampled, each with the number of its segment."""
    ended: Ended | None = None
    """The quota that was used up, once a call was refused for it."""
    failure: WoodshedError | None = None
    """The engine's last failure."""
    tools: list[dict[str, Any]] = field(default_factory=list)
    """Tools that were offered, each once by its name."""
    _contexts: list[KnownContext] = field(default_factory=list)
    """By segment."""
    _written: dict[str, str] = field(default_factory=dict)
    _began: float = field(default_factory=time.monotonic)
    _asked: int = 0
    _reserved: int = 0

    @property
    def sampled_tokens(self) -> int:
        """Tokens that the policy has sampled so far."""
        return sum(len(turn.sampled_ids) for turn in self.turns)

    def prepare(self, request: AgentRequest) -> PendingCall:
        """Permit a model call and render its prompt.

        Raises:
            RefusedError: it cannot be read, does not fit the context, or is beyond the quota.
        """
        check(request)
        self._refuse_beyond()
        extended = self._extended(request)
        added, ids = self._prompt(request, extended)
        left = self.quota.sampled_tokens - self.sampled_tokens - self._reserved
        room = self.context_length - len(ids)
        if room < 1:
            raise RefusedError(
                f"prompt is too long: {len(ids)} tokens, and this model's maximum context length is "
                f"{self.context_length} tokens",
                code="context_length_exceeded",
            )
        most = min(request.max_tokens or self.quota.turn_tokens, self.quota.turn_tokens, left, room)
        sample = SampleRequest(tuple(ids), most, turn_seed(self.seed, self.attempt_id, self._asked))
        self._asked += 1
        self._reserved += most
        known = {tool["name"] for tool in self.tools}
        self.tools += [tool.schema for tool in request.tools if tool.name not in known]
        return PendingCall(self._asked - 1, request, sample, added, extended, time.monotonic())

    def count(self, request: AgentRequest) -> int:
        """Tokens of a prompt. Raises RefusedError."""
        check(request)
        return len(self._prompt(request, self._extended(request))[1])

    def release(self, pending: PendingCall) -> None:
        """Give back what a call has reserved, whether it was sampled or not."""
        self._reserved -= pending.sample_request.max_tokens

    def record(self, pending: PendingCall, sample: Sample) -> Reply:
        """Record the sampled message as a turn: the reply for the agent."""
        text = self.renderer.decode(sample.ids)
        prose, calls, fault = self._read(text, pending.request.tools, sample.finish_reason)
        agent_calls = _told(calls, f"{pending.number}") if _are_readable(calls) else ()
        reply = Reply(
            f"{pending.number}-{secrets.token_hex(4)}",
            prose if agent_calls or not calls else self._visible(text),
            agent_calls,
            sample.finish_reason,
            len(pending.sample_request.prompt_ids),
            len(sample.ids),
        )
        self._written |= {each.id: call.raw for each, call in zip(agent_calls, calls, strict=False)}
        segment, begins = self._place(pending)
        is_new = segment == len(self._contexts)
        self._grow(pending, segment, sample, reply, calls if agent_calls else ())
        self.turns.append(
            Turn(
                context_ids=pending.sample_request.prompt_ids if is_new else pending.added.ids,
                opening=pending.added.opening,
                sampled_ids=tuple(sample.ids),
                logps=tuple(sample.logps),
                versions=sample.versions,
                finish_reason=sample.finish_reason,
                text=text,
                calls=calls,
                observations=(),
                error_kind=fault,
                sample_s=time.monotonic() - pending.began,
                segment=segment,
                begins=begins,
                experts=expert_log.untold(
                    sample.experts, [each for each in self.turns if each.segment == segment]
                ),
            )
        )
        return reply

    def _refuse_beyond(self) -> None:
        """Refuse a call beyond the quota. Agents ask again after a 429, and do not after a 403."""
        quota, is_late = self.quota, time.monotonic() - self._began > self.quota.seconds
        used: dict[Ended, bool] = {
            "max_turns": self._asked >= quota.turns,
            "max_tokens": self.sampled_tokens + self._reserved >= quota.sampled_tokens,
            "timeout": is_late,
        }
        self.ended = next((name for name, is_used in used.items() if is_used), None)
        if self.ended:
            raise RefusedError(
                f"the quota of this key is used up ({self.ended}): {self._asked} of {quota.turns} calls, "
                f"{self.sampled_tokens} of {quota.sampled_tokens} sampled tokens, {quota.seconds:g} s",
                status=403,
                code="insufficient_quota",
            )

    def _extended(self, request: AgentRequest) -> Extension | None:
        """The latest message of the policy up to which a conversation is known, token by token, where nothing but
        answers to it follow."""
        keys = tuple(message.key for message in request.messages)
        for segment in reversed(range(len(self._contexts))):
            context = self._contexts[segment]
            for last in reversed(context.sampled):
                length = last.num_messages
                if (
                    context.tools == request.tools
                    and length < len(keys)
                    and context.keys[:length] == keys[:length]
                    and all(each.role not in ("assistant", "system") for each in request.messages[length:])
                ):
                    return Extension(segment, context, last)
        return None

    def _prompt(self, request: AgentRequest, extends: Extension | None) -> tuple[ContextTokens, list[int]]:
        """(tokens beyond the known conversation, the whole prompt)."""
        if extends is None:
            context = contained(lambda: whole_prompt(request, self.renderer, self._written), _refuse)
            return context, list(context.ids)
        last, answers = extends.last, request.messages[extends.last.num_messages :]
        added = contained(
            lambda: answered(
                self.renderer, last.ids, last.finish_reason, answers, last.calls, last.agent_calls
            ),
            _refuse,
        )
        return added, [*extends.context.ids[: last.num_ids], *added.ids]

    def _read(
        self, text: str, tools: Sequence[ToolSpec], finish_reason: str
    ) -> tuple[str, tuple[Call, ...], ErrorKind | None]:
        """(prose, calls, first fault). A message without calls is none: so agents of others end."""
        is_cut = finish_reason == "length"
        if not tools or is_cut:
            return self._visible(text), (), "truncated" if is_cut else None
        prose, calls, fault = self._parsed(text, tools)
        calls = tuple(_with_extras(call, tools) for call in calls)
        kinds: list[ErrorKind] = [call.error_kind for call in calls if call.error_kind]
        if calls or fault == "no_call":
            fault = kinds[0] if kinds else None
        return prose, calls, fault

    def _parsed(self, text: str, tools: Sequence[ToolSpec]) -> tuple[str, tuple[Call, ...], ErrorKind | None]:
        """(prose, calls, fault) as the codec reads them; unparseable where one of the user's own broke."""

        def broken(error: str) -> tuple[str, tuple[Call, ...], ErrorKind | None]:
            return text, (), "unparseable"

        return contained(lambda: self.renderer.codec.parse(text, tools), broken)

    def _visible(self, text: str) -> str:
        """A message without its thought."""
        codec = self.renderer.codec
        return text[codec.thought(text) :].strip() if isinstance(codec, ThoughtfulCodec) else text

    def _place(self, pending: PendingCall) -> tuple[int, Break | Literal[""]]:
        """(segment of a call's turn, why it begins): the segment that it extends, if its end is still where it was."""
        extends = pending.extends
        if extends is not None and self._contexts[extends.segment].sampled[-1] is extends.last:
            return extends.segment, ""
        return len(self._contexts), self._why(pending.request)

    def _grow(
        self, pending: PendingCall, segment: int, sample: Sample, reply: Reply, calls: tuple[Call, ...]
    ) -> None:
        """Add a message to the known conversation of its segment, and what it answers to the turn before."""
        request, extends = pending.request, pending.extends
        keys = (*(message.key for message in request.messages), reply.message.key)
        ids = (*pending.sample_request.prompt_ids, *sample.ids)
        said = SampledMessage(
            len(keys), len(ids), tuple(sample.ids), sample.finish_reason, calls, reply.calls, len(self.turns)
        )
        earlier = ()
        if extends is not None:
            place = extends.context.sampled.index(extends.last)
            earlier = extends.context.sampled[: place + 1]
        grown = KnownContext(request.tools, keys, ids, (*earlier, said))
        if segment == len(self._contexts):
            self._contexts.append(grown)
            return
        assert extends is not None
        self._contexts[segment] = grown
        last = extends.last
        results = observed(request.messages[last.num_messages :], last.calls, last.agent_calls)
        self.turns[last.turn] = replace(self.turns[last.turn], observations=tuple(results))

    def _why(self, request: AgentRequest) -> Break | Literal[""]:
        """Why a segment begins: another agent, with another system prompt or tools, or another history of one."""
        systems = [[key for key in each.keys if key[0] == "system"] for each in self._contexts]
        mine = [message.key for message in request.messages if message.role == "system"]
        if not self._contexts:
            return ""
        is_known = any(
            system == mine and each.tools == request.tools
            for system, each in zip(systems, self._contexts, strict=True)
        )
        return "history" if is_known else "agent"


def _are_readable(calls: Sequence[Call]) -> bool:
    """True for calls that an agent can be told; else it reads the message as text."""
    return bool(calls) and all(call.tool and call.error_kind in READABLE for call in calls)


def _with_extras(call: Call, tools: Sequence[ToolSpec]) -> Call:
    """A call as a schema of others takes it: with arguments that it does not name, unless it says that there are none.
    Ours always say so."""
    schema = next((tool.parameters for tool in tools if tool.name == call.tool), {})
    if call.error_kind != "bad_arguments" or schema.get("additionalProperties") is False:
        return call
    known = {name: value for name, value in call.arguments.items() if name in schema.get("properties", {})}
    return call if mismatch(known, schema) else replace(call, error_kind=None)


def _told(calls: Sequence[Call], prefix: str) -> tuple[AgentCall, ...]:
    """The calls with ids that no other message of the attempt has."""
    return tuple(
        AgentCall(f"call_{prefix}_{index}", call.tool, json.dumps(call.arguments, ensure_ascii=False))
        for index, call in enumerate(calls)
    )


def _refuse(error: str) -> Any:
    raise RefusedError(f"the conversation cannot be rendered: {error}")
