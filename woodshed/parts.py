"""Parts that a recipe names: one of Woodshed's own from a table, or one of the user's as `package.module:name`.

A field of settings that names a part is annotated with a `Part`. Reading settings looks at the form of the name and
imports nothing, so a run folder from anywhere can be read, graded and reported. `check` imports what a recipe names;
only commands that start or go on with a run call it, on the recipe that the person gave them. Nothing is imported from
inside a run folder, nor from a folder that is no package: a run is data, whoever made it.
"""

from __future__ import annotations

import difflib
import functools
import importlib
import inspect
import re
import sys
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.machinery import PathFinder
from pathlib import Path
from typing import Any, Generic, TypeVar, get_args

from pydantic import BaseModel, GetCoreSchemaHandler
from pydantic_core import CoreSchema, core_schema

from woodshed.records import RecipeError, WoodshedError

T = TypeVar("T")

_IMPORT_PATH = re.compile(r"[^\W\d]\w*(\.[^\W\d]\w*)*:[^\W\d]\w*")


@dataclass(frozen=True, eq=False)
class Part(Generic[T]):
    """A place that a named part can take. In `Annotated[str, Part(...)]` it checks the form of the name."""

    kind: str
    """A noun for messages, such as "detector"."""
    known: Mapping[str, T]
    """Woodshed's own parts by name."""
    like: Callable[..., Any] | None = None
    """A function that takes what the part must take, or a Protocol whose methods it must have; by default the first
    of the known ones."""

    def resolve(self, name: str) -> T:
        """The part of this name.

        Raises:
            RecipeError: see `resolve`.
        """
        return resolve(self.kind, name, self.known, self.like)

    def form(self, name: str) -> str:
        """`name`, where it is known or has the form of an import path.

        Raises:
            ValueError: it is neither; says which name is near.
        """
        if name in self.known or _IMPORT_PATH.fullmatch(name):
            return name
        near = difflib.get_close_matches(name, self.known, n=1, cutoff=0.5)
        hint = f"did you mean {near[0]!r}?" if near else f"known are {', '.join(self.known) or 'none'}."
        raise ValueError(f"no {self.kind} {name!r}; {hint} One of your own is named package.module:name")

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        return core_schema.no_info_after_validator_function(self.form, handler(source))


def resolve(kind: str, name: str, known: Mapping[str, T], like: Callable[..., Any] | None = None) -> T:
    """The part of this name: from the table, or imported from the working folder or an installed package.

    Args:
        kind: a noun for messages.
        like: as `Part.like`.

    Raises:
        RecipeError: no such name, module or attribute; the module raises while it is imported; the part cannot be
            called as parts of its kind are.
    """
    try:
        Part(kind, known).form(name)
    except ValueError as error:
        raise RecipeError(str(error)) from None
    if name in known:
        return known[name]
    part = _imported(kind, name)
    wanted = like or next(iter(known.values()), None)
    if wanted is not None and (fault := misfit(part, wanted)):
        raise RecipeError(f"{kind} {name!r} {fault}")
    return part


def check(settings: BaseModel) -> None:
    """Import every part of the user's own that these settings name, so that a mistake is found before the work.

    Raises:
        RecipeError: see `resolve`.
    """
    for part, name in _named(settings):
        part.resolve(name)


def own(settings: BaseModel) -> tuple[str, ...]:
    """Import paths of the user's own parts that these settings name; nothing is imported."""
    return tuple(dict.fromkeys(name for part, name in _named(settings) if name not in part.known))


@contextmanager
def blamed() -> Iterator[None]:
    """Turn what a part of the user's own raises at work into one message that names the part, the file and the line.

    Raises:
        RecipeError: an error that came out of an imported part. Errors of Woodshed's own go on as they are.
    """
    try:
        yield
    except WoodshedError:
        raise
    except (Exception, SystemExit) as error:
        frames = [f for f in traceback.extract_tb(error.__traceback__) if f.filename in _used]
        if not frames:
            raise
        parts_of_file, last = _used[frames[0].filename], frames[-1]
        named = next((parts_of_file[f.name] for f in frames if f.name in parts_of_file), None)
        named = named or " or ".join(dict.fromkeys(parts_of_file.values()))
        said = f"{type(error).__name__}: {error}".rstrip(": ")
        raise RecipeError(f"{named} failed: {said} ({last.filename}, line {last.lineno})") from error


def wrong_result(kind: str, name: str, result: Any, wanted: str) -> RecipeError:
    """The error of a part that returned something else than its protocol says."""
    shown = repr(result)
    shown = shown if len(shown) <= 80 else f"{shown[:77]}..."
    return RecipeError(f"{kind} {name!r} returned {shown}; it must return {wanted}")


_used: dict[str, dict[str, str]] = {}
"""File of an imported part to its attributes, each with the kind and the name that a message gives it."""


def _named(settings: BaseModel) -> Iterator[tuple[Part[Any], str]]:
    for field_name, field in type(settings).model_fields.items():
        value = getattr(settings, field_name)
        items = value if isinstance(value, tuple | dict) else (value,)
        for item in items:
            if isinstance(item, BaseModel):
                yield from _named(item)
            elif isinstance(item, str):
                yield from ((part, item) for part in _markers(field.annotation, *field.metadata))


def _markers(annotation: Any, *metadata: Any) -> Iterator[Part[Any]]:
    yield from (marker for marker in metadata if isinstance(marker, Part))
    for argument in get_args(annotation):
        yield from _markers(argument, *getattr(argument, "__metadata__", ()))


@functools.cache
def _imported(kind: str, name: str) -> Any:
    """An attribute of a module. The working folder comes last, so that nothing in it hides an installed package."""
    module_name, _, attribute = name.partition(":")
    here = str(Path.cwd())
    if here not in sys.path:
        sys.path.append(here)
    importlib.invalidate_caches()
    _refuse_run_folder(kind, name, Path(here))
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        missing = error.name or ""
        if missing != module_name and not module_name.startswith(f"{missing}."):
            raise _broken(kind, name, error) from error
        raise RecipeError(
            f"{kind} {name!r}: there is no module {missing!r} in {here} or among the installed packages; start in the "
            "folder that holds it, or install it"
        ) from None
    except (Exception, SystemExit) as error:
        raise _broken(kind, name, error) from error
    if not hasattr(module, attribute):
        own = [key for key in vars(module) if not key.startswith("_")]
        near = difflib.get_close_matches(attribute, own, n=1, cutoff=0.5) or own[-8:]
        raise RecipeError(
            f"{kind} {name!r}: {module.__file__ or module_name} has no {attribute!r}; "
            f"it has {', '.join(near) or 'nothing'}"
        )
    _used.setdefault(module.__file__ or "", {})[attribute] = f"{kind} {name!r}"
    return getattr(module, attribute)


def _refuse_run_folder(kind: str, name: str, here: Path) -> None:
    """Look for a module without importing anything, and refuse one that came with somebody's run.

    Raises:
        RecipeError: it lies in a run folder, or in a folder of the working folder that is no package, as `runs` is.
    """
    top, *below = name.partition(":")[0].split(".")
    if (spec := PathFinder.find_spec(top)) is None:
        return
    packages = [Path(location) for location in spec.submodule_search_locations or ()]
    places = [package.joinpath(*below) for package in packages] or [Path(spec.origin or here)]
    for folder in (folder for place in places for folder in (place, *place.parents)):
        if (folder / "manifest.json").is_file() and (folder / "recipe.toml").is_file():
            raise RecipeError(
                f"{kind} {name!r} lies in the run folder {folder}, and nothing is imported from a run, which may be "
                "somebody else's: read it, copy it to a folder of your own and start there"
            )
    if spec.loader is None and here / top in packages:
        raise RecipeError(
            f"{kind} {name!r}: {here / top} is a folder and no package, so nothing is imported from it; name a module "
            f"of {here}, or make it a package of your own with an __init__.py"
        )


def _broken(kind: str, name: str, error: BaseException) -> RecipeError:
    frame = traceback.extract_tb(error.__traceback__)[-1]
    file, line = frame.filename, frame.lineno
    if isinstance(error, SyntaxError):
        file, line = error.filename or file, error.lineno
    said = f"{type(error).__name__}: {getattr(error, 'msg', error)}".rstrip(": ")
    return RecipeError(
        f"{kind} {name!r} cannot be imported: {said} ({file}, line {line}); correct that first"
    )


def misfit(part: Any, like: Any) -> str:
    """The reason for which a part cannot stand where `like` does: a function, its signature, or a Protocol; "" where it
    can."""
    if not isinstance(like, type):
        return _miscall(part, like)
    if isinstance(part, type):
        return f"is a class; name an object of it, such as one made by {part.__name__}() at the end of its module"
    for name in getattr(like, "__annotations__", ()):
        if not hasattr(part, name):
            return f"has no {name!r}, which {like.__name__} asks for"
    for name, method in vars(like).items():
        if name == "__call__" and (fault := _miscall(part, method, bound=True)):
            return fault
        if name.startswith("_") or not (callable(method) or isinstance(method, property)):
            continue
        if not hasattr(part, name):
            return f"has no {name!r}, which {like.__name__} asks for"
        if callable(method) and (fault := _miscall(getattr(part, name), method, bound=True)):
            return f"has a {name!r} that {fault}"
    return ""


def _miscall(part: Any, like: Callable[..., Any] | inspect.Signature, *, bound: bool = False) -> str:
    """Why a function cannot be called with the arguments of another, or ""."""
    signature = like if isinstance(like, inspect.Signature) else inspect.signature(like)
    parameters = list(signature.parameters.values())[bound:]
    positional = [p.name for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    keywords = [p.name for p in parameters if p.kind is p.KEYWORD_ONLY]
    wanted = ", ".join([*positional, *(["*", *keywords] if keywords else [])])
    if not callable(part):
        return f"is {part!r}, which cannot be called; it must take ({wanted})"
    try:
        signature = inspect.signature(part)
    except ValueError:  # a builtin that does not say
        return ""
    try:
        signature.bind(*positional, **dict.fromkeys(keywords))
    except TypeError as error:
        return f"takes {signature}, and it is called with ({wanted}): {error}"
    return ""
