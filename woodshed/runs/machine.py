"""Description of this machine and of the installed versions, for the comparison of runs and benchmarks.

It imports no heavy package: the version of PyTorch is read from its metadata.
"""

from __future__ import annotations

import contextlib
import os
import platform
import subprocess
import sys
from importlib import metadata
from pathlib import Path
from typing import Any

from packaging.requirements import Requirement

import woodshed

SOURCE = Path(woodshed.__file__).resolve().parent.parent
PROGRAM = (sys.executable, "-m", woodshed.__name__)
"""Command of this program, for starting another process of it."""


def program(ranks: int = 1) -> tuple[str, ...]:
    """This program as another process of it is started, or as several that train together."""
    python, *module = PROGRAM
    return (
        PROGRAM
        if ranks == 1
        else (python, "-m", "torch.distributed.run", f"--nproc-per-node={ranks}", *module)
    )


def command(ranks: int = 1) -> str:
    """This program as a person types it, for a number of ranks that train together."""
    return "woodshed" if ranks == 1 else f"torchrun --nproc-per-node {ranks} -m woodshed"


def describe() -> dict[str, Any]:
    """Hardware, versions and the revision of this code, as plain JSON values."""
    return {
        "woodshed": woodshed.__version__,
        "revision": revision(),
        "python": platform.python_version(),
        "system": f"{platform.system()} {platform.release()} {platform.machine()}",
        "cpu": cpu_name(),
        "cores": cores(),
        "memory_gb": memory_gb(),
        "gpus": gpus(),
        "packages": packages(),
    }


def revision() -> str:
    """Commit of the source tree, with "+" if files differ from it; "" outside of a checkout."""
    if not (SOURCE / ".git").exists():
        return ""
    commit = _output("git", "-C", str(SOURCE), "rev-parse", "--short=12", "HEAD")
    changed = _output("git", "-C", str(SOURCE), "status", "--porcelain", "--untracked-files=no")
    return commit + ("+" if commit and changed else "")


def cpu_name() -> str:
    """Model name of the processor, or its architecture if the name is unknown."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text(errors="replace").splitlines() if info.exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()


def cores() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def memory_gb() -> float:
    """Memory of the machine in gigabytes."""
    return round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 1e9, 1)


def gpus() -> list[str]:
    """Names of NVIDIA GPUs, from nvidia-smi."""
    return _output("nvidia-smi", "--query-gpu=name", "--format=csv,noheader").splitlines()


def gpu_gb() -> float:
    """Memory of the smallest NVIDIA GPU in gigabytes; 0 without one."""
    sizes = _output("nvidia-smi", "--query-gpu=memory.total", "--format=csv,noheader,nounits").split()
    return round(min((float(size) for size in sizes), default=0.0) * 2**20 / 1e9, 1)


def packages() -> dict[str, str]:
    """Installed versions of the distributions that Woodshed declares, extras included."""
    versions = {}
    for requirement in _declared():
        with contextlib.suppress(metadata.PackageNotFoundError):
            versions[requirement] = metadata.version(requirement)
    return versions


def _declared() -> list[str]:
    try:
        return sorted({Requirement(line).name for line in metadata.requires("woodshed") or []})
    except metadata.PackageNotFoundError:  # a source tree that is not installed
        return []


def _output(*command: str) -> str:
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, env=git_environment(), timeout=20, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout.strip() if done.returncode == 0 else ""


REPOSITORY_VARIABLES = frozenset(
    "GIT_ALTERNATE_OBJECT_DIRECTORIES GIT_COMMON_DIR GIT_CONFIG GIT_CONFIG_COUNT GIT_CONFIG_PARAMETERS GIT_DIR "
    "GIT_GRAFT_FILE GIT_IMPLICIT_WORK_TREE GIT_INDEX_FILE GIT_NO_REPLACE_OBJECTS GIT_OBJECT_DIRECTORY GIT_PREFIX "
    "GIT_REPLACE_REF_BASE GIT_SHALLOW_FILE GIT_WORK_TREE".split()
)
"""Output of `git rev-parse --local-env-vars`: git sets them for hooks, and they redirect git to another repository."""


def git_environment() -> dict[str, str]:
    """Environment for git commands in a given repository, without prompts."""
    own = {name: value for name, value in os.environ.items() if name not in REPOSITORY_VARIABLES}
    return {**own, "GIT_TERMINAL_PROMPT": "0", "GIT_LFS_SKIP_SMUDGE": "1", "LC_ALL": "C"}
