"""Sources that a project writes out for its requirements: folders beside it, members of its workspace, git, URLs.

Read are the tables of uv, poetry and pdm. What carries such a source is never looked up in a package index.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from packaging.utils import canonicalize_name

from woodshed.records import TaskError
from woodshed.synthesis.configuration import read_toml, table

WORKSPACE = "its workspace"
PDM = re.compile(
    r"(?:-e\s+)?(?P<url>(?:git\+|file:)[^#\s]+)#egg=(?P<name>[\w.-]+)(?:\[[^]]*\])?(?P<more>&\S+)?"
)
"""A requirement of pdm's dev-dependencies that names a place."""
ROOT = re.compile(r"file:/*(?:workspace/|\$\{PROJECT_ROOT\}/|(?=\.))|\{root:uri\}/")
"""Placeholders of the project's own folder in a file address: hatch's and pdm's, settled in a sandbox or not."""


def written(tree: Path) -> dict[str, str]:
    """Canonical names of requirements to their places: a relative path, WORKSPACE, or an address ("git+https://...",
    "https://....whl")."""
    try:
        tools = table(read_toml(tree / "pyproject.toml"), "tool")
    except TaskError:
        return {}
    tables = [table(tools, "uv", "sources"), table(tools, "poetry", "dependencies")]
    tables += [table(tools, "poetry", "dev-dependencies")]
    tables += [table(group, "dependencies") for group in table(tools, "poetry", "group").values()]
    found = dict[str, str]()
    for name, entries in (item for each in tables for item in each.items()):
        for source in entries if isinstance(entries, list) else [entries]:
            if place := _place(table(source)):
                found.setdefault(canonicalize_name(name), place)
    for name, place in _of_pdm(tools):
        found.setdefault(canonicalize_name(name), place)
    return found


def _place(source: dict[str, Any]) -> str:
    texts = {key: value for key, value in source.items() if isinstance(value, str)}
    if source.get("workspace") is True:
        return WORKSPACE
    if "path" in texts:
        return texts["path"]
    if "git" in texts:
        revision = texts.get("rev") or texts.get("tag") or texts.get("branch")
        return git_address(texts["git"], revision, texts.get("subdirectory"))
    return texts.get("url", "")


def git_address(place: Any, revision: Any, folder: Any) -> str:
    """An address of git as requirements have it: "git+ssh://git@host/owner/name@REV" for "git@host:owner/name"."""
    if not isinstance(place, str) or not place:
        return ""
    if "://" not in place and re.match(r"[^/]+@[^/]+:", place):
        place = f"ssh://{place.replace(':', '/', 1)}"
    elif place.startswith("/"):
        place = f"file://{place}"
    address = place if place.startswith("git+") else f"git+{place}"
    return address + (f"@{revision}" if revision else "") + (f"#subdirectory={folder}" if folder else "")


def _of_pdm(tools: dict[str, Any]) -> Iterator[tuple[str, str]]:
    groups = table(tools, "pdm", "dev-dependencies").values()
    for text in (text for group in groups if isinstance(group, list) for text in group):
        if isinstance(text, str) and (line := PDM.fullmatch(text.strip())):
            yield (
                line["name"],
                relative(line["url"]) or line["url"] + (line["more"] or "").replace("&", "#", 1),
            )


def relative(address: str) -> str:
    """The path, relative to the project, that a file address of it stands for; "" for all others."""
    inner = ROOT.match(address)
    return address[inner.end() :] or "." if inner else ""
