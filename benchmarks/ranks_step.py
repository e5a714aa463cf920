"""A training step over ranks beside the same step on one card: losses, tokens a second, memory, checkpoints.

    python benchmarks/ranks_step.py                          toy shapes over gloo, for any machine
    python benchmarks/ranks_step.py --cases card --ranks 2   shapes of Qwen2.5-1.5B and -7B and a mixture of experts

Weights are random, samples are random tokens whose sampler is the uniform distribution, so importance ratios are near
1. Every case runs under each of its layouts over the ranks, then on one card; each row is written as it is measured,
and not measured twice. A layout that fails has a row with its error. On one card the cases are shared out over the
cards that there are, one process each.

Bars: in float32 losses and gradient norms equal one card's to 1e-5, in bfloat16 to the distance of one card from
itself with half as large micro-batches; all weights at least 0.3 times as fast as an adapter; a checkpoint of the ranks
holds the same bits on one card, whose next step is theirs.

Expected, written before the first run: two cards 1.7 times one card's tokens a second where weights are cut, 1.9 where
an adapter's base is whole on both; all weights 0.55 times the adapter's speed; Muon a tenth slower than AdamW; a model
of 7B trains whole on two cards and does not fit on one.
"""

from __future__ import annotations

import argparse
import gc
import hashlib
import json
import math
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from kept_rows import Rows, spread
from torch import Tensor
from torch.distributed.tensor import DTensor
from vllm_engine import SHAPES

from woodshed.engines.local import invariant
from woodshed.experience.samples import TrainingSample
from woodshed.learning import ranks
from woodshed.learning.layout import LayoutSettings, shard
from woodshed.learning.loss_settings import LossSettings
from woodshed.learning.optimizer import OptimizerSettings
from woodshed.learning.policy import Policy, add_adapter
from woodshed.learning.trainer import Trainer

ONE, HALVED, LOADED = "one card", "one card, half micro-batches", "one card, loaded from the ranks"
COMPARED = ("rl_loss", "grad_norm", "entropy", "logp_gap_mean")
SHAPES["experts"] = {
    "vocab_size": 32_768,
    "hidden_size": 1024,
    "intermediate_size": 3072,
    "moe_intermediate_size": 768,
    "num_hidden_layers": 12,
    "num_attention_heads": 16,
    "num_key_value_heads": 4,
    "head_dim": 64,
    "num_experts": 32,
    "num_experts_per_tok": 4,
    "norm_topk_prob": True,
}
SHAPES["toy experts"] = SHAPES["experts"] | {
    "vocab_size": 256,
    "hidden_size": 64,
    "moe_intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "num_experts": 8,
}


@dataclass(frozen=True)
class Case:
    """A step, and the layouts over ranks under which it is taken."""

    shape: str
    layouts: tuple[str, ...] = ("fsdp",)
    lora_rank: int = 0
    optimizer: str = "adamw"
    dtype: str = "bfloat16"
    layers: int = 0
    """Fewer than the shape has; 0 takes all."""
    rollouts: int = 64
    length: int = 768
    micro_batch: int = 12_288
    recomputes: bool = False
    """Activation checkpointing."""
    steps: int = 4
    """Steps that are timed, after one that compiles and allocates."""
    is_saved: bool = False
    """Saved on the ranks, and loaded on one card."""
    more: dict[str, Any] = field(default_factory=dict)
    """Fields of the model's configuration that differ from the shape's."""


SMALL: dict[str, Any] = {
    "dtype": "float32",
    "layers": 4,
    "rollouts": 8,
    "length": 256,
    "micro_batch": 1024,
    "steps": 2,
    "is_saved": True,
}
NARROW: dict[str, Any] = {"more": {"vocab_size": 16_384}}
TOY: dict[str, Any] = {
    "rollouts": 6,
    "length": 24,
    "micro_batch": 64,
    "steps": 2,
    "is_saved": True,
    "dtype": "float32",
}
CASES = {
    "card": {
        "LoRA 16, float32": Case("1.5b", ("fsdp", "cp"), lora_rank=16, **SMALL, **NARROW),
        "all weights, float32": Case("1.5b", **SMALL, **NARROW),
        "experts, float32": Case("experts", ("ep",), **SMALL),
        "LoRA 16": Case("1.5b", ("fsdp", "replicate", "cp"), lora_rank=16),
        "all weights": Case("1.5b"),
        "experts": Case("experts", ("fsdp", "ep")),
        "all weights, Muon": Case("1.5b", optimizer="muon"),
        "all weights, 7B": Case("7b", recomputes=True, rollouts=32, steps=2),
    },
    "toy": {
        "LoRA 4": Case("toy", ("fsdp", "replicate", "cp"), lora_rank=4, **TOY),
        "all weights": Case("toy", **TOY),
        "experts": Case("toy experts", ("ep",), **TOY),
        "Muon": Case("toy", optimizer="muon", **TOY),
        "bfloat16": Case("toy", **(TOY | {"dtype": "bfloat16", "is_saved": False})),
    },
}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--cases", default="toy", choices=CASES)
    parser.add_argument("--only", nargs="*", help="names of cases; all without it")
    parser.add_argument("--ranks", type=int, default=2, help="1: one card alone")
    parser.add_argument("--limit", type=float, default=1e6, help="seconds for all of it")
    parser.add_argument("--commit", default="", help="of this code, where it is no checkout")
    parser.add_argument("--part", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--share", default="0/1", help=argparse.SUPPRESS)
    parser.add_argument(
        "--scratch", type=Path, help="folder for checkpoints and parts; a temporary one without it"
    )
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results" / "ranks_step.json")
    options = parser.parse_args()
    if options.part:
        measure_part(options)
        return
    with tempfile.TemporaryDirectory() as temporary:
        options.scratch = options.scratch or Path(temporary)
        options.scratch.mkdir(parents=True, exist_ok=True)
        lead(options)


# The process that starts the others ------------------------------------------------------------------------------


def lead(options: argparse.Namespace) -> None:
    """The layouts over the ranks, then one card; the file grows as they are measured."""
    ends, cards = time.monotonic() + options.limit, max(1, torch.cuda.device_count())
    alone = [(1, f"{n}/{cards}", str(n)) for n in range(cards)]
    for stage in ([(options.ranks, "0/1", "")] if options.ranks > 1 else [], alone):
        started = [start(options, *each) for each in stage]
        while any(process.poll() is None for process in started):
            time.sleep(0.5)
            for n, process in enumerate(started):
                if process.poll() and keep_failure(options, *stage[n][:2], process.returncode):
                    started[n] = start(options, *stage[n])
            if time.monotonic() > ends:
                for process in started:
                    process.terminate()  # torchrun ends its ranks
                    process.wait()
                break
            merge(options)
        show(merge(options)["rows"])


def keep_failure(options: argparse.Namespace, world: int, share: str, code: int) -> bool:
    """Write a row for what the ranks were at when they ended; False where they had not begun."""
    part = part_of(options, world, share)
    if not (begun := part.with_suffix(".begun")).exists():
        return False
    about = json.loads(begun.read_text())
    begun.unlink()
    rows = rows_of(options, part)
    if not rows.has(**about):
        rows.add(about | {"error": f"the ranks ended with exit code {code}"})
    return True


def part_of(options: argparse.Namespace, world: int, share: str) -> Path:
    return options.scratch / f"part-{world}-{share.partition('/')[0]}.json"


def rows_of(options: argparse.Namespace, part: Path) -> Rows:
    return Rows(part, {"cases": options.cases}, key=("case", "layout"), commit=options.commit)


def start(options: argparse.Namespace, world: int, share: str, card: str) -> subprocess.Popen[bytes]:
    """Ranks that measure what has no row yet, in a part of the report."""
    part = part_of(options, world, share)
    command = [sys.executable]
    if world > 1:
        command += ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(world)]
    command += [__file__, "--cases", options.cases, "--ranks", str(options.ranks), "--part", str(part)]
    command += ["--share", share, "--scratch", str(options.scratch), "--commit", options.commit]
    command += ["--only", *options.only] if options.only else []
    own = dict(os.environ) | ({"CUDA_VISIBLE_DEVICES": card} if card and torch.cuda.is_available() else {})
    return subprocess.Popen(command, env=own)


def merge(options: argparse.Namespace) -> dict[str, Any]:
    """One report of all parts, with the distance of each row from one card."""
    parts = [json.loads(part.read_text()) for part in sorted(options.scratch.glob("part-*.json"))]
    report = parts[0] if parts else {"rows": []}
    report["rows"] = [row for part in parts for row in part["rows"]]
    alone = {row["case"]: row for row in report["rows"] if row["layout"] == ONE and "error" not in row}
    for row in report["rows"]:
        if row["case"] in alone and "steps" in row and row["layout"] not in (ONE, LOADED):
            row["distance"] = distance(alone[row["case"]]["steps"], row["steps"])
            row["times_one_card"] = round(row["tokens_per_s"][1] / alone[row["case"]]["tokens_per_s"][1], 3)
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.write_text(json.dumps(report, indent=1) + "\n")
    return report


def distance(one: list[dict[str, float]], other: list[dict[str, float]]) -> dict[str, float]:
    """Largest difference of each metric over the steps; of norms and entropies relative."""
    found = {}
    for name in COMPARED:
        pairs = [(before[name], after[name]) for before, after in zip(one, other, strict=True)]
        scales = [1.0 if name == "rl_loss" else abs(before) for before, _ in pairs]
        found[name] = max(
            abs(before - after) / scale for (before, after), scale in zip(pairs, scales, strict=True)
        )
    return found


def show(rows: list[dict[str, Any]]) -> None:
    print(f"\n{'case':<24}{'layout':<34}{'tokens/s':>10}{'GiB':>7}{'times':>7}{'loss':>10}{'norm':>10}")
    for row in rows:
        head = f"{row['case']:<24}{row['layout']:<34}"
        if "error" in row:
            print(f"{head}  {row['error'][:120]}")
        elif row["layout"] == LOADED:
            print(f"{head}  weights equal: {row['is_equal']}, next step off by {row['distance']}")
        else:
            apart = row.get("distance", {})
            figures = f"{row['tokens_per_s'][1]:>10.0f}{row['peak_gib']:>7.1f}{row.get('times_one_card', 1.0):>7.2f}"
            print(f"{head}{figures}{apart.get('rl_loss', 0):>10.1e}{apart.get('grad_norm', 0):>10.1e}")
    sys.stdout.flush()


# Ranks -------------------------------------------------------------------------------------------------------------


def measure_part(options: argparse.Namespace) -> None:
    """This process group's rows that the part does not hold yet. A row that fails ends the ranks, after it was
    written; one process alone goes on."""
    device, world = meet()
    rows = rows_of(options, options.part)
    index, shares = (int(each) for each in options.share.split("/"))
    for number, (name, layout) in enumerate(units(options, world)):
        if number % shares != index or ranks.agreed(rows.has(case=name, layout=layout)):
            continue
        about, failure = {"case": name, "layout": layout}, None
        if ranks.index() == 0:
            print(f"{time.strftime('%X')} {name}, {layout}", flush=True)
            options.part.with_suffix(".begun").write_text(json.dumps(about))
        try:
            found = measure(CASES[options.cases][name], name, layout, device, options.scratch)
        except Exception as error:
            failure = f"{type(error).__name__}: {error}"[:400]
            found = {"error": failure}
        if ranks.index() == 0:
            rows.add(about | found)
        if failure is not None and world > 1:
            print(f"rank {ranks.index()}: {failure}", flush=True)
            time.sleep(2)  # rank 0's row, where another failed
            os._exit(1)
        release(device)
    rows.write(**versions(device)) if ranks.index() == 0 else None
    if world > 1:
        dist.barrier()
        dist.destroy_process_group()


def units(options: argparse.Namespace, world: int) -> Iterator[tuple[str, str]]:
    """Cases with their layouts, the ranks' or one card's."""
    for name, case in CASES[options.cases].items():
        if options.only and name not in options.only:
            continue
        if world > 1:
            yield from ((name, layout) for layout in case.layouts)
            continue
        yield name, ONE
        if case.dtype == "bfloat16" and case.optimizer == "adamw" and not case.recomputes:
            yield name, HALVED
        if case.is_saved and options.ranks > 1:
            yield name, LOADED


def meet() -> tuple[torch.device, int]:
    """This rank's device, and the number of ranks, which have met."""
    world, is_cuda = ranks.started(), torch.cuda.is_available()
    device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0"))) if is_cuda else torch.device("cpu")
    if is_cuda:
        torch.cuda.set_device(device)
        torch.backends.cuda.enable_cudnn_sdp(False)
    if world > 1:
        backend = "cpu:gloo,cuda:nccl" if is_cuda else "gloo"
        dist.init_process_group(backend, timeout=timedelta(seconds=60))
    return device, world


def versions(device: torch.device) -> dict[str, Any]:
    import transformers

    card = torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU"
    return {"card": card, "torch": torch.__version__, "transformers": transformers.__version__}


def release(device: torch.device) -> None:
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)


def measure(case: Case, name: str, layout: str, device: torch.device, scratch: Path) -> dict[str, Any]:
    """Metrics of every step, seconds and memory; or of a checkpoint, what one card makes of it."""
    trainer, samples = trainer_of(case, layout, device), samples_of(case)
    kept = scratch / name.replace(" ", "-")
    if layout == LOADED:
        return loaded(trainer, samples, kept)
    release(device)
    tokens, seconds, metrics = sum(len(sample.ids) for sample in samples), [], []
    for _ in range(1 + case.steps):
        synchronise(device)
        began = time.perf_counter()
        found = trainer.step(samples)
        synchronise(device)
        seconds.append(time.perf_counter() - began)
        metrics.append({key: float(found[key]) for key in COMPARED})
    peak = torch.cuda.max_memory_allocated(device) / 2**30 if device.type == "cuda" else 0.0
    row = {
        "tokens_per_s": spread([tokens / each for each in seconds[1:]]),
        "step_s": spread(seconds[1:]),
        "first_s": round(seconds[0], 2),
        "peak_gib": round(max(ranks.gather([peak])), 2),
        "tokens": tokens,
        "steps": metrics,
    }
    if case.is_saved and ranks.count() > 1:
        save(trainer, samples, kept)
    return row


def save(trainer: Trainer, samples: list[TrainingSample], folder: Path) -> None:
    """A checkpoint, its digest, and the step after it."""
    folder.mkdir(parents=True, exist_ok=True)
    dist.barrier()
    trainer.save(folder)
    held = digest(trainer)
    later = trainer.step(samples)
    if ranks.index() == 0:
        about = {"digest": held, "later": {key: float(later[key]) for key in COMPARED}}
        (folder / "about.json").write_text(json.dumps(about))


def loaded(trainer: Trainer, samples: list[TrainingSample], folder: Path) -> dict[str, Any]:
    about = json.loads((folder / "about.json").read_text())
    trainer.load(folder)
    is_equal = digest(trainer) == about["digest"]
    later = trainer.step(samples)
    return {"is_equal": is_equal, "distance": distance([about["later"]], [later])}


def digest(trainer: Trainer) -> str:
    """SHA-256 of all trained weights as they are when whole. Every rank calls it."""
    made = hashlib.sha256()
    for weight in trainer.policy.trainable.values():
        value: Tensor = weight.detach()
        value = value.full_tensor() if isinstance(value, DTensor) else value
        made.update(value.cpu().numpy().tobytes())
    return made.hexdigest()


def synchronise(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


# A case ------------------------------------------------------------------------------------------------------------


def trainer_of(case: Case, layout: str, device: torch.device) -> Trainer:
    policy, world = policy_of(case, device), ranks.count()
    others = {
        "ep": {"ep": world},
        "replicate": {"fsdp": 1, "replicate": world},
        "cp": {"fsdp": 1, "cp": world},
    }
    axes = {"fsdp": world} | others.get(layout, {})
    shard(policy, LayoutSettings(**axes))
    halves = 2 if layout == HALVED else 1
    return Trainer(
        policy,
        OptimizerSettings.model_validate({"kind": case.optimizer, "learning_rate": 1e-5, "warmup_steps": 0}),
        LossSettings(micro_batch_tokens=case.micro_batch // halves),
        message_tokens=case.length,
    )


def policy_of(case: Case, device: torch.device) -> Policy:
    """Random weights, the same on every rank and on one card."""
    import transformers

    kind: Any = transformers.Qwen3MoeConfig if "experts" in case.shape else transformers.Qwen2Config
    config = kind(**sizes_of(case), max_position_embeddings=32_768)
    torch.manual_seed(0)
    with device:
        model: Any = transformers.AutoModelForCausalLM.from_config(config, dtype=getattr(torch, case.dtype))
    model.eval()
    invariant.install(model)
    if case.lora_rank:
        model = add_adapter(model, case.lora_rank).to(device)
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.data = parameter.data.float()
    else:
        model.requires_grad_(True)
    return Policy(model, is_adapter=case.lora_rank > 0, activation_checkpointing=case.recomputes)


def sizes_of(case: Case) -> dict[str, Any]:
    """Configuration of the model."""
    layers = {"num_hidden_layers": case.layers} if case.layers else {}
    return SHAPES[case.shape] | case.more | layers


def samples_of(case: Case) -> list[TrainingSample]:
    """Rollouts of random tokens, a third of them a prompt; of each two one is better than the other is bad."""
    vocabulary = min(sizes_of(case)["vocab_size"], 151_000)
    rng, prompt, samples = torch.Generator().manual_seed(1), case.length // 3, []
    for number in range(case.rollouts):
        ids = tuple(torch.randint(10, vocabulary, (case.length,), generator=rng).tolist())
        predicted = tuple(range(prompt, case.length))
        share, logp = 1.0 if number % 2 else -0.5, -math.log(vocabulary)
        sample = TrainingSample(
            ids,
            predicted,
            logps=(logp,) * len(predicted),
            advantages=(share,) * len(predicted),
            rl_weights=(1.0,) * len(predicted),
            rollout_id=str(number),
            group=number // 2,
        )
        samples.append(sample)
    return samples


if __name__ == "__main__":
    main()
