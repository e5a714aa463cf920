"""Attempts made in waves: one batch of messages from the sampler, then their tools, again and again.

A wave holds whole groups, and a run falls into the same waves each time it is made, so a resumed run redoes exactly
one of them. Within a wave an attempt depends on its own seed and sandbox only; threads change when a tool runs,
never what it sees. With a quorum below 1 they also change which attempts stand in a batch together: a slow test then
holds up nobody else, and numerics that depend on the batch differ from run to run.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from typing import Any, Literal, TypeVar

from pydantic import Field

from woodshed.agent.attempt import AgentSettings, Attempt, Message
from woodshed.inference.sampler import Sample, Sampler
from woodshed.records import Group, Observation, Rollout, Task
from woodshed.sandbox import Sandbox, open_sandbox
from woodshed.settings import Settings
from woodshed.tasks.environment import sandbox_spec

Progress = Callable[[int, int, str], None]
Backend = Literal["bwrap", "subprocess"]
T = TypeVar("T")


class RolloutSettings(Settings):
    """How attempts are made together."""

    attempts: int = Field(default=4, ge=1)
    """Attempts at each task: the group that shares a baseline."""
    wave_rows: int = Field(default=24, ge=1)
    """Most attempts in flight; a wave holds as many whole groups as fit, at least one."""
    tool_threads: int = Field(default=2, ge=1)
    """Sandboxes that work at the same time."""
    quorum: float = Field(default=1.0, gt=0, le=1)
    """Share of the attempts in flight whose tools must be done before the next messages are drawn. 1 waits for all, and
    makes runs repeatable bit for bit; 0.5 lets a GPU draw while slow tests run. Below 1, attempts that have ended are
    judged while others are being made."""
    watch: bool = True
    """Keep which files each attempt reads, writes and runs (`Rollout.accesses`); costs some 3% of a test run."""
    sandbox_retries: int = Field(default=2, ge=0)
    """How often an attempt whose sandbox was lost is made afresh."""


@dataclass(frozen=True, eq=False)
class Seat:
    """One attempt to be made, however often its sandbox is lost."""

    task: Task
    attempt: int
    rollout_id: str


def collect(
    sampler: Sampler,
    tasks: Sequence[Task],
    settings: RolloutSettings,
    agent_settings: AgentSettings,
    *,
    phase: str,
    step: int,
    seed: int,
    attempts: int | None = None,
    progress: Progress | None = None,
    on_rollout: Callable[[Rollout], None] | None = None,
    backend: Backend = "bwrap",
    unsafe: bool = False,
) -> list[Group]:
    """Make `attempts` attempts (None: settings.attempts) at each task, in the order of the tasks.

    A wave's attempts do not depend on the waves before it. `on_rollout` receives each rollout as it ends, in no fixed
    order. One that ended with "sandbox_lost" lost its sandbox in every retry: not to be trained on.

    Raises:
        SandboxError: a sandbox could not be opened.
        SamplerError: the sampler failed. Every sandbox is closed, whatever is raised.
    """
    attempts = settings.attempts if attempts is None else attempts
    groups: list[Group] = []
    for wave in waves(tasks, attempts, settings.wave_rows):
        seats = [Seat(task, n, f"{phase}-{step}-{task.name}-{n}") for task in wave for n in range(attempts)]
        before = len(groups) * attempts

        def report(done: int, before: int = before) -> None:
            if progress:
                progress(before + done, len(tasks) * attempts, "attempts")

        with Workshop(settings, backend, unsafe) as workshop:
            rollouts = _wave(sampler, seats, settings, agent_settings, seed, workshop, report, on_rollout)
        groups += [
            Group(task.id, tuple(rollouts[n * attempts : (n + 1) * attempts])) for n, task in enumerate(wave)
        ]
    return groups


def waves(tasks: Sequence[Task], attempts: int, rows: int) -> list[Sequence[Task]]:
    """The tasks of each wave: as many whole groups as fit in `rows` attempts, at least one."""
    size = max(1, rows // max(1, attempts))
    return [tasks[first : first + size] for first in range(0, len(tasks), size)]


def _wave(
    sampler: Sampler,
    seats: Sequence[Seat],
    settings: RolloutSettings,
    agent_settings: AgentSettings,
    seed: int,
    workshop: Workshop,
    report: Callable[[int], None],
    on_rollout: Callable[[Rollout], None] | None,
) -> list[Rollout]:
    """Rounds until every seat has its rollout; rollouts in the order of the seats."""

    def attempt_in(seat: Seat, sandbox: Sandbox) -> Attempt:
        return Attempt(
            seat.task,
            sandbox,
            sampler.renderer,
            agent_settings,
            rollout_id=seat.rollout_id,
            context_length=sampler.context_length,
            attempt=seat.attempt,
            seed=seed,
        )

    sampler.flush()  # a wave made again after a kill must come out the same, whatever was cached before it
    rollouts: dict[Seat, Rollout] = {}
    lost = dict.fromkeys(seats, 0)
    alive: dict[Seat, Attempt] = {}
    at_work: dict[Attempt, Begun] = {}
    waiting = list(seats)
    while waiting or alive:
        alive |= zip(waiting, map(attempt_in, waiting, workshop.map(workshop.open, waiting)), strict=True)
        if ready := [attempt for attempt in alive.values() if attempt not in at_work]:
            at_work |= _draw(sampler, ready, workshop)
        _await(at_work, len(alive) - max(1, math.ceil(settings.quorum * len(alive))))
        ended = [seat for seat, attempt in alive.items() if attempt.done and attempt not in at_work]
        waiting = []
        for seat, rollout in zip(
            ended, workshop.map(Attempt.finish, [alive.pop(s) for s in ended]), strict=True
        ):
            if rollout.ended == "sandbox_lost" and lost[seat] < settings.sandbox_retries:
                lost[seat] += 1
                waiting.append(seat)
            else:
                rollouts[seat] = rollout
                if on_rollout:
                    on_rollout(rollout)
        report(len(rollouts))
    return [rollouts[seat] for seat in seats]


@dataclass(frozen=True)
class Begun:
    """A message whose calls are being carried out."""

    sample: Sample
    message: Message
    sample_s: float
    observed: Future[list[Observation] | None]


def _draw(sampler: Sampler, attempts: Sequence[Attempt], workshop: Workshop) -> dict[Attempt, Begun]:
    """One message from everybody, whose calls begin."""
    started = time.perf_counter()
    samples = sampler.sample([attempt.request() for attempt in attempts])
    share_s = (time.perf_counter() - started) / len(attempts)
    messages = [attempt.read(sample) for attempt, sample in zip(attempts, samples, strict=True)]
    return {
        attempt: Begun(sample, message, share_s, workshop.submit(attempt.execute, message))
        for attempt, sample, message in zip(attempts, samples, messages, strict=True)
    }


def _await(at_work: dict[Attempt, Begun], most: int) -> None:
    """Record what is done until at most so many are at work."""
    while len(at_work) > most:
        wait((turn.observed for turn in at_work.values()), return_when=FIRST_COMPLETED)
        for attempt, turn in [(a, t) for a, t in at_work.items() if t.observed.done()]:
            attempt.record(turn.sample, turn.message, turn.observed.result(), sample_s=turn.sample_s)
            del at_work[attempt]


class Workshop:
    """Threads and the sandboxes of one wave. Leaving it closes every sandbox, also in the middle of a command."""

    def __init__(self, settings: RolloutSettings, backend: Backend, unsafe: bool) -> None:
        self._threads = ThreadPoolExecutor(settings.tool_threads, thread_name_prefix="tools")
        self._watch = settings.watch and backend == "bwrap"
        self._opened: list[Sandbox] = []
        self._backend: Backend = backend
        self._unsafe = unsafe

    def open(self, seat: Seat) -> Sandbox:
        sandbox = open_sandbox(
            sandbox_spec(seat.task, watch=self._watch), backend=self._backend, unsafe=self._unsafe
        )
        self._opened.append(sandbox)
        return sandbox

    def submit(self, function: Callable[..., T], *given: Any) -> Future[T]:
        """Begin something; its result, or what it raised, is in the future."""
        return self._threads.submit(function, *given)

    def map(self, function: Callable[..., T], *items: Iterable[Any]) -> list[T]:
        """Results in the order of the items, whichever thread is first."""
        return list(self._threads.map(function, *items))

    def __enter__(self) -> Workshop:
        return self

    def __exit__(self, *_: object) -> None:
        self._threads.shutdown(wait=False, cancel_futures=True)
        self._close()  # ends commands that still run
        self._threads.shutdown(wait=True)
        self._close()  # what a thread opened meanwhile

    def _close(self) -> None:
        for sandbox in self._opened:
            sandbox.close()
