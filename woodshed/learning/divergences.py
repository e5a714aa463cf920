"""Divergences of the student from the hinted teacher: pure functions on tensors, one per paper.

    supports -> divergence at each token -> mean over what counts

Shapes: N tokens (any leading dimensions), V vocabulary, K kept ids, B targeted turns.
Masks are 1.0 where a token counts. Log-probs are natural logs. The teacher never takes a gradient.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Literal

import torch
from torch import Tensor

from woodshed.parts import Part, wrong_result

Support = Literal["student", "teacher", "full"]
Reduction = Literal["turn", "token"]


def truncate_support(
    logits_student: Tensor, logits_teacher: Tensor, support: Support, k: int
) -> tuple[Tensor, Tensor]:
    """Log-probs of both over the same ids: two tensors (..., K + 1), or (..., V).

    student: the student's K likeliest ids (SDPO, arXiv 2601.20802, appendix); teacher: the teacher's (OPSD's top-k
    option); full: the whole vocabulary, also where K >= V. With a tail, all other ids are one bucket: the divergence
    over this coarser partition is at most the full one, and grows with K. Without, both are renormalised over the
    kept ids, and it is not.
    """
    logp_student, logp_teacher = logits_student.log_softmax(-1), logits_teacher.log_softmax(-1)
    if support == "full" or k >= logits_student.shape[-1]:
        return logp_student, logp_teacher
    chosen = logits_student.detach() if support == "student" else logits_teacher
    top = chosen.topk(k, dim=-1).indices
    pair = []
    for logp in (logp_student, logp_teacher):
        kept = logp.gather(-1, top)
        rest = torch.zeros_like(logp).scatter(-1, top, float("-inf"))
        pair.append(torch.cat([kept, (logp + rest).logsumexp(-1, keepdim=True)], dim=-1))
    return pair[0], pair[1]


def divergence(
    logp_student: Tensor,
    logp_teacher: Tensor,
    kind: str,
    *,
    beta: float = 0.5,
    clip: float | None = None,
) -> Tensor:
    """Divergence of the student from the teacher over the last dimension.

    Args:
        kind: a name of `DIVERGENCES`, or the import path of a function of the user's own.
        clip: each id's term is cut from above (OPSD, arXiv 2601.18734: style tokens carry most of the divergence).
            A clipped sum may be negative and is no longer a divergence.

    Raises:
        RecipeError: a function of the user's own returned something else than a term for each id.
    """
    terms = DIVERGENCE.resolve(kind)(logp_student, logp_teacher.detach(), beta)
    if not (isinstance(terms, Tensor) and terms.shape == logp_student.shape):
        raise wrong_result("divergence", kind, terms, f"a tensor of the shape {tuple(logp_student.shape)}")
    return (terms if clip is None else terms.clamp(max=clip)).sum(-1)


def reverse(logp_student: Tensor, logp_teacher: Tensor, beta: float) -> Tensor:
    """Terms of KL(student || teacher), mode-seeking (SDPO, arXiv 2601.20802).

    Its gradient vanishes with the student's doubt: a token that the student is sure of stays, however much the teacher
    rejects it.
    """
    return _terms(logp_student, logp_teacher)


def forward(logp_student: Tensor, logp_teacher: Tensor, beta: float) -> Tensor:
    """Terms of KL(teacher || student), as SDFT's code uses it (arXiv 2601.19897, erratum).

    Its gradient is the difference of the two distributions.
    """
    return _terms(logp_teacher, logp_student)


def jensen_shannon(logp_student: Tensor, logp_teacher: Tensor, beta: float) -> Tensor:
    """Terms of beta KL(teacher || m) + (1 - beta) KL(student || m) with m = beta teacher + (1 - beta) student.

    Generalised JSD of GKD (arXiv 2306.13649, equation 1); over beta it tends to forward / reverse at 0 / 1. Its
    gradient vanishes as the reverse one's does.
    """
    mixture = torch.logaddexp(logp_student + math.log1p(-beta), logp_teacher + math.log(beta))
    return beta * _terms(logp_teacher, mixture) + (1.0 - beta) * _terms(logp_student, mixture)


Divergence = Callable[[Tensor, Tensor, float], Tensor]
DIVERGENCES: dict[str, Divergence] = {
    "reverse": reverse,
    "forward": forward,
    "jensen-shannon": jensen_shannon,
}
"""By name: a function of student, teacher (log-probs, the last dimension over ids) and `beta` that returns the terms of
a sum over ids."""
DIVERGENCE: Part[Divergence] = Part("divergence", DIVERGENCES)
"""A divergence as a recipe names it."""


def targeted_mean(
    divergence_BN: Tensor,
    mask_BN: Tensor,
    *,
    reduction: Reduction,
    num_targets: int,
    num_tokens: int,
    floor: int,
) -> Tensor:
    """The step's targeted loss, from one micro-batch of its turns: sum it over micro-batches. Returns a scalar.

    turn: mean over each turn's tokens, summed over turns, divided by the number of targets but at least `floor`. The
    floor lets the term fade as faults become rare instead of weighing the last few ever more. The denominator is its
    own, so that a few targeted tokens neither vanish in nor dominate the policy-gradient term.
    token: sum over tokens divided by the counted tokens of all targets of the step (SDPO, OPSD, SDFT).
    """
    if reduction == "token":
        return (divergence_BN * mask_BN).sum() / max(num_tokens, 1)
    per_turn_B = (divergence_BN * mask_BN).sum(-1) / mask_BN.sum(-1).clamp(min=1.0)
    return per_turn_B.sum() / max(num_targets, floor)


def _terms(logp: Tensor, logq: Tensor) -> Tensor:
    """The terms of KL(p || q)."""
    return logp.exp() * (logp - logq)
