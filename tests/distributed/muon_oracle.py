"""Muon on full matrices in one process: the slow version that the sharded one has to equal."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

JORDAN = (3.4445, -4.7750, 2.0315)


def newton_schulz(
    matrix: Tensor, dtype: torch.dtype = torch.float32, coefficients: list | None = None
) -> Tensor:
    """(r, c), one matrix, float32 norm."""
    x = matrix.float()
    norm = x.double().norm().float()
    x = (x / norm if norm > 0 else x).to(dtype)
    x = x.T if matrix.shape[0] > matrix.shape[1] else x
    for a, b, c in coefficients or [JORDAN] * 5:
        gram = x @ x.T
        x = a * x + (b * gram + c * gram @ gram) @ x
    return x.T if matrix.shape[0] > matrix.shape[1] else x


def matrices(tensor: Tensor, rows: list[int], cols: list[int]) -> list[Tensor]:
    """Views of every unit: blocks of rows and columns of every matrix of a stack."""
    stack = tensor if tensor.ndim == 3 else tensor[None]
    return [c for m in stack for r in m.split(rows, 0) for c in r.split(cols, 1)]


class FullMuon:
    """One parameter. `rows` and `cols` are the sizes of its units."""

    def __init__(self, weight: Tensor, rows: list[int] | None = None, cols: list[int] | None = None) -> None:
        self.weight, self.momentum = weight.clone(), torch.zeros_like(weight)
        self.rows, self.cols = rows or [weight.shape[-2]], cols or [weight.shape[-1]]

    def step(
        self,
        grad: Tensor,
        lr: float,
        weight_decay: float = 0.1,
        mu: float = 0.95,
        nesterov: bool = True,
        wire: torch.dtype = torch.float32,
        orthogonalise: Callable[[Tensor], Tensor] = newton_schulz,
    ) -> None:
        """`wire` rounds where the sharded version does: before and after orthogonalisation."""
        self.momentum.mul_(mu).add_(grad)
        update = grad + mu * self.momentum if nesterov else self.momentum
        self.weight.mul_(1 - lr * weight_decay)
        units = zip(
            matrices(self.weight, self.rows, self.cols),
            matrices(update.to(wire), self.rows, self.cols),
            strict=True,
        )
        for weight, direction in units:
            scale = 0.2 * math.sqrt(max(weight.shape))
            weight.sub_(lr * scale * orthogonalise(direction).to(wire).float())
