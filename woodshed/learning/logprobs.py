"""Log-probs of the tokens that count, from the hidden states that predict them and the output layer.

The vocabulary is wide: the logits of a micro-batch of 4,096 tokens are 1.2 GB in bfloat16 with 152,000 entries, and a
loss's gradient is as much again. A log-prob's gradient is one hidden state, so with a frozen output layer it is worked
out in the forward pass, a few rows of the vocabulary at a time, and no logits are kept. (Liger Kernel, arXiv
2410.10989, does so for the cross-entropy, where the gradient of the loss is known too.)

Shapes: B sequences, N tokens (padded), R = B x N rows, D hidden, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any, TypeGuard

import torch
from torch import Tensor

from woodshed.engines.local import invariant
from woodshed.learning.shared_rows import Places

ELEMENTS_AT_ONCE = 1 << 25
"""Of logits that are turned into float32 log-probs at the same time."""


@dataclass(frozen=True)
class Predictions:
    """The hidden states that predict the wanted tokens, and what makes logits of them.

    A model that changes its logits behind the output layer (scaling, soft-capping) has its logits for hidden states.
    """

    hidden_BND: Tensor
    head: Callable[[Tensor], Tensor] | None
    """None: the hidden states are the logits."""
    places: Places | None = None
    """Rows that are shared with other ranks: the hidden states are (1, M, D), of this rank's own tokens."""

    def logits(self, at: Tensor | None = None) -> Tensor:
        """(B, N, V), or those at these rows of (B x N), in the model's own precision."""
        hidden = self.hidden_BND if self.places is None else self.places.whole(self.hidden_BND[0])
        hidden = hidden if at is None else hidden.flatten(0, 1)[at]
        if self.head is None:
            return hidden
        with invariant.unsplit():
            return self.head(hidden)

    def score(self, tokens_BN: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
        """Log-prob of each token, and the entropy it was drawn at, which carries no gradient: (B, N) float32 each."""
        hidden_RD, tokens_R, head = self.hidden_BND.flatten(0, 1), tokens_BN.flatten(), self.head
        if self.places is not None:
            tokens_R = tokens_R[self.places.at_M]
            hidden_RD = hidden_RD[: len(tokens_R)]
        if _is_plain_and_frozen(head):
            scored: Any = _FrozenHead.apply(hidden_RD, head.weight, head.bias, tokens_R, temperature)
        else:
            logits_RV = replace(self, hidden_BND=hidden_RD, places=None).logits()
            scored = _TokenLogps.apply(logits_RV, tokens_R, temperature)
        logp_R, entropy_R = scored
        if self.places is not None:
            return self.places.whole(logp_R), self.places.whole(entropy_R)
        return logp_R.view_as(tokens_BN), entropy_R.view_as(tokens_BN)


def token_logps(logits_BNV: Tensor, tokens_BN: Tensor, temperature: float) -> Tensor:
    """Log-prob of each wanted token at the sampling temperature: (B, N) float32, from logits of any precision."""
    return Predictions(logits_BNV, None).score(tokens_BN, temperature)[0]


def _is_plain_and_frozen(head: Any) -> TypeGuard[torch.nn.Linear]:
    return type(head) in (torch.nn.Linear, invariant.Linear) and not any(
        p.requires_grad for p in head.parameters()
    )


class _FrozenHead(torch.autograd.Function):
    """Log-probs by a linear layer that takes no gradient."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden_RD: Tensor,
        weight_VD: Tensor,
        bias_V: Tensor | None,
        tokens_R: Tensor,
        temperature: float,
    ) -> tuple[Tensor, Tensor]:
        logps, entropies, gradients = [], [], []
        for part_RD, of_R in _in_parts(len(weight_VD), hidden_RD, tokens_R):
            with invariant.unsplit():
                logits_RV = invariant.linear(part_RD, weight_VD, bias_V)
            logp_RV = _log_softmax(logits_RV, temperature)
            logps.append(logp_RV.gather(-1, of_R.unsqueeze(-1)).squeeze(-1))
            prob_RV = logp_RV.exp()
            entropies.append(-logp_RV.mul_(prob_RV).sum(-1))
            if ctx.needs_input_grad[0]:
                of_logits_RV = _gradient(prob_RV, of_R, prob_RV.new_ones(len(of_R)), temperature)
                gradients.append(of_logits_RV.to(weight_VD.dtype) @ weight_VD)
        entropy_R = torch.cat(entropies)
        ctx.save_for_backward(*([torch.cat(gradients)] if gradients else []))
        ctx.mark_non_differentiable(entropy_R)
        return torch.cat(logps), entropy_R

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None, None]:
        (gradient_RD,) = ctx.saved_tensors
        return (gradient_RD * grads[0].unsqueeze(-1)).to(gradient_RD.dtype), None, None, None, None


class _TokenLogps(torch.autograd.Function):
    """Log-probs by logits, whose softmax is taken again in the backward pass: whole copies in float32 would be most of
    a step's memory."""

    @staticmethod
    def forward(ctx: Any, logits_RV: Tensor, tokens_R: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
        ctx.save_for_backward(logits_RV, tokens_R)
        ctx.temperature = temperature
        logps, entropies = [], []
        for part_RV, of_R in _in_parts(logits_RV.shape[-1], logits_RV, tokens_R):
            logp_RV = _log_softmax(part_RV, temperature)
            logps.append(logp_RV.gather(-1, of_R.unsqueeze(-1)).squeeze(-1))
            entropies.append(-(logp_RV.exp() * logp_RV).sum(-1))
        entropy_R = torch.cat(entropies)
        ctx.mark_non_differentiable(entropy_R)
        return torch.cat(logps), entropy_R

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        logits_RV, tokens_R = ctx.saved_tensors
        into_RV = torch.empty_like(logits_RV)
        for part_RV, into, of_R, grad_R in _in_parts(
            logits_RV.shape[-1], logits_RV, into_RV, tokens_R, grads[0]
        ):
            prob_RV = _log_softmax(part_RV, ctx.temperature).exp_()
            into.copy_(_gradient(prob_RV, of_R, grad_R, ctx.temperature))
        return into_RV, None, None


def _gradient(prob_RV: Tensor, tokens_R: Tensor, grad_R: Tensor, temperature: float) -> Tensor:
    """Of the log-probs of some tokens in the logits, in place of the probabilities."""
    at_R1, grad_R1 = tokens_R.unsqueeze(-1), grad_R.unsqueeze(-1)
    grad_RV = prob_RV.mul_(-grad_R1).scatter_add_(-1, at_R1, grad_R1)
    return grad_RV if temperature == 1.0 else grad_RV.div_(temperature)


def _in_parts(width: int, *rows: Tensor) -> Iterator[tuple[Tensor, ...]]:
    """So many rows at a time that their logits, `width` each, are not too much at once; about as many each time."""
    count = -(-len(rows[0]) // max(1, ELEMENTS_AT_ONCE // width))
    return zip(*(each.tensor_split(max(1, count)) for each in rows), strict=True)


def _log_softmax(logits_RV: Tensor, temperature: float) -> Tensor:
    scaled_RV = logits_RV.float()
    return (scaled_RV if temperature == 1.0 else scaled_RV / temperature).log_softmax(-1)
