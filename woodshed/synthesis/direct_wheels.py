"""Wheels of what a repository requires by an address: other projects of its own, git at a commit, files and URLs.

Each is built in a sandbox like the repository itself. Its version gets an end of its own ("1.0+woodshed.x3f9ac1d2e4b7",
from its files), so that a pin names these very files, and pip is given the file: no index is asked for the name.
"""

from __future__ import annotations

import base64
import hashlib
import io
import re
import tempfile
import zipfile
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from email import message_from_bytes
from pathlib import Path
from urllib.parse import unquote, urlsplit

from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.utils import canonicalize_name
from pypi_simple import PyPISimple

from woodshed.records import TaskError
from woodshed.runs.files import staged
from woodshed.sandbox import SandboxProvider
from woodshed.synthesis import builds, git_sources, requirements, sources
from woodshed.synthesis.siblings import Siblings, siblings
from woodshed.tasks.environment import built_wheels

DOWNLOAD_BYTES = 256 << 20
TIMEOUT_S = 120.0
FILES = (".whl", ".tar.gz", ".zip")
REQUIRES, PLUGIN = b"Requires-Dist:", b"[pytest11]"
"""Beginning of a requirement in METADATA, and of the plugins of pytest among entry points."""
PLAIN = b"Wheel-Version: 1.0\nGenerator: woodshed\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
"""WHEEL of a project without a build, whose wheel is a stand-in."""


@dataclass(frozen=True)
class DirectWheel:
    """A wheel in the cache."""

    name: str
    version: str
    requires: tuple[Requirement, ...]
    """Requirements with an address, with their markers."""

    def active(self, extras: set[str], python: str) -> Iterator[str]:
        """The requirements with an address that hold here."""
        for requirement in self.requires:
            if requirements.holds(requirement, extras, python):
                active = Requirement(str(requirement))
                active.marker = None
                yield str(active)


@dataclass
class DirectWheels:
    """Builder of the wheels of one repository, each of them once."""

    own: str
    """The distribution that the tasks are of: whoever requires it finds it in the workspace."""
    python: str
    sandboxes: SandboxProvider
    packages: tuple[str, ...] = ()
    """Import names of that project, which no wheel may bring."""
    is_ours: bool = True
    """False for a repository that was fetched: its addresses name nothing on this machine."""
    _made: dict[str, DirectWheel] = field(default_factory=dict)

    def pinned(self, listed: Sequence[str]) -> list[str]:
        """The requirements, those with an address built and pinned, and after them what those require by an address.

        Raises:
            TaskError: one cannot be fetched or built.
        """
        waiting, plain = deque(listed), list[str]()
        wheels, extras = dict[str, DirectWheel](), dict[str, set[str]]()
        while waiting:
            requirement = Requirement(waiting.popleft())
            if not requirement.url:
                plain.append(str(requirement))
                continue
            wheel = self._wheel(requirement)
            asked = extras.setdefault(wheel.name, set())
            if wheel.name not in wheels or requirement.extras - asked:
                wheels[wheel.name] = wheel
                asked |= requirement.extras
                waiting.extend(wheel.active(asked, self.python))
        for name, wheel in wheels.items():
            among = f"[{','.join(sorted(extras[name]))}]" if extras[name] else ""
            plain.append(f"{name}{among}=={wheel.version}")
        return plain

    def described(self, text: str) -> str:
        """Pin of the metadata alone of a project whose code lies in the workspace.

        Raises:
            TaskError: it cannot be built.
        """
        made = self._make(Requirement(text).url or "", with_code=False)
        return f"{made.name}=={made.version}"

    def _wheel(self, requirement: Requirement) -> DirectWheel:
        address = requirement.url or ""
        if address not in self._made:
            try:
                self._made[address] = self._make(address)
            except TaskError as error:
                shown = git_sources.without_secrets(address)
                raise TaskError(
                    f"{requirement.name}, required from {shown}, cannot be built: {error}"
                ) from None
        return self._made[address]

    def _make(self, address: str, *, with_code: bool = True) -> DirectWheel:
        with tempfile.TemporaryDirectory(prefix="woodshed-") as scratch:
            tree, file = Path(scratch, "tree"), _file(address, Path(scratch))
            if file and file.suffix == ".whl":
                tree.mkdir()
                return self._keep(sources.from_wheel(file, tree), file.read_bytes(), with_code)
            if file:
                name = re.split(r"-\d", file.name)[0]
                repository = sources.from_archive(file, name, "0.0.0", tree, self.python)
            else:
                source = unquote(urlsplit(address).path) if address.startswith("file:") else address
                repository = sources.fetch(source, tree, self.sandboxes, self.python)
                if repository.origin and not self.is_ours:
                    repository = replace(repository, origin=replace(repository.origin, is_ours=False))
            wheel = builds.built(repository, builds.BUILD_TIMEOUT_S, self.sandboxes)
            return self._keep(repository, wheel, with_code)

    def _keep(self, repository: sources.Repository, wheel: bytes, with_code: bool) -> DirectWheel:
        """Put a wheel into the cache: under a version of its own, without requirements that have an address."""
        contents = builds.contents_of(repository.name, wheel)
        for place in (package.replace(".", "/") for package in self.packages if with_code):
            if {f"{place}/__init__.py", f"{place}.py"} & contents.keys():
                raise TaskError(f"its wheel holds {place}, the code that the tasks are about")
        info, metadata, version = builds.metadata_of(repository.name, contents, self.python)
        name = canonicalize_name(metadata["Name"])
        inside = siblings(repository.tree, name, repository.beside, repository.origin)
        lines, direct = _settled(contents[f"{info}/METADATA"], inside, self.own)
        if not with_code:
            lines, direct = [line for line in lines if not line.startswith(REQUIRES)], []
            kept = {p: c for p, c in contents.items() if p.startswith(f"{info}/")}
            contents = {
                p: c for p, c in kept.items() if not p.endswith("/entry_points.txt") or PLUGIN not in c
            }
        told = f"{repository.sha256} {self.python} {with_code} {lines}".encode()
        # a letter first: a part of digits alone is a number to pip, which drops its leading zeros
        mark = f"woodshed.x{hashlib.sha256(told).hexdigest()[:12]}"
        release = f"{version}.{mark}" if "+" in version else f"{version}+{mark}"
        lines = [f"Version: {release}".encode() if x.startswith(b"Version:") else x for x in lines]
        contents |= {f"{info}/METADATA": b"\n".join(lines)}
        contents.setdefault(f"{info}/WHEEL", PLAIN)
        tags = message_from_bytes(contents[f"{info}/WHEEL"]).get_all("Tag") or ["py3-none-any"]
        stem = f"{name.replace('-', '_')}-{release}"
        file = built_wheels() / f"{stem}-{tags[-1].strip()}.whl"
        file.parent.mkdir(parents=True, exist_ok=True)
        with staged(file) as part:
            part.write_bytes(
                packed({_moved(path, info, stem): data for path, data in contents.items()}, stem)
            )
        return DirectWheel(name, release, tuple(direct))


def _settled(metadata: bytes, inside: Siblings, own: str) -> tuple[list[bytes], list[Requirement]]:
    """The lines of a METADATA without requirements that have an address, and those.

    Args:
        own: the project of the tasks, which is there anyway.

    Raises:
        TaskError: one is of the repository itself and cannot be built.
    """
    lines, direct, is_head = list[bytes](), list[Requirement](), True
    for line in metadata.splitlines():
        is_head = is_head and bool(line.strip())
        text = line.partition(b":")[2].decode(errors="replace").strip()
        if not (is_head and line.startswith(REQUIRES) and requirements.is_readable(text)):
            lines.append(line)
            continue
        requirement = Requirement(text)
        name = canonicalize_name(requirement.name)
        source = requirements.source_of(requirement, inside)
        if name == own:
            continue
        if source:
            requirement.url, requirement.specifier = source, SpecifierSet()
            direct.append(requirement)
        elif inside.place(name) or requirement.url:
            raise TaskError(f"it requires {text}, which is of its own repository, and not at hand there")
        else:
            lines.append(line)
    return lines, direct


def _moved(path: str, info: str, stem: str) -> str:
    """A path of a wheel whose version changed: its metadata and data folders carry that."""
    old = info.removesuffix(".dist-info")
    top, slash, rest = path.partition("/")
    moved = {f"{old}.dist-info": f"{stem}.dist-info", f"{old}.data": f"{stem}.data"}
    return moved.get(top, top) + slash + rest


def packed(contents: dict[str, bytes], stem: str) -> bytes:
    """A wheel of these files, the same bytes for the same files."""
    record, held = f"{stem}.dist-info/RECORD", io.BytesIO()
    rows = []
    with zipfile.ZipFile(held, "w", zipfile.ZIP_DEFLATED) as bundle:
        for path, data in sorted(contents.items()):
            if path != record:
                digest = base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b"=").decode()
                quoted = '"' + path.replace('"', '""') + '"' if re.search(r'[,"]', path) else path
                rows.append(f"{quoted},sha256={digest},{len(data)}\n")
                bundle.writestr(zipfile.ZipInfo(path), data, zipfile.ZIP_DEFLATED)
        bundle.writestr(zipfile.ZipInfo(record), "".join([*rows, f"{record},,\n"]))
    return held.getvalue()


def _file(address: str, scratch: Path) -> Path | None:
    """A copy of a wheel or an sdist, downloaded if it is not here; None for folders and for git.

    Raises:
        TaskError: it cannot be downloaded, or is another file than was asked for.
    """
    parts = urlsplit(address)
    here = Path(unquote(parts.path))
    if parts.scheme == "file" and here.is_file():
        data = here.read_bytes()
    elif parts.scheme not in ("http", "https"):
        return None
    elif here.name.endswith(FILES):
        data = _downloaded(address.partition("#")[0])
    else:
        raise TaskError(f"it is no file to install ({', '.join(FILES)}), and not marked as git+https")
    wanted = re.search(r"sha256=([0-9a-f]{64})", parts.fragment)
    if wanted and hashlib.sha256(data).hexdigest() != wanted[1]:
        raise TaskError(
            f"what came has the sha256 {hashlib.sha256(data).hexdigest()}, not the one that is written"
        )
    copy = scratch / here.name
    copy.write_bytes(data)
    return copy


def _downloaded(url: str) -> bytes:
    """A file from the web, which may need a name and a password in its address, and pip's own certificates."""
    held = bytearray()
    try:
        with PyPISimple() as client:
            verify = sources.pip_settings().get("cert") or True
            with client.s.get(url, timeout=TIMEOUT_S, stream=True, verify=verify) as answer:
                answer.raise_for_status()
                for part in answer.iter_content(1 << 20):
                    held += part
                    if len(held) > DOWNLOAD_BYTES:
                        raise TaskError(f"it is larger than {DOWNLOAD_BYTES >> 20} MB")
    except OSError as error:  # every error of requests is one
        raise TaskError(f"it cannot be downloaded: {git_sources.without_secrets(str(error))}") from None
    return bytes(held)
