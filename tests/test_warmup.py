"""Oracle attempts: scripted through the real tools in a real sandbox, with plants and reminders."""

from __future__ import annotations

import json
import random
import shutil
from collections import Counter
from dataclasses import replace
from typing import Any

import pytest
from pydantic import ValidationError
from scripted import renderer

from woodshed import feedback, grading
from woodshed.agent import TOOLS, AgentSettings
from woodshed.experience import scripted_expert
from woodshed.experience.rename_augmentation import renamed, renaming
from woodshed.experience.scripted_expert import PLANTS, ExpertAttempt
from woodshed.records import RecipeError, Task
from woodshed.stages import sft
from woodshed.stages.recipe import SFTSettings
from woodshed.tasks import folder
from woodshed.tokens.codec import CODECS
from woodshed.tokens.renderer import Renderer

AGENT = AgentSettings(max_turns=12, turn_tokens=200, rollout_tokens=4000)


def attempt(task: Task, codec: str = "plain", number: int = 0, **settings: Any) -> ExpertAttempt:
    class Chosen(SFTSettings):
        repair_share = settings.pop("repair_share", 0.0)

    chosen = Chosen(**{"reminder_share": 0.0, "seeded_fault_share": 0.0, **settings})  # type: ignore[arg-type]
    return scripted_expert.expert_attempt(
        task, renderer(codec), chosen, AGENT, attempt=number, seed=0, context_length=1 << 20
    )


@pytest.mark.parametrize("codec", ["plain", "json"])
def test_an_oracle_attempt_solves_its_task_without_a_fault(tiny_task, codec):
    made = attempt(tiny_task, codec).rollout
    assert made.ended == "finished"
    assert [turn.calls[0].tool for turn in made.turns] == ["read_file", "edit_file", "shell", "finish"]
    assert all(turn.error_kind is None for turn in made.turns)
    assert grading.grade(tiny_task, made.patch).solved


def test_a_repair_fails_its_first_test_run_and_solves_the_task_in_the_end(tiny_task):
    made = attempt(tiny_task, repair_share=1.0).rollout
    tests = [
        o.error_kind
        for turn in made.turns
        for c, o in zip(turn.calls, turn.observations, strict=False)
        if c.tool == "shell"
    ]
    assert tests == ["nonzero_exit", None]
    assert [turn.oracle for turn in made.turns] == ["", scripted_expert.SLIP, "", "", "", ""]
    (sample,) = sft.expert_samples(attempt(tiny_task, repair_share=1.0), renderer())
    imitated = [i for turn in made.turns if turn.oracle != scripted_expert.SLIP for i in turn.sampled_ids]
    assert [sample.ids[i] for i in sample.predicted] == imitated and made.turns[1].sampled_ids
    assert made.ended == "finished" and grading.grade(tiny_task, made.patch).solved


@pytest.mark.parametrize("codec", ["plain", "json"])
def test_a_planted_fault_is_what_it_is_called(tiny_task, codec):
    """Each class is planted where it can be, and the harness sees exactly that fault."""
    seen: Counter[str] = Counter()
    for number in range(6):
        made = attempt(tiny_task, codec, number, seeded_fault_share=0.7).rollout
        for turn in made.turns:
            if turn.oracle == "untested":
                assert turn is made.turns[-1] and turn.calls[0].tool == "finish"
            elif turn.oracle:
                assert turn.error_kind == turn.oracle, turn.text
            else:
                assert turn.error_kind is None, turn.text
            seen[turn.oracle] += 1
    assert set(seen) >= {"", "unknown_tool", "bad_arguments"}


def moves(task: Task, count: int, **settings: Any) -> list[scripted_expert.Move]:
    chosen = SFTSettings(**settings)
    codec, rng = CODECS["plain"], random.Random(0)
    return [move for _ in range(count) for move in scripted_expert.script(task, codec, chosen, AGENT, rng)]


def test_a_reminder_of_the_planned_class_prevents_its_fault_and_others_leave_it(tiny_task):
    played = moves(tiny_task, 1500, seeded_fault_share=0.3, reminder_share=0.4)
    assert not any(move.reminder_class == move.fault != "" for move in played)
    rates = {}
    for kind in ("", "placebo", "unknown_tool", "untested"):
        at = [move for move in played if move.reminder_class == kind]
        rates[kind] = Counter(move.fault for move in at), len(at)
    plain = rates[""][0]["unknown_tool"] / rates[""][1]
    placebo = rates["placebo"][0]["unknown_tool"] / rates["placebo"][1]
    other = rates["untested"][0]["unknown_tool"] / rates["untested"][1]
    assert rates["unknown_tool"][0]["unknown_tool"] == 0
    assert plain > 0.08 and placebo > 0.5 * plain and other > 0.5 * plain


def test_a_reminder_of_a_calls_form_does_not_say_which_tool_is_right(tiny_task):
    """Where finishing is right and a careless call of read_file was planned, the reminder is about read_file."""
    played = moves(tiny_task, 3000, seeded_fault_share=0.4, reminder_share=0.5)
    named: dict[bool, Counter[str]] = {True: Counter(), False: Counter()}
    for move in played:
        if move.reminder_class == "bad_arguments":
            tool = move.reminder.partition(" takes")[0].split()[-1]
            named["finish" in move.text].update([tool])
    assert named[True]["read_file"] > 10 and named[True]["finish"] < named[True].total() / 2
    assert all(named[False][tool.name] for tool in TOOLS)


def test_without_seeded_faults_nothing_is_planted(tiny_task):
    played = moves(tiny_task, 50)
    assert {move.fault for move in played} == {"", scripted_expert.SLIP} and any(
        move.reminder for move in played
    )


def test_only_the_chosen_classes_are_planted_and_all_are_spoken_of(tiny_task):
    chosen = {"untested": 3.0, "bad_arguments": 1.0}
    played = moves(tiny_task, 300, seeded_fault_share=0.4, reminder_share=0.4, plants=chosen)
    assert {move.fault for move in played} == {"", scripted_expert.SLIP, *chosen}
    assert {move.reminder_class for move in played} == {"", "placebo", *feedback.CLASSES}


@pytest.mark.parametrize("plants", [{}, {"untested": 1.0, "slow": 1.0}, {"untested": 1.0, "no_call": 0.0}])
def test_plants_that_cannot_be_are_refused(plants):
    with pytest.raises(ValidationError, match="plants"):
        SFTSettings(plants=plants)


def test_every_plant_has_a_reminder_and_a_detector():
    assert set(PLANTS) <= set(feedback.DETECTORS)
    for kind in PLANTS:
        assert feedback.hint_text(kind, tools=TOOLS, codec=CODECS["plain"], tool="edit_file")


def whole(made: ExpertAttempt, using: Renderer) -> str:
    return "".join(
        using.decode(turn.context_ids) + turn.text + "".join(o.text for o in turn.observations)
        for turn in made.rollout.turns
    )


def test_a_renamed_attempt_is_the_same_attempt_under_other_names(tiny_task):
    using = renderer()
    made = attempt(tiny_task, number=3, seeded_fault_share=0.3, reminder_share=0.5)
    other = renamed(made, tiny_task, using, SFTSettings(), agent=AgentSettings(), seed="1")
    assert [(t.oracle, t.error_kind, len(t.observations)) for t in other.rollout.turns] == [
        (t.oracle, t.error_kind, len(t.observations)) for t in made.rollout.turns
    ]
    text = whole(other, using)
    assert "tally/words.py" in whole(made, using) and "tally/words.py" not in text and "`count`" not in text
    (row,) = sft.expert_samples(other, using)
    ids = [i for turn in other.rollout.turns for i in turn.sampled_ids]
    assert [row.ids[i] for i in row.predicted] == ids
    again, another = (
        renamed(made, tiny_task, using, SFTSettings(), agent=AgentSettings(), seed=s) for s in "12"
    )
    assert again == other and another != other


@pytest.mark.parametrize("codec", ["plain", "json"])
@pytest.mark.parametrize("under_other_names", [False, True])
def test_without_code_all_of_an_edit_is_imitated_but_what_it_writes(tiny_task, codec, under_other_names):
    """Also where a planted fault has spoiled the edit, so that it cannot be read."""
    using, seen = renderer(codec), Counter[str]()
    plants = {"unknown_tool": 1.0, "unparseable": 1.0, "old_missing": 1.0}
    for number in range(12):
        made = attempt(tiny_task, codec, number=number, seeded_fault_share=0.5, plants=plants)
        if under_other_names:
            made = renamed(made, tiny_task, using, SFTSettings(), agent=AgentSettings(), seed="1")
        right = [call for turn in made.rollout.turns for call in turn.calls if call.arguments.get("new")]
        code = right[-1].arguments["new"].strip()
        code = code if codec == "plain" else json.dumps(code)[1:-1]
        rows = []
        for n in range(len(made.rollout.turns)):
            part = replace(made.rollout, turns=made.rollout.turns[: n + 1])
            rows += sft.expert_samples(replace(made, rollout=part), using)
        wanted = set(sft.expert_samples(made, using, code=False)[0].predicted)
        begin = 0
        for turn, row in zip(made.rollout.turns, rows, strict=True):
            own = [i for i in row.predicted if i >= begin]
            begin = len(row.ids)
            left_out = using.decode([row.ids[i] for i in own if i not in wanted])
            assert left_out.strip() == (code if code in turn.text else "")
            seen.update([turn.oracle] * (code in turn.text))
    assert {"", "unknown_tool", "unparseable", "old_missing"} <= set(seen)


@pytest.mark.parametrize("codec", ["plain", "json"])
def test_calls_of_a_renamed_attempt_are_what_its_text_says(tiny_task, codec):
    using = renderer(codec)
    method = replace(tiny_task, target_symbol="Words.count")
    for number in range(6):
        made = attempt(tiny_task, codec, number=number, seeded_fault_share=0.3)
        other = renamed(made, method, using, SFTSettings(), agent=AgentSettings(), seed="1")
        for turn in other.rollout.turns:
            _, calls, _ = using.codec.parse(turn.text, TOOLS)
            assert [(c.arguments, c.raw) for c in calls] == [(c.arguments, c.raw) for c in turn.calls]


def test_a_class_is_renamed_wherever_it_stands_as_a_word(tiny_task):
    method = replace(tiny_task, target_symbol="Cache.get")
    say = renaming(method, SFTSettings(), random.Random(0))
    assert say("class Cache:") != "class Cache:" and say("`Cache.get`")[1:].startswith(say("Cache") + ".")
    assert say('raise E(\\"Cache.get\\")') == 'raise E(\\"' + say("`Cache.get`")[1:-1] + '\\")'
    assert say("class LFUCache(Caches):") == "class LFUCache(Caches):"


@pytest.mark.parametrize(("before", "shown"), [(0, (10, 12)), (4, (6, 12)), (30, (1, 12))])
def test_an_attempt_reads_what_it_is_told_to(tiny_task, before, shown):
    settings = SFTSettings(read_before=before)
    made = scripted_expert.expert_attempt(
        tiny_task, renderer(), settings, AGENT, attempt=0, seed=0, context_length=1 << 20
    )
    read = next(
        o.text for turn in made.rollout.turns for o in turn.observations if o.text.startswith("lines ")
    )
    assert read.startswith(f"lines {shown[0]}-{shown[1]}")


def test_every_attempt_is_imitated_once_before_any_twice():
    drawn = [sft.draw(10, 4, step, seed=0) for step in range(5)]
    flat = [pair for batch in drawn for pair in batch]
    assert [sorted(flat[:10]), sorted(flat[10:])] == [[(i, around) for i in range(10)] for around in (0, 1)]
    assert drawn == [sft.draw(10, 4, step, seed=0) for step in range(5)]


def test_a_task_without_a_file_to_edit_is_not_imitated(tiny_task, tmp_path):
    """Whole modules can go; with an edit nobody brings them back, and the warm-up uses the other tasks."""
    assert scripted_expert.is_one_edit(tiny_task) and scripted_expert.lines_written(tiny_task) > 0
    shutil.copytree(tiny_task.folder, tmp_path / "gone")
    gone = replace(tiny_task, folder=tmp_path / "gone")
    folder.original(gone, tiny_task.target_path).unlink()
    assert not scripted_expert.is_one_edit(gone) and scripted_expert.lines_written(gone) == 0
    with pytest.raises(RecipeError, match="solved by an edit of one file"):
        scripted_expert.play(
            None,  # type: ignore[arg-type]
            [gone],
            lambda task, number: pytest.fail("it cannot be played"),
            attempts=1,
            threads=1,
            progress=lambda *_: None,
        )
