"""Does Muon reach AdamW's best loss in fewer steps? A small byte-level model on real code, dense and with experts.

    python benchmarks/muon/convergence.py                       # GPU: 3 seeds, both models
    python benchmarks/muon/convergence.py --toy                 # CPU, a minute: shows that it runs, proves nothing

Bar: at equal batch, the step at which Muon's held-out loss first is at most AdamW's best is at most 0.75 of the steps
at which AdamW had it; three seeds. Both optimizers get the learning rate that is best for them on a seed of its own
(0), from grids of the same length. Data: the Python standard library's own files, held-out files apart.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import statistics
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from woodshed.muon import Experts, Heads, ShardedMuon, clip_grad_norm_

ADAMW_LRS, MUON_LRS = (1e-3, 2e-3, 4e-3), (2e-3, 4e-3, 8e-3)
BAR = 0.75


@dataclass(frozen=True)
class Size:
    """Model and training. Letters: B sequences, T positions, D width."""

    width: int = 384
    layers: int = 6
    heads: int = 6
    num_experts: int = 0
    """0 is dense; else as many of a quarter of the dense width, two for each token."""
    context: int = 256
    batch: int = 64
    steps: int = 2000
    eval_every: int = 25


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


class Mixture(nn.Module):
    """Two experts for each token, chosen by a sigmoid router with a balance loss. Every expert sees every token and is
    masked: simple, and fast enough here."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        self.router = nn.Linear(size.width, size.num_experts, bias=False)
        self.up = nn.Parameter(torch.randn(size.num_experts, size.width, size.width) / size.width**0.5)
        self.down = nn.Parameter(torch.randn(size.num_experts, size.width, size.width) / size.width**0.5)
        self.balance = torch.zeros(())

    def forward(self, x_BTD: Tensor) -> Tensor:
        score_BTE = self.router(x_BTD).float().softmax(-1)
        top, chosen = score_BTE.topk(2, -1)
        gate_BTE = torch.zeros_like(score_BTE).scatter(-1, chosen, top / top.sum(-1, keepdim=True))
        share_E = (gate_BTE > 0).float().mean((0, 1))
        self.balance = len(share_E) * (share_E * score_BTE.mean((0, 1))).sum() / 2
        inner = functional.relu(torch.einsum("btd,efd->btef", x_BTD, self.up)).square()
        return torch.einsum("btef,edf,bte->btd", inner, self.down, gate_BTE.to(x_BTD.dtype))


class Block(nn.Module):
    def __init__(self, size: Size) -> None:
        super().__init__()
        self.attention = Attention(size)
        self.mlp = Mixture(size) if size.num_experts else Dense(size)

    def forward(self, x_BTD: Tensor) -> Tensor:
        x_BTD = x_BTD + self.attention(functional.rms_norm(x_BTD, x_BTD.shape[-1:]))
        return x_BTD + self.mlp(functional.rms_norm(x_BTD, x_BTD.shape[-1:]))


class Model(nn.Module):
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
        return self.lm_head(functional.rms_norm(x_BTD, x_BTD.shape[-1:])).float()


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


def optimizers(model: Model, kind: str, lr: float) -> torch.optim.Optimizer:
    if kind == "adamw":
        return torch.optim.AdamW(model.parameters(), lr=lr, betas=(0.9, 0.95), weight_decay=0.1)
    width = model.embed.embedding_dim
    return ShardedMuon(
        model.named_parameters(),
        lr=lr,
        units={"*.qkv.weight": Heads(rows=width), "*.mlp.up": Experts(), "*.mlp.down": Experts()},
        adamw={"match": ["embed*", "position*", "lm_head*"], "lr": 2e-3},
    )


def loss_of(model: Model, tokens: Tensor) -> Tensor:
    return functional.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())


def train(
    kind: str, lr: float, seed: int, size: Size, data: tuple[Tensor, Tensor]
) -> list[tuple[int, float]]:
    """Held-out loss in nats per byte, every `eval_every` steps. Learning rate: warm-up, flat, then linear to 0."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    torch.manual_seed(seed)
    model = Model(size).to(device)
    optimizer = optimizers(model, kind, lr)
    base = [group["lr"] for group in optimizer.param_groups]
    generator, curve = torch.Generator().manual_seed(seed), []
    held_out = torch.Generator().manual_seed(9)
    fixed = [draw(data[1], size, held_out, device) for _ in range(4)]
    for step in range(1, size.steps + 1):
        factor = min(step / (0.05 * size.steps), 1.0, (size.steps - step) / (0.2 * size.steps) + 1e-3)
        for group, start in zip(optimizer.param_groups, base, strict=True):
            group["lr"] = start * factor
        with torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda"):
            loss = loss_of(model, draw(data[0], size, generator, device))
            for module in model.modules():
                loss = loss + 0.01 * module.balance if isinstance(module, Mixture) else loss
        loss.backward()
        clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        if step % size.eval_every == 0:
            with torch.no_grad(), torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda"):
                curve.append((step, statistics.fmean(loss_of(model, batch).item() for batch in fixed)))
    return curve


def best_lr(
    kind: str, lrs: tuple[float, ...], run: Callable[[str, float, int], list[tuple[int, float]]]
) -> float:
    ends = {lr: min(loss for _, loss in run(kind, lr, 0)) for lr in lrs}
    print(f"  {kind}: " + ", ".join(f"lr {lr:g} {loss:.4f}" for lr, loss in ends.items()), flush=True)
    return min(ends, key=lambda lr: ends[lr] if math.isfinite(ends[lr]) else math.inf)


def compare(size: Size, seeds: list[int], data: tuple[Tensor, Tensor]) -> dict[str, Any]:
    def run(kind: str, lr: float, seed: int) -> list[tuple[int, float]]:
        return train(kind, lr, seed, size, data)

    lrs = {"adamw": best_lr("adamw", ADAMW_LRS, run), "muon": best_lr("muon", MUON_LRS, run)}
    rows = []
    for seed in seeds:
        curves = {kind: run(kind, lr, seed) for kind, lr in lrs.items()}
        best_step, best = min(curves["adamw"], key=lambda each: each[1])
        reached = next((step for step, loss in curves["muon"] if loss <= best), None)
        share = None if reached is None else reached / best_step
        rows.append({"seed": seed, "adamw_best": best, "adamw_step": best_step, "muon_step": reached, "share": share,
                     "muon_best": min(loss for _, loss in curves["muon"]), "curves": curves})  # fmt: skip
        verdict = "" if share is not None and share <= BAR else f"  MISSED {BAR}"
        print(
            f"  seed {seed}: AdamW's best {best:.4f} at {best_step}, Muon there at {reached}{verdict}",
            flush=True,
        )
    return {"size": vars(size), "lrs": lrs, "rows": rows}


def main() -> None:
    parser = argparse.ArgumentParser(description="Steps of Muon to AdamW's best loss.")
    parser.add_argument("--toy", action="store_true")
    parser.add_argument("--steps", type=int, default=None)
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--models", nargs="+", choices=["dense", "moe"], default=["dense", "moe"])
    parser.add_argument(
        "--out", type=Path, default=Path(__file__).parents[1] / "results" / "muon_convergence.json"
    )
    options = parser.parse_args()
    torch.backends.cuda.matmul.allow_tf32 = True
    shared: dict[str, Any] = (
        {"width": 48, "layers": 2, "heads": 2, "context": 64, "batch": 8} if options.toy else {}
    )
    shared |= {"steps": options.steps or (40 if options.toy else Size.steps)}
    shared |= {"eval_every": max(1, min(25, shared["steps"] // 40))}
    data, report = code(), {}
    for name in options.models:
        size = Size(**shared, num_experts=8 if name == "moe" else 0)
        print(
            f"{name}: {sum(p.numel() for p in Model(size).parameters()) / 1e6:.1f} M parameters, {vars(size)}"
        )
        report[name] = compare(size, options.seeds, data)
    card = torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU"
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.write_text(
        json.dumps({"card": card, "torch": torch.__version__, "bar": BAR, **report}) + "\n"
    )
    print(f"written to {options.out}")


if __name__ == "__main__":
    main()
