"""The real thing: vLLM's CPU build serves a tiny model, and two steps train through it.

`scripts/vllm-environment` leaves build/vllm ready; without it these tests are skipped. benchmarks/vllm_training.py does
the same with a real model.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from tiny_model import tiny_tokenizer

from woodshed.records import Rollout, SamplerError, Task

ROOT = Path(__file__).parent.parent
sys.path.append(str(ROOT / "benchmarks"))

import vllm_training  # noqa: E402

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.skipif(not vllm_training.PYTHON.exists(), reason="run scripts/vllm-environment"),
]


def model_of(folder: Path, *, is_tied: bool) -> Path:
    """The tiny model with heads of 32, the smallest that vLLM's attention takes, tied to its output layer or not."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    tokenizer = tiny_tokenizer()
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
        tie_word_embeddings=is_tied,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    torch.manual_seed(0)
    LlamaForCausalLM(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


SERVERS = {
    f"{head}, {adapters}": (head == "tied", adapters == "adapters")
    for head in ("tied", "own head")
    for adapters in ("adapters", "no adapters")
}


@pytest.fixture(scope="module", params=SERVERS.values(), ids=list(SERVERS))
def server(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[str, Path, bool]]:
    """A server's address, its model, and if adapters are enabled."""
    is_tied, enable_lora = request.param
    folder = tmp_path_factory.mktemp("served")
    model = model_of(folder / "model", is_tied=is_tied)
    with vllm_training.serving(model, folder / "server", enable_lora=enable_lora) as url:
        yield url, model, enable_lora


@pytest.mark.parametrize("weights", ["adapter", "whole"])
def test_two_steps_through_vllm(
    server: tuple[str, Path, bool], weights: str, tiny_task: Task, tmp_path: Path
):
    """Adapters and whole weights arrive, also where the output layer is the embedding."""
    url, model, enable_lora = server
    tasks = tiny_task.folder.parent
    if weights == "adapter" and not enable_lora:
        with pytest.raises(SamplerError, match="load_lora_adapter"):
            vllm_training.train_through(url, model, tasks, tmp_path, weights)
        return
    run = vllm_training.train_through(url, model, tasks, tmp_path, weights)
    gaps = vllm_training.gaps(run)
    assert len(gaps) == 2 and max(gaps) < 1e-3, gaps
    steps = [line for phase, _, line in run.read("metrics") if phase == "train"]
    assert steps[0]["grad_norm"] > 0, "the second step is sampled by weights that the first one moved"
    for phase, step, rollout in run.read("rollouts", Rollout):
        assert phase != "train" or {v for turn in rollout.turns for v, _ in turn.versions} == {step}
