"""Context parallelism: a sequence is cut over ranks, and queries attend to the keys of all of them.

A sequence of T tokens is cut into 2C chunks; of C ranks, rank c has the chunks c and 2C - 1 - c, so that under a causal
mask every rank has the same work, and keys and values are gathered once for a layer (Llama 3, arXiv 2407.21783, section
3.3.2). The gradient of a key is summed on the rank that
holds it.

Letters: B sequences, T tokens, H heads, D width of a head, C ranks that share a sequence.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed._functional_collectives import all_to_all_single_autograd
from torch.nn.attention.bias import causal_lower_right
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from woodshed.records import LayoutError

ATTENTION = "woodshed_context_parallel"
"""Name of the attention function in transformers' registry."""
LAYER_TYPES = {"full_attention", "sliding_attention"}
LENGTH_DEPENDENT_ROTARY = {"dynamic", "longrope"}
"""Their angles depend on the longest position in sight, which is another one on every rank."""


@dataclass(frozen=True)
class Context:
    """Description of the rest of the sequence for attention; passed to the model as `context=`."""

    group: dist.ProcessGroup
    """The ranks that share a sequence, in the order of their chunks."""
    documents_BT: Tensor | None = None
    """Number of the document of each token of the whole sequence; None where a row is one document."""


def cp_chunks(sequence_BT: Tensor, rank: int, num_ranks: int) -> Tensor:
    """The two chunks of dimension 1 that a rank has, joined: (B, T / C, ...).

    Raises `LayoutError` for a length that 2C does not divide.
    """
    length = sequence_BT.shape[1]
    if length % (2 * num_ranks):
        padded = -(-length // (2 * num_ranks)) * 2 * num_ranks
        raise LayoutError(
            f"sequences of {length} tokens cannot be cut into {2 * num_ranks} chunks for cp={num_ranks}; pad them on "
            f"the right to {padded}, with labels of -100."
        )
    cut = sequence_BT.chunk(2 * num_ranks, dim=1)
    return torch.cat([cut[rank], cut[2 * num_ranks - 1 - rank]], dim=1).contiguous()


def number_documents(position_ids_BT: Tensor) -> Tensor | None:
    """Number of each token's document, where positions start again for each; None if every row is one document."""
    starts_BT = position_ids_BT.diff(dim=1, prepend=position_ids_BT[:, :1] - 1) != 1
    return starts_BT.cumsum(1) if starts_BT.any() else None


def gather(local: Tensor, group: dist.ProcessGroup) -> Tensor:
    """(B, H, T / C, D) of every rank to (B, H, T, D) in order of the sequence; gradients are summed on the way back.

    A copy to everyone moves the bytes of an all-gather, and has one name and a gradient in every version of torch.
    """
    copies = local.expand(group.size(), *local.shape).flatten(0, 1)
    ranks = all_to_all_single_autograd(copies, None, None, group).chunk(group.size())
    halves = [rank.chunk(2, dim=2) for rank in ranks]
    return torch.cat([first for first, _ in halves] + [last for _, last in reversed(halves)], dim=2)


def attend(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    context: Context | None = None,
    sliding_window: int | None = None,
    is_causal: bool | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Attention of this rank's queries (B, H, T / C, D) to the keys of the whole sequence: (B, T / C, H, D).

    Each of the two chunks of queries sees the keys up to its own end. Has the signature of transformers' attention
    functions. Raises `LayoutError` for a batch that `ParallelLayout.split` did not make, masks and other than causal
    attention.
    """
    if context is None:
        raise LayoutError(
            "this model attends over cp ranks; call it with the batch that layout.split(...) returns."
        )
    if attention_mask is not None or not (
        getattr(module, "is_causal", True) if is_causal is None else is_causal
    ):
        raise LayoutError(
            "context parallelism is for causal attention without a mask; pad on the right with labels of -100, and "
            "mark packed documents by position_ids that start again at 0."
        )
    both = gather(torch.cat([key, value], dim=-1), context.group)
    key, value = both.split([key.shape[-1], value.shape[-1]], dim=-1)
    rank, num_ranks = context.group.rank(), context.group.size()
    outputs = []
    for chunk, half in zip((rank, 2 * num_ranks - 1 - rank), query.chunk(2, dim=2), strict=True):
        start, end = chunk * half.shape[2], (chunk + 1) * half.shape[2]
        mask = chunk_mask(start, end, context.documents_BT, sliding_window, query.device)
        preceding = key[:, :, :end], value[:, :, :end]
        outputs.append(sdpa_attention_forward(module, half, *preceding, mask, is_causal=False, **kwargs)[0])
    return torch.cat(outputs, dim=1), None


def chunk_mask(
    start: int, end: int, documents_BT: Tensor | None, window: int | None, device: torch.device
) -> Tensor:
    """Mask of the keys 0 .. end that the queries start .. end see.

    Plainly causal attention has a mask that is never written out, where a kernel can do without.
    """
    if documents_BT is None and (window is None or window >= end):
        return causal_lower_right(end - start, end)
    queries, keys = torch.arange(start, end, device=device)[:, None], torch.arange(end, device=device)
    visible = keys <= queries
    if window is not None:
        visible &= keys > queries - window
    if documents_BT is None:
        return visible
    return (visible & (documents_BT[:, start:end, None] == documents_BT[:, None, :end]))[:, None]


def check(model: Any) -> None:
    """Raises `LayoutError` for a transformers model whose layers would miss the tokens of other ranks."""
    config = model.config.get_text_config()
    kinds = set(getattr(config, "layer_types", None) or ()) - LAYER_TYPES
    rotary = {str(part) for part in _rope_types(getattr(config, "rope_parameters", None) or {})}
    name = type(model).__name__
    if kinds or not model._supports_sdpa:
        obstacle = f"layers of {', '.join(sorted(kinds))}" if kinds else "no attention that sdpa can do"
        raise LayoutError(f"{name} has {obstacle}, which cannot see keys of other ranks; use cp=1.")
    if rotary & LENGTH_DEPENDENT_ROTARY:
        raise LayoutError(
            f"{name} has rotary embeddings of type {', '.join(sorted(rotary))}, which depend on the longest position "
            "of a rank; use cp=1."
        )


def _rope_types(parameters: dict[str, Any]) -> list[Any]:
    """Types of rotary embedding: of one set of parameters, or of one for each kind of layer."""
    nested = [value for value in parameters.values() if isinstance(value, dict)]
    return [each.get("rope_type", "default") for each in (nested or [parameters])]


ALL_ATTENTION_FUNCTIONS.register(ATTENTION, attend)
