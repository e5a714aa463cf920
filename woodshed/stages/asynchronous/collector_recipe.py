"""The part of a recipe that its collector reads. Everything here works without torch."""

from __future__ import annotations

from typing import Annotated

from woodshed.agent.attempt import AgentSettings
from woodshed.curriculum import CurriculumSettings
from woodshed.engines.create import EngineSettings
from woodshed.experience import HarnessSettings, RolloutSettings
from woodshed.feedback import NAMED
from woodshed.feedback.critic import CriticSettings
from woodshed.feedback.rewards import RewardSettings
from woodshed.grading import GradingSettings
from woodshed.grading.effort import EffortSettings
from woodshed.monitors.flag_policy import MonitorSettings
from woodshed.runs.folder import RunDir
from woodshed.sandbox import SandboxSettings
from woodshed.settings import Settings, validate
from woodshed.stages.rl_settings import EvaluationSettings, RLSettings
from woodshed.tokens.codec import CODEC


class PolicyNames(Settings):
    """The policy, of which a collector needs the tokenizer and the call format only."""

    model: str
    codec: Annotated[str, CODEC]


class HintNames(Settings):
    """Detectors beside the call faults."""

    detectors: tuple[Annotated[str, NAMED], ...]


class CollectorRecipe(Settings):
    """Sections of a `Recipe`, by the same names."""

    seed: int
    policy: PolicyNames
    engine: EngineSettings
    agent: AgentSettings
    curriculum: CurriculumSettings
    rollout: RolloutSettings
    sandbox: SandboxSettings
    grading: GradingSettings
    monitors: MonitorSettings
    effort: EffortSettings
    rewards: RewardSettings
    critic: CriticSettings
    feedback: HintNames
    rl: RLSettings
    evaluation: EvaluationSettings

    @property
    def harness(self) -> HarnessSettings:
        """Settings of attempts. They never go in rounds, which would wait for the slowest of them."""
        rollout = self.rollout.model_copy(update={"repeatable": False})
        return HarnessSettings(rollout, self.agent, self.grading, self.monitors, self.sandbox)


def read(run: RunDir) -> CollectorRecipe:
    """The recipe of a run, as its collector reads it.

    Raises:
        RunError, RecipeError: the file is damaged, or a value in it is wrong.
    """
    tree = {name: value for name, value in run.recipe().items() if name in CollectorRecipe.model_fields}
    for name, kind in (("policy", PolicyNames), ("feedback", HintNames)):
        tree[name] = {key: value for key, value in tree.get(name, {}).items() if key in kind.model_fields}
    return validate(CollectorRecipe, tree, origin=str(run.path / "recipe.toml"))
