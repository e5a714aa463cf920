"""Hinted turns that branch off their rollout, so that what they share with it is computed once.

    trunk      p p p p o m m m x x o m m m . .     the rollout (p context, o opening, m message, x observation)
    branch 1                                  h h o m m m      hint, opening and message of the first hinted turn
    branch 2                                              h h o m m m      ... of the second

One row holds a trunk, padding up to the longest trunk of the batch, and the branches behind each other. A branch sees
the trunk up to where its hint goes in, and itself; its positions go on from there. A hint costs its own tokens and its
turn's, not the prefix again: trunks attend as any causal batch does, and only the few queries of branches take a mask.

Shapes: B rows, M positions of trunk, K of branches, T = M + K, N wanted tokens (padded), G targets.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from woodshed.engines.local import invariant
from woodshed.experience.samples import HintBranch, TrainingSample, student_view, teacher_view
from woodshed.learning import packing
from woodshed.learning.packing import Padded, PaddedBranches
from woodshed.learning.policy import Policy
from woodshed.records import Hint

_PADDING = -1

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
    kept = [n for n, i in enumerate(sample.predicted) if i in wanted]
    return TrainingSample(
        sample.ids[: max(wanted) + 1],
        tuple(sample.predicted[n] for n in kept),
        tuple(sample.logps[n] for n in kept) if sample.logps else (),
        branches=sample.branches,
        rollout_id=sample.rollout_id,
    )


def prefixes(samples: Sequence[TrainingSample]) -> list[TrainingSample]:
    """The samples as a teacher with other weights needs them: the trunk ends where the last hint goes in."""
    return [
        TrainingSample(s.ids[: max(b.position for b in s.branches)], (), branches=s.branches) for s in samples
    ]


def pad(
    samples: Sequence[TrainingSample], device: torch.device | str = "cpu", *, with_branches: bool = True
) -> PaddedTrees:
    """Samples as right-padded rows. With branches, their messages are predicted behind the trunk's own tokens."""
    longest = max(len(sample.ids) for sample in samples)
    laid_out = [_lay_out(sample, longest, with_branches) for sample in samples]
    padded = packing.pad([row for row, _, _ in laid_out], device)
    hinted = hinted_turns(samples)
    if with_branches and hinted:
        behind = padded.ids_BT.shape[1] - longest
        position_BM = torch.arange(longest, device=device).expand(len(samples), -1)
        position_BK = packing.pad_2d([positions for _, _, positions in laid_out], behind, device)
        branch_BK = packing.pad_2d([numbers for _, numbers, _ in laid_out], behind, device, padding=_PADDING)
        padded = replace(
            padded,
            positions=sum(length(sample) for sample in samples),
            positions_BT=torch.cat([position_BM, position_BK], 1),
            visible=visible(branch_BK, _seen(samples, branch_BK), longest),
        )
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


def _lay_out(
    sample: TrainingSample, longest: int, with_branches: bool
) -> tuple[TrainingSample, list[int], list[int]]:
    """(the sample with its branches behind it, number of the branch of each token there, position of each)."""
    if not (with_branches and sample.branches):
        return sample, [], []
    ids, predicted = [*sample.ids, *[0] * (longest - len(sample.ids))], list(sample.predicted)
    numbers: list[int] = []
    positions: list[int] = []
    for number, branch in enumerate(sample.branches):
        predicted += [len(ids) + i for i in branch.behind_hint]
        numbers += [number] * len(branch.ids)
        positions += range(branch.position, branch.position + len(branch.ids))
        ids += branch.ids
    more = (0.0,) * (len(predicted) - len(sample.predicted))
    streams = {
        name: (*values, *more)
        for name in ("logps", "advantages", "rl_weights", "ce_weights")
        if (values := getattr(sample, name))
    }
    return replace(sample, ids=tuple(ids), predicted=tuple(predicted), **streams), numbers, positions


def _indices(rows: Sequence[Sequence[int]], device: torch.device | str) -> Tensor:
    return packing.pad_2d(rows, max((len(row) for row in rows), default=0), device)


def _seen(samples: Sequence[TrainingSample], branch_BK: Tensor) -> Tensor:
    """Tokens of the trunk that each position of a branch may see: up to its hint; padding sees none."""
    most = max(len(sample.branches) for sample in samples)
    shared = packing.pad_2d([[b.position for b in s.branches] for s in samples], most, branch_BK.device)
    return shared.gather(1, branch_BK.clamp(min=0)) * (branch_BK != _PADDING)


def visible(branch_BK: Tensor, seen_BK: Tensor, trunk: int) -> Tensor:
    """(B, 1, K, M + K) true where a position of a branch may attend: the trunk that it sees, and its own branch up to
    itself. Padding sees padding, so that no row of the mask is empty."""
    in_trunk_BKM = torch.arange(trunk, device=branch_BK.device) < seen_BK.unsqueeze(-1)
    same_BKK = branch_BK.unsqueeze(-1) == branch_BK.unsqueeze(-2)
    return torch.cat([in_trunk_BKM, same_BKK.tril()], -1).unsqueeze(1)


def why_not(policy: Policy) -> str:
    """The reason for which this model cannot take branches, or "": its configuration is read, then it is tried.

    Attention that looks back a fixed distance, or a state instead of keys and values, would ignore the mask.
    """
    config = policy.model.config.get_text_config()
    if reason := invariant.limited_attention(config):
        return reason
    if config._attn_implementation not in ("sdpa", invariant.NAME, "eager"):
        return f"its attention is {config._attn_implementation}"
    gap = _gap(policy)
    bound = 1e-3 if next(policy.model.parameters()).dtype == torch.float32 else 0.2  # bfloat16 rounds
    return "" if gap <= bound else f"one forward and two differ by {gap:.2g} of what a hint changes"


@torch.no_grad()
def _gap(policy: Policy) -> float:
    """Mean difference in log-probs between branches and separate forwards on a made-up rollout, as a share of the mean
    difference that its hints make. Rounding grows with a model's logits, and so does that."""
    vocabulary = policy.model.config.get_text_config().vocab_size
    rng = torch.Generator().manual_seed(0)
    ids = tuple(torch.randint(vocabulary, (36,), generator=rng).tolist())
    branches = []
    for end in (16, 28):
        behind = (*ids[:3], *ids[end - 8 : end])  # three tokens of hint, two of opening, a message of six
        message = tuple(range(end - 6, end))
        branches.append(HintBranch(Hint("", 0, "", ""), end - 8, behind, message, (1.0,) * 6, ((0, 6),)))
    predicted = tuple(i for branch in branches for i in branch.predicted)
    sample = TrainingSample(ids, predicted, branches=tuple(branches))
    both = pad([trunk(sample)], policy.device)
    logps = policy.logits(both.padded).float().log_softmax(-1).flatten(0, 1)
    apart = [
        policy.logits(packing.pad([view(sample, branch) for branch in branches], policy.device))
        .float()
        .log_softmax(-1)
        for view in (student_view, teacher_view)
    ]
    gaps = [
        (logps[at_GN] - alone).abs().mean()
        for at_GN, alone in zip((both.student_GN, both.teacher_GN), apart, strict=True)
    ]
    share = float(torch.stack(gaps).max() / (apart[0] - apart[1]).abs().mean())
    return math.inf if math.isnan(share) else share
