"""Mistakes in a recipe, in weights and in what a run left on disk: each is named, with the way out."""

from __future__ import annotations

import json
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny_model import write_tiny_model
from transformers import AutoTokenizer

from woodshed.cli.train import run_recipe
from woodshed.engines import local
from woodshed.learning import checkpoint, tensor_folder
from woodshed.learning.policy import Policy, PolicySettings
from woodshed.records import ModelError, RecipeError, RunError, Task
from woodshed.runs.folder import RunDir
from woodshed.sandbox import store
from woodshed.settings import validate
from woodshed.stages.recipe import Recipe


@pytest.mark.parametrize(
    ("section", "message"),
    [
        ({"loss": {"estimator": "gpso"}}, "loss.estimator = 'gpso'"),
        ({"optimizer": {"decay_share": 2.0}}, "optimizer.decay_share"),
        ({"sft": {"learning_rate": -1e-3}}, "sft.learning_rate"),
        ({"seed": 1 << 80}, "seed"),
        ({"seed": -1}, "seed"),
        ({"policy": {"lora_rank": 100_000}}, "policy.lora_rank"),
        ({"feedback": {"detectors": ["unknown_tol"]}}, "no detector 'unknown_tol'"),
    ],
)
def test_a_setting_that_cannot_be_meant_is_refused_before_anything_is_made(section: dict, message: str):
    with pytest.raises(RecipeError, match=message):
        validate(Recipe, {"name": "x", **section})


# --- weights ------------------------------------------------------------------------------------------------------


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return write_tiny_model(tmp_path / "model")


def adapter_of(model: Path, place: Path) -> Path:
    policy, _ = Policy.load(PolicySettings(model=str(model), lora_rank=2), seed=0)
    policy.export(place)
    return place


def opened(model: Path, **given: Any) -> None:
    Policy.load(PolicySettings.model_validate({"model": str(model), **given}), seed=0)


def test_an_adapter_of_a_deeper_model_is_refused(model: Path, tmp_path: Path):
    adapter = adapter_of(model, tmp_path / "adapter")
    opened(model, adapter=str(adapter))
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps({**config, "num_hidden_layers": 1}))
    with pytest.raises(ModelError, match=r"does not have \d+ of its weights, .*layers\.1\."):
        opened(model, adapter=str(adapter))


def test_an_adapter_of_a_wider_model_and_one_without_weights_say_so(model: Path, tmp_path: Path):
    adapter = adapter_of(model, tmp_path / "adapter")
    weights = load_file(adapter / "adapter_model.safetensors")
    wide = {k: torch.zeros(v.shape[0] * 2, v.shape[1]) if "lora_B" in k else v for k, v in weights.items()}
    save_file(wide, adapter / "adapter_model.safetensors")
    with pytest.raises(
        ModelError, match=r"adapter does not fit the model .*Name that model, or another adapter"
    ):
        opened(model, adapter=str(adapter))
    (adapter / "adapter_model.safetensors").unlink()
    with pytest.raises(ModelError, match=r"holds no adapter_model\.safetensors"):
        opened(model, adapter=str(adapter))


@pytest.mark.parametrize("rank", [0, 2])
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_weights_that_are_not_finite_are_named(model: Path, rank: int, value: float):
    weights = load_file(model / "model.safetensors")
    name = next(name for name in weights if "down_proj" in name)
    weights[name][0, 0] = value
    save_file(weights, model / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ModelError, match=r"down_proj.* holds NaN or infinite values"):
        opened(model, lora_rank=rank)


def test_a_tokenizer_of_a_larger_vocabulary_is_refused(model: Path):
    config = json.loads((model / "config.json").read_text())
    weights = load_file(model / "model.safetensors")
    size = len(AutoTokenizer.from_pretrained(model)) - 6
    for name in ("model.embed_tokens.weight", "lm_head.weight"):
        if name in weights:
            weights[name] = weights[name][:size].clone()
    save_file(weights, model / "model.safetensors", metadata={"format": "pt"})
    (model / "config.json").write_text(json.dumps({**config, "vocab_size": size}))
    with pytest.raises(ModelError, match=f"the tokenizer has .* tokens and the model {size}"):
        local.load(str(model))


@pytest.mark.parametrize("device", ["tpu", "cuda:9", "nonsense"])
def test_a_device_that_is_not_there_is_named(model: Path, device: str):
    with pytest.raises(RecipeError, match=f"policy.device = '{device}' cannot be used: .*auto, cpu or cuda"):
        opened(model, device=device)


# --- runs ---------------------------------------------------------------------------------------------------------


def recipe_of(model: Path, task: Task | None, **more: Any) -> Recipe:
    settings = {
        "name": "run",
        "runs": str(model.parent / "runs"),
        "tasks": {"train": [str(task.folder.parent)] if task else []},
        "policy": {"model": str(model), "lora_rank": 2, "codec": "plain"},
        "agent": {"max_turns": 1, "turn_tokens": 16, "rollout_tokens": 16},
        "rollout": {"attempts": 2},
        "rl": {"steps": 2, "tasks_per_step": 1},
        "curriculum": {"repeats": True},
    }
    return validate(Recipe, {**settings, **more})


def run_of(recipe: Recipe) -> RunDir:
    run = RunDir.create(recipe.runs / recipe.name, recipe=recipe.to_toml(), manifest={})
    run_recipe(recipe, run, lambda *_: None)
    return run


def test_a_warm_up_without_tasks_says_so(model: Path):
    with pytest.raises(RecipeError, match=r"nothing to imitate: none of the 0 tasks"):
        run_of(recipe_of(model, None, stages=["sft"], sft={"steps": 2}))


def test_what_is_damaged_in_a_run_is_named_and_the_way_out_works(model: Path, tiny_task: Task):
    recipe = recipe_of(model, tiny_task)
    run = run_of(recipe)
    newest = run.path / "checkpoints" / "rl-000002"
    whole = model.parent / "whole"
    shutil.copytree(run.path / "checkpoints", whole)

    def spoiled(file: Path, data: bytes) -> str:
        file.write_bytes(data)
        with pytest.raises(RunError) as caught:
            run_recipe(recipe, run, lambda *_: None)
        shutil.copy(whole / file.relative_to(run.path / "checkpoints"), file)
        return str(caught.value)

    position = json.loads((newest / "position.json").read_text())
    for odd in ({**position, "step": "x"}, {**position, "watch": {"pace": 3}}, {}):
        said = spoiled(newest / "position.json", json.dumps(odd).encode())
        assert "rl-000002 cannot be read" in said and "delete that folder to resume before it" in said
    file = "shard-00001-model-00001-of-00001.safetensors"
    for name in (f"teacher/{file}", f"policy/{file}", f"optimizer/{file}", "trainer.json"):
        said = spoiled(newest / name, (newest / name).read_bytes()[:100])
        assert "rl-000002 is damaged" in said and "delete that folder to resume before it" in said
    said = spoiled(run.path / "checkpoints" / "before-rl" / "policy" / file, b"")
    assert "before-rl is damaged" in said and "under another name" in said
    shutil.rmtree(newest)  # the way out
    run_recipe(recipe, run, lambda *_: None)
    found = tensor_folder.read(newest / "policy")
    assert all(
        torch.equal(value, found[name])
        for name, value in tensor_folder.read(whole / "rl-000002" / "policy").items()
    )
    assert checkpoint.read_position(newest).step == 2


def test_a_folder_of_a_killed_process_goes_with_the_leftovers_of_its_sandboxes():
    code = (
        "import os, signal\nfrom woodshed.sandbox import store\nwith store.folder() as made:\n"
        "    (made / 'patch').write_text('x'); print(made, flush=True); os.kill(os.getpid(), signal.SIGKILL)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == -signal.SIGKILL
    left = Path(done.stdout.strip())
    assert (left / "patch").exists()
    store.reap()
    assert not left.exists()
    with store.folder() as mine:
        store.reap()
        assert mine.is_dir()
    assert not mine.exists()
