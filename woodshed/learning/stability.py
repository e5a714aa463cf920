"""The automatic stop of a run, which goes back to weights that were well.

A low targeted loss is not success: teacher and student can agree on broken messages. Both prototypes' collapses showed
in the invalid-call rate within a few steps, and in the divergence from the start. Nor does anything mean something
where the sampler does not compute the policy that the trainer trains.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from pydantic import Field

from woodshed.experience.compile import rollout_samples
from woodshed.experience.samples import TrainingSample
from woodshed.records import Rollout
from woodshed.settings import Settings

DISAGREES = "the log-probs of the sampler differ from the trainer's"
"""Begins the reason after which the sampler is not to be asked again."""


WINDOW = 3
"""Steps back that a step is compared with; as many checkpoints are kept."""
INVALID_FACTOR, INVALID_FLOOR = 2.0, 0.5
"""The run stops where its invalid-call rate is this many times the lowest of the window, and at least this."""
MAX_LOGP_GAP = 0.2
"""The run stops where the log-probs of the sampler and of the trainer differ by this many nats a token on average: they
do not compute the same policy, and nothing learned from such a step means anything. In bfloat16 0.004 to 0.02 are
usual."""
KL_ROLLOUTS = 16
"""Rollouts of a step on which the divergence from the starting weights is measured."""


class StabilitySettings(Settings):
    """The automatic stop. It also comes where the invalid-call rate doubles within three steps, to half or more."""

    max_kl_to_start: float | None = Field(default=None, gt=0)
    """Stop where the divergence from the starting weights passes this many nats a token; unset, it is not measured
    for this."""


@dataclass
class Watch:
    """Invalid-call rates of recent steps; part of every checkpoint."""

    rates: list[float] = field(default_factory=list)
    """Invalid-call rates of the newest steps, newest last; a step's rollouts come from the weights before it."""

    def alarm(
        self,
        settings: StabilitySettings,
        invalid_rate: float | None,
        kl_to_start: float | None,
        logp_gap: float = 0.0,
    ) -> str:
        """The reason for which the run must stop after this step, or ""; remembers the step."""
        reason, before = "", self.rates[-WINDOW:]
        if invalid_rate is not None and before:
            bound = max(INVALID_FACTOR * min(before), INVALID_FLOOR)
            if invalid_rate >= bound and invalid_rate > min(before):
                reason = f"the invalid-call rate rose from {min(before):.3f} to {invalid_rate:.3f}"
        if settings.max_kl_to_start is not None and (kl_to_start or 0.0) > settings.max_kl_to_start:
            reason = (
                f"the divergence from the start is {kl_to_start:.3f} nats a token, above "
                f"{settings.max_kl_to_start:g}"
            )
        # Last, as with such samples the other two say nothing; and NaN is no agreement.
        if not logp_gap <= MAX_LOGP_GAP:
            reason = (
                f"{DISAGREES} by {logp_gap:.3f} nats a token, above {MAX_LOGP_GAP:g}: they do not compute the "
                "same policy (another precision, or weights or cached keys and values that are not the current ones)"
            )
        rate = before[-1] if invalid_rate is None and before else invalid_rate
        self.rates = [*before, *([] if rate is None else [rate])][-WINDOW - 1 :]
        return reason

    def healthy(self, step: int, staleness: int = 0) -> int:
        """The policy version to go back to after an alarm at `step`: the lowest rate of the window, the newest of
        equals. Version v is the weights after v steps, and the oldest that sampled the rollouts of step v + S, where S
        is the staleness."""
        rates = self.rates[:-1] or self.rates
        best = min(range(len(rates)), key=lambda i: (rates[i], -i))
        return max(0, step - len(self.rates) + 1 + best - staleness)


def kl_to_start(
    rollouts: Sequence[Rollout], logps: Callable[[Sequence[TrainingSample]], Sequence[Sequence[float]]]
) -> float:
    """Nats a token from the weights that sampled these rollouts to the starting ones, whose log-probs are given for
    samples: the mean of k1, unbiased."""
    samples = [sample for rollout in rollouts for sample in rollout_samples(rollout)]
    k1 = [
        sampled - starting
        for sample, started in zip(samples, logps(samples), strict=True)
        for sampled, starting in zip(sample.logps, started, strict=True)
    ]
    return math.fsum(k1) / max(len(k1), 1)
