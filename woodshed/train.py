"""From a recipe to a trained policy: its stages, in order.

Resumes from whatever the run folder holds: a stage that is finished is not run again, one that was stopped goes on.
"""

from __future__ import annotations

from contextlib import closing

from woodshed.learning import checkpoint, launch
from woodshed.learning.checkpoint import TrainState
from woodshed.learning.launch import Job
from woodshed.learning.layout import shard
from woodshed.learning.policy import Policy
from woodshed.learning.worker import Worker
from woodshed.runs.folder import RunDir
from woodshed.stages import preflight
from woodshed.stages.plan import plan, prepare
from woodshed.stages.recipe import Recipe
from woodshed.stages.session import Progress, Session, newest_checkpoint, open_session
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
    job = Job(recipe.policy, recipe.layout, recipe.seed, run.path.resolve(), run.resuming)
    with launch.leading(job) as commands:
        session = open_session(recipe, run, practice, heldout, progress, commands)
        with closing(session):
            run_stages(session)
        session.worker.export(dtype=recipe.policy.export_dtype)
        session.worker.release()


def run_stages(session: Session) -> None:
    """Run the stages of the recipe from where its run stands."""
    stages, newest = plan(session.recipe), newest_checkpoint(session)
    reached = checkpoint.read_position(newest) if newest else None
    first = session.recipe.stage_labels.index(reached.stage) if reached else 0
    for stage in stages[first:]:
        stage.run(session, reached or TrainState(stage.label, 0, stage.steps_before))
        reached = None


def follow() -> None:
    """Take part in a training that rank 0 of this torchrun leads, to its end.

    Raises:
        WoodshedError: an error of this rank, which no other has told.
    """
    with launch.following() as (job, commands):
        policy, _ = Policy.load(job.policy, seed=job.seed)
        shard(policy, job.layout)
        Worker(policy, RunDir(job.run), commands).follow()
