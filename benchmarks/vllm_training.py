"""Two steps of training through a real vLLM server: adapters loaded into it, and whole weights.

    scripts/vllm-environment
    python benchmarks/vllm_training.py TASKS [--model smollm2-135m] --out benchmarks/results/vllm_training.json

A model whose output layer is its embedding (tied) and one that has its own, each served with and without
`--enable-lora`. Of each kind of weights the row says how far the server's log-probs lie from the trainer's in each
step, or with which error the run was refused.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from woodshed.cli.train import run_recipe
from woodshed.engines import local
from woodshed.records import SamplerError
from woodshed.runs import machine
from woodshed.runs.folder import RunDir
from woodshed.settings import validate
from woodshed.stages.recipe import Recipe

PYTHON = Path(__file__).parent.parent / "build" / "vllm" / "bin" / "python"
START_S = 400.0
"""Longest time that a server may take to start."""
RANKS = {"adapter": 4, "whole": 0}


@contextmanager
def serving(model: Path, folder: Path, *, enable_lora: bool) -> Iterator[str]:
    """The address of a server in a session of its own, which is ended as a group.

    Raises:
        RuntimeError: it does not answer; holds the end of its log.
    """
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
    options += "--logprobs-mode processed_logprobs --generation-config vllm --max-model-len 4096 "
    options += "--enable-lora --max-loras 2" if enable_lora else ""
    command = [PYTHON, "-m", "vllm.entrypoints.openai.api_server", "--model", model, *options.split()]
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "log").open("wb") as log:
        process = subprocess.Popen(
            [str(part) for part in command],
            cwd=folder,
            env=own,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    try:
        _wait_for(f"http://127.0.0.1:{port}", process, folder / "log")
        yield f"http://127.0.0.1:{port}"
    finally:
        os.killpg(process.pid, signal.SIGKILL)  # its workers outlive a parent that is asked politely
        process.wait()


def _wait_for(url: str, process: subprocess.Popen[bytes], log: Path) -> None:
    deadline = time.monotonic() + START_S
    while time.monotonic() < deadline and process.poll() is None:
        try:
            if httpx.get(f"{url}/health", timeout=5).is_success:
                return
        except httpx.HTTPError:
            time.sleep(1)
    raise RuntimeError(f"no answer within {START_S:g} s: {log.read_text(errors='replace')[-3000:]}")


def with_own_output_layer(model: Path, target: Path) -> Path:
    """A copy of a model whose output layer no longer is its embedding, and differs from it."""
    copied: Any = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    copied.config.tie_word_embeddings = False
    embedding = copied.get_input_embeddings().weight.detach()
    head = torch.nn.Linear(*embedding.T.shape, bias=False)
    head.weight = torch.nn.Parameter(1.01 * embedding)
    copied.set_output_embeddings(head)
    copied.save_pretrained(target)
    AutoTokenizer.from_pretrained(model).save_pretrained(target)
    return target


def train_through(server: str, model: Path, tasks: Path, root: Path, weights: str) -> RunDir:
    """The run folder of two steps through the server.

    Raises:
        SamplerError: the server does not compute with the weights that it took.
    """
    settings: dict[str, Any] = {
        "name": weights,
        "runs": str(root),
        "tasks": {"train": [str(tasks)], "heldout": []},
        "policy": {"model": str(model), "lora_rank": RANKS[weights], "codec": "plain"},
        "agent": {"max_turns": 2, "turn_tokens": 16, "rollout_tokens": 32},
        "rollout": {"attempts": 3},
        "rl": {"steps": 2, "tasks_per_step": 1},
        "curriculum": {"repeats": True},
        "optimizer": {"learning_rate": 0.01 if RANKS[weights] else 1e-4},
        "engine": {"kind": "http", "servers": [{"url": server, "model": "policy"}]},
    }
    recipe = validate(Recipe, settings)
    run = RunDir.create(recipe.runs / recipe.name, recipe=recipe.to_toml(), manifest={})
    run_recipe(recipe, run, lambda _done, _total, _text: None)
    return run


def gaps(run: RunDir) -> list[float]:
    """Mean distance of the server's log-probs from the trainer's in each step, in nats a token."""
    return [line["logp_gap_mean"] for phase, _, line in run.read("metrics") if phase == "train"]


def measure(models: dict[str, Path], tasks: Path, root: Path) -> Iterator[dict[str, Any]]:
    """A row for each model, server and kind of weights that the server takes."""
    for output_layer, model in models.items():
        for enable_lora in (True, False):
            place = root / f"{output_layer}-{'lora' if enable_lora else 'plain'}"
            with serving(model, place, enable_lora=enable_lora) as server:
                for weights in ("adapter", "whole") if enable_lora else ("whole",):
                    row = {"output_layer": output_layer, "enable_lora": enable_lora, "weights": weights}
                    begun = time.monotonic()
                    try:
                        row["logp_gap_mean"] = gaps(train_through(server, model, tasks, place, weights))
                    except SamplerError as error:
                        row["refused"] = str(error)
                    yield row | {"seconds": round(time.monotonic() - begun, 1)}


def main() -> None:
    """Print the rows, and write them as JSON."""
    parser = argparse.ArgumentParser(description="Train two steps through vLLM's CPU build.")
    parser.add_argument("tasks", type=Path)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    rows = []
    with tempfile.TemporaryDirectory() as temporary:
        root = Path(temporary)
        tied = local.load(options.model).directory
        models = {"tied": tied, "own": with_own_output_layer(tied, root / "own")}
        for row in measure(models, options.tasks.resolve(), root):
            print(json.dumps(row), flush=True)
            rows.append(row)
    versions = (PYTHON.parent.parent / "installed").read_text().split()
    report = {"model": options.model, "vllm": versions[0], "rows": rows, "machine": machine.describe()}
    if options.out:
        options.out.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
