"""Trainer and collector beside each other: a real model learns from attempts that are up to a step old."""

from __future__ import annotations

import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import tiny_training
import torch
from local_server import serving
from test_practice import recipe_of
from tiny_training import feedback_of, four_attempts, hint_for, samples_of, tiny_policy

from woodshed.cli import asynchronous
from woodshed.cli.train import run_recipe, say_recipe
from woodshed.engines.elsewhere import EngineElsewhere
from woodshed.engines.engine import SampleRequest
from woodshed.learning.checkpoint import TrainState
from woodshed.learning.loss_settings import LossSettings
from woodshed.learning.policy import Policy
from woodshed.records import RecipeError, Rollout, RunError, SamplerError, Task
from woodshed.runs.folder import RunDir
from woodshed.settings import validate
from woodshed.stages import preflight
from woodshed.stages.asynchronous.launcher import commands
from woodshed.stages.asynchronous.messages import Publication, Taken
from woodshed.stages.asynchronous.source import Tailing, staleness
from woodshed.stages.recipe import Recipe
from woodshed.stages.task_sets import task_sets

STEPS = 3
HTTP = {"kind": "http", "servers": [{"url": "http://127.0.0.1:9"}]}


def asynchronous_recipe(task: Task, root: Path, **more: Any) -> Recipe:
    settings: dict[str, Any] = {
        "rl": {"steps": STEPS, "tasks_per_step": 1, "staleness": 1},
        "curriculum": {"repeats": True},
        "engine": HTTP,
    }
    return recipe_of(task, root, **settings | more)


def test_a_step_learns_from_attempts_of_the_version_before(
    tiny_task: Task, tiny_model_dir: Path, tmp_path: Path
):
    with serving(tiny_model_dir) as (url, _):
        policy = {"model": str(tiny_model_dir), "lora_rank": 4, "codec": "plain"}
        engine = {"kind": "http", "servers": [{"url": url}]}
        sets = {"train": [str(tiny_task.folder.parent)], "heldout": [str(tiny_task.folder.parent)]}
        recipe = asynchronous_recipe(tiny_task, tmp_path, policy=policy, engine=engine, tasks=sets)
        run = RunDir.create(recipe.runs / recipe.name, recipe=recipe.to_toml(), manifest={})
        task_sets(recipe, run)
        run.unlock()
        sides = [RunDir.open(run.path) for _ in range(2)]
        sides[0].lock("collector")
        collector = threading.Thread(
            target=asynchronous.collect, args=(sides[0], (), lambda *_: None), daemon=True
        )
        collector.start()
        sides[1].lock("trainer")
        run_recipe(recipe, sides[1], lambda *_: None)
        collector.join(20)
        assert not collector.is_alive(), "it ends by itself once nothing is left to do"
    steps = [record for phase, _, record in run.read("metrics") if phase == "train"]
    assert [each["staleness_max"] for each in steps] == [0, 1, 1]
    assert "drift_mean" not in steps[0] and steps[0]["logp_gap_mean"] < 1e-3
    assert steps[1]["drift_mean"] > 10 * steps[0]["logp_gap_mean"], (
        "the policy has moved since they were written"
    )
    assert {record["version"] for _, _, record in run.read("published")} == set(range(STEPS + 1))
    assert [each.groups for _, _, each in run.read("taken", Taken)] == [(0,), (1,), (2,)]
    measured = [step for phase, step, _ in run.read("metrics") if phase == "eval"]
    assert measured == [0, STEPS]
    for phase, step, made in run.read("rollouts", Rollout):
        versions = {version for turn in made.turns for version, _ in turn.versions}
        assert versions <= ({step} if phase == "eval" else {step - 1, step})
    assert (run.path / "policy").is_dir()


@pytest.mark.parametrize(("form", "teacher"), [("separate", "frozen"), ("packed", "live")])
def test_older_tokens_are_told_apart_and_change_no_loss(form: str, teacher: str, tmp_path: Path):
    made = four_attempts(tmp_path)
    turns = [replace(turn, versions=((-1, 3), (0, len(turn.sampled_ids) - 3))) for turn in made[1].turns]
    made[1] = replace(made[1], turns=tuple(turns))
    hint = hint_for(made[1], 0)
    samples = samples_of(made, [1.0, 0.0, 0.0, 1.0], [hint])
    marked = [sample.at(0) for sample in samples]
    assert [sum(sample.old) for sample in marked] == [0, 3 * len(turns), 0, 0]
    assert samples[1].at(-1).old == ()
    found = []
    for given in (samples, marked):
        policy = tiny_policy()
        nudge(policy)
        feedback = feedback_of(forward=form, teacher=teacher)
        found.append(tiny_training.step(policy, given, feedback=feedback, start=policy.snapshot(), rate=0.0))
    same, apart = found
    assert "drift_mean" not in same
    assert {k: v for k, v in apart.items() if k in ("rl_loss", "kl_loss", "grad_norm")} == {
        k: v for k, v in same.items() if k in ("rl_loss", "kl_loss", "grad_norm")
    }
    assert apart["drift_mean"] > 0 and apart["logp_gap_mean"] > 0
    assert apart["drift_mean"] != apart["logp_gap_mean"] != same["logp_gap_mean"]


def nudge(policy: Policy) -> None:
    """Move the weights a little away from those that sampled."""
    with torch.no_grad():
        for weight in policy.trainable.values():
            weight.add_(0.05 * torch.ones_like(weight))


@pytest.mark.parametrize(
    ("more", "says"),
    [
        ({"engine": {"kind": "local"}}, r"rl\.staleness = 1 needs an engine.*'local'.*'vllm'"),
        ({"stages": ["rl", "evaluate"]}, r"stages = \['rl', 'evaluate'\]|measures the same weights"),
        ({"stages": ["distill", "rl"], "distill": {"tasks_per_step": 1}}, r"these are \['distill', 'rl'\]"),
        ({"gate": {"every": 2}}, r"gate\.every = 2 samples and scores in turns"),
        ({"loss": {"estimator": "gspo"}}, r"loss\.estimator = 'gspo'.*without a bound"),
    ],
)
def test_what_needs_engine_and_trainer_in_one_process_is_refused(
    more: dict[str, Any], says: str, tiny_task: Task, tmp_path: Path
):
    with pytest.raises(RecipeError, match=says):
        preflight.refuse(asynchronous_recipe(tiny_task, tmp_path, **more), starts_ranks=True)


@pytest.mark.parametrize("estimator", ["reinforce", "icepop", "mis"])
def test_bounded_ratios_pass(estimator: str, tiny_task: Task, tmp_path: Path):
    loss = validate(LossSettings, {"estimator": estimator}).model_dump()
    preflight.refuse(asynchronous_recipe(tiny_task, tmp_path, loss=loss), starts_ranks=True)


def test_ranks_are_started_by_the_launcher(
    tiny_task: Task, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    recipe = asynchronous_recipe(tiny_task, tmp_path, layout={"fsdp": 2})
    preflight.refuse(recipe, starts_ranks=True)
    say_recipe(recipe, ["r.toml"], explain=False)
    assert "next: woodshed train r.toml" in capsys.readouterr().err
    with monkeypatch.context() as torchrun, pytest.raises(RecipeError, match="torchrun has started 2"):
        torchrun.setenv("WORLD_SIZE", "2")
        preflight.refuse(recipe, starts_ranks=True)
    run = RunDir.create(tmp_path / "run", recipe=recipe.to_toml(), manifest={})
    started = commands(run, recipe.layout.world, ["http://127.0.0.1:1"])
    assert "--nproc-per-node=2" in started["trainer"] and started["collector"][-1] == "http://127.0.0.1:1"
    assert run.resuming.startswith("woodshed train --resume")


def test_the_trainers_engine_samples_nothing(tiny_task: Task, tmp_path: Path):
    engine = EngineElsewhere(None, 100)  # type: ignore[arg-type]
    with pytest.raises(SamplerError, match=r"rl\.staleness"):
        engine.submit(SampleRequest((1,), 1, 0))


class Pretended:
    """A session whose trainer is not asked."""

    def __init__(self, recipe: Recipe, run: RunDir) -> None:
        self.recipe, self.run, self.practice, self.heldout = recipe, run, (), ()

    def progress(self, *_: object) -> None:
        pass


def test_a_collector_that_shows_no_life_is_named(
    tiny_task: Task, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    from woodshed.stages.asynchronous import source

    monkeypatch.setattr(source, "SILENT_S", -1.0)
    recipe = asynchronous_recipe(tiny_task, tmp_path)
    run = RunDir.create(tmp_path / "silent", recipe=recipe.to_toml(), manifest={})
    (run.path / "lock-collector").write_text("4711\n")
    tailing = Tailing(Pretended(recipe, run))  # type: ignore[arg-type]
    with pytest.raises(RunError, match=r"train 0: tasks are waited for.*process 4711.*--resume"):
        tailing.why_dry(0)


def test_weights_of_a_checkpoint_that_is_gone_are_not_learned_from(tiny_task: Task, tmp_path: Path):
    recipe = asynchronous_recipe(tiny_task, tmp_path)
    run = RunDir.create(tmp_path / "back", recipe=recipe.to_toml(), manifest={})
    run.append("published", [Publication(5, "weights/v000005", "adapter", False, False)], "train", 5)
    tailing = Tailing(Pretended(recipe, run))  # type: ignore[arg-type]
    with pytest.raises(RunError, match="version 5 were published, and the newest checkpoint is version 0"):
        tailing.publish(TrainState("rl"), is_last=False)


def test_age_of_tokens_and_messages_over_an_update(tmp_path: Path):
    from scripted import FINISH, READ, calc_task, play

    made = play(calc_task(tmp_path / "calc"), READ, FINISH)
    first, second = made.turns
    count = len(first.sampled_ids)
    turns = (
        replace(first, versions=((2, 1), (3, count - 1))),
        replace(second, versions=((3, len(second.sampled_ids)),)),
    )
    found = staleness([replace(made, turns=turns)], 3)
    tokens = count + len(second.sampled_ids)
    assert found == {
        "staleness_mean": 1 / tokens,
        "staleness_max": 1,
        "versions_per_message": 1.5,
        "continued_messages": 1,
    }
