"""Estimators of the policy gradient as a recipe names them: Woodshed's own, or a function of the user's.

An estimator turns the tokens of one micro-batch into a scalar loss, whose gradient is added up over the micro-batches
of a step; so whatever it divides by must be the same for all of them.

Shapes: B rollouts, N tokens that the policy wrote (padded).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from woodshed.learning import losses
from woodshed.parts import Part, wrong_result


class RatioSettings(Protocol):
    """Settings that an estimator reads (`loss_settings.LossSettings`)."""

    @property
    def estimator(self) -> str: ...
    @property
    def ratio_level(self) -> losses.Level: ...
    @property
    def outside(self) -> losses.Outside: ...
    @property
    def min_ratio(self) -> float: ...
    @property
    def max_ratio(self) -> float: ...
    @property
    def gspo_clip(self) -> tuple[float, float]: ...


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


Estimator = Callable[[WrittenTokens, RatioSettings], Tensor]


def reinforce(tokens: WrittenTokens, settings: RatioSettings) -> Tensor:
    """REINFORCE with importance weights (`losses.policy_gradient`), divided by attempts x longest message."""
    weight_BN = losses.importance_weights(
        tokens.logp_BN,
        tokens.logp_sampler_BN,
        tokens.mask_BN,
        level=settings.ratio_level,
        outside=settings.outside,
        min_ratio=settings.min_ratio,
        max_ratio=settings.max_ratio,
    )
    denominator = float(tokens.num_rollouts * tokens.message_tokens)
    return losses.policy_gradient(
        tokens.logp_BN, weight_BN, tokens.advantage_BN, tokens.mask_BN, denominator=denominator
    )


def gspo(tokens: WrittenTokens, settings: RatioSettings) -> Tensor:
    """Group sequence policy optimisation (`losses.gspo`), divided by attempts."""
    return losses.gspo(
        tokens.logp_BN,
        tokens.logp_sampler_BN,
        tokens.advantage_BN,
        tokens.mask_BN,
        num_sequences=float(tokens.num_rollouts),
        clip=settings.gspo_clip,
    )


ESTIMATOR: Part[Estimator] = Part("estimator", {"reinforce": reinforce, "gspo": gspo})
"""An estimator as a recipe names it: a function of tokens and settings."""


def loss_of(tokens: WrittenTokens, settings: RatioSettings) -> Tensor:
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
