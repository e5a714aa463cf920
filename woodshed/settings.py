"""Strict typed settings: one TOML file, dotted overrides, and 'did you mean' for every mistake.

Each room owns a `Settings` subclass next to the code that reads it; `stages.recipe` composes them. Nothing here
knows any setting by name.
"""

from __future__ import annotations

import difflib
import tomllib
from collections.abc import Collection, Iterable, Iterator, Sequence
from pathlib import Path
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, TypeVar, Union, get_args, get_origin

import annotated_types
import tomli_w
from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, ValidationError
from pydantic.fields import FieldInfo

from woodshed import documents
from woodshed.records import RecipeError


class Settings(BaseModel):
    """Base of all settings: frozen, unknown keys refused, every field described by the docstring under it."""

    model_config = ConfigDict(
        frozen=True, extra="forbid", use_attribute_docstrings=True, validate_default=True, allow_inf_nan=False
    )

    def to_toml(self) -> str:
        """Every setting written out, so that `read` gives it back. TOML knows no null: what is None is left out."""
        return tomli_w.dumps(self.model_dump(mode="json", exclude_none=True))

    def usual(self) -> dict[str, Any]:
        """Values that fields have where nothing is given; a class with presets gives those of the preset at hand."""
        return {
            name: field.get_default(call_default_factory=True)
            for name, field in type(self).model_fields.items()
            if not field.is_required()
        }

    def differing(self, always: Collection[str] = (), prefix: str = "") -> dict[str, Any]:
        """The settings that are not the usual ones, as plain values; sections without any are left out.

        Args:
            always: dotted names of settings that are given whatever they are.
            prefix: in front of the names of these settings, as `always` has them.
        """
        usual, plain = self.usual(), self.model_dump(mode="json", exclude_none=True)
        found: dict[str, Any] = {}
        for name in plain:
            value = getattr(self, name)
            if isinstance(value, Settings) and isinstance(usual.get(name), Settings):
                inner = value.differing(always, f"{prefix}{name}.")
                found |= {name: inner} if inner else {}
            elif name not in usual or value != usual[name] or f"{prefix}{name}" in always:
                found[name] = plain[name]
        return found


def _folder_name(text: str) -> str:
    if "/" in text or not text.strip("."):
        raise ValueError("name one folder: without '/', and not of dots alone")
    return text


def _not_empty(value: Any) -> Any:
    if value == "":
        raise ValueError('name a folder; "." is the working folder')
    return value


KINDS = {bool: "true or false", int: "a whole number", float: "a number", str: "text", Path: "a path"}
UNITS = {
    "s": "seconds",
    "mb": "MiB",
    "tokens": "tokens",
    "chars": "characters",
    "steps": "steps",
    "attempts": "attempts",
    "turns": "turns",
}
"""Units of numbers, by the last word of a setting's name."""
MOST_SHOWN = 120
"""Limit of the characters shown of a wrong value."""
FolderName = Annotated[str, AfterValidator(_folder_name)]
"""The name of a folder in another one."""
FolderPath = Annotated[Path, BeforeValidator(_not_empty)]
"""A folder; an empty text, which would mean the working folder, is refused as a mistake."""

S = TypeVar("S", bound=Settings)


def leaves(kind: type[BaseModel], prefix: str = "") -> Iterator[tuple[str, FieldInfo]]:
    """Every setting that a file can give, by its dotted name, in the order in which they are defined."""
    for name, field in kind.model_fields.items():
        sections = list(classes(field.annotation))
        if not sections:
            yield f"{prefix}{name}", field
        for section in sections:
            yield from leaves(section, f"{prefix}{name}.")


def read(kind: type[S], path: Path | None, overrides: Sequence[str] = ()) -> S:
    """Settings from a TOML file with `section.key=value` overrides applied on top.

    An override's value is read as TOML, and as a plain string where it is not valid TOML ("model=smollm2-135m").

    Raises:
        RecipeError: no such file, not TOML, an unknown key (with the nearest name) or a value of the wrong type.
    """
    tree = _load(path) if path is not None else {}
    for override in overrides:
        _override(tree, override)
    return validate(kind, tree, origin=str(path) if path is not None else "settings")


def changed(chosen: S, overrides: Sequence[str]) -> S:
    """Settings with `section.key=value` overrides applied.

    Raises:
        RecipeError: as `read`.
    """
    tree = chosen.model_dump(mode="json", exclude_none=True)
    for override in overrides:
        _override(tree, override)
    return validate(type(chosen), tree)


def validate(kind: type[S], tree: dict[str, Any], *, origin: str = "settings") -> S:
    """Settings from plain values.

    Raises:
        RecipeError: lists every mistake, one a line.
    """
    try:
        return kind.model_validate(tree)
    except ValidationError as error:
        lines = [_explain(kind, mistake) for mistake in error.errors()]
        raise RecipeError("\n".join([f"{origin}: {lines[0]}", *lines[1:]])) from None


def _load(path: Path) -> dict[str, Any]:
    try:
        return documents.read_toml(path, RecipeError)
    except FileNotFoundError:
        nearby = sorted(p.name for p in path.parent.glob("*.toml")) if path.parent.is_dir() else []
        listing = f"; {path.parent} holds {', '.join(nearby)}" if nearby else ""
        raise RecipeError(f"no recipe at {path}{listing}") from None


def _override(tree: dict[str, Any], override: str) -> None:
    key, equals, text = override.partition("=")
    names = key.strip().split(".")
    if not equals or not all(names):
        raise RecipeError(f"override {override!r} is not of the form section.key=value (rl.steps=4)")
    node: Any = tree
    for name in names[:-1]:
        if isinstance(node, list) and name.isdecimal() and int(name) < len(node):
            node = node[int(name)]  # one of several [[tables]]
        elif isinstance(node, dict):
            node = node.setdefault(name, {})
        if not isinstance(node, dict | list):
            raise RecipeError(f"override {override!r}: {name!r} is a value ({node!r}), not a section")
    if not isinstance(node, dict):
        raise RecipeError(f"override {override!r}: name one of {len(node)} tables by its number, from 0")
    try:
        tomllib.loads(f"value = {text}")
    except tomllib.TOMLDecodeError:
        node[names[-1]] = text.strip()
        return
    except (ValueError, RecursionError):  # TOML, but too long or too deep
        pass
    shown = override if len(override) <= MOST_SHOWN else f"{override[:MOST_SHOWN]}..."
    node[names[-1]] = documents.parse_toml(f"value = {text}", f"override {shown}", RecipeError)["value"]


def values_of(name: str, field: FieldInfo) -> str:
    """The values that a setting takes, in a person's words: "a whole number of tokens, from 1"."""
    words = _words(field.annotation)
    unit = UNITS.get(name.rpartition(".")[2].rpartition("_")[2])
    if unit and words in (KINDS[int], KINDS[float]):
        words += f" of {unit}"
    bounds = {type(bound): bound for bound in field.metadata}
    low, above = bounds.get(annotated_types.Ge), bounds.get(annotated_types.Gt)
    high, below = bounds.get(annotated_types.Le), bounds.get(annotated_types.Lt)
    limits = [f"from {low.ge:g}"] if low else [f"above {above.gt:g}"] if above else []
    limits += [f"to {high.le:g}"] if high else [f"below {below.lt:g}"] if below and below.lt < MANY else []
    words += f", {' '.join(limits)}" if limits else ""
    if least := bounds.get(annotated_types.MinLen):
        words = words.replace("a list", f"a list of at least {least.min_length}", 1)
    return words


MANY = 1 << 60
"""Bounds above it are those of the machine, and tell a person nothing."""


def _words(annotation: Any) -> str:
    arguments = [each for each in get_args(annotation) if each is not NoneType]
    origin = get_origin(annotation)
    if origin is Annotated:
        return _words(arguments[0])
    if origin is Literal:
        return " or ".join(filter(None, (", ".join(arguments[:-1]), arguments[-1])))
    if origin in (Union, UnionType):
        return _words(arguments[0])
    if origin is tuple:
        return f"a list, each {_words(arguments[0])}"
    if origin is dict:
        return f"a table, each value {_words(arguments[1])}"
    return KINDS.get(annotation, "text")


def _explain(kind: type[BaseModel], mistake: Any) -> str:
    *parents, name = mistake["loc"] or ("",)
    dotted = ".".join(str(part) for part in mistake["loc"])
    if mistake["type"] == "missing":
        return f"{dotted} is missing, and has no value by default: {_wanted(kind, mistake)}"
    if mistake["type"] != "extra_forbidden":
        value = repr(mistake["input"])
        shown = value if len(value) <= MOST_SHOWN else f"{value[:MOST_SHOWN]}..."
        # a whole section says nothing about what is wrong in it
        what = dotted if isinstance(mistake["input"], dict) else f"{dotted} = {shown}"
        return f"{what}: {_wanted(kind, mistake)}"
    names = list(_section(kind, parents).model_fields)
    settings = [setting for setting, _ in leaves(kind)]
    known = [*settings, *dict.fromkeys(setting.rpartition(".")[0] for setting in settings)]

    def elsewhere(wanted: Iterable[str]) -> list[str]:
        return [setting for word in wanted for setting in known if setting.rpartition(".")[2] == word][:3]

    close = difflib.get_close_matches(str(name), names, n=1, cutoff=0.5)
    near = elsewhere([str(name)]) or [".".join(map(str, [*parents, each])) for each in close]
    if not near and isinstance(mistake["input"], dict):  # a section that is not here
        near = elsewhere(mistake["input"])
    hint = f"did you mean {' or '.join(map(repr, near))}?" if near else f"known here: {', '.join(names)}"
    return f"unknown setting {dotted!r}; {hint}"


def _wanted(kind: type[BaseModel], mistake: Any) -> str:
    """The reason that a check of ours gave, else the values that the setting takes."""
    message = mistake["msg"].removeprefix("Value error, ")
    own = f"{message[0].lower()}{message[1:]}"
    if mistake["type"] == "value_error":
        return own
    names = [part for part in mistake["loc"] if isinstance(part, str)]
    field = dict(leaves(kind)).get(".".join(names))
    return f"give {values_of(names[-1], field)}" if field is not None else own


def _section(kind: type[BaseModel], parents: Sequence[str | int]) -> type[BaseModel]:
    for parent in parents:
        field = kind.model_fields.get(str(parent))
        for candidate in classes(field.annotation) if field else ():
            kind = candidate
    return kind


def classes(annotation: Any) -> Iterator[type[BaseModel]]:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield annotation
    for argument in get_args(annotation):
        yield from classes(argument)
