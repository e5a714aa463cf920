"""Summaries that the policy writes: segments that open with them, one reward, and no endless condensing."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
from scripted import EDIT, FINISH, READ, SETTINGS, calc_task, renderer

from woodshed.agent import Attempt, summaries
from woodshed.agent.prompt import user_prompt
from woodshed.agent.tools import ToolSettings
from woodshed.engines.engine import Sample, SampleRequest
from woodshed.experience.compile import rollout_samples
from woodshed.records import Rollout, Task
from woodshed.sandbox import SandboxSpec, open_sandbox

OFFERED = ToolSettings(offered=("read_file", "edit_file", "shell", "todo", "finish"))
SUMMARY = "double must return 2 * x; calc.py was read, nothing is changed yet."
Write = Callable[[SampleRequest, bool], str]
TODO = "<call>todo\n<<<<\n[x] read\n[ ] edit\n>>>>\n</call>"


@pytest.fixture(scope="module")
def task(tmp_path_factory: pytest.TempPathFactory) -> Task:
    return calc_task(tmp_path_factory.mktemp("tasks") / "calc")


def opening_tokens(task: Task) -> int:
    return len(renderer().start(SETTINGS.rules, user_prompt(task), OFFERED.specs).ids)


def play(task: Task, write: Write, **settings: int) -> tuple[Rollout, list[SampleRequest]]:
    """The attempt of a policy that is told if a summary is wanted, and the requests for its messages."""
    chosen = SETTINGS.model_copy(update={"tools": OFFERED, "turn_tokens": 100, **settings})
    sandbox = open_sandbox(SandboxSpec((task.folder / "environment" / "workspace",)))
    context_length = settings.pop("context_length", 1 << 20)
    attempt, requests = (
        Attempt(task, sandbox, renderer(), chosen, rollout_id="r", context_length=context_length),
        [],
    )
    while not attempt.done:
        requests.append(attempt.request())
        shown = renderer().decode(requests[-1].prompt_ids)
        ids = renderer().encode_message(write(requests[-1], summaries.QUESTION in shown))
        attempt.act(Sample(ids, (-0.5,) * len(ids), "stop", ((0, len(ids)),)))
    return attempt.finish(), requests


def scripted(messages: Sequence[str]) -> Write:
    remaining = iter(messages)
    return lambda request, is_asked: SUMMARY if is_asked else next(remaining)


def test_a_summary_opens_the_next_segment_with_the_state_of_the_attempt(task: Task):
    limit = opening_tokens(task) + 280
    rollout, requests = play(
        task, scripted([TODO, READ, READ, READ, READ, EDIT, FINISH]), summary_tokens=limit
    )
    assert rollout.ended == "finished" and rollout.patch.files
    first, second = rollout.segments[:2]
    assert second.begins == "summary" and first.turns[-1].text == SUMMARY
    assert first.turns[-1].calls == () == first.turns[-1].observations and first.turns[-1].error_kind is None
    assert first.turns[-2].observations[-1].text.endswith(f"\n\n{summaries.QUESTION}")
    context = renderer().decode(second.turns[0].context_ids)
    assert f"{task.instruction}\n\nYou are at work on this; summary 1" in context and SUMMARY in context
    assert "Your to-do list:\n[x] read\n[ ] edit" in context
    used = sum(len(turn.sampled_ids) for turn in first.turns)
    assert f"Left: {12 - len(first.turns)} messages, {2000 - used} tokens." in context
    assert "2 * x\n" not in context.partition("Left:")[2]
    for request, turn in zip(requests, rollout.turns, strict=True):
        segment = rollout.segments[turn.segment]
        before = segment.turns[: segment.turns.index(turn)]
        whole = [i for earlier in before for i in (*earlier.context_ids, *earlier.sampled_ids)]
        assert request.prompt_ids == (*whole, *turn.context_ids)


def test_every_token_of_the_chain_is_trained_on_summaries_included(task: Task):
    rollout, _ = play(task, scripted([READ] * 7 + [EDIT, FINISH]), summary_tokens=opening_tokens(task) + 280)
    assert len(rollout.segments) >= 3
    samples = rollout_samples(rollout)
    trained = [sample.ids[i] for sample in samples for i in sample.predicted]
    assert trained == [i for turn in rollout.turns for i in turn.sampled_ids]
    assert [sample.key for sample in samples] == [("r", segment.number) for segment in rollout.segments]


def test_a_task_longer_than_the_window_is_done_in_it(task: Task):
    """Without summaries the same policy ends with a full context."""
    window = opening_tokens(task) + 600
    messages = [READ] * 9 + [EDIT, FINISH]
    alone, _ = play(task, scripted(messages), context_length=window, max_turns=30, rollout_tokens=5000)
    assert alone.ended == "context_full" and not alone.patch.files
    rollout, requests = play(
        task,
        scripted(messages),
        context_length=window,
        max_turns=30,
        rollout_tokens=5000,
        summary_tokens=1 << 20,
    )
    assert rollout.ended == "finished" and rollout.patch.files
    assert all(len(request.prompt_ids) + 100 <= window for request in requests)


def test_condensing_without_work_ends_the_attempt(task: Task):
    rollout, _ = play(
        task, scripted([READ] * 30), summary_tokens=opening_tokens(task) + 150, rollout_tokens=9000
    )
    assert rollout.ended == "context_full" and len(rollout.segments) == 2
    never, _ = play(task, scripted([READ] * 30), summary_tokens=1)
    assert never.ended == "context_full" and len(never.turns) == 2


def test_a_summary_that_is_cut_is_a_fault_and_carried_on(task: Task):
    sandbox = open_sandbox(SandboxSpec((task.folder / "environment" / "workspace",)))
    chosen = SETTINGS.model_copy(update={"tools": OFFERED, "summary_tokens": opening_tokens(task) + 60})
    attempt = Attempt(task, sandbox, renderer(), chosen, rollout_id="r")
    for text, reason in ((READ, "stop"), (SUMMARY, "length")):
        ids = renderer().encode_message(text)[: -1 if reason == "length" else None]
        attempt.act(Sample(ids, (0.0,) * len(ids), reason, ((0, len(ids)),)))  # type: ignore[arg-type]
    assert attempt.turns[1].error_kind == "truncated"
    assert SUMMARY in renderer().decode(attempt.request().prompt_ids)
    twin = attempt.fork()
    assert twin.request() == attempt.request()
    twin.sandbox.close()
    attempt.ended = "max_turns"
    assert len(attempt.finish().segments) == 1


def test_a_replayed_attempt_stands_in_the_segment_of_its_turn(task: Task, tmp_path: Path):
    rollout, requests = play(
        task, scripted([READ] * 5 + [EDIT, FINISH]), summary_tokens=opening_tokens(task) + 280
    )
    number = next(n for n, turn in enumerate(rollout.turns) if turn.begins) + 1
    sandbox = open_sandbox(SandboxSpec((task.folder / "environment" / "workspace",)))
    attempt = Attempt(
        task, sandbox, renderer(), SETTINGS.model_copy(update={"tools": OFFERED}), rollout_id="r"
    )
    attempt.replay(rollout.turns[:number], rollout.turns[number])
    assert attempt.request().prompt_ids == requests[number].prompt_ids
    attempt.sandbox.close()
