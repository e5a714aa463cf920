"""The stage `solutions`: one step of the policy gradient on what persons said about the policy's work.

`woodshed solve` keeps every attempt with its decision. All decided ones are one group: the advantage of each is its
reward minus the mean over all of them, so that failures, broken calls and questions count against the policy as
accepted work counts for it. Faulty turns get hints as everywhere. One step, since they are on-policy once.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from woodshed import feedback
from woodshed.experience.compile import compile_samples
from woodshed.learning.checkpoint import TrainState
from woodshed.records import Group, Hint, RecipeError, Rollout, Verdict
from woodshed.runs.folder import RunDir
from woodshed.solving.keeping import as_task, holds_solutions
from woodshed.stages.recipe import Recipe
from woodshed.stages.session import Session, begin


@dataclass(frozen=True)
class DecidedWork:
    """The decided attempts of all folders."""

    rollouts: tuple[Rollout, ...]
    verdicts: dict[str, Verdict]


def run(session: Session, state: TrainState) -> None:
    """Learn from solutions; see the module."""
    recipe, started = session.recipe, time.monotonic()
    if state.step:
        return
    work = read(recipe)
    tools = recipe.agent.tools.specs
    group = Group("solutions", work.rollouts)
    tasks = [as_task("solutions")]
    detectors = feedback.named(recipe.feedback.detectors)
    written = feedback.write([group], tasks, session.renderer.codec, tools=tools, detectors=detectors)
    hints: list[Hint] = feedback.choose(written, recipe.feedback.detectors)
    options = recipe.feedback.hint_options(session.engine.context_length)
    compiled = compile_samples([group], work.verdicts, hints, session.renderer, options)
    begin(
        session,
        state,
        recipe.optimizer,
        recipe.loss,
        recipe.feedback,
        steps=1,
        message_tokens=recipe.agent.turn_tokens,
    )
    session.progress(0, 1, f"solutions: learning from {len(work.rollouts)} of them")
    metrics = session.trainer.step(compiled.samples)
    metrics.pop("divergences", None)
    rewards = [verdict.reward for verdict in work.verdicts.values()]
    metrics |= {"solutions": len(rewards), "reward": sum(rewards) / len(rewards)}
    metrics["seconds"] = {"update": time.monotonic() - started}
    session.run.append("metrics", [metrics], state.stage, 0)
    session.worker.save(TrainState(state.stage, 1, state.steps_before))
    session.progress(1, 1, f"solutions: learned from {len(work.rollouts)} of them")


def folders(recipe: Recipe) -> list[Path]:
    """Folders of solutions among those to practise on."""
    return [path for path in recipe.tasks.train if holds_solutions(path)]


def read(recipe: Recipe) -> DecidedWork:
    """The decided attempts that the recipe names.

    Raises:
        RecipeError: none, fewer than two, all with one reward, or attempts of other weights than the recipe's.
        RunError: a folder that cannot be read.
    """
    rollouts: list[Rollout] = []
    verdicts: dict[str, Verdict] = {}
    for path in folders(recipe):
        run = RunDir.open(path)
        _refuse_other_weights(recipe, run)
        own = {verdict.rollout_id: verdict for _, _, verdict in run.read("verdicts", Verdict)}
        rollouts += [each for _, _, each in run.read("rollouts", Rollout) if each.id in own]
        verdicts |= own
    _refuse_equal([verdicts[each.id].reward for each in rollouts if verdicts[each.id].status == "graded"])
    return DecidedWork(tuple(rollouts), verdicts)


def _refuse_equal(rewards: Sequence[float]) -> None:
    if not rewards:
        raise RecipeError(
            "stages has 'solutions', but tasks.train names no folder with decided ones; `woodshed solve` keeps them in "
            "runs/solve-POLICY"
        )
    if len(set(rewards)) < 2:
        raise RecipeError(
            f"the {len(rewards)} decided solutions all have reward {rewards[0]:g}, and learning needs a difference: "
            "go on with `woodshed solve`, or imitate accepted ones (sft.imitate)"
        )


def _refuse_other_weights(recipe: Recipe, run: RunDir) -> None:
    """Raise RecipeError where solutions are not of the policy that the recipe starts from."""
    known = run.recipe()
    theirs = {"model": known.get("model", ""), "adapter": known.get("adapter", "")}
    ours = {"model": recipe.policy.model, "adapter": recipe.policy.adapter}
    for name, value in theirs.items():
        if str(value) != str(ours[name]):
            raise RecipeError(
                f"{run.path} holds solutions of {name} = {value!r}, and the policy has {str(ours[name])!r}: attempts "
                f"of other weights say nothing about these; set policy.{name} = {value!r}"
            )
