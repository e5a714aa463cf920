"""Arms of an experiment: one recipe, and by name the few settings in which each arm differs.

    [arms]
    rl = ["feedback.weight=0"]
    kl-live = ["feedback.teacher=live"]

Each arm and seed is a run of its own, `NAME-ARM-SEED`, so it is started, killed, resumed and read like any other.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from woodshed import settings
from woodshed.records import RecipeError
from woodshed.stages.recipe import Recipe


def names(path: Path, overrides: Sequence[str] = ()) -> tuple[str, ...]:
    """The arms of a recipe, in its order.

    Raises:
        RecipeError: the recipe cannot be read, or names none.
    """
    known = tuple(settings.read(Recipe, path, overrides).arms)
    if not known:
        raise RecipeError(
            f'{path} names no arms; add a table [arms] with lines such as rl = ["feedback.weight=0"]'
        )
    return known


def arm(path: Path, name: str, overrides: Sequence[str] = ()) -> Recipe:
    """The recipe of one arm: the file, then the arm's settings, then `overrides`.

    Raises:
        RecipeError: no such arm, or settings that cannot be.
    """
    base = settings.read(Recipe, path, overrides)
    if name not in base.arms:
        known = f"it has {', '.join(base.arms)}" if base.arms else "it names none"
        raise RecipeError(f"{path} has no arm {name!r}; {known}")
    chosen = settings.read(Recipe, path, [*base.arms[name], *overrides])
    return chosen.model_copy(update={"name": f"{base.name}-{name}-{chosen.seed}"})
