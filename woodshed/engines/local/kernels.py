"""The Triton kernels of `invariant`. They have one fixed configuration, since others may give other bits."""

# pyright: reportGeneralTypeIssues=false, reportArgumentType=false, reportOptionalOperand=false
# pyright: reportIndexIssue=false, reportCallIssue=false
from __future__ import annotations

import math

import torch
import triton  # pyright: ignore[reportMissingImports]
import triton.language as tl  # pyright: ignore[reportMissingImports]
from torch import Tensor

TILE = 64
"""Number of queries of one program, and of keys in one block."""
FEW = 32
"""Number of outputs of one program in a product of few rows; small, so that there are enough programs without
splitting sums."""


@triton.jit(do_not_specialize=["queries"])
def attend_kernel(
    query, key, value, out, spans, queries, scale,
    query_row, query_head, query_position, key_row, key_head, key_position,
    value_row, value_head, value_position, out_row,
    SHARED: tl.constexpr, WIDTH: tl.constexpr, PADDED: tl.constexpr, TILE: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """One tile: the queries of all heads that share a key head, by position. Online softmax (arXiv 2205.14135)."""
    group, groups = tl.program_id(1), tl.num_programs(1)
    row = tl.program_id(2).to(tl.int64)
    begin, first = tl.load(spans + 2 * row), tl.load(spans + 2 * row + 1)
    each = tl.program_id(0) * TILE + tl.arange(0, TILE)
    position = (each // SHARED).to(tl.int64)
    head = group * SHARED + each % SHARED
    inside = (position < queries)[:, None]
    last = first + tl.minimum((tl.program_id(0) * TILE + TILE - 1) // SHARED, queries - 1)
    width = tl.arange(0, PADDED)[None, :]
    real = width < WIDTH
    queries_tile = tl.load(
        query + row * query_row + head[:, None] * query_head + position[:, None] * query_position + width,
        mask=inside & real, other=0.0,
    )  # fmt: skip
    keys = key + row * key_row + group * key_head + width
    values = value + row * value_row + group * value_head + width
    best = tl.full((TILE,), float("-inf"), tl.float32)
    total = tl.zeros((TILE,), tl.float32)
    mixed = tl.zeros((TILE, PADDED), tl.float32)
    for start in range(begin, last + 1, TILE):
        column = start + tl.arange(0, TILE)
        valid = (column <= last)[:, None] & real
        k = tl.load(keys + column[:, None] * key_position, mask=valid, other=0.0)
        score = tl.dot(queries_tile, tl.trans(k), input_precision=PRECISION) * scale
        score = tl.where(column[None, :] <= first + position[:, None], score, float("-inf"))
        higher = tl.maximum(best, tl.max(score, 1))
        weight = tl.exp2(score - higher[:, None])
        shrink = tl.exp2(best - higher)
        total = total * shrink + tl.sum(weight, 1)
        v = tl.load(values + column[:, None] * value_position, mask=valid, other=0.0)
        mixed = tl.dot(weight.to(v.dtype), v, mixed * shrink[:, None], input_precision=PRECISION)
        best = higher
    offset = row * out_row + (position[:, None] * groups * SHARED + head[:, None]) * WIDTH + width
    tl.store(out + offset, mixed / total[:, None], mask=inside & real)


def attend(query: Tensor, key: Tensor, value: Tensor, spans: Tensor, scale: float, extra: int = 0) -> Tensor:
    """(B, Q, H, D) from queries (B, H, Q, D), keys and values (B, G, T, D) and spans (B, 2); see `invariant`.

    The result has space for `extra` more queries after them.
    """
    rows, heads, queries, width = query.shape
    groups = key.shape[1]
    out = torch.empty((rows, queries + extra, heads, width), dtype=query.dtype, device=query.device)
    if any(part.stride(-1) != 1 for part in (query, key, value)):
        query, key, value = query.contiguous(), key.contiguous(), value.contiguous()
    shared = heads // groups
    attend_kernel[(triton.cdiv(queries * shared, TILE), groups, rows)](
        query, key, value, out, spans, queries, scale * math.log2(math.e),
        *query.stride()[:3], *key.stride()[:3], *value.stride()[:3], out.stride(0),
        SHARED=shared, WIDTH=width, PADDED=max(16, triton.next_power_of_2(width)), TILE=TILE, PRECISION="ieee",
    )  # fmt: skip
    return out


@triton.jit(do_not_specialize=["rows"])
def linear_kernel(
    x, weight, bias, out, rows, width, depth, x_row, weight_row,
    HAS_BIAS: tl.constexpr, TILE: tl.constexpr, FEW: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """One tile of x weight^T + bias, summed from the first column to the last."""
    row = tl.program_id(1) * TILE + tl.arange(0, TILE)
    col = tl.program_id(0) * FEW + tl.arange(0, FEW)
    column = tl.arange(0, TILE)
    left = x + row[:, None].to(tl.int64) * x_row + column[None, :]
    right = weight + col[None, :].to(tl.int64) * weight_row + column[:, None]
    total = tl.zeros((TILE, FEW), tl.float32)
    for start in range(0, depth, TILE):
        inside = column < depth - start
        a = tl.load(left, mask=(row[:, None] < rows) & inside[None, :], other=0.0)
        b = tl.load(right, mask=(col[None, :] < width) & inside[:, None], other=0.0)
        total = tl.dot(a, b, total, input_precision=PRECISION)
        left += TILE
        right += TILE
    if HAS_BIAS:
        total += tl.load(bias + col, mask=col < width, other=0.0).to(tl.float32)[None, :]
    offset = row[:, None].to(tl.int64) * width + col[None, :]
    tl.store(out + offset, total, mask=(row[:, None] < rows) & (col[None, :] < width))


def linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """x weight^T + bias of few rows (..., K), weight (N, K), bias (N,)."""
    flat = x.reshape(-1, x.shape[-1])
    flat = flat if flat.stride(-1) == 1 else flat.contiguous()
    width, depth = weight.shape
    out = torch.empty((len(flat), width), dtype=x.dtype, device=x.device)
    linear_kernel[(triton.cdiv(width, FEW), triton.cdiv(len(flat), TILE))](
        flat, weight, weight if bias is None else bias, out, len(flat), width, depth, flat.stride(0), weight.stride(0),
        HAS_BIAS=bias is not None, TILE=TILE, FEW=FEW, PRECISION="ieee", num_warps=4, num_stages=5,
    )  # fmt: skip
    return out.view(*x.shape[:-1], width)
