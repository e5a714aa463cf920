"""Lock files of uv, poetry, pdm and PEP 751: the versions and commits that a team tests with.

They bound what pip chooses. A version that cannot be had for the Python at hand is let go, with the reason.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from packaging.utils import canonicalize_name
from packaging.version import InvalidVersion, Version

from woodshed.records import TaskError
from woodshed.synthesis.configuration import read_toml, table
from woodshed.synthesis.written_sources import git_address

NAMES = ("uv.lock", "poetry.lock", "pdm.lock", "pylock.toml")
LEAST_PYTEST = Version("7")


@dataclass(frozen=True)
class Lock:
    """Versions of one lock file; empty where there is none."""

    name: str = ""
    versions: dict[str, str] = field(default_factory=dict)
    """Of distributions that a package index has, one version each."""
    addresses: dict[str, str] = field(default_factory=dict)
    """Of git, with the commit."""


def read(*folders: Path | None) -> Lock:
    """The lock file of the first folder that has one. One that cannot be read counts as none."""
    for path in (folder / name for folder in folders if folder for name in NAMES):
        if path.is_file():
            try:
                return _lock(path)
            except TaskError:
                continue
    return Lock()


def _lock(path: Path) -> Lock:
    entries = list(_packages(read_toml(path)))
    count = Counter(name for name, _ in entries)
    versions, addresses = dict[str, str](), dict[str, str]()
    for name, entry in entries:
        address = _address(entry)
        if address:
            addresses[name] = address
        elif count[name] == 1 and _is_released(
            name, entry
        ):  # of several versions a marker chooses: pip does, too
            versions[name] = entry["version"]
    return Lock(path.name, versions, addresses)


def _packages(content: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    listed = content.get("package") or content.get("packages")
    for entry in listed if isinstance(listed, list) else []:
        if isinstance(entry, dict) and isinstance(entry.get("name"), str):
            yield canonicalize_name(entry["name"]), entry


def _is_released(name: str, entry: dict[str, Any]) -> bool:
    """True for a version of a package index that the tests can run with."""
    source = table(entry, "source")
    is_local = {"editable", "virtual", "directory", "path", "url"} & source.keys()
    is_local = (
        is_local or source.get("type") in ("directory", "file", "url") or {"path", "url"} & entry.keys()
    )
    try:
        version = Version(entry["version"])
    except (InvalidVersion, KeyError, TypeError):
        return False
    return not is_local and (name != "pytest" or version >= LEAST_PYTEST)


def _address(entry: dict[str, Any]) -> str:
    """The address of git with the commit, as uv, poetry, pdm and PEP 751 write it; "" for all others."""
    source = table(entry, "source")
    if isinstance(source.get("git"), str):  # uv: "https://host/name?rev=main&subdirectory=x#COMMIT"
        place, _, commit = source["git"].partition("#")
        place, _, query = place.partition("?")
        parts = dict(part.partition("=")[::2] for part in query.split("&"))
        return git_address(place, commit, parts.get("subdirectory", ""))
    if source.get("type") == "git":
        commit = source.get("resolved_reference") or source.get("reference")
        return git_address(source.get("url"), commit, source.get("subdirectory", ""))
    vcs = table(entry, "vcs")
    place, commit = vcs.get("url") or entry.get("git"), vcs.get("commit-id") or entry.get("revision")
    return git_address(place, commit, vcs.get("subdirectory") or entry.get("subdirectory") or "")
