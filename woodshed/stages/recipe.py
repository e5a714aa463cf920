"""The recipe: every setting of a run, composed from the packages that read them, in one TOML file."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

from pydantic import Field

from woodshed.agent.attempt import AgentSettings
from woodshed.curriculum import CurriculumSettings
from woodshed.engines.create import EngineSettings
from woodshed.evals.tracking import Tracker
from woodshed.experience import HarnessSettings, RolloutSettings
from woodshed.experience.scripted_expert import ExpertSettings
from woodshed.feedback.critic import CriticSettings
from woodshed.feedback.gate import GateSettings
from woodshed.feedback.rewards import RewardSettings
from woodshed.grading.effort import EffortSettings
from woodshed.grading.verifier import GradingSettings
from woodshed.learning.layout import LayoutSettings
from woodshed.learning.loss_settings import FeedbackSettings, LossSettings, Preset
from woodshed.learning.optimizer import OptimizerSettings
from woodshed.learning.policy import PolicySettings
from woodshed.learning.stability import StabilitySettings
from woodshed.monitors.flag_policy import MonitorSettings
from woodshed.parts import Part
from woodshed.sandbox import SandboxSettings
from woodshed.settings import FolderName, FolderPath, Settings
from woodshed.stages.rl_settings import EvaluationSettings, RLSettings


def _run_stage(session: Any, state: Any) -> None:
    """The form of a stage (`stages.plan`)."""


STAGE: Part[Any] = Part(
    "stage", dict.fromkeys(("sft", "distill", "solutions", "rl", "evaluate")), like=_run_stage
)
"""A stage as a recipe names it: one of ours, which `plan` knows, or a function of the user's own."""


class TaskSettings(Settings):
    """Tasks to practise on, and tasks kept for measuring."""

    train: tuple[Path, ...] = ()
    """Task folders, or folders of them, to practise on; and for the stage `solutions` folders that `woodshed solve`
    wrote, for one step on what persons accepted, edited or rejected."""
    heldout: tuple[Path, ...] = ()
    """Task folders never practised on; the policy is evaluated on them before and after."""
    heldout_share: float = Field(default=0.0, ge=0.0, lt=1.0)
    """Where `heldout` is empty: about this share of the tasks in `train`, chosen by their ids so that no definition is
    the target of tasks on both sides, is kept for measuring."""


class SFTSettings(ExpertSettings):
    """The stage `sft`: supervised fine-tuning on scripted attempts, and on transcripts of others."""

    steps: int = Field(default=80, ge=1)
    """Optimizer steps."""
    imitate: tuple[str, ...] = Field(default=("scripted",), min_length=1)
    """What is imitated: "scripted" (attempts at tasks.train), run folders, ATIF files or folders of them (.json), and
    files of chats (.jsonl). Of runs and ATIF files it is what solved its task and no monitor flagged."""
    batch: int = Field(default=32, ge=1)
    """Attempts and transcripts in one optimizer step."""
    learning_rate: float = Field(default=1e-3, ge=0)
    """Peak learning rate, reached after 5 steps; over the last 40 % of the steps it falls to zero. 1e-3 suits a new
    rank-8 adapter, 1e-5 full weights."""
    code_share: float = Field(default=1.0, ge=0, le=1)
    """Share of attempts whose code is imitated too; of the others where they edit and in what form, and the rest."""

    def schedule(self, optimizer: OptimizerSettings) -> OptimizerSettings:
        """The recipe's optimizer with the learning rates of this stage."""
        rates = {"learning_rate": self.learning_rate, "warmup_steps": 5, "decay_share": 0.4}
        return optimizer.model_copy(update=rates)


class DistillSettings(Settings):
    """The stage `distill`: learning from demonstrations by one's own words."""

    steps: int = Field(default=50, ge=1)
    """Optimizer steps."""
    demonstrations: tuple[Path, ...] = ()
    """JSONL files with {"prompt": ..., "demonstration": ...} a line: examples of answers, or documentation."""
    earlier: tuple[Path, ...] = ()
    """JSONL files of the same form that are not learned from: what must not be forgotten is measured on them."""
    answers_per_step: int = Field(default=16, ge=0)
    """Prompts of `demonstrations` that are answered in one step."""
    tasks_per_step: int = Field(default=0, ge=0)
    """Practice tasks attempted in one step, once each; their demonstration is the solution."""
    preset: Preset = "sdft"
    """Published form of teacher and divergence: sdft, opsd, or another that feedback.preset knows."""

    @property
    def feedback(self) -> FeedbackSettings:
        """Teacher and divergence."""
        return FeedbackSettings(preset=self.preset)


class Recipe(Settings):
    """A whole run."""

    name: FolderName
    """Name of the run folder below `runs`."""
    note: str = ""
    """What a reader of the results must know, shown with them."""
    runs: FolderPath = Path("runs")
    """Where run folders go."""
    seed: int = Field(default=0, ge=0, lt=1 << 63)
    """Seeds everything: sampling, task order, new weights."""
    stages: tuple[Annotated[str, STAGE], ...] = Field(default=("rl",), min_length=1)
    """Stages in their order: sft, distill, solutions, rl, evaluate, or a function of one's own as
    package.module:name."""
    checkpoint_every: int = Field(default=10, ge=1)
    """Steps of sft and distill between checkpoints, and between distill's measurements of what was learned and
    forgotten; rl writes a checkpoint after each step."""
    tracking: Tracker = "none"
    """Also tell metrics to trackio, tensorboard or wandb; metrics.jsonl is written always."""
    variants: dict[str, tuple[str, ...]] = Field(default_factory=dict, exclude=True)
    """Variants of an experiment: name to the settings in which it differs, as section.key=value (`stages.variants`)."""
    tasks: TaskSettings = TaskSettings()
    policy: PolicySettings = PolicySettings()
    layout: LayoutSettings = LayoutSettings()
    engine: EngineSettings = EngineSettings()
    agent: AgentSettings = AgentSettings()
    curriculum: CurriculumSettings = CurriculumSettings()
    rollout: RolloutSettings = RolloutSettings()
    sandbox: SandboxSettings = SandboxSettings()
    grading: GradingSettings = GradingSettings()
    monitors: MonitorSettings = MonitorSettings()
    effort: EffortSettings = EffortSettings()
    rewards: RewardSettings = RewardSettings()
    sft: SFTSettings = SFTSettings()
    distill: DistillSettings = DistillSettings()
    rl: RLSettings = RLSettings()
    loss: LossSettings = LossSettings()
    feedback: FeedbackSettings = FeedbackSettings()
    critic: CriticSettings = CriticSettings()
    gate: GateSettings = GateSettings()
    stability: StabilitySettings = StabilitySettings()
    optimizer: OptimizerSettings = OptimizerSettings()
    evaluation: EvaluationSettings = EvaluationSettings()

    @property
    def harness(self) -> HarnessSettings:
        """Settings of the way from the policy to its experience."""
        return HarnessSettings(self.rollout, self.agent, self.grading, self.monitors, self.sandbox)

    @property
    def stage_labels(self) -> tuple[str, ...]:
        """Labels of the stages, in order: the names of checkpoints and of records."""
        return tuple(map(stage_label, self.stages))


def stage_label(name: str) -> str:
    """The label of a stage: its name, or the last module of its import path."""
    return name.partition(":")[0].rpartition(".")[2]
