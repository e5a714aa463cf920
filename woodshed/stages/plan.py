"""The stages of a recipe, in order, and the places in which a stage makes no sense.

A stage is a function `run(session, state)`: it takes the policy as the stage before left it, and leaves it trained. One
of anybody's own is named by its import path; its metrics and checkpoints stand under the last part of the module's
name (`state.stage`). It is not run again by a resume once it, or a stage after it, has saved a checkpoint.
Over several ranks it reaches the policy through `session.trainer` and `session.worker` only.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

from woodshed.learning.checkpoint import TrainState
from woodshed.records import RecipeError, Task
from woodshed.runs.folder import RunDir
from woodshed.stages import distill, evaluate, rl, sft, solutions
from woodshed.stages.recipe import STAGE, Recipe, stage_label
from woodshed.stages.session import Session

Run = Callable[[Session, TrainState], None]

KNOWN: Mapping[str, Run] = {
    "sft": sft.run,
    "distill": distill.run,
    "solutions": solutions.run,
    "rl": rl.run,
    "evaluate": evaluate.run,
}
RESERVED = ("train", "eval", "effort", "earlier", "before")
"""Labels under which records or checkpoints of other things stand."""


@dataclass(frozen=True)
class Stage:
    """A stage in its place."""

    label: str
    run: Run
    steps_before: int
    """Optimizer steps of earlier stages since the run's first evaluation, 0 for stages before it."""


def plan(recipe: Recipe) -> list[Stage]:
    """Resolve the stages that a recipe lists.

    Raises:
        RecipeError: a stage that is unknown, cannot be imported or called, or stands where it cannot do anything.
    """
    functions = [KNOWN[name] if name in KNOWN else STAGE.resolve(name) for name in recipe.stages]
    _refuse_places(recipe)
    stages: list[Stage] = []
    measured_from = None
    taken = 0
    for name, run in zip(recipe.stages, functions, strict=True):
        if measured_from is None and name in ("rl", "evaluate"):
            measured_from = taken
        stages.append(Stage(stage_label(name), run, 0 if measured_from is None else taken - measured_from))
        taken += steps_of(recipe, name)
    return stages


def steps_of(recipe: Recipe, name: str) -> int:
    """Optimizer steps of a stage; a stage of one's own counts as one."""
    if name == "evaluate":
        return 0
    return getattr(recipe, name).steps if name in KNOWN and name != "solutions" else 1


def prepare(recipe: Recipe, run: RunDir, practice: Sequence[Task], heldout: Sequence[Task]) -> None:
    """Read what the stages will read, so that a mistake is told before the model is loaded.

    Raises:
        RecipeError: a stage has nothing to learn from, or a file of its cannot be read.
    """
    if "sft" in recipe.stages:
        sft.prepare(recipe, run, heldout)
    if "solutions" in recipe.stages:
        solutions.read(recipe)
    if "distill" in recipe.stages:
        distill.prepare(recipe, run, practice)


def _refuse_places(recipe: Recipe) -> None:
    names = recipe.stages
    if not any(name != "evaluate" for name in names):
        raise RecipeError(
            f"stages = {list(names)} trains nothing; name sft, distill or rl, or measure a model with `woodshed eval`"
        )
    labels = [stage_label(name) for name in names if name != "evaluate"]
    for label in labels:
        if labels.count(label) > 1:
            raise RecipeError(
                f"stages = {list(names)} has {label!r} {labels.count(label)} times, and a run keeps a stage's records "
                "under its label; give it all its steps at once, or start a second run from the policy of the first "
                "(policy.adapter)"
            )
        if label in RESERVED or not label.isidentifier():
            raise RecipeError(f"stages: {label!r} cannot be the name of a stage's module; choose another one")
    for first, second in pairwise(names):
        if {first, second} <= {"rl", "evaluate"}:
            raise RecipeError(
                f"stages = {list(names)}: {second!r} right after {first!r} measures the same weights twice, as rl "
                "measures before and after itself; leave 'evaluate' out there"
            )
    if (
        "evaluate" in names
        and not recipe.tasks.heldout
        and not (recipe.tasks.train and recipe.tasks.heldout_share)
    ):
        raise RecipeError(
            "stages has 'evaluate', but there are no tasks to measure on; set tasks.heldout, or tasks.heldout_share "
            "above 0"
        )
