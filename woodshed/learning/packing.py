"""Training samples as padded tensors, and their division into micro-batches.

Shapes: B sequences, T positions, N predicted tokens (padded), G hint branches. Samples of similar length share a
micro-batch, and a micro-batch holds at most so many positions, padding included; a longer sample travels alone.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TypeVar

import numpy as np
import torch
from torch import Tensor

from woodshed.experience.samples import HintBranch, TrainingSample

T = TypeVar("T")


@dataclass(frozen=True)
class Padded:
    """Samples as tensors, padded on the right."""

    ids_BT: Tensor
    positions: int
    """Real tokens in the batch, padding left out."""
    predict_BN: Tensor
    """Positions whose logits predict the tokens, as indices into (B x T)."""
    tokens_BN: Tensor
    mask_BN: Tensor
    """1.0 where a predicted token is real, 0.0 where it is padding."""
    logp_sampler_BN: Tensor
    advantage_BN: Tensor
    rl_BN: Tensor
    """Weight of each token in the policy gradient."""
    ce_BN: Tensor
    """... and in the cross-entropy."""
    positions_BT: Tensor | None = None
    """Position of each token, where that is not its index."""
    visible: Tensor | None = None
    """(B, 1, K, T) whom the last K positions attend to, where that is not everything before."""


@dataclass(frozen=True)
class PaddedBranches:
    """The tokens on which students and teachers are compared, (G, N) each."""

    tokens_GN: Tensor
    mask_GN: Tensor
    """1.0 where a token is real."""
    logp_sampler_GN: Tensor
    weight_GN: Tensor
    """Weight of each token in the divergence."""


def pad(samples: Sequence[TrainingSample], device: torch.device | str = "cpu") -> Padded:
    """Samples as right-padded tensors. Padding is known from the lengths, never from token ids."""
    length, width = max(len(s.ids) for s in samples), max(len(s.predicted) for s in samples)

    def stream(values: Sequence[Sequence[float]]) -> Tensor:
        return pad_2d(values, width, device, dtype=np.float32)

    return Padded(
        ids_BT=pad_2d([s.ids for s in samples], length, device),
        positions=sum(len(s.ids) for s in samples),
        predict_BN=pad_2d(
            [[b * length + i - 1 for i in s.predicted] for b, s in enumerate(samples)], width, device
        ),
        tokens_BN=pad_2d([[s.ids[i] for i in s.predicted] for s in samples], width, device),
        mask_BN=stream([[1.0] * len(s.predicted) for s in samples]),
        logp_sampler_BN=stream([s.logps for s in samples]),
        advantage_BN=stream([s.advantages for s in samples]),
        rl_BN=stream([s.rl_weights for s in samples]),
        ce_BN=stream([s.ce_weights for s in samples]),
    )


def pad_branches(
    hinted: Sequence[tuple[TrainingSample, HintBranch]], device: torch.device | str = "cpu"
) -> PaddedBranches:
    """The tokens on which branches are compared, as right-padded tensors."""
    width = max(len(branch.predicted) for _, branch in hinted)
    logp = [dict(zip(sample.predicted, sample.logps, strict=False)) for sample, _ in hinted]

    def stream(values: Sequence[Sequence[float]]) -> Tensor:
        return pad_2d(values, width, device, dtype=np.float32)

    return PaddedBranches(
        tokens_GN=pad_2d([[b.ids[i] for i in b.behind_hint] for _, b in hinted], width, device),
        mask_GN=stream([[1.0] * len(b.predicted) for _, b in hinted]),
        logp_sampler_GN=stream(
            [[known.get(i, 0.0) for i in b.predicted] for known, (_, b) in zip(logp, hinted, strict=True)]
        ),
        weight_GN=stream([b.weights for _, b in hinted]),
    )


def pad_2d(
    rows: Sequence[Sequence[float]],
    width: int,
    device: torch.device | str = "cpu",
    *,
    padding: int = 0,
    dtype: type[np.generic] = np.int64,
) -> Tensor:
    """(len(rows), width): rows of numbers, padded at the right. No GPU is waited for."""
    padded = np.full((len(rows), width), padding, dtype)
    for row, values in zip(padded, rows, strict=True):
        row[: len(values)] = values
    tensor = torch.from_numpy(padded)
    if torch.device(device).type != "cuda":
        return tensor.to(device)
    return tensor.pin_memory().to(device, non_blocking=True)


def micro_batches(items: Sequence[T], lengths: Sequence[int], budget: int) -> Iterator[list[T]]:
    """Items in order of length, as many at a time as fit into `budget` positions, padding included."""
    order = sorted(range(len(items)), key=lambda i: lengths[i])
    chunk: list[int] = []
    for i in order:
        if chunk and (len(chunk) + 1) * lengths[i] > budget:
            yield [items[j] for j in chunk]
            chunk = []
        chunk.append(i)
    if chunk:
        yield [items[j] for j in chunk]


def sample_batches(samples: Sequence[TrainingSample], budget: int) -> Iterator[list[TrainingSample]]:
    """Samples without their branches, a micro-batch at a time."""
    yield from micro_batches(samples, [len(s.ids) for s in samples], budget)
