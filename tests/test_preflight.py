"""Recipes that would learn nothing are refused or warned about before they begin, and stale attempts are refused."""

from __future__ import annotations

import re
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from scripted import EDIT, calc_task, play
from test_practice import recipe_of
from tiny_model import write_tiny_model

from woodshed.cli.train import run_recipe
from woodshed.records import RecipeError, Rollout, RunError, Task
from woodshed.runs.folder import RunDir
from woodshed.settings import read, validate
from woodshed.stages import preflight
from woodshed.stages.plan import plan
from woodshed.stages.recipe import Recipe
from woodshed.stages.session import refuse_stale

RECIPES = sorted((Path(__file__).parents[1] / "recipes").glob("*.toml"))


def recipe(**sections: Any) -> Recipe:
    return validate(Recipe, {"name": "vain", **sections})


@pytest.mark.parametrize(
    ("sections", "messages"),
    [
        (
            {"rollout": {"attempts": 1}, "feedback": {"weight": 0}},
            ["rollout.attempts = 1", "feedback.weight = 0"],
        ),
        ({"rollout": {"attempts": 1}, "feedback": {"max_targets": 0}}, ["feedback.max_targets = 0"]),
        ({"loss": {"weight": 0}, "feedback": {"weight": 0}}, ["loss.weight = 0"]),
        (
            {"rollout": {"attempts": 1}, "feedback": {"weight": 0}, "loss": {"kl_coef": 0.1}},
            ["rollout.attempts = 1"],
        ),
    ],
)
def test_what_can_teach_nothing_is_refused(sections: dict[str, Any], messages: list[str]):
    with pytest.raises(RecipeError) as caught:
        preflight.refuse(recipe(**sections))
    assert all(message in str(caught.value) for message in messages)


@pytest.mark.parametrize(
    ("sections", "warning"),
    [
        ({}, ""),
        ({"rollout": {"attempts": 1}}, "feedback alone does: rollout.attempts = 1"),
        ({"optimizer": {"learning_rate": 0}}, "optimizer.learning_rate = 0: the 6 steps move no weight"),
        ({"stages": ["sft"], "sft": {"learning_rate": 0}}, "sft.learning_rate = 0"),
        ({"sft": {"steps": 1}}, "sft.steps = 1 has no effect: stages = ['rl'] does not name 'sft'"),
        ({"stages": ["sft"]}, ""),
        ({"stages": ["sft"], "rollout": {"attempts": 1}, "feedback": {"weight": 0}}, ""),
        ({"loss": {"weight": 0}}, ""),
    ],
)
def test_what_may_be_meant_is_said(sections: dict[str, Any], warning: str):
    made = recipe(**sections)
    preflight.refuse(made)
    found = preflight.warnings(made)
    assert (warning in found[0] and len(found) == 1) if warning else not found


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.name)
def test_the_shipped_recipes_learn(path: Path):
    made = read(Recipe, path)
    preflight.refuse(made)
    assert not preflight.warnings(made)
    if "rl" in made.stages:
        assert made.curriculum.repeats, "the published figures were measured with tasks that come again"


@pytest.mark.parametrize("steps", [1, 2])
def test_a_run_that_cannot_learn_or_runs_dry_ends_before_the_model_is_loaded(
    tiny_task: Task, tmp_path: Path, steps: int
):
    made = recipe_of(tiny_task, tmp_path, rl={"steps": steps, "tasks_per_step": 1})
    if steps == 1:
        made = made.model_copy(
            update={
                "rollout": made.rollout.model_copy(update={"attempts": 1}),
                "feedback": made.feedback.model_copy(update={"weight": 0}),
            }
        )
    run = RunDir.create(tmp_path / "run", recipe=made.to_toml(), manifest={})
    said: list[str] = []
    message = "would learn nothing" if steps == 1 else r"needs 2 tasks, and there are 1.*lower rl\.steps to 1"
    with pytest.raises(RecipeError, match=message):
        run_recipe(made, run, lambda _done, _total, text: said.append(text))
    assert said == []


def test_steps_without_a_signal_say_so_and_repeats_are_counted(tiny_task: Task, tmp_path: Path):
    """A random model solves nothing: groups end alike, and RL alone has no hints."""
    write_tiny_model(tmp_path / "model")
    made = recipe_of(
        tiny_task,
        tmp_path,
        rl={"steps": 2, "tasks_per_step": 1},
        rollout={"attempts": 2},
        feedback={"weight": 0},
        curriculum={"repeats": True},
    )
    run = RunDir.create(tmp_path / "run", recipe=made.to_toml(), manifest={})
    said: list[str] = []
    run_recipe(made, run, lambda _done, _total, text: said.append(text))
    assert [text[:8] for text in said if "nothing to learn from" in text] == ["train 0:", "train 1:"]
    metrics = [line for phase, _, line in run.read("metrics") if phase == "train"]
    assert [line["repeated_tasks"] for line in metrics] == [0, 1]
    # what a run folder holds of other weights is refused when it is read back
    rollouts = [found for _, _, found in run.read("rollouts", Rollout)]
    assert {version for found in rollouts for turn in found.turns for version, _ in turn.versions} == {0, 1}
    longer = made.model_copy(update={"rl": made.rl.model_copy(update={"steps": 3})})
    old = [replace(found, id=found.id.replace("train-1", "train-2")) for found in rollouts[-2:]]
    run.append("rollouts", old, "train", 2)
    with pytest.raises(
        RunError, match=r"train-2-.* was sampled by version 1 of the policy.*at hand are version 2"
    ):
        run_recipe(longer, run, lambda *_: None)


def test_attempts_of_the_weights_at_hand_are_taken(tmp_path: Path):
    made = play(calc_task(tmp_path / "calc"), EDIT)
    run = RunDir.create(tmp_path / "run", recipe="", manifest={})
    refuse_stale(run, [made], 0)
    with pytest.raises(RunError, match=r"version 0 of the policy"):
        refuse_stale(run, [made], 1)


@pytest.mark.parametrize(
    ("stages", "message"),
    [
        (["sft", "lr"], r"no stage 'lr'; did you mean 'rl'\?.*package\.module:name"),
        (["rl", "rl"], r"'rl' 2 times.*second run from the policy of the first"),
        (["evaluate"], r"trains nothing; name sft, distill or rl, or measure a model with `woodshed eval`"),
        (["sft", "evaluate", "rl"], r"'rl' right after 'evaluate' measures the same weights twice"),
        (["evaluate", "evaluate", "sft"], r"measures the same weights twice"),
        (["sft", "evaluate"], r"'evaluate', but there are no tasks to measure on; set tasks\.heldout"),
        (["no_such.module:run"], r"'no_such\.module:run': there is no module 'no_such'"),
        (["json:no_such"], r"'json:no_such': .* has no 'no_such'"),
        (["json:__name__"], r"'json:__name__' is 'json', which cannot be called"),
        (["json:dumps"], r"'json:dumps' takes \(obj, .*it is called with \(session, state\)"),
    ],
)
def test_a_stage_that_cannot_be_is_refused(stages: list[str], message: str):
    with pytest.raises(RecipeError, match=message):
        preflight.refuse(recipe(stages=stages))


def test_evaluations_are_numbered_by_steps_since_the_first_one():
    tasks = {"heldout": ["tasks"]}
    for stages, steps_before in (
        (["rl"], [0]),
        (["sft", "rl"], [0, 0]),
        (["sft", "evaluate"], [0, 0]),
        (["evaluate", "sft", "rl"], [0, 0, 5]),
        (["sft", "evaluate", "distill", "evaluate"], [0, 0, 0, 7]),
    ):
        made = recipe(stages=stages, tasks=tasks, sft={"steps": 5}, distill={"steps": 7})
        assert [stage.steps_before for stage in plan(made)] == steps_before


@pytest.mark.parametrize(
    ("layout", "started", "messages"),
    [
        (
            {"fsdp": 2},
            "",
            ["is for 2 ranks, and 1 rank started", "torchrun --nproc-per-node 2 -m", "fsdp=1"],
        ),
        ({}, "2", ["1 x 1 is for 1 rank, and 2 ranks started", "`woodshed train ...`", "layout.fsdp=2"]),
        ({"fsdp": 2, "replicate": 2}, "6", ["for 4 ranks, and 6 ranks", "set layout.fsdp=3"]),
        ({"fsdp": 2, "replicate": 2, "ep": 4}, "3", ["layout.fsdp=3 layout.replicate=1 layout.ep=1"]),
        ({"fsdp": 4, "ep": 3}, "4", ["layout.ep = 3 does not divide the 4 ranks"]),
    ],
)
def test_a_layout_for_other_ranks_is_refused_with_what_fits(
    monkeypatch: pytest.MonkeyPatch, layout: dict[str, int], started: str, messages: list[str]
):
    monkeypatch.setenv("WORLD_SIZE", started or "1")
    with pytest.raises(RecipeError) as caught:
        preflight.refuse(recipe(layout=layout))
    assert all(message in str(caught.value) for message in messages)
    if "set " in str(caught.value):  # the advice is true
        advised = dict(re.findall(r"layout\.(\w+)=(\d+)", str(caught.value)))
        preflight.refuse(recipe(layout=layout | advised))


@pytest.mark.parametrize(
    ("device", "gpus", "message"),
    [
        ("cuda", 1, "each needs a GPU of its own, of which there are 1"),
        ("cuda:1", 2, "set policy.device=cuda"),
        ("cpu", 0, ""),
    ],
)
def test_ranks_need_a_gpu_each(monkeypatch: pytest.MonkeyPatch, device: str, gpus: int, message: str):
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    chosen = recipe(layout={"fsdp": 2}, policy={"device": device})
    with pytest.raises(RecipeError, match=message) if message else nullcontext():
        preflight.refuse(chosen)
