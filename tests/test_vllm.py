"""The real thing: vLLM's CPU build serves a tiny model while its weights change, and a run trains through it.

`scripts/vllm-environment` leaves build/vllm ready; without it these tests are skipped. A real model is trained by
benchmarks/vllm_training.py.
"""

from __future__ import annotations

import json
import os
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest
import torch
from test_practice import recipe_of
from test_weight_updates import Trainer, far, logps, update
from tiny_model import tiny_tokenizer

from woodshed.cli.train import run_recipe
from woodshed.engines import guard, vllm
from woodshed.engines.engine import SampleRequest, SamplerSettings
from woodshed.engines.http import HttpEngine
from woodshed.engines.servers import ServedModel, StartSettings, serving
from woodshed.learning.weight_files import WeightFiles
from woodshed.records import Rollout, SamplerError, Task
from woodshed.runs.folder import RunDir


def is_absent() -> bool:
    try:
        return not vllm.find()
    except SamplerError:
        return True


pytestmark = [
    pytest.mark.vllm,
    pytest.mark.timeout(900),
    pytest.mark.skipif(is_absent(), reason="run scripts/vllm-environment"),
]
LENGTH = "--max-model-len=4096"
PROMPT = (5, 6, 7, 8)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model, its output layer tied, with heads of 32, the smallest that vLLM's attention takes."""
    from transformers import LlamaConfig, LlamaForCausalLM

    tokenizer, folder = tiny_tokenizer(), tmp_path_factory.mktemp("model")
    config = LlamaConfig(
        vocab_size=len(tokenizer) + 8,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=32,
        max_position_embeddings=4096,
        initializer_range=0.3,
        tie_word_embeddings=True,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    torch.manual_seed(0)
    made = LlamaForCausalLM(config)
    with torch.no_grad():
        made.model.embed_tokens.weight[tokenizer.eos_token_id] = 0.0  # messages are long
    made.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def server(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """One that takes whole weights, from an untied copy of the model, and adapters."""
    arguments = (LENGTH, "--enable-lora", "--max-lora-rank=8", "--max-loras=3")
    settings = StartSettings("vllm", SamplerSettings(), arguments=arguments)
    with serving(settings, ServedModel(model, "float32"), tmp_path_factory.mktemp("engines")) as endpoints:
        yield endpoints[0].url


def test_every_token_is_of_the_weights_that_it_names(
    server: str, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """Whole weights, the second time as a difference, and adapters, while messages are written."""
    from woodshed.engines.http import EndpointSettings

    monkeypatch.setattr(WeightFiles, "has_differences", True)
    for rank in (8, 0):  # adapters belong to the weights that the server began with
        trainer = Trainer(model, tmp_path / str(rank), lora_rank=rank, dtype="float32")
        snapshots = []
        with closing(HttpEngine(EndpointSettings(url=server), trainer.renderer)) as engine:
            update(engine, trainer)
            for future in engine.submit_all([SampleRequest(PROMPT, 8, seed) for seed in range(6)]):
                future.result(300)  # the first ones take seconds
            futures = engine.submit_all([SampleRequest(PROMPT, 3900, seed) for seed in range(6)])
            for _ in range(2):
                time.sleep(0.7)
                snapshots.append({name: value.clone() for name, value in trainer.policy.trainable.items()})
                trainer.step(0.2)
                update(engine, trainer)
                assert engine.weights.canary_gap < 1e-3
                futures.append(engine.submit(SampleRequest(PROMPT, 100, trainer.version)))
            samples = [future.result(300) for future in futures]
        snapshots.append({name: value.clone() for name, value in trainer.policy.trainable.items()})
        spans = [len(sample.versions) for sample in samples]
        assert max(spans) == (1 if rank else 3), spans
        gaps = []
        for version, weights in enumerate(snapshots):
            trainer.policy.load_weights(weights)
            for sample in samples:
                told, begin = logps(trainer, PROMPT + sample.ids), 0
                for named, count in sample.versions:
                    gap = far(sample, told, begin, count)
                    assert named == version or count < 20 or gap > 0.1
                    gaps += [gap] if named == version else []
                    begin += count
        assert max(gaps) < 1e-2, gaps


def test_a_run_starts_vllm_and_survives_its_death(model: Path, tiny_task: Task, tmp_path: Path):
    recipe = recipe_of(
        tiny_task,
        tmp_path,
        policy={"model": str(model), "lora_rank": 4, "codec": "plain"},
        rl={"steps": 2, "tasks_per_step": 1},
        curriculum={"repeats": True},
        engine={"kind": "vllm", "arguments": [LENGTH]},
    )
    run = RunDir.create(recipe.runs / recipe.name, recipe=recipe.to_toml(), manifest={})
    record = run.path / "engines" / "s0.json"

    def kill() -> None:
        """Kill the process that answers, as soon as the first step was taken."""
        while not any(phase == "train" for phase, _, _ in run.read("metrics")):
            time.sleep(0.05)
        os.kill(json.loads(record.read_text())["pid"], signal.SIGKILL)

    killer = threading.Thread(target=kill, daemon=True)
    killer.start()
    run_recipe(recipe, run, lambda _done, _total, _text: None)
    killer.join(1)
    steps = [line for phase, _, line in run.read("metrics") if phase == "train"]
    assert len(steps) == 2 and max(line["logp_gap_mean"] for line in steps) < 1e-3
    assert steps[0]["grad_norm"] > 0, "the second step is sampled by weights that the first one moved"
    for phase, step, rollout in run.read("rollouts", Rollout):
        assert phase != "train" or {v for turn in rollout.turns for v, _ in turn.versions} == {step}
    ended = json.loads(record.read_text())
    assert (ended["state"], ended["starts"]) == ("ended", 2) and not guard.members(str(record.resolve()))
