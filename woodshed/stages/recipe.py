"""The recipe: every setting of a run, composed from the rooms that read them, in one TOML file."""

from __future__ import annotations

from pathlib import Path

from pydantic import Field

from woodshed.agent.attempt import AgentSettings
from woodshed.agent.prompt import Effort
from woodshed.curriculum import CurriculumSettings
from woodshed.engines.engine import SamplerSettings
from woodshed.evals.tracking import Tracker
from woodshed.experience import HarnessSettings, RolloutSettings
from woodshed.feedback.critic import CriticSettings
from woodshed.feedback.gate import GateSettings
from woodshed.feedback.rewards import RewardSettings
from woodshed.grading.effort import EffortSettings
from woodshed.grading.verifier import GradingSettings
from woodshed.learning.loss_settings import FeedbackSettings, LossSettings
from woodshed.learning.policy import PolicySettings
from woodshed.learning.stability import StabilitySettings
from woodshed.learning.update import OptimizerSettings
from woodshed.monitors.flag_policy import MonitorSettings
from woodshed.sandbox import SandboxSettings
from woodshed.settings import Settings
from woodshed.stages.distill_samples import DistillSettings
from woodshed.stages.sft import SFTSettings


class TaskSettings(Settings):
    """Which tasks are practised and which are kept for measuring."""

    train: tuple[Path, ...] = ()
    """Task folders, or folders of them, to practise on."""
    heldout: tuple[Path, ...] = ()
    """Task folders never practised on; the policy is evaluated on them before and after."""
    heldout_share: float = Field(default=0.0, ge=0.0, lt=1.0)
    """Where `heldout` is empty: this share of the tasks in `train`, chosen by their ids, is kept for measuring."""


class RLSettings(Settings):
    """The loop."""

    steps: int = Field(default=6, ge=0)
    """Optimizer steps of RL and targeted feedback."""
    tasks_per_step: int = Field(default=6, ge=1)
    """Different tasks in one step."""


class EvaluationSettings(Settings):
    """How the policy is measured on the held-out tasks."""

    attempts: int = Field(default=1, ge=1)
    """Attempts per held-out task."""
    limit: int = Field(default=0, ge=0)
    """Held-out tasks used, the first so many by name; 0 uses all."""
    every: int = Field(default=0, ge=0)
    """Also evaluate after every so many steps; 0 evaluates before and after only."""
    effort: Effort | None = None
    """Effort that the prompts of evaluations ask for (low, medium, high); unset, they say nothing."""


class Recipe(Settings):
    """A whole run."""

    name: str = Field(pattern=r"^[^/]*[^/.][^/]*$")
    """Name of the run folder below `runs`."""
    note: str = ""
    """What a reader of the results must know, shown with them."""
    runs: Path = Path("runs")
    """Where run folders go."""
    seed: int = Field(default=0, ge=0, lt=1 << 63)
    """Seeds everything: sampling, task order, new weights."""
    tracking: Tracker = "none"
    """Also tell metrics to trackio, tensorboard or wandb; metrics.jsonl is written always."""
    arms: dict[str, tuple[str, ...]] = Field(default_factory=dict, exclude=True)
    """Arms of an experiment: name to the settings in which it differs, as section.key=value (`stages.variants`)."""
    prices: Path | None = None
    """A price table in place of the default one (woodshed/evals/prices.toml)."""
    tasks: TaskSettings = TaskSettings()
    policy: PolicySettings = PolicySettings()
    sampler: SamplerSettings = SamplerSettings()
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
        """What stands between the policy and its experience."""
        return HarnessSettings(self.rollout, self.agent, self.grading, self.monitors, self.sandbox)
