"""Hinted turns that branch off their rollout, so that what they share with it is computed once.

    trunk      p p p p o m m m x x o m m m . .     the rollout (p context, o opening, m message, x observation)
    branch 1                                  h h o m m m      hint, opening and message of the first hinted turn
    branch 2                                              h h o m m m      ... of the second

One row holds a sample's trunk, its branches behind each other, and then the next sample. A branch sees the trunk up to
where its hint goes in, and itself; its positions go on from there. A hint costs its own tokens and its turn's, not the
prefix again: trunks attend as any causal sequence does, and only the few queries of branches take a mask.

Shapes: B samples, M tokens of a trunk, K of its branches, N predicted tokens (padded), G branches of all samples.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from woodshed.engines.local import invariant
from woodshed.experience.samples import STREAMS, HintBranch, TrainingSample, student_view, teacher_view
from woodshed.learning import packing
from woodshed.learning.packing import Padded, PaddedBranches, RowSegment
from woodshed.learning.policy import Policy
from woodshed.records import Hint

Hinted = tuple[TrainingSample, HintBranch]


@dataclass(frozen=True)
class PaddedTrees:
    """Samples with their branches as tensors."""

    padded: Padded
    student_GN: Tensor
    """Indices into (B x N) of the logits that predict each branch's tokens without the hint; empty where the
    trunk predicts none of them."""
    teacher_GN: Tensor
    """... and with the hint; empty where the branches were left out."""
    branches: PaddedBranches | None
    """Tokens, masks and log-probs of the branches, (G, N); None where there are none."""


def length(sample: TrainingSample) -> int:
    """Positions of a sample with all its branches."""
    return len(sample.ids) + sum(len(branch.ids) for branch in sample.branches)


def hinted_turns(samples: Sequence[TrainingSample]) -> list[Hinted]:
    """Every branch with its sample, in order."""
    return [(sample, branch) for sample in samples for branch in sample.branches]


def trunk(sample: TrainingSample) -> TrainingSample:
    """The sample as the student reads it: where only its branches are learned from, it ends with the last hinted
    turn, and the hinted turns' tokens alone are predicted."""
    if sample.rl_weights or sample.ce_weights:
        return sample
    wanted = {i for branch in sample.branches for i in branch.predicted}
    end = max(wanted) + 1
    kept = [n for n, i in enumerate(sample.predicted) if i in wanted]
    return TrainingSample(
        sample.ids[:end],
        tuple(sample.predicted[n] for n in kept),
        tuple(sample.logps[n] for n in kept) if sample.logps else (),
        old=tuple(sample.old[n] for n in kept) if sample.old else (),
        branches=sample.branches,
        rollout_id=sample.rollout_id,
        segment=sample.segment,
        experts=sample.experts_before(end),
    )


def prefixes(samples: Sequence[TrainingSample]) -> list[TrainingSample]:
    """The samples as a teacher with other weights needs them: the trunk ends where the last hint goes in."""
    ends = [max(branch.position for branch in sample.branches) for sample in samples]
    return [
        TrainingSample(s.ids[:end], (), branches=s.branches, experts=s.experts_before(end))
        for s, end in zip(samples, ends, strict=True)
    ]


def pad(
    samples: Sequence[TrainingSample], device: torch.device | str = "cpu", *, with_branches: bool = True
) -> PaddedTrees:
    """Samples in one row. With branches, their messages are predicted behind the trunk's own tokens."""
    trees = [_with_branches(sample) if with_branches else sample for sample in samples]
    segments, positions = [], []
    for sample in samples:
        branches = sample.branches if with_branches else ()
        own = [range(branch.position, branch.position + len(branch.ids)) for branch in branches]
        positions.append([*range(len(sample.ids)), *itertools.chain(*own)])
        mask = visible(branches, len(sample.ids)).to(device)[None, None] if branches else None
        segments.append(RowSegment(len(sample.ids), mask))
    padded = packing.pack(trees, device, segments, positions)
    hinted = hinted_turns(samples)
    students, teachers = _predicted_at(samples, padded.predict_BN.shape[1])
    return PaddedTrees(
        padded,
        _indices(students, device),
        _indices(teachers if with_branches else [], device),
        packing.pad_branches(hinted, device) if hinted else None,
    )


def _predicted_at(samples: Sequence[TrainingSample], width: int) -> tuple[list[list[int]], list[list[int]]]:
    """For each branch the indices into (B x N) of its tokens in the trunk, and behind the hint."""
    students, teachers = [], []
    for b, sample in enumerate(samples):
        index = {position: n for n, position in enumerate(sample.predicted)}
        behind = len(sample.predicted)  # first predicted token of the next branch
        for branch in sample.branches:
            students.append([b * width + index[i] for i in branch.predicted if i in index])
            teachers.append([b * width + behind + n for n in range(len(branch.predicted))])
            behind += len(branch.predicted)
    return students, teachers


def _with_branches(sample: TrainingSample) -> TrainingSample:
    """The sample with its branches behind it, their messages predicted and in no loss of its own."""
    ids, predicted = list(sample.ids), list(sample.predicted)
    for branch in sample.branches:
        predicted += [len(ids) + i for i in branch.behind_hint]
        ids += branch.ids
    more = (0.0,) * (len(predicted) - len(sample.predicted))
    streams = {name: (*values, *more) for name in STREAMS if (values := getattr(sample, name))}
    experts = sample.experts_before(len(sample.ids))
    return replace(sample, ids=tuple(ids), predicted=tuple(predicted), experts=experts, **streams)


def _indices(rows: Sequence[Sequence[int]], device: torch.device | str) -> Tensor:
    return packing.pad_2d(rows, max((len(row) for row in rows), default=0), device)


def visible(branches: Sequence[HintBranch], trunk: int) -> Tensor:
    """(K, M + K) true where a token of a branch may attend: the trunk up to its hint, its own branch up to itself."""
    lengths = torch.tensor([len(branch.ids) for branch in branches])
    number_K = torch.arange(len(branches)).repeat_interleave(lengths)
    seen_K1 = torch.tensor([branch.position for branch in branches])[number_K, None]
    same_KK = number_K[:, None] == number_K
    return torch.cat([torch.arange(trunk) < seen_K1, same_KK.tril()], -1)


def why_not(policy: Policy) -> str:
    """The reason for which this model's attention cannot keep the samples and branches of a row apart, or "": its
    configuration is read, then it is tried.

    Attention that looks back a fixed distance, or a state instead of keys and values, would mix them.
    """
    config = policy.model.config.get_text_config()
    if policy.sharers is not None:
        return "ranks share each row (layout.cp)"
    if reason := invariant.limited_attention(config):
        return reason
    if config._attn_implementation not in ("sdpa", invariant.NAME, "eager"):
        return f"its attention is {config._attn_implementation}"
    gap = _gap(policy)
    bound = 1e-3 if next(policy.model.parameters()).dtype == torch.float32 else 0.2  # bfloat16 rounds
    return "" if gap <= bound else f"one row and several differ by {gap:.2g} of what a hint changes"


@torch.no_grad()
def _gap(policy: Policy) -> float:
    """Mean difference in log-probs between one row and separate ones on two made-up rollouts, as a share of the mean
    difference that their hints make. Rounding grows with a model's logits, and so does that."""
    vocabulary = policy.model.config.get_text_config().vocab_size
    rng = torch.Generator().manual_seed(0)
    samples = []
    for end in (16, 28):
        ids = tuple(torch.randint(vocabulary, (36,), generator=rng).tolist())
        behind = (*ids[:3], *ids[end - 8 : end])  # three tokens of hint, two of opening, a message of six
        message = tuple(range(end - 6, end))
        branch = HintBranch(Hint("", 0, "", ""), end - 8, behind, message, (1.0,) * 6, ((0, 6),))
        samples.append(TrainingSample(ids, message, branches=(branch,)))
    trees = pad([trunk(sample) for sample in samples], policy.device)
    logps = policy.logits(trees.padded).float().log_softmax(-1).flatten(0, 1)
    apart = [
        policy.logits(packing.pad([view(*each) for each in hinted_turns(samples)], policy.device))
        .float()
        .log_softmax(-1)
        for view in (student_view, teacher_view)
    ]
    gaps = [
        (logps[at_GN] - alone).abs().mean()
        for at_GN, alone in zip((trees.student_GN, trees.teacher_GN), apart, strict=True)
    ]
    share = float(torch.stack(gaps).max() / (apart[0] - apart[1]).abs().mean())
    return math.inf if math.isnan(share) else share
