"""The tasks of a run: those to practise on and those to measure with, as its folder keeps them."""

from __future__ import annotations

import functools
import tempfile
from pathlib import Path

from woodshed.monitors import honeypots
from woodshed.records import Task
from woodshed.runs.folder import RunDir
from woodshed.sandbox import SandboxProvider
from woodshed.solving.keeping import holds_solutions
from woodshed.stages.recipe import Recipe
from woodshed.stages.session import Progress
from woodshed.synthesis import impossible
from woodshed.synthesis.repository_context import Rejected
from woodshed.tasks import folder, targets


def task_sets(
    recipe: Recipe, run: RunDir, progress: Progress = lambda done, total, text: None
) -> tuple[list[Task], list[Task]]:
    """The run's own copies of the tasks to practise on and of those to measure with; made once, read by a resume.

    Raises:
        RecipeError: no task can be held out.
    """
    kept = [run.path / "tasks" / name for name in ("train", "heldout")]
    if not all(path.is_dir() for path in kept):
        tasks = [path for path in recipe.tasks.train if not holds_solutions(path)]
        practice, heldout = (
            folder.load_set(*paths) if paths else [] for paths in (tasks, recipe.tasks.heldout)
        )
        if not heldout:
            known = len(practice)
            practice, heldout = targets.split(practice, recipe.tasks.heldout_share)
            if wide := known - len(practice) - len(heldout):
                progress(0, 0, f"{wide} of {known} tasks are in no set: each removes code of both sets")
        by_name = sorted(heldout, key=lambda task: task.name)
        heldout = targets.sample(by_name, recipe.evaluation.limit, recipe.seed)
        with tempfile.TemporaryDirectory(prefix="woodshed-") as scratch:
            monitors = recipe.monitors
            practice = honeypots.prepare(
                practice,
                Path(scratch),
                functools.partial(_twin, sandboxes=recipe.sandbox.create()),
                baited=monitors.honeypots,
                impossible=monitors.impossible,
                seed=recipe.seed,
            )
            for path, tasks in zip(kept, (practice, heldout), strict=True):
                run.keep_tasks(path.name, [task.folder for task in tasks])
    practice, heldout = (folder.load_set(path) if any(path.iterdir()) else [] for path in kept)
    return practice, heldout


def _twin(task: Task, out: Path, sandboxes: SandboxProvider) -> Task | None:
    try:
        return impossible.contradict(task, out, sandboxes)
    except Rejected:
        return None
