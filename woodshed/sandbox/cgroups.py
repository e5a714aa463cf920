"""A wall behind the supervisor's watch: memory and process limits by the kernel, where we may make control groups.

The supervisor looks 20 times a second and gives a typed result; a burst between two looks meets this wall. Its
limits are wider than what is watched, so that the result of a command does not depend on whether there is a wall.
Both versions of control groups do; neither is needed.
"""

from __future__ import annotations

import contextlib
import functools
import time
from pathlib import Path

from woodshed.sandbox.spec import Limits

ROOT = Path("/sys/fs/cgroup")
MB = 1 << 20


class ControlGroup:
    """The control groups of one sandbox: one folder (version 2), or one per controller (version 1)."""

    def __init__(self, folders: list[Path], version: int):
        self.folders, self.version, self._kills = folders, version, 0

    def admit_child(self, pid: int) -> bool:
        """Move the only child of a process here, which is about to appear: process 1 of the sandbox.

        The kernel may take 10 ms for it, which pass while the sandbox starts. False where that is not allowed.
        """
        children = Path(f"/proc/{pid}/task/{pid}/children")
        deadline = time.monotonic() + 1.0
        with contextlib.suppress(OSError):
            while time.monotonic() < deadline:
                if child := children.read_text().strip():
                    for folder in self.folders:
                        (folder / "cgroup.procs").write_text(child)
                    return True
                time.sleep(0.0005)
        return False

    def killed(self) -> bool:
        """True if the kernel has killed a process here for lack of memory since the last call."""
        name = "memory.events" if self.version == 2 else "memory.oom_control"
        before = self._kills
        with contextlib.suppress(OSError, StopIteration, ValueError):
            lines = (self.folders[0] / name).read_text().splitlines()
            self._kills = int(next(line.split()[1] for line in lines if line.startswith("oom_kill ")))
        return self._kills > before

    def close(self) -> None:
        remove(self.folders)


def make(name: str, limits: Limits, *, in_memory_mb: int) -> ControlGroup | None:
    """A group with room for `limits` and for files kept in memory, or None where this user may not make one."""
    found = _parents()
    if found is None:
        return None
    parents, version = found
    memory = (limits.memory_mb + in_memory_mb) * MB * 5 // 4 + 64 * MB
    settings = {
        "memory.max" if version == 2 else "memory.limit_in_bytes": memory,
        "pids.max": roomy(limits.pids),
    }
    folders = [parent / name for parent in parents]
    try:
        for folder in folders:
            folder.mkdir()
            for file, value in settings.items():
                if (folder / file).exists():
                    (folder / file).write_text(str(value))
    except OSError:
        remove(folders)
        return None
    return ControlGroup(folders, version)


def roomy(pids: int) -> int:
    """A hard limit on processes that the watch sees exceeded before programs run into it."""
    return 2 * pids + 32


def remove(folders: list[Path]) -> None:
    for folder in folders:
        with contextlib.suppress(OSError):
            folder.rmdir()


@functools.cache
def _parents() -> tuple[list[Path], int] | None:
    """Folders in which groups can be made: (memory and pids folders, 1) or (one folder, 2)."""
    try:
        lines = Path("/proc/self/cgroup").read_text().splitlines()
    except OSError:
        return None
    mine = {
        name: path for _, names, path in (line.split(":", 2) for line in lines) for name in names.split(",")
    }
    if "memory" in mine and "pids" in mine:
        return [ROOT / name / mine[name].lstrip("/") for name in ("memory", "pids")], 1
    folder = ROOT / mine.get("", "/").lstrip("/")
    while folder.is_relative_to(ROOT):  # the nearest one that passes both controllers on to its children
        with contextlib.suppress(OSError):
            if {"memory", "pids"} <= set((folder / "cgroup.subtree_control").read_text().split()):
                return [folder], 2
        folder = folder.parent
    return None
