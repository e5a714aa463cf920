"""Check of the gradients before anything is changed: NaN, Inf or none at all."""

from __future__ import annotations

from typing import Literal

import torch
import torch.distributed as dist
from torch import Tensor

from woodshed.muon import layout
from woodshed.muon.elementwise import Places
from woodshed.muon.errors import MuonError
from woodshed.muon.runtime import Runner

Starved = Literal["step", "skip", "decay_only"]
NonFinite = Literal["raise", "skip_unit", "unchecked"]
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
    held = [
        (name, grad) for name, grad in zip(names, grads, strict=True) if grad is not None and grad.numel()
    ]
    finite = torch.isfinite(largest([grad for _, grad in held])).to(device)
    if not everywhere((~finite).any().to(torch.uint8)).item():
        return
    bad = [name for (name, _), fine in zip(held, finite.tolist(), strict=True) if not fine]
    here = f"of {', '.join(bad[:5])}{' and others' if len(bad) > 5 else ''}" if bad else "on another rank"
    raise MuonError(
        f"NaN or Inf in the gradient {here}; nothing was changed. Skip this batch, lower the learning rate, or pass "
        'nonfinite="skip_unit" to leave such units alone and count them.'
    )


def everywhere(flags: Tensor) -> Tensor:
    """The largest value on any rank."""
    if layout.world_size() > 1:
        dist.all_reduce(flags, dist.ReduceOp.MAX)
    return flags


def unit_status(runner: Runner, grads: list[Tensor | None]) -> list[int]:
    """`NONE`, `LIVE` or `BAD` of every unit of an exchange, the same on all ranks of it. One small all-reduce."""
    at = Places()
    for piece in runner.stored:
        at.add(runner.exchange.units[piece.unit].spec, *runner.local_place(piece))
    views = [at.view(index, grads) for index in range(len(at))]
    status = torch.zeros(len(runner.exchange.units), dtype=torch.uint8, device=runner.device)
    found = [(piece.unit, view) for piece, view in zip(runner.stored, views, strict=True) if view is not None]
    if found:
        most = largest([view for _, view in found])
        code = torch.where(torch.isfinite(most), (most > 0).to(torch.uint8) * LIVE, BAD).to(torch.uint8)
        status[torch.tensor([unit for unit, _ in found], device=runner.device)] = code
    if runner.group is not None:
        dist.all_reduce(status, dist.ReduceOp.MAX, group=runner.group)
    return status.tolist()
