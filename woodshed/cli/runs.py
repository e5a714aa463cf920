"""`woodshed doctor`, `train`, `report`, `view` and `export`: what happens to a run from before it begins."""

from __future__ import annotations

import sys
import webbrowser
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from woodshed.cli.app import (
    OUT_FILE,
    Overrides,
    app,
    describe,
    keeping,
    name_servers,
    open_variant,
    say_costs,
    say_own_parts,
    say_run,
)
from woodshed.cli.terminal import progress_bars, say, say_next, tell
from woodshed.records import RunError

if TYPE_CHECKING:
    from woodshed.runs.folder import RunDir
    from woodshed.stages.recipe import Recipe


@app.command("doctor")
def examine(
    endpoint: Annotated[str, typer.Option(help="Also try an OpenAI-compatible server at this URL.")] = "",
) -> None:
    """Say what this machine can do, and what to do about each 'no'."""
    from woodshed import doctor

    usable = True
    for check, is_needed in doctor.examine(endpoint=endpoint):
        say(f"{'yes' if check.ok else 'no ':4} {check.name:12} {check.detail}")
        if not check.ok:
            say(f"{'':17} -> {check.remedy}")
            usable = usable and not is_needed
    if not usable:
        raise typer.Exit(1)
    say_next(
        "woodshed tasks make pypi:toolz==1.2.0 --out tasks/quickstart --limit 16 --operators stub "
        "--set max_body_lines=4"
    )


@app.command()
def train(
    recipe: Annotated[
        str | None, typer.Argument(metavar="RECIPE", help="A TOML file, for example recipes/quickstart.toml.")
    ] = None,
    overrides: Overrides = None,
    resume: Annotated[Path | None, typer.Option(metavar="RUN", help="Go on with this run.")] = None,
    variant: Annotated[
        str, typer.Option(help="A variant of the recipe's [variants]; the run is NAME-VARIANT-SEED.")
    ] = "",
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print the resolved recipe and stop.")] = False,
) -> None:
    """Train a policy by a recipe.

    It goes through the stages that the recipe lists: supervised fine-tuning (sft), distillation from demonstrations
    (distill), and RL with feedback in words (rl), measured on held-out tasks before and after. A run that was
    stopped, by Ctrl-C or worse, goes on with --resume.
    """
    if (recipe is None) == (resume is None):
        raise typer.BadParameter("name a recipe, or a run with --resume RUN (which keeps its own recipe)")
    from woodshed import report, settings
    from woodshed.runs.folder import RunDir
    from woodshed.stages import preflight, variants
    from woodshed.stages.recipe import Recipe

    if resume is not None:
        run, chosen = open_run(resume)
    else:
        path, given = Path(recipe or ""), overrides or []
        chosen = variants.recipe_of(path, variant, given) if variant else settings.read(Recipe, path, given)
        say_own_parts(chosen)
        preflight.refuse(chosen)
        for warning in preflight.warnings(chosen):
            tell(f"warning: {warning}")
        if dry_run:
            say(chosen.to_toml().rstrip())
            option = ["--variant", variant] if variant else []
            say_next(" ".join(["woodshed train", str(recipe), *option, *given]))
            return
        name_servers(given)
        run = RunDir.create(chosen.runs / chosen.name, recipe=chosen.to_toml(), manifest=describe(chosen))
    run_stages(run, chosen, is_new=resume is None)
    say_run(run)
    say_costs(run)
    say(f"report: {report.write(run)}")
    say_next(f"woodshed report {run.path} --open")


def open_run(path: Path) -> tuple[RunDir, Recipe]:
    """Open and lock a run of training that goes on, by its own recipe.

    Raises:
        RunError: no such run, an evaluation, or a run that another process holds.
    """
    from woodshed import settings
    from woodshed.runs.folder import RunDir
    from woodshed.stages.recipe import Recipe

    run = RunDir.open(path)
    if run.recipe() and run.is_evaluation:
        raise RunError(f"{path} is an evaluation; go on with `{run.resuming}`")
    chosen = settings.read(Recipe, path / "recipe.toml")
    say_own_parts(chosen)
    run.lock()
    return run, chosen


def run_stages(run: RunDir, chosen: Recipe, *, is_new: bool) -> None:
    """Run the stages of a recipe in its folder, with progress bars and trackers."""
    from woodshed.evals import tracking
    from woodshed.train import train as train_by

    if chosen.note:
        say(chosen.note)
    with (
        keeping(f"go on with: {run.resuming}", run, is_new=is_new),
        tracking.following(run, chosen.tracking),
        progress_bars() as progress,
    ):
        if not is_new:
            noted = say_changes(run, chosen)
            if not noted and (run.path / "policy").is_dir():
                tell(f"{run.path} is finished: nothing is left to do, and its results are")
                return
        train_by(chosen, run, progress)


def say_changes(run: RunDir, chosen: Recipe) -> list[str]:
    """Note and say in what a run goes on otherwise than it was; the same notes.

    Raises:
        RunError: it may not.
    """
    from woodshed.evals import changes
    from woodshed.learning import checkpoint

    newest = checkpoint.latest(run, chosen.stage_labels)
    state = checkpoint.read_position(newest) if newest else checkpoint.TrainState(chosen.stage_labels[0])
    # attempts of later steps, as a deleted checkpoint leaves them, are of weights that a change would make others
    taken = state.step if state.stage == "rl" else 0
    is_behind = any(phase == "train" and step > taken for phase, step, _ in run.batches("rollouts"))
    allowed = changes.FREE if is_behind else changes.NOTED
    notes = changes.accept(run, chosen, allowed=allowed, stage=state.stage, taken=state.step)
    for note in notes:
        say(f"changed {note}")
    return notes


@app.command("variants")
def run_variants(
    recipe: Annotated[str, typer.Argument(metavar="RECIPE", help="A TOML file with a table [variants].")],
    overrides: Overrides = None,
    only: Annotated[
        str, typer.Option(help="Variants to run, with commas; by default all, in their order.")
    ] = "",
    seeds: Annotated[str, typer.Option(help="Seeds of each variant, with commas.")] = "0",
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Check every variant's settings and stop.")
    ] = False,
) -> None:
    """Run the variants of an experiment and compare them.

    One run after the other, each in a process of its own; what is finished is not made again, and what was stopped
    goes on. Then a table: before, after and change of every variant, and every variant against the first.
    """
    from woodshed.cli.variants import run_all, say_variants
    from woodshed.stages import variants

    path, given = Path(recipe), overrides or []
    known = variants.names(path, given)
    chosen = [name.strip() for name in only.split(",")] if only else list(known)
    recipes = {
        name: [variants.recipe_of(path, name, [*given, f"seed={seed}"]) for seed in seeds.split(",")]
        for name in chosen
    }
    if dry_run:
        for name, several in recipes.items():
            for each in several:
                extra = " ".join([*given, f"seed={each.seed}"])
                say(f"{each.runs / each.name}: woodshed train {recipe} --variant {name} {extra}")
        return
    run_all(path, recipes, given)
    say_variants(recipes)


@app.command("report")
def make_report(
    runs: Annotated[
        list[str],
        typer.Argument(
            metavar="RUN", help="Run folders; several seeds of one variant may be joined by commas."
        ),
    ],
    out: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE", help="By default report.html in the run, or beside several runs.", **OUT_FILE
        ),
    ] = None,
    open_: Annotated[bool, typer.Option("--open", help="Show it in the browser.")] = False,
) -> None:
    """Write a readable page of one or several runs.

    Figures with intervals, costs, curves, tasks and every transcript with its hints. Variants stand side by side; runs
    that differ in their seed only are one variant, and so are runs that commas join. One file, nothing is fetched.
    Works while a run is going on. Exits with 1 where records could not be read, or nothing was measured yet.
    """
    from woodshed import report

    variants, problems = [open_variant(variant) for variant in runs], []
    path = report.write(
        *(variant if len(variant) > 1 else variant[0] for variant in variants), path=out, problems=problems
    )
    first = variants[0][0]
    if len(variants) == len(variants[0]) == 1:
        say_run(first)
    say(f"report: {path}")
    for problem in problems:
        tell(problem)
    if not open_:
        say_next(f"woodshed view {first.path}")
    elif not webbrowser.open(path.resolve().as_uri()):
        tell(f"no browser can be opened here; open {path} in one")
    if problems:
        raise typer.Exit(1)


@app.command("view")
def view_run(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="A run folder, for example runs/quickstart.")],
) -> None:
    """Browse a run in the terminal.

    Rollouts, turns, hints and what the probabilities say, with the keys of the report; works over ssh.
    """
    from woodshed.report.view import view
    from woodshed.runs.folder import RunDir

    kept = RunDir.open(run)
    if not (sys.stdin.isatty() and sys.stdout.isatty()):
        raise typer.BadParameter(f"view needs a terminal; `woodshed report {run}` writes a page of the same")
    view(kept)


@app.command("export")
def export_run(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="A run folder.")],
    to: Annotated[
        str, typer.Option(metavar="FORM", help="atif: trajectories; hf: a Hugging Face model directory.")
    ],
    out: Annotated[
        Path | None, typer.Option(help="Folder that receives it; by default RUN/atif or RUN/hf.")
    ] = None,
) -> None:
    """Write a run for others.

    Trajectories as ATIF v1.8, or the final policy as a model directory with a card. Exits with 1 where some records
    could not be read and were left out.
    """
    from woodshed.runs.folder import RunDir

    if to not in ("atif", "hf"):
        raise typer.BadParameter(f"--to {to}: woodshed exports to atif or hf")
    kept, target, problems = RunDir.open(run), out or run / to, []
    if to == "atif":
        from woodshed.evals import atif

        say(f"{atif.export(kept, target, problems=problems)} trajectories in {target}")
        if Path("scripts/validate-atif").is_file():
            say_next(f"scripts/validate-atif {target}")
    else:
        from woodshed.learning import export

        say(f"model: {export.export(kept, target, problems=problems)}")
        if (measured := kept.path / "tasks" / "heldout").is_dir() and any(measured.iterdir()):
            say_next(f"woodshed eval {measured} --model {target}")
    for problem in problems:
        tell(f"left out: {problem}")
    if problems:
        raise typer.Exit(1)
