"""Names that exist inside a repository: its distributions, its modules, and whatever else a requirement may mean.

What carries such a name is never fetched from a package index, where a stranger may have taken the name.
"""

from __future__ import annotations

import ast
import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from packaging.utils import canonicalize_name

from woodshed.pysource import syntax
from woodshed.records import TaskError
from woodshed.synthesis.configuration import read_ini, read_text, read_toml, table
from woodshed.tasks.folder import is_protected

DESCRIPTIONS = ("pyproject.toml", "setup.cfg", "setup.py")
SOURCES = (".", "src", "lib", "python")
"""Folders of a project's modules, below its own folder."""
ASIDE = {"doc", "docs", "example", "examples", "benchmark", "benchmarks"}
"""Folders whose modules nobody imports by these names."""
MOST_FOLDERS = 200_000
NOT_OURS = {"node_modules", "site-packages", "__pycache__"}


@dataclass(frozen=True)
class Siblings:
    """Projects inside a repository, by the canonical name that a requirement would have."""

    homes: dict[str, str] = field(default_factory=dict)
    """Distributions, and modules that can be imported, to the folder that goes on Python's path for them."""
    elsewhere: dict[str, str] = field(default_factory=dict)
    """The same, of what was not fetched: the rest of a larger repository, and paths that the project names."""
    alike: frozenset[str] = frozenset()
    """Every folder and module, however deep: enough to advise nobody to install something of the name."""

    def place(self, name: str) -> str:
        """Folder of the project with this name; "" if the repository has none."""
        name = canonicalize_name(name)
        return self.homes.get(name) or self.elsewhere.get(name, "")


def siblings(tree: Path, own: str, beyond: Iterable[tuple[str, str]] = ()) -> Siblings:
    """All names of a tree, without the project's own.

    Args:
        beyond: names, with their places, of the repository that the tree is a part of.
    """
    ours, homes, elsewhere = canonicalize_name(own), dict[str, str](), dict[str, str]()
    for name, root in names(tree):
        if name != ours:
            homes.setdefault(name, root)
    for name, location in (*beyond, *_local_sources(tree)):
        if name != ours and name not in homes:
            elsewhere.setdefault(name, location)
    alike = {canonicalize_name(path.name.removesuffix(".py")) for path in _walk(tree)}
    return Siblings(homes, elsewhere, frozenset(alike))


def names(tree: Path, without: Path | None = None) -> Iterator[tuple[str, str]]:
    """Canonical names of distributions and modules of a tree, each with the folder below it to import from."""
    projects = {tree} | {path.parent for path in _walk(tree, without) if path.name in DESCRIPTIONS}
    for project in sorted(projects):
        roots = [project / source for source in SOURCES if (project / source).is_dir()]
        usual = home_of(tree, project.relative_to(tree).as_posix())
        for name in sorted({_declared(project / name) for name in DESCRIPTIONS} - {""}):
            yield canonicalize_name(name), usual
        for path in sorted(path for root in roots for path in root.iterdir() if path != without):
            inner = path.relative_to(tree).as_posix()
            is_module = path.suffix == ".py" and path.name not in DESCRIPTIONS
            is_module = is_module or (path / "__init__.py").is_file()
            is_skipped = is_protected(inner) or is_protected(f"{inner}/x.py") or ASIDE & {*Path(inner).parts}
            if is_module and not is_skipped:
                yield (
                    canonicalize_name(path.name.removesuffix(".py")),
                    path.parent.relative_to(tree).as_posix(),
                )


def projects(tree: Path) -> list[tuple[str, str]]:
    """Folders below the root that describe a distribution, with its name ("" where that is not written out)."""
    found = dict[str, str]()
    for path in _walk(tree):
        place = path.parent.relative_to(tree).as_posix()
        if (
            path.name in DESCRIPTIONS
            and place != "."
            and not {*ASIDE, "tests", "test"} & {*Path(place).parts}
        ):
            name = _declared(path)
            if name or path.name != "pyproject.toml":
                found[place] = found.get(place) or name
    return sorted(found.items())


def is_described(tree: Path) -> bool:
    """True if a tree says how to build it; a pyproject.toml may only hold settings of tools."""
    if (tree / "setup.py").is_file() or (tree / "setup.cfg").is_file():
        return True
    whole = read_toml(tree / "pyproject.toml")
    return any(part in whole for part in ("project", "build-system")) or any(
        tool in table(whole, "tool") for tool in ("poetry", "flit")
    )


def home_of(tree: Path, project: str) -> str:
    """The folder of a project that goes on Python's path; "" where it lies outside the tree."""
    folder = (tree / project).resolve()
    folder = folder / "src" if (folder / "src").is_dir() else folder
    home = tree.resolve()
    return folder.relative_to(home).as_posix() if folder.is_relative_to(home) else ""


def dependencies(tree: Path, root: str) -> list[str]:
    """Requirements of the project that is imported from a folder, from its pyproject.toml."""
    project = tree / root
    project = project if (project / "pyproject.toml").is_file() or project.name != "src" else project.parent
    try:
        listed = table(read_toml(project / "pyproject.toml"), "project").get("dependencies")
    except TaskError:
        return []
    return [text for text in listed if isinstance(text, str)] if isinstance(listed, list) else []


def enclosing(folder: Path) -> list[tuple[str, str]]:
    """Names, with their places, in the rest of the repository that a folder lies in: one of git, or a workspace."""
    for top in folder.parents if not (folder / ".git").exists() else ():
        if (top / ".git").exists() or _is_workspace(top):
            return [(name, os.path.relpath(top / root, folder)) for name, root in names(top, folder)]
    return []


def _walk(tree: Path, without: Path | None = None) -> Iterator[Path]:
    """Folders, Python files and descriptions of a tree, without what is another repository or an environment inside."""
    for count, (folder, inner, files) in enumerate(os.walk(tree)):
        if count > MOST_FOLDERS:
            return
        folder_path = Path(folder)
        inner[:] = sorted(
            name
            for name in inner
            if not name.startswith(".")
            and name not in NOT_OURS
            and folder_path / name != without
            and not (folder_path / name / ".git").is_dir()
            and not (folder_path / name / "pyvenv.cfg").exists()
        )
        yield from (folder_path / name for name in inner)
        yield from (folder_path / name for name in files if name.endswith(".py") or name in DESCRIPTIONS)


def _declared(path: Path) -> str:
    """The distribution's name in a description; "" where it says none, or cannot be read."""
    name: Any = ""
    if path.name == "pyproject.toml":
        try:
            content = read_toml(path)
        except TaskError:
            return ""
        tools = table(content, "tool")
        tables = [table(content, "project"), table(tools, "poetry"), table(tools, "flit", "metadata")]
        name = next((t["name"] for t in tables if "name" in t), "") or tables[2].get("dist-name", "")
    elif path.name == "setup.cfg":
        name = read_ini(path).get("metadata", "name", fallback="")
    elif path.is_file():
        name = _in_setup(read_text(path))
    return name if isinstance(name, str) else ""


def _in_setup(text: str) -> str:
    """`name` of the call of `setup`, written there or in a variable."""
    try:
        tree = syntax.parse(text)
    except (SyntaxError, ValueError, RecursionError):
        return ""
    values: dict[str, ast.expr] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
            values[node.targets[0].id] = node.value
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and ast.unparse(node.func).rpartition(".")[2] == "setup":
            for keyword in node.keywords:
                value = keyword.value
                value = values.get(value.id, value) if isinstance(value, ast.Name) else value
                if keyword.arg == "name" and isinstance(value, ast.Constant):
                    return str(value.value)
    return ""


def _local_sources(tree: Path) -> Iterator[tuple[str, str]]:
    """Requirements for which pyproject.toml names a path, or the workspace that they are of."""
    tools = table(read_toml(tree / "pyproject.toml"), "tool")
    tables = [table(tools, "uv", "sources"), table(tools, "poetry", "dependencies")]
    tables += [table(group, "dependencies") for group in table(tools, "poetry", "group").values()]
    for name, entries in (item for source_table in tables for item in source_table.items()):
        for source in entries if isinstance(entries, list) else [entries]:
            if table(source).get("workspace") is True:
                yield canonicalize_name(name), "its workspace"
            elif isinstance(table(source).get("path"), str):
                yield canonicalize_name(name), source["path"]


def _is_workspace(folder: Path) -> bool:
    try:
        tools = table(read_toml(folder / "pyproject.toml"), "tool")
    except TaskError:
        return False
    return any("workspace" in table(tools, tool) for tool in ("uv", "rye", "hatch", "pixi"))
