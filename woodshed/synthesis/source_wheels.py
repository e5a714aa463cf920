"""Wheels of what pip finds only as source, built in a sandbox like the repository itself and kept in the cache.

pip looks there, too, whenever an environment is built (`tasks.environment`); nothing of the source runs on the host.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator
from email import message_from_bytes
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import InvalidSdistFilename, canonicalize_name, parse_sdist_filename
from packaging.version import Version
from pypi_simple import NoSuchProjectError, PyPISimple

from woodshed.records import TaskError
from woodshed.sandbox import SandboxProvider
from woodshed.synthesis import builds, sources
from woodshed.tasks.environment import built_wheels
from woodshed.tasks.interpreters import OURS


def build(requirement: Requirement, sandboxes: SandboxProvider, python: str = OURS) -> None:
    """Put a wheel of the newest release that fits into the cache.

    Raises:
        TaskError: there is no source either, or it cannot be built.
    """
    with tempfile.TemporaryDirectory(prefix="woodshed-") as scratch:
        tree = Path(scratch, "tree")
        local = sorted(_in_folders(requirement), key=lambda found: found[0])
        if local:
            version, archive = local[-1]
            copy = shutil.copy(archive, scratch)
            repository = sources.from_archive(Path(copy), requirement.name, str(version), tree, python)
        else:
            source = f"pypi:{requirement.name}=={_newest(requirement)}"
            repository = sources.fetch(source, tree, sandboxes, python)
        wheel = builds.build(repository, builds.BUILD_TIMEOUT_S, sandboxes)
    file = built_wheels() / _file_name(requirement, wheel, python)
    file.parent.mkdir(parents=True, exist_ok=True)
    part = file.with_name(f".{file.name}.{os.getpid()}")
    part.write_bytes(wheel)
    part.replace(file)


def _in_folders(requirement: Requirement) -> Iterator[tuple[Version, Path]]:
    """Sources in pip's own folders (PIP_FIND_LINKS), each with its version."""
    for place in sources.pip_settings().get("find-links", "").split():
        folder = Path(place.removeprefix("file://"))
        for path in sorted(folder.iterdir()) if folder.is_dir() else ():
            try:
                name, version = parse_sdist_filename(path.name)
            except InvalidSdistFilename:
                continue
            if name == canonicalize_name(requirement.name) and requirement.specifier.contains(version):
                yield version, path


def _newest(requirement: Requirement) -> Version:
    """The newest release on the index with a source that fits.

    Raises:
        TaskError: there is none, or the index does not answer.
    """
    try:
        with PyPISimple(sources.index_url()) as index:
            index.s.verify = sources.pip_settings().get("cert") or True
            packages = index.get_project_page(requirement.name, timeout=30).packages
    except (NoSuchProjectError, OSError):
        raise TaskError("no package index has its source") from None
    listed = [
        sources.version_in(p.version) for p in packages if p.package_type == "sdist" and not p.is_yanked
    ]
    fitting = [version for version in listed if version and requirement.specifier.contains(version)]
    if not fitting:
        raise TaskError("no package index has its source")
    return max(fitting)


def _file_name(requirement: Requirement, wheel: bytes, python: str) -> str:
    """The name that pip knows a wheel by, from what it says of itself.

    Raises:
        TaskError: it is of another distribution or version.
    """
    contents = builds.contents_of(requirement.name, wheel)
    info, metadata, version = builds.metadata_of(requirement.name, contents, python)
    name = canonicalize_name(metadata["Name"])
    if name != canonicalize_name(requirement.name) or not requirement.specifier.contains(
        version, prereleases=True
    ):
        raise TaskError(f"its source makes {name} {version}")
    tags = message_from_bytes(contents.get(f"{info}/WHEEL", b"")).get_all("Tag") or ["py3-none-any"]
    return f"{name.replace('-', '_')}-{version}-{tags[-1].strip()}.whl"
