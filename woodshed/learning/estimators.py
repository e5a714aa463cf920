"""Estimators of the policy gradient as a recipe names them: Woodshed's own, or a function of the user's.

An estimator turns the tokens of one micro-batch into a scalar loss, whose gradient is added up over the micro-batches
of a step; so whatever it divides by must be the same for all of them.

Shapes: B rollouts, N tokens that the policy wrote (padded).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from woodshed.learning import losses
from woodshed.learning.losses import Importance
from woodshed.parts import Part, wrong_result


@dataclass(frozen=True)
class WrittenTokens:
    """Tokens of one micro-batch that the policy wrote. Log-probs are natural logs; only `logp_BN` takes a gradient."""

    logp_BN: Tensor
    """Log-probs under the weights in training."""
    logp_sampler_BN: Tensor
    """Log-probs under the distribution that each token was sampled from."""
    advantage_BN: Tensor
    mask_BN: Tensor
    """1.0 where a token counts."""
    num_rollouts: int
    """Attempts of the whole step, at least 1."""
    message_tokens: int
    """Longest message that a turn may have."""


Estimator = Callable[[WrittenTokens, Any], Tensor]
"""A function of tokens and `LossSettings`."""


def weighted(tokens: WrittenTokens, form: Importance) -> Tensor:
    """REINFORCE with importance weights (`losses.policy_gradient`), divided by attempts x longest message."""
    weight_BN = losses.importance_weights(tokens.logp_BN, tokens.logp_sampler_BN, tokens.mask_BN, form=form)
    denominator = float(tokens.num_rollouts * tokens.message_tokens)
    return losses.policy_gradient(
        tokens.logp_BN, weight_BN, tokens.advantage_BN, tokens.mask_BN, denominator=denominator
    )


def reinforce(tokens: WrittenTokens, settings: Any) -> Tensor:
    """Truncated importance sampling: a token's ratio is cut at 2."""
    return weighted(tokens, Importance())


def icepop(tokens: WrittenTokens, settings: Any) -> Tensor:
    """IcePop (Ring-1T, arXiv 2510.18855): tokens whose ratio lies outside 0.5 to 5 count nothing."""
    return weighted(tokens, Importance(outside="mask", min_ratio=0.5, max_ratio=5.0))


def mis(tokens: WrittenTokens, settings: Any) -> Tensor:
    """Masked importance sampling of sequences: rollouts whose ratio lies above 2 count nothing."""
    return weighted(tokens, Importance("sequence", "mask"))


def gspo(tokens: WrittenTokens, settings: Any) -> Tensor:
    """Group sequence policy optimisation (`losses.gspo`), divided by attempts."""
    return losses.gspo(
        tokens.logp_BN,
        tokens.logp_sampler_BN,
        tokens.advantage_BN,
        tokens.mask_BN,
        num_sequences=float(tokens.num_rollouts),
    )


ESTIMATORS: dict[str, Estimator] = {"reinforce": reinforce, "icepop": icepop, "mis": mis, "gspo": gspo}
ESTIMATOR: Part[Estimator] = Part("estimator", ESTIMATORS)
"""An estimator as a recipe names it: a function of tokens and settings."""


FAR, MOST_WEIGHT = 12.0, 100.0
"""Log-ratio trainer/sampler at which an estimator's bound is looked for, and the largest factor on a token's gradient
that counts as one. Without a bound the factor there is 163,000."""


def is_bounded(settings: Any) -> bool:
    """True if no ratio trainer/sampler makes an estimator weigh a token without limit, good or bad.

    Raises:
        RecipeError: as `loss_of`.
    """

    def steepest(log_ratio: float) -> float:
        logp_BN = torch.tensor([[log_ratio, 0.0], [log_ratio, 0.0]], requires_grad=True)
        advantage_BN = torch.tensor([[1.0, 1.0], [-1.0, -1.0]])
        ones_BN = torch.ones_like(advantage_BN)
        tokens = WrittenTokens(logp_BN, torch.zeros(2, 2), advantage_BN, ones_BN, 2, 2)
        return float(torch.autograd.grad(loss_of(tokens, settings), logp_BN)[0].abs().max())

    return steepest(FAR) <= MOST_WEIGHT * steepest(0.0)


def loss_of(tokens: WrittenTokens, settings: Any) -> Tensor:
    """Loss of one micro-batch by the estimator that settings name, before its weight.

    Raises:
        RecipeError: an estimator of the user's own returned something else than a scalar with a gradient.
    """
    loss = ESTIMATOR.resolve(settings.estimator)(tokens, settings)
    if not (
        isinstance(loss, Tensor) and loss.ndim == 0 and loss.requires_grad == tokens.logp_BN.requires_grad
    ):
        raise wrong_result("estimator", settings.estimator, loss, "a scalar tensor that depends on logp_BN")
    return loss
