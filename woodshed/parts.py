"""Parts of a run by name: those that ship with Woodshed, and anybody's own as `package.module:name`."""

from __future__ import annotations

import difflib
import importlib
from collections.abc import Mapping
from typing import TypeVar, cast

from woodshed.records import RecipeError

T = TypeVar("T")


def resolve(kind: str, name: str, known: Mapping[str, T]) -> T:
    """The part of a name: one of `known`, or what an import path such as `my_package.my_module:part` leads to.

    Args:
        kind: the word for such a part in messages, for example "stage".

    Raises:
        RecipeError: names the value and the way out, for an unknown name, and for a path that cannot be imported or
            that leads to nothing callable.
    """
    if name in known:
        return known[name]
    module, colon, attribute = name.partition(":")
    if not colon:
        near = difflib.get_close_matches(name, known, n=1, cutoff=0.5)
        hint = f"did you mean {near[0]!r}? " if near else ""
        raise RecipeError(
            f"unknown {kind} {name!r}; {hint}Known are {', '.join(known)}; your own is named by its import path, "
            "package.module:name"
        )
    try:
        found = getattr(importlib.import_module(module), attribute)
    except ImportError as error:
        raise RecipeError(
            f"{kind} {name!r} cannot be imported: {error}. The folder that holds {module.partition('.')[0]!r} must be "
            "installed or on PYTHONPATH"
        ) from None
    except AttributeError:
        raise RecipeError(f"{kind} {name!r}: module {module} has no {attribute!r}") from None
    except Exception as error:  # whatever a module of somebody's own raises while it is imported
        raise RecipeError(
            f"{kind} {name!r}: importing {module} raised {type(error).__name__}: {error}"
        ) from error
    if not callable(found):
        raise RecipeError(f"{kind} {name!r} is {found!r}; a {kind} must be a function or a class")
    return cast("T", found)
