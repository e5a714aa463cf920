"""Settings of the policy gradient and of the targeted divergence, and published presets."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from woodshed import feedback
from woodshed.experience.compile import HintOptions, Placement, Scope
from woodshed.learning.divergences import DIVERGENCE, Reduction, Support
from woodshed.learning.estimators import ESTIMATOR
from woodshed.learning.losses import Level, Outside
from woodshed.settings import Settings

TeacherKind = Literal["frozen", "ema", "live", "trust-region"]

PRESETS: dict[str, dict[str, Any]] = {
    # A hinted turn beside RL, as the Composer 2.5 post describes it; what it leaves open is as measured here, which
    # is what the fields below have as their defaults.
    "composer": {},
    # SDPO (arXiv 2601.20802), the defaults of its code.
    "sdpo": {
        "divergence": "jensen-shannon",
        "beta": 0.5,
        "support": "student",
        "top_k": 100,
        "tail": True,
        "max_ratio": 2.0,
        "reduction": "token",
        "teacher": "ema",
        "teacher_rate": 0.05,
    },
    # SDPO with feedback in words (its experiments on LiveCodeBench).
    "sdpo-rich": {
        "divergence": "reverse",
        "support": "student",
        "top_k": 20,
        "tail": True,
        "max_ratio": 2.0,
        "reduction": "token",
        "teacher": "ema",
        "teacher_rate": 0.01,
    },
    # SDFT (arXiv 2601.19897, second version and the erratum of its code): forward divergence on the student's samples.
    "sdft": {
        "divergence": "forward",
        "support": "full",
        "skip_first": 3,
        "reduction": "token",
        "teacher": "ema",
        "teacher_rate": 0.01,
    },
    # OPSD (arXiv 2601.18734, third version): forward, frozen, each id's term clipped.
    "opsd": {
        "divergence": "forward",
        "support": "full",
        "pointwise_clip": 0.05,
        "reduction": "token",
        "teacher": "frozen",
    },
}
"""Name to the settings that a paper's experiments or code used; a field given beside it wins."""


class LossSettings(Settings):
    """The policy-gradient part."""

    weight: float = Field(default=1.0, ge=0)
    """Factor on the policy gradient; 0 leaves the targeted divergence alone (a control)."""
    estimator: Annotated[str, ESTIMATOR] = "reinforce"
    """reinforce with importance weights per token or sequence; gspo, one clipped ratio per rollout; or
    package.module:name of your own, a function (tokens, settings) that returns a loss."""
    ratio_level: Level = "token"
    """Importance ratio trainer/sampler of each token, or of the whole rollout."""
    outside: Outside = "truncate"
    """A ratio outside its bounds is cut to them, or its tokens count nothing."""
    min_ratio: float = Field(default=0.0, ge=0)
    """Lower bound of the ratio."""
    max_ratio: float = Field(default=2.0, gt=0)
    """Upper bound of the ratio."""
    gspo_clip: tuple[Annotated[float, Field(ge=0, le=1)], Annotated[float, Field(ge=0)]] = (3e-4, 4e-4)
    """How far below and above 1 the ratio of gspo may lie (values of its paper)."""
    kl_coef: float = Field(default=0.0, ge=0)
    """Reward that an attempt loses for each nat of its divergence from the starting weights: k1, summed over all its
    sampled tokens, before the group's mean is taken off. It grows with the length of attempts: start at 1e-3."""
    micro_batch_tokens: int = Field(default=2048, ge=1)
    """Positions in one forward-backward, padding included."""

    @model_validator(mode="after")
    def _bounds_in_order(self) -> LossSettings:
        if self.min_ratio > self.max_ratio:
            raise ValueError(f"min_ratio = {self.min_ratio} lies above max_ratio = {self.max_ratio}")
        return self


class FeedbackSettings(Settings):
    """The targeted divergence on hinted turns."""

    preset: Literal["composer", "sdpo", "sdpo-rich", "sdft", "opsd"] = "composer"
    """Published values for the fields that are not given."""
    weight: float = Field(default=1.0, ge=0)
    """Factor on the targeted divergence before its cap; 0 is RL alone."""
    ratio: float = Field(default=1.0, ge=0)
    """Its gradient norm is at most this times the running norm of the policy gradient."""
    measure_every: int = Field(default=8, ge=1)
    """Steps between measurements of both norms, with the packed forward. The steps in between share one backward pass
    and the factor measured last, unless the joint gradient is larger than the two measured norms allow."""
    divergence: Annotated[str, DIVERGENCE] = "reverse"
    """reverse: KL(student || teacher); forward; jensen-shannon; or package.module:name of your own, a function
    (logp_student, logp_teacher, beta) that returns each id's term."""
    beta: float = Field(default=0.5, gt=0, lt=1)
    """Share of the teacher in the mixture of jensen-shannon."""
    support: Support = "student"
    """Ids compared: the student's or the teacher's likeliest, the full vocabulary, or the sampled token alone."""
    top_k: int = Field(default=64, ge=1)
    """Ids kept of the student's or teacher's distribution."""
    tail: bool = True
    """The ids that are not kept are one bucket; else both distributions are renormalised over the kept ones."""
    pointwise_clip: float | None = Field(default=None, gt=0)
    """Each id's term of the divergence is cut here; none by default."""
    skip_first: int = Field(default=0, ge=0)
    """Tokens at the start of each turn that do not count."""
    skip: tuple[Literal["thinking", "template"], ...] = ()
    """Kinds of tokens that do not count: words outside of calls; tags and stop tokens."""
    max_ratio: float | None = Field(default=None, gt=0)
    """Each token's divergence is weighed by its importance ratio trainer/sampler, cut here; none by default."""
    reduction: Reduction = "turn"
    """turn: mean over each turn's tokens, then over turns, at least `target_floor` of them; token: over all tokens."""
    teacher: TeacherKind = "ema"
    """Teacher weights: as at the start of RL; their running average (ema); the policy's own, without gradient (live);
    or the start's and the policy's log-probs mixed (trust-region)."""
    teacher_rate: float = Field(default=0.05, ge=0, le=1)
    """ema: share of the policy that enters the average at each step; trust-region: share of the policy in the mix."""
    offload_teacher: bool = False
    """Keep the teacher's weights in host memory and exchange them where they are used."""
    target_floor: int = Field(default=16, ge=1)
    """The divergence is averaged over at least this many targets, so that it fades as faults become rare."""
    max_targets: int = Field(default=96, ge=0)
    """Hinted turns used in one step at most; more are sampled down evenly."""
    detectors: tuple[Annotated[str, feedback.NAMED], ...] = ()
    """Detectors whose hints are trained on; empty means all but the behaviours, which must be named (unfinished,
    comment_reasoning, terminal_only, long_message, out_of_bounds), and your own, as package.module:name. Call faults
    are recorded either way."""
    scope: Scope = "turn"
    """turn: faulty turns, by a teacher that read their hint. rollout: every turn of every attempt, by a teacher that
    read the task's solution before the first one (OPSD); hints are then recorded and not trained on."""
    placement: Placement = "system"
    """Whose message the hint is; tool: it stands at the end of the last result."""
    forward: Literal["separate", "packed"] = "packed"
    """packed: hinted turns branch off their rollout in one forward; models whose attention cannot do that, and
    separate: a forward each for student and teacher, and both norms measured at every step."""

    def hint_options(self, context_length: int | None = None) -> HintOptions:
        """Options by which hints become branches of samples."""
        return HintOptions(
            self.scope, self.placement, self.skip, self.skip_first, context_length, self.max_targets
        )

    @model_validator(mode="before")
    @classmethod
    def _from_preset(cls, given: Any) -> Any:
        if not isinstance(given, dict):
            return given
        return {**PRESETS.get(given.get("preset", "composer"), {}), **given}
