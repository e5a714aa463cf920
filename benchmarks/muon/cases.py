"""What the benchmarks of sharded Muon update: the pooled expert cases, a dense model, a toy; and how it is laid out.

Sizes are for four cards; with fewer cards there are fewer layers, so that a card holds the same.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from importlib import metadata
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Shard

from woodshed.muon import Experts, Heads, Whole
from woodshed.muon.layout import arrange
from woodshed.muon.newton_schulz import has_triton
from woodshed.muon.units import Units


@dataclass(frozen=True)
class Case:
    """Layers of one kind."""

    layers: int
    shapes: dict[str, tuple[tuple[int, ...], Units]]
    """Name to shape and units, per layer."""
    dim: int
    """Dimension along which every parameter is sharded."""


def experts(number: int, hidden: int, width: int) -> dict[str, tuple[tuple[int, ...], Units]]:
    return {
        "gate": ((number, width, hidden), Experts()),
        "up": ((number, width, hidden), Experts()),
        "down": ((number, hidden, width), Experts()),
    }


def dense(
    hidden: int, width: int, heads: int, head: int, rank: int
) -> dict[str, tuple[tuple[int, ...], Units]]:
    return {
        "q_a": ((rank, hidden), Whole()),
        "q_b": ((heads * head, rank), Heads(rows=head)),
        "o": ((hidden, heads * head), Whole()),
        "gate": ((width, hidden), Whole()),
        "up": ((width, hidden), Whole()),
        "down": ((hidden, width), Whole()),
    }


CASES = {
    "kimi whole": Case(4, experts(32, 7168, 2048), 0),
    "kimi cut": Case(4, experts(32, 7168, 2048), 1),
    "small whole": Case(8, experts(64, 2048, 1408), 0),
    "small cut": Case(8, experts(64, 2048, 1408), 1),
    "small uneven": Case(8, experts(63, 2048, 1408), 0),
    "dense": Case(4, dense(7168, 18432, 64, 192, 1536), 0),
    "toy whole": Case(4, experts(8, 96, 64), 0),
    "toy cut": Case(4, experts(8, 96, 64), 1),
    "toy dense": Case(4, dense(96, 192, 4, 24, 48), 0),
}


@dataclass(frozen=True)
class Model:
    """Parameters with gradients, in the order of their layers."""

    case: Case
    layers: int
    held: dict[str, nn.Parameter]
    units: dict[str, Units]
    mesh: DeviceMesh


def start() -> torch.device:
    """Process group of torchrun, or of one process without it. Returns this rank's device."""
    os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
    os.environ.setdefault("MASTER_PORT", "29511")
    os.environ.setdefault("RANK", "0")
    os.environ.setdefault("WORLD_SIZE", "1")
    if not torch.cuda.is_available():
        dist.init_process_group("gloo")
        return torch.device("cpu")
    device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
    torch.cuda.set_device(device)
    dist.init_process_group("nccl", device_id=device)
    return device


def make(case: Case, device: torch.device, dtype: torch.dtype = torch.float32) -> Model:
    """Random weights and gradients, every rank its own shard."""
    world = dist.get_world_size()
    layers = max(1, case.layers * min(world, 4) // 4)
    mesh = init_device_mesh(device.type, (world,), mesh_dim_names=("shard",))
    generator = torch.Generator(device).manual_seed(dist.get_rank())
    held, units = {}, {}
    for layer in range(layers):
        for name, (shape, kind) in case.shapes.items():
            full = f"layers.{layer}.{name}"
            storage = arrange(full, shape, torch.arange(world), [Shard(case.dim)])
            local = [stop - start for start, stop in storage.grid.box(storage.find(dist.get_rank())[1])]
            weight, grad = (random(local, shape, mesh, case.dim, generator, device, dtype) for _ in range(2))
            held[full] = nn.Parameter(weight)
            held[full].grad = grad
            units[full] = kind
    return Model(case, layers, held, units, mesh)


def random(
    local: list[int],
    shape: tuple[int, ...],
    mesh: DeviceMesh,
    dim: int,
    generator: torch.Generator,
    device: torch.device,
    dtype: torch.dtype,
) -> Tensor:
    made = torch.randn(local, generator=generator, device=device, dtype=dtype) / 50
    stride = torch.empty(shape, device="meta").stride()
    return DTensor.from_local(
        made, mesh, [Shard(dim)], run_check=False, shape=torch.Size(shape), stride=stride
    )


def synchronise(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def describe(device: torch.device) -> dict[str, Any]:
    """Card, versions and world, for the JSON."""
    return {
        "card": torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU",
        "world": dist.get_world_size(),
        "torch": torch.__version__,
        "triton": metadata.version("triton") if has_triton() else None,
        "cuda": torch.version.cuda,
    }
