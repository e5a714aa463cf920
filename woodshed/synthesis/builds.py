"""Builds of projects: the wheel that a project's own backend makes inside a sandbox, which the host reads as data."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import io
import json
import os
import re
import zipfile
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from email import message_from_string
from email.message import Message
from pathlib import Path
from typing import Any

from packaging.requirements import Requirement
from packaging.specifiers import InvalidSpecifier, SpecifierSet
from packaging.utils import canonicalize_name
from packaging.version import InvalidVersion, Version
from pydantic import TypeAdapter, ValidationError

from woodshed.records import Environment, TaskError
from woodshed.sandbox import Sandbox, SandboxProvider, SandboxSpec
from woodshed.synthesis import requirements
from woodshed.synthesis.configuration import read_toml, table, words
from woodshed.synthesis.siblings import is_described, projects, siblings
from woodshed.synthesis.sources import Repository
from woodshed.tasks import interpreters
from woodshed.tasks.environment import prepare, resolve
from woodshed.tasks.folder import is_clean, is_protected

BUILD_TIMEOUT_S = 300.0
BUILD_TOOLS = frozenset(
    "cffi cmake cython flit-core hatch-vcs hatchling meson-python nanobind ninja numpy packaging pbr pdm-backend "
    "poetry-core pybind11 scikit-build-core setuptools setuptools-scm uv-build wheel".split()
)
"""Public names, which a package index has however a repository calls its folders."""
MOST_TOLD = 12
WHEEL_FILES, WHEEL_BYTES = 20_000, 256 << 20
"""The most that a wheel may unpack to."""

HOOK = """
import importlib, json, os, sys
backend, paths, hook, out = json.loads(sys.argv[1])
sys.path[:0] = paths
name, _, attribute = backend.partition(":")
module = importlib.import_module(name)
for part in filter(None, attribute.split(".")):
    module = getattr(module, part)
if hook == "requires":
    answer = getattr(module, "get_requires_for_build_wheel", lambda: [])()
else:
    os.makedirs(out, exist_ok=True)
    answer = module.build_wheel(out)
os.write(3, json.dumps(answer).encode())
"""


@dataclass(frozen=True)
class _BuildSystem:
    """The table [build-system] of a pyproject.toml (PEP 518)."""

    requires: tuple[str, ...] = ("setuptools>=40.8",)
    build_backend: str = "setuptools.build_meta:__legacy__"
    backend_path: tuple[str, ...] = ()

    @classmethod
    def reading(cls, name: str, table: Any) -> _BuildSystem:
        """The table, its types checked; keys of other tools are ignored."""
        try:
            known = {key.replace("-", "_"): value for key, value in table.items()}
            fields = {
                field.name: known[field.name] for field in dataclasses.fields(cls) if field.name in known
            }
            return TypeAdapter(cls).validate_json(json.dumps(fields, default=str), strict=True)
        except (AttributeError, ValidationError) as error:
            why = error.errors()[0]["msg"] if isinstance(error, ValidationError) else "it is no table"
            raise TaskError(f"{name}: [build-system] of its pyproject.toml cannot be read: {why}") from None


def built(repository: Repository, timeout_s: float, sandboxes: SandboxProvider) -> bytes:
    """The wheel of a repository, or its stand-in.

    Raises:
        TaskError: the build fails; it names the projects inside, one of which may be meant.
    """
    with named(repository.name):
        if not is_described(repository.tree):
            return as_it_is(repository)
    try:
        return build(repository, timeout_s, sandboxes)
    except TaskError as error:
        if names_no_build(repository.tree):
            return as_it_is(repository)
        raise TaskError(f"{error}{choice(repository.tree)}") from None


def names_no_build(tree: Path) -> bool:
    """True for a project that only lists what it requires, as applications of uv do: nobody builds it."""
    whole = read_toml(tree / "pyproject.toml")
    has_more = "build-system" in whole or any((tree / name).is_file() for name in ("setup.py", "setup.cfg"))
    return "project" in whole and not has_more


def metadata_of(name: str, contents: dict[str, bytes], python: str) -> tuple[str, Message, str]:
    """Folder of a wheel's metadata, the metadata, and the normalised version.

    Raises:
        TaskError: the metadata is missing or malformed, or demands another Python.
    """
    paths = [path for path in contents if path.endswith(".dist-info/METADATA")]
    if not paths:
        raise TaskError(f"{name}: its build made a wheel without METADATA")
    info = min(paths).rpartition("/")[0]
    metadata = message_from_string(contents[f"{info}/METADATA"].decode(errors="replace"))
    needed = metadata.get("Requires-Python", "")
    try:
        version = str(Version(metadata["Version"] or ""))
        fits = SpecifierSet(needed).contains(python + ".99", prereleases=True)
    except (InvalidVersion, InvalidSpecifier) as error:
        raise TaskError(f"{name}: the METADATA of its wheel cannot be read: {error}") from None
    if not re.fullmatch(r"[A-Za-z0-9]([\w.-]*[A-Za-z0-9])?", metadata["Name"] or ""):
        raise TaskError(f"{name}: its wheel's METADATA has Name = {metadata['Name']!r}")
    if not fits:
        raise TaskError(
            f"{name} requires Python {needed}, and would be built with Python {python}. Known are "
            f"{', '.join(interpreters.KNOWN)}; install one that fits (uv python install VERSION), or choose another "
            "with python=VERSION behind the source"
        )
    return info, metadata, version


@contextlib.contextmanager
def named(name: str) -> Iterator[None]:
    """A file that cannot be read is one of a repository, which the reason names."""
    try:
        yield
    except TaskError as error:
        raise TaskError(f"{name}: {error}") from None


def contents_of(name: str, wheel: bytes) -> dict[str, bytes]:
    """The files of a wheel. It was made by somebody else's code: as large, and named, as it likes.

    Raises:
        TaskError: no wheel, one too large, or a name that is not below its root.
    """
    try:
        with zipfile.ZipFile(io.BytesIO(wheel)) as bundle:
            members = [member for member in bundle.infolist() if not member.is_dir()]
            size = sum(member.file_size for member in members)
            if size > WHEEL_BYTES or len(members) > WHEEL_FILES:
                raise TaskError(
                    f"{name}: its wheel holds {len(members)} files of {size >> 20} MB; at most {WHEEL_FILES} files of "
                    f"{WHEEL_BYTES >> 20} MB are unpacked"
                )
            for member in members:
                if not is_clean(member.filename):
                    raise TaskError(
                        f"{name}: its wheel holds {member.filename!r}, which is no path below its root"
                    )
            return {member.filename: bundle.read(member) for member in members}
    except (zipfile.BadZipFile, zlib.error, EOFError, OSError, NotImplementedError, RuntimeError) as error:
        raise TaskError(f"{name}: its build answered with something that is no wheel: {error}") from None


def choice(tree: Path) -> str:
    """The projects inside a repository, one of which is to be chosen; "" where there are none."""
    inner = projects(tree)
    if not inner:
        return ""
    told = [place + (f" ({name})" if name else "") for place, name in inner]
    more = f" and {len(told) - MOST_TOLD} more" if len(told) > MOST_TOLD else ""
    return (
        f"\nIt holds {len(inner)} projects: {', '.join(told[:MOST_TOLD])}{more}. Choose one: give its folder "
        f"(./{inner[0][0]} from there), or a git source with #subdirectory={inner[0][0]} behind it"
    )


# ---- in the sandbox -----------------------------------------------------------------------------------------


def build(repository: Repository, timeout_s: float, sandboxes: SandboxProvider) -> bytes:
    """The project's wheel, built in a sandbox: no network, no isolation, nothing of it runs on the host."""
    with named(repository.name):
        system = read_toml(repository.tree / "pyproject.toml").get("build-system", {})
    known = _BuildSystem.reading(repository.name, system)
    requires, backend = [*known.requires], known.build_backend
    _refuse_rust(repository.name, requires)
    if backend.startswith("setuptools."):
        requires += ["setuptools", "wheel"]
    paths = [f"/workspace/{path}" for path in known.backend_path]
    with _builder(repository, requires, sandboxes) as sandbox:
        more = _hook(sandbox, repository, backend, paths, "requires", timeout_s)
        if not isinstance(more, list) or not all(isinstance(each, str) for each in more):
            raise TaskError(
                f"{repository.name}: its build with {backend} requires {str(more)[:100]!r}: no list of names"
            )
        if not set(more) - set(requires):
            return _wheel(sandbox, repository, backend, paths, timeout_s)
    with _builder(repository, [*requires, *more], sandboxes) as sandbox:
        return _wheel(sandbox, repository, backend, paths, timeout_s)


def _refuse_rust(name: str, requires: Sequence[str]) -> None:
    """Raise a TaskError for a build that fetches and compiles crates."""
    rust = {"maturin", "setuptools-rust"} & {
        canonicalize_name(re.split(r"[^\w.-]", text)[0]) for text in requires
    }
    if rust:
        raise TaskError(
            f"{name}: its build compiles Rust ({min(rust)}), for which it would need crates from a network; extensions "
            "are built from C and Cython only. Choose another repository, or a copy whose extension is optional"
        )


def _builder(repository: Repository, requires: Sequence[str], sandboxes: SandboxProvider) -> Sandbox:
    try:
        pins = _pins(tuple(_forbuild(repository, requires)), repository.python, _settings_of_pip())
    except TaskError as error:
        raise TaskError(f"{repository.name}: what its build requires cannot be installed. {error}") from None
    environment = Environment(repository.python, pins, packages=())
    scm = re.sub(r"[-_.]+", "_", repository.name).upper()
    names = ("SETUPTOOLS_SCM_PRETEND_VERSION", f"SETUPTOOLS_SCM_PRETEND_VERSION_FOR_{scm}", "PBR_VERSION")
    versions = dict.fromkeys(
        (*names, "PDM_BUILD_SCM_VERSION", "POETRY_DYNAMIC_VERSIONING_BYPASS"), repository.version
    )
    return sandboxes.open(
        SandboxSpec(lowers=(repository.tree,), environment=prepare(environment), env=versions)
    )


@functools.cache
def _pins(requires: tuple[str, ...], python: str, settings: tuple[tuple[str, str], ...]) -> tuple[str, ...]:
    """Pins of what a build requires: asked for once, however many projects of a repository are built alike."""
    return resolve(requires, python=python)


def _settings_of_pip() -> tuple[tuple[str, str], ...]:
    return tuple(sorted(item for item in os.environ.items() if item[0].startswith("PIP_")))


def _forbuild(repository: Repository, requires: Sequence[str]) -> list[str]:
    """Requirements of a build here. A malformed line stays as it is: `resolve` names it.

    Raises:
        TaskError: a name that exists inside the repository, where a stranger's would be installed.
    """
    inside = siblings(repository.tree, "", repository.beside)
    needed = []
    for text in requires:
        if not requirements.is_readable(text):
            needed.append(text)
            continue
        requirement = Requirement(text)
        name = canonicalize_name(requirement.name)
        is_active = requirements.holds(requirement, (), repository.python)
        if is_active and name not in BUILD_TOOLS and (place := inside.place(name)):
            raise TaskError(
                f"{text!r} is of the repository itself ({place}), and never fetched from a package index. Give a copy "
                "without pyproject.toml, setup.py and setup.cfg: its packages are then taken as they lie"
            )
        requirement.marker = None
        needed += [str(requirement)] if is_active else []
    return needed


def _wheel(
    sandbox: Sandbox, repository: Repository, backend: str, paths: list[str], timeout_s: float
) -> bytes:
    name = _hook(sandbox, repository, backend, paths, "wheel", timeout_s)
    if not isinstance(name, str) or not is_clean(name) or "/" in name:
        raise TaskError(f"{repository.name}: its build with {backend} named its wheel {str(name)[:100]!r}")
    try:
        return sandbox.read(f"/tmp/wheel/{name}")
    except OSError as error:
        raise TaskError(
            f"{repository.name}: its build with {backend} left no wheel {name}: {error.strerror}"
        ) from None


def _hook(
    sandbox: Sandbox, repository: Repository, backend: str, paths: list[str], hook: str, timeout_s: float
) -> Any:
    request = json.dumps([backend, paths, hook, "/tmp/wheel"])
    result = sandbox.exec(["/env/bin/python", "-I", "-c", HOOK, request], timeout_s=timeout_s, channel=True)
    if result.outcome == "ok":
        try:
            return json.loads(result.channel)
        except ValueError:
            raise TaskError(f"{repository.name}: its build with {backend} answered no JSON") from None
    printed = (result.stdout + result.stderr).decode(errors="replace").strip().splitlines()
    lines = "".join(f"\n    {line}" for line in printed[-8:])
    build = f"{repository.name}: its build with {backend}"
    if result.outcome == "nonzero":
        ended = f"{build} failed. It ended with:{lines or f' exit code {result.exit_code}'}"
        raise TaskError(ended + _way_out("\n".join(printed)))
    why = {"timeout": f"took longer than {timeout_s:.0f} s", "oom": "needed too much memory"}
    raise TaskError(
        f"{build} {why.get(result.outcome, f'was ended ({result.outcome})')}, and was stopped. It has no network and "
        f"nobody answers it. {f'It last printed:{lines}' if lines else 'It printed nothing.'}\n"
        "Mend the build, name a release as pypi:NAME==VERSION, or give a copy of the folder without pyproject.toml, "
        "setup.py and setup.cfg, with its requirements as 'extra_requirements=[...]': its packages are then "
        "taken as they lie"
    )


def as_it_is(repository: Repository) -> bytes:
    """A stand-in for the wheel of a folder that nobody builds: its top-level packages and modules, its requirements."""
    tree, held = repository.tree, io.BytesIO()
    root = tree / "src" if (tree / "src").is_dir() else tree
    project = table(read_toml(tree / "pyproject.toml"), "project")
    name, version = project.get("name") or repository.name, project.get("version") or repository.version
    lines = [f"Name: {name}", f"Version: {version}"]
    listed = filter(requirements.is_readable, words(project.get("dependencies")))
    lines += [f"Requires-Dist: {text}" for text in listed]
    for extra, listed in table(project, "optional-dependencies").items():
        lines.append(f"Provides-Extra: {extra}")
        for text in filter(requirements.is_readable, words(listed)):
            requirement, marker = Requirement(text), f'extra == "{extra}"'
            marker = f"({requirement.marker}) and {marker}" if requirement.marker else marker
            requirement.marker = None
            lines.append(f"Requires-Dist: {requirement} ; {marker}")
    with zipfile.ZipFile(held, "w") as bundle:
        bundle.writestr("x.dist-info/METADATA", "\n".join([*lines, ""]))
        for path in sorted(root.rglob("*.py")):
            name = path.relative_to(root).as_posix()
            if is_protected(name):
                continue
            if "/" not in name or (root / name.partition("/")[0] / "__init__.py").is_file():
                bundle.writestr(name, path.read_bytes())
    return held.getvalue()


def _way_out(printed: str) -> str:
    """Words for what a compilation lacked; "" for other failures."""
    if header := re.search(r"fatal error: ([\w./+-]+): No such file", printed):
        return (
            f"\nIt lacks the header {header[1]}: install the package of your system that brings it (on Debian its name "
            "ends in -dev). Sandboxes show /usr of this machine"
        )
    if re.search(
        r"(unable to execute|command) '?(gcc|cc|clang|g\+\+|c\+\+)'?.*(No such file|failed: None)", printed
    ):
        return (
            "\nIt lacks a C compiler: install one on this machine (gcc). Sandboxes show /usr of this machine"
        )
    if library := re.search(r"cannot find (-l[\w.+-]+)", printed):
        return f"\nIt lacks a library ({library[1]}): install the package of your system that brings it"
    return ""
