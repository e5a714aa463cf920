"""Description of a repository by itself: packages, their folders, and requirements of it and its tests.

The metadata comes from a wheel, which the project's own build backend makes inside a sandbox without a network. The
host reads the wheel as data.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from email.message import Message
from pathlib import Path

from packaging.utils import canonicalize_name

from woodshed.records import TaskError
from woodshed.sandbox import BUBBLEWRAP, SandboxProvider
from woodshed.synthesis import requirements
from woodshed.synthesis.builds import BUILD_TIMEOUT_S, built, choice, contents_of, metadata_of, named
from woodshed.synthesis.locks import Lock
from woodshed.synthesis.siblings import Siblings, siblings
from woodshed.synthesis.sources import Repository
from woodshed.tasks import interpreters
from woodshed.tasks.folder import is_protected

NAMESPACE = re.compile(rb"declare_namespace|extend_path")


@dataclass(frozen=True)
class Project:
    """A repository's description of itself."""

    distribution: str
    """"name==version"."""
    packages: tuple[str, ...]
    """Import names that are the distribution's own: of a namespace, the parts that it brings."""
    source_roots: tuple[str, ...]
    paths: tuple[str, ...]
    """Paths of the packages in the tree: folders, or files of single modules."""
    requirements: tuple[str, ...]
    """Of the package itself, with the markers of this machine settled; one with an address ("core @ file:///...") is
    built from there."""
    test_requirements: tuple[str, ...]
    entry_points: str
    generated: tuple[str, ...]
    """Files that the build made and the tree lacked; they are in the tree now."""
    described: tuple[str, ...] = ()
    """Projects in the tree that it requires, by their addresses: their metadata are installed."""
    plugins: tuple[str, ...] = ()
    """Requirements that the configuration of pytest demands."""
    left_out: tuple[str, ...] = ()
    """Requirements that are not installed, each with the reason."""
    python: str = interpreters.OURS
    lock: Lock = field(default_factory=Lock)
    inside: Siblings = field(default_factory=Siblings)
    """Names that are of the repository itself."""


def read(
    repository: Repository, *, timeout_s: float = BUILD_TIMEOUT_S, sandboxes: SandboxProvider = BUBBLEWRAP
) -> Project:
    """Build the metadata in a sandbox and find the packages in the tree; add generated files that it lacks.

    Args:
        timeout_s: for each question to the build backend; there are at most three.

    Raises:
        TaskError: the build fails or does not end, needs something that has no wheel, or leaves no package.
    """
    tree = repository.tree
    contents = contents_of(repository.name, built(repository, timeout_s, sandboxes))
    info, metadata, version = metadata_of(repository.name, contents, repository.python)
    code = {n: c for n, c in contents.items() if not re.match(r"[^/]+\.(dist-info|data)/", n)}
    homes = _locate(tree, code)
    if not homes:
        raise TaskError(
            f"{repository.name}: no package of its wheel was found in the repository{_elsewhere(tree, code)}"
            f"{choice(tree)}"
        )
    generated = _complete(tree, code, homes)
    name = canonicalize_name(metadata["Name"])
    required, inside = _required(repository, metadata, name)
    owned = {part: root for package, root in homes.items() for part in _owned(code, package, name)}
    roots = sorted(set(homes.values()), key=lambda root: (root != ".", root))
    return Project(
        distribution=f"{name}=={version}",
        packages=tuple(sorted(owned)),
        source_roots=tuple(dict.fromkeys([*roots, *required.roots])),
        paths=tuple(sorted(_place(tree, root, package) for package, root in owned.items())),
        requirements=(*required.package, *_for_namespaces(tree, owned)),
        test_requirements=tuple(required.tests),
        generated=tuple(generated),
        entry_points=contents.get(f"{info}/entry_points.txt", b"").decode(errors="replace"),
        described=tuple(dict.fromkeys(required.described)),
        plugins=tuple(required.demanded),
        left_out=tuple(required.left_out),
        python=repository.python,
        lock=inside.lock,
        inside=inside,
    )


def _required(
    repository: Repository, metadata: Message, name: str
) -> tuple[requirements.Requirements, Siblings]:
    """Requirements of the package and its tests, and the other projects of the repository.

    Raises:
        TaskError: a requirement lies in a part of the repository that was not fetched.
    """
    with named(repository.name):
        inside = siblings(repository.tree, name, repository.beside, repository.origin)
        required = requirements.find(repository.tree, metadata, inside, repository.python)
    if required.unfetched:
        lines = "\n    ".join(["", *required.unfetched])
        raise TaskError(
            f"{repository.name} requires what is not here:{lines}\n"
            "Give the whole repository, or a copy of this folder that holds that code too"
        )
    return required, inside


# ---- packages ---------------------------------------------------------------------------------------------


def _locate(tree: Path, code: dict[str, bytes]) -> dict[str, str]:
    """Top-level import name to the folder of the tree that holds it."""
    places: dict[str, list[str]] = {}
    for path in tree.rglob("*.py"):
        places.setdefault(path.name, []).append(path.relative_to(tree).as_posix())
    votes: dict[str, Counter[str]] = {}
    for name in code:
        if not name.endswith(".py") or is_protected(name):
            continue
        package = name.partition("/")[0].removesuffix(".py")
        for place in places.get(name.rpartition("/")[2], ()):
            if f"/{place}".endswith(f"/{name}"):
                votes.setdefault(package, Counter())[place[: -len(name)].rstrip("/") or "."] += 1
    return {package: min(roots, key=lambda r: (-roots[r], len(r), r)) for package, roots in votes.items()}


def _elsewhere(tree: Path, code: dict[str, bytes]) -> str:
    """Places of a wheel's modules in a tree that does not hold them by their names; "" where it has none."""
    contents = {content: name for name, content in code.items() if name.endswith(".py") and content.strip()}
    for path in sorted(tree.rglob("*.py")):
        if name := contents.get(path.read_bytes()):
            place = path.relative_to(tree).as_posix()
            return (
                f": its build makes {name} of {place}. Code is imported from where it lies, so its folders must be "
                "named as the packages are; give another source, such as a repository that is laid out so"
            )
    return ""


def _owned(code: dict[str, bytes], package: str, distribution: str) -> Iterator[str]:
    """Import names of a package that are the distribution's own.

    A namespace is shared: any number of distributions may bring parts of it. It is a folder without `__init__.py`, or
    with one that only says so (pkgutil, pkg_resources). A folder without one that holds modules is a package of people
    who write none, unless the distribution has its name from it, as jaraco.functools has.
    """
    place = package.replace(".", "/")
    start = code.get(f"{place}/__init__.py")
    inner = [n[len(place) + 1 :] for n in code if n.startswith(f"{place}/") and n.endswith(".py")]
    inner = [name for name in inner if not is_protected(name) and name != "__init__.py"]
    parts = sorted({name.partition("/")[0].removesuffix(".py") for name in inner})
    named = canonicalize_name(distribution).startswith(f"{canonicalize_name(package)}-")
    plain = start is None and (named or all("/" in name for name in inner))
    shared = plain or (start is not None and _is_marker(start))
    if shared and parts and all(part.isidentifier() for part in parts):
        for part in parts:
            yield from _owned(code, f"{package}.{part}", distribution)
    else:
        yield package


def _for_namespaces(tree: Path, owned: dict[str, str]) -> list[str]:
    """setuptools of the last version with pkg_resources, where a namespace cannot be declared without it."""
    for package, root in owned.items():
        for above in Path(package.replace(".", "/")).parents:
            start = tree / root / above / "__init__.py"  # wheels leave it out, the tree has it
            text = start.read_bytes() if above.name and start.is_file() else b""
            if _is_marker(text) and b"extend_path" not in text:
                return ["setuptools<82"]
    return []


def _is_marker(start: bytes) -> bool:
    """True if an `__init__.py` does nothing but declare a namespace."""
    return bool(NAMESPACE.search(start)) and not re.search(rb"^\s*(def|class|async)\s", start, re.MULTILINE)


def _complete(tree: Path, code: dict[str, bytes], homes: dict[str, str]) -> list[str]:
    """Add files that the build generated, such as _version.py and compiled extensions, to the tree; their paths."""
    added, usual = [], Counter(homes.values()).most_common(1)[0][0]
    for name, content in sorted(code.items()):
        root = homes.get(name.partition("/")[0].removesuffix(".py"))
        if root is None and "/" not in name and name.endswith(".so"):
            root = usual
        if root is not None and not (tree / root / name).exists():
            (tree / root / name).parent.mkdir(parents=True, exist_ok=True)
            (tree / root / name).write_bytes(content)
            added.append(name if root == "." else f"{root}/{name}")
    return added


def _place(tree: Path, root: str, package: str) -> str:
    path = package.replace(".", "/")
    path = path if (tree / root / path).is_dir() else f"{path}.py"
    return path if root == "." else f"{root}/{path}"
