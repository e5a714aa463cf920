"""QK-clip: shrink the query and key weights of heads whose attention logits grew beyond a threshold.

Source: Kimi K2 (arXiv 2507.20534, section 2.1). Per head h with largest logit S_h of the step, gamma_h is
min(1, tau / S_h); a logit is bilinear in query and key weights, so both take the square root. In multi-head latent
attention the rotary part of the key is shared by all heads and stays: the rotary part of the query takes gamma itself.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from woodshed.muon import layout
from woodshed.muon.errors import MuonError
from woodshed.muon.layout import local


@torch.no_grad()
def qk_clip_(
    max_logits: Tensor,
    query: Tensor,
    key: Tensor,
    *,
    threshold: float = 100.0,
    query_rotary_rows: int = 0,
    key_value_rows: int = 0,
) -> Tensor:
    """Scale rows of `query` and `key` in place; returns gamma, (H,) float32. Call it after `optimizer.step()`.

    max_logits: (H,) largest attention logit of each query head in the step, the same on all ranks (reduce it first).
    query: (H * rows, in), any layout.
    key: (K * rows, in), K divides H (grouped queries), or the up-projection of latent keys and values.
    query_rotary_rows: last rows of every query head that meet a shared rotary key; they take gamma.
    key_value_rows: last rows of every key head that are values; they stay.

    Heads that share a key take what the strictest of them needs on the key, and the rest on their query, so the logits
    of every head shrink by exactly its gamma. Raises `MuonError` if heads do not divide the rows.
    """
    num_heads = max_logits.numel()
    gamma = (threshold / max_logits.float().clamp_min(threshold)).cpu()
    head_rows = rows_of_head(query, num_heads)
    # Key heads are found by the rows that a query head meets: those without its rotary part.
    plain_rows = head_rows - query_rotary_rows
    num_keys = key.shape[0] // (plain_rows + key_value_rows)
    if not num_keys or num_heads % num_keys or num_keys * (plain_rows + key_value_rows) != key.shape[0]:
        raise MuonError(
            f"qk_clip_: {num_heads} query heads of {head_rows} rows do not fit a key of {key.shape[0]} rows."
        )
    strictest = gamma.view(num_keys, -1).amin(1)
    on_key = strictest.sqrt()
    on_query = gamma / on_key.repeat_interleave(num_heads // num_keys)
    scale_rows(query, [on_query.repeat(plain_rows, 1).T, gamma.repeat(query_rotary_rows, 1).T])
    scale_rows(key, [on_key.repeat(plain_rows, 1).T, torch.ones(num_keys, key_value_rows)])
    return gamma


def rows_of_head(weight: Tensor, num_heads: int) -> int:
    if num_heads < 1 or weight.ndim != 2 or weight.shape[0] % num_heads:
        raise MuonError(
            f"qk_clip_: {num_heads} heads do not divide the rows of query, shape {tuple(weight.shape)}."
        )
    return weight.shape[0] // num_heads


def scale_rows(weight: Tensor, parts: Sequence[Tensor]) -> None:
    """Multiply the rows that this rank stores; `parts` are (heads, rows) and lie side by side in every head."""
    factors = torch.cat(list(parts), 1).flatten()
    storage = layout.read("qk_clip_", weight)
    _, position = storage.find(layout.my_rank())
    start, stop = storage.grid.box(position)[0]
    shard = local(weight)
    shard.mul_(factors[start:stop, None].to(shard.device, shard.dtype))
