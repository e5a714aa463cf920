"""One attempt by an unmodified agent of others: its command runs in the sandbox, its model calls reach the gateway."""

from __future__ import annotations

import time
from dataclasses import dataclass, replace
from pathlib import Path

from woodshed.agent import access
from woodshed.agent.attempt import PATCH_FILE_BYTES, AgentSettings
from woodshed.agent.command_line import filled, shown, words
from woodshed.agent.patch import extract
from woodshed.boundary import contained
from woodshed.gateway import forward
from woodshed.gateway.recording import Quota, Recording
from woodshed.gateway.server import MODEL, Gateway
from woodshed.records import Access, Ended, Patch, RecipeError, Rollout, SandboxError, Task
from woodshed.sandbox import Result, Sandbox, SandboxProvider, SandboxSpec, Touch
from woodshed.tasks import sandbox_spec, workspace

PLACE = "/opt/woodshed"
"""Folder in the sandbox with the socket and the program that leads to it."""
PORT = 4141
"""Loopback port in the sandbox, which has a network of its own."""
OUTPUT_BYTES = 1 << 16


@dataclass(frozen=True)
class Harness:
    """Attempts of one kind of agent against one gateway."""

    gateway: Gateway
    settings: AgentSettings
    sandboxes: SandboxProvider
    watch: bool = False

    def attempt(self, task: Task, rollout_id: str, *, attempt: int = 0, seed: int = 0) -> Rollout:
        """Let the agent work on a task to its end; what it left in the workspace is its patch.

        Raises:
            RecipeError: the agent ended without a model call, so its command line is wrong.
            SandboxError: no sandbox can be opened.
            SamplerError: the engine failed.
        """
        engine, started = self.gateway.engine, time.monotonic()
        recording = Recording(
            rollout_id, engine.renderer, engine.context_length, quota_of(self.settings), seed=seed
        )
        spec = self.spec(task)
        with self.sandboxes.open(spec) as sandbox:
            result, key = self._work(task, sandbox, recording)
            self.gateway.dismiss(key)
            if recording.failure is not None:
                raise recording.failure
            if not recording.turns and result.outcome != "sandbox_lost":
                raise RecipeError(f"agent.harness made no model call: {_said(result)}")
            ended = self._ended(recording, result, spec)
            patch, touched = _left(task, sandbox) if ended != "sandbox_broken" else (Patch({}), ())
        turns = tuple(recording.turns)
        return Rollout(
            id=rollout_id,
            task_id=task.id,
            task_name=task.name,
            attempt=attempt,
            seed=seed,
            turns=turns,
            patch=patch,
            ended=ended,
            seconds=time.monotonic() - started,
            accesses=self._accesses(task, touched, len(turns) - 1),
            tools=tuple(recording.tools),
        )

    def spec(self, task: Task) -> SandboxSpec:
        """The task's sandbox with the agent and the way to the gateway in it."""
        spec = sandbox_spec(task, watch=self.watch and self.sandboxes.watches)
        binds = {f"{PLACE}/gateway": self.gateway.folder, f"{PLACE}/forward.py": Path(forward.__file__)}
        return replace(spec, binds={**spec.binds, **shown(words(self.settings.harness)), **binds})

    def _work(self, task: Task, sandbox: Sandbox, recording: Recording) -> tuple[Result, str]:
        key = self.gateway.admit(recording)
        address = f"http://127.0.0.1:{PORT}"
        values = {
            "instruction": task.instruction.strip(),
            "base_url": f"{address}/v1",
            "api_key": key,
            "model": MODEL,
        }
        command = [filled(word, values) for word in words(self.settings.harness)]
        socket = f"{PLACE}/gateway/{self.gateway.socket.name}"
        try:
            result = sandbox.exec(
                ["/env/bin/python", "-I", "-S", f"{PLACE}/forward.py", socket, str(PORT), *command],
                env=client_environment(address, key),
                timeout_s=self.settings.timeout_s,
                max_output=OUTPUT_BYTES,
            )
        except BaseException:
            self.gateway.dismiss(key)
            raise
        return result, key

    def _ended(self, recording: Recording, result: Result, spec: SandboxSpec) -> Ended:
        """The ending of the attempt. Where a sandbox holds that nobody works in, a lost one was lost by the policy."""
        if result.outcome == "sandbox_lost":
            return "sandbox_broken" if self._holds(spec) else "sandbox_lost"
        return recording.ended or ("timeout" if result.outcome == "timeout" else "finished")

    def _holds(self, spec: SandboxSpec) -> bool:
        try:
            with self.sandboxes.open(spec) as sandbox:
                return sandbox.exec(["true"]).outcome == "ok"
        except SandboxError:
            return False

    def _accesses(self, task: Task, touched: tuple[Touch, ...], last_turn: int) -> tuple[Access, ...]:
        """Files that the agent's commands touched, all at the last turn, as one command made them; not its own."""
        own = [Path(path) for path in (*shown(words(self.settings.harness)), PLACE)]
        outside = [
            touch for touch in touched if not any(Path(touch.path).is_relative_to(path) for path in own)
        ]
        return tuple(access.accesses(outside, task, max(0, last_turn)))


def client_environment(address: str, key: str) -> dict[str, str]:
    """Variables by which clients of OpenAI and Anthropic find the gateway."""
    return {
        "OPENAI_BASE_URL": f"{address}/v1",
        "OPENAI_API_BASE": f"{address}/v1",
        "OPENAI_API_KEY": key,
        "ANTHROPIC_BASE_URL": address,
        "ANTHROPIC_API_KEY": key,
    }


def quota_of(settings: AgentSettings) -> Quota:
    """The budgets of our own agent, as those of a key."""
    return Quota(settings.max_turns, settings.turn_tokens, settings.rollout_tokens, settings.timeout_s)


def _left(task: Task, sandbox: Sandbox) -> tuple[Patch, tuple[Touch, ...]]:
    """(changes of the workspace, files that were touched). Raises SandboxError."""

    def take() -> Patch:
        return extract(sandbox, workspace(task), max_bytes=PATCH_FILE_BYTES, allowed=task.allowed_paths)

    patch = contained(take, lambda error: Patch({}, {".": f"the workspace cannot be read: {error}"}))
    return patch, tuple(sandbox.touched())


def _said(result: Result) -> str:
    """The ending of a command, with the end of what it printed."""
    printed = (result.stderr or result.stdout).decode(errors="replace").strip()[-600:]
    return f"it ended with {result.outcome if result.exit_code is None else result.exit_code}, and said {printed!r}"
