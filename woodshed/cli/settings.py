"""`woodshed settings`: an explanation of a recipe's settings."""

from __future__ import annotations

import textwrap
from typing import Annotated

import typer

from woodshed.cli.app import app
from woodshed.cli.terminal import say


@app.command()
def settings(
    words: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="NAME", help="A setting, a section, or words in the name or text of settings."
        ),
    ] = None,
    markdown: Annotated[bool, typer.Option("--markdown", help="Print docs/settings.md.")] = False,
) -> None:
    """Explain the settings of a recipe: values, units, default, and what the default was chosen on.

    For example: woodshed settings feedback.teacher
    """
    from woodshed.cli import reference
    from woodshed.stages.recipe import Recipe

    if markdown:
        say(reference.page(Recipe).rstrip())
        return
    found = reference.matching(Recipe, words or [])
    if not found:
        raise typer.BadParameter(
            f"no setting has {' and '.join(words or [])} in its name or text; fewer words find more"
        )
    for each in found:
        say(f"{each.name} = {each.default}   ({each.values})")
        say(textwrap.indent(textwrap.fill(each.text, 92), "    "))
        if each.chosen_on:
            say(textwrap.indent(textwrap.fill(f"Default chosen on {each.chosen_on}", 92), "    "))
