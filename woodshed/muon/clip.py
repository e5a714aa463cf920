"""The norm of all gradients, whatever meshes they lie on.

`torch.nn.utils.clip_grad_norm_` stacks the norms of DTensors and refuses those of two meshes. Here squares are summed
where they are stored, once per layout over the axes that shard it (replicas hold the same numbers and are not counted).
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor, Partial, Replicate

from woodshed.muon import layout
from woodshed.muon.errors import MuonError
from woodshed.muon.layout import local


@torch.no_grad()
def clip_grad_norm_(
    parameters: Iterable[Tensor], max_norm: float, *, error_if_nonfinite: bool = False
) -> Tensor:
    """Scale all gradients so that their joint 2-norm is at most `max_norm`; returns the norm before that, a float32 ().

    Raises `MuonError` for a gradient that is not reduced yet (Partial), and, if asked, for a norm of NaN or Inf, in
    both cases with nothing changed.
    """
    grads = [parameter.grad for parameter in parameters if parameter.grad is not None]
    norm = grad_norm(grads)
    if error_if_nonfinite and not torch.isfinite(norm):
        raise MuonError(f"the norm of all gradients is {norm.item()}; nothing was scaled. Skip this batch.")
    scale = (max_norm / (norm + 1e-6)).clamp(max=1.0)
    shards = [local(grad) for grad in grads if local(grad).numel()]
    if shards:
        torch._foreach_mul_(shards, scale)  # pyright: ignore[reportPrivateImportUsage]
    return norm


def grad_norm(grads: list[Tensor]) -> Tensor:
    """2-norm of all gradients together, the same on every rank that stores any of them."""
    if not grads:
        return torch.tensor(0.0)
    layouts: dict[object, list[Tensor]] = {}
    for grad in grads:
        key = (grad.device_mesh, grad.placements) if isinstance(grad, DTensor) else None
        layouts.setdefault(key, []).append(grad)
    return torch.linalg.vector_norm(torch.stack([layout_norm(each) for each in layouts.values()]))


def layout_norm(grads: list[Tensor]) -> Tensor:
    """2-norm of gradients that are laid out alike."""
    first = grads[0]
    shards = [local(grad) for grad in grads if local(grad).numel()]
    total = torch.zeros((), device=local(first).device)
    if shards:
        # float32 from the start: a square in bfloat16 keeps two digits
        norms = torch._foreach_norm(shards, 2.0, dtype=torch.float32)  # pyright: ignore[reportPrivateImportUsage]
        total = torch.linalg.vector_norm(torch.stack(norms))
    if isinstance(first, DTensor):
        total = total.square()
        for axis, placement in enumerate(first.placements):
            if isinstance(placement, Partial):
                raise MuonError(
                    f"a gradient is {layout.describe(first)}; reduce it before its norm is taken."
                )
            if not isinstance(placement, Replicate):
                dist.all_reduce(total, group=first.device_mesh.get_group(axis))
        total = total.sqrt()
    return total
