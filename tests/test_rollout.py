"""Many attempts at once: equal however they are scheduled, safe when a sandbox or the sampler fails."""

from __future__ import annotations

import dataclasses
import os
import random
import signal
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from threading import Timer
from typing import Any

import pytest
from conftest import tiny_environment
from scripted import EDIT, FINISH, READ, SETTINGS, TEST, UNKNOWN, calc_task, renderer

from woodshed.agent import run
from woodshed.agent.attempt import RETRIES
from woodshed.engines.engine import Sample, SampleRequest
from woodshed.engines.scripted import ScriptedEngine
from woodshed.experience import Collector, RolloutSettings
from woodshed.experience.collector import waves
from woodshed.records import Group, SamplerError, Task, to_json
from woodshed.sandbox import Sandbox, SandboxSpec
from woodshed.sandbox.bubblewrap import BubblewrapSandbox, open_bubblewrap
from woodshed.sandbox.provider import Bubblewrap

ROLLOUT = RolloutSettings(attempts=3, max_in_flight=6, tool_threads=3)
SLEEP = "python -S -c 'import random, time; time.sleep(random.random() / 10)'; echo a; ls"
MESSAGES = [READ, EDIT, TEST, UNKNOWN, FINISH, f"<call>shell {SLEEP}</call>"]


@pytest.fixture(scope="module")
def tasks(tmp_path_factory: pytest.TempPathFactory) -> list[Task]:
    folder = tmp_path_factory.mktemp("tasks")
    return [calc_task(folder / name, tiny_environment()) for name in ("calc-a", "calc-b", "calc-c")]


@pytest.fixture
def opened(monkeypatch: pytest.MonkeyPatch) -> list[Sandbox]:
    """Every sandbox that `collect` opens, in a list that fills."""
    found: list[Sandbox] = []

    def remembered(provider: Bubblewrap, spec: SandboxSpec) -> Sandbox:
        found.append(open_bubblewrap(spec))
        return found[-1]

    monkeypatch.setattr(Bubblewrap, "open", remembered)
    return found


def drawn(request: SampleRequest) -> str:
    """A message that depends on the request's own seed only, as a sampler's does."""
    return random.Random(request.seed).choice(MESSAGES)


def attempts(
    tasks: list[Task], sampler: Any = None, settings: RolloutSettings = ROLLOUT, **options: Any
) -> list[Group]:
    sampler = sampler or ScriptedEngine(renderer(), drawn)
    given = {"seed": 1, "prefix": "train-7", **options}
    return Collector(sampler, settings, SETTINGS, **given).collect(tasks)


def timeless(record: Any) -> Any:
    """JSON of a record without its wall times."""
    if isinstance(record, list):
        return [timeless(item) for item in record]
    if isinstance(record, dict):
        times = ("seconds", "sample_s", "tools_s")
        return {key: timeless(value) for key, value in record.items() if key not in times}
    return timeless(to_json(record)) if dataclasses.is_dataclass(record) else record


def test_groups_come_in_the_order_of_tasks_and_attempts(tasks: list[Task]) -> None:
    seen: list[str] = []
    groups = attempts(tasks, on_rollout=lambda rollout: seen.append(rollout.id))
    assert [group.task_id for group in groups] == [task.id for task in tasks]
    assert [r.id for g in groups for r in g.rollouts] == [
        f"train-7-{t.name}-{n}" for t in tasks for n in range(3)
    ]
    assert [r.attempt for r in groups[0].rollouts] == [0, 1, 2]
    assert all(r.turns and r.seed == 1 for g in groups for r in g.rollouts)
    assert sorted(seen) == sorted(r.id for g in groups for r in g.rollouts)


def test_scheduling_changes_nothing(tasks: list[Task]) -> None:
    groups = timeless(attempts(tasks))
    for threads, rows in ((1, 1), (4, 99)):
        settings = ROLLOUT.model_copy(update={"tool_threads": threads, "max_in_flight": rows})
        assert timeless(attempts(tasks, settings=settings)) == groups
    alone = run(
        tasks[1],
        ScriptedEngine(renderer(), drawn),
        SETTINGS,
        rollout_id="train-7-calc-b-2",
        attempt=2,
        seed=1,
    )
    assert timeless(alone) == groups[1]["rollouts"][2]
    assert timeless(attempts(tasks, seed=2)) != groups


SLOW = "<call>shell sleep 3; echo slow</call>"


class Watched(ScriptedEngine):
    """One attempt begins with a slow command; remembers when each batch was drawn, and how many messages it held."""

    def __init__(self) -> None:
        super().__init__(renderer(), self._reply)
        self.batches: list[tuple[float, int]] = []
        self._first: SampleRequest | None = None

    def _reply(self, request: SampleRequest) -> str:
        return SLOW if request is self._first else drawn(request)

    def submit_all(self, requests: Sequence[SampleRequest]) -> list[Future[Sample]]:
        self._first = None if self.batches else requests[0]
        self.batches.append((time.monotonic(), len(requests)))
        return super().submit_all(requests)


@pytest.mark.parametrize("repeatable", [True, False])
def test_a_slow_command_holds_up_the_others_only_where_all_are_waited_for(
    tasks: list[Task], repeatable: bool
) -> None:
    sampler = Watched()
    groups = attempts(
        tasks[:2], sampler, ROLLOUT.model_copy(update={"repeatable": repeatable, "tool_threads": 6})
    )
    began = sampler.batches[0][0]
    meanwhile = sum(at - began < 2.5 for at, _ in sampler.batches)
    assert (meanwhile == 1 and sampler.batches[0][1] == 6) if repeatable else (meanwhile > 6)
    assert all(r.ended for g in groups for r in g.rollouts)


def test_rounds_change_nothing_that_an_attempt_sees(tasks: list[Task]) -> None:
    waited, early = (
        attempts(tasks, settings=ROLLOUT.model_copy(update={"repeatable": repeatable}))
        for repeatable in (True, False)
    )
    assert timeless(waited) == timeless(early)


def test_waves_do_not_depend_on_each_other(tasks: list[Task]) -> None:
    assert timeless(attempts(tasks[2:])) == timeless(attempts(tasks)[2:])


def test_rollouts_are_handed_over_as_they_end(tasks: list[Task]) -> None:
    ended: dict[str, float] = {}
    settings = ROLLOUT.model_copy(update={"repeatable": False, "tool_threads": 6})
    groups = attempts(
        tasks[:2], Watched(), settings, on_rollout=lambda r: ended.update({r.id: time.monotonic()})
    )
    assert sorted(ended) == sorted(r.id for g in groups for r in g.rollouts)
    slow = next(r.id for g in groups for r in g.rollouts if r.turns[0].text == SLOW)
    assert all(ended[slow] - at > 1 for name, at in ended.items() if name != slow)


def test_an_attempt_that_ends_holds_up_nobody(tasks: list[Task]) -> None:
    """Its patch is taken by the same threads as tools, behind those that wait; messages are sampled meanwhile."""
    calls = iter([FINISH, *["<call>shell sleep 1</call>"] * 5])
    asked: list[float] = []
    ended: list[float] = []

    class Timed(ScriptedEngine):
        def submit_all(self, requests: Sequence[SampleRequest]) -> list[Future[Sample]]:
            asked.append(time.monotonic())
            return super().submit_all(requests)

    engine = Timed(renderer(), lambda request: next(calls, FINISH))
    settings = ROLLOUT.model_copy(update={"repeatable": False, "tool_threads": 1})
    attempts(tasks[:2], engine, settings, on_rollout=lambda rollout: ended.append(time.monotonic()))
    assert sum(at < ended[0] for at in asked) > 6  # the first messages, and later ones of those that go on


def test_waves_hold_whole_groups(tasks: list[Task]) -> None:
    assert [len(wave) for wave in waves(tasks, 4, 8)] == [2, 1]
    assert [len(wave) for wave in waves(tasks, 4, 3)] == [1, 1, 1]
    assert waves([], 4, 8) == []


class Saboteur(ScriptedEngine):
    """Closes sandboxes behind the back of the attempts that sit in them."""

    def __init__(self, opened: list[Sandbox], rounds: Callable[[int], bool]) -> None:
        super().__init__(renderer(), drawn)
        self.opened, self.rounds, self.round, self.asked = opened, rounds, 0, 0

    def submit_all(self, requests: Sequence[SampleRequest]) -> list[Future[Sample]]:
        if self.rounds(self.round):
            for sandbox in self.opened:
                sandbox.close()
        self.round += 1
        self.asked += len(requests)
        return super().submit_all(requests)


def test_a_lost_sandbox_is_made_afresh_and_leaves_no_trace(tasks: list[Task], opened: list[Sandbox]) -> None:
    """The calls are executed again, and no message is sampled again: a policy cannot provoke a second try."""
    saboteur = Saboteur(opened, lambda number: number in (1, 4))
    groups = attempts(tasks, saboteur)
    assert len(opened) > 9
    assert saboteur.asked == sum(len(rollout.turns) for group in groups for rollout in group.rollouts)
    assert timeless(groups) == timeless(attempts(tasks))


@pytest.mark.parametrize(
    ("method", "fatal", "ended"),
    [
        ("exec", "boom", "sandbox_broken"),  # the sandbox dies of one command
        ("read", "calc.py", "sandbox_broken"),  # or when the patch is read
        ("exec", "", "sandbox_lost"),  # or whatever it runs: the machine's fault
    ],
)
def test_who_lost_the_sandbox_decides(
    tasks: list[Task],
    opened: list[Sandbox],
    monkeypatch: pytest.MonkeyPatch,
    method: str,
    fatal: str,
    ended: str,
) -> None:
    called = getattr(BubblewrapSandbox, method)

    def deadly(sandbox: BubblewrapSandbox, argument: Any, *rest: Any, **options: Any) -> Any:
        if fatal in str(argument):
            sandbox._now.supervisor.hang_up()  # type: ignore[union-attr]
        return called(sandbox, argument, *rest, **options)

    monkeypatch.setattr(BubblewrapSandbox, method, deadly)
    messages = ["<call>shell echo boom > calc.py</call>", FINISH] * 3
    (group,) = attempts(tasks[:1], ScriptedEngine(renderer(), sorted(messages, reverse=True)))
    assert [rollout.ended for rollout in group.rollouts] == [ended] * 3
    assert not any(rollout.patch.files for rollout in group.rollouts)
    assert len(opened) == 3 * (1 + RETRIES + 1) and not any(sandbox.alive() for sandbox in opened)


@pytest.mark.parametrize("error", [SamplerError, KeyboardInterrupt])
def test_no_sandbox_outlives_a_failure(
    tasks: list[Task], opened: list[Sandbox], error: type[BaseException]
) -> None:
    def failing(request: SampleRequest) -> str:
        if len(opened) == 6 and sum(sandbox.alive() for sandbox in opened) < 6:
            raise error
        return drawn(request)

    with pytest.raises(error):
        attempts(tasks, ScriptedEngine(renderer(), failing))
    assert len(opened) == 6 and not any(sandbox.alive() for sandbox in opened)


def test_an_interrupt_does_not_wait_for_a_running_command(tasks: list[Task], opened: list[Sandbox]) -> None:
    started = time.monotonic()
    slow = ScriptedEngine(renderer(), lambda request: "<call>shell sleep 15</call>")
    Timer(1.0, os.kill, (os.getpid(), signal.SIGINT)).start()
    with pytest.raises(KeyboardInterrupt):
        attempts(tasks, slow)
    assert time.monotonic() - started < 10
    assert not any(sandbox.alive() for sandbox in opened)
