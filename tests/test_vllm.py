"""The real thing: vLLM's CPU build serves a tiny model, and two steps train through it with adapters loaded.

`scripts/vllm-environment` leaves build/vllm ready; without it these tests are skipped.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from test_practice import recipe_of
from tiny_model import tiny_tokenizer

from woodshed.records import Rollout, SamplerError, Task
from woodshed.runs.folder import RunDir
from woodshed.train import train

PYTHON = Path(__file__).parent.parent / "build" / "vllm" / "bin" / "python"
START_S = 400.0

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.skipif(not PYTHON.exists(), reason="run scripts/vllm-environment"),
]


@pytest.fixture(scope="module", params=[True, False], ids=["tied", "untied"])
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny model with heads of 32, the smallest that vLLM's attention takes, tied to its output layer or not."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    folder, tokenizer = tmp_path_factory.mktemp("served") / "model", tiny_tokenizer()
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
        tie_word_embeddings=request.param,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    torch.manual_seed(0)
    LlamaForCausalLM(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def server(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The address of a server in a session of its own, which is ended as a group."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    own = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    own |= {
        "VLLM_ALLOW_RUNTIME_LORA_UPDATING": "1",
        "VLLM_SERVER_DEV_MODE": "1",
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "VLLM_NO_USAGE_STATS": "1",
        "OMP_NUM_THREADS": "1",
        "HF_HUB_OFFLINE": "1",
    }
    options = f"--host 127.0.0.1 --port {port} --served-model-name policy --dtype float32 --enforce-eager "
    options += "--logprobs-mode processed_logprobs --generation-config vllm --enable-lora --max-loras 2"
    command = [
        str(PYTHON),
        "-m",
        "vllm.entrypoints.openai.api_server",
        "--model",
        str(model),
        *options.split(),
    ]
    folder = tmp_path_factory.mktemp("vllm")
    with (folder / "log").open("wb") as log:
        process = subprocess.Popen(
            command, cwd=folder, env=own, stdout=log, stderr=subprocess.STDOUT, start_new_session=True
        )
    url = f"http://127.0.0.1:{port}"
    try:
        wait_for(url, process, folder / "log")
        yield url
    finally:
        os.killpg(process.pid, signal.SIGKILL)  # its workers outlive a parent that is asked politely
        process.wait()


def wait_for(url: str, process: subprocess.Popen[bytes], log: Path) -> None:
    deadline = time.monotonic() + START_S
    while time.monotonic() < deadline and process.poll() is None:
        try:
            if httpx.get(f"{url}/health", timeout=5).is_success:
                return
        except httpx.HTTPError:
            time.sleep(1)
    raise AssertionError(f"no answer within {START_S:g} s: {log.read_text(errors='replace')[-3000:]}")


def trained(server: str, model: Path, task: Task, root: Path, lora_rank: int) -> RunDir:
    recipe = recipe_of(
        task,
        root,
        policy={"model": str(model), "lora_rank": lora_rank, "codec": "plain"},
        rl={"steps": 2, "tasks_per_step": 1},
        curriculum={"repeats": True},
        optimizer={"learning_rate": 0.01},
        engine={"kind": "http", "servers": [{"url": server, "model": "policy"}]},
    )
    run = RunDir.create(recipe.runs / recipe.name, recipe=recipe.to_toml(), manifest={})
    train(recipe, run, lambda _done, _total, _text: None)
    return run


def is_tied(model: Path) -> bool:
    return json.loads((model / "config.json").read_text())["tie_word_embeddings"]


@pytest.mark.parametrize("lora_rank", [4, 0], ids=["adapter", "whole"])
def test_two_steps_through_vllm(server: str, model: Path, lora_rank: int, tiny_task: Task, tmp_path: Path):
    """Adapters and whole weights arrive; an output layer that is the embedding stays old, which is refused."""
    if is_tied(model) and not lora_rank:
        with pytest.raises(SamplerError, match=r"took new weights, and is .* goes on with old ones"):
            trained(server, model, tiny_task, tmp_path, lora_rank)
        return
    run = trained(server, model, tiny_task, tmp_path, lora_rank)
    steps = [line for phase, _, line in run.read("metrics") if phase == "train"]
    gaps = [line["logp_gap_mean"] for line in steps]
    print(f"log-prob gap of server against trainer, nats a token: {gaps}")
    assert len(gaps) == 2 and max(gaps) < 1e-3
    assert steps[0]["grad_norm"] > 0, "the second step is sampled by weights that the first one moved"
    for phase, step, rollout in run.read("rollouts", Rollout):
        assert phase != "train" or {v for turn in rollout.turns for v, _ in turn.versions} == {step}
