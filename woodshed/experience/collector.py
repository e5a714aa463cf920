"""Attempts made in waves: one batch of messages from the sampler, then their tools, again and again.

A wave holds whole groups, and a run falls into the same waves each time it is made, so a resumed run redoes exactly
one of them. Within a wave an attempt depends on its own seed and sandbox only; threads change when a tool runs,
never what it sees. With a quorum below 1 they also change which attempts stand in a batch together: a slow test then
holds up nobody else, and numerics that depend on the batch differ from run to run.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from typing import Any, Literal, TypeVar

from pydantic import Field

from woodshed.agent.attempt import AgentSettings, Attempt, Message
from woodshed.engines.sampler import Sample, Sampler
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

        def ended(rollout: Rollout, done: int, before: int = before) -> None:
            if on_rollout:
                on_rollout(rollout)
            if progress:
                progress(before + done, len(tasks) * attempts, "attempts")

        def begin(seat: Seat, sandbox: Sandbox) -> Attempt:
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
        with Workshop(settings, backend, unsafe) as workshop:
            rollouts = Wave(sampler, settings, workshop, begin, ended).run(seats)
        groups += [
            Group(task.id, tuple(rollouts[n * attempts : (n + 1) * attempts])) for n, task in enumerate(wave)
        ]
    return groups


def waves(tasks: Sequence[Task], attempts: int, rows: int) -> list[Sequence[Task]]:
    """The tasks of each wave: as many whole groups as fit in `rows` attempts, at least one."""
    size = max(1, rows // max(1, attempts))
    return [tasks[first : first + size] for first in range(0, len(tasks), size)]


@dataclass(frozen=True)
class Begun:
    """A message whose calls are being carried out."""

    sample: Sample
    message: Message
    sample_s: float
    observed: Future[list[Observation] | None]


class Wave:
    """Attempts in flight: who can go on, whose tools are at work, whose patch is being taken."""

    def __init__(
        self,
        sampler: Sampler,
        settings: RolloutSettings,
        workshop: Workshop,
        begin: Callable[[Seat, Sandbox], Attempt],
        ended: Callable[[Rollout, int], None],
    ) -> None:
        self.sampler, self.settings, self.workshop = sampler, settings, workshop
        self.begin, self.ended = begin, ended
        self.alive: dict[Seat, Attempt] = {}
        self.at_work: dict[Attempt, Begun] = {}
        self.finishing: dict[Seat, Future[Rollout]] = {}
        self.lost: dict[Seat, int] = {}
        self.rollouts: dict[Seat, Rollout] = {}

    def run(self, seats: Sequence[Seat]) -> list[Rollout]:
        """Rounds until every seat has its rollout; rollouts in the order of the seats."""
        order, waiting = {seat: n for n, seat in enumerate(seats)}, list(seats)
        while waiting or self.alive or self.finishing:
            opened = self.workshop.map(self.workshop.open, waiting)
            self.alive |= zip(waiting, map(self.begin, waiting, opened), strict=True)
            if ready := [attempt for attempt in self.alive.values() if attempt not in self.at_work]:
                self._draw(ready)
            waiting = sorted(self._settle(), key=order.__getitem__)
        return [self.rollouts[seat] for seat in seats]

    def _draw(self, attempts: Sequence[Attempt]) -> None:
        """One message from everybody, whose calls begin."""
        started = time.perf_counter()
        samples = self.sampler.sample([attempt.request() for attempt in attempts])
        share_s = (time.perf_counter() - started) / len(attempts)
        messages = [attempt.read(sample) for attempt, sample in zip(attempts, samples, strict=True)]
        for attempt, sample, message in zip(attempts, samples, messages, strict=True):
            observed = self.workshop.submit(attempt.execute, message)
            self.at_work[attempt] = Begun(sample, message, share_s, observed)

    def _settle(self) -> list[Seat]:
        """Wait until the quorum can go on; seats whose sandbox was lost, to be taken again."""
        again: list[Seat] = []
        while True:
            again += self._take()
            if self.settings.quorum == 1:
                enough = not (self.at_work or self.finishing)
            elif self.alive:
                enough = len(self.alive) - len(self.at_work) >= self.settings.quorum * len(self.alive)
            else:
                enough = bool(again) or not self.finishing
            if enough:
                return again
            running: list[Future[Any]] = [turn.observed for turn in self.at_work.values()]
            wait([*running, *self.finishing.values()], return_when=FIRST_COMPLETED)

    def _take(self) -> list[Seat]:
        """What is done by now; seats whose sandbox was lost."""
        for attempt, turn in [(a, t) for a, t in self.at_work.items() if t.observed.done()]:
            attempt.record(turn.sample, turn.message, turn.observed.result(), sample_s=turn.sample_s)
            del self.at_work[attempt]
        for seat in [s for s, attempt in self.alive.items() if attempt.done and attempt not in self.at_work]:
            self.finishing[seat] = self.workshop.submit(self.alive.pop(seat).finish)
        again = []
        for seat in [seat for seat, future in self.finishing.items() if future.done()]:
            rollout = self.finishing.pop(seat).result()
            lost = self.lost.get(seat, 0)
            if rollout.ended == "sandbox_lost" and lost < self.settings.sandbox_retries:
                self.lost[seat] = lost + 1
                again.append(seat)
            else:
                self.rollouts[seat] = rollout
                self.ended(rollout, len(self.rollouts))
        return again


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
