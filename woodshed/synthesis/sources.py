"""Sources of a repository: a clean copy of an sdist, a git revision or a folder, none of its code executed.

A source is "pypi:name==version", an address of git (`git_sources`) or a local path.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
import shlex
import shutil
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from email import message_from_string
from pathlib import Path

from packaging.requirements import InvalidRequirement, Requirement
from packaging.utils import canonicalize_name
from packaging.version import InvalidVersion, Version
from pypi_simple import (
    PYPI_SIMPLE_ENDPOINT,
    DigestMismatchError,
    DistributionPackage,
    NoSuchProjectError,
    PyPISimple,
)

from woodshed.pysource import syntax
from woodshed.records import TaskError
from woodshed.runs.files import remove
from woodshed.sandbox import BUBBLEWRAP, SandboxProvider, SandboxSpec
from woodshed.synthesis import git_sources
from woodshed.synthesis.configuration import inherit_from_root
from woodshed.synthesis.leaks.leftovers import BUILD_FOLDERS, is_leftover, read_rules, rules_path, scrub
from woodshed.synthesis.siblings import Origin, Siblings, enclosing, limit_of, required_python, whole
from woodshed.tasks import interpreters
from woodshed.tasks.environment import cache_dir
from woodshed.tasks.folder import is_inside


@dataclass(frozen=True)
class Repository:
    """A clean copy of somebody's repository."""

    name: str
    version: str
    tree: Path
    """The copy: no version control, caches or build leftovers."""
    sha256: str
    """Of the downloaded sdist, else of every path and its content in the tree."""
    licence: str
    """SPDX-like name, or "unknown"."""
    source: str
    """Requested source, with the resolved revision or version."""
    beside: tuple[tuple[str, str], ...] = ()
    """Names, with their places, of the larger repository that a folder is a part of."""
    origin: Origin | None = None
    """The place of its surroundings, as long as they are there: tasks do not depend on them."""
    left_out: Mapping[str, str] = field(default_factory=dict)
    """Paths that no task can hold, with the reason; in names that are not UTF-8, bytes as codes."""
    python: str = interpreters.OURS
    """Version of Python that it is built and tested with."""
    setup: str = ""
    """Shell command that prepares it for its tests (`setup_command`)."""


def fetch(source: str, into: Path, sandboxes: SandboxProvider = BUBBLEWRAP, python: str = "") -> Repository:
    """A clean copy of `source` in the folder `into` (made, or emptied first).

    Args:
        python: version to build and test it with; "" chooses one of this machine that it admits.

    Raises:
        TaskError: unknown package, version or revision, no sdist, a bad archive, a path that does not exist.
    """
    if python:
        interpreters.refuse_unknown(python)
    if into.exists():
        shutil.rmtree(into)
    into.parent.mkdir(parents=True, exist_ok=True)
    digest, beside, origin = "", (), Origin(into, into, is_ours=False)
    if source.startswith("pypi:"):
        name, version, resolved, digest = _fetch_sdist(source, into)
    elif git := git_sources.read(source):
        name, (version, resolved, origin) = git.name, git_sources.fetch(git, into)
        beside = tuple(enclosing(origin.folder)) if git.subdirectory else ()
    else:
        name, version, resolved = _fetch_folder(source, into, sandboxes)
        folder = Path(source).expanduser().resolve()
        beside, origin = tuple(enclosing(folder)), Origin(folder, limit_of(folder))
    _own(into)
    scrub(into, read_rules(rules_path()))
    if root := Siblings(origin=origin).root:
        inherit_from_root(into, root)
    left_out = _without_strange_names(into) | _without_false_sources(into)
    digest = digest or tree_sha256(into)
    found = Repository(plain_name(name), version, into, digest, _licence(into), resolved, beside, origin)
    return replace(found, left_out=left_out, python=python or interpreters.choose(required_python(into)))


def _own(tree: Path) -> None:
    """Make the copy writable, also where its original is read-only."""
    for place in (tree, *tree.rglob("*")):
        if not place.is_symlink():
            place.chmod(place.stat().st_mode | (0o700 if place.is_dir() else 0o600))


def _without_false_sources(tree: Path) -> dict[str, str]:
    """Remove folders and dead links named as Python source, which builds and tools try to read; return the reasons."""
    removed = {}
    for path in sorted(path for path in tree.rglob("*.py*") if syntax.is_source(path.name)):
        if path.is_file() or not os.path.lexists(path):  # removed with its folder
            continue
        what = f"a link to {str(path.readlink())!r}, which is no file" if path.is_symlink() else "a folder"
        removed[path.relative_to(tree).as_posix()] = f"it is {what}, and is left out"
        remove(path)
    return removed


def _without_strange_names(tree: Path) -> dict[str, str]:
    """Remove files and folders whose names are not UTF-8; return their names."""
    gone = {}
    for here, folders, names in os.walk(tree):
        for name in sorted([*folders, *names]):
            place = Path(here, name)
            try:
                name.encode()
            except UnicodeEncodeError:
                inner = os.fsencode(place.relative_to(tree))
                gone[inner.decode(errors="backslashreplace")] = "its name is not UTF-8, so it is left out"
                if name in folders and not place.is_symlink():
                    folders.remove(name)
                    shutil.rmtree(place)
                else:
                    place.unlink()
    return gone


def plain_name(name: str) -> str:
    """A distribution's name for whatever a folder or an address is called."""
    return re.sub(r"[^a-z0-9-]+", "-", canonicalize_name(name)).strip("-") or "repository"


def tree_sha256(tree: Path) -> str:
    """Hash of every file's path, executable bit and content (of a link: where it points)."""
    total = hashlib.sha256()
    for path in sorted(p for p in tree.rglob("*") if p.is_symlink() or p.is_file()):
        data = os.fsencode(path.readlink()) if path.is_symlink() else path.read_bytes()
        entry = [path.relative_to(tree).as_posix(), bool(path.lstat().st_mode & 0o100), path.is_symlink()]
        total.update(f"{entry} {hashlib.sha256(data).hexdigest()}\n".encode())
    return total.hexdigest()


# ---- pypi: ------------------------------------------------------------------------------------------------


def _fetch_sdist(source: str, into: Path) -> tuple[str, str, str, str]:
    name, version = _pin(source)
    archive = _cached_sdist(name, version) or _download_sdist(name, version)
    with tempfile.TemporaryDirectory(dir=into.parent) as scratch:
        shutil.move(_unpack(archive, Path(scratch)), into)
    return name, version, f"pypi:{name}=={version}", archive.name.split("=")[3]


def from_archive(
    archive: Path, name: str, version: str, into: Path, python: str = interpreters.OURS
) -> Repository:
    """A clean copy of an sdist that lies in a folder of pip's.

    Raises:
        TaskError: it cannot be unpacked.
    """
    digest = hashlib.sha256(archive.read_bytes()).hexdigest()
    with tempfile.TemporaryDirectory(dir=into.parent) as scratch:
        shutil.move(_unpack(archive, Path(scratch)), into)
    _own(into)
    found = Repository(plain_name(name), version, into, digest, "unknown", archive.name)
    return replace(found, python=python)


def from_wheel(wheel: Path, into: Path) -> Repository:
    """A project of which only a wheel is at hand: its tree is empty."""
    digest = hashlib.sha256(wheel.read_bytes()).hexdigest()
    return Repository(plain_name(wheel.name.partition("-")[0]), "0.0.0", into, digest, "unknown", wheel.name)


def _pin(source: str) -> tuple[str, str]:
    try:
        requirement = Requirement(source.removeprefix("pypi:"))
        (specifier,) = requirement.specifier
        if specifier.operator != "==":
            raise ValueError
        return canonicalize_name(requirement.name), str(Version(specifier.version))
    except (InvalidRequirement, InvalidVersion, ValueError):
        raise TaskError(f"{source!r} does not name one version; write pypi:name==version") from None


def _cached_sdist(name: str, version: str) -> Path | None:
    """A download of an earlier run; its file name carries the digest that it had to have then."""
    for archive in sorted((cache_dir() / "sdists").glob(f"{name}=={version}=*=.[tz]*[pz]")):
        if hashlib.sha256(archive.read_bytes()).hexdigest() == archive.name.split("=")[3]:
            return archive
        archive.unlink()
    return None


def _download_sdist(name: str, version: str) -> Path:
    with PyPISimple(index_url()) as index:
        index.s.verify = pip_settings().get("cert") or True
        try:
            sdist = _choose(name, version, index.get_project_page(name, timeout=60).packages)
            if "sha256" not in sdist.digests:
                raise TaskError(f"the index gives no sha256 for {sdist.filename}, so it cannot be verified")
            suffix = ".zip" if sdist.filename.endswith(".zip") else ".tar.gz"
            archive = cache_dir() / "sdists" / f"{name}=={version}={sdist.digests['sha256']}={suffix}"
            archive.parent.mkdir(parents=True, exist_ok=True)
            partial = archive.with_name(f"{archive.name}.{os.getpid()}.part")
            index.download_package(sdist, partial, verify=True, timeout=60)
        except NoSuchProjectError:
            raise TaskError(f"the package index knows no project {name!r}; check the spelling") from None
        except (DigestMismatchError, OSError) as error:  # every error of the connection is an OSError
            raise TaskError(f"the package index did not give {name}=={version}: {error}") from None
    partial.replace(archive)
    return archive


def _choose(name: str, version: str, packages: Sequence[DistributionPackage]) -> DistributionPackage:
    released = sorted({v for p in packages if (v := version_in(p.version))})
    matching = [p for p in packages if version_in(p.version) == Version(version)]
    sdists = [p for p in matching if p.package_type == "sdist"]
    if not matching:
        listing = ", ".join(str(v) for v in released[-12:]) or "none"
        raise TaskError(f"{name} has no version {version}; the newest are {listing}")
    if not sdists:
        kinds = ", ".join(sorted({p.package_type or "unknown" for p in matching}))
        raise TaskError(f"{name}=={version} has no sdist (only: {kinds}); give its git address instead")
    return min(sdists, key=lambda p: p.filename.endswith(".zip"))


def version_in(text: str | None) -> Version | None:
    try:
        return Version(text or "")
    except InvalidVersion:
        return None


def index_url() -> str:
    """The index that pip is configured with, else the library's default."""
    return pip_settings().get("index-url", PYPI_SIMPLE_ENDPOINT).rstrip("/") + "/"


def pip_settings() -> dict[str, str]:
    """Settings of pip by name ("index-url", "cert", "find-links"), from its files and variables."""
    command = [sys.executable, "-P", "-m", "pip", "config", "list"]
    listing = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False).stdout
    values: dict[str, str] = {}
    lines = listing.splitlines()
    lines.sort(key=lambda line: line.startswith(":env:"))  # the environment wins
    for line in lines:
        key, _, value = line.partition("=")
        values[key.rpartition(".")[2]] = "".join(shlex.split(value))
    return values


def _unpack(archive: Path, into: Path) -> Path:
    """Unpack an sdist; members may not leave the folder or be devices. Return the one folder at its top."""
    try:
        if zipfile.is_zipfile(archive):
            with zipfile.ZipFile(archive) as bundle:
                bundle.extractall(into)  # zipfile drops absolute paths and '..' by itself
        else:
            with tarfile.open(archive) as bundle:
                bundle.extractall(into, filter="data")
    except (tarfile.TarError, zipfile.BadZipFile, OSError, EOFError) as error:
        archive.unlink()
        raise TaskError(f"{archive.name} cannot be unpacked: {error}") from None
    tops = list(into.iterdir())
    if len(tops) != 1 or not tops[0].is_dir():
        raise TaskError(
            f"{archive.name} is not an sdist: expected one folder at its top, found {len(tops)} entries"
        )
    return tops[0]


# ---- folders --------------------------------------------------------------------------------------


def _fetch_folder(source: str, into: Path, sandboxes: SandboxProvider) -> tuple[str, str, str]:
    folder = Path(source).expanduser()
    if not source or not folder.is_dir():
        raise TaskError(f"no folder {source!r}; a source is a path, pypi:NAME==VERSION, {git_sources.FORMS}")
    folder, version = folder.resolve(), "0.0.0"
    top, names = folder if (folder / ".git").exists() else whole(folder), list[str]()
    try:
        if top and (top / ".git").exists():
            with contextlib.suppress(*((TaskError,) if top != folder else ())):  # of a part a copy is as good
                names, version = _asked_inside(top, folder, sandboxes)
        if names or top == folder:
            into.mkdir()
            for name in names:
                _copy_listed(folder, name, into)
        else:
            shutil.copytree(folder, into, symlinks=True, ignore=_ignore(folder, into.resolve()))
    except shutil.Error as error:  # a list of (from, to, why)
        place, _, why = error.args[0][0]
        raise TaskError(f"{folder} cannot be copied: {place}: {why}") from None
    return folder.name, version, folder.name  # not the full path: tasks must not depend on where a copy lay


def _asked_inside(top: Path, folder: Path, sandboxes: SandboxProvider) -> tuple[list[str], str]:
    """The files that git tracks in a folder of a repository, and its version.

    Git does what a repository's own configuration says, down to running commands, so it is asked in a sandbox.

    Raises:
        TaskError: git cannot say, or a name that is not one below the folder.
    """
    ask, cwd = "git -c safe.directory='*'", f"/workspace/{folder.relative_to(top).as_posix()}"
    with sandboxes.open(SandboxSpec(lowers=(top,))) as sandbox:
        list_all = f"{ask} ls-files -z --recurse-submodules >&3"
        listed = sandbox.exec(list_all, cwd=cwd, timeout_s=600, channel=True)
        describe = f"{ask} describe --tags --abbrev=0 >&3"
        tagged = sandbox.exec(describe, cwd=cwd, timeout_s=600, channel=True)
    if listed.outcome != "ok":
        raise TaskError(
            f"{folder} has a .git that git cannot read: "
            f"{git_sources.cause(listed.stderr.decode(errors='replace'))}. Mend it, give "
            f"git+file://{folder}@HEAD, or a copy of the folder without .git"
        )
    names = [os.fsdecode(name) for name in listed.channel.split(b"\0") if name]
    for name in names:
        if not is_inside(os.fsencode(name).decode(errors="replace")):
            raise TaskError(
                f"{folder}: git tracks {name!r}, which is no name that a task can hold; rename it"
            )
    return names, git_sources.version_of(tagged.channel.decode(errors="replace"))


def _copy_listed(folder: Path, name: str, into: Path) -> None:
    """One tracked file. What was deleted in the working tree is left out, and what a link took the place of."""
    place = folder / name
    if not (place.is_file() or place.is_symlink()) or not place.parent.resolve().is_relative_to(folder):
        return
    (into / name).parent.mkdir(parents=True, exist_ok=True)
    shutil.copy2(place, into / name, follow_symlinks=False)


def _ignore(folder: Path, into: Path) -> Callable[[str, list[str]], set[str]]:
    """Leftovers, pipes and devices, and the folder that the copy itself is in."""
    return lambda directory, names: {
        name
        for name in names
        if is_leftover(Path(directory, name))
        or not (
            Path(directory, name).is_symlink()
            or Path(directory, name).is_file()
            or Path(directory, name).is_dir()
        )
        or (Path(directory) == folder and name in BUILD_FOLDERS)
        or into.is_relative_to(Path(directory, name))
    }


# ---- licence ----------------------------------------------------------------------------------------------

LICENCE_TEXTS = (
    ("Apache License", "Apache-2.0"),
    ("Mozilla Public License", "MPL-2.0"),
    ("GNU AFFERO GENERAL", "AGPL-3.0"),
    ("GNU LESSER GENERAL", "LGPL"),
    ("GNU GENERAL PUBLIC", "GPL"),
    ("Permission is hereby granted, free of charge", "MIT"),
    ("Permission to use, copy, modify, and", "ISC"),
    ("PYTHON SOFTWARE FOUNDATION LICENSE", "PSF-2.0"),
    ("Neither the name of", "BSD-3-Clause"),
    ("may not be used to endorse", "BSD-3-Clause"),
    ("Redistribution and use in source and binary forms", "BSD-2-Clause"),
    ("This is free and unencumbered software", "Unlicense"),
)
"""A phrase of the licence's text and its SPDX name; the first phrase found decides."""


def _licence(tree: Path) -> str:
    if (tree / "PKG-INFO").is_file():
        fields = message_from_string((tree / "PKG-INFO").read_text(encoding="utf-8", errors="replace"))
        if fields.get("License-Expression"):
            return fields["License-Expression"]
    for path in sorted(tree.iterdir()):
        if re.match(r"(licen[cs]e|copying)", path.name, re.IGNORECASE) and path.is_file():
            text = " ".join(path.read_text(encoding="utf-8", errors="replace").split()).lower()
            for phrase, name in LICENCE_TEXTS:
                if phrase.lower() in text:
                    return name
    return "unknown"
