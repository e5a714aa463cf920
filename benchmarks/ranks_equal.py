"""Ranks train as one process does: every way of a step, every teacher, every kind of weights and optimizer.

    python benchmarks/ranks_equal.py [--part held]   about ten minutes on two cores

Toy models of Hugging Face classes over gloo, in float32. Each training takes three steps on 7 rollouts of unequal
length in one process, on 2 and on 4 ranks; the 4 write a checkpoint, which 2 and 1 read and go on from by a step.
Forwards: `separate`, one each for student and teacher; `joint`, branches of one forward and one backward pass between
measurements. Axes: weights cut over all ranks, and rows shared by two of them (`cp`).

Reported: largest difference of a weight from one process, after the steps and after the step behind the checkpoint, and
if every tensor of the checkpoint came back bit by bit. Also: peak memory of each rank that loads a model whole and in
shards; what a step waits for its checkpoint; and the work of the slowest rank where rollouts are dealt by tokens and by
work (calculated for lengths of a heavy tail).
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import transformers
from torch import Tensor

TESTS = Path(__file__).parents[1] / "tests"
sys.path[:0] = [str(TESTS), str(TESTS / "distributed")]
from learning_scenarios import Training  # noqa: E402  # pyright: ignore[reportMissingImports]
from tiny_model import tiny_tokenizer  # noqa: E402  # pyright: ignore[reportMissingImports]
from worlds import launch  # noqa: E402  # pyright: ignore[reportMissingImports]

from woodshed.experience.samples import TrainingSample  # noqa: E402
from woodshed.learning import packing, ranks  # noqa: E402
from woodshed.learning.checkpoint import CheckpointWriter, TrainState  # noqa: E402
from woodshed.learning.layout import LayoutSettings, shard  # noqa: E402
from woodshed.learning.optimizer import OptimizerSettings  # noqa: E402
from woodshed.learning.policy import Policy, PolicySettings  # noqa: E402
from woodshed.learning.trainer import Trainer  # noqa: E402
from woodshed.runs import machine  # noqa: E402
from woodshed.runs.folder import RunDir  # noqa: E402

FORWARDS = {"separate": "separate", "joint": "packed"}
TEACHERS = ("live", "frozen", "ema", "trust-region")
WEIGHTS = {"full": 0, "LoRA": 4}
AXES: dict[str, dict[str, int]] = {"cut": {}, "shared rows": {"cp": 2}}


def trainings() -> dict[str, Training]:
    """All combinations that a recipe accepts: Muon is for full weights, and shared rows have separate forwards."""
    found = {}
    for axes, forward, teacher, weights, optimizer in itertools.product(
        AXES, FORWARDS, TEACHERS, WEIGHTS, ("adamw", "muon")
    ):
        if (weights == "LoRA" and optimizer == "muon") or (axes != "cut" and forward != "separate"):
            continue
        found[f"{axes}, {forward}, {teacher}, {weights}, {optimizer}"] = Training(
            rank=WEIGHTS[weights],
            optimizer=optimizer,
            teacher=teacher,
            steps=3,
            forward=FORWARDS[forward],
            layout=AXES[axes],
        )
    return found


def equal() -> list[dict[str, Any]]:
    """A row for each training."""
    cases = trainings()
    with tempfile.TemporaryDirectory() as folder:
        four, two, one = (
            launch(size, "learning_scenarios:run", cases, folder, 4, list(cases), timeout_s=1800)[0]
            for size in (4, 2, 1)
        )
    rows = []
    for name in cases:
        kept, weights = four["checkpoints"][name], one[name]["weights"]
        begun = {key: kept[f"start {key}"] for key in weights}
        later = f"{name}, a step later"
        loaded = [each["checkpoints"][name] for each in (two, one)]
        rows.append(
            {
                "training": name,
                "moved": apart(weights, begun),
                "four": apart(four[name]["weights"], weights),
                "two": apart(two[name]["weights"], weights),
                "is_loaded_whole": all(apart(each, kept) == 0 for each in loaded),
                "later": apart(two["checkpoints"][later], one["checkpoints"][later]),
            }
        )
    return rows


def apart(some: dict[str, Tensor], others: dict[str, Tensor]) -> float:
    """Largest difference of two sets of tensors."""
    return max(float((some[key].double() - value.double()).abs().max()) for key, value in others.items())


# What ranks hold, wait for and do ---------------------------------------------------------------------------------


def write_model(folder: Path, num_layers: int) -> int:
    """A model in float32, with 12 layers of 103M weights; its bytes."""
    config = transformers.LlamaConfig(
        vocab_size=16_384 if num_layers > 1 else 512,
        hidden_size=768,
        intermediate_size=2048,
        num_hidden_layers=num_layers,
        num_attention_heads=12,
        num_key_value_heads=4,
    )
    model = transformers.LlamaForCausalLM(config)
    model.save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)
    return sum(weight.numel() * weight.element_size() for weight in model.parameters())


def loading(folder: str, is_whole: bool) -> dict[str, int]:
    """Peak memory in bytes that a rank takes to load its shards, beyond what it had before: all, and without pages of
    files, which the kernel can drop. Libraries are loaded by a small model first."""
    before, own, is_loaded = (0, 0), [0], threading.Event()

    def watch() -> None:
        while not is_loaded.wait(0.002):
            own[0] = max(own[0], memory("RssAnon"))

    for name in ("small", "model"):
        Path("/proc/self/clear_refs").write_text("5")  # the peak is now
        before = memory("VmRSS"), memory("RssAnon")
        if name == "model":
            threading.Thread(target=watch, daemon=True).start()
        settings = PolicySettings(model=f"{folder}/{name}", lora_rank=0, device="cpu")
        policy, _ = Policy.load(settings, seed=0, is_whole=is_whole)
        shard(policy, LayoutSettings(fsdp=ranks.count()))
    is_loaded.set()
    return {"all": memory("VmHWM") - before[0], "own": own[0] - before[1]}


def memory(name: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * next(int(line.split()[1]) for line in lines if line.startswith(f"{name}:"))


def waiting(folder: str, run: str) -> dict[str, float]:
    """Seconds that a step waits for its checkpoint, and until that is complete."""
    policy, _ = Policy.load(PolicySettings(model=folder, lora_rank=0, device="cpu"), seed=0, is_whole=False)
    shard(policy, LayoutSettings(fsdp=ranks.count()))
    trainer = Trainer(policy, OptimizerSettings(learning_rate=1e-4))
    sample = TrainingSample(tuple(range(16)), tuple(range(8, 16)), ce_weights=(1.0,) * 8)
    trainer.step([sample])
    writer = CheckpointWriter(RunDir(Path(run)))
    began = time.monotonic()
    writer.begin(trainer, TrainState("sft", 1))
    waited = time.monotonic() - began
    writer.finish()
    return {"waited_s": waited, "complete_s": time.monotonic() - began}


def held() -> dict[str, Any]:
    """Memory of each rank by the number of ranks, and what a step waits for on two."""
    with tempfile.TemporaryDirectory() as folder:
        write_model(Path(folder) / "small", 1)
        size, model = write_model(Path(folder) / "model", 12), f"{folder}/model"
        peaks = {
            form: {str(n): launch(n, "ranks_equal:loading", folder, form == "whole") for n in (2, 4)}
            for form in ("whole", "shards")
        }
        waits = [launch(2, "ranks_equal:waiting", model, f"{folder}/run{n}") for n in range(3)]
    return {"model_bytes": size, "peak_bytes": peaks, "waits": waits}


def dealt() -> list[dict[str, Any]]:
    """Work of the slowest rank over that of an even split, in a step of 64 rollouts, by how they are dealt: all ranks
    wait for the slowest in every micro-batch. A model of 1.5B, with attention of one token in 30,000 others as costly
    as its matrices."""

    def work(length: int) -> float:
        return length * (1 + length / 30_000)

    rng, rows = np.random.default_rng(0), []
    for count in (2, 8):
        found: dict[str, list[float]] = {}
        for _ in range(50):
            lengths = np.clip(rng.lognormal(9.0, 0.9, 64), 500, 120_000).astype(int).tolist()
            for way, cost in (("tokens", float), ("work", work)):
                total = slowest(lengths, count, cost, work)
                found.setdefault(way, []).append(total * count / sum(map(work, lengths)))
        rows += [
            {"ranks": count, "way": way, "over_even": statistics.mean(each)} for way, each in found.items()
        ]
    return rows


def slowest(
    lengths: list[int], count: int, cost: Callable[[int], float], work: Callable[[int], float]
) -> float:
    """Sum over micro-batches of the work of the slowest rank, as `ranks.deal` deals."""
    shares: list[list[int]] = [[] for _ in range(count)]
    for length in sorted(lengths, reverse=True):
        min(shares, key=lambda share: sum(map(cost, share))).append(length)
    works = [[sum(map(work, batch)) for batch in packing.first_fit(share, share, 32_768)] for share in shares]
    return sum(max(each) for each in itertools.zip_longest(*works, fillvalue=0.0))


def main() -> None:
    parser = argparse.ArgumentParser(description="Ranks train as one process does.")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results" / "ranks_equal.json")
    parser.add_argument(
        "--part", choices=("held", "dealt", "equal"), help="measure this one, and keep the rest"
    )
    options = parser.parse_args()
    report = json.loads(options.out.read_text(encoding="utf-8")) if options.part else {}
    for name, measure in {"held": held, "dealt": dealt, "equal": equal}.items():
        if options.part in (None, name):
            report[name] = measure()
    report["machine"] = machine.describe()
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.write_text(json.dumps(report, indent=2) + "\n")


if __name__ == "__main__":
    main()
