"""One attempt: every kind of turn, every way to end, and the tokens that are kept."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
from scripted import (
    EDIT,
    FINISH,
    PROSE,
    READ,
    SETTINGS,
    SOLVED,
    TEST,
    UNKNOWN,
    UNREADABLE,
    calc_task,
    play,
    renderer,
)

from woodshed.agent import TOOLS, Attempt, run, turn_seed
from woodshed.agent.prompt import system_prompt
from woodshed.engines.engine import SampleRequest, sample_all
from woodshed.engines.scripted import ScriptedEngine
from woodshed.records import CALL_FAULTS, RecipeError, Rollout, Task, from_json, to_json
from woodshed.sandbox import Sandbox, SandboxSpec, open_sandbox


@pytest.fixture
def task(tmp_path: Path) -> Task:
    return calc_task(tmp_path / "calc-double")


@pytest.fixture
def sandbox(task: Task) -> Iterator[Sandbox]:
    with open_sandbox(SandboxSpec(lowers=(task.folder / "environment" / "workspace",))) as opened:
        yield opened


def faults(rollout: Rollout) -> list[str | None]:
    return [turn.error_kind for turn in rollout.turns]


def texts(rollout: Rollout, turn: int = 0) -> list[str]:
    return [seen.text for seen in rollout.turns[turn].observations]


def test_a_perfect_attempt(task: Task) -> None:
    rollout = play(task, READ, EDIT, TEST, FINISH)
    assert (rollout.ended, faults(rollout)) == ("finished", [None] * 4)
    assert texts(rollout, 0) == ["lines 1-2 of 6\ndef double(x):\n    raise NotImplementedError"]
    assert texts(rollout, 2) == ["8"]
    assert rollout.patch.files == {"calc.py": SOLVED}
    assert rollout.patch.diff.splitlines()[:2] == ["--- a/calc.py", "+++ b/calc.py"]
    assert "-    raise NotImplementedError\n+    return 2 * x\n" in rollout.patch.diff
    assert (rollout.task_id, rollout.counters["turns"], rollout.counters["calls"]) == (task.id, 4, 4)
    assert from_json(Rollout, to_json(rollout)) == rollout


def test_every_prompt_has_the_one_before_and_its_message_as_an_exact_prefix(
    task: Task, sandbox: Sandbox
) -> None:
    requests: list[SampleRequest] = []
    script = iter([READ, UNKNOWN, UNREADABLE, PROSE + " long" * 200, EDIT, FINISH])

    def next_message(request: SampleRequest) -> str:
        requests.append(request)
        return next(script)

    sampler = ScriptedEngine(renderer(), next_message)
    attempt = Attempt(
        task, sandbox, renderer(), SETTINGS.model_copy(update={"max_errors": 9}), rollout_id="r"
    )
    while not attempt.done:
        attempt.act(sample_all(sampler, [attempt.request()])[0])
    rollout = attempt.finish()
    so_far: list[int] = []
    for request, turn in zip(requests, rollout.turns, strict=True):
        so_far += turn.context_ids
        assert request.prompt_ids == tuple(so_far)
        assert 0 < turn.opening < len(turn.context_ids)
        so_far += turn.sampled_ids
    assert rollout.segments[0].token_ids == tuple(so_far)
    assert faults(rollout) == [None, "unknown_tool", "unparseable", "truncated", None, None]
    assert len({request.seed for request in requests}) == len(requests)


def test_faults_are_observations_and_stay(task: Task) -> None:
    rollout = play(
        task,
        UNKNOWN,
        READ,
        "<call>read_file</call>",
        "<call>read_file none.py</call>",
        READ,
        "<call>edit_file calc.py\n<<<<\nabsent\n====\n\n>>>>\n</call>",
        "<call>edit_file calc.py\n<<<<\n(x)\n====\n(y)\n>>>>\n</call>",
        PROSE,
    )
    assert faults(rollout) == [
        "unknown_tool",
        None,
        "bad_arguments",
        "bad_path",
        None,
        "old_missing",
        "old_ambiguous",
        "no_call",
    ]
    assert rollout.ended == "max_errors" and rollout.counters["faulty_turns"] == 6
    for turn in rollout.turns:
        (seen,) = turn.observations
        assert (seen.error_kind in CALL_FAULTS) == seen.text.startswith("error: ") == bool(turn.error_kind)
    assert rollout.turns[-1].text == PROSE and rollout.turns[-1].calls == ()


def test_a_failed_command_is_news_not_a_fault(task: Task) -> None:
    rollout = play(task, "<call>shell false</call>")
    assert faults(rollout) == [None, None]
    assert texts(rollout) == ["exit code 1"] and rollout.turns[0].observations[0].error_kind == "nonzero_exit"


def test_calls_after_a_failed_one_are_not_executed(task: Task) -> None:
    several = SETTINGS.model_copy(update={"max_calls": 3})
    rollout = play(
        task,
        "\n".join([READ, "<call>shell false</call>", EDIT, FINISH]),
        "\n".join([READ, FINISH, EDIT]),
        settings=several,
    )
    assert texts(rollout, 0)[1:] == [
        "exit code 1",
        "not executed: an earlier call failed",
        "error: not executed: at most 3 calls in a message",
    ]
    assert faults(rollout) == ["too_many_calls", None]
    assert texts(rollout, 1)[1:] == ["finished", "not executed: the work is finished"]
    assert (rollout.ended, rollout.patch.files) == ("finished", {})
    assert [seen.call_id for seen in rollout.turns[0].observations] == [c.id for c in rollout.turns[0].calls]


def test_a_truncated_message_is_not_acted_on(task: Task) -> None:
    rollout = play(task, EDIT + " and then" * 200, FINISH)
    turn = rollout.turns[0]
    assert (turn.error_kind, turn.finish_reason, turn.calls) == ("truncated", "length", ())
    assert len(turn.sampled_ids) == SETTINGS.turn_tokens
    assert "cut at its token limit" in texts(rollout)[0]
    assert rollout.patch.files == {}


@pytest.mark.parametrize(
    ("ended", "change", "messages"),
    [
        ("max_turns", {"max_turns": 3}, [READ] * 9),
        ("max_errors", {}, [UNKNOWN, READ, *[UNKNOWN] * 9]),
        ("max_tokens", {"rollout_tokens": 100}, [READ] * 9),
        ("timeout", {"timeout_s": 0.0}, [READ] * 9),
    ],
)
def test_budgets(task: Task, ended: str, change: dict[str, int], messages: Sequence[str]) -> None:
    settings = SETTINGS.model_copy(update=change)
    rollout = play(task, *messages, settings=settings)
    assert rollout.ended == ended
    assert rollout.counters["sampled_tokens"] <= settings.rollout_tokens
    assert len(rollout.turns) == {"max_turns": 3, "max_errors": 5, "timeout": 1}.get(
        ended, len(rollout.turns)
    )


def test_the_context_is_never_overrun(task: Task, sandbox: Sandbox) -> None:
    first = Attempt(task, sandbox, renderer(), SETTINGS, rollout_id="r").request()
    length = len(first.prompt_ids) + SETTINGS.turn_tokens + 60
    sampler = ScriptedEngine(
        renderer(), itertools.repeat(READ), context_length=length
    )  # refuses what does not fit
    attempt = Attempt(task, sandbox, renderer(), SETTINGS, rollout_id="r", context_length=length)
    while not attempt.done:
        attempt.act(sample_all(sampler, [attempt.request()])[0])
    assert attempt.finish().ended == "context_full"
    with pytest.raises(RecipeError, match=r"calc-double.*turn_tokens"):
        Attempt(task, sandbox, renderer(), SETTINGS, rollout_id="r", context_length=length - 100)


def test_the_two_sides_of_a_fork_share_nothing_that_changes(task: Task) -> None:
    sandbox = open_sandbox(SandboxSpec((task.folder / "environment" / "workspace",), watch=()))
    attempt = Attempt(task, sandbox, renderer(), SETTINGS, rollout_id="r")
    write = "<call>write_file {}\n<<<<\nx\n>>>>\n</call>"

    def act(one: Attempt, message: str) -> None:
        one.act(sample_all(ScriptedEngine(renderer(), lambda _: message), [one.request()])[0])

    act(attempt, write.format("both.py"))
    twin = attempt.fork()
    for name, value in vars(attempt).items():
        if isinstance(value, list | dict | set | bytearray) or value is sandbox:
            assert vars(twin)[name] is not value, name
    act(attempt, write.format("first.py"))
    act(twin, write.format("second.py"))
    for one, own in ((attempt, "first.py"), (twin, "second.py")):
        act(one, FINISH)
        rollout = one.finish()
        assert sorted(access.path for access in rollout.accesses) == [
            "/workspace/both.py",
            f"/workspace/{own}",
        ]
        assert sorted(rollout.patch.files) == ["both.py", own]
        assert len(rollout.turns) == 3
        assert rollout.turns[1].text == write.format(own)


def test_a_lost_sandbox_voids_the_attempt(task: Task, sandbox: Sandbox) -> None:
    sampler = ScriptedEngine(renderer(), [READ, READ])
    attempt = Attempt(task, sandbox, renderer(), SETTINGS, rollout_id="r")
    attempt.act(sample_all(sampler, [attempt.request()])[0])
    sandbox.close()
    attempt.act(sample_all(sampler, [attempt.request()])[0])
    rollout = attempt.finish()
    assert (rollout.ended, rollout.patch.files) == ("sandbox_lost", {})


def test_finishing_closes_the_sandbox(task: Task, sandbox: Sandbox) -> None:
    attempt = Attempt(task, sandbox, renderer(), SETTINGS, rollout_id="r")
    attempt.act(sample_all(ScriptedEngine(renderer(), [FINISH]), [attempt.request()])[0])
    assert sandbox.alive()
    attempt.finish()
    assert not sandbox.alive()


def test_the_patch_holds_whole_text_files_and_says_what_it_leaves_out(task: Task) -> None:
    made = (
        "rm data.bin; mkdir -p new/__pycache__; echo x > new/__pycache__/a.pyc; printf 'no end' > new/b.txt; "
        "ln -s /etc/passwd link; printf '\\xff' > bad.txt; head -c 1048577 /dev/zero > big.txt; mkfifo pipe"
    )
    rollout = play(task, f"<call>shell {made}</call>")
    assert rollout.patch.files == {"data.bin": None, "new/b.txt": "no end"}
    assert rollout.patch.skipped == {
        "bad.txt": "not UTF-8: byte 0xff at 0",
        "big.txt": "too large",
        "link": "not a regular file",
        "pipe": "not a regular file",
    }
    assert (
        "--- /dev/null\n+++ b/new/b.txt\n@@ -0,0 +1 @@\n+no end\n\\ No newline at end of file\n"
        in rollout.patch.diff
    )


def test_equal_seeds_give_equal_streams_and_others_do_not() -> None:
    assert turn_seed(0, "train-0-a-0", 0) == 8526630140350211491  # the same in every process and version
    seeds = {turn_seed(s, f"r-{r}", t) for s in range(5) for r in range(5) for t in range(5)}
    assert len(seeds) == 125 and all(0 <= seed < 1 << 63 for seed in seeds)


def test_the_system_prompt_is_short() -> None:
    assert len(system_prompt().split()) <= 60 and len(system_prompt(max_calls=4).split()) <= 60
    assert all(len(spec.description.split()) <= 10 for spec in TOOLS)


def test_a_test_run_reads_short_and_the_same_and_leaves_nothing_behind(tiny_task: Task) -> None:
    passing = f"<call>shell {tiny_task.test_command}/test_words.py</call>"
    failing = f"<call>shell {tiny_task.test_command}</call>"
    rollouts = [
        run(tiny_task, ScriptedEngine(renderer(), [passing, failing, FINISH]), SETTINGS, rollout_id="r")
        for _ in range(2)
    ]
    assert texts(rollouts[0], 0) == [".\n1 passed in #s"]
    failed = texts(rollouts[0], 1)[0].splitlines()
    assert failed[0] == "F" and failed[-2:] == ["1 failed in #s", "exit code 1"]
    assert rollouts[0].segments[0].token_ids == rollouts[1].segments[0].token_ids
    assert rollouts[0].patch.files == {} and rollouts[0].patch.skipped == {}
