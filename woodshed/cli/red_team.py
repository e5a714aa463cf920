"""`woodshed tasks attack`: generated attacks on the graders of tasks."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Annotated

import typer

from woodshed.cli.app import OUT_FILE, keeping, tasks_app
from woodshed.cli.tasks import Provider, TaskFolders, sandbox_provider
from woodshed.cli.terminal import progress_bars, say, say_columns
from woodshed.records import RecipeError

Graders = Annotated[
    str,
    typer.Option(
        help="Separated by commas: grade (what training and evaluation use), decoys (without isolation), isolation "
        "(without decoys), neither, shipped (tests/test.sh)."
    ),
]


@tasks_app.command("attack")
def attack_tasks(
    folders: TaskFolders,
    variants: Annotated[int, typer.Option(min=1, help="Attacks, as even over kinds as possible.")] = 100,
    seed: Annotated[int, typer.Option(help="Seed of the choice of attacks.")] = 0,
    graders: Graders = "grade,decoys,isolation,neither",
    jobs: Annotated[int, typer.Option(min=1, help="Attacks graded at the same time.")] = 2,
    out: Annotated[
        Path | None, typer.Option(metavar="FILE", help="JSON file with every grading.", **OUT_FILE)
    ] = None,
    sandbox: Provider = "bubblewrap",
) -> None:
    """Plant generated attacks in tasks and see who pays for them.

    Prints, by kind of attack, how many each grader paid. Exits with 1 if `grade` or `shipped` paid for one.
    """
    from woodshed import red_team
    from woodshed.runs import machine
    from woodshed.tasks import folder

    chosen = graders.split(",")
    if unknown := set(chosen) - set(red_team.GRADERS):
        raise RecipeError(f"no grader {sorted(unknown)[0]!r}; there are {', '.join(red_team.GRADERS)}")
    planned = red_team.plan(folder.load_set(*folders), variants, seed)
    campaign = red_team.Campaign(sandbox_provider(sandbox))
    with keeping("nothing is kept without --out"), progress_bars() as progress:
        graded = list(red_team.run(planned, campaign, graders=chosen, jobs=jobs, progress=progress))
    rows = red_team.count_by_kind(graded)
    shown = [{key: str(value) for key, value in row.items() if not key.startswith("of ")} for row in rows]
    say_columns([list(shown[0]), *(list(row.values()) for row in shown)])
    say(f"attacks that each grader paid for, of {len(planned)} drawn with seed {seed}")
    paid = [one for one in graded if one.reward > 0 and one.grader in red_team.BELIEVED]
    for one in paid:
        say(f"PAID {one.reward:.2f} by {one.grader}: {one.attack} on {one.task}")
    if out is not None:
        report = {"seed": seed, "rows": rows, "gradings": [dataclasses.asdict(one) for one in graded]}
        out.write_text(json.dumps({**report, "machine": machine.describe()}, indent=1) + "\n", "utf-8")
    if paid:
        raise typer.Exit(1)
