"""Losses of one micro-batch, from the log-probs and logits of its tokens.

Shapes: B samples, N tokens that the policy wrote (padded), V vocabulary, G hint branches.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from woodshed.experience.samples import TrainingSample
from woodshed.learning import divergences, losses, packing, ranks
from woodshed.learning.logprobs import Predictions, token_logps
from woodshed.learning.packing import Padded, PaddedBranches
from woodshed.learning.prefix_tree import Hinted
from woodshed.learning.step_inputs import StepInputs

STUCK = (math.log(0.99), math.log(0.01))
"""A token is stuck that the student gives at least the first log-prob, and the hinted teacher less than the second:
the reverse divergence is large there, and its gradient next to nothing."""


@dataclass(frozen=True)
class StartLogps:
    """The starting weights' view of the samples: what the divergence inside the advantage is measured from."""

    logps: Mapping[str, Tensor]
    """Rollout id to the log-prob of each of its sampled tokens."""
    k1: Mapping[str, tuple[Tensor, int]]
    """... to (sum of k1 over the rest of its group, by the log-probs it was sampled with; attempts in the group)."""

    def penalty(
        self, logp_BN: Tensor, mask_BN: Tensor, samples: Sequence[TrainingSample]
    ) -> tuple[Tensor, Tensor]:
        """(how far each sample's k1 lies above its group's mean (B,), k1 of every token (B, N))."""
        start_BN, nothing = torch.zeros_like(logp_BN), (logp_BN.new_zeros(()), 1)
        for start_N, sample in zip(start_BN, samples, strict=True):
            if sample.rollout_id in self.logps:
                start_N[: len(sample.predicted)] = self.logps[sample.rollout_id]
        rest = [self.k1.get(sample.rollout_id, nothing) for sample in samples]
        others_B = torch.stack([others for others, _ in rest])
        size_B = packing.pad_2d([[size for _, size in rest]], len(samples), logp_BN.device)[0]
        above_B = losses.sequence_k1(logp_BN, start_BN, mask_BN, others_B, size_B)
        return above_B, (logp_BN.detach() - start_BN) * mask_BN


@torch.no_grad()
def start_logps(work: StepInputs) -> StartLogps | None:
    """A forward of every sample in the policy gradient by the starting weights, where the divergence from them counts.
    It comes before any gradient, as a rollout's baseline is made of its whole group."""
    if not work.loss.kl_coef:
        return None
    device = work.policy.device
    logps = {sample.rollout_id: torch.zeros(len(sample.predicted), device=device) for sample in work.rl}
    k1 = {sample.rollout_id: torch.zeros((), device=device) for sample in work.rl}
    lengths = [len(sample.ids) for sample in work.rl]
    for chunk, counts in ranks.deal(work.rl, lengths, work.loss.micro_batch_tokens):
        padded = packing.pad(chunk, device)
        with work.policy.using(work.teacher.start):
            start_BN = work.policy.logps(padded, work.temperature)
        if not counts:
            continue
        k1_B = ((padded.logp_sampler_BN - start_BN) * padded.rl_BN).sum(-1)
        work.metrics.add(trained_positions=float(padded.positions))
        for sample, start_N, own in zip(chunk, start_BN, k1_B, strict=True):
            logps[sample.rollout_id] = start_N[: len(sample.predicted)].contiguous()
            k1[sample.rollout_id] = own
    ranks.sum_replicated(logps)  # every rank knows its own samples only
    ranks.sum_replicated(k1)
    groups: dict[int, list[Tensor]] = {}
    for sample in work.rl:
        groups.setdefault(sample.group, []).append(k1[sample.rollout_id])
    sums = {number: torch.stack(members).sum() for number, members in groups.items()}
    rest = {s.rollout_id: (sums[s.group] - k1[s.rollout_id], len(groups[s.group])) for s in work.rl}
    return StartLogps(logps, rest)


def own_loss(
    work: StepInputs,
    predictions: Predictions,
    padded: Padded,
    samples: Sequence[TrainingSample],
    start: StartLogps | None,
) -> Tensor:
    """The losses on the samples' own tokens: policy gradient, cross-entropy, or both."""
    parts = []
    if any(sample.rl_weights for sample in samples):
        parts.append(_policy_gradient(work, predictions, padded, samples, start))
    if any(sample.ce_weights for sample in samples):
        logp_BN, _ = predictions.score(padded.tokens_BN, 1.0)
        parts.append(-(logp_BN * padded.ce_BN).sum() / work.ce_tokens)
        work.metrics.add(ce_loss=parts[-1])
    return parts[0] if len(parts) == 1 else torch.stack(parts).sum()


def _policy_gradient(
    work: StepInputs,
    predictions: Predictions,
    padded: Padded,
    samples: Sequence[TrainingSample],
    start: StartLogps | None,
) -> Tensor:
    """The policy-gradient loss, and what its tokens show."""
    settings, mask_BN, advantage_BN = work.loss, (padded.rl_BN > 0).float(), padded.advantage_BN
    logp_BN, entropy_BN = predictions.score(padded.tokens_BN, work.temperature)
    if start is not None:
        above_B, k1_BN = start.penalty(logp_BN, mask_BN, samples)
        advantage_BN = advantage_BN - settings.kl_coef * above_B.unsqueeze(-1)
        work.metrics.add(kl_to_start_sum=k1_BN.sum())
    loss = settings.weight * _estimate(work, logp_BN, advantage_BN * padded.rl_BN, padded, mask_BN)
    work.metrics.add(rl_loss=loss, rl_tokens=mask_BN.sum())
    _observe_logps(work, logp_BN.detach(), padded.logp_sampler_BN, mask_BN)
    work.metrics.add(entropy_sum=(entropy_BN * mask_BN).sum())
    return loss


def _estimate(
    work: StepInputs, logp_BN: Tensor, advantage_BN: Tensor, padded: Padded, mask_BN: Tensor
) -> Tensor:
    settings, num_rollouts = work.loss, max(work.num_rollouts, 1)
    if settings.estimator == "gspo":
        return losses.gspo(
            logp_BN,
            padded.logp_sampler_BN,
            advantage_BN,
            mask_BN,
            num_sequences=float(num_rollouts),
            clip=settings.gspo_clip,
        )
    weight_BN = losses.importance_weights(
        logp_BN,
        padded.logp_sampler_BN,
        mask_BN,
        level=settings.ratio_level,
        outside=settings.outside,
        min_ratio=settings.min_ratio,
        max_ratio=settings.max_ratio,
    )
    denominator = float(num_rollouts * work.message_tokens)
    return losses.policy_gradient(logp_BN, weight_BN, advantage_BN, mask_BN, denominator=denominator)


def targeted(
    work: StepInputs,
    turns: Sequence[Hinted],
    student_GNV: Tensor,
    teacher_GNV: Tensor,
    branches: PaddedBranches,
) -> Tensor:
    """The targeted loss; the logits are those that predict the branches' tokens."""
    settings = work.feedback
    student_GNV, teacher_GNV = (each.float() / work.temperature for each in (student_GNV, teacher_GNV))
    with torch.set_grad_enabled(settings.support == "sampled"):  # elsewhere only looked at
        logp_GN = token_logps(student_GNV, branches.tokens_GN, 1.0)
    hinted_GN = token_logps(teacher_GNV, branches.tokens_GN, 1.0)
    if settings.support == "sampled":
        divergence_GN = divergences.sampled_token(logp_GN, hinted_GN)
    else:
        pair = divergences.truncate_support(
            student_GNV, teacher_GNV, settings.support, settings.top_k, tail=settings.tail
        )
        divergence_GN = divergences.divergence(
            *pair, settings.divergence, beta=settings.beta, clip=settings.pointwise_clip
        )
    if settings.max_ratio is not None:
        ratio_GN = (logp_GN.detach() - branches.logp_sampler_GN).exp().clamp(max=settings.max_ratio)
        divergence_GN = divergence_GN * ratio_GN
    loss = divergences.targeted_mean(
        divergence_GN,
        branches.weight_GN,
        reduction=settings.reduction,
        num_targets=len(work.hinted),
        num_tokens=work.kl_tokens,
        floor=settings.target_floor,
    )
    _observe_branches(work, branches, logp_GN.detach(), hinted_GN)
    work.metrics.add(kl_loss=loss)
    work.metrics.compare([branch for _, branch in turns], logp_GN, hinted_GN, divergence_GN)
    return loss


def _observe_branches(work: StepInputs, branches: PaddedBranches, logp_GN: Tensor, hinted_GN: Tensor) -> None:
    gain_G = ((hinted_GN - logp_GN) * branches.mask_GN).sum(-1)
    is_stuck_GN = (logp_GN > STUCK[0]) & (hinted_GN < STUCK[1])
    work.metrics.add(
        hint_gain_sum=gain_G.sum(),
        targets=float(len(gain_G)),
        stuck_tokens=(is_stuck_GN * branches.weight_GN).sum(),
    )
    _observe_logps(work, logp_GN, branches.logp_sampler_GN, branches.mask_GN)


def _observe_logps(work: StepInputs, logp_BN: Tensor, logp_sampler_BN: Tensor, mask_BN: Tensor) -> None:
    """Engine against trainer: the canary for stale weights, wrong masks and wrong temperatures."""
    gap_BN = (logp_BN - logp_sampler_BN).abs() * mask_BN
    work.metrics.add(gap_sum=gap_BN.sum(), gap_tokens=mask_BN.sum(), logp_gap_max=gap_BN.max())
