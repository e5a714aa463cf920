"""Losses of the policy gradient: pure functions on tensors, one per paper. Divergences are in `divergences`.

Shapes: B sequences, N tokens that the policy wrote (padded), G attempts of a group.
Masks are 1.0 where a token counts. Log-probs are natural logs.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

Level = Literal["token", "sequence"]
Outside = Literal["truncate", "mask"]

GSPO_CLIP = (3e-4, 4e-4)
"""How far below and above 1 the ratio of GSPO may lie (values of its paper)."""


@dataclass(frozen=True)
class Importance:
    """Form of the importance weights of REINFORCE."""

    level: Level = "token"
    outside: Outside = "truncate"
    min_ratio: float = 0.0
    max_ratio: float = 2.0


def importance_weights(
    logp_BN: Tensor,
    logp_sampler_BN: Tensor,
    mask_BN: Tensor,
    *,
    form: Importance,
) -> Tensor:
    """Weights of the sampled tokens, as the sampler's weights or numerics were not the trainer's: (B, N).

    The ratio trainer / sampler, detached, of each token or of the whole sequence (product over its tokens). A ratio
    outside [min_ratio, max_ratio] is cut to it ("truncate") or makes its tokens count nothing ("mask").

    - token, truncate, 0 to 2: truncated importance sampling (Yao et al. 2025, "Your efficient RL framework secretly
      brings you off-policy RL training"). CISPO (MiniMax-M1, arXiv 2506.13585) is the same with 1 - e_low to
      1 + e_high: with one update a batch, its old policy is the sampler.
    - token, mask, 0.5 to 5: IcePop (Ring-1T, arXiv 2510.18855).
    - sequence, mask: sequence-level masked importance sampling (Liu et al. 2025, "When speed kills stability").
    """
    log_ratio_BN = logp_BN.detach() - logp_sampler_BN
    if form.level == "sequence":
        log_ratio_BN = (log_ratio_BN * mask_BN).sum(-1, keepdim=True).expand_as(log_ratio_BN)
    ratio_BN = log_ratio_BN.exp()
    if form.outside == "mask":
        is_outside_BN = (ratio_BN < form.min_ratio) | (
            ratio_BN > form.max_ratio
        )  # never true of NaN, which must be seen
        return ratio_BN.masked_fill(is_outside_BN, 0.0)
    return ratio_BN.clamp(min=form.min_ratio, max=form.max_ratio)


def policy_gradient(
    logp_BN: Tensor, weight_BN: Tensor, advantage_BN: Tensor, mask_BN: Tensor, *, denominator: float
) -> Tensor:
    """REINFORCE with importance weights, summed over tokens and divided by a constant. Returns a scalar.

    The denominator is the same for every micro-batch of a step (attempts x longest allowed message), so neither a
    sequence's own length nor the split into micro-batches changes a token's weight (Dr. GRPO, arXiv 2503.20783).
    """
    return -(weight_BN * advantage_BN * logp_BN * mask_BN).sum() / denominator


def gspo(
    logp_BN: Tensor,
    logp_sampler_BN: Tensor,
    advantage_BN: Tensor,
    mask_BN: Tensor,
    *,
    num_sequences: float,
    clip: tuple[float, float] = GSPO_CLIP,
) -> Tensor:
    """Group sequence policy optimisation (arXiv 2507.18071): one clipped, length-normalised ratio per sequence.

    The ratio is the geometric mean of the token ratios; the clip is the one of PPO, on both sides of 1. A rollout is
    one sequence, however many turns it has. Returns a scalar, divided by `num_sequences` of the whole step.
    """
    length_B1 = mask_BN.sum(-1, keepdim=True).clamp(min=1.0)
    mean_B1 = ((logp_BN - logp_sampler_BN) * mask_BN).sum(-1, keepdim=True) / length_B1
    # The mean over tokens is taken last (GSPO-token, eq. 14): s_i as a number times the token's own ratio to itself,
    # whose value is 1.
    ratio_BN = mean_B1.detach().exp() * (logp_BN - logp_BN.detach()).exp()
    clipped_BN = ratio_BN.clamp(1.0 - clip[0], 1.0 + clip[1])
    gain_BN = torch.minimum(ratio_BN * advantage_BN, clipped_BN * advantage_BN)
    return -((gain_BN * mask_BN).sum(-1, keepdim=True) / length_B1).sum() / num_sequences


def sequence_k1(
    logp_BN: Tensor,
    logp_reference_BN: Tensor,
    mask_BN: Tensor,
    others_B: Tensor,
    size_B: Tensor,
    rest_B: Tensor | float = 0.0,
) -> Tensor:
    """Excess of each sequence's k1 over the mean of its group, (B,): subtract it from the sequence's advantage.

    k1, the sum of log(pi/pi_ref) over a sequence's sampled tokens, estimates KL(pi || pi_ref) of whole sequences. It is
    a part of the reward, so it gets the reward's baseline: in expectation the policy gradient is that of the reward
    less the divergence, both times (size - 1) / size. A token's own log-ratio in its advantage alone would leave out
    what the token leads to. Detached; as a loss term k1 has zero expected gradient (Composer 2 report, section 4.1).

    Args:
        others_B: sum of k1 over the rest of each sequence's group.
        size_B: sequences in it.
        rest_B: k1 of what else belongs to each sequence, where it has several segments.
    """
    own_B = ((logp_BN - logp_reference_BN) * mask_BN).detach().sum(-1) + rest_B
    return own_B - (own_B + others_B) / size_B
