"""Training samples as tensors, and their division into micro-batches.

A micro-batch is one row with several samples behind each other (`pack`), where the model's attention can keep them
apart; nothing is padded then, and first-fit fills the row up to the budget of positions. Otherwise each sample has a
row of its own (`pad`), samples of similar length share a micro-batch, and padding counts. A sample longer than the
budget travels alone.

Shapes: B samples, R rows, T positions, N predicted tokens (padded), G hint branches, M own tokens of a sample, K those
of its branches, S segments of a row, H heads, D head width.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

import numpy as np
import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from woodshed.engines import expert_log
from woodshed.experience.samples import HintBranch, TrainingSample

T = TypeVar("T")


@dataclass(frozen=True)
class RowSegment:
    """One sample in a row of several: its causal tokens, and its branches behind them."""

    causal: int
    """Tokens that see what lies before them in this segment."""
    visible: Tensor | None = None
    """(1, 1, K, M + K) true where a token of a branch may attend; None without branches."""

    @property
    def length(self) -> int:
        """All its tokens."""
        return self.causal + (0 if self.visible is None else self.visible.shape[2])


def similar(segments: Sequence[RowSegment]) -> list[list[RowSegment]]:
    """Neighbours without branches of which the longest has at most twice the length of the shortest, together; every
    other segment alone.

    Attention over a group is one call, as rows with padding (`as_rows`), instead of a call for each of many short
    segments.
    """
    groups: list[list[RowSegment]] = []
    for segment in segments:
        group = [*groups[-1], segment] if groups else []
        lengths = [member.length for member in group]
        if group and all(s.visible is None for s in group) and max(lengths) <= 2 * min(lengths):
            groups[-1] = group
        else:
            groups.append([segment])
    return groups


def as_rows(values_HTD: Tensor, group: Sequence[RowSegment]) -> Tensor:
    """(S, H, T, D): a right-padded row for each segment of a group, from (1, H, sum of lengths, D)."""
    lengths = [segment.length for segment in group]
    if len(set(lengths)) == 1:
        return values_HTD[0].unflatten(1, (len(group), lengths[0])).transpose(0, 1)
    parts = values_HTD[0].transpose(0, 1).split(lengths)
    return pad_sequence(list(parts), batch_first=True).transpose(1, 2)


def as_one_row(rows_STHD: Tensor, group: Sequence[RowSegment]) -> Tensor:
    """(1, sum of lengths, H, D): what `as_rows` set apart, behind each other again."""
    lengths = [segment.length for segment in group]
    if len(set(lengths)) == 1:
        return rows_STHD.flatten(0, 1)[None]
    return torch.cat([row[:length] for row, length in zip(rows_STHD, lengths, strict=True)])[None]


@dataclass(frozen=True)
class Padded:
    """Samples as tensors."""

    ids_RT: Tensor
    positions: int
    """Real tokens in the batch, padding left out."""
    predict_BN: Tensor
    """Positions whose logits predict the tokens, as indices into (R x T)."""
    tokens_BN: Tensor
    mask_BN: Tensor
    """1.0 where a predicted token is real, 0.0 where it is padding."""
    logp_sampler_BN: Tensor
    advantage_BN: Tensor
    rl_BN: Tensor
    """Weight of each token in the policy gradient."""
    ce_BN: Tensor
    """... and in the cross-entropy."""
    old_BN: Tensor | None = None
    """1.0 where older weights than those in training wrote a token; None where none did."""
    positions_RT: Tensor | None = None
    """Position of each token in its sample, where that is not its index."""
    segments: tuple[RowSegment, ...] = ()
    """The samples of the only row; empty where each sample has a row."""
    experts_RTLK: Tensor | None = None
    """Experts that an engine chose for each token in each layer, -1 where none is known; None where all are not."""


@dataclass(frozen=True)
class PaddedBranches:
    """The tokens on which students and teachers are compared, (G, N) each."""

    tokens_GN: Tensor
    mask_GN: Tensor
    """1.0 where a token is real."""
    logp_sampler_GN: Tensor
    weight_GN: Tensor
    """Weight of each token in the divergence."""
    old_GN: Tensor | None = None
    """As `Padded.old_BN`."""


def pad(samples: Sequence[TrainingSample], device: torch.device | str = "cpu") -> Padded:
    """A right-padded row for each sample. Padding is known from the lengths, never from token ids."""
    length = max(len(sample.ids) for sample in samples)
    ids_RT = pad_2d([sample.ids for sample in samples], length, device)
    return _with_streams(samples, ids_RT, range(0, length * len(samples), length))


def pack(
    samples: Sequence[TrainingSample],
    device: torch.device | str = "cpu",
    segments: Sequence[RowSegment] | None = None,
    positions: Sequence[Sequence[int]] | None = None,
) -> Padded:
    """One row of all samples, for a model whose attention keeps them apart (`prefix_tree.why_not`).

    Args:
        segments, positions: one for each sample, where it holds branches.
    """
    lengths = [len(sample.ids) for sample in samples]
    begins = [0, *itertools.accumulate(lengths)]
    ids_RT = pad_2d([[i for sample in samples for i in sample.ids]], begins[-1], device)
    positions = positions or [range(length) for length in lengths]
    return replace(
        _with_streams(samples, ids_RT, begins[:-1]),
        positions_RT=pad_2d([[i for each in positions for i in each]], begins[-1], device),
        segments=tuple(segments or map(RowSegment, lengths)),
    )


def _with_streams(samples: Sequence[TrainingSample], ids_RT: Tensor, begins: Sequence[int]) -> Padded:
    """The samples, each of which begins at an index into (R x T)."""
    device, width = ids_RT.device, max(len(sample.predicted) for sample in samples)

    def stream(values: Sequence[Sequence[float]]) -> Tensor:
        return pad_2d(values, width, device, dtype=np.float32)

    predict = [[begin + i - 1 for i in s.predicted] for begin, s in zip(begins, samples, strict=True)]
    return Padded(
        ids_RT=ids_RT,
        positions=sum(len(s.ids) for s in samples),
        predict_BN=pad_2d(predict, width, device),
        tokens_BN=pad_2d([[s.ids[i] for i in s.predicted] for s in samples], width, device),
        mask_BN=stream([[1.0] * len(s.predicted) for s in samples]),
        logp_sampler_BN=stream([s.logps for s in samples]),
        advantage_BN=stream([s.advantages for s in samples]),
        rl_BN=stream([s.rl_weights for s in samples]),
        ce_BN=stream([s.ce_weights for s in samples]),
        old_BN=stream([s.old for s in samples]) if any(s.old for s in samples) else None,
        experts_RTLK=_experts(samples, begins, ids_RT),
    )


def _experts(samples: Sequence[TrainingSample], begins: Sequence[int], ids_RT: Tensor) -> Tensor | None:
    """Experts of the tokens, as far as they are known; a part of another shape than most is left out."""
    parts = [
        (begin + part.start, begin + len(sample.ids), part)
        for begin, sample in zip(begins, samples, strict=True)
        for part in reversed(sample.experts)  # the first one that names a token is written last
    ]
    if not parts:
        return None
    (layers, each), _ = Counter(part.shape[1:] for *_, part in parts).most_common(1)[0]
    known = np.full((ids_RT.numel(), layers, each), -1, np.int32)
    for begin, end, part in parts:
        chosen = expert_log.read(part)
        if chosen.shape[1:] == known.shape[1:]:
            place = known[begin:end][: len(chosen)]
            place[:] = chosen[: len(place)]
    return torch.from_numpy(known).view(*ids_RT.shape, layers, each).to(ids_RT.device)


def pad_branches(
    hinted: Sequence[tuple[TrainingSample, HintBranch]], device: torch.device | str = "cpu"
) -> PaddedBranches:
    """The tokens on which branches are compared, as right-padded tensors."""
    width = max(len(branch.predicted) for _, branch in hinted)
    logp = [dict(zip(sample.predicted, sample.logps, strict=False)) for sample, _ in hinted]
    old = [dict(zip(sample.predicted, sample.old, strict=False)) for sample, _ in hinted]

    def stream(values: Sequence[Sequence[float]]) -> Tensor:
        return pad_2d(values, width, device, dtype=np.float32)

    return PaddedBranches(
        tokens_GN=pad_2d([[b.ids[i] for i in b.behind_hint] for _, b in hinted], width, device),
        mask_GN=stream([[1.0] * len(b.predicted) for _, b in hinted]),
        logp_sampler_GN=stream(
            [[known.get(i, 0.0) for i in b.predicted] for known, (_, b) in zip(logp, hinted, strict=True)]
        ),
        weight_GN=stream([b.weights for _, b in hinted]),
        old_GN=stream(
            [[known.get(i, 0.0) for i in b.predicted] for known, (_, b) in zip(old, hinted, strict=True)]
        )
        if any(old)
        else None,
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


def by_length(items: Sequence[T], lengths: Sequence[int], budget: int) -> list[list[T]]:
    """Items in order of length, as many at a time as fit into `budget` positions, padding included."""
    batches: list[list[T]] = []
    for i in sorted(range(len(items)), key=lambda i: lengths[i]):
        if not batches or (len(batches[-1]) + 1) * lengths[i] > budget:
            batches.append([])
        batches[-1].append(items[i])
    return batches


def first_fit(items: Sequence[T], lengths: Sequence[int], budget: int) -> list[list[T]]:
    """Items, longest first, each in the first micro-batch that has room for it: at most 11/9 of the fewest possible,
    and one more (Johnson 1973)."""
    batches: list[list[T]] = []
    room: list[int] = []
    for i in sorted(range(len(items)), key=lambda i: -lengths[i]):
        fits = [number for number, left in enumerate(room) if lengths[i] <= left][:1]
        if fits:
            batches[fits[0]].append(items[i])
            room[fits[0]] -= lengths[i]
        else:
            batches.append([items[i]])
            room.append(budget - lengths[i])
    return batches
