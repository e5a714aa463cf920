"""`woodshed train`: from a recipe to a trained policy, its stages in order."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from woodshed.cli.app import (
    Overrides,
    app,
    describe,
    keeping,
    name_servers,
    say_costs,
    say_own_parts,
    say_run,
)
from woodshed.cli.terminal import progress_bars, say, say_next, tell
from woodshed.records import RunError
from woodshed.runs import machine
from woodshed.runs.files import remove

if TYPE_CHECKING:
    from woodshed.runs.folder import RunDir
    from woodshed.stages.recipe import Recipe
    from woodshed.stages.session import Progress


DryRun = Annotated[
    bool, typer.Option("--dry-run", help="Print the settings that are not the usual ones, and stop.")
]
Explain = Annotated[bool, typer.Option("--explain", help="The same with a comment above each setting.")]


@app.command()
def train(
    recipe: Annotated[
        str | None, typer.Argument(metavar="RECIPE", help="A TOML file, for example recipes/quickstart.toml.")
    ] = None,
    overrides: Overrides = None,
    resume: Annotated[Path | None, typer.Option(metavar="RUN", help="Resume this run.")] = None,
    variant: Annotated[
        str, typer.Option(help="A variant of the recipe's [variants]; the run is NAME-VARIANT-SEED.")
    ] = "",
    dry_run: DryRun = False,
    explain: Explain = False,
) -> None:
    """Train a policy from a recipe.

    Runs the stages that the recipe lists: supervised fine-tuning (sft), distillation from demonstrations (distill),
    and RL with feedback in words (rl), measured on held-out tasks before and after. --resume RUN resumes a run that
    was stopped; --resume RUN rl.steps=20 also prolongs a finished one.
    """
    changed = [*([recipe] if recipe else []), *(overrides or [])] if resume is not None else []
    if (recipe is None and resume is None) or not all("=" in text for text in changed):
        raise typer.BadParameter("give either a recipe or --resume RUN (a run keeps its own recipe)")
    from woodshed.learning import launch
    from woodshed.runs.folder import RunDir

    if launch.is_follower():
        if not (dry_run or explain):
            take_part()
        return
    if resume is not None:
        run, chosen = open_run(resume, changed)
    else:
        values = overrides or []
        chosen = new_recipe(Path(recipe or ""), variant, values)
        if dry_run or explain:
            option = ["--variant", variant] if variant else []
            say_recipe(chosen, [str(recipe), *option, *values], explain=explain)
            return
        name_servers(values)
        run = RunDir.create(chosen.runs / chosen.name, recipe=chosen.to_toml(), manifest=describe(chosen))
    run_or_resume(run, chosen, is_new=resume is None)
    finish(run)


def finish(run: RunDir) -> None:
    """Print what a run shows and cost, and write its report."""
    from woodshed import report

    say_run(run)
    say_costs(run)
    say(f"report: {report.write(run)}")
    say_next(shlex.join(["woodshed", "report", str(run.path), "--open"]))


def say_recipe(chosen: Recipe, arguments: Sequence[str], *, explain: bool) -> None:
    """Print the settings that are not the usual ones, and the command that trains by them."""
    from woodshed.cli import reference

    say(reference.commented(chosen, {} if explain else None).rstrip())
    say("# The other settings have their usual values: woodshed settings")
    ranks = 1 if chosen.rl.staleness else chosen.layout.world  # the launcher starts them
    say_next(shlex.join([*machine.command(ranks).split(), "train", *arguments]))


def new_recipe(path: Path, variant: str, overrides: Sequence[str]) -> Recipe:
    """Read the recipe of a new run, and print its warnings.

    Raises:
        RecipeError: it cannot be read, or it would train nothing.
    """
    from woodshed import settings
    from woodshed.stages import preflight, variants
    from woodshed.stages.recipe import Recipe

    chosen = (
        variants.recipe_of(path, variant, overrides) if variant else settings.read(Recipe, path, overrides)
    )
    say_own_parts(chosen)
    preflight.refuse(chosen, starts_ranks=chosen.rl.staleness > 0)
    for warning in preflight.warnings(chosen):
        tell(f"warning: {warning}")
    return chosen


def open_run(path: Path, changed: Sequence[str] = ()) -> tuple[RunDir, Recipe]:
    """Open and lock a training run to resume it, with its own recipe and what is changed in it.

    Raises:
        RunError: no such run, an evaluation, or a run that another process holds.
    """
    from woodshed import settings
    from woodshed.runs.folder import RunDir
    from woodshed.stages.recipe import Recipe

    run = RunDir.open(path)
    if run.recipe() and run.is_evaluation:
        raise RunError(f"{path} is an evaluation; resume it with `{run.resuming}`")
    chosen = settings.read(Recipe, path / "recipe.toml", changed)
    say_own_parts(chosen)
    run.lock()
    return run, chosen


def run_or_resume(run: RunDir, chosen: Recipe, *, is_new: bool) -> None:
    """Run the stages of a recipe in its folder, from where the run stands, with progress bars and trackers."""
    from woodshed.evals import tracking

    if chosen.note:
        say(chosen.note)
    with (
        keeping(f"resume with: {run.resuming}", run, is_new=is_new),
        tracking.following(run, "none" if chosen.rl.staleness else chosen.tracking),  # its trainer does
        progress_bars() as progress,
    ):
        if not is_new:
            finished = run.path / "policy"
            if say_changes(run, chosen) and finished.is_dir():
                go_on(run, finished)
            elif finished.is_dir():
                prolong = f"{run.resuming} rl.steps={chosen.rl.steps * 2}"
                tell(
                    f"{run.path} is finished: nothing is left to do (`{prolong}` would prolong it). Its results:"
                )
                return
        with run.timed():
            if chosen.rl.staleness:
                launch_recipe(chosen, run, progress)
            else:
                run_recipe(chosen, run, progress)


def go_on(run: RunDir, finished: Path) -> None:
    """Set the policy of a finished run aside that goes on with other settings: until its end it counts as stopped."""
    earlier = run.path / "policy-earlier"
    remove(earlier)
    finished.rename(earlier)
    tell(f"the policy it had is kept in {earlier}")


def run_recipe(recipe: Recipe, run: RunDir, progress: Progress) -> None:
    """Run the stages of a recipe and write the policy.

    A stage that is finished is not run again, one that was stopped goes on.

    Raises:
        WoodshedError: bad tasks, weights or settings, a full disk. The run folder stays resumable.
    """
    from woodshed.learning import checkpoint, launch
    from woodshed.stages import preflight
    from woodshed.stages.plan import plan, prepare
    from woodshed.stages.session import open_session
    from woodshed.stages.task_sets import task_sets

    preflight.refuse(recipe)
    practice, heldout = task_sets(recipe, run, progress)
    preflight.refuse_tasks(recipe, practice, heldout)
    prepare(recipe, run, practice, heldout)
    job = launch.Job(recipe.policy, recipe.layout, recipe.seed, run.path.resolve(), run.resuming)
    with launch.leading(job) as commands:
        session = open_session(recipe, run, practice, heldout, progress, commands)
        with closing(session):
            newest = checkpoint.latest(run, recipe.stage_labels)
            reached = checkpoint.read_position(newest) if newest else None
            first = recipe.stage_labels.index(reached.stage) if reached else 0
            for stage in plan(recipe)[first:]:
                stage.run(session, reached or checkpoint.TrainState(stage.label, 0, stage.steps_before))
                reached = None
        session.worker.export()
        commands.release()


def launch_recipe(recipe: Recipe, run: RunDir, progress: Progress) -> None:
    """Start the processes that run the stages of a recipe whose attempts are made by a process of their own.

    Raises:
        WoodshedError: bad tasks or settings; or one of them cannot go on. The run folder stays resumable.
    """
    from woodshed.engines.create import starts_servers
    from woodshed.stages import preflight
    from woodshed.stages.asynchronous import launcher, messages
    from woodshed.stages.plan import prepare
    from woodshed.stages.task_sets import task_sets

    preflight.refuse(recipe, starts_ranks=True)
    practice, heldout = task_sets(recipe, run, progress)
    preflight.refuse_tasks(recipe, practice, heldout)
    prepare(recipe, run, practice, heldout)
    messages.prolong(run, recipe.rl.steps)
    if starts_servers(recipe.engine):
        progress(0, 0, f"starting {recipe.engine.kind}, which takes minutes at times")
    with launcher.servers_of(recipe, run) as servers:
        launcher.launch(run, launcher.commands(run, recipe.layout.world, servers), tell)


def take_part() -> None:
    """Take part in a training that rank 0 of this torchrun leads, to its end.

    Raises:
        WoodshedError: an error of this rank, which no other has told.
    """
    from woodshed.learning import launch
    from woodshed.learning.layout import shard
    from woodshed.learning.policy import Policy
    from woodshed.learning.worker import Worker
    from woodshed.runs.folder import RunDir

    with launch.following() as (job, commands):
        policy, _ = Policy.load(job.policy, seed=job.seed, is_whole=False)
        shard(policy, job.layout)
        commands.follow(Worker(policy, RunDir(job.run), commands))


def say_changes(run: RunDir, chosen: Recipe) -> list[str]:
    """Note, print and return the settings that a resumed run changes.

    Raises:
        RunError: a setting may not change.
    """
    from woodshed.evals import changes
    from woodshed.learning import checkpoint

    newest = checkpoint.latest(run, chosen.stage_labels)
    state = checkpoint.read_position(newest) if newest else checkpoint.TrainState(chosen.stage_labels[0])
    # Attempts of later steps remain where a checkpoint was deleted: a change would not be in them.
    steps_taken = state.step if state.stage == "rl" else 0
    ahead = steps_taken + chosen.rl.staleness
    is_behind = any(phase == "train" and step > ahead for phase, step, _ in run.batches("rollouts"))
    allowed = changes.FREE if is_behind else changes.NOTED
    notes = changes.accept(run, chosen, allowed=allowed, stage=state.stage, steps_taken=state.step)
    if notes:
        run.write_text("recipe.toml", chosen.to_toml())  # with what the command line changed
    for note in notes:
        say(f"changed {note}")
    return notes
