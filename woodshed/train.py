"""From a recipe to a trained policy: its stages, in order.

Resumes from whatever the run folder holds: a stage that is finished is not run again, one that was stopped goes on.
"""

from __future__ import annotations

from contextlib import closing

from woodshed.learning import checkpoint
from woodshed.learning.checkpoint import TrainState
from woodshed.runs.folder import RunDir
from woodshed.stages import preflight
from woodshed.stages.plan import plan, prepare
from woodshed.stages.recipe import Recipe
from woodshed.stages.session import Progress, newest_checkpoint, open_session
from woodshed.stages.task_sets import task_sets


def train(recipe: Recipe, run: RunDir, progress: Progress) -> None:
    """Run the stages of a recipe and write the policy.

    Raises:
        WoodshedError: bad tasks, weights or settings, a full disk. The run folder stays resumable.
    """
    preflight.refuse(recipe)
    practice, heldout = task_sets(recipe, run, progress)
    preflight.refuse_tasks(recipe, practice, heldout)
    prepare(recipe, run, practice, heldout)
    session = open_session(recipe, run, practice, heldout, progress)
    with closing(session):
        stages = plan(recipe)
        newest = newest_checkpoint(session)
        reached = checkpoint.read_position(newest) if newest else None
        first = recipe.stage_labels.index(reached.stage) if reached else 0
        for stage in stages[first:]:
            stage.run(session, reached or TrainState(stage.label, 0, stage.steps_before))
            reached = None
    checkpoint.export(run, session.policy, dtype=recipe.policy.export_dtype)
