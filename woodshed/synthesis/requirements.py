"""Requirements of a package and its tests, from its metadata, dependency groups, files and settings.

What is not installed has a reason, which a person sees where the tests do not run.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Iterable, Iterator, Sequence, Set
from dataclasses import dataclass, field
from email.message import Message
from pathlib import Path
from typing import Any
from urllib.parse import unquote

from packaging.markers import UndefinedComparison, UndefinedEnvironmentName
from packaging.requirements import InvalidRequirement, Requirement
from packaging.specifiers import SpecifierSet
from packaging.utils import canonicalize_name

from woodshed.synthesis import plugins
from woodshed.synthesis.configuration import IMPORT, read_ini, read_text, read_toml, table
from woodshed.synthesis.siblings import Siblings, dependencies, home_of, is_of_this_machine
from woodshed.synthesis.written_sources import relative
from woodshed.tasks.environment import BUILT, PRIVATE
from woodshed.tasks.interpreters import OURS

TEST_GROUPS = ("test", "tests", "testing", "unittest")
DEV_GROUPS = ("dev", "develop", "development")
REQUIREMENT_FILES = (
    "requirements*/*test*.txt",
    "*requirements*test*.txt",
    "*test*requirements*.txt",
    "tests/requirements*.txt",
)
PACKAGE_FILES = (
    "requirements.txt",
    "requirements/base.txt",
    "requirements/common.txt",
    "requirements/main.txt",
)
DEV_FILES = ("*dev*requirements*.txt", "*requirements*dev*.txt", "requirements*/dev*.txt")
NOT_FOR_TESTS = re.compile(
    r"(tox|nox|coverage|codecov|coveralls|pytest-(cov|xdist|randomly|sugar|black|ruff|mypy.*|flake8|pylint|isort|checkdocs|enabler)"
    r"|ruff|black|isort|flake8.*|pylint.*|mypy|pyright|pycodestyle|pydocstyle|pyflakes|bandit|pre-commit|twine|build|wheel|setuptools.*"
    r"|pip.*|uv|hatch.*|flit.*|poetry.*|bump.*|sphinx.*|furo|mkdocs.*|m2r2?|docformatter|invoke|towncrier|check-manifest|types-.*)"
)
"""Tools beside the tests: they cost time and must not steer the test runner. A setting of pytest may demand one."""
OPTION = re.compile(r"\s--?[A-Za-z].*")
"""Options of one line of a requirements file, such as its hashes."""


NAME = r"[A-Za-z0-9]([\w.-]*[A-Za-z0-9])?"


@dataclass
class Requirements:
    """Requirements and what was left out of them, in the order of their files and lines."""

    package: list[str] = field(default_factory=list)
    tests: list[str] = field(default_factory=list)
    """Requirements of the tests, as far as the repository states them."""
    demanded: list[str] = field(default_factory=list)
    """Plugins without which pytest does not start, or does not run the tests rightly."""
    roots: list[str] = field(default_factory=list)
    """Folders of the repository to import from: where required siblings lie."""
    described: list[str] = field(default_factory=list)
    """Those siblings, by their addresses: their metadata are installed."""
    left_out: list[str] = field(default_factory=list)
    """Requirements that are not installed, each with the reason."""
    unfetched: list[str] = field(default_factory=list)
    """Requirements of the package on its own repository that were not given."""


def find(tree: Path, metadata: Message, inside: Siblings, python: str = OURS) -> Requirements:
    """The requirements of a package and its tests, with the markers of this machine and a version of Python settled."""
    requirements = Requirements()
    reader = _Reader(tree, metadata, requirements, inside, python)
    requirements.package = _apart(requirements, inside, reader.active(reader.declared, ""), needed=True)
    for demand in plugins.demands(tree):
        if demand.requirement:
            requirements.demanded.append(demand.requirement)
        else:
            requirements.left_out.append(f"{demand.cause}: no name of a distribution")
    demanded = {canonicalize_name(Requirement(text).name) for text in requirements.demanded}
    tools = set()
    if not reader.declared:  # an application, whose requirements nothing but files say
        texts = [text for path in _found(tree, PACKAGE_FILES) for text in reader.file(path)]
        names_of_tools = [t for t in reader.active(texts, "") if NOT_FOR_TESTS.fullmatch(_name(t))]
        tools |= {_name(text) for text in names_of_tools} - demanded
        listed = [reader.bound(t) for t in reader.active(texts, "") if _name(t) not in tools]
        requirements.tests = _apart(requirements, inside, sorted(set(listed)), needed=False)
    above = [_Reader(inside.root, Message(), requirements, inside, python)] if inside.root else []
    known = set[str]()
    for each in (reader, *above):  # what the root of a repository says of tests holds for its members, too
        chosen = {name: text for name, text in each.wishes(demanded, tools).items() if name not in known}
        known |= chosen.keys()
        requirements.tests += _apart(requirements, inside, sorted(chosen.values()), needed=False)
    if tools:
        requirements.left_out.append(
            f"{', '.join(sorted(tools))}: not needed by the tests, and no setting of pytest asks for it"
        )
    requirements.demanded = _apart(requirements, inside, requirements.demanded, needed=False)
    for root in requirements.roots:  # which grows
        needs = dependencies(tree, root)
        requirements.package += _apart(requirements, inside, reader.active(needs, ""), needed=True)
    requirements.tests = list(dict.fromkeys([*requirements.tests, *_imported(tree, inside)]))
    requirements.left_out = list(dict.fromkeys(requirements.left_out))
    return requirements


def _imported(tree: Path, inside: Siblings) -> Iterator[str]:
    """Projects of the same repository that the code or its tests import, whether or not anything declares it."""
    names = {
        m.decode() for path in tree.rglob("*.py") if path.is_file() for m in IMPORT.findall(path.read_bytes())
    }
    for name in sorted(names - sys.stdlib_module_names - plugins.IMPORTED_AS.keys()):
        canonical = canonicalize_name(name)
        place = inside.elsewhere.get(canonical, "")
        source = (
            inside.at(place) if {*Path(place).parts} != {".."} else ""
        )  # what is around it may hold it, too
        if source and canonical not in inside.homes:
            yield f"{canonical} @ {source}"


def _name(text: str) -> str:
    return canonicalize_name(Requirement(text).name)


def _found(tree: Path, patterns: Sequence[str]) -> list[Path]:
    return sorted({path for pattern in patterns for path in tree.glob(pattern)})


def _apart(requirements: Requirements, inside: Siblings, listed: Iterable[str], *, needed: bool) -> list[str]:
    """The requirements to install. Those that lie in the tree are imported from there; those of the rest of the
    repository, and those with an address, become references to what is built (`direct_wheels`)."""
    wanted = []
    for text in listed:
        requirement = Requirement(text)
        name = canonicalize_name(requirement.name)
        if name in inside.homes:
            requirements.roots += [root for root in [inside.homes[name]] if root not in requirements.roots]
            requirements.left_out.append(
                f"{text}: lies in this repository, in {inside.homes[name]}; imported from there"
            )
            described = inside.at(inside.nested[name]) if inside.nested[name] != "." else ""
            requirements.described += [f"{name} @ {described}"] if described else []
        elif source := source_of(requirement, inside):
            requirement.url, requirement.specifier = source, SpecifierSet()
            wanted.append(str(requirement))
        elif where := inside.elsewhere.get(name, requirement.url):
            reason = f"of the same repository ({where}), and never fetched from a package index"
            (requirements.unfetched if needed else requirements.left_out).append(f"{text}: {reason}")
        else:
            wanted.append(text)
    return wanted


def source_of(requirement: Requirement, inside: Siblings) -> str:
    """The address that a requirement is to be built from, whatever an index has; "" where there is none at hand."""
    url = requirement.url or ""
    is_far = url.startswith(("git+", "http://", "https://"))
    if is_of_this_machine(url):
        is_far = is_far and inside.origin is not None and inside.origin.is_ours
    return inside.source(requirement.name) or inside.at(relative(url)) or (url if is_far else "")


def is_readable(text: str) -> bool:
    """True for a requirement as wheels write them."""
    try:
        Requirement(text)
    except InvalidRequirement:
        return False
    return True


def marker_environment(python: str) -> dict[str, str]:
    """Variables of markers for a version of Python; none for our own, of which they see all."""
    return {} if python == OURS else {"python_version": python, "python_full_version": f"{python}.0"}


def holds(requirement: Requirement, extras: Iterable[str], python: str) -> bool:
    """True if the marker of a requirement admits it under some extras, or none of them, for a version of Python."""
    if requirement.marker is None:
        return True
    version = marker_environment(python)
    try:
        return any(requirement.marker.evaluate({**version, "extra": extra}) for extra in ("", *extras))
    except (UndefinedComparison, UndefinedEnvironmentName):
        return False


@dataclass
class _Reader:
    """Requirements where one repository writes them."""

    tree: Path
    metadata: Message
    found: Requirements
    inside: Siblings
    python: str
    limits: dict[str, Requirement] = field(default_factory=dict)
    """Constraints from files (`-c`), by canonical name."""

    @property
    def declared(self) -> list[str]:
        return self.metadata.get_all("Requires-Dist") or []

    def active(self, lines: Iterable[str], extra: str, seen: frozenset[str] = frozenset()) -> Iterator[str]:
        """Requirements whose markers hold here (under an extra: only those that it adds), markers dropped.

        An extra of the package itself stands for what it adds, as pip has it.
        """
        version = marker_environment(self.python)
        for line in lines:
            try:
                requirement = Requirement(line)
                marker, requirement.marker = requirement.marker, None
                is_active = marker.evaluate({**version, "extra": extra}) if marker else not extra
                is_active = is_active and not (extra and marker and marker.evaluate({**version, "extra": ""}))
            except (InvalidRequirement, UndefinedComparison, UndefinedEnvironmentName) as error:
                self.found.left_out.append(f"{line}: cannot be read: {str(error).partition(chr(10))[0]}")
                continue
            if not is_active:
                continue
            if canonicalize_name(requirement.name) == canonicalize_name(self.metadata["Name"] or ""):
                for name in sorted(requirement.extras - seen):
                    yield from self.active(self.declared, name, seen | {name})
            else:
                yield str(requirement)

    def wishes(self, demanded: Set[str], tools: set[str]) -> dict[str, str]:
        """Requirements of the tests by name, from the first places that state any; names of tools go to `tools`."""
        for groups, files in ((TEST_GROUPS, REQUIREMENT_FILES), (DEV_GROUPS, DEV_FILES)):
            texts = [text for group in groups for text in self.group(group)]
            texts += [text for group in groups for text in self.tables(group)]
            texts += self.tox() if groups is TEST_GROUPS else []
            texts += [text for path in _found(self.tree, files) for text in self.file(path)]
            chosen: dict[str, str] = {}
            for text in self.active(texts, ""):
                name = _name(text)
                if NOT_FOR_TESTS.fullmatch(name) and name not in demanded:
                    tools.add(name)
                else:  # old pins of pytest would not do
                    chosen.setdefault(name, "pytest" if name == "pytest" else self.bound(text))
            if chosen:
                return chosen
        return {}

    def group(self, name: str) -> Iterator[str]:
        """The requirements of an extra, and of a dependency group (PEP 735), of this name."""
        yield from self.active(self.declared, name, frozenset((name,)))
        tables = table(read_toml(self.tree / "pyproject.toml"), "dependency-groups")
        groups = {canonicalize_name(key): entries for key, entries in tables.items()}
        waiting, visited = [canonicalize_name(name)], set[str]()
        while waiting:
            name = waiting.pop()
            entries = groups.get(name, []) if name not in visited else []
            visited.add(name)
            for entry in entries if isinstance(entries, list) else [entries]:
                included = table(entry).get("include-group")
                if isinstance(entry, str):
                    yield entry
                elif isinstance(included, str) and canonicalize_name(included) in groups:
                    waiting.append(canonicalize_name(included))
                else:
                    entry_text = f"{name} = {_short(entry)}"
                    self.found.left_out.append(
                        f"[dependency-groups] {entry_text}: neither a requirement nor a group"
                    )

    def tables(self, name: str) -> Iterator[str]:
        """The requirements of a group in the tables of poetry (names only: it writes versions its own way), pdm, uv and
        hatch."""
        tools = table(read_toml(self.tree / "pyproject.toml"), "tool")
        poetry = [table(tools, "poetry", "group", name, "dependencies")]
        poetry += [table(tools, "poetry", "dev-dependencies")] if name == "dev" else []
        yield from (key for entries in poetry for key in entries if key.lower() != "python")
        hatch = table(tools, "hatch", "envs", {"test": "hatch-test", "dev": "default"}.get(name, name))
        listed = [table(tools, "pdm", "dev-dependencies").get(name)]
        listed += [hatch.get("dependencies"), hatch.get("extra-dependencies")]
        listed += [table(tools, "uv").get("dev-dependencies")] if name == "dev" else []
        yield from (
            text for some in listed if isinstance(some, list) for text in some if isinstance(text, str)
        )

    def tox(self) -> list[str]:
        """`deps`, `extras` and `dependency_groups` of tox's default environment, without lines with substitutions."""
        section = read_ini(self.tree / "tox.ini")
        text = section.get("testenv", "deps", fallback=None) or ""
        text = re.sub(r"\{(toxinidir|tox_root)\}/", "", text)
        plain = (line for line in text.splitlines() if not re.search(r"[{}]|^\s*[\w,!.-]+:(?!//)", line))
        listed = list(self.lines("\n".join(plain), self.tree / "tox.ini"))
        for key in ("extras", "dependency_groups"):
            text = section.get("testenv", key, fallback=None) or ""
            for name in re.findall(r"[\w.-]+", re.sub(r"\S*[{}:]\S*", "", text)):
                listed += self.group(name)
        return listed

    def file(self, path: Path, seen: frozenset[Path] = frozenset()) -> Iterator[str]:
        """Requirements of a file in pip's format, and of those that it names."""
        shown = path.relative_to(self.tree).as_posix() if path.is_relative_to(self.tree) else str(path)
        if not path.resolve().is_relative_to(self.tree.resolve()) or not path.is_file():
            self.found.left_out.append(f"{shown}: no file of this repository")
        elif path.resolve() not in seen:
            yield from self.lines(read_text(path), path, seen | {path.resolve()})

    def lines(self, text: str, path: Path, seen: frozenset[Path] = frozenset()) -> Iterator[str]:
        text = re.sub(r"\\\r?\n", " ", text)
        for line in (re.sub(r"(^|\s)#.*", "", line).strip() for line in text.splitlines()):
            option = re.match(
                r"(-r|-c|-e|--requirements?|--constraints?|--editable)(?:\s*=\s*|\s*)(\S.*)", line
            )
            if option and option[1] in ("-e", "--editable"):
                yield from self._local(option[2].strip("\"'"))
            elif option:
                inner = self.file(path.parent / option[2].strip("\"'"), seen)
                if option[1].startswith(("-c", "--c")):
                    self._limit(inner)
                else:
                    yield from inner
            elif line.startswith(("--index-url", "--extra-index-url", "--find-links", "-i", "-f")):
                self.found.left_out.append(
                    f"{line.split()[0].partition('=')[0]}: pip's own settings say where packages are from: {PRIVATE}"
                )
            elif line and not line.startswith("-"):
                yield from self._local(OPTION.sub("", line))

    def _local(self, line: str) -> Iterator[str]:
        """One line: a requirement, or the folder of the project itself."""
        own_folder = re.fullmatch(r"(?:file:(?://)?)?\.?/?(?:\[([\w.,\s-]+)\])?", line)
        if own_folder:
            yield from (
                text for name in re.findall(r"[\w.-]+", own_folder[1] or "") for text in self.group(name)
            )
        elif (folder := re.fullmatch(r"(\.?[\w./-]*/[\w./-]*?)(?:\[.*\])?", line)) and (
            self.tree / folder[1]
        ).is_dir():
            yield from self._sibling(folder[1])
        elif address := re.fullmatch(r"((?:git\+|https?:)[^#\s]+)(?:#(\S+))?", line):
            yield _addressed(address[1], address[2] or "")
        elif source := self.inside.at(re.sub(r"\[.*\]$", "", line)):
            extras = re.search(r"\[.*\]$", line)
            yield f"{Path(unquote(source)).name}{extras[0] if extras else ''} @ {source}"
        elif re.match(r"[\w+]*:|[./]|\w[\w.-]*/|.*\$\{", line):
            self.found.left_out.append(
                f"{line}: no requirement by name; only what a package index has is installed"
            )
        else:
            yield line

    def _sibling(self, path: str) -> Iterator[str]:
        """Another project of the repository: imported from where it lies in the tree, else built from there."""
        if self.inside.origin and self.tree == self.inside.root:
            source = self.inside.at(os.path.relpath(self.tree / path, self.inside.origin.folder))
            if source and source != self.inside.origin.folder.as_uri():
                yield f"{Path(path).name} @ {source}"
            return
        root = home_of(self.tree, path)
        if not root:
            self.found.left_out.append(f"{path}: not in what was given")
        elif root not in self.found.roots:
            self.found.roots.append(root)

    def _limit(self, listed: Iterable[str]) -> None:
        for text in self.active(listed, ""):
            requirement = Requirement(text)
            self.limits.setdefault(canonicalize_name(requirement.name), requirement)

    def bound(self, text: str) -> str:
        """A requirement within what constraint files say of it."""
        requirement = Requirement(text)
        limit = self.limits.get(canonicalize_name(requirement.name))
        if limit and not requirement.url:
            requirement.specifier &= limit.specifier
        return str(requirement)


def _addressed(address: str, fragment: str) -> str:
    """A requirement of git or a URL as pip's files have it, by the name that it says, or else its last part."""
    parts = dict(re.findall(r"(egg|subdirectory|sha256)=([^&]+)", fragment))
    last = re.split(r"@|-\d|\.(?:git|zip|tar|tgz|whl)\b", address.rstrip("/").rpartition("/")[2])[0]
    name = parts.pop("egg", "") or (last if re.fullmatch(NAME, last) else "dependency")
    kept = "&".join(f"{key}={value}" for key, value in parts.items())
    return f"{name} @ {address}" + (f"#{kept}" if kept else "")


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) < 80 else f"{text[:77]}..."


def relaxed(listed: Sequence[str]) -> list[str]:
    """Requirements without their versions; what was built here has no other."""
    return [text if BUILT.search(text) else re.split(r"[\s<>=!~;(]", text)[0] for text in listed]
