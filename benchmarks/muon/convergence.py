"""Does Muon reach AdamW's best loss in fewer steps? A small byte-level model on real code, dense and with experts.

    python benchmarks/muon/convergence.py                                # GPU: 3 seeds, both models
    python benchmarks/muon/convergence.py --size small --models moe      # CPU, 10 minutes of one core
    python benchmarks/muon/convergence.py --size toy --seeds 1           # CPU, seconds: shows that it runs, no more

Bar: at equal batch, the step at which Muon's held-out loss first is at most AdamW's best is at most 0.75 of the steps
at which AdamW had it; three seeds. Both optimizers get the learning rate that is best for them on a seed of its own
(0), from lists that grow until the best is not at an end. Data: the Python standard library's own files, held-out files
apart. The model with experts is Hugging Face's Qwen3-MoE. `--kinds adamw muon gram` adds Muon with the Gram form of
Newton-Schulz, at the learning rate that was best for Muon.
"""

from __future__ import annotations

import argparse
import functools
import json
import math
import multiprocessing
import os
import statistics
from concurrent.futures import Executor, ProcessPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

from woodshed.muon import Experts, Heads, MuonSettings, NewtonSchulz, ShardedMuon, clip_grad_norm_
from woodshed.runs import machine

LRS = {"adamw": (1e-3, 2e-3, 4e-3), "muon": (2e-3, 4e-3, 8e-3)}
BAR = 0.75
BALANCE = 0.01
"""Weight of the loss that keeps experts equally busy."""
Curve = list[tuple[int, float]]
"""Step and held-out loss, nats per byte."""


@dataclass(frozen=True)
class Size:
    """Model and training. Letters: B sequences, T positions, D width."""

    width: int = 384
    layers: int = 6
    heads: int = 6
    num_experts: int = 0
    """0 is dense."""
    context: int = 256
    batch: int = 64
    steps: int = 2000
    eval_every: int = 25


SIZES = {
    "full": Size(),
    "small": Size(width=96, layers=3, heads=3, context=128, batch=16, steps=150),
    "toy": Size(width=48, layers=2, heads=2, context=64, batch=8, steps=40),
}


class Attention(nn.Module):
    def __init__(self, size: Size) -> None:
        super().__init__()
        self.heads = size.heads
        self.qkv = nn.Linear(size.width, 3 * size.width, bias=False)
        self.out = nn.Linear(size.width, size.width, bias=False)

    def forward(self, x_BTD: Tensor) -> Tensor:
        b, t, d = x_BTD.shape
        q, k, v = (each.view(b, t, self.heads, -1).transpose(1, 2) for each in self.qkv(x_BTD).chunk(3, -1))
        q, k = functional.rms_norm(q, q.shape[-1:]), functional.rms_norm(k, k.shape[-1:])
        mixed = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(mixed.transpose(1, 2).reshape(b, t, d))


class Dense(nn.Module):
    def __init__(self, size: Size) -> None:
        super().__init__()
        self.up = nn.Linear(size.width, 4 * size.width, bias=False)
        self.down = nn.Linear(4 * size.width, size.width, bias=False)

    def forward(self, x_BTD: Tensor) -> Tensor:
        return self.down(functional.relu(self.up(x_BTD)).square())


class Block(nn.Module):
    def __init__(self, size: Size) -> None:
        super().__init__()
        self.attention = Attention(size)
        self.mlp = Dense(size)

    def forward(self, x_BTD: Tensor) -> Tensor:
        x_BTD = x_BTD + self.attention(functional.rms_norm(x_BTD, x_BTD.shape[-1:]))
        return x_BTD + self.mlp(functional.rms_norm(x_BTD, x_BTD.shape[-1:]))


class DenseModel(nn.Module):
    """Bytes in, logits of the next byte out."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        self.embed = nn.Embedding(256, size.width)
        self.position = nn.Embedding(size.context, size.width)
        self.blocks = nn.ModuleList(Block(size) for _ in range(size.layers))
        self.lm_head = nn.Linear(size.width, 256, bias=False)
        for module in self.modules():
            if isinstance(module, nn.Embedding):
                nn.init.normal_(module.weight, std=0.02)

    def forward(self, tokens_BT: Tensor) -> Tensor:
        x_BTD = self.embed(tokens_BT) + self.position.weight[: tokens_BT.shape[1]]
        for block in self.blocks:
            x_BTD = block(x_BTD)
        return self.lm_head(functional.rms_norm(x_BTD, x_BTD.shape[-1:]))


def mixture_model(size: Size) -> nn.Module:
    """Qwen3-MoE with experts of half the width, two for each token."""
    config = Qwen3MoeConfig(
        vocab_size=256,
        hidden_size=size.width,
        num_hidden_layers=size.layers,
        num_attention_heads=size.heads,
        num_key_value_heads=size.heads,
        max_position_embeddings=size.context,
        num_experts=size.num_experts,
        num_experts_per_tok=2,
        moe_intermediate_size=size.width // 2,
        norm_topk_prob=True,
        router_aux_loss_coef=BALANCE,
        output_router_logits=True,
        use_cache=False,
    )
    return Qwen3MoeForCausalLM(config)


def build(size: Size) -> nn.Module:
    return mixture_model(size) if size.num_experts else DenseModel(size)


@functools.cache
def code() -> tuple[Tensor, Tensor]:
    """The standard library as bytes: training files, and every twentieth file held out."""
    root = Path(os.__file__).parent
    paths = [p for p in sorted(root.rglob("*.py")) if not {"site-packages", "test", "tests"} & set(p.parts)]
    texts = [path.read_bytes() for path in paths]
    parts = [
        b"\0".join(t for i, t in enumerate(texts) if (i % 20 == 0) is held_out) for held_out in (False, True)
    ]
    train, held_out = (torch.frombuffer(bytearray(part), dtype=torch.uint8) for part in parts)
    return train, held_out


def draw(data: Tensor, size: Size, generator: torch.Generator, device: torch.device) -> Tensor:
    starts = torch.randint(len(data) - size.context - 1, (size.batch,), generator=generator)
    return torch.stack([data[s : s + size.context + 1] for s in starts.tolist()]).long().to(device)


def make_optimizer(model: nn.Module, kind: str, lr: float, size: Size) -> torch.optim.Optimizer:
    if kind == "adamw":
        return torch.optim.AdamW(model.parameters(), lr=lr, betas=(0.9, 0.95), weight_decay=0.1)
    return ShardedMuon(
        model.named_parameters(),
        lr=lr,
        units={"*.qkv.weight": Heads(rows=size.width), "*.gate_up_proj": Experts(rows=size.width // 2)},
        adamw={"match": ["*embed*", "position*", "lm_head*"], "lr": 2e-3},
        settings=MuonSettings(newton_schulz=NewtonSchulz(backend="gram" if kind == "gram" else "standard")),
    )


def losses(model: nn.Module, tokens: Tensor) -> tuple[Tensor, Tensor]:
    """Cross entropy in nats per byte, and what the experts' balance adds in training."""
    out = model(tokens[:, :-1])
    logits, balance = (out, torch.zeros(())) if isinstance(out, Tensor) else (out.logits, out.aux_loss)
    return functional.cross_entropy(logits.float().flatten(0, 1), tokens[:, 1:].flatten()), BALANCE * balance


def train(size: Size, kind: str, lr: float, seed: int) -> Curve:
    """Held-out loss in nats per byte, every `eval_every` steps. Learning rate: warm-up, flat, then linear to 0."""
    device, data = torch.device("cuda" if torch.cuda.is_available() else "cpu"), code()
    torch.backends.cuda.matmul.allow_tf32 = True
    torch.manual_seed(seed)
    model = build(size).to(device)
    optimizer = make_optimizer(model, kind, lr, size)
    base = [group["lr"] for group in optimizer.param_groups]
    generator, curve = torch.Generator().manual_seed(seed), []
    held_out = torch.Generator().manual_seed(9)
    fixed = [draw(data[1], size, held_out, device) for _ in range(4)]
    for step in range(1, size.steps + 1):
        factor = min(step / (0.05 * size.steps), 1.0, (size.steps - step) / (0.2 * size.steps) + 1e-3)
        for group, start in zip(optimizer.param_groups, base, strict=True):
            group["lr"] = start * factor
        with torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda"):
            entropy, balance = losses(model, draw(data[0], size, generator, device))
        (entropy + balance).backward()
        clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        if step % size.eval_every == 0:
            with torch.no_grad(), torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda"):
                curve.append((step, statistics.fmean(losses(model, batch)[0].item() for batch in fixed)))
    return curve


def best_lr(kind: str, size: Size, pool: Executor) -> float:
    """From the list; while an end of it is best, the next power of two beyond is tried too."""
    ends: dict[float, float] = {}
    lrs = list(LRS[kind])
    while missing := [lr for lr in lrs if lr not in ends]:
        runs = {lr: pool.submit(train, size, kind, lr, 0) for lr in missing}
        for lr, run in runs.items():
            least = min(loss for _, loss in run.result())
            ends[lr] = least if math.isfinite(least) else math.inf
        best = min(lrs, key=lambda lr: ends[lr])
        lrs += [2 * best] if best == max(lrs) else [best / 2] if best == min(lrs) else []
    print(f"  {kind}: " + ", ".join(f"lr {lr:g} {ends[lr]:.4f}" for lr in sorted(ends)), flush=True)
    return min(ends, key=lambda lr: ends[lr])


def compare(
    size: Size, kinds: list[str], seeds: list[int], given: dict[str, float], pool: Executor
) -> dict[str, Any]:
    lrs = {kind: given.get(kind) or best_lr(kind, size, pool) for kind in kinds if kind in LRS}
    lrs |= {"gram": lrs["muon"]} if "gram" in kinds else {}
    runs = {(seed, kind): pool.submit(train, size, kind, lrs[kind], seed) for seed in seeds for kind in lrs}
    rows = []
    for seed in seeds:
        row: dict[str, Any] = {"seed": seed, "curves": {kind: runs[seed, kind].result() for kind in lrs}}
        row |= {f"{kind}_best": min(loss for _, loss in row["curves"][kind]) for kind in lrs}
        print(f"  seed {seed}: " + "; ".join(f"{kind} {row[f'{kind}_best']:.4f}" for kind in lrs), flush=True)
        if "adamw" in kinds:
            row |= shares(row["curves"])
        rows.append(row)
    return {"size": vars(size), "lrs": lrs, "rows": rows}


def shares(curves: dict[str, Curve]) -> dict[str, Any]:
    """When the others first are where AdamW is at best, and that step over AdamW's; None if they never are."""
    best_step, best = min(curves["adamw"], key=lambda each: each[1])
    found: dict[str, Any] = {"adamw_step": best_step}
    for kind in curves.keys() - {"adamw"}:
        reached = next((step for step, loss in curves[kind] if loss <= best), None)
        share = reached / best_step if reached else None
        found |= {f"{kind}_step": reached, f"{kind}_share": share}
        verdict = "" if share is not None and share <= BAR else f"  MISSED {BAR}"
        print(f"    AdamW's best at {best_step}, {kind} there at {reached}{verdict}", flush=True)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description="Steps of Muon to AdamW's best loss.")
    parser.add_argument("--size", choices=SIZES, default="full")
    parser.add_argument("--steps", type=int, default=None)
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--models", nargs="+", choices=["dense", "moe"], default=["dense", "moe"])
    parser.add_argument("--kinds", nargs="+", choices=["adamw", "muon", "gram"], default=["adamw", "muon"])
    parser.add_argument("--lrs", nargs="+", default=[], metavar="KIND=LR", help="instead of a search")
    parser.add_argument("--jobs", type=int, default=1, help="runs at the same time")
    parser.add_argument(
        "--out", type=Path, default=Path(__file__).parents[1] / "results" / "muon_convergence.json"
    )
    options = parser.parse_args()
    chosen = SIZES[options.size]
    steps = options.steps or chosen.steps
    chosen = replace(chosen, steps=steps, eval_every=max(5, min(25, steps // 40)))
    given = {kind: float(lr) for kind, _, lr in (each.partition("=") for each in options.lrs)}
    report: dict[str, Any] = {"lrs_given": given}
    with ProcessPoolExecutor(options.jobs, multiprocessing.get_context("spawn")) as pool:
        for name in options.models:
            size = replace(chosen, num_experts=8 if name == "moe" else 0)
            millions = sum(p.numel() for p in build(size).parameters()) / 1e6
            print(f"{name}: {millions:.1f} M parameters, {vars(size)}", flush=True)
            report[name] = compare(size, options.kinds, options.seeds, given, pool)
    report |= {"machine": machine.describe(), "bar": BAR}
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.write_text(json.dumps(report) + "\n")
    print(f"written to {options.out}")


if __name__ == "__main__":
    main()
