"""The automatic stop: its rule, and a run that really goes back to weights that were well."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch
from tiny_model import write_tiny_model
from tiny_training import four_attempts, tiny_policy, trainer_of

from woodshed import report
from woodshed.cli.app import say_run
from woodshed.cli.train import run_recipe
from woodshed.experience.compile import rollout_sample
from woodshed.learning import checkpoint, packing, stability, tensor_folder
from woodshed.learning.logprobs import token_logps
from woodshed.learning.loss_settings import LossSettings
from woodshed.learning.stability import StabilitySettings, Watch
from woodshed.records import Task
from woodshed.runs.folder import RunDir
from woodshed.settings import validate
from woodshed.stages.recipe import Recipe


def alarms(rates: list[float | None], **settings: float) -> list[str]:
    watch, chosen = Watch(), StabilitySettings.model_validate(settings)
    return [watch.alarm(chosen, rate, None) for rate in rates]


def test_a_rate_that_doubles_within_the_window_stops_the_run():
    assert alarms([0.24, 0.26, 0.66])[2] == "the invalid-call rate rose from 0.240 to 0.660"
    assert alarms([0.24, 0.5])[1]
    assert not any(alarms([0.24, 0.3, 0.4, 0.45, 0.49]))  # below the floor
    assert not any(alarms([0.05, 0.02, 0.4]))
    assert not any(alarms([1.0] * 5)) and not any(
        alarms([0.8, 0.7, 0.9])
    )  # bad from the start is no collapse
    assert not any(alarms([0.3, 0.4, 0.4, 0.4, 0.61]))
    assert any(alarms([0.3, 0.4, 0.4, 0.61]))
    assert not any(alarms([None, 0.3, None, 0.4]))


def test_the_divergence_from_the_start_stops_the_run_where_it_is_bounded():
    chosen = StabilitySettings(max_kl_to_start=0.3)
    assert Watch().alarm(chosen, 0.1, 0.29) == ""
    assert "0.310 nats a token, above 0.3" in Watch().alarm(chosen, 0.1, 0.31)
    assert Watch().alarm(StabilitySettings(), 0.1, 9.0) == ""


def test_a_sampler_of_another_policy_is_an_alarm():
    assert Watch().alarm(StabilitySettings(), 0.1, None, 0.004) == ""
    assert "differ from the trainer's by 2.050 nats" in Watch().alarm(StabilitySettings(), 0.1, 9.0, 2.05)
    assert "by nan nats" in Watch().alarm(StabilitySettings(), 0.1, None, float("nan"))


def test_it_goes_back_to_the_best_step_of_the_window():
    watch, settings = Watch(), StabilitySettings()
    for step, rate in enumerate([0.40, 0.22, 0.25, 0.24, 0.66]):
        reason = watch.alarm(settings, rate, None)
        assert bool(reason) == (step == 4)
    assert watch.healthy(4) == 1
    early = Watch()
    assert [bool(early.alarm(settings, rate, None)) for rate in (0.3, 0.7)] == [False, True]
    assert early.healthy(1) == 0


def test_kl_to_start_is_the_mean_of_k1_over_the_sampled_tokens(tmp_path: Path):
    rollouts = four_attempts(tmp_path)  # log-probs of the tiny policy
    policy = tiny_policy()
    start = policy.snapshot()
    trainer = trainer_of(policy, loss=LossSettings(micro_batch_tokens=500))
    same = stability.kl_to_start(rollouts, partial(trainer.logps, weights=start))
    assert abs(same) < 1e-5
    moved = {name: value + 0.05 * torch.ones_like(value) for name, value in start.items()}
    with policy.using(moved):
        padded = packing.pad([rollout_sample(r) for r in rollouts])
        there = token_logps(policy.logits(padded), padded.tokens_BN, 1.0)
    want = ((padded.logp_sampler_BN - there) * padded.mask_BN).sum() / padded.mask_BN.sum()
    got = stability.kl_to_start(rollouts, partial(trainer.logps, weights=moved))
    assert got == pytest.approx(float(want.detach()), abs=1e-5)


def test_a_run_that_diverges_ends_with_weights_that_were_well(tiny_task: Task, tmp_path: Path, capsys):
    settings = {
        "name": "diverging",
        "runs": str(tmp_path / "runs"),
        "tasks": {"train": [str(tiny_task.folder.parent)], "heldout": [str(tiny_task.folder.parent)]},
        "policy": {"model": str(write_tiny_model(tmp_path / "model")), "lora_rank": 4, "codec": "plain"},
        "agent": {"max_turns": 2, "turn_tokens": 16, "rollout_tokens": 32},
        "rollout": {"attempts": 2},
        "rl": {"steps": 5, "tasks_per_step": 1},
        "curriculum": {"repeats": True},
        "optimizer": {"learning_rate": 0.5, "warmup_steps": 1},
        "feedback": {"forward": "packed", "teacher": "ema"},
        "stability": {"max_kl_to_start": 0.05},
    }
    recipe = validate(Recipe, settings)
    run = RunDir.create(recipe.runs / recipe.name, recipe=recipe.to_toml(), manifest={})
    said: list[str] = []
    run_recipe(recipe, run, lambda done, total, text: said.append(text))
    newest = checkpoint.latest(run, recipe.stage_labels)
    assert newest is not None
    state = checkpoint.read_position(newest)
    assert state.stopped and state.stopped in said and state.step < 5
    assert "nats a token, above 0.05; back to the weights of step" in state.stopped
    version = int(state.stopped.rpartition(" ")[2])
    assert version < state.step
    kept = tensor_folder.read(newest / "policy")
    well = tensor_folder.read(
        run.path / "checkpoints" / (f"rl-{version:06d}" if version else "before-rl") / "policy"
    )
    assert all(torch.equal(kept[name], value) for name, value in well.items())
    lines = [line for line in run.read("metrics") if line[0] != "effort"]
    assert lines[-1][:2] == ("eval", state.step) and lines[-2][2]["stopped"] == state.stopped
    assert (run.path / "policy" / "adapter_model.safetensors").is_file()
    say_run(run)
    assert state.stopped in report.write(run).read_text()
    assert state.stopped in capsys.readouterr().err.replace("\n", " ")
    before = run.read("metrics")
    run_recipe(recipe, run, lambda *_: None)  # resuming changes nothing
    assert run.read("metrics") == before
    assert replace(checkpoint.read_position(newest)) == state


def test_ctrl_c_while_a_checkpoint_is_written_stays_ctrl_c():
    """The library collects it like an error of a rank; as one it would look like a bug of ours."""
    from torch.distributed.checkpoint.api import CheckpointException

    for cause, seen in (
        (KeyboardInterrupt(), KeyboardInterrupt),
        (OSError(28, "full"), OSError),
        (KeyError("x"), ValueError),
    ):
        with pytest.raises(seen), tensor_folder._single_errors():
            raise CheckpointException("save", {0: (cause, None)})  # type: ignore[dict-item]
