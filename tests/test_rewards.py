"""Auxiliary rewards on attempts that really happened, and effort levels in the prompt."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest
from scripted import EDIT, FINISH, PROSE, READ, TEST, UNKNOWN, calc_task, play, renderer

from woodshed import settings
from woodshed.agent.prompt import EFFORT, with_effort
from woodshed.evals import effort as calibration
from woodshed.evals.measures import Graded
from woodshed.experience.annotations import with_levels
from woodshed.feedback.rewards import TERMS, RewardSettings, auxiliary
from woodshed.grading.effort import EffortSettings, penalties
from woodshed.records import RecipeError, RewardTerms, Verdict, from_json, to_json


def test_each_behaviour_pays_what_the_recipe_says_and_as_often_as_it_occurs(tmp_path: Path) -> None:
    task = calc_task(tmp_path / "calc")
    terms = {"tested": 0.25, "invalid_calls": -0.125, "message_words": -0.5, "untested": -1.0}
    good, bad = play(task, READ, EDIT, TEST), play(task, UNKNOWN, PROSE, EDIT)
    assert auxiliary(task, good, terms) == {
        "tested": 0.25,
        "invalid_calls": 0.0,
        "message_words": 0.0,
        "untested": 0.0,
    }
    words = len(PROSE.split())
    assert auxiliary(task, bad, terms) == {
        "tested": 0.0,
        "invalid_calls": -0.25,
        "message_words": -0.5 * words,
        "untested": -1.0,
    }
    assert auxiliary(task, bad, {}) == {}


def test_a_behaviour_that_was_committed_without_finishing_is_not_called_tested(tmp_path: Path) -> None:
    task = calc_task(tmp_path / "calc")
    made = replace(play(task, EDIT, TEST), ended="max_turns")
    again = EDIT.replace("return 2 * x", "return x + x").replace("raise NotImplementedError", "return 2 * x")
    assert TERMS["tested"](task, made) == 0 and TERMS["tested"](task, play(task, EDIT, TEST, again)) == 0


def test_an_unknown_behaviour_is_refused_by_name() -> None:
    with pytest.raises(RecipeError, match="no reward term 'testd'; did you mean 'tested'"):
        settings.read(RewardSettings, None, ["terms.testd=0.1"])
    assert RewardSettings().terms == {}


def test_the_record_of_what_was_paid_comes_back_from_its_json() -> None:
    made = RewardTerms("train-0-a-0", {"tested": 0.25, "effort": -0.5}, "low")
    assert from_json(RewardTerms, to_json(made)) == made and made.total == -0.25


# --- effort levels --------------------------------------------------------------------------------------------------


def test_a_group_has_one_level_and_every_level_comes_equally_often(tmp_path: Path) -> None:
    tasks = [calc_task(tmp_path / name) for name in ("a", "b", "c", "d")]
    chosen = EffortSettings(levels=("low", "medium", "high"))
    seen: Counter[str] = Counter()
    for step in range(3):
        asked_tasks, asked = with_levels(tasks, chosen, step)
        assert set(asked) == {task.id for task in tasks}
        for task, original in zip(asked_tasks, tasks, strict=True):
            assert task.instruction.endswith(f"{EFFORT[asked[task.id]]}\n") and task.id == original.id
        seen.update(asked.values())
    assert set(seen.values()) == {4}
    assert with_levels(tasks, EffortSettings(), 0) == (tasks, {})


def test_the_policy_reads_the_level_and_the_penalty_follows_it(tmp_path: Path) -> None:
    task = calc_task(tmp_path / "calc")
    made = play(with_effort(task, "low"), READ, FINISH)
    assert EFFORT["low"] in renderer().decode(made.turns[0].context_ids)
    chosen = EffortSettings(weight=0.5)
    plain = penalties([made], renderer(), chosen)[made.id]
    assert penalties([made], renderer(), chosen, {task.id: "low"})[made.id] == pytest.approx(4 * plain)
    assert penalties([made], renderer(), chosen, {task.id: "high"})[made.id] == pytest.approx(plain / 4)
    assert penalties([made], renderer(), EffortSettings(), {task.id: "low"}) == {}


def test_effort_against_difficulty_before_and_after(tmp_path: Path) -> None:
    """Three tasks, solved always, half the time and never; afterwards the easy one is done in fewer tokens."""
    tasks = [calc_task(tmp_path / name) for name in ("easy", "half", "hard")]
    solves = {tasks[0].id: (True, True), tasks[1].id: (True, False), tasks[2].id: (False, False)}

    def side(scripts: dict[str, tuple[str, ...]], number: int) -> list[Graded]:
        made = []
        for task in tasks:
            rollout = replace(play(task, *scripts[task.name]), id=f"{task.name}-{number}")
            solved = solves[task.id][number]
            verdict = Verdict(rollout.id, task.id, "graded", float(solved), solved, {})
            made.append(Graded(rollout, verdict))
        return made

    before = side({"easy": (READ, EDIT, READ), "half": (EDIT,), "hard": (FINISH,)}, 0)
    after = side({"easy": (FINISH,), "half": (EDIT,), "hard": (READ, EDIT, READ)}, 1)
    found = calibration.change(before, after)
    assert found["before"]["calibration"] == pytest.approx(-1.0)
    assert found["after"]["calibration"] == pytest.approx(1.0)
    easy = [found[name]["tokens"]["difficulty 0 to 0.25"]["value"] for name in ("before", "after")]
    assert easy == [before[0].behaviour.sampled_tokens, after[0].behaviour.sampled_tokens]
    assert easy[1] < easy[0]
    assert set(found["after"]["tasks"]) == {
        f"difficulty {bucket}" for bucket in ("0 to 0.25", "0.5 to 0.75", "0.75 to 1")
    }
