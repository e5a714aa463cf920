"""Names that exist inside a repository: its distributions, its modules, and whatever else a requirement may mean.

What carries such a name is never fetched from a package index, where a stranger may have taken the name.
"""

from __future__ import annotations

import ast
import hashlib
import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from packaging.utils import canonicalize_name

from woodshed.pysource import syntax
from woodshed.records import TaskError
from woodshed.synthesis import locks
from woodshed.synthesis.configuration import read_ini, read_text, read_toml, table
from woodshed.synthesis.locks import Lock
from woodshed.synthesis.written_sources import written
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
    addresses: dict[str, str] = field(default_factory=dict)
    """Requirements for which the project writes out an address of git or a URL: from there, and from nowhere else."""
    nested: dict[str, str] = field(default_factory=dict)
    """The same names as `homes`, with the folders of their projects."""
    alike: frozenset[str] = frozenset()
    """Every folder and module, however deep: enough to advise nobody to install something of the name."""
    origin: Origin | None = None
    """The place that the project was taken from; what lies elsewhere in the repository is at hand there."""
    lock: Lock = field(default_factory=Lock)

    def place(self, name: str) -> str:
        """Folder of the project with this name; "" if the repository has none."""
        name = canonicalize_name(name)
        return self.homes.get(name) or self.elsewhere.get(name, "")

    @property
    def root(self) -> Path | None:
        """The folder of the larger repository that the project is a part of; None where it is the whole."""
        limit = self.origin.limit if self.origin else None
        return limit if self.origin and limit != self.origin.folder else None

    def holds(self, name: str) -> bool:
        """True for a name that no package index may be asked for."""
        return bool(self.place(name)) or canonicalize_name(name) in self.addresses

    def source(self, name: str) -> str:
        """The address to build a wheel of this name from: a file address of its folder, git or a URL; "" if none."""
        name = canonicalize_name(name)
        if name in self.addresses:
            return self.addresses[name]
        return self.at(self.elsewhere.get(name) or self.nested.get(name, ""))

    def at(self, place: str) -> str:
        """File address of a project, or a wheel or an sdist, at a place relative to this one; "" if it is not there."""
        found = self.origin.at(place) if self.origin and place else None
        return found.as_uri() if found else ""


@dataclass(frozen=True)
class Origin:
    """A folder on this machine that a repository was copied from."""

    folder: Path
    limit: Path | None = None
    """The whole repository, outside of which nothing is taken; None where nobody says where that ends."""
    is_ours: bool = True
    """False where it was fetched: its addresses name nothing on this machine."""

    def at(self, place: str) -> Path | None:
        """A described project, or a file to install, at a relative place; None where there is none."""
        if Path(place).is_absolute():
            return None
        path = (self.folder / place).resolve()
        if self.limit and not path.is_relative_to(self.limit.resolve()):
            return None
        if path.is_file():
            return path if path.name.endswith((".whl", ".tar.gz", ".zip")) else None
        return path if path.is_dir() and is_described(path) else None


def is_of_this_machine(address: str) -> bool:
    return address.startswith(("file:", "git+file:"))


def siblings(
    tree: Path, own: str, beyond: Iterable[tuple[str, str]] = (), origin: Origin | None = None
) -> Siblings:
    """All names of a tree, without the project's own.

    Args:
        beyond: names, with their places, of the repository that the tree is a part of.
    """
    ours, homes, nested, elsewhere = (
        canonicalize_name(own),
        dict[str, str](),
        dict[str, str](),
        dict[str, str](),
    )
    for name, root, place in names(tree):
        if name != ours:
            homes.setdefault(name, root)
            nested.setdefault(name, place)
    root = Siblings(origin=origin).root
    lock, listed = locks.read(tree, root), written(tree)
    if root:  # a workspace's root says it for its members
        listed = {name: place for name, place in written(root).items() if "://" in place} | listed
    listed |= lock.addresses
    addresses = {n: place for n, place in listed.items() if "://" in place and n not in homes and n != ours}
    if origin is None or not origin.is_ours:
        addresses = {n: place for n, place in addresses.items() if not is_of_this_machine(place)}
    for name, location in (*beyond, *listed.items()):
        if name != ours and name not in homes and name not in addresses:
            elsewhere.setdefault(name, location)
    alike = {canonicalize_name(path.name.removesuffix(".py")) for path in _walk(tree)}
    return Siblings(homes, elsewhere, addresses, nested, frozenset(alike), origin, lock)


def names(tree: Path, without: Path | None = None) -> Iterator[tuple[str, str, str]]:
    """Canonical names of distributions and modules of a tree, each with the folder below it to import from, and that of
    its project."""
    for project in _projects(tree, without):
        place = project.relative_to(tree).as_posix()
        for name in sorted({_declared(project / name) for name in DESCRIPTIONS} - {""}):
            yield canonicalize_name(name), home_of(tree, place), place
    yield from modules(tree, without)


def _projects(tree: Path, without: Path | None) -> list[Path]:
    return sorted({tree} | {path.parent for path in _walk(tree, without) if path.name in DESCRIPTIONS})


def modules(tree: Path, without: Path | None = None) -> Iterator[tuple[str, str, str]]:
    """The same of modules and packages at the top of a project, or of its folder of sources."""
    for project in _projects(tree, without):
        place = project.relative_to(tree).as_posix()
        roots = [project / source for source in SOURCES if (project / source).is_dir()]
        for path in sorted(path for root in roots for path in root.iterdir() if path != without):
            inner = path.relative_to(tree).as_posix()
            is_module = path.suffix == ".py" and path.name not in DESCRIPTIONS
            is_module = is_module or (path / "__init__.py").is_file()
            is_skipped = is_protected(inner) or is_protected(f"{inner}/x.py") or ASIDE & {*Path(inner).parts}
            if is_module and not is_skipped:
                yield (
                    canonicalize_name(path.name.removesuffix(".py")),
                    path.parent.relative_to(tree).as_posix(),
                    place,
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


def required_python(tree: Path) -> str:
    """The versions of Python that a project says it needs, poetry's carets read as >=; "" where it says nothing."""
    try:
        whole = read_toml(tree / "pyproject.toml")
    except TaskError:
        return ""
    said = table(whole, "project").get("requires-python")
    poetry = table(whole, "tool", "poetry", "dependencies").get("python")
    said = said or (poetry.replace("^", ">=") if isinstance(poetry, str) else None)
    said = said or read_ini(tree / "setup.cfg").get("options", "python_requires", fallback="")
    return said if isinstance(said, str) else ""


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


def whole(folder: Path) -> Path | None:
    """The repository of git, or the workspace, that a folder is a part of; None if it is one itself, or lies alone."""
    for top in folder.parents if not (folder / ".git").exists() else ():
        if (top / ".git").exists() or is_workspace(top):
            return top
    return None


def surroundings(tree: Path, beside: Iterable[tuple[str, str]], origin: Origin | None) -> str:
    """Hash of what lies around a project and may end up in its environment: the code of its siblings, lock files."""
    if origin is None:
        return ""
    places = {place for _, place in beside} | {
        place for place in written(tree).values() if "://" not in place
    }
    folders = {found for place in places if (found := origin.at(place)) and found.is_dir()}
    files = {path for folder in folders for path in _walk(folder, origin.folder) if path.is_file()}
    files |= {path for name in locks.NAMES if (path := (origin.limit or origin.folder) / name).is_file()}
    total = hashlib.sha256()
    for path in sorted(files):
        digest = hashlib.sha256(path.read_bytes()).hexdigest()
        total.update(f"{os.path.relpath(path, origin.folder)} {digest}\n".encode())
    return total.hexdigest() if files else ""


def limit_of(folder: Path) -> Path | None:
    """The folder outside of which nothing belongs to a project; None where nobody says: its paths may lead anywhere."""
    return folder if (folder / ".git").exists() or is_workspace(folder) else whole(folder)


def enclosing(folder: Path) -> list[tuple[str, str]]:
    """Names in the rest of the repository that a folder lies in, with the places of their projects."""
    top = whole(folder)
    if top is None:
        return []
    return [(name, os.path.relpath(top / place, folder)) for name, _, place in names(top, folder)]


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


def is_workspace(folder: Path) -> bool:
    """True if the root of a workspace of uv, rye, hatch or pixi lies there."""
    try:
        tools = table(read_toml(folder / "pyproject.toml"), "tool")
    except TaskError:
        return False
    tables = [table(tools, tool) for tool in ("uv", "rye", "hatch", "pixi")]
    return any("workspace" in each for each in (*tables, table(tools, "hatch", "envs", "default")))
