"""Rows that several ranks share (context parallelism): each reads its chunks of them, and all get what they predict.

What a chunk predicts is scored where it was read, and log-probs are added up over the ranks, which then have the same
loss. Gradients are added up on the way back, so each of C ranks takes 1 / C of the loss: a weight that all of them read
for the whole micro-batch (the output layer, for logits) counts once, like one that each reads for its own chunks.

Shapes: R rows, T positions, C ranks that share them, B samples, N predicted tokens (padded), M of them on this rank.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from woodshed.learning.packing import Padded
from woodshed.parallel.context import cp_chunks


@dataclass(frozen=True)
class Places:
    """Places of the tokens that this rank predicts among those of the whole micro-batch."""

    group: dist.ProcessGroup
    at_M: Tensor
    """Indices into (B x N)."""
    shape: tuple[int, int]
    """(B, N)."""

    def whole(self, values: Tensor) -> Tensor:
        """(B, N, ...): what each of the ranks knows of its own tokens, (M or more, ...), told to all; 0 for padding."""
        rows, columns = self.shape
        own = values[: len(self.at_M)]
        placed = own.new_zeros((rows * columns, *own.shape[1:])).index_copy(0, self.at_M, own)
        return _Summed.apply(placed, self.group).view(rows, columns, *own.shape[1:])  # pyright: ignore[reportOptionalMemberAccess]


class _Summed(torch.autograd.Function):
    """Sum over ranks; so is the gradient."""

    @staticmethod
    def forward(ctx: Any, values: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        total = values.clone()
        dist.all_reduce(total, group=group)
        return total

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        total = grads[0].clone()
        dist.all_reduce(total, group=ctx.group)
        return total, None


def cut(padded: Padded, group: dist.ProcessGroup) -> tuple[Padded, Places]:
    """This rank's chunks of every row, and the places of what they predict; at least one position is predicted."""
    rank, count = group.rank(), group.size()
    rows, length = padded.ids_RT.shape
    padding = -length % (2 * count)
    chunk = (length + padding) // (2 * count)

    def own(values_RT: Tensor, filled: int = 0) -> Tensor:
        tail = values_RT.new_full((rows, padding, *values_RT.shape[2:]), filled)
        return cp_chunks(torch.cat([values_RT, tail], 1), rank, count)

    row_BN, position_BN = padded.predict_BN // length, padded.predict_BN % length
    number_BN, offset_BN = position_BN // chunk, position_BN % chunk
    is_last_BN = number_BN == 2 * count - 1 - rank
    is_own_BN = ((number_BN == rank) | is_last_BN) & (padded.mask_BN > 0)
    local_BN = row_BN * 2 * chunk + offset_BN + is_last_BN * chunk
    at_M = is_own_BN.flatten().nonzero()[:, 0]
    predict_M = local_BN.flatten()[at_M] if len(at_M) else at_M.new_zeros(1)
    positions = torch.arange(length, device=padded.ids_RT.device).expand(rows, -1)
    logged = padded.experts_RTLK
    chunks = replace(
        padded,
        ids_RT=own(padded.ids_RT),
        positions_RT=own(positions if padded.positions_RT is None else padded.positions_RT),
        predict_BN=predict_M[None],
        experts_RTLK=None if logged is None else own(logged, -1),
    )
    return chunks, Places(group, at_M, (padded.predict_BN.shape[0], padded.predict_BN.shape[1]))
