"""Norms of both gradients of a step, and the factor by which the targeted one is cut."""

from __future__ import annotations

import math
from dataclasses import dataclass

from woodshed.learning.loss_settings import FeedbackSettings


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
        """The factor on the targeted gradient: its weight, cut so that its norm is at most `ratio` times
        the running norm of the policy gradient, or `otherwise` until the first policy gradient is seen."""
        cap = feedback.ratio * self.rl_norm if self.steps else otherwise
        kl_norm = feedback.weight * self.kl_last
        return feedback.weight * (min(1.0, cap / kl_norm) if kl_norm else 0.0)
