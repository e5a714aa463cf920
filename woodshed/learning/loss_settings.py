"""Settings of the policy gradient and of the targeted divergence, and published presets."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field, model_validator

from woodshed import feedback
from woodshed.experience.compile import HintOptions, Scope
from woodshed.learning.divergences import DIVERGENCE, Reduction, Support
from woodshed.learning.estimators import ESTIMATOR
from woodshed.settings import Settings

TeacherKind = Literal["frozen", "ema", "live", "trust-region"]
Preset = Literal["composer", "sdpo", "sdpo-rich", "sdft", "opsd"]


@dataclass(frozen=True)
class TargetForm:
    """Form of the targeted divergence, as a paper's experiments or code have it."""

    divergence: str = "reverse"
    """A name of `divergences.DIVERGENCES`."""
    beta: float = 0.5
    """Share of the teacher in the mixture of jensen-shannon."""
    support: Support = "student"
    top_k: int = 64
    """Ids kept of the student's or teacher's distribution; the others are one bucket."""
    pointwise_clip: float | None = None
    """Each id's term of the divergence is cut here."""
    skip_first: int = 0
    """Tokens at the start of each turn that do not count."""
    max_ratio: float | None = None
    """Each token's divergence is weighed by its importance ratio trainer/sampler, cut here."""
    reduction: Reduction = "turn"
    scope: Scope = "turn"
    teacher: TeacherKind = "ema"
    teacher_rate: float = 0.05


PRESETS: dict[Preset, TargetForm] = {
    # A hinted turn beside RL, as the Composer 2.5 post describes it; what it leaves open is as measured here.
    "composer": TargetForm(),
    # SDPO (arXiv 2601.20802), the defaults of its code.
    "sdpo": TargetForm(divergence="jensen-shannon", top_k=100, max_ratio=2.0, reduction="token"),
    # SDPO with feedback in words (its experiments on LiveCodeBench).
    "sdpo-rich": TargetForm(top_k=20, max_ratio=2.0, reduction="token", teacher_rate=0.01),
    # SDFT (arXiv 2601.19897, second version and the erratum of its code): forward divergence on the student's samples.
    "sdft": TargetForm(
        divergence="forward",
        support="full",
        skip_first=3,
        reduction="token",
        scope="rollout",
        teacher_rate=0.01,
    ),
    # OPSD (arXiv 2601.18734, third version): forward, frozen, each id's term clipped.
    "opsd": TargetForm(
        divergence="forward",
        support="full",
        pointwise_clip=0.05,
        reduction="token",
        scope="rollout",
        teacher="frozen",
    ),
}


class LossSettings(Settings):
    """The policy-gradient part."""

    weight: float = Field(default=1.0, ge=0)
    """Factor on the policy gradient; 0 leaves the targeted divergence alone (a control)."""
    estimator: Annotated[str, ESTIMATOR] = "reinforce"
    """reinforce: each token weighs its importance ratio trainer/sampler, cut at 2; icepop: it counts nothing where that
    lies outside 0.5 to 5; mis: a rollout counts nothing where its ratio lies above 2; gspo: one clipped ratio per
    rollout; or package.module:name of your own, a function (tokens, settings) that returns a loss."""
    kl_coef: float = Field(default=0.0, ge=0)
    """What an attempt's reward loses for each nat of its divergence from the starting weights: k1, summed over all its
    sampled tokens, before the group's mean is taken off. It grows with the length of attempts: start at 1e-3."""
    micro_batch_tokens: int = Field(default=2048, ge=1)
    """Positions in one forward-backward of any stage, padding included."""


class FeedbackSettings(Settings):
    """The targeted divergence on hinted turns."""

    preset: Preset = "composer"
    """Published form of the divergence, and values for the fields that are not given."""
    weight: float = Field(default=1.0, ge=0)
    """Factor on the targeted divergence before its cap; 0 is RL alone."""
    ratio: ClassVar[float] = 1.0
    """Its gradient norm is at most this times the running norm of the policy gradient."""
    measure_every: ClassVar[int] = 8
    """Steps between measurements of both norms, with the packed forward. The steps in between share one backward pass
    and the factor measured last, unless the joint gradient is larger than the two measured norms allow."""
    divergence: Annotated[str, DIVERGENCE] = "reverse"
    """reverse: KL(student || teacher); forward, over the teacher's likeliest ids; jensen-shannon; or
    package.module:name of your own, a function (logp_student, logp_teacher, beta) that returns each id's term.
    Chosen on the quickstart, which works with reverse; forward is a variant of the experiment."""
    teacher: TeacherKind = "ema"
    """Teacher weights: as at the start of RL; their running average (ema); the policy's own, without gradient (live);
    or the start's and the policy's log-probs mixed (trust-region). Chosen on runs of the experiment with a 0.5B model:
    under a frozen teacher unknown tools came back, a live one broke in a step; frozen was held out in one seed only."""
    teacher_rate: float = Field(default=0.05, ge=0, le=1)
    """ema: share of the policy that enters the average at each step; trust-region: share of the policy in the mix.
    Chosen on runs of the experiment with a 0.5B model that were short: no other share was tried."""
    target_floor: int = Field(default=16, ge=1)
    """The divergence is averaged over at least this many targets, so that it fades as faults become rare."""
    max_targets: int = Field(default=96, ge=0)
    """Hinted turns used in one step at most; more are sampled down evenly."""
    detectors: tuple[Annotated[str, feedback.NAMED], ...] = ()
    """Detectors whose hints are trained on; empty means all but the behaviours, which must be named (unfinished,
    comment_reasoning, terminal_only, long_message, out_of_bounds), and your own, as package.module:name. Call faults
    are recorded either way."""
    forward: Literal["separate", "packed"] = "packed"
    """packed: hinted turns branch off their rollout in one forward; models whose attention cannot do that, and
    separate: a forward each for student and teacher, and both norms measured at every step. Chosen on the time of a
    step; published variants were run with separate forwards."""

    def hint_options(self, context_length: int | None = None) -> HintOptions:
        """Options by which hints become branches of samples."""
        return HintOptions(self.form.scope, self.form.skip_first, context_length, self.max_targets)

    @property
    def form(self) -> TargetForm:
        """The preset's form with what these settings change. Scope "rollout" (sdft, opsd) compares every turn of every
        attempt with a teacher that read the task's solution first; hints are then recorded and not trained on."""
        form = PRESETS[self.preset]
        support = "teacher" if self.divergence == "forward" else "student"
        return replace(
            form,
            divergence=self.divergence,
            support="full" if form.support == "full" else support,
            teacher=self.teacher,
            teacher_rate=self.teacher_rate,
        )

    def usual(self) -> dict[str, Any]:
        return super().usual() | dict(FeedbackSettings(preset=self.preset)) | {"preset": "composer"}

    @model_validator(mode="before")
    @classmethod
    def _from_preset(cls, given: Any) -> Any:
        if not isinstance(given, dict):
            return given
        form = PRESETS.get(given.get("preset", "composer"), TargetForm())
        published = {name: getattr(form, name) for name in ("divergence", "teacher", "teacher_rate")}
        return {**published, **given}
