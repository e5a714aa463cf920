"""Variants of an experiment: one recipe, and by name the few settings in which each variant differs.

    [variants]
    rl = ["feedback.weight=0"]
    kl-live = ["feedback.teacher=live"]

Each variant and seed is a run of its own, `NAME-VARIANT-SEED`: it is started, killed, resumed and read like any other.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from woodshed import settings
from woodshed.records import RecipeError
from woodshed.stages.recipe import Recipe


def names(path: Path, overrides: Sequence[str] = ()) -> tuple[str, ...]:
    """The variants of a recipe, in its order.

    Raises:
        RecipeError: the recipe cannot be read, or names none.
    """
    known = tuple(settings.read(Recipe, path, overrides).variants)
    if not known:
        raise RecipeError(
            f'{path} names no variants; add a table [variants] with lines such as rl = ["feedback.weight=0"]'
        )
    return known


def recipe_of(path: Path, name: str, overrides: Sequence[str] = ()) -> Recipe:
    """The recipe of one variant: the file, then the variant's settings, then `overrides`.

    Raises:
        RecipeError: no such variant, or settings that cannot be.
    """
    base = settings.read(Recipe, path, overrides)
    if name not in base.variants:
        known = f"it has {', '.join(base.variants)}" if base.variants else "it names none"
        raise RecipeError(f"{path} has no variant {name!r}; {known}")
    chosen = settings.read(Recipe, path, [*base.variants[name], *overrides])
    return chosen.model_copy(update={"name": f"{base.name}-{name}-{chosen.seed}"})
