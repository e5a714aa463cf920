"""What is minimised: pure functions on tensors, one per paper.

Shapes: B sequences, N tokens that the policy wrote (padded), V vocabulary, K kept ids.
Masks are 1.0 where a token counts. Log-probs are natural logs.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

Divergence = Literal["reverse", "forward", "jensen-shannon"]


def group_advantages(rewards: Tensor) -> Tensor:
    """Rewards of one group minus their mean, not divided by their standard deviation.

    Dr. GRPO (arXiv 2503.20783), as the Composer 2 report uses it (arXiv 2603.24477, section 4.1): dividing by the
    deviation would blow up tiny differences between equally good attempts.

    Args:
        rewards: (G,) one reward per attempt.
    """
    return rewards - rewards.mean()


def policy_gradient(
    logp_BN: Tensor,
    logp_sampler_BN: Tensor,
    advantage_BN: Tensor,
    mask_BN: Tensor,
    *,
    denominator: float,
    max_ratio: float,
) -> Tensor:
    """REINFORCE with a truncated importance ratio, summed over tokens and divided by a constant. Returns a scalar.

    The denominator is the same for every micro-batch of a step (attempts x longest allowed message), so neither a
    sequence's own length nor the split into micro-batches changes a token's weight (Dr. GRPO, arXiv 2503.20783).
    The ratio trainer/sampler is detached and cut at `max_ratio` (truncated importance sampling).
    """
    ratio_BN = (logp_BN.detach() - logp_sampler_BN).exp().clamp(max=max_ratio)
    return -(ratio_BN * advantage_BN * logp_BN * mask_BN).sum() / denominator


def k1_penalty(logp_BN: Tensor, logp_reference_BN: Tensor) -> Tensor:
    """The k1 estimate log(pi/pi_ref) of KL(pi || pi_ref) per sampled token, detached: subtract it from the advantage.

    As a loss term k1 has zero expected gradient; inside the advantage, with stop-gradient, its policy gradient is
    the gradient of the KL (Composer 2 report, section 4.1). Returns (B, N).
    """
    return (logp_BN - logp_reference_BN).detach()


def keep_top(logits_student: Tensor, logits_teacher: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """Log-probs over the student's K likeliest ids plus one bucket for all others: two (..., K + 1) tensors.

    SDPO (arXiv 2601.20802, appendix): the divergence over this coarser partition is at most the full one, and grows
    with K. Both distributions keep the same ids. With K >= V nothing is pooled.
    """
    logp_student, logp_teacher = logits_student.log_softmax(-1), logits_teacher.log_softmax(-1)
    if k >= logits_student.shape[-1]:
        return logp_student, logp_teacher
    top = logits_student.detach().topk(k, dim=-1).indices
    pair = []
    for logp in (logp_student, logp_teacher):
        kept = logp.gather(-1, top)
        rest = torch.zeros_like(logp).scatter(-1, top, float("-inf"))
        pair.append(torch.cat([kept, (logp + rest).logsumexp(-1, keepdim=True)], dim=-1))
    return pair[0], pair[1]


def divergence(logp_student: Tensor, logp_teacher: Tensor, kind: Divergence) -> Tensor:
    """Divergence of the student from the teacher over the last dimension; the teacher takes no gradient.

    reverse: KL(student || teacher), mode-seeking (SDPO, arXiv 2601.20802).
    forward: KL(teacher || student), as SDFT's code uses (arXiv 2601.19897, erratum).
    jensen-shannon: mean of both against the even mixture (generalised JSD of GKD, arXiv 2306.13649, beta = 1/2).
    """
    logp_teacher = logp_teacher.detach()
    if kind == "reverse":
        return _kl(logp_student, logp_teacher)
    if kind == "forward":
        return _kl(logp_teacher, logp_student)
    mixture = torch.logaddexp(logp_student, logp_teacher) - torch.log(
        torch.tensor(2.0, dtype=logp_student.dtype)
    )
    return 0.5 * (_kl(logp_student, mixture) + _kl(logp_teacher, mixture))


def targeted_kl(divergence_BN: Tensor, mask_BN: Tensor, *, num_targets: int, floor: int) -> Tensor:
    """Mean over each target turn's tokens, summed over turns, divided by the number of targets but at least `floor`.

    The floor lets the term fade as faults become rare instead of weighing the last few ever more; the denominator is
    its own, so that a few targeted tokens neither vanish in nor dominate the policy-gradient term. Returns a scalar.
    """
    per_turn_B = (divergence_BN * mask_BN).sum(-1) / mask_BN.sum(-1).clamp(min=1.0)
    return per_turn_B.sum() / max(num_targets, floor)


def _kl(logp: Tensor, logq: Tensor) -> Tensor:
    return (logp.exp() * (logp - logq)).sum(-1)
