"""Reasons for which a recipe would learn nothing, found before a run begins.

A run that moves no weight looks like one that does: it takes as long and prints as much. What no attempt could teach is
refused; what may be meant, such as a learning rate of zero for a control, is said.
"""

from __future__ import annotations

from collections.abc import Sequence

from woodshed import parts
from woodshed.agent.command_line import shown, words
from woodshed.curriculum import refuse_dry
from woodshed.engines import servers, vllm
from woodshed.engines.chat import UNTRAINABLE
from woodshed.engines.create import needs_model
from woodshed.experience import scripted_expert
from woodshed.learning import ranks
from woodshed.learning.estimators import is_bounded
from woodshed.learning.layout import refuse_misfit
from woodshed.learning.optimizer import refuse_adapter
from woodshed.records import RecipeError, Task
from woodshed.stages import sft
from woodshed.stages.plan import plan
from woodshed.stages.recipe import Recipe


def refuse(recipe: Recipe, *, starts_ranks: bool = False) -> None:
    """Stop a run whose stages cannot be, or cannot learn.

    Args:
        starts_ranks: the ranks of the layout are not this process and its like, but will be started by it.

    Raises:
        RecipeError: names the settings that leave nothing, and what to change; a part of the user's own that cannot
            be used; or a layout for other ranks than were started.
        SamplerError: no vLLM can be started here.
    """
    parts.check(recipe)
    if recipe.engine.kind == "chat":
        raise RecipeError(UNTRAINABLE)
    if recipe.engine.kind == "vllm":
        vllm.find()
    servers.refuse_gpus(recipe.engine.gpus)
    refuse_tools(recipe)
    refuse_harness(recipe)
    recipe.sandbox.check()
    plan(recipe)
    if recipe.rl.staleness:
        refuse_asynchronous(recipe)
    if starts_ranks and (started := ranks.started()) > 1:
        raise RecipeError(
            f"rl.staleness = {recipe.rl.staleness} starts the ranks of its trainer itself, and torchrun has started "
            f"{started}; start with `woodshed train ...`"
        )
    if not starts_ranks:
        refuse_misfit(recipe.layout, recipe.policy.resolved_device())
    is_adapter = bool(recipe.policy.adapter or recipe.policy.lora_rank)
    if {"sft", "distill", "solutions", "rl"} & {*recipe.stages}:
        refuse_adapter(recipe.optimizer, is_adapter=is_adapter)
    no_reward, no_feedback = _no_reward(recipe), _no_feedback(recipe)
    if "rl" in recipe.stages and no_reward and no_feedback:
        raise RecipeError(
            f"the {recipe.rl.steps} steps of rl would learn nothing: {no_reward}, and {no_feedback}. Change one of "
            "them, or take 'rl' out of stages"
        )
    distill = recipe.distill
    if "distill" not in recipe.stages:
        return
    if not (distill.demonstrations and distill.answers_per_step) and not distill.tasks_per_step:
        raise RecipeError(
            "stages has 'distill', which needs distill.demonstrations, or distill.tasks_per_step above 0"
        )


def refuse_asynchronous(recipe: Recipe) -> None:
    """Stop a run with staleness that needs engine and trainer in one process, or whose ratio has no bound.

    Raises:
        RecipeError: names the setting.
    """
    said = f"rl.staleness = {recipe.rl.staleness}"
    if needs_model(recipe.engine):
        raise RecipeError(
            f"{said} needs an engine that reads weights from a folder, and engine.kind = {recipe.engine.kind!r} "
            "computes with the trainer's own; set engine.kind='process', 'vllm' or 'http', or rl.staleness=0"
        )
    if recipe.stages not in (("rl",), ("sft", "rl")):
        raise RecipeError(
            f"{said} is for stages = ['rl'] or ['sft', 'rl'], and these are {list(recipe.stages)}: other stages need "
            "the engine in the trainer's process; give them a run of their own, with rl.staleness=0"
        )
    if recipe.gate.every:
        raise RecipeError(
            f"{said}: gate.every = {recipe.gate.every} samples and scores in turns, and the trainer has no engine; set "
            "gate.every=0 or rl.staleness=0"
        )
    if not is_bounded(recipe.loss):
        raise RecipeError(
            f"{said}: loss.estimator = {recipe.loss.estimator!r} gives a token a gradient that grows with its ratio "
            "trainer/sampler without a bound, which old tokens drive up; use reinforce, icepop or mis"
        )


def refuse_tools(recipe: Recipe) -> None:
    """Stop a run whose system prompt cannot be read, or whose tools cannot be called or lack those of its scripted
    attempts.

    Raises:
        RecipeError: names the tool.
    """
    recipe.agent.rules  # noqa: B018 (its file is read)
    offered = [tool.name for tool in recipe.agent.tools.specs]
    missing = [name for name in scripted_expert.TOOL_NAMES if name not in offered]
    if "sft" in recipe.stages and sft.SCRIPTED in recipe.sft.imitate and missing:
        raise RecipeError(
            f"scripted attempts call {missing[0]}, which is not in agent.tools.offered = "
            f"{list(recipe.agent.tools.offered)}; offer it, or take {sft.SCRIPTED!r} out of sft.imitate"
        )


def refuse_harness(recipe: Recipe) -> None:
    """Stop a run whose agent of others cannot be started, or is measured as only ours can be.

    Raises:
        RecipeError: names the setting.
    """
    if not recipe.agent.harness:
        return
    shown(words(recipe.agent.harness))
    if recipe.gate.every:
        raise RecipeError(
            f"gate.every = {recipe.gate.every} plays attempts again from the middle, which an agent of others "
            "(agent.harness) cannot; set gate.every = 0"
        )
    if recipe.distill.tasks_per_step and "distill" in recipe.stages:
        raise RecipeError("distill.tasks_per_step makes attempts with our own agent; take out agent.harness")


def refuse_tasks(recipe: Recipe, practice: Sequence[Task], heldout: Sequence[Task]) -> None:
    """Stop a run that has too few tasks for its stages.

    Raises:
        RecipeError: names the settings to change.
    """
    if "rl" in recipe.stages:
        refuse_dry(
            recipe.curriculum,
            num_tasks=len(practice),
            steps=recipe.rl.steps,
            tasks_per_step=recipe.rl.tasks_per_step,
        )
    if "evaluate" in recipe.stages and not heldout:
        raise RecipeError(
            f"stages has 'evaluate', but none of the {len(practice)} tasks are kept for measuring; set tasks.heldout, "
            "or raise tasks.heldout_share"
        )


def warnings(recipe: Recipe) -> list[str]:
    """Say what a person should know before a run that may be meant so."""
    rates = {
        "sft": ("sft.learning_rate", recipe.sft.learning_rate),
        "distill": ("optimizer.learning_rate", recipe.optimizer.learning_rate),
        "rl": ("optimizer.learning_rate", recipe.optimizer.learning_rate),
    }
    steps = {"sft": recipe.sft.steps, "distill": recipe.distill.steps, "rl": recipe.rl.steps}
    said = []
    for stage, (setting, rate) in rates.items():
        if stage in recipe.stages and not rate:
            said.append(f"{setting} = 0: the {steps[stage]} steps move no weight")
        if stage not in recipe.stages and "steps" in getattr(recipe, stage).model_fields_set:
            said.append(
                f"{stage}.steps = {steps[stage]} has no effect: stages = {list(recipe.stages)} does not name {stage!r}"
            )
    no_reward, no_feedback = _no_reward(recipe), _no_feedback(recipe)
    if "rl" in recipe.stages and no_reward and not no_feedback and recipe.loss.weight:
        said.append(f"rewards teach nothing, feedback alone does: {no_reward}")
    return said


def _no_reward(recipe: Recipe) -> str:
    """The setting that leaves every advantage, or its gradient, at zero; "" where rewards teach."""
    objective, attempts = recipe.loss, recipe.rollout.attempts
    if not objective.weight:
        return "loss.weight = 0 leaves rewards out"
    if attempts < 2:
        return f"rollout.attempts = {attempts} leaves a group nothing to differ from (2 or more are compared)"
    return ""


def _no_feedback(recipe: Recipe) -> str:
    """The setting that leaves no targeted divergence; "" where feedback teaches."""
    if not recipe.feedback.weight:
        return "feedback.weight = 0 leaves hints out"
    if not recipe.feedback.max_targets:
        return "feedback.max_targets = 0 leaves hints out"
    return ""
