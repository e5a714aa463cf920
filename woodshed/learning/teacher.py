"""The weights that answer after a hint: the start's, their running average, the policy's own, or a mix of answers.

    frozen         weights at the start of RL (OPSD, arXiv 2601.18734)
    ema            average <- (1 - rate) average + rate policy after every step (SDPO, arXiv 2601.20802; SDFT,
                   arXiv 2601.19897)
    live           the policy itself, without gradient
    trust-region   log q = (1 - rate) log q_start + rate log q_policy, renormalised (SDPO, section 3): a mix of logits

No second model is kept. With an adapter, the teacher is the few weights in which it differs from the policy; with
full weights it can lie in host memory. Weights are kept, averaged and exchanged tensor by tensor, so a sharded policy
has a teacher that is sharded alike.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from woodshed.learning.loss_settings import FeedbackSettings
from woodshed.learning.packing import Padded
from woodshed.learning.policy import Policy
from woodshed.records import ModelError


class Teacher:
    """The weights that answer, and the starting weights that the policy is measured against.

    Raises:
        ModelError: the weights are another model's.
    """

    def __init__(
        self, policy: Policy, start: Mapping[str, Tensor], settings: FeedbackSettings | None = None
    ) -> None:
        settings = settings or FeedbackSettings()
        self.kind, self.rate = settings.teacher, settings.teacher_rate
        place = policy.device
        self.start = {name: value.to(place) for name, value in start.items()}
        for name, parameter in policy.trainable.items():
            if name not in start or start[name].shape != parameter.shape:
                found = tuple(start[name].shape) if name in start else "absent"
                raise ModelError(
                    f"the teacher's weight {name!r} is {found} and the policy's {tuple(parameter.shape)}; teacher and "
                    "student must be the same model, with the same vocabulary"
                )
        is_average = self.kind == "ema"
        self.average = {name: value.clone() for name, value in self.start.items()} if is_average else {}

    @property
    def weights(self) -> Mapping[str, Tensor] | None:
        """The weights that answer; None where they are the policy's own."""
        if self.kind == "live":
            return None
        return self.average if self.kind == "ema" else self.start

    @torch.no_grad()
    def logits(self, policy: Policy, padded: Padded, at: Tensor | None = None) -> Tensor:
        """The teacher's logits, without gradient: (B, N, V), or those at these rows of (B x N)."""
        with policy.using(self.weights):
            logits = policy.logits(padded, at)
        if self.kind != "trust-region":
            return logits
        return torch.lerp(logits.float(), policy.logits(padded, at).float(), self.rate)

    @torch.no_grad()
    def follow(self, policy: Policy) -> None:
        """Take the policy's newest weights into the average, in their own precision."""
        for name, average in self.average.items():
            average.lerp_(policy.trainable[name].detach().to(average.device), self.rate)

    def state(self) -> dict[str, Tensor]:
        """Weights that a checkpoint must keep; none where the teacher does not move."""
        return self.average

    def restore(self, state: Mapping[str, Tensor]) -> None:
        """The average as it was when the checkpoint was written.

        Raises:
            ModelError: the checkpoint was written under another kind of teacher.
        """
        if set(state) != set(self.average):
            raise ModelError(
                f"the checkpoint holds no average for the teacher {self.kind!r}; delete its folder to resume "
                "before it, or start the run anew"
            )
        for name, value in state.items():
            self.average[name].copy_(value)
