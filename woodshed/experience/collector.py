"""From tasks to experience: attempts in flight, verdicts and flags, each kept in the run folder when it is done.

An attempt goes on as soon as its own message or tool is done. It depends on its own seed and sandbox only; threads
change when a tool runs, never what it sees. But where an engine's numerics depend on the batch, which attempts stand in
a batch together matters in the last digit. With `repeatable`, attempts go in rounds, a message from everybody and then
everybody's tools, and in waves of whole groups, so that the same seeds give the same bits, also after a kill.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass, field
from queue import Empty, SimpleQueue
from typing import TYPE_CHECKING, Any

from woodshed.agent.attempt import AgentSettings, Attempt, Message
from woodshed.engines.engine import Engine, Sample, exact
from woodshed.engines.shared_time import SharedTime
from woodshed.experience.journal import Journal, equal
from woodshed.experience.occasion import Experience, HarnessSettings, Occasion, RolloutSettings
from woodshed.grading import Judging
from woodshed.monitors import flag_policy
from woodshed.records import Flag, Group, Observation, Rollout, Task, Turn, Verdict
from woodshed.runs.folder import RunDir
from woodshed.sandbox import BUBBLEWRAP, Revocable, Sandbox, SandboxProvider
from woodshed.tasks.environment import sandbox_spec
from woodshed.tokens.renderer import Renderer

if TYPE_CHECKING:
    from woodshed.gateway.harness import Harness

Progress = Callable[[int, int, str], None]


def collect(
    run: RunDir,
    engine: Engine,
    tasks: Sequence[Task],
    settings: HarnessSettings,
    occasion: Occasion,
    *,
    progress: Progress | None = None,
) -> Experience:
    """Attempts at the tasks, verdicts and flags. Parts that the run folder holds are not made again.

    Raises:
        SandboxError, SamplerError: the machine or the engine failed. Finished parts are kept.
        RunError: the run folder cannot be written.
    """
    with Judging(tasks, settings.grading, settings.sandbox.create()) as judging:
        return _Collection(run, engine, tasks, settings, occasion, judging, progress).result()


@dataclass(frozen=True)
class _Collection:
    """One call of `collect`."""

    run: RunDir
    engine: Engine
    tasks: Sequence[Task]
    settings: HarnessSettings
    occasion: Occasion
    judging: Judging
    progress: Progress | None

    def result(self) -> Experience:
        occasion, is_repeatable = self.occasion, self.settings.rollout.repeatable
        wanted = parts(self.tasks, occasion.attempts, self.settings.rollout)
        kept = [
            self.run.find("rollouts", Rollout, occasion.phase, occasion.step, part=n)
            for n in range(len(wanted))
        ]
        made: dict[int, Experience] = {}
        for number, rollouts in enumerate(kept):
            if rollouts is not None and is_repeatable:
                made[number] = self._judge(number, wanted[number], rollouts)
        missing = [number for number, rollouts in enumerate(kept) if rollouts is None]
        done = sum(len(rollouts) for rollouts in kept if rollouts is not None)
        with closing(self._collector(done).stream(wanted, occasion.attempts, missing)) as stream:
            for number, groups in stream:
                kept[number] = [rollout for group in groups for rollout in group.rollouts]
                self._keep(number, kept[number] or [])
                if is_repeatable:
                    made[number] = self._judge(number, wanted[number], kept[number] or [])
        for number, rollouts in enumerate(kept):
            if number not in made:
                made[number] = self._judge(number, wanted[number], rollouts or [])
        ordered = [made[number] for number in range(len(wanted))]
        return Experience(
            [group for part in ordered for group in part.groups],
            {name: verdict for part in ordered for name, verdict in part.verdicts.items()},
            [flag for part in ordered for flag in part.flags],
        )

    def _collector(self, done: int) -> Collector:
        occasion, total = self.occasion, len(self.tasks) * self.occasion.attempts

        def ended(rollout: Rollout) -> None:
            nonlocal done
            done += 1
            self._say(done, total, "attempts")
            if not self.settings.rollout.repeatable:
                self.judging.add(rollout)

        if done < total:
            self._say(done, total, "attempts")
        return Collector(
            self.engine,
            self.settings.rollout,
            self.settings.agent,
            seed=occasion.seed,
            prefix=f"{occasion.phase}-{occasion.step}",
            sandboxes=self.settings.sandbox.create(),
            on_rollout=ended,
        )

    def _keep(self, number: int, rollouts: Sequence[Rollout]) -> None:
        phase, step = self.occasion.phase, self.occasion.step
        self.run.append("rollouts", rollouts, phase, step, part=number)
        self.run.append(
            "token_texts", [token_texts(rollouts, self.engine.renderer)], phase, step, part=number
        )

    def _judge(self, number: int, tasks: Sequence[Task], rollouts: Sequence[Rollout]) -> Experience:
        """Verdicts and flags of one part."""
        phase, step = self.occasion.phase, self.occasion.step

        def judge() -> list[Verdict]:
            def judged(done: int, total: int, text: str) -> None:
                self._say(done, total, text)

            return list(self.judging.verdicts(rollouts, progress=judged).values())

        verdicts = {
            verdict.rollout_id: verdict
            for verdict in self.run.once("verdicts", Verdict, phase, step, judge, part=number)
        }

        def look() -> list[Flag]:
            return flag_policy.look(rollouts, self.tasks, verdicts, self.settings.monitors)

        flags = self.run.once("flags", Flag, phase, step, look, part=number)
        groups = [Group(task.id, tuple(r for r in rollouts if r.task_id == task.id)) for task in tasks]
        return Experience(groups, verdicts, flags)

    def _say(self, done: int, total: int, text: str) -> None:
        if self.progress:
            self.progress(done, total, f"{self.occasion.phase} {self.occasion.step}: {text}")


def token_texts(rollouts: Iterable[Rollout], renderer: Renderer) -> dict[str, str]:
    """The text of every token id that these attempts sampled; a stop token has none."""
    ids = sorted({i for rollout in rollouts for turn in rollout.turns for i in turn.sampled_ids})
    return {str(i): renderer.decode([i]) for i in ids}


# Attempts in flight -----------------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class Slot:
    """One attempt to be made."""

    number: int
    """Place among all attempts of the call."""
    task: Task
    attempt: int
    rollout_id: str


def waves(tasks: Sequence[Task], attempts: int, rows: int) -> list[Sequence[Task]]:
    """Tasks in lists of as many whole groups as fit in `rows` attempts, at least one."""
    size = max(1, rows // max(1, attempts))
    return [tasks[first : first + size] for first in range(0, len(tasks), size)]


def parts(tasks: Sequence[Task], attempts: int, settings: RolloutSettings) -> list[Sequence[Task]]:
    """Tasks that are kept and made again together: a wave where runs repeat bit for bit, otherwise one group."""
    return waves(tasks, attempts, settings.max_in_flight if settings.repeatable else 1)


@dataclass(frozen=True)
class Collector:
    """Makes attempts with one engine."""

    engine: Engine
    settings: RolloutSettings
    agent: AgentSettings
    seed: int = 0
    prefix: str = "train-0"
    """Before a rollout's task and number in its id: phase and step."""
    sandboxes: SandboxProvider = BUBBLEWRAP
    on_rollout: Callable[[Rollout], None] | None = None
    """Receives each rollout as it ends, in no fixed order."""

    def stream(
        self, parts: Sequence[Sequence[Task]], attempts: int, wanted: Sequence[int] | None = None
    ) -> Generator[tuple[int, list[Group]], None, None]:
        """Groups of `attempts` attempts, by part, as (number of the part, groups in the order of its tasks).

        Repeatable collectors make the parts one after another, in rounds; others all at once, and each comes as its
        last attempt ends. A rollout that ended with "sandbox_lost" lost every sandbox, as one would that does nothing.

        Args:
            wanted: numbers of the parts to be made; None makes all.

        Raises:
            SandboxError: a sandbox could not be opened.
            SamplerError: the engine failed. Every sandbox is closed, whatever is raised.
        """
        chosen = range(len(parts)) if wanted is None else wanted
        together = [[number] for number in chosen] if self.settings.repeatable else [list(chosen)]
        for numbers in together:
            self.engine.flush()  # a wave made again after a kill must come out the same, whatever was cached before
            slots = self._slots([task for number in numbers for task in parts[number]], attempts)
            waiting = {number: len(parts[number]) * attempts for number in numbers}
            part_of = dict(zip(slots, [n for n in numbers for _ in range(waiting[n])], strict=True))
            made: dict[Slot, Rollout] = {}
            with (
                SandboxPool(self) as pool,
                self.harness(pool) as harness,
                InFlight(self, pool, harness) as flight,
            ):
                for slot, rollout in flight.run(slots):
                    made[slot] = rollout
                    number = part_of[slot]
                    waiting[number] -= 1
                    if not waiting[number]:
                        mine = [made.pop(s) for s in slots if part_of[s] == number]
                        yield number, _groups(parts[number], mine, attempts)

    def collect(self, tasks: Sequence[Task], attempts: int | None = None) -> list[Group]:
        """All groups, in the order of the tasks.

        Raises:
            SandboxError, SamplerError: as `stream`.
        """
        attempts = self.settings.attempts if attempts is None else attempts
        found = dict(self.stream(parts(tasks, attempts, self.settings), attempts))
        return [group for number in sorted(found) for group in found[number]]

    @contextmanager
    def harness(self, pool: SandboxPool) -> Iterator[Harness | None]:
        """The agent of others that makes the attempts, with a gateway of its own; None for ours."""
        if not self.agent.harness:
            yield None
            return
        from woodshed.gateway.harness import Harness  # its server is an extra
        from woodshed.gateway.server import Gateway

        with Gateway(self.engine) as gateway:
            yield Harness(gateway, self.agent, pool.sandboxes, self.settings.watch)

    def _slots(self, tasks: Sequence[Task], attempts: int) -> list[Slot]:
        named = [(task, n) for task in tasks for n in range(attempts)]
        return [Slot(i, task, n, f"{self.prefix}-{task.name}-{n}") for i, (task, n) in enumerate(named)]


def _groups(tasks: Sequence[Task], rollouts: Sequence[Rollout], attempts: int) -> list[Group]:
    return [
        Group(task.id, tuple(rollouts[n * attempts : (n + 1) * attempts])) for n, task in enumerate(tasks)
    ]


@dataclass
class InFlight:
    """Attempts that are being made. Whatever is done is an event, and events are handled on the caller's thread.

    The tokenizer works on that thread only. With a journal, an attempt that a killed process left in the middle is made
    again up to there, and goes on.
    """

    collector: Collector
    pool: SandboxPool
    harness: Harness | None = None
    events: SimpleQueue[Callable[[], None]] = field(default_factory=SimpleQueue)
    waiting: deque[Slot] = field(default_factory=deque)
    flying: set[Slot] = field(default_factory=set)
    ready: dict[Slot, Attempt] = field(default_factory=dict)
    """Attempts whose next message can be sampled."""
    pending: set[Future[Any]] = field(default_factory=set)
    """What engine and tools are at work on."""
    ended: list[tuple[Slot, Rollout]] = field(default_factory=list)
    clock: SharedTime = field(default_factory=SharedTime)
    journal: Journal | None = None
    replaying: dict[Slot, deque[Turn]] = field(default_factory=dict)
    """Turns of the journal that attempts have before them."""
    replayed: int = 0
    """Attempts that went on from their journal."""
    restarted: int = 0
    """Attempts that began again, since their sandbox did not return what it had returned."""

    def run(self, slots: Sequence[Slot]) -> Iterator[tuple[Slot, Rollout]]:
        """Every slot with its rollout, as it ends."""
        self.waiting.extend(slots)
        while self.waiting or self.flying:
            yield from self.turn()

    def turn(self, timeout_s: float | None = None) -> list[tuple[Slot, Rollout]]:
        """Begin what can begin, and handle the next event; the attempts that have ended.

        Args:
            timeout_s: longest wait for an event; None waits until there is one.
        """
        while self.waiting and len(self.flying) < self._most():
            self._open(self.waiting.popleft())
        if self.ready and not (self.collector.settings.repeatable and self.pending):
            self._sample()
        with suppress(Empty):
            self.events.get(timeout=timeout_s)()
        ended, self.ended = self.ended, []
        return ended

    def __enter__(self) -> InFlight:
        return self

    def __exit__(self, *_: object) -> None:
        for future in self.pending:
            future.cancel()

    def _most(self) -> int:
        """Waves hold what may fly together; a group larger than the limit flies whole."""
        most = self.collector.settings.max_in_flight
        return max(most, len(self.waiting) + len(self.flying)) if self.collector.settings.repeatable else most

    def _when_done(self, future: Future[Any], then: Callable[[Any], None]) -> None:
        def handle() -> None:
            self.pending.discard(future)
            then(future.result())

        self.pending.add(future)
        future.add_done_callback(lambda _: self.events.put(handle))

    def _open(self, slot: Slot) -> None:
        self.flying.add(slot)
        if self.harness is not None:
            self._when_done(
                self.pool.submit(self._whole, self.harness, slot), lambda rollout: self._end(slot, rollout)
            )
            return
        self._when_done(
            self.pool.submit(self.pool.open, slot.task), lambda sandbox: self._begin(slot, sandbox)
        )

    def _whole(self, harness: Harness, slot: Slot) -> Rollout:
        """An attempt by an agent of others, on one thread from start to end."""
        return harness.attempt(slot.task, slot.rollout_id, attempt=slot.attempt, seed=self.collector.seed)

    def _begin(self, slot: Slot, sandbox: Sandbox) -> None:
        collector = self.collector
        attempt = Attempt(
            slot.task,
            sandbox,
            collector.engine.renderer,
            collector.agent,
            rollout_id=slot.rollout_id,
            context_length=collector.engine.context_length,
            attempt=slot.attempt,
            seed=collector.seed,
        )
        attempt.reopen = lambda: self.pool.open(slot.task)
        if self.journal is not None and (turns := self.journal.turns(slot.rollout_id)):
            self.replaying[slot] = deque(turns)
            self.replayed += 1
        self._go_on(slot, attempt)

    def _go_on(self, slot: Slot, attempt: Attempt) -> None:
        """Have the next turn made again where the journal has it, else sampled."""
        if turns := self.replaying.get(slot):
            sample = Sample(turns[0].sampled_ids, turns[0].logps, turns[0].finish_reason, turns[0].versions)
            self._execute(slot, attempt, sample, turns[0].sample_s)
        else:
            self.replaying.pop(slot, None)
            self.ready[slot] = attempt

    def _sample(self) -> None:
        """Ask for a message of every attempt that is ready."""
        asked = sorted(self.ready.items(), key=lambda item: item[0].number)
        self.ready.clear()
        futures = self.collector.engine.submit_all([attempt.request() for _, attempt in asked])
        for (slot, attempt), future in zip(asked, futures, strict=True):
            seconds = self.clock.begin()
            future.add_done_callback(seconds.end)
            self._when_done(
                future, lambda sample, s=slot, a=attempt, t=seconds: self._execute(s, a, sample, t.share_s)
            )

    def _execute(self, slot: Slot, attempt: Attempt, sample: Sample, sample_s: float) -> None:
        engine = self.collector.engine
        source = engine.description.get("name", "the engine")
        exact(sample, attempt.settings.turn_tokens, engine.renderer.stop_ids, source)
        message = attempt.read(sample)
        observed = self.pool.submit(attempt.execute, message)
        self._when_done(observed, lambda seen: self._record(slot, attempt, sample, message, seen, sample_s))

    def _record(
        self,
        slot: Slot,
        attempt: Attempt,
        sample: Sample,
        message: Message,
        observations: list[Observation] | None,
        sample_s: float,
    ) -> None:
        attempt.record(sample, message, observations, sample_s=sample_s)
        if turns := self.replaying.get(slot):
            if not equal(attempt.turns[-1], turns.popleft()):
                self._restart(slot, attempt)
                return
        elif self.journal is not None:
            self.journal.append(slot.rollout_id, attempt.turns[-1])
        if attempt.done:
            self._when_done(self.pool.submit(attempt.finish), lambda rollout: self._end(slot, rollout))
        else:
            self._go_on(slot, attempt)

    def _restart(self, slot: Slot, attempt: Attempt) -> None:
        """Begin an attempt again whose sandbox is not as the journal had it."""
        assert self.journal is not None
        self.journal.remove(slot.rollout_id)
        del self.replaying[slot]
        self.restarted += 1
        self.flying.remove(slot)
        attempt.sandbox.close()
        self.waiting.appendleft(slot)

    def _end(self, slot: Slot, rollout: Rollout) -> None:
        self.flying.remove(slot)
        if self.collector.on_rollout:
            self.collector.on_rollout(rollout)
        self.ended.append((slot, rollout))


class SandboxPool:
    """Threads and the sandboxes in which attempts run. Leaving it closes every sandbox, also in mid-command."""

    def __init__(self, collector: Collector) -> None:
        settings = collector.settings
        threads = settings.max_in_flight if collector.agent.harness else settings.tool_threads
        self._threads = ThreadPoolExecutor(threads, thread_name_prefix="tools")
        self._watch = settings.watch and collector.sandboxes.watches
        self.sandboxes = Revocable(collector.sandboxes)

    def open(self, task: Task) -> Sandbox:
        return self.sandboxes.open(sandbox_spec(task, watch=self._watch))

    def submit(self, function: Callable[..., Any], *given: Any) -> Future[Any]:
        """Begin something on a thread."""
        return self._threads.submit(function, *given)

    def __enter__(self) -> SandboxPool:
        return self

    def __exit__(self, *_: object) -> None:
        self._threads.shutdown(wait=False, cancel_futures=True)
        self.sandboxes.close()  # ends commands that still run
        self._threads.shutdown(wait=True)
