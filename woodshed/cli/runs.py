"""`woodshed doctor`, `variants`, `report`, `view` and `export`: runs and their results."""

from __future__ import annotations

import shlex
import sys
import webbrowser
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from woodshed.cli.app import (
    OUT_FILE,
    Overrides,
    app,
    open_variant,
    say_run,
)
from woodshed.cli.terminal import say, say_next, tell

if TYPE_CHECKING:
    pass


@app.command("doctor")
def examine(
    endpoint: Annotated[str, typer.Option(help="Also check an OpenAI-compatible server at this URL.")] = "",
) -> None:
    """Check what this machine supports, with a remedy for everything that is missing."""
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
        "max_body_lines=4"
    )


@app.command("variants")
def run_variants(
    recipe: Annotated[str, typer.Argument(metavar="RECIPE", help="A TOML file with a table [variants].")],
    overrides: Overrides = None,
    only: Annotated[str, typer.Option(help="Variants to run, separated by commas; by default all.")] = "",
    seeds: Annotated[str, typer.Option(help="Seeds of each variant, separated by commas.")] = "0",
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Check every variant's settings, print its command and stop.")
    ] = False,
) -> None:
    """Run the variants of an experiment and compare them.

    Runs are made one after another; finished ones are skipped, stopped ones are resumed. Then prints a table with
    before, after and change of every variant, and every variant against the first.
    """
    from woodshed.cli.variants import run_all, say_variants
    from woodshed.stages import variants

    path, assignments = Path(recipe), overrides or []
    known = variants.names(path, assignments)
    chosen = [name.strip() for name in only.split(",")] if only else list(known)
    recipes = {
        name: [variants.recipe_of(path, name, [*assignments, f"seed={seed}"]) for seed in seeds.split(",")]
        for name in chosen
    }
    if dry_run:
        for name, several in recipes.items():
            for each in several:
                words = ["woodshed", "train", recipe, "--variant", name, *assignments, f"seed={each.seed}"]
                say(f"{each.runs / each.name}: {shlex.join(words)}")
        return
    run_all(path, recipes, assignments)
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
            metavar="FILE",
            help="Output file; by default report.html in the run, or beside several runs.",
            **OUT_FILE,
        ),
    ] = None,
    open_: Annotated[bool, typer.Option("--open", help="Open it in the browser.")] = False,
) -> None:
    """Write an HTML report of one or several runs.

    It has figures with intervals, costs, curves, tasks and every transcript with its hints, in one file that loads
    nothing from the network. Runs that differ only in their seed count as one variant, and so do runs joined by
    commas. A run may still be going on. Exits with 1 if records could not be read, or nothing was measured yet.
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
    if not open_ and len(variants) == 1:
        say_next(shlex.join(["woodshed", "view", str(first.path)]))
    elif not open_:
        say_next(shlex.join(["woodshed", "eval", "compare", *runs[:2]]))
    elif not webbrowser.open(path.resolve().as_uri()):
        tell(f"no browser can be opened here; open {path} in one")
    if problems:
        raise typer.Exit(1)


@app.command("view")
def view_run(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="A run folder, for example runs/quickstart.")],
) -> None:
    """Browse a run in the terminal.

    Shows rollouts, turns, hints and token probabilities, with the same keys as the report. Works over ssh.
    """
    from woodshed.report.view import view
    from woodshed.runs.folder import RunDir

    run_dir = RunDir.open(run)
    if not (sys.stdin.isatty() and sys.stdout.isatty()):
        raise typer.BadParameter(f"view needs a terminal; `woodshed report {run}` writes the same as a page")
    view(run_dir)


@app.command("export")
def export_run(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="A run folder.")],
    to: Annotated[
        str, typer.Option(metavar="FORMAT", help="atif: trajectories; hf: Hugging Face folder of the policy.")
    ],
    out: Annotated[
        Path | None, typer.Option(help="Folder that receives it; by default RUN/atif or RUN/hf.")
    ] = None,
) -> None:
    """Export a run: trajectories (ATIF v1.8), or the final policy as a Hugging Face folder with a model card.

    Exits with 1 if some records could not be read and were left out.
    """
    from woodshed.runs.folder import RunDir

    if to not in ("atif", "hf"):
        raise typer.BadParameter(f"--to {to}: known formats are atif and hf")
    run_dir, target, problems = RunDir.open(run), out or run / to, []
    if to == "atif":
        from woodshed.evals import atif

        say(f"{atif.export(run_dir, target, problems=problems)} trajectories in {target}")
        if Path("scripts/validate-atif").is_file():
            say_next(shlex.join(["scripts/validate-atif", str(target)]))
    else:
        from woodshed.learning import export

        say(f"model: {export.export(run_dir, target, problems=problems)}")
        if (measured := run_dir.path / "tasks" / "heldout").is_dir() and any(measured.iterdir()):
            say_next(shlex.join(["woodshed", "eval", str(measured), "--model", str(target)]))
    for problem in problems:
        tell(f"left out: {problem}")
    if problems:
        raise typer.Exit(1)
