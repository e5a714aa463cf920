"""One attempt at one task, advanced by its caller so that many of them can run together.

    attempt = Attempt(task, sandbox, renderer, settings, ...)
    while not attempt.done:
        attempt.act(engine.submit(attempt.request()).result())
    rollout = attempt.finish()

`act` is three steps, for a caller that has many attempts: `read` the sampled message (tokenizer: one thread only),
`execute` its calls (sandbox: any thread), `record` the turn (tokenizer again). The sampled ids are kept as they are and
never made again from text. A faulty turn stays in the rollout and is answered by an observation, because targeted
feedback trains on such turns.
"""

from __future__ import annotations

import copy
import hashlib
import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import ClassVar, Literal, TypeVar

from pydantic import Field, field_validator

from woodshed.agent import access, command_line, summaries, todo, tools
from woodshed.agent.effects import effect
from woodshed.agent.patch import extract
from woodshed.agent.prompt import system_prompt, user_prompt
from woodshed.agent.tools import ToolSettings
from woodshed.boundary import contained
from woodshed.engines import expert_log
from woodshed.engines.engine import Engine, Sample, SampleRequest, sample_all
from woodshed.records import (
    CALL_FAULTS,
    Access,
    Call,
    Ended,
    ErrorKind,
    Observation,
    Patch,
    RecipeError,
    Rollout,
    SandboxError,
    Task,
    Turn,
)
from woodshed.sandbox import BUBBLEWRAP, Sandbox, SandboxProvider, Touch
from woodshed.settings import Settings
from woodshed.tasks import sandbox_spec, workspace
from woodshed.tokens.conversation import Conversation
from woodshed.tokens.renderer import Renderer
from woodshed.tokens.schema import mend


class AgentSettings(Settings):
    """The budgets of one attempt."""

    max_turns: int = Field(default=8, ge=1)
    """Largest number of messages that the policy may write."""
    max_calls: int = Field(default=1, ge=1)
    """Largest number of calls that are executed per message; the system prompt states it."""
    turn_tokens: int = Field(default=256, ge=1)
    """Largest number of tokens in one message."""
    rollout_tokens: int = Field(default=1024, ge=1)
    """Largest number of sampled tokens in an attempt."""
    max_errors: ClassVar[int] = 4
    """Faulty messages in a row that end the attempt."""
    timeout_s: float = Field(default=1800.0, gt=0)
    """Wall-clock limit in seconds, waiting for other attempts included. A safety net: it does not end the same attempts
    in every run."""
    summary_tokens: int = Field(default=0, ge=0)
    """Tokens of context at which the policy is asked for a summary, with which its next segment opens; earlier where
    the context would be full. 0: a full context ends the attempt."""
    harness: str = ""
    """Command line of an agent of others that makes the attempts in place of ours, with {instruction}, {base_url},
    {api_key} and {model}; max_turns, turn_tokens, rollout_tokens and timeout_s limit what it may ask of the policy."""
    system_prompt: Path | None = None
    """File with the system prompt, in place of Woodshed's own; the forms of the tools are added."""
    tools: ToolSettings = ToolSettings()
    """Result of a call."""

    @field_validator("harness")
    @classmethod
    def _can_be_split(cls, harness: str) -> str:
        if harness:
            command_line.words(harness)
        return harness

    @property
    def rules(self) -> str:
        """The system prompt.

        Raises:
            RecipeError: its file cannot be read.
        """
        return system_prompt(max_calls=self.max_calls, path=self.system_prompt)


T = TypeVar("T")

FAILED = "an earlier call failed"
"""Why what follows in the message is not executed, except for reads, which each other's failures do not concern."""
RETRIES = 2
"""Fresh sandboxes that an attempt gets when it has lost one; what was lost in all of them was lost by the policy."""
PATCH_FILE_BYTES = 1 << 20
"""Size above which a changed file is left out of the patch."""


@dataclass(frozen=True)
class Message:
    """A parsed message: its calls in order, and the first fault of parsing."""

    text: str
    calls: tuple[Call, ...]
    error_kind: ErrorKind | None


class Attempt:
    """One attempt at one task in its own sandbox, which it closes when it finishes.

    Where the sandbox is lost, `reopen` opens another one, in which all calls so far are executed again. Nothing is
    sampled again: else a policy that fears a bad end could end its sandbox, and try its luck afresh. Who is to blame
    decides what a loss means: where the calls lose every sandbox and a sandbox without calls holds, the policy is.

    Raises:
        RecipeError: the task's prompt leaves no room for a turn in `context_length` tokens.
    """

    reopen: Callable[[], Sandbox] | None = None
    """Opens another sandbox like the first; without it a lost sandbox ends the attempt, and nobody is to blame."""
    is_strict: bool = True
    """Refuse every argument that does not fit its schema, as in training and evaluation, so that the policy learns to
    call exactly; otherwise mend what is clear, for people who use it."""

    def __init__(
        self,
        task: Task,
        sandbox: Sandbox,
        renderer: Renderer,
        settings: AgentSettings,
        *,
        rollout_id: str,
        context_length: int = 1 << 30,
        attempt: int = 0,
        seed: int = 0,
    ) -> None:
        self.task, self.sandbox, self.renderer, self.settings = task, sandbox, renderer, settings
        self.rollout_id, self.attempt, self.seed = rollout_id, attempt, seed
        self.context_length = context_length
        self.tools = settings.tools.specs
        self.turns: list[Turn] = []
        self.accesses: list[Access] = []
        self._summaries: list[str] = []
        self._sums_up = False
        self.ended: Ended | None = None
        self._loss: Literal["sandbox_broken", "sandbox_lost"] | None = None
        self._started = time.monotonic()
        self._conversation = Conversation(renderer, settings.rules, user_prompt(task), self.tools)
        if self._room() < settings.turn_tokens:
            raise RecipeError(
                f"the prompt of task {task.name!r} takes {len(self._conversation.prompt)} of {context_length} tokens "
                f"of context and a turn up to {settings.turn_tokens}; lower agent.turn_tokens or drop the task"
            )

    @property
    def done(self) -> bool:
        return self.ended is not None

    @property
    def sampled_tokens(self) -> int:
        """Tokens that the policy has sampled so far."""
        return sum(len(turn.sampled_ids) for turn in self.turns)

    def request(self) -> SampleRequest:
        """The prompt of the next turn: every token of its segment so far."""
        left = self.settings.rollout_tokens - self.sampled_tokens
        return SampleRequest(
            prompt_ids=tuple(self._conversation.prompt),
            max_tokens=min(self.settings.turn_tokens, left),
            seed=turn_seed(self.seed, self.rollout_id, len(self.turns)),
            group=self.task.id,
        )

    def act(self, sample: Sample, *, sample_s: float = 0.0, oracle: str = "") -> None:
        """Read the message, execute its calls, record the turn."""
        message = self.read(sample)
        self.record(sample, message, self.execute(message), sample_s=sample_s, oracle=oracle)

    def read(self, sample: Sample) -> Message:
        """The calls in a sampled message; none of one that was cut at its token limit, or that is a summary."""
        text = self.renderer.decode(sample.ids)
        if sample.finish_reason == "length" or self._sums_up:
            return Message(text, (), "truncated" if sample.finish_reason == "length" else None)
        parse = self.renderer.codec.parse
        message = contained(
            lambda: Message(text, *parse(text, self.tools)[1:]), lambda error: _unread(text, error)
        )
        return message if self.is_strict else self._leniently(message)

    def _leniently(self, message: Message) -> Message:
        """The message with those arguments mended whose meaning is clear: "3" for 3, a name that no tool knows."""
        known = {spec.name: spec.parameters for spec in self.tools}
        calls = []
        for call in message.calls:
            mended = mend(call.arguments, known[call.tool]) if call.error_kind == "bad_arguments" else None
            calls.append(call if mended is None else replace(call, arguments=mended, error_kind=None))
        kind = next((call.error_kind for call in calls if call.error_kind), None)
        return replace(message, calls=tuple(calls), error_kind=kind if calls else message.error_kind)

    def execute(self, message: Message) -> list[Observation] | None:
        """One observation per call, in order, or one for a message without calls; None if the machine lost the
        sandbox."""
        done = self._despite_losses(lambda: self._perform(message))
        if done is None:
            broken = [Observation(call.id, "error: the call ended the sandbox") for call in message.calls]
            return broken if self._loss == "sandbox_broken" else None
        observations, touched = done
        turn_index, num_before = len(self.turns), len(self.accesses)
        self.accesses += access.accesses(touched, self.task, turn_index, before=num_before)
        return observations

    def _perform(self, message: Message) -> tuple[list[Observation], list[Touch]]:
        """(observations, files that the calls touched). Raises SandboxError."""
        if self._sums_up:
            return [], []
        if not message.calls:
            return [self._no_call(message.error_kind)], []
        observations: list[Observation] = []
        touched: list[Touch] = []
        limit, reason = self.settings.max_calls, ""
        for number, call in enumerate(message.calls):
            if number >= limit:
                text = f"error: not executed: at most {limit} call{'s' * (limit > 1)} in a message"
                observation = Observation(call.id, text, "too_many_calls")
            elif reason and not (effect(call).kind == "read" and reason == FAILED):
                observation = Observation(call.id, f"not executed: {reason}")
            elif call.error_kind is not None:
                observation = tools.refuse(call, self.renderer.codec, self.tools)
            else:
                observation = tools.run(call, self.sandbox, self.settings.tools)
                if observation.error_kind is None:
                    touched += access.by_tool(call, self.sandbox.workspace)
                touched += self.sandbox.touched()
            if observation.error_kind is not None:
                reason = reason or FAILED
            elif call.tool == "finish":
                reason = reason or "the work is finished"
            observations.append(observation)
        return observations, touched

    def _despite_losses(self, act: Callable[[], T]) -> T | None:
        """The result of `act`, in a fresh sandbox where this one is lost; None where all are, and `_loss` says why."""
        for retry in range(1 + (RETRIES if self.reopen else 0)):
            try:
                if retry:
                    self._restore()
                return act()
            except SandboxError:
                continue
        self._loss = "sandbox_broken" if self._holds_without_calls() else "sandbox_lost"
        return None

    def _restore(self) -> None:
        """Replace the sandbox by a fresh one in which the calls of all turns were executed. Raises SandboxError."""
        assert self.reopen is not None
        self.sandbox.close()
        self.sandbox = self.reopen()
        for turn in self.turns:
            self._perform(Message(turn.text, turn.calls, turn.error_kind))

    def _holds_without_calls(self) -> bool:
        """True if a sandbox can be opened now, and runs a command."""
        if self.reopen is None:
            return False
        try:
            with self.reopen() as sandbox:
                return sandbox.exec(["true"]).outcome == "ok"
        except SandboxError:
            return False

    def record(
        self,
        sample: Sample,
        message: Message,
        observations: Sequence[Observation] | None,
        *,
        sample_s: float = 0.0,
        oracle: str = "",
    ) -> None:
        """Append the turn, decide if the attempt has ended, and render the next prompt."""
        observed = tuple(observations or ())
        kinds = (message.error_kind, *(seen.error_kind for seen in observed))
        turn = Turn(
            context_ids=self._conversation.context.ids,
            opening=self._conversation.context.opening,
            sampled_ids=tuple(sample.ids),
            logps=tuple(sample.logps),
            versions=sample.versions,
            finish_reason=sample.finish_reason,
            text=message.text,
            calls=message.calls,
            observations=observed,
            error_kind=next((kind for kind in kinds if kind in CALL_FAULTS), None),
            sample_s=sample_s,
            tools_s=sum(seen.seconds for seen in observed),
            oracle=oracle,
            segment=self._conversation.segment,
            begins=self._conversation.begins,
            experts=expert_log.untold(
                sample.experts, [each for each in self.turns if each.segment == self._conversation.segment]
            ),
        )
        self.turns.append(turn)
        self.ended = "sandbox_lost" if observations is None else self._loss or self._why_ended()
        if self.ended is None:
            self.ended = self._open_segment(turn) if self._sums_up else self._go_on(turn)

    def _go_on(self, turn: Turn) -> Ended | None:
        """Render the next prompt, with the question for a summary where it is due; why the attempt ends, or None."""
        said = (turn.sampled_ids, turn.finish_reason)
        before = self._conversation.copy()
        self._conversation.add(*said, turn.observations, turn.calls)
        if self._is_full():
            if self._summaries and self._turns_since_summary() < summaries.MIN_TURNS:
                return "context_full"
            self.turns[-1] = replace(turn, observations=summaries.asked(turn.observations))
            before.add(*said, self.turns[-1].observations, turn.calls)
            self._conversation, self._sums_up = before, True
        return "context_full" if self._room() < self.settings.turn_tokens else None

    def _open_segment(self, turn: Turn) -> Ended | None:
        """Begin the next segment with the summary that a turn wrote; why the attempt ends, or None."""
        self._summaries.append(self.renderer.spoken(turn.text))
        self._sums_up = False
        state = summaries.CarriedState(
            tuple(self._summaries),
            todo.current(self.turns),
            self.settings.rollout_tokens - self.sampled_tokens,
            self.settings.max_turns - len(self.turns),
        )
        user = state.opening(user_prompt(self.task))
        self._conversation.restart(self.settings.rules, user, self.tools)
        return "context_full" if self._is_full() or self._room() < self.settings.turn_tokens else None

    def _is_full(self) -> bool:
        """True where the policy should sum up before it goes on."""
        settings = self.settings
        limit = summaries.trigger(settings.summary_tokens, self.context_length, settings.turn_tokens)
        return settings.summary_tokens > 0 and len(self._conversation.prompt) >= limit

    def _turns_since_summary(self) -> int:
        indices = (n for n, turn in enumerate(self.turns) if turn.begins == "summary")
        return len(self.turns) - max(indices, default=0)

    def replay(self, turns: Sequence[Turn], following: Turn) -> None:
        """Execute the calls of an earlier attempt's first turns, up to its state before the turn `following`.

        Raises:
            SandboxError: the sandbox was lost; it is closed.
        """
        for turn in turns:
            if self.execute(Message(turn.text, turn.calls, turn.error_kind)) is None:
                self.sandbox.close()
                raise SandboxError(f"the sandbox was lost while {self.rollout_id} was replayed")
        self.turns = list(turns)
        self._conversation.resume([turn for turn in turns if turn.segment == following.segment], following)

    def fork(self) -> Attempt:
        """A copy of the attempt, in a fork of its sandbox."""
        twin = copy.copy(self)
        twin.sandbox = self.sandbox.fork()
        twin.turns, twin.accesses = list(self.turns), list(self.accesses)
        twin._summaries = list(self._summaries)
        twin._conversation = self._conversation.copy()
        return twin

    def finish(self) -> Rollout:
        """The attempt as a record, with its patch. Closes the sandbox."""
        patch, ended = None, self.ended or "sandbox_lost"
        try:
            if ended not in ("sandbox_lost", "sandbox_broken"):
                patch = self._despite_losses(self._extract)
        finally:
            self.sandbox.close()
        return Rollout(
            id=self.rollout_id,
            task_id=self.task.id,
            task_name=self.task.name,
            attempt=self.attempt,
            seed=self.seed,
            turns=tuple(self.turns),
            patch=patch or Patch({}),
            ended=self._loss or ended,
            seconds=time.monotonic() - self._started,
            accesses=tuple(self.accesses),
        )

    def _extract(self) -> Patch:
        """The changes of the workspace. Raises SandboxError."""
        return contained(
            lambda: extract(
                self.sandbox,
                workspace(self.task),
                max_bytes=PATCH_FILE_BYTES,
                allowed=self.task.allowed_paths,
            ),
            lambda error: Patch({}, {".": f"the workspace cannot be read: {error}"}),
        )

    def _room(self) -> int:
        return self.context_length - len(self._conversation.prompt)

    def _no_call(self, error_kind: ErrorKind | None) -> Observation:
        if error_kind == "truncated":
            text = "error: the message was cut at its token limit and not acted on; be shorter"
        else:
            text = f"error: no call in the message; tools: {', '.join(spec.name for spec in self.tools)}"
        return Observation("", text, error_kind)

    def _why_ended(self) -> Ended | None:
        settings, turn = self.settings, self.turns[-1]
        if any(
            c.tool == "finish" and o.text == "finished"
            for c, o in zip(turn.calls, turn.observations, strict=False)
        ):
            return "finished"
        recent = self.turns[-settings.max_errors :]
        if len(recent) == settings.max_errors and all(t.error_kind in CALL_FAULTS for t in recent):
            return "max_errors"
        if len(self.turns) >= settings.max_turns:
            return "max_turns"
        if self.sampled_tokens >= settings.rollout_tokens:
            return "max_tokens"
        return "timeout" if time.monotonic() - self._started > settings.timeout_s else None


def _unread(text: str, error: str) -> Message:
    """A message on which a codec of the user's own broke: no call of it can be read."""
    warnings.warn(f"the codec could not read a message: {error}", stacklevel=2)
    return Message(text, (), "unparseable")


def run(
    task: Task,
    engine: Engine,
    settings: AgentSettings,
    *,
    rollout_id: str = "",
    attempt: int = 0,
    seed: int = 0,
    sandboxes: SandboxProvider = BUBBLEWRAP,
    watch: bool = True,
) -> Rollout:
    """One attempt from start to end.

    Raises:
        SandboxError: the sandbox could not be opened.
        SamplerError: as the engine, or a message that is not token-exact.
        RecipeError: the task's prompt does not fit.
    """
    spec = sandbox_spec(task, watch=watch and sandboxes.watches)
    trial = Attempt(
        task,
        sandboxes.open(spec),
        engine.renderer,
        settings,
        rollout_id=rollout_id or f"run-0-{task.name}-{attempt}",
        context_length=engine.context_length,
        attempt=attempt,
        seed=seed,
    )
    trial.reopen = lambda: sandboxes.open(spec)
    try:
        while not trial.done:
            trial.act(sample_all(engine, [trial.request()])[0])
        return trial.finish()
    finally:
        trial.sandbox.close()


def turn_seed(seed: int, rollout_id: str, turn: int) -> int:
    """Seed of one turn (63 bits), which depends on neither the process nor the order of work."""
    digest = hashlib.sha256(f"{seed}/{rollout_id}/{turn}".encode()).digest()
    return int.from_bytes(digest[:8], "big") >> 1
