"""One optimizer step: policy gradient on whole rollouts plus a targeted divergence on hinted turns.

    loss = RL(rollouts) + weight x D(policy(turn) || teacher(turn after the hint))

The second gradient may not outgrow the first: its norm is cut to `ratio` times the running norm of the policy gradient
(docs/decisions.md). To measure both norms takes a backward pass each; between measurements, one pass is shared. Both
losses have their own constant denominators.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from woodshed.learning import gradients, ranks
from woodshed.learning.gradients import Gradient, Metrics, StepInputs
from woodshed.learning.loss_settings import FeedbackSettings, LossSettings
from woodshed.learning.packing import Batch
from woodshed.learning.policy import Policy
from woodshed.learning.teacher import Teacher
from woodshed.muon.clip import clip_grad_norm_, grad_norm
from woodshed.records import RecipeError

MOST_LOST = 2
"""Steps in a row whose gradient may be NaN or infinite, as the backward pass of a library's attention now and then is
on a GPU in bfloat16, before the run ends."""


@dataclass
class GradNorms:
    """Norms of both gradients: what the targeted one is capped by."""

    rl_norm: float = 0.0
    """Running norm of the policy gradient, over the steps that had one."""
    steps: int = 0
    """Steps that had one."""
    rl_last: float = 0.0
    kl_last: float = 0.0
    """Norms when both were measured last, the targeted one before its weight."""
    unmeasured: int = -1
    """Steps since then; -1: never measured."""
    lost: int = 0
    """Steps in a row whose gradient was not finite and moved nothing."""

    def observe(self, rl_norm: float, kl_norm: float) -> None:
        self.rl_last, self.kl_last, self.unmeasured = rl_norm, kl_norm, 0
        if 0.0 < rl_norm < math.inf:
            self.steps += 1
            self.rl_norm += (rl_norm - self.rl_norm) / min(self.steps, 4)

    def is_due(self, every: int) -> bool:
        """Say if this step measures both; count it where not."""
        are_known = self.kl_last > 0 and math.isfinite(self.rl_last + self.kl_last)
        if self.unmeasured < 0 or self.unmeasured + 1 >= every or not are_known:
            return True
        self.unmeasured += 1
        return False

    def allows(self, norm: float, kl_factor: float) -> bool:
        """Say if a joint gradient of this norm can be the sum of two that are no larger than measured: the policy's
        last or running norm, and the targeted one's times the factor."""
        rl_norm = max(self.rl_norm, self.rl_last)
        return norm <= rl_norm + kl_factor * self.kl_last

    def factor(self, feedback: FeedbackSettings, *, otherwise: float) -> float:
        """What the targeted gradient is multiplied with: its weight, cut so that its norm is at most `ratio` times
        the running norm of the policy gradient, or `otherwise` until the first policy gradient is seen."""
        cap = feedback.ratio * self.rl_norm if self.steps else otherwise
        kl_norm = feedback.weight * self.kl_last
        return feedback.weight * (min(1.0, cap / kl_norm) if kl_norm else 0.0)


def update(
    policy: Policy,
    optimizer: torch.optim.Optimizer,
    batch: Batch,
    *,
    scale: GradNorms,
    teacher: Teacher,
    learning_rate: float,
    message_tokens: int,
    temperature: float,
    objective: LossSettings,
    feedback: FeedbackSettings,
    max_grad_norm: float,
) -> dict[str, Any]:
    """Take one optimizer step and say what it did: metrics, and under "lessons" a `Lesson` per targeted turn.

    Args:
        teacher: answers after the hint; also holds the weights at the start of RL, the k1 reference.
        message_tokens: longest message a turn may have; with the number of attempts it makes the constant denominator.

    Raises:
        RecipeError: losses are not finite, or their gradient is not for the third step in a row; weights are left as
            they were. Up to two such steps are counted under "lost" and move nothing.
    """
    optimizer.zero_grad(set_to_none=True)
    work = StepInputs(policy, teacher, batch, objective, feedback, temperature, message_tokens)
    gradient, kl_factor = _joint_gradient(work, scale, max_grad_norm)
    for name, parameter in policy.trainable.items():
        parameter.grad = gradient[name]
    norm = ranks.agreed(float(clip_grad_norm_(policy.trainable.values(), max_grad_norm)))
    scale.lost = 0 if math.isfinite(norm) else scale.lost + 1
    means = work.metrics.means()
    is_broken = not all(math.isfinite(means.get(name, 0.0)) for name in ("rl_loss", "kl_loss"))
    if scale.lost > MOST_LOST or (scale.lost and is_broken):
        optimizer.zero_grad(set_to_none=True)
        raise RecipeError(
            f"the gradient is {norm} (policy gradient {scale.rl_last}, targeted {scale.kl_last}); no step was taken. "
            "Lower optimizer.learning_rate or look at the last rollouts for broken log-probs"
        )
    if (
        work.rows or work.targets
    ) and not scale.lost:  # without any signal, momentum alone must not move the weights
        for group in optimizer.param_groups:
            group["lr"] = learning_rate
        optimizer.step()
        teacher.follow(policy)
    optimizer.zero_grad(set_to_none=True)
    return {
        **means,
        "rl_grad_norm": scale.rl_last,
        "kl_grad_norm": feedback.weight * scale.kl_last,
        "kl_factor": kl_factor,
        "grad_norm": norm,
        "lost": scale.lost,
        "learning_rate": learning_rate,
        "trained_rollouts": len(work.rows),
        "targets": len(work.targets),
        "teacher_tokens": sum(len(target.teacher.ids) for target in work.targets),
        "divergences": work.metrics.token_divergences(),
        "skipped_hints": dict(batch.skipped),
    }


def _joint_gradient(work: StepInputs, scale: GradNorms, otherwise: float) -> tuple[Gradient, float]:
    """(policy gradient + factor x targeted gradient, the factor): by one backward pass where that is enough."""
    feedback = work.feedback
    # Over several ranks, trees of some have hints and of others none, which makes unequal numbers of forwards.
    is_packed = feedback.forward == "packed" and bool(work.targets) and ranks.count() == 1
    kl_factor = scale.factor(feedback, otherwise=otherwise)
    if is_packed and work.rows and not scale.is_due(feedback.measure_every):
        gradient = gradients.packed_joint(work, kl_factor)
        if scale.allows(_norm(gradient), kl_factor):
            return gradient, kl_factor
        work.metrics = Metrics()
    rl_gradient, kl_gradient = (gradients.packed if is_packed else gradients.separate)(work)
    scale.observe(_norm(rl_gradient), _norm(kl_gradient))
    kl_factor = scale.factor(feedback, otherwise=otherwise)
    return {name: rl_gradient[name] + kl_factor * kl_gradient[name] for name in rl_gradient}, kl_factor


def _norm(gradient: Mapping[str, Tensor]) -> float:
    """2-norm, the same number on every rank, so that all decide alike."""
    return ranks.agreed(float(grad_norm(list(gradient.values()))))
