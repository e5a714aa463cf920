"""Reference of a recipe's settings, made from their classes: for the terminal, and for docs/settings.md."""

from __future__ import annotations

import json
import re
import textwrap
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import get_origin

import tomli_w
from pydantic import BaseModel
from pydantic.fields import FieldInfo

from woodshed.settings import Settings, classes, values_of


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
    chosen_on: str = ""
    """Evidence for the default; "" for a judgement."""

    @property
    def whole(self) -> str:
        """Text and evidence in one line."""
        return f"{self.text} Default chosen on {self.chosen_on}" if self.chosen_on else self.text


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
            said, _, evidence = _line(field.description).partition(" Chosen on ")
            own.append(DescribedSetting(dotted, _default(field), values_of(dotted, field), said, evidence))
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
        "finds settings by their names and texts. A default that was chosen on a measurement says so; the others are "
        "judgements. This page is made from the code by `woodshed settings --markdown`.\n",
    ]
    for section in sections(kind):
        parts.append(f"## {section.heading or 'Outside of sections'}\n\n{section.text}\n")
        for each in section.settings:
            parts.append(f"- `{each.name} = {each.default}`: {each.values}. {each.whole}")
        parts.append("")
    return "\n".join(parts).rstrip() + "\n"


def matching(kind: type[BaseModel], words: list[str]) -> list[DescribedSetting]:
    """The setting or section of that name, else the settings whose name or text holds every word; all without words."""
    everything = [each for section in sections(kind) for each in section.settings]
    if len(words) == 1:
        named = [each for each in everything if each.name == words[0]]
        inside = [each for each in everything if each.name.startswith(f"{words[0].strip('[]')}.")]
        if named or inside:
            return named or inside
    return [
        each for each in everything if all(w.lower() in f"{each.name} {each.text}".lower() for w in words)
    ]


def commented(chosen: Settings, notes: Mapping[str, str] | None = None, always: Collection[str] = ()) -> str:
    """The settings that are not the usual ones, as TOML, each under a comment.

    Args:
        notes: dotted name of a setting to why it has its value, or of a section to a line about it; a setting
            without one is described as everywhere. None writes no comments.
        always: as of `Settings.differing`.
    """
    described = {each.name: each for section in sections(type(chosen)) for each in section.settings}
    lines, section = [], ""
    for line in tomli_w.dumps(chosen.differing(always)).splitlines():
        heading, key = re.fullmatch(r"\[+([\w.-]+)\]+", line), re.match(r"([\w-]+) = ", line)
        section = f"{heading[1]}." if heading else section
        name = section.removesuffix(".") if heading else f"{section}{key[1]}" if key else ""
        if notes is not None and name:
            known = f"{described[name].text} ({described[name].values})" if name in described else ""
            text = notes.get(name, known)
            lines += textwrap.wrap(text, 100, initial_indent="# ", subsequent_indent="# ")
        lines.append(line)
    return "\n".join(lines) + "\n"


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
