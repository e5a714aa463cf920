"""Everything that one optimizer step's gradients depend on: its samples, sorted by the losses that they are in."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import TypeVar

from woodshed.experience.samples import TrainingSample
from woodshed.learning import packing, prefix_tree
from woodshed.learning.loss_settings import FeedbackSettings, LossSettings
from woodshed.learning.metrics import Metrics
from woodshed.learning.packing import Padded
from woodshed.learning.policy import Policy
from woodshed.learning.teacher import Teacher
from woodshed.records import RecipeError

T = TypeVar("T")


class StepInputs:
    """Samples of a step and their denominators, the models that read them, and the step's measurements."""

    def __init__(
        self,
        policy: Policy,
        teacher: Teacher | None,
        samples: Sequence[TrainingSample],
        loss: LossSettings,
        feedback: FeedbackSettings,
        temperature: float,
        message_tokens: int,
        is_packed: bool = False,
    ) -> None:
        self.policy = policy
        self.is_packed = is_packed
        """Several samples share a row."""
        self._teacher = teacher
        self.loss = loss
        self.feedback = feedback
        self.temperature = temperature
        self.message_tokens = message_tokens
        self.metrics = Metrics()
        self.num_rollouts = sum(1 for sample in samples if sample.rl_weights)
        """Every attempt of the step, those without advantage included."""
        self.samples = active(samples, loss, feedback)
        self.own = [sample for sample in self.samples if sample.rl_weights or sample.ce_weights]
        """Samples with a loss on their own tokens."""
        self.rl = [sample for sample in self.samples if sample.rl_weights]
        """Those in the policy gradient."""
        self.hinted = prefix_tree.hinted_turns(self.samples)
        self.ce_tokens = math.fsum(weight for sample in self.samples for weight in sample.ce_weights)
        """Denominator of the cross-entropy: the sum of its weights."""
        self.kl_tokens = sum(weight > 0 for _, branch in self.hinted for weight in branch.weights)
        """Tokens of all branches that count."""

    def micro_batches(self, items: Sequence[T], lengths: Sequence[int]) -> list[list[T]]:
        """Items as many at a time as fit into the budget of positions."""
        split = packing.first_fit if self.is_packed else packing.by_length
        return split(items, lengths, self.loss.micro_batch_tokens)

    def pad(self, samples: Sequence[TrainingSample]) -> Padded:
        """A micro-batch as tensors."""
        return (packing.pack if self.is_packed else packing.pad)(samples, self.policy.device)

    @property
    def teacher(self) -> Teacher:
        """The teacher.

        Raises:
            RecipeError: the trainer has none.
        """
        if self._teacher is None:
            raise RecipeError(
                "these samples have hint branches, or loss.kl_coef is set, but the trainer has no starting weights to "
                "answer as a teacher; give it `start`"
            )
        return self._teacher


def active(
    samples: Sequence[TrainingSample], loss: LossSettings, feedback: FeedbackSettings
) -> list[TrainingSample]:
    """The samples without the streams that have no gradient, and without those that have none left; those that have
    branches only come last."""
    kept = []
    for sample in samples:
        is_moved = sample.has_advantage or (loss.kl_coef > 0 and any(sample.rl_weights))
        sample = replace(
            sample,
            rl_weights=sample.rl_weights if loss.weight and is_moved else (),
            ce_weights=sample.ce_weights if any(sample.ce_weights) else (),
            branches=sample.branches if feedback.weight else (),
        )
        if sample.rl_weights or sample.ce_weights or sample.branches:
            kept.append(sample)
    return sorted(kept, key=lambda sample: not (sample.rl_weights or sample.ce_weights))
