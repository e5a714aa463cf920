"""Who is timed against sharded Muon, at equal math: five steps of Jordan's coefficients in bfloat16, Nesterov 0.95,
decay 0.1, scale 0.2 sqrt(max(r, c)).

dion and torchtitan come as folders given by path (the folder that contains `dion/`, or `flex_shard/`); without a path
they are left out. Each function returns what makes one step.
"""

from __future__ import annotations

import inspect
import math
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from cases import Model
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Shard

from woodshed.muon import Heads, MuonSettings, NewtonSchulz, ShardedMuon
from woodshed.muon.grid import chunk
from woodshed.muon.layout import local

LR, DECAY, MU = 1e-6, 0.1, 0.95
Step = Callable[[], Any]


def ours(model: Model, lr: float = LR, **settings: Any) -> ShardedMuon:
    return ShardedMuon(
        list(model.held.items()),
        lr=lr,
        weight_decay=DECAY,
        momentum=MU,
        units=model.units,
        settings=MuonSettings(**{"newton_schulz": NewtonSchulz(backend="standard"), **settings}),
    )


def full_gather(model: Model) -> Step:
    """Every rank gathers every matrix and orthogonalises all of them: correct, and W times the products."""
    solve = NewtonSchulz(backend="standard")
    momenta = {name: torch.zeros_like(local(p.detach())) for name, p in model.held.items()}

    @torch.no_grad()
    def step() -> None:
        for name, parameter in model.held.items():
            grad, momentum, weight = local(gradient(parameter)), momenta[name], local(parameter.detach())
            momentum.mul_(MU).add_(grad)
            like = DTensor.from_local(
                grad.add(momentum, alpha=MU).bfloat16(), model.mesh, [Shard(model.case.dim)], run_check=False,
                shape=parameter.shape, stride=parameter.stride(),
            )  # fmt: skip
            whole = like.full_tensor()
            rows, cols = unit_shape(model, name, parameter)
            units = whole.reshape(-1, rows, cols)
            update = torch.cat([solve(part) for part in units.split(8)]).view(whole.shape)
            start, stop = chunk((0, whole.shape[model.case.dim]), dist.get_world_size())[dist.get_rank()]
            mine = update.narrow(model.case.dim, start, stop - start)
            weight.mul_(1 - LR * DECAY).add_(mine, alpha=-LR * 0.2 * math.sqrt(max(rows, cols)))

    return step


def unit_shape(model: Model, name: str, parameter: Tensor) -> tuple[int, int]:
    kind = model.units[name]
    rows = kind.rows if isinstance(kind, Heads) and isinstance(kind.rows, int) else parameter.shape[-2]
    return rows, parameter.shape[-1]


def gradient(parameter: Tensor) -> Tensor:
    assert parameter.grad is not None
    return parameter.grad


def torch_muon(model: Model) -> Step:
    """torch.optim.Muon, which takes 2-D tensors: every expert is a DTensor view of its stack."""
    matrices = []
    for parameter in model.held.values():
        if parameter.ndim == 2:
            matrices.append(parameter)
            continue
        for index in range(len(local(parameter.detach()))):
            pair = [local(t)[index] for t in (parameter.detach(), gradient(parameter))]
            if model.case.dim != 0:
                pair = [
                    DTensor.from_local(
                        each, model.mesh, [Shard(model.case.dim - 1)], run_check=False,
                        shape=parameter.shape[1:], stride=(parameter.shape[2], 1),
                    )
                    for each in pair
                ]  # fmt: skip
            matrix = nn.Parameter(pair[0])
            matrix.grad = pair[1]
            matrices.append(matrix)
    optimizer = torch.optim.Muon(
        matrices, lr=LR, weight_decay=DECAY, momentum=MU, adjust_lr_fn="match_rms_adamw"
    )
    return optimizer.step


def dion(model: Model, folder: Path, triton: bool = False) -> Step:
    """dion's Muon with our coefficients in its place for a Newton-Schulz function; or with its own kernels."""
    sys.path.insert(0, str(folder))
    from dion import Muon  # pyright: ignore[reportMissingImports]

    solve = NewtonSchulz(backend="standard")

    def newton_schulz(x: Tensor, epsilon: Any = None) -> Tensor:
        return solve(x if x.ndim == 3 else x[None]).view(x.shape)

    wanted = {
        "distributed_mesh": model.mesh,
        "lr": LR,
        "mu": MU,
        "weight_decay": DECAY,
        "nesterov": True,
        "adjust_lr": "rms_norm",
        "newton_schulz_func": None if triton else newton_schulz,
        "use_polar_express": False,
        "use_triton": triton,
        "use_gram_newton_schulz": False,
    }
    known = inspect.signature(Muon.__init__).parameters
    groups = [{"params": list(model.held.values())}]
    return Muon(groups, **{key: value for key, value in wanted.items() if key in known}).step


def torchtitan(model: Model, folder: Path) -> Step:
    """torchtitan's DistMuon: owners for matrices, whole experts of stacks, blocks for heads; one bucket per layer."""
    sys.path.insert(0, str(folder))
    from flex_shard import (  # pyright: ignore[reportMissingImports]
        BlockShard,
        BucketConfig,
        ComputeLayout,
        Owned,
        build_dist_muon,
    )

    def sharding(name: str, parameter: Tensor) -> Any:
        kind = model.units[name]
        if parameter.ndim == 3:
            return Shard(0)
        return BlockShard(0, kind.rows) if isinstance(kind, Heads) else Owned()

    optimizer = build_dist_muon(
        [{"params": list(model.held.values()), "param_names": list(model.held)}],
        compute_sharding_by_fqn={
            name: ComputeLayout({"shard": sharding(name, parameter)})
            for name, parameter in model.held.items()
        },
        bucket_configs=[BucketConfig((f"layers.{layer}.*",)) for layer in range(model.layers)],
        lr=LR,
        weight_decay=DECAY,
        momentum=MU,
        nesterov=True,
        adjust_lr_fn="match_rms_adamw",
    )
    return optimizer.step
