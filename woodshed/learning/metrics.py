"""Measurements of one optimizer step, over its micro-batches and over all ranks.

Shapes: B samples, G hint branches, N tokens (padded).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

from torch import Tensor

from woodshed.experience.samples import HintBranch
from woodshed.learning import ranks
from woodshed.learning.packing import PaddedBranches
from woodshed.records import TokenDivergence

ALWAYS = ("rl_loss", "ce_loss", "kl_loss", "stuck_tokens", "trained_positions")
MEANS = (
    ("logp_gap_mean", "gap_sum", "gap_tokens"),
    ("drift_mean", "drift_sum", "drift_tokens"),
    ("entropy", "entropy_sum", "rl_tokens"),
    ("kl_to_start", "kl_to_start_sum", "rl_tokens"),
    ("hint_gain", "hint_gain_sum", "targets"),
    ("experts_refilled", "experts_dropped", "experts_logged"),
)
"""(name, numerator, denominator) of each mean."""

STUCK = (math.log(0.99), math.log(0.01))
"""A token is stuck that the student gives at least the first log-prob, and the hinted teacher less than the second:
the reverse divergence is large there, and its gradient next to nothing."""


@dataclass
class Metrics:
    """Numbers of a step's micro-batches.

    Values stay on the device until they are asked for, so that it never waits for the next micro-batch's launches.
    """

    values: dict[str, list[float | Tensor]] = field(default_factory=dict)
    speaks: bool = True
    """False on a rank that computes the same as another one, whose numbers count."""
    compared: list[tuple[Sequence[HintBranch], tuple[Tensor, ...]]] = field(default_factory=list)
    """Hint branches of a micro-batch, and (G, N) each: log-probs without and with the hint, divergence."""

    def add(self, **values: float | Tensor) -> None:
        """Keep one micro-batch's numbers."""
        for name, value in values.items() if self.speaks else ():
            self.values.setdefault(name, []).append(value.detach() if isinstance(value, Tensor) else value)

    def compare(self, branches: Sequence[HintBranch], *values_GN: Tensor) -> None:
        """Keep what `compared` holds of one micro-batch."""
        if self.speaks:
            self.compared.append((branches, tuple(each.detach() for each in values_GN)))

    def observe_logps(
        self, logp_BN: Tensor, logp_sampler_BN: Tensor, mask_BN: Tensor, old_BN: Tensor | None = None
    ) -> None:
        """Engine against trainer: the canary for stale weights, wrong masks and wrong temperatures. Where older weights
        wrote a token, the difference is how far the policy has moved since, a number of its own."""
        gap_BN = (logp_BN - logp_sampler_BN).abs() * mask_BN
        if old_BN is not None:
            self.add(drift_sum=(gap_BN * old_BN).sum(), drift_tokens=(mask_BN * old_BN).sum())
            gap_BN, mask_BN = gap_BN * (1 - old_BN), mask_BN * (1 - old_BN)
        self.add(gap_sum=gap_BN.sum(), gap_tokens=mask_BN.sum(), logp_gap_max=gap_BN.max())

    def observe_branches(self, branches: PaddedBranches, logp_GN: Tensor, hinted_GN: Tensor) -> None:
        """Keep what a hint changes of a micro-batch's hinted turns."""
        gain_G = ((hinted_GN - logp_GN) * branches.mask_GN).sum(-1)
        is_stuck_GN = (logp_GN > STUCK[0]) & (hinted_GN < STUCK[1])
        self.add(
            hint_gain_sum=gain_G.sum(),
            targets=float(len(gain_G)),
            stuck_tokens=(is_stuck_GN * branches.weight_GN).sum(),
        )
        self.observe_logps(logp_GN, branches.logp_sampler_GN, branches.mask_GN, branches.old_GN)

    def means(self) -> dict[str, float]:
        """One number for each name, over the micro-batches of all ranks."""
        numbers: dict[str, list[float]] = {}
        for of_rank in ranks.gather([{name: [*map(float, each)] for name, each in self.values.items()}]):
            for name, each in of_rank.items():
                numbers.setdefault(name, []).extend(each)
        sums = {name: sum(each) for name, each in numbers.items()}
        means = {name: sums.get(name, 0.0) for name in ALWAYS}
        means["logp_gap_max"] = max(numbers.get("logp_gap_max", [0.0]))
        for name, numerator, denominator in MEANS:
            if numerator in sums:
                means[name] = sums[numerator] / max(sums[denominator], 1.0)
        return means

    def token_divergences(self) -> list[TokenDivergence]:
        """Divergences of the hinted turns of all ranks."""
        return ranks.gather([d for branches, values in self.compared for d in _by_turn(branches, *values)])


def _by_turn(
    branches: Sequence[HintBranch], student_GN: Tensor, teacher_GN: Tensor, divergence_GN: Tensor
) -> list[TokenDivergence]:
    """Divergences of a micro-batch's turns, in the five digits that people and colours can use."""

    def digits(values_GN: Tensor, index: int, begin: int, end: int) -> tuple[float, ...]:
        return tuple(float(f"{value:.5g}") for value in values_GN[index, begin:end].tolist())

    divergences = []
    for index, branch in enumerate(branches):
        begin = 0
        for turn, tokens in branch.spans:
            place = (index, begin, begin + tokens)
            values = [digits(each_GN, *place) for each_GN in (student_GN, teacher_GN, divergence_GN)]
            divergences.append(TokenDivergence(branch.hint.rollout_id, turn, branch.hint.detector, *values))
            begin += tokens
    return divergences
