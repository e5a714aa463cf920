"""Running the variants of an experiment one after another, and the tables at the end."""

from __future__ import annotations

import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from woodshed.cli.app import Failed, Interrupted
from woodshed.cli.terminal import say, say_columns
from woodshed.runs import machine
from woodshed.runs.folder import RunDir

if TYPE_CHECKING:
    from woodshed.stages.recipe import Recipe


def run_all(path: Path, recipes: Mapping[str, Sequence[Recipe]], overrides: Sequence[str]) -> None:
    """Start or resume each run in a process of its own; skip finished ones.

    Raises:
        Failed: a run failed; earlier ones are kept.
        RunError: a run of one of the names was begun with other settings.
    """
    from woodshed.evals import changes

    for name, several in recipes.items():
        for chosen in several:
            run = chosen.runs / chosen.name
            if (run / "recipe.toml").is_file():
                changes.refuse_other(RunDir.open(run), chosen)
            if (run / "policy").is_dir():
                say(f"{run}: already finished")
                continue
            if (run / "recipe.toml").is_file():
                arguments = ["--resume", str(run)]
            else:
                arguments = [str(path), "--variant", name, *overrides, f"seed={chosen.seed}"]
            say(f"{run}: {machine.command(chosen.layout.world)} train {' '.join(arguments)}")
            again = "finished runs and steps are kept; the same command resumes"
            try:
                done = subprocess.run(
                    [*machine.program(chosen.layout.world), "train", *arguments], check=False
                )
            except KeyboardInterrupt:
                raise Interrupted(again) from None
            if done.returncode == 130:
                raise Interrupted(again)
            if done.returncode:
                raise Failed(f"{run} ended with exit code {done.returncode}; {again}")


def say_variants(recipes: Mapping[str, Sequence[Recipe]]) -> None:
    """Print the tables of the finished runs."""
    from woodshed.evals import variants

    runs = {
        name: [RunDir.open(each.runs / each.name) for each in several] for name, several in recipes.items()
    }
    if len(rows := variants.table(runs)) == 1:
        say("no variant was evaluated both before and after training, so there is nothing to compare")
        return
    for line in variants.conclusions(runs):
        say(line)
    say_columns(rows)
    if rows := variants.against(runs):
        say("")
        say_columns(rows)
