"""Training samples: token ids, and per token that the policy wrote the streams that losses read. No tensors.

    rl    advantage and sampler log-prob of every token: the policy gradient
    ce    weight of every token: cross-entropy (SFT)
    kl    hint branches: the same tokens behind a hint, where a teacher's distribution is the target

Every term has a denominator of its own, so one sample may take part in all three.
"""

from __future__ import annotations

import base64
from dataclasses import dataclass, replace

from woodshed.records import Hint, RoutedExperts, RunError

Spans = tuple[tuple[int, int], ...]
STREAMS = ("logps", "old", "advantages", "rl_weights", "ce_weights")
"""Fields of a sample with a number for each predicted token."""


@dataclass(frozen=True)
class HintBranch:
    """One faulty turn, or a whole rollout, as the teacher reads it: with the hint in its context."""

    hint: Hint
    position: int
    """Tokens at the start of the sample that the teacher reads too: everything before the hint."""
    ids: tuple[int, ...]
    """The teacher's tokens behind them, up to the last predicted one: hint, opening of the message, message."""
    predicted: tuple[int, ...]
    """Indices into the sample's ids of the tokens on which student and teacher are compared."""
    weights: tuple[float, ...]
    """Weight of each of them in the divergence; 0 leaves it out."""
    spans: Spans
    """(turn, tokens) of each turn that is compared, in order."""
    segment: int = 0
    """Number of the segment that they stand in."""

    @property
    def sample_key(self) -> tuple[str, int]:
        """`TrainingSample.key` of the sample that it branches off."""
        return self.hint.rollout_id, self.segment

    @property
    def behind_hint(self) -> tuple[int, ...]:
        """Indices into the branch's own ids of the same tokens."""
        shift = len(self.ids) - self.predicted[-1] - 1
        return tuple(i + shift for i in self.predicted)


@dataclass(frozen=True)
class TrainingSample:
    """A sequence, and what is learned from it. An empty stream takes no part in its loss.

    Raises:
        RunError: a stream is not as long as the tokens that it is about.
    """

    ids: tuple[int, ...]
    predicted: tuple[int, ...]
    """Loss mask: indices into ids of the tokens that the policy wrote, each predicted at the position before it."""
    logps: tuple[float, ...] = ()
    """Sampler's log-prob of each predicted token, in nats; empty where no sampler wrote them."""
    versions: Spans = ()
    """Policy versions that wrote them, in order, as (version, tokens)."""
    old: tuple[float, ...] = ()
    """1.0 for each predicted token that older weights than those in training wrote, else 0.0; empty where none is."""
    advantages: tuple[float, ...] = ()
    """Advantage of each predicted token."""
    rl_weights: tuple[float, ...] = ()
    """Weight of each predicted token in the policy gradient. An attempt of which a sample has this stream counts in the
    denominator, also where all its weights or advantages are 0."""
    ce_weights: tuple[float, ...] = ()
    """Weight of each predicted token in the cross-entropy."""
    branches: tuple[HintBranch, ...] = ()
    rollout_id: str = ""
    segment: int = 0
    """Number of its segment in the rollout."""
    group: int = 0
    """Number of the group whose mean is the baseline of the advantages."""
    experts: tuple[RoutedExperts, ...] = ()
    """Experts of its tokens, as engines told them, each part by its place in ids: the first part that names a token is
    what all later tokens saw. Tokens without any are routed by the trainer's own routers."""

    def __post_init__(self) -> None:
        for name in STREAMS:
            if (length := len(getattr(self, name))) not in (0, len(self.predicted)):
                raise RunError(
                    f"sample {self.rollout_id!r} has {length} {name} for {len(self.predicted)} predicted tokens; give "
                    "one for each, or none"
                )
        if self.predicted and not 0 < min(self.predicted) <= max(self.predicted) < len(self.ids):
            raise RunError(
                f"sample {self.rollout_id!r} predicts tokens {min(self.predicted)} to {max(self.predicted)} of "
                f"{len(self.ids)}; the first token of a sequence cannot be predicted"
            )

    def at(self, version: int) -> TrainingSample:
        """The sample as a step learns from it that trains this version of the policy: its older tokens are marked."""
        old = tuple(float(written < version) for written, tokens in self.versions for _ in range(tokens))
        return replace(self, old=old if any(old) else ())

    @property
    def key(self) -> tuple[str, int]:
        """Rollout and segment, by which a sample is known among those of a step."""
        return self.rollout_id, self.segment

    def experts_before(self, end: int) -> tuple[RoutedExperts, ...]:
        """Experts of its first tokens, as far as they are known."""
        return tuple(_before(part, end) for part in self.experts if part.start < end)

    @property
    def has_advantage(self) -> bool:
        """True where its reward alone gives a token a policy gradient."""
        return any(w and a for w, a in zip(self.rl_weights, self.advantages, strict=False))


def student_view(sample: TrainingSample, branch: HintBranch) -> TrainingSample:
    """The sample up to the last token of a branch; only the branch's tokens are predicted."""
    logp = dict(zip(sample.predicted, sample.logps, strict=False))
    logps = tuple(logp[i] for i in branch.predicted) if logp else ()
    end = branch.predicted[-1] + 1
    return TrainingSample(sample.ids[:end], branch.predicted, logps, experts=sample.experts_before(end))


def teacher_view(sample: TrainingSample, branch: HintBranch) -> TrainingSample:
    """The same tokens behind the hint."""
    predicted = tuple(branch.position + i for i in branch.behind_hint)
    experts = sample.experts_before(branch.position)
    return TrainingSample(sample.ids[: branch.position] + branch.ids, predicted, experts=experts)


def _before(part: RoutedExperts, end: int) -> RoutedExperts:
    tokens, layers, each = part.shape
    kept = min(tokens, end - part.start)
    data = base64.b64decode(part.data)[: 2 * kept * layers * each]
    return RoutedExperts(part.start, (kept, layers, each), base64.b64encode(data).decode())
