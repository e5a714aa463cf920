"""Reasons for which a recipe would learn nothing, found before a run begins.

A run that moves no weight looks like one that does: it takes as long and prints as much. What no attempt could teach is
refused; what may be meant, such as a learning rate of zero for a control, is said.
"""

from __future__ import annotations

from collections.abc import Iterator

from woodshed.curriculum import refuse_dry
from woodshed.learning.optimizer import OptimizerSettings, refuse_adapter
from woodshed.records import RecipeError
from woodshed.stages.recipe import Recipe


def refuse(recipe: Recipe, *, num_tasks: int | None = None) -> None:
    """Stop a run that cannot learn, or that will run out of tasks.

    Args:
        num_tasks: practice tasks; None where they are not loaded yet.

    Raises:
        RecipeError: names the settings that leave nothing, and what to change.
    """
    is_adapter = bool(recipe.policy.adapter or recipe.policy.lora_rank)
    for section, taken, optimizer in _phases(recipe):
        if taken:
            refuse_adapter(optimizer, is_adapter=is_adapter, section=section)
    steps = recipe.rl.steps
    no_reward, no_feedback = _no_reward(recipe), _no_feedback(recipe)
    if steps and no_reward and no_feedback:
        raise RecipeError(
            f"the {steps} steps of training would learn nothing: {no_reward}, and {no_feedback}. Change one of them, "
            "or measure without training by rl.steps = 0"
        )
    if recipe.distill.steps and not recipe.distill.feedback.weight:
        raise RecipeError(
            "distillation would learn nothing: distill.feedback.weight = 0; set it above 0, or distill.steps to 0"
        )
    if num_tasks is not None:
        refuse_dry(
            recipe.curriculum,
            num_tasks=num_tasks,
            steps=steps,
            tasks_per_step=recipe.rl.tasks_per_step,
        )


def warnings(recipe: Recipe) -> list[str]:
    """What a person should know before a run that may be meant so."""
    found = [
        f"{name}.learning_rate = 0: the {steps} steps move no weight"
        for name, steps, optimizer in _phases(recipe)
        if steps and not optimizer.learning_rate
    ]
    if not any(steps for _, steps, _ in _phases(recipe)):
        found.append(
            "nothing is trained: rl.steps, sft.steps and distill.steps are 0; `woodshed eval` measures a model"
        )
    no_reward, no_feedback = _no_reward(recipe), _no_feedback(recipe)
    if recipe.rl.steps and no_reward and not no_feedback and recipe.loss.weight:
        found.append(f"rewards teach nothing, feedback alone does: {no_reward}")
    return found


def _no_reward(recipe: Recipe) -> str:
    """The setting that leaves every advantage, or its gradient, at zero; "" where rewards teach."""
    objective, attempts = recipe.loss, recipe.rollout.attempts
    if not objective.weight:
        return "loss.weight = 0 leaves rewards out"
    if attempts < 2:
        return f"rollout.attempts = {attempts} leaves a group nothing to differ from (2 or more are compared)"
    bounds = (objective.min_ratio, objective.max_ratio)
    is_masked = objective.estimator == "reinforce" and objective.outside == "mask"
    if is_masked and not bounds[0] <= 1 <= bounds[1]:
        return f"loss.min_ratio = {bounds[0]} and max_ratio = {bounds[1]} mask every token whose ratio is 1"
    if objective.estimator == "reinforce" and not objective.max_ratio:
        return "loss.max_ratio = 0 counts no token"
    return ""


def _no_feedback(recipe: Recipe) -> str:
    """The setting that leaves no targeted divergence; "" where feedback teaches."""
    if not recipe.feedback.weight:
        return "feedback.weight = 0 leaves hints out"
    if not recipe.feedback.max_targets:
        return "feedback.max_targets = 0 leaves hints out"
    return ""


def _phases(recipe: Recipe) -> Iterator[tuple[str, int, OptimizerSettings]]:
    yield "sft.optimizer", recipe.sft.steps, recipe.sft.optimizer
    yield "distill.optimizer", recipe.distill.steps, recipe.distill.optimizer
    yield "optimizer", recipe.rl.steps, recipe.optimizer
