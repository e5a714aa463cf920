"""Parts that a recipe names: one of Woodshed's own from a table, or one of the user's as `package.module:name`.

A field of settings that names a part is annotated with a `Part`. Reading settings looks at the form of the name and
imports nothing, so a run folder from anywhere can be read, graded and reported. `check` imports what a recipe names;
only commands that start or go on with a run call it, on the recipe that the person gave them.
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
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, TypeVar, get_args

from pydantic import BaseModel, GetCoreSchemaHandler
from pydantic_core import CoreSchema, core_schema

from woodshed.records import RecipeError

T = TypeVar("T")

_IMPORT_PATH = re.compile(r"[^\W\d]\w*(\.[^\W\d]\w*)*:[^\W\d]\w*")


@dataclass(frozen=True)
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
        hint = f"did you mean {near[0]!r}?" if near else f"known are {', '.join(self.known) or 'none'}"
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
    if wanted is not None and (fault := _misfit(part, wanted)):
        raise RecipeError(f"{kind} {name!r} {fault}")
    return part


def check(settings: BaseModel) -> None:
    """Import every part of the user's own that these settings name, so that a mistake is found before the work.

    Raises:
        RecipeError: see `resolve`.
    """
    for part, name in _named(settings):
        part.resolve(name)


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
    return getattr(module, attribute)


def _broken(kind: str, name: str, error: BaseException) -> RecipeError:
    frame = traceback.extract_tb(error.__traceback__)[-1]
    file, line = frame.filename, frame.lineno
    if isinstance(error, SyntaxError):
        file, line = error.filename or file, error.lineno
    said = f"{type(error).__name__}: {getattr(error, 'msg', error)}".rstrip(": ")
    return RecipeError(
        f"{kind} {name!r} cannot be imported: {said} ({file}, line {line}); correct that first"
    )


def _misfit(part: Any, like: Any) -> str:
    """Why a part cannot stand where `like` does, or ""."""
    if not isinstance(like, type):
        return _miscall(part, like)
    if isinstance(part, type):
        return f"is a class; name an object of it, such as one made by {part.__name__}() at the end of its module"
    for name, method in vars(like).items():
        if name.startswith("_") or not (callable(method) or isinstance(method, property)):
            continue
        if not hasattr(part, name):
            return f"has no {name!r}, which {like.__name__} asks for"
        if callable(method) and (fault := _miscall(getattr(part, name), method, bound=True)):
            return f"has a {name!r} that {fault}"
    return ""


def _miscall(part: Any, like: Callable[..., Any], *, bound: bool = False) -> str:
    """Why a function cannot be called with the arguments of another, or ""."""
    parameters = list(inspect.signature(like).parameters.values())[bound:]
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
