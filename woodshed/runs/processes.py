"""Processes that belong to a run: they end with the one that started them, and none is left running."""

from __future__ import annotations

import ctypes
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from woodshed.runs.files import write_atomically

PR_SET_PDEATHSIG = 1
GRACE_S = 5.0
"""Time in which processes may end by themselves after SIGTERM."""


def die_with_parent() -> None:
    """Have the kernel end this process when the one that started it ends, however that happens."""
    ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() == 1:
        sys.exit("the process that started this one has ended")


def bound_to_parent() -> Callable[[], None]:
    """A function for `preexec_fn` that does the same in a new process; its libraries are loaded before the fork."""
    libc, parent = ctypes.CDLL(None, use_errno=True), os.getpid()

    def bind() -> None:
        libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        if os.getppid() != parent:
            os._exit(1)

    return bind


def started_at(pid: int) -> int:
    """Time at which a process started, in ticks since the machine did; 0 where there is none, or it is a zombie."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return 0
    return 0 if fields[0] == "Z" else int(fields[19])


@dataclass
class Child:
    """A process of a run, in a session of its own, which is started again when it dies."""

    name: str
    command: Sequence[str]
    log: Path
    environment: Mapping[str, str] = field(default_factory=dict)
    starts: int = 0
    process: subprocess.Popen[bytes] | None = None
    begins: int = 0
    """Size of the log when it was started last."""

    def start(self) -> None:
        """Start it; what it says goes to the end of its log."""
        self.log.parent.mkdir(parents=True, exist_ok=True)
        with self.log.open("ab") as log:
            self.begins = log.tell()
            self.process = subprocess.Popen(
                list(self.command),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
                env={**os.environ, **self.environment},
                preexec_fn=bound_to_parent(),
            )
        self.starts += 1

    @property
    def said(self) -> str:
        """All that it said since it was started last."""
        with self.log.open("rb") as log:
            log.seek(self.begins)
            return log.read().decode(errors="replace")

    def end(self) -> None:
        """End it and everything that it started."""
        end_groups([self.process.pid] if self.process is not None else [])
        if self.process is not None:
            self.process.wait()


def end_groups(leaders: Sequence[int]) -> None:
    """End process groups: by SIGTERM, and after a while by SIGKILL."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        for leader in leaders:
            with suppress(ProcessLookupError, PermissionError):
                os.killpg(leader, number)
        deadline = time.monotonic() + GRACE_S
        while any(_lives(leader) for leader in leaders) and time.monotonic() < deadline:
            time.sleep(0.05)


def _lives(leader: int) -> bool:
    """True while a process group has a member that is no zombie."""
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = stat.read_text().rpartition(")")[2].split()
        except OSError:
            continue
        if int(fields[2]) == leader and fields[0] != "Z":
            return True
    return False


def write_table(path: Path, children: Sequence[Child]) -> None:
    """Write which processes belong to a run, by name: pid, time of its start, number of starts, command."""
    own = {"pid": os.getpid(), "started_at": started_at(os.getpid())}
    table: dict[str, dict[str, Any]] = {"launcher": own}
    for child in children:
        if child.process is not None:
            pid = child.process.pid
            about = {"pid": pid, "started_at": started_at(pid), "starts": child.starts}
            table[child.name] = about | {"command": list(child.command)}
    write_atomically(path, json.dumps(table, indent=2) + "\n")


def reap(path: Path) -> list[str]:
    """End what is still running of an earlier table, and say which. A process is known by its number and the time of
    its start, so that none that took the number over is ended."""
    try:
        table = json.loads(path.read_text())
    except (OSError, ValueError):
        return []
    alive = {
        name: about["pid"]
        for name, about in table.items()
        if name != "launcher" and about["started_at"] and started_at(about["pid"]) == about["started_at"]
    }
    end_groups(list(alive.values()))
    return list(alive)
