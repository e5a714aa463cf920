"""Batch-invariant attention and products: a token has the same log-prob in sampling and in training.

A sum of floating-point numbers depends on its order, and kernels choose the order by the shape of the whole call: the
number of queries and rows, and the padding. In bfloat16 the last digit of every layer then differs between sampler and
trainer, and log-probs by hundredths (He et al., "Defeating Nondeterminism in LLM Inference", Thinking Machines 2025).
Here a query attends to the keys of its own sequence in blocks that begin at its first token, independent of other rows.
A product is summed from the first column to the last. On a Hopper card cuBLAS deviates from that only by splitting long
sums of few outputs, which `unsplit` forbids; such products use our own kernel, since cuBLAS is slow at them without
splitting. RMSNorm (one kernel, which keeps no float32 copy for the backward pass, and rounds once instead of twice) and
softmax sum row by row anyway. Products of experts are not covered. On a CPU everything is PyTorch's, and in float32
everything but attention.

Shapes: B rows, H heads, G heads of keys and values, Q queries, T columns, D head width, K in, N out.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

NAME = "invariant"
"""Name of this attention among the implementations of transformers."""
LONG = 2048
"""Number of terms from which cuBLAS splits a sum if there are few outputs,"""
_TILE, _FEW = 128, 132
"""that is, fewer tiles of this side than multiprocessors on the card."""
LEAST_ROWS = 4
"""Products of fewer rows use other kernels, with another order of sums."""


def install(model: Any) -> None:
    """Make a transformers model use this attention and these products."""
    from transformers import AttentionInterface
    from transformers.masking_utils import AttentionMaskInterface, sdpa_mask

    modules: Any = model.modules()
    for module in modules:
        if _is_rms_norm(module):
            module.__class__ = RMSNorm
        elif type(module) is torch.nn.Linear and module.in_features >= LONG:
            module.__class__ = Linear
    if model.config._attn_implementation == "sdpa":
        AttentionInterface.register(NAME, attend)
        AttentionMaskInterface.register(NAME, sdpa_mask)
        model.set_attn_implementation(NAME)


class Linear(torch.nn.Linear):
    """A linear layer with long sums."""

    def forward(self, input: Tensor) -> Tensor:
        return linear(input, self.weight, self.bias)


class RMSNorm(torch.nn.Module):
    """The RMSNorm of transformers in one kernel."""

    weight: Tensor
    variance_epsilon: float

    def forward(self, hidden_states: Tensor) -> Tensor:
        dtype = torch.promote_types(hidden_states.dtype, self.weight.dtype)
        return torch.nn.functional.rms_norm(
            hidden_states.to(dtype), self.weight.shape, self.weight.to(dtype), self.variance_epsilon
        )


def _is_rms_norm(module: torch.nn.Module) -> bool:
    """True for a module that computes PyTorch's RMSNorm, by a trial, since some models add one to the weights."""
    if not type(module).__name__.endswith("RMSNorm") or not hasattr(module, "variance_epsilon"):
        return False
    weight: Any = module.weight
    x = torch.linspace(-3, 5, weight.numel(), dtype=weight.dtype, device=weight.device)[None]
    with torch.no_grad():
        return torch.allclose(module(x), RMSNorm.forward(module, x), rtol=1e-2, atol=1e-5)  # type: ignore[arg-type]


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """x weight^T + bias: (..., N) from (..., K), weight (N, K) and bias (N,)."""
    width, depth = weight.shape
    rows = x.numel() // depth
    is_split = depth >= LONG and -(-rows // _TILE) * -(-width // _TILE) < _FEW
    is_read = not (torch.is_grad_enabled() and (x.requires_grad or weight.requires_grad))
    if x.is_cuda and x.dtype == torch.bfloat16 and is_read and (is_split or rows < LEAST_ROWS):
        from woodshed.engines.local import kernels

        return kernels.linear(x, weight, bias)
    return torch.nn.functional.linear(x, weight, bias)


@contextmanager
def unsplit() -> Iterator[None]:
    """Forbid cuBLAS to split bfloat16 products along the summed dimension."""
    cuda, matmul = torch.backends.cuda, torch.backends.cuda.matmul
    if not torch.cuda.is_available() or torch.version.hip:
        yield
        return
    library = cuda.preferred_blas_library()
    allowed = (
        matmul.allow_bf16_reduced_precision_reduction,
        matmul.allow_bf16_reduced_precision_reduction_split_k,
    )
    cuda.preferred_blas_library("cublaslt")  # cublas without lt splits regardless
    matmul.allow_bf16_reduced_precision_reduction = (False, False)
    try:
        yield
    finally:
        cuda.preferred_blas_library(library)
        matmul.allow_bf16_reduced_precision_reduction = allowed


def takes_spans(model: Any) -> bool:
    """True if `spans` can describe the columns that each query of this model attends to: all since the row's first."""
    config = model.config.get_text_config()
    return (
        config._attn_implementation == NAME
        and not limited_attention(config)
        and not getattr(config, "attn_logit_softcapping", None)
    )


def limited_attention(config: Any) -> str:
    """Feature of a model that limits the range of attention, or caches more than keys and values; "" for none."""
    kinds = set(getattr(config, "layer_types", None) or ())
    if kinds - {"full_attention"}:
        return f"it has {', '.join(sorted(kinds - {'full_attention'}))} layers"
    for name in ("sliding_window", "attention_chunk_size"):
        if not kinds and getattr(config, name, None) and getattr(config, "use_sliding_window", True):
            return f"its attention is limited by {name}"
    return ""


def spans(begin_B: Tensor, first: Tensor) -> Tensor:
    """(B, 1, 1, 2), which transformers passes on as a mask: the first column of each row, and that of its first query.

    Each following query attends to one column more.
    """
    return torch.stack([begin_B, first.expand_as(begin_B)], -1)[:, None, None, :]


def attend(
    module: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **options: Any
) -> tuple[Tensor, None]:
    """Attention with the interface of transformers: (B, Q, H, D) from queries (B, H, Q, D), keys and values (B, G, T,
    D)."""
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    scale = options.get("scaling") or query.shape[-1] ** -0.5
    has_kernel = _has_kernel(query, value)
    if attention_mask is not None and attention_mask.dtype == torch.long:
        span_B2 = attention_mask.view(len(query), 2)
        if has_kernel:
            from woodshed.engines.local import kernels

            return kernels.attend(query, key, value, span_B2, scale), None
        attention_mask = _as_mask(span_B2, query.shape[2], key.shape[2])
    elif attention_mask is None and has_kernel and _is_causal(module, query, key, options):
        return _Causal.apply(query, key, value, scale, None), None  # pyright: ignore[reportReturnType]
    if query.shape[2] == 1 and not options.get("dropout"):
        return attend_few(query, key, value, attention_mask, scale), None
    return sdpa_attention_forward(module, query, key, value, attention_mask, **options)


def attend_branching(
    module: Any, query: Tensor, key: Tensor, value: Tensor, mask: Tensor, **options: Any
) -> Tensor:
    """(B, M + K, H, D) from M causal queries and K after them with a mask (B, 1, K, M + K)."""
    scale = options.get("scaling") or query.shape[-1] ** -0.5
    length = query.shape[2] - mask.shape[2]
    first, last = query.split([length, mask.shape[2]], 2)
    few = attend_few(last, key, value, mask, scale)
    trunk = first, key[:, :, :length], value[:, :, :length]
    if _has_kernel(query, value) and _is_causal(module, *trunk[:2], options):
        return _Causal.apply(*trunk, scale, few)  # pyright: ignore[reportReturnType]
    return torch.cat([attend(module, *trunk, None, **options)[0], few], 1)


def attend_few(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scale: float | None) -> Tensor:
    """Attention of a few queries per row, which reads each key head once for all heads that share it.

    transformers copies keys and values for every head, which takes as long as reading the weights in decoding on a CPU.
    The heads of a group have the same mask, so they are treated as queries of one head.
    """
    rows, heads, queries, width = query.shape
    groups = key.shape[1]
    shared = heads // groups
    if mask is not None and queries > 1:
        mask = mask.repeat(1, 1, shared, 1)
    attended = torch.nn.functional.scaled_dot_product_attention(
        query.reshape(rows, groups, shared * queries, width), key, value, attn_mask=mask, scale=scale
    )
    return attended.reshape(rows, heads, queries, value.shape[-1]).transpose(1, 2)


def _has_kernel(query: Tensor, value: Tensor) -> bool:
    return query.is_cuda and query.shape[-1] == value.shape[-1]


def _as_mask(span_B2: Tensor, queries: int, columns: int) -> Tensor:
    """(B, 1, Q, T), true where a query attends."""
    column_T = torch.arange(columns, device=span_B2.device)
    begin_B11, first_B11 = (part[:, None, None] for part in span_B2.unbind(-1))
    last_BQ1 = first_B11 + torch.arange(queries, device=span_B2.device)[:, None]
    return ((column_T >= begin_B11) & (column_T <= last_BQ1))[:, None]


def _is_causal(module: Any, query: Tensor, key: Tensor, options: dict[str, Any]) -> bool:
    """True for plain causal attention, without an option that changes the keys of a query."""
    return (
        query.shape[2] == key.shape[2]
        and getattr(module, "is_causal", True)
        and options.get("is_causal") is not False
        and not any(options.get(name) for name in ("dropout", "sliding_window", "softcap"))
        and options.get("s_aux") is None
    )


class _Causal(torch.autograd.Function):
    """Causal attention of whole sequences, with the gradient of PyTorch's attention, which is computed once more for
    it.

    The result `behind` (B, K, H, D) of later queries is appended, without a copy of the rest.
    """

    @staticmethod
    def forward(
        ctx: Any, query: Tensor, key: Tensor, value: Tensor, scale: float, behind: Tensor | None
    ) -> Tensor:
        from woodshed.engines.local import kernels

        ctx.save_for_backward(query, key, value)
        ctx.scale = scale
        span_B2 = torch.zeros((len(query), 2), dtype=torch.long, device=query.device)
        more = 0 if behind is None else behind.shape[1]
        out = kernels.attend(query, key, value, span_B2, scale, more)
        if behind is not None:
            out[:, query.shape[2] :] = behind
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        saved = ctx.saved_tensors  # once: a checkpoint that computes them again gives them once
        seen, behind = grads[0].tensor_split([saved[0].shape[2]], 1)
        with torch.enable_grad():
            inputs = [part.detach().requires_grad_() for part in saved]
            out = torch.nn.functional.scaled_dot_product_attention(
                *inputs, is_causal=True, scale=ctx.scale, enable_gqa=True
            )
        gradients = torch.autograd.grad(out, inputs, seen.transpose(1, 2))
        return (*gradients, None, behind if ctx.needs_input_grad[4] else None)
