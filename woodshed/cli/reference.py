"""Reference of a recipe's settings, made from their classes: for the terminal, and for docs/settings.md."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

import annotated_types
from pydantic import BaseModel
from pydantic.fields import FieldInfo

from woodshed.settings import classes

WORDS = {bool: "true or false", int: "a whole number", float: "a number", str: "text", Path: "a path"}
BOUNDS = {
    annotated_types.Ge: ("ge", "at least"),
    annotated_types.Gt: ("gt", "above"),
    annotated_types.Le: ("le", "at most"),
    annotated_types.Lt: ("lt", "below"),
}


@dataclass(frozen=True)
class DescribedSetting:
    """One setting, as a person reads it."""

    name: str
    """With its sections: "agent.max_turns"."""
    default: str
    """As TOML writes it, "unset", or "..." where it must be given."""
    values: str
    text: str
    """One line."""


@dataclass(frozen=True)
class DescribedSection:
    """A section of a recipe with its own settings, or the settings outside of any section."""

    heading: str
    """"[agent]", "[[engine.servers]]", or ""."""
    text: str
    settings: tuple[DescribedSetting, ...]


def sections(
    kind: type[BaseModel], name: str = "", heading: str = "", text: str = ""
) -> Iterator[DescribedSection]:
    """Describe a class of settings and the sections in it, in their order.

    Args:
        name, heading, text: of the section that the class is; without a text, its docstring describes it.
    """
    inner, own = [], []
    for key, field in kind.model_fields.items():
        dotted = f"{name}.{key}" if name else key
        found = list(classes(field.annotation))
        if not found:
            own.append(DescribedSetting(dotted, _default(field), _values(field), _line(field.description)))
        for section in found:
            is_several = get_origin(field.annotation) is tuple
            title = f"[[{dotted}]]" if is_several else f"[{dotted}]"
            inner.append((section, dotted, title, _line(field.description)))
    yield DescribedSection(heading, text or _line(kind.__doc__), tuple(own))
    for section, dotted, title, description in inner:
        yield from sections(section, dotted, title, description)


def page(kind: type[BaseModel]) -> str:
    """The reference as Markdown."""
    parts = [
        "# Settings of a recipe\n",
        "A recipe is a TOML file. Any setting can also stand behind it on the command line, as "
        "`agent.max_turns=6`, and has the value shown here where it is left out. `woodshed settings WORD` "
        "finds settings by their names and texts. This page is made from the code by "
        "`woodshed settings --markdown`.\n",
    ]
    for section in sections(kind):
        parts.append(f"## {section.heading or 'Outside of sections'}\n\n{section.text}\n")
        for each in section.settings:
            parts.append(f"- `{each.name} = {each.default}`: {each.values}. {each.text}")
        parts.append("")
    return "\n".join(parts).rstrip() + "\n"


def matching(kind: type[BaseModel], words: list[str]) -> list[DescribedSetting]:
    """The settings whose name or text holds every one of these words; all without words."""
    everything = [each for section in sections(kind) for each in section.settings]
    return [
        each for each in everything if all(w.lower() in f"{each.name} {each.text}".lower() for w in words)
    ]


def _line(text: str | None) -> str:
    return " ".join((text or "").split())


def _default(field: FieldInfo) -> str:
    if field.is_required():
        return "..."
    value = field.get_default(call_default_factory=True)
    if value is None:
        return "unset"
    if isinstance(value, dict):
        return "{ " + ", ".join(f"{key} = {json.dumps(each)}" for key, each in value.items()) + " }"
    return json.dumps(value, default=str)


def _values(field: FieldInfo) -> str:
    words = _words(field.annotation) + (", must be given" if field.is_required() else "")
    for bound in field.metadata:
        if type(bound) in BOUNDS:
            name, said = BOUNDS[type(bound)]
            words += f", {said} {getattr(bound, name)}"
    return words


def _words(annotation: Any) -> str:
    """Kinds of values in a person's words."""
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
        return "a table, each value " + _words(arguments[1])
    return WORDS.get(annotation, "text")
