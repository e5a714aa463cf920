"""Triton kernels: half of a symmetric product, the norm in one pass, and element-wise work on many regions at once.

One configuration each and no tuning at run time: replicas that chose differently would no longer hold the same bits.
Offsets are 64-bit: a stack of experts has more than 2^31 elements.
"""

# pyright: reportGeneralTypeIssues=false, reportArgumentType=false, reportOptionalOperand=false
# pyright: reportCallIssue=false
from __future__ import annotations

from typing import Any

import torch
import triton  # pyright: ignore[reportMissingImports]
import triton.language as tl  # pyright: ignore[reportMissingImports]
from torch import Tensor

BLOCK = 4096
"""Elements per program of the element-wise kernels."""
GROUP = 8
"""Neighbours that a thread moves at once where all rows and addresses of a table allow it: 16 bytes of bfloat16."""
TL_TYPES = {
    torch.float32: tl.float32,
    torch.bfloat16: tl.bfloat16,
    torch.float16: tl.float16,
    torch.float64: tl.float64,
}


def launch(kernel: Any, programs: tuple[int, int], *tables: Any, **constants: Any) -> None:
    """Launch a kernel. Triton's own syntax for it has no types."""
    kernel[programs](*tables, **constants)


@triton.jit
def symmetric_kernel(
    x, y, z, out, m, k, alpha, beta,
    x_batch, x_row, x_col, y_batch, y_row, y_col,
    HAS_Z: tl.constexpr, SIDE: tl.constexpr, DEPTH: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """out = alpha x y^T + beta z on the tiles of the lower triangle; each is also written mirrored."""
    tile = tl.program_id(0)
    batch = tl.program_id(1).to(tl.int64)
    row = ((tl.sqrt(8.0 * tile.to(tl.float32) + 1.0) - 1.0) / 2.0).to(tl.int32)
    row = tl.where(row * (row + 1) // 2 > tile, row - 1, row)
    row = tl.where((row + 1) * (row + 2) // 2 <= tile, row + 1, row)
    col = tile - row * (row + 1) // 2
    rows = row * SIDE + tl.arange(0, SIDE)
    cols = col * SIDE + tl.arange(0, SIDE)
    depth = tl.arange(0, DEPTH)
    left = x + batch * x_batch + rows[:, None].to(tl.int64) * x_row + depth[None, :].to(tl.int64) * x_col
    right = y + batch * y_batch + cols[None, :].to(tl.int64) * y_row + depth[:, None].to(tl.int64) * y_col
    total = tl.zeros((SIDE, SIDE), dtype=tl.float32)
    for start in range(0, k, DEPTH):
        inside = depth < k - start
        a = tl.load(left, mask=(rows[:, None] < m) & inside[None, :], other=0.0)
        b = tl.load(right, mask=(cols[None, :] < m) & inside[:, None], other=0.0)
        total = tl.dot(a, b, total, input_precision=PRECISION)
        left += DEPTH * x_col
        right += DEPTH * y_col
    total *= alpha
    mask = (rows[:, None] < m) & (cols[None, :] < m)
    offsets = batch * m * m + rows[:, None].to(tl.int64) * m + cols[None, :]
    if HAS_Z:
        total += beta * tl.load(z + offsets, mask=mask, other=0.0).to(tl.float32)
    tl.store(out + offsets, total, mask=mask)
    if row != col:
        mirrored = batch * m * m + cols[:, None].to(tl.int64) * m + rows[None, :]
        tl.store(out + mirrored, tl.trans(total), mask=(cols[:, None] < m) & (rows[None, :] < m))


def symmetric_product(x: Tensor, y: Tensor, z: Tensor | None, alpha: float, beta: float) -> Tensor:
    """alpha x y^T + beta z for x, y (B, m, k) whose product is symmetric, and symmetric z (B, m, m) or None."""
    num_matrices, m, k = x.shape
    out = torch.empty((num_matrices, m, m), dtype=x.dtype, device=x.device)
    side, depth = (128, 64) if m > 128 else (64, 64)
    tiles = triton.cdiv(m, side)
    launch(
        symmetric_kernel, (tiles * (tiles + 1) // 2, num_matrices),
        x, y, out if z is None else z.contiguous(), out, m, k, alpha, beta, *x.stride(), *y.stride(),
        HAS_Z=z is not None, SIDE=side, DEPTH=depth, PRECISION="ieee",
        num_warps=8 if side == 128 else 4, num_stages=4,
    )  # fmt: skip
    return out


@triton.jit
def norm_kernel(x, largest, squares, numel, num_blocks, BLOCK: tl.constexpr):
    """Per block of one matrix: the largest magnitude, and the squares of the rest relative to it. NaN gives Inf."""
    block, matrix = tl.program_id(0), tl.program_id(1).to(tl.int64)
    index = block * BLOCK + tl.arange(0, BLOCK).to(tl.int64)
    value = tl.abs(tl.load(x + matrix * numel + index, mask=index < numel, other=0.0).to(tl.float32))
    value = tl.where(value == value, value, float("inf"))
    most = tl.max(value, axis=0)
    scaled = value / tl.where(most > 0, most, 1.0)
    tl.store(largest + matrix * num_blocks + block, most)
    tl.store(squares + matrix * num_blocks + block, tl.sum(scaled * scaled, axis=0))


@triton.jit
def divide_kernel(x, out, first, second, numel, BLOCK: tl.constexpr):
    """(x / first) / second per matrix: one division could leave float32. first = 0 stands for a zero result."""
    block, matrix = tl.program_id(0), tl.program_id(1).to(tl.int64)
    index = block * BLOCK + tl.arange(0, BLOCK).to(tl.int64)
    value = tl.load(x + matrix * numel + index, mask=index < numel, other=0.0).to(tl.float32)
    divisor = tl.load(first + matrix)
    scaled = value / tl.where(divisor > 0, divisor, 1.0) / tl.load(second + matrix)
    tl.store(out + matrix * numel + index, tl.where(divisor > 0, scaled, 0.0), mask=index < numel)


def normalised(batch: Tensor, dtype: torch.dtype) -> Tensor:
    """`newton_schulz.normalised` in one pass to read and one to scale."""
    x = batch.contiguous()
    numel = x[0].numel()
    num_blocks = triton.cdiv(numel, BLOCK)
    largest = torch.empty((len(x), num_blocks), dtype=torch.float32, device=x.device)
    squares = torch.empty_like(largest)
    launch(norm_kernel, (num_blocks, len(x)), x, largest, squares, numel, num_blocks, BLOCK=BLOCK)
    most = largest.amax(1)
    usable = torch.isfinite(most) & (most > 0)
    first = torch.where(usable, most, 0.0)
    share = torch.where(usable[:, None], largest / most.clamp_min(1e-45)[:, None], 0.0)
    second = torch.where(usable, (squares * share * share).sum(1).sqrt(), 1.0)
    out = torch.empty_like(x, dtype=dtype)
    launch(divide_kernel, (num_blocks, len(x)), x, out, first, second, numel, BLOCK=BLOCK)
    return out


# Regions ----------------------------------------------------------------------------------------------------------
# A table holds one column per region: where it starts (an address; 0 is "none"), how long its rows are, and how far
# apart rows lie. `elementwise.py` builds the tables.


@triton.jit
def first_elements(BLOCK: tl.constexpr, GROUP: tl.constexpr):
    """First elements of this program's groups, (BLOCK / GROUP, 1), in the order of the region."""
    return tl.program_id(1) * BLOCK + GROUP * tl.arange(0, BLOCK // GROUP)[:, None]


@triton.jit
def element_offsets(first, cols, stride, GROUP: tl.constexpr):
    """Offsets of the groups' elements, (BLOCK / GROUP, GROUP). Divisions stay in 32 bits, which every single region
    fits."""
    start = (first // cols).to(tl.int64) * stride + first % cols
    return tl.multiple_of(start, (GROUP, GROUP)) + tl.arange(0, GROUP)[None, :]


@triton.jit
def pointer(address, TYPE: tl.constexpr, GROUP: tl.constexpr):
    return tl.multiple_of(address.to(tl.pointer_type(TYPE)), 2 * GROUP)


@triton.jit
def pack_kernel(
    grads, momenta, outs, numels, cols, grad_strides, momentum_strides, out_strides, decays,
    GRAD: tl.constexpr, MOMENTUM: tl.constexpr, OUT: tl.constexpr, NESTEROV: tl.constexpr,
    BLOCK: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    """M <- mu M + G;  out <- G + mu M (Nesterov) or M."""
    region = tl.program_id(0)
    numel, width = tl.load(numels + region), tl.load(cols + region)
    if tl.program_id(1) * BLOCK >= numel:
        return
    first = first_elements(BLOCK, GROUP)
    mask = first < numel
    grad_address, out_address = tl.load(grads + region), tl.load(outs + region)
    mu = tl.load(decays + region)
    grad = tl.load(
        pointer(grad_address, GRAD, GROUP) + element_offsets(first, width, tl.load(grad_strides + region), GROUP),
        mask=mask & (grad_address != 0), other=0.0,
    ).to(tl.float32)  # fmt: skip
    momenta_pointer = pointer(tl.load(momenta + region), MOMENTUM, GROUP) + element_offsets(
        first, width, tl.load(momentum_strides + region), GROUP
    )
    momentum = mu * tl.load(momenta_pointer, mask=mask, other=0.0).to(tl.float32) + grad
    tl.store(momenta_pointer, momentum, mask=mask)
    update = grad + mu * momentum if NESTEROV else momentum
    out_pointer = pointer(out_address, OUT, GROUP) + element_offsets(
        first, width, tl.load(out_strides + region), GROUP
    )
    tl.store(out_pointer, update, mask=mask & (out_address != 0))


@triton.jit
def copy_kernel(
    sources, targets, numels, cols, source_strides, target_strides,
    TYPE: tl.constexpr, BLOCK: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    region = tl.program_id(0)
    numel, width = tl.load(numels + region), tl.load(cols + region)
    if tl.program_id(1) * BLOCK >= numel:
        return
    first = first_elements(BLOCK, GROUP)
    source = pointer(tl.load(sources + region), TYPE, GROUP) + element_offsets(
        first, width, tl.load(source_strides + region), GROUP
    )
    target = pointer(tl.load(targets + region), TYPE, GROUP) + element_offsets(
        first, width, tl.load(target_strides + region), GROUP
    )
    tl.store(target, tl.load(source, mask=first < numel), mask=first < numel)


@triton.jit
def apply_kernel(
    weights, updates, numels, cols, weight_strides, update_strides, keeps, rates,
    WEIGHT: tl.constexpr, UPDATE: tl.constexpr, BLOCK: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    """W <- keep W - rate O."""
    region = tl.program_id(0)
    numel, width = tl.load(numels + region), tl.load(cols + region)
    if tl.program_id(1) * BLOCK >= numel:
        return
    first = first_elements(BLOCK, GROUP)
    mask = first < numel
    weight = pointer(tl.load(weights + region), WEIGHT, GROUP) + element_offsets(
        first, width, tl.load(weight_strides + region), GROUP
    )
    update = pointer(tl.load(updates + region), UPDATE, GROUP) + element_offsets(
        first, width, tl.load(update_strides + region), GROUP
    )
    decayed = tl.load(keeps + region) * tl.load(weight, mask=mask, other=0.0).to(tl.float32)
    moved = tl.load(rates + region) * tl.load(update, mask=mask, other=0.0).to(tl.float32)
    tl.store(weight, decayed - moved, mask=mask)
