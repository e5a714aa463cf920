"""Units that are orthogonalised as one matrix: a parameter, a head, an expert, the gate or up half of an expert.

A unit is a box of its parameter whose last two dimensions are the matrix. Scale and cost are those of the *unit*, never
of the shard that a rank happens to store nor of the fused tensor.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from woodshed.muon.errors import MuonError
from woodshed.muon.grid import Grid, Interval, blocks

Blocks = int | tuple[int, ...]
"""One size that divides the dimension, or every size in order."""


@dataclass(frozen=True)
class Whole:
    """The parameter is one matrix."""

    def grid(self, name: str, shape: tuple[int, ...]) -> Grid:
        expect_ndim(name, shape, 2, "Whole()")
        return Grid((((0, shape[0]),), ((0, shape[1]),)))


@dataclass(frozen=True)
class Heads:
    """A 2-D parameter is a row of heads: blocks of `rows` (q, k, v projections) or of `cols` (output projection)."""

    rows: Blocks | None = None
    """Rows per head, or the rows of each block of a fused projection: (q_rows, k_rows, v_rows)."""
    cols: Blocks | None = None
    """Columns per head."""

    def grid(self, name: str, shape: tuple[int, ...]) -> Grid:
        expect_ndim(name, shape, 2, "Heads")
        if (self.rows is None) == (self.cols is None):
            raise MuonError(
                f"{name}: Heads takes rows or cols, and got {self}. Output projections take cols."
            )
        return Grid(matrix_cuts(name, shape, self.rows, self.cols))


@dataclass(frozen=True)
class Experts:
    """A 3-D parameter (experts, rows, cols): one matrix per expert, or several where gate and up are fused."""

    rows: Blocks | None = None
    """Rows per matrix: the intermediate size, where gate and up are stacked along the rows."""
    cols: Blocks | None = None
    """Columns per matrix, where they are stacked along the columns."""

    def grid(self, name: str, shape: tuple[int, ...]) -> Grid:
        expect_ndim(name, shape, 3, "Experts")
        return Grid((blocks([1] * shape[0]), *matrix_cuts(name, shape[1:], self.rows, self.cols)))


Units = Whole | Heads | Experts


def default_units(name: str, shape: tuple[int, ...]) -> Units:
    """The whole matrix, or every expert of a stack."""
    return Experts() if len(shape) == 3 else Whole()


def expect_ndim(name: str, shape: tuple[int, ...], ndim: int, kind: str) -> None:
    if len(shape) != ndim:
        raise MuonError(
            f"{name}: {kind} needs a {ndim}-D parameter, and this one has shape {shape}. Use Whole() or Heads(...) for "
            "2-D, Experts(...) for 3-D, and send the rest to AdamW: "
            f'adamw=dict(match=[..., "{name}"]).'
        )


def matrix_cuts(
    name: str, shape: tuple[int, ...], rows: Blocks | None, cols: Blocks | None
) -> tuple[tuple[Interval, ...], tuple[Interval, ...]]:
    return cut(name, "rows", shape[0], rows), cut(name, "cols", shape[1], cols)


def cut(name: str, axis: str, length: int, sizes: Blocks | None) -> tuple[Interval, ...]:
    if sizes is None:
        return ((0, length),)
    if isinstance(sizes, int):
        if sizes < 1 or length % sizes:
            raise MuonError(
                f"{name}: {axis}={sizes} does not divide its {length} {axis} ({length / max(sizes, 1):.2f} blocks). "
                f"Pass the {axis} of one head or matrix, or all sizes in order: {axis}=(a, b, ...)."
            )
        return blocks([sizes] * (length // sizes))
    if sum(sizes) != length or min(sizes, default=0) < 1:
        raise MuonError(f"{name}: {axis}={sizes} add up to {sum(sizes)}, not to its {length} {axis}.")
    return blocks(sizes)


# Learning-rate scale of a unit ------------------------------------------------------------------------------------

Scale = Callable[[int, int], float]


def match_rms_adamw(rows: int, cols: int) -> float:
    """Moonshot's: the update has the root mean square that AdamW's usually has, 0.2 (arXiv 2502.16982, section 2.2)."""
    return 0.2 * math.sqrt(max(rows, cols))


def spectral(rows: int, cols: int) -> float:
    """Keller Jordan's original: sqrt(max(1, rows / cols))."""
    return math.sqrt(max(1.0, rows / cols))


def spectral_unclamped(rows: int, cols: int) -> float:
    """sqrt(rows / cols): an update of unit size in the norm from input to output RMS (arXiv 2310.17813)."""
    return math.sqrt(rows / cols)


SCALES: dict[str, Scale] = {f.__name__: f for f in (match_rms_adamw, spectral, spectral_unclamped)}


# Cost of a unit ---------------------------------------------------------------------------------------------------

MEMORY_FLOPS_PER_ELEMENT = 1_900
"""Cost of reading and writing an element in one iteration, in the FLOPs that a card does meanwhile (8 bytes at the
ratio of a H100, about 235 FLOP per byte). Short matrices, heads above all, are bound by memory and not by products."""


def flops(rows: int, cols: int, steps: int = 5) -> float:
    """FLOPs of `steps` standard Newton-Schulz iterations: 4 m^2 n + 2 m^3 each, m the shorter side."""
    m, n = sorted((rows, cols))
    return steps * (4.0 * m * m * n + 2.0 * m * m * m)


def cost(rows: int, cols: int, steps: int = 5) -> float:
    """FLOPs, or what its memory traffic is worth where that is more. Owners are balanced by this."""
    return max(flops(rows, cols, steps), float(steps) * MEMORY_FLOPS_PER_ELEMENT * rows * cols)
