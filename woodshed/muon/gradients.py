"""Checks of the gradients before anything is changed: NaN, Inf or zeros only."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

from woodshed.muon import layout
from woodshed.muon.elementwise import Regions
from woodshed.muon.errors import MuonError
from woodshed.muon.runtime import Runner

NONE, LIVE, BAD = 0, 1, 2
"""Status of a unit's gradient: zeros only; usable; NaN or Inf somewhere."""


def largest(tensors: list[Tensor]) -> Tensor:
    """Largest magnitude of each, (len,); NaN where there is one. One read of every element."""
    if not tensors:
        return torch.zeros(0)
    norms = torch._foreach_norm(tensors, float("inf"))  # pyright: ignore[reportPrivateImportUsage]
    return torch.stack([each.float() for each in norms])


def refuse_nonfinite(names: list[str], grads: list[Tensor | None], device: torch.device) -> None:
    """Raise on every rank of the default group if any of them holds NaN or Inf."""
    present = [
        (name, grad) for name, grad in zip(names, grads, strict=True) if grad is not None and grad.numel()
    ]
    finite = torch.isfinite(largest([grad for _, grad in present])).to(device)
    if not everywhere((~finite).any().to(torch.uint8)).item():
        return
    bad = [name for (name, _), fine in zip(present, finite.tolist(), strict=True) if not fine]
    source = f"of {', '.join(bad[:5])}{' and others' if len(bad) > 5 else ''}" if bad else "on another rank"
    raise MuonError(
        f"NaN or Inf in the gradient {source}; nothing was changed. Skip this batch, lower the learning rate, or pass "
        'nonfinite="skip_unit" to leave such units alone and count them.'
    )


def everywhere(flags: Tensor) -> Tensor:
    """The largest value on any rank."""
    if layout.world_size() > 1:
        dist.all_reduce(flags, dist.ReduceOp.MAX)
    return flags


def unit_status(runner: Runner, grads: list[Tensor | None]) -> list[int]:
    """`NONE`, `LIVE` or `BAD` of every unit of an exchange, the same on all ranks of it. One small all-reduce."""
    regions = Regions()
    for shard in runner.stored:
        regions.add(runner.exchange.units[shard.unit].spec, *runner.local_region(shard))
    views = [regions.view(index, grads) for index in range(len(regions))]
    status = torch.zeros(len(runner.exchange.units), dtype=torch.uint8, device=runner.device)
    present = [
        (shard.unit, view) for shard, view in zip(runner.stored, views, strict=True) if view is not None
    ]
    if present:
        most = largest([view for _, view in present])
        code = torch.where(torch.isfinite(most), (most > 0).to(torch.uint8) * LIVE, BAD).to(torch.uint8)
        status[torch.tensor([unit for unit, _ in present], device=runner.device)] = code
    if runner.group is not None:
        dist.all_reduce(status, dist.ReduceOp.MAX, group=runner.group)
    return status.tolist()
