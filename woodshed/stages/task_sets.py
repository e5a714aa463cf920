"""The tasks of a run: those to practise on and those to measure with, as its folder keeps them."""

from __future__ import annotations

import functools
import tempfile
from pathlib import Path

from woodshed.monitors import honeypots
from woodshed.records import Task
from woodshed.runs.folder import RunDir
from woodshed.sandbox import SandboxProvider
from woodshed.stages.recipe import Recipe
from woodshed.synthesis import impossible
from woodshed.synthesis.repository_context import Rejected
from woodshed.tasks import folder


def task_sets(recipe: Recipe, run: RunDir) -> tuple[list[Task], list[Task]]:
    """The run's own copies of the tasks to practise on and of those to measure with; made once, read by a resume."""
    kept = [run.path / "tasks" / name for name in ("train", "heldout")]
    if not all(path.is_dir() for path in kept):
        practice, heldout = (
            folder.load_set(*paths) if paths else [] for paths in (recipe.tasks.train, recipe.tasks.heldout)
        )
        if not heldout:
            by_id = sorted(practice, key=lambda task: task.id)
            heldout = by_id[: round(recipe.tasks.heldout_share * len(by_id))]
            practice = [task for task in practice if task not in heldout]
        heldout = sorted(heldout, key=lambda task: task.name)[: recipe.evaluation.limit or None]
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
