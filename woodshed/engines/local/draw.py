"""Sampling of one token for each row from its logits.

Shapes: B rows, V vocabulary, N blocks, K ids of a block.
"""

from __future__ import annotations

import torch
from torch import Tensor

_BLOCK = 512
"""Number of ids in a block. A block is drawn first, then an id in it."""


def draw(logits_BV: Tensor, uniform_B: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
    """One id for each row and its log-prob, by inverting the distribution function at a number in [0, 1).

    Blocks of ids are summed first, in float64, then the ids of one block. Rows are independent of each other.
    """
    logps_BV = torch.log_softmax(logits_BV / temperature, dim=-1)
    padding = -logps_BV.shape[-1] % _BLOCK
    prob_BNK = torch.nn.functional.pad(logps_BV.exp(), (0, padding)).unflatten(-1, (-1, _BLOCK))
    edge_BN = prob_BNK.sum(-1, dtype=torch.float64).cumsum(-1)
    wanted_B1 = uniform_B[:, None] * edge_BN[:, -1:]
    block_B1 = _first_above(edge_BN, wanted_B1)
    before_B1 = torch.where(block_B1 > 0, edge_BN.gather(-1, (block_B1 - 1).clamp(min=0)), 0.0)
    prob_BK = prob_BNK.gather(1, block_B1[..., None].expand(-1, 1, _BLOCK))[:, 0]
    ids = block_B1 * _BLOCK + _first_above(prob_BK.double().cumsum(-1), wanted_B1 - before_B1)
    ids = ids.clamp(max=logps_BV.shape[-1] - 1)  # for rows with non-finite values
    return ids[:, 0], logps_BV.gather(-1, ids)[:, 0]


def _first_above(rising_BN: Tensor, wanted_B1: Tensor) -> Tensor:
    """(B, 1) index of the first sum above the wanted value, which is limited to below the last sum."""
    largest_B1 = torch.nextafter(rising_BN[:, -1:], torch.zeros_like(wanted_B1))
    index = torch.searchsorted(rising_BN, torch.minimum(wanted_B1, largest_B1), right=True)
    return index.clamp(max=rising_BN.shape[-1] - 1)
