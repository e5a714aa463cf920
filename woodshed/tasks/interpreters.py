"""Pythons of this machine that environments are made with: our own, those on PATH, and those that uv and pyenv keep."""

from __future__ import annotations

import os
import re
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

from packaging.specifiers import InvalidSpecifier, SpecifierSet

from woodshed.records import TaskError

OURS = f"{sys.version_info.major}.{sys.version_info.minor}"
FORM = r"[1-9]\d?\.\d{1,2}"
KNOWN = tuple(f"3.{minor}" for minor in range(11, 15))
"""Versions that the runner and the grader, which work inside an environment, are written for."""


def find(version: str) -> Path:
    """The base interpreter of a Python version.

    Raises:
        TaskError: no version, or none of this machine.
    """
    if version == OURS:
        return Path(getattr(sys, "_base_executable", sys.executable)).resolve()
    if not re.fullmatch(FORM, version):
        raise TaskError(f"{version!r} is no Python version; write major and minor ({OURS})")
    found = next(_places(version), None)
    if found is None:
        raise TaskError(
            f"the environment wants Python {version}, and there is no python{version} on PATH, and none of uv or "
            f"pyenv. Install it (uv python install {version}), or make the task again with Python {OURS}."
        )
    return found


def _places(version: str) -> Iterator[Path]:
    """Executables of a version. A shim of pyenv is none: it is a script, which sandboxes do not hold."""
    folders = [p for p in os.get_exec_path() if os.path.isabs(p) and Path(p).name != "shims"]  # noqa: PTH117
    on_path = shutil.which(f"python{version}", path=os.pathsep.join(folders))
    if on_path:
        yield Path(on_path).resolve()
    pyenv = Path(os.environ.get("PYENV_ROOT") or Path.home() / ".pyenv", "versions")
    uv = Path(os.environ.get("UV_PYTHON_INSTALL_DIR") or Path.home() / ".local/share/uv/python")
    for home, pattern in ((pyenv, f"{version}.*"), (uv, f"cpython-{version}.*")):
        for folder in sorted(home.glob(pattern), reverse=True):
            executable = folder / "bin" / f"python{version}"
            if executable.is_file():
                yield executable.resolve()


def refuse_unknown(version: str) -> None:
    """Raise TaskError for a version that a person chose and that nothing here works with."""
    if version not in KNOWN:
        raise TaskError(
            f"python={version}: the runner of tests and the grader, which work inside the environment, are written for "
            f"{', '.join(KNOWN)}; choose one of these"
        )
    find(version)


def choose(required: str) -> str:
    """Our own version if a `requires-python` admits it, else the newest of this machine that it admits; our own where
    there is none, which the wheel's metadata refuses with the reason."""
    try:
        admitted = SpecifierSet(required)
    except InvalidSpecifier:
        return OURS
    for version in (OURS, *reversed(KNOWN)):
        if admitted.contains(f"{version}.99", prereleases=True) and (
            version == OURS or any(_places(version))
        ):
            return version
    return OURS
