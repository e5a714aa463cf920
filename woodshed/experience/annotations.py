"""Words and numbers about a step's attempts beside their verdicts: hints, rewards and penalties."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from woodshed import feedback
from woodshed.agent.prompt import Effort, with_effort
from woodshed.engines.engine import Engine
from woodshed.engines.http import HttpEngine
from woodshed.experience.compile import is_trainable, subsample
from woodshed.feedback import critic, rewards
from woodshed.feedback.critic import CriticSettings
from woodshed.feedback.rewards import RewardSettings
from woodshed.grading import effort
from woodshed.grading.effort import EffortSettings
from woodshed.pysource import syntax
from woodshed.records import Group, Hint, RewardTerms, Task, Verdict
from woodshed.tasks import folder
from woodshed.tokens.codec import ToolSpec
from woodshed.tokens.model_files import load_tokenizer
from woodshed.tokens.renderer import Renderer, create_renderer


def with_levels(
    tasks: Sequence[Task], settings: EffortSettings, step: int
) -> tuple[list[Task], dict[str, Effort]]:
    """The step's tasks as their prompts put them, and task id to the effort that the prompt asks for."""
    levels: dict[str, Effort] = {}
    for number, task in enumerate(tasks):
        if level := settings.level(step, number):
            levels[task.id] = level
    return [with_effort(task, levels[task.id]) if task.id in levels else task for task in tasks], levels


def critic_of(settings: CriticSettings, engine: Engine) -> Engine:
    """The engine that reads attempts: a server's model, or the policy itself."""
    if settings.endpoint is None:
        return engine
    tokenizer, _ = load_tokenizer(settings.model)
    return HttpEngine(settings.endpoint, create_renderer(tokenizer, codec="plain"))


@dataclass(frozen=True)
class Annotator:
    """Writes hints and reward terms."""

    renderer: Renderer
    tools: Sequence[ToolSpec]
    detectors: Sequence[str]
    """Those that the recipe names, beside the call faults."""
    rewards: RewardSettings
    effort: EffortSettings
    critic: Engine
    critic_rollouts: int
    """Attempts that the critic reads in each step; 0 asks it nothing."""
    seed: int

    def hints(
        self, groups: Sequence[Group], tasks: Sequence[Task], verdicts: Mapping[str, Verdict]
    ) -> list[Hint]:
        """Hints of the rules, and the critic's on unsolved attempts about which the rules are silent."""
        hints = feedback.write(
            groups, tasks, self.renderer.codec, tools=self.tools, detectors=feedback.named(self.detectors)
        )
        known, hinted = {task.id: task for task in tasks}, {hint.rollout_id for hint in hints}
        silent = [
            rollout
            for group in groups
            for rollout in group.rollouts
            if rollout.id not in hinted
            and is_trainable(rollout, verdicts)
            and not verdicts[rollout.id].solved
        ]
        for rollout in subsample(silent, self.critic_rollouts) if self.critic_rollouts else []:
            task = known[rollout.task_id]
            secrets = [syntax.legible(data) for data in folder.protected_files(task).values()]
            secrets += [text for text in folder.gold_patch(task).files.values() if text]
            verdict = verdicts[rollout.id]
            hint = critic.read(task, rollout, verdict, self.critic, hidden=secrets, seed=self.seed)
            hints += [hint] if hint else []
        return hints

    def counts(self, levels: Mapping[str, Effort]) -> bool:
        """True where the recipe asks for rewards or penalties besides the verdict."""
        return bool(self.rewards.terms or self.effort.weight or levels)

    def reward_terms(
        self, groups: Sequence[Group], tasks: Sequence[Task], levels: Mapping[str, Effort]
    ) -> list[RewardTerms]:
        """Rewards and penalties of each attempt besides its verdict."""
        known = {task.id: task for task in tasks}
        rollouts = [rollout for group in groups for rollout in group.rollouts]
        penalties = effort.penalties(rollouts, self.renderer, self.effort, levels)
        reward_terms = []
        for rollout in rollouts:
            terms = rewards.auxiliary(known[rollout.task_id], rollout, self.rewards.terms)
            terms |= {"effort": -penalties[rollout.id]} if rollout.id in penalties else {}
            reward_terms.append(RewardTerms(rollout.id, terms, levels.get(rollout.task_id, "")))
        return reward_terms
