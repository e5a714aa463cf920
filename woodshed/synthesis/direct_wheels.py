"""Wheels of what a repository requires by an address: other projects of its own, git at a commit, files and URLs.

Each is built in a sandbox like the repository itself. Its version gets an end of its own ("1.0+woodshed.3f9ac1d2e4b7",
from its files), so that a pin names these very files, and pip is given the file: no index is asked for the name.
"""

from __future__ import annotations

import base64
import hashlib
import io
import re
import tempfile
import urllib.request
import zipfile
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from email import message_from_bytes
from pathlib import Path
from urllib.parse import unquote, urlsplit

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from woodshed.records import TaskError
from woodshed.runs.files import staged
from woodshed.sandbox import SandboxProvider
from woodshed.synthesis import git_sources, project, requirements, sources
from woodshed.synthesis.siblings import siblings
from woodshed.tasks.environment import built_wheels

DOWNLOAD_BYTES = 256 << 20
TIMEOUT_S = 120.0
FILES = (".whl", ".tar.gz", ".zip")
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
                requirement.marker = None
                yield str(requirement)


@dataclass
class DirectWheels:
    """Builder of the wheels of one repository, each of them once."""

    own: str
    """The distribution that the tasks are of: whoever requires it finds it in the workspace."""
    python: str
    sandboxes: SandboxProvider
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

    def _make(self, address: str) -> DirectWheel:
        with tempfile.TemporaryDirectory(prefix="woodshed-") as scratch:
            tree, file = Path(scratch, "tree"), _file(address, Path(scratch))
            if file and file.suffix == ".whl":
                tree.mkdir()
                repository = sources.from_wheel(file, tree)
                return self._keep(repository, file.read_bytes())
            if file:
                repository = sources.from_archive(
                    file, re.split(r"-\d", file.name)[0], "0.0.0", tree, self.python
                )
            else:
                source = unquote(urlsplit(address).path) if address.startswith("file:") else address
                repository = sources.fetch(source, tree, self.sandboxes, self.python)
            wheel = project.built(repository, project.BUILD_TIMEOUT_S, self.sandboxes)
            return self._keep(repository, wheel)

    def _keep(self, repository: sources.Repository, wheel: bytes) -> DirectWheel:
        """Put a wheel into the cache: under a version of its own, without requirements that have an address."""
        contents = project.contents_of(repository.name, wheel)
        info, metadata, version = project.metadata_of(repository.name, contents, self.python)
        name = canonicalize_name(metadata["Name"])
        inside = siblings(repository.tree, name, repository.beside, repository.origin)
        direct, lines = list[Requirement](), list[bytes]()
        head, blank, body = contents[f"{info}/METADATA"].partition(b"\n\n")
        for line in head.splitlines():
            text = line.partition(b":")[2].decode(errors="replace").strip()
            if not line.startswith(b"Requires-Dist:") or not requirements.is_readable(text):
                lines.append(line)
                continue
            requirement = Requirement(text)
            required = canonicalize_name(requirement.name)
            source = requirements.source_of(requirement, inside)
            if source:
                requirement.url = source
                direct += [requirement] if required != self.own else []
            elif required not in (self.own, name) and inside.place(required):
                raise TaskError(
                    f"it requires {required}, which is of its own repository, and not at hand there"
                )
            elif required != self.own:
                lines.append(line)
        told = f"{repository.sha256} {self.python} {lines}".encode()
        mark = f"woodshed.{hashlib.sha256(told).hexdigest()[:12]}"
        release = f"{version}.{mark}" if "+" in version else f"{version}+{mark}"
        lines = [f"Version: {release}".encode() if x.startswith(b"Version:") else x for x in lines]
        contents = {**contents, f"{info}/METADATA": b"\n".join(lines) + blank + body}
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
    if parts.scheme not in ("http", "https") and not (parts.scheme == "file" and here.is_file()):
        return None
    if not here.name.endswith(FILES):
        raise TaskError(f"it is no file to install ({', '.join(FILES)}), and not marked as git+https")
    try:
        with urllib.request.urlopen(address.partition("#")[0], timeout=TIMEOUT_S) as answer:
            data = answer.read(DOWNLOAD_BYTES + 1)
    except (OSError, ValueError) as error:
        raise TaskError(f"it cannot be downloaded: {error}") from None
    wanted = re.search(r"sha256=([0-9a-f]{64})", parts.fragment)
    if len(data) > DOWNLOAD_BYTES:
        raise TaskError(f"it is larger than {DOWNLOAD_BYTES >> 20} MB")
    if wanted and hashlib.sha256(data).hexdigest() != wanted[1]:
        raise TaskError(
            f"what came has the sha256 {hashlib.sha256(data).hexdigest()}, not the one that is written"
        )
    copy = scratch / here.name
    copy.write_bytes(data)
    return copy
