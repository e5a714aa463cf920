"""The oracle matrix: every layout and kind of unit against Muon on full matrices. Runs on every rank of a world."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from muon_oracle import FullMuon, newton_schulz
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.placement_types import _StridedShard

from woodshed.muon import Experts, Heads, MuonSettings, NewtonSchulz, ShardedMuon, Whole
from woodshed.muon.layout import local

LR = 0.05


@dataclass(frozen=True)
class Case:
    """One parameter: its units as the user names them and as the oracle counts them."""

    shape: tuple[int, ...]
    units: Any
    rows: list[int] | None = None
    cols: list[int] | None = None


CASES = {
    "even": Case((16, 24), Whole()),
    "tall": Case((24, 16), Whole()),
    "uneven": Case((13, 10), Whole()),
    "fewer_rows_than_ranks": Case((3, 7), Whole()),
    "row_heads": Case((24, 10), Heads(rows=8), [8, 8, 8]),
    "fused_qkv": Case((20, 8), Heads(rows=(12, 4, 4)), [12, 4, 4]),
    "col_heads": Case((10, 24), Heads(cols=6), None, [6, 6, 6, 6]),
    "experts": Case((8, 6, 10), Experts()),
    "uneven_experts": Case((5, 8, 12), Experts()),
    "few_experts": Case((2, 12, 6), Experts()),
    "gate_and_up": Case((4, 12, 10), Experts(rows=6), [6, 6]),
    "gate_and_up_cols": Case((3, 8, 16), Experts(cols=(8, 8)), None, [8, 8]),
}


def layouts(world: int) -> dict[str, tuple[DeviceMesh | None, list[Any]]]:
    """Mesh and placements; None is a plain tensor on every rank."""
    flat = init_device_mesh("cpu", (world,), mesh_dim_names=("shard",))
    pairs = init_device_mesh("cpu", (world // 2, 2), mesh_dim_names=("outer", "inner"))
    wide = init_device_mesh("cpu", (2, world // 2), mesh_dim_names=("replicate", "shard"))
    return {
        "plain": (None, []),
        "fsdp": (flat, [Shard(0)]),
        "last_dim": (flat, [Shard(-1)]),
        "replicated": (flat, [Replicate()]),
        "hsdp": (wide, [Replicate(), Shard(0)]),
        "hsdp_last_dim": (wide, [Replicate(), Shard(-1)]),
        "fsdp_over_ep": (pairs, [_StridedShard(0, split_factor=2), Shard(0)]),
        "cols_over_ep": (pairs, [Shard(1), Shard(0)]),
    }


def lay(full: Tensor, mesh: DeviceMesh | None, placements: list[Any]) -> Tensor:
    """As `fully_shard` and `distribute_tensor` would store it."""
    if mesh is None:
        return full.clone()
    placements = [Shard(full.ndim - 1) if p == Shard(-1) else p for p in placements]
    if not isinstance(placements[0], _StridedShard):
        return distribute_tensor(full.clone(), mesh, placements, src_data_rank=None)
    outer, inner = mesh.get_coordinate() or [0, 0]
    shard = chunk(chunk(full, mesh.shape[1], inner), mesh.shape[0], outer)
    return DTensor.from_local(
        shard.contiguous(), mesh, placements, run_check=False, shape=full.shape, stride=full.stride()
    )


def chunk(tensor: Tensor, parts: int, index: int) -> Tensor:
    found = tensor.chunk(parts)
    return found[index] if index < len(found) else tensor[:0]


def compare(
    layout: dict[str, tuple[DeviceMesh | None, list[Any]]], wire: torch.dtype, **settings: Any
) -> dict[str, float]:
    """Largest error of each parameter after three steps, relative to how far it moved. `layout` by parameter name."""
    generator = torch.Generator().manual_seed(3)
    cases = {name: case for name, case in CASES.items() if name in layout}
    full = {name: torch.randn(case.shape, generator=generator) / 8 for name, case in cases.items()}
    oracles = {name: FullMuon(full[name], case.rows, case.cols) for name, case in cases.items()}
    parameters = {name: torch.nn.Parameter(lay(full[name], *layout[name])) for name in cases}
    optimizer = ShardedMuon(
        list(parameters.items()),
        lr=LR,
        units={name: case.units for name, case in cases.items()},
        settings=MuonSettings(newton_schulz=NewtonSchulz(dtype=wire), wire_dtype=wire, **settings),
    )
    exact = NewtonSchulz(dtype=wire)
    for _ in range(3):
        for name in cases:
            grad = torch.randn(cases[name].shape, generator=generator)
            parameters[name].grad = lay(grad, *layout[name])
            oracles[name].step(
                grad,
                LR,
                wire=wire,
                nesterov=settings.get("nesterov", True),
                orthogonalise=newton_schulz if wire == torch.float32 else lambda m: exact(m[None])[0],
            )
        optimizer.step()
    errors = {}
    for name in cases:
        expected = local(lay(oracles[name].weight, *layout[name]))
        moved = (oracles[name].weight - full[name]).abs().max()
        error = (
            (local(parameters[name].detach()) - expected).abs().max()
            if expected.numel()
            else torch.tensor(0.0)
        )
        errors[name] = (error / moved).item()
    return errors


def supported(layout: str, name: str) -> bool:
    """Layouts with two sharded axes are those of stacks of experts; a plain vector has no second dimension."""
    return layout not in ("fsdp_over_ep", "cols_over_ep") or len(CASES[name].shape) == 3


def run(wire_name: str, names: list[str] | None = None) -> dict[str, float]:
    """Largest error over ranks of every (layout, variant, parameter)."""
    wire = getattr(torch, wire_name)
    world = dist.get_world_size()
    every = layouts(world)
    variants: dict[str, dict[str, Any]] = {
        "auto": {},
        "all_to_all, small buckets": {"placement": "all_to_all", "max_inflight_bytes": 3000},
        "split": {"replica_mode": "split", "max_inflight_bytes": 6000},
        "redundant, no nesterov": {"replica_mode": "redundant", "nesterov": False},
    }
    errors: dict[str, float] = {}
    for layout, place in every.items():
        if names is not None and layout not in names:
            continue
        for variant, settings in variants.items():
            if variant == "split" and layout in ("plain", "fsdp", "last_dim"):
                continue
            chosen = {name: place for name in CASES if supported(layout, name)}
            for name, error in compare(chosen, wire, **settings).items():
                errors[f"{layout}, {variant}, {name}"] = error
    mixed = {name: every["fsdp" if len(case.shape) == 3 else "hsdp"] for name, case in CASES.items()}
    for name, error in compare(mixed, wire).items():
        errors[f"experts without replicas, {name}"] = error
    found: list[Any] = [None] * world
    dist.all_gather_object(found, errors)
    return {key: max(each[key] for each in found) for key in errors}
