"""Everything that one optimizer step's gradients depend on: its samples, sorted by the losses that they are in.

Shapes: B samples, N tokens that the policy wrote (padded).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

import torch
from torch import Tensor

from woodshed.experience.samples import TrainingSample
from woodshed.learning import losses, packing, prefix_tree, ranks
from woodshed.learning.loss_settings import FeedbackSettings, LossSettings
from woodshed.learning.metrics import Metrics
from woodshed.learning.packing import Padded
from woodshed.learning.policy import Policy
from woodshed.learning.ranks import DealtBatch
from woodshed.learning.teacher import Teacher
from woodshed.records import RecipeError

T = TypeVar("T")


@dataclass(frozen=True)
class StartLogps:
    """The starting weights' view of the samples: what the divergence inside the advantage is measured from."""

    logps: Mapping[tuple[str, int], Tensor]
    """Key of a sample to the log-prob of each of its sampled tokens."""
    k1: Mapping[tuple[str, int], tuple[Tensor, Tensor, int]]
    """... to (k1 of the other segments of its attempt, sum of k1 over the rest of its group, both by the log-probs it
    was sampled with; attempts in the group)."""

    def penalty(
        self, logp_BN: Tensor, mask_BN: Tensor, samples: Sequence[TrainingSample]
    ) -> tuple[Tensor, Tensor]:
        """(how far the k1 of each sample's attempt lies above its group's mean (B,), k1 of every token (B, N))."""
        start_BN, zero = torch.zeros_like(logp_BN), logp_BN.new_zeros(())
        for start_N, sample in zip(start_BN, samples, strict=True):
            if sample.key in self.logps:
                start_N[: len(sample.predicted)] = self.logps[sample.key]
        known = [self.k1.get(sample.key, (zero, zero, 1)) for sample in samples]
        rest_B = torch.stack([rest for rest, _, _ in known])
        others_B = torch.stack([others for _, others, _ in known])
        size_B = packing.pad_2d([[size for _, _, size in known]], len(samples), logp_BN.device)[0]
        above_B = losses.sequence_k1(logp_BN, start_BN, mask_BN, others_B, size_B, rest_B)
        return above_B, (logp_BN.detach() - start_BN) * mask_BN


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
        self.metrics = Metrics(speaks=policy.speaks)
        self.num_rollouts = len({sample.rollout_id for sample in samples if sample.rl_weights})
        """Every attempt of the step, those without advantage included, whatever the number of its segments."""
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

    def deal(self, items: Sequence[T], lengths: Sequence[int]) -> list[DealtBatch[T]]:
        """This rank's micro-batches; see `ranks.deal`."""
        return ranks.deal(items, lengths, self.micro_batches, self.policy.num_sharers)

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

    @torch.no_grad()
    def start_logps(self) -> StartLogps | None:
        """Read every sample in the policy gradient with the starting weights; None where the divergence from them does
        not count. This comes before any gradient, as a rollout's baseline is made of its whole group."""
        if not (self.loss.kl_coef and self.rl):
            return None
        device = self.policy.device
        logps = {sample.key: torch.zeros(len(sample.predicted), device=device) for sample in self.rl}
        k1 = {sample.key: torch.zeros((), device=device) for sample in self.rl}
        lengths = [len(sample.ids) for sample in self.rl]
        for share in self.deal(self.rl, lengths):
            padded = self.pad(share.items)
            with self.policy.using(self.teacher.start):
                start_BN = self.policy.logps(padded, self.temperature)
            if not (share.counts and self.policy.speaks):
                continue
            k1_B = ((padded.logp_sampler_BN - start_BN) * padded.rl_BN).sum(-1)
            self.metrics.add(trained_positions=float(padded.positions))
            for sample, start_N, own in zip(share.items, start_BN, k1_B, strict=True):
                logps[sample.key] = start_N[: len(sample.predicted)].contiguous()
                k1[sample.key] = own
        ranks.sum_replicated(logps)  # every rank knows its own samples only
        ranks.sum_replicated(k1)
        return StartLogps(logps, _beside(self.rl, k1))


def _beside(
    samples: Sequence[TrainingSample], k1: Mapping[tuple[str, int], Tensor]
) -> dict[tuple[str, int], tuple[Tensor, Tensor, int]]:
    """`StartLogps.k1` of samples whose own k1 is known."""
    attempts: dict[str, list[Tensor]] = {}
    groups: dict[int, dict[str, None]] = {}
    for sample in samples:
        attempts.setdefault(sample.rollout_id, []).append(k1[sample.key])
        groups.setdefault(sample.group, {})[sample.rollout_id] = None
    whole = {rollout_id: torch.stack(segments).sum() for rollout_id, segments in attempts.items()}
    sums = {number: torch.stack([whole[name] for name in names]).sum() for number, names in groups.items()}
    return {
        s.key: (
            whole[s.rollout_id] - k1[s.key],
            sums[s.group] - whole[s.rollout_id],
            len(groups[s.group]),
        )
        for s in samples
    }


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
