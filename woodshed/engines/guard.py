"""Guard of one inference server: it starts the server, starts it again when it dies, and ends all of its processes.

A server is several processes, and those that compute outlive one that answers requests and was killed. A variable in
their environment tells them from others. The guard reads its orders as one line of JSON from its standard input; when
that ends, since its owner does or is killed, the guard ends the server and itself. Standard library only.
"""

from __future__ import annotations

import ctypes
import itertools
import json
import os
import re
import select
import signal
import subprocess
import sys
import time
import urllib.request
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Literal

MARK = "WOODSHED_SERVER"
"""Environment variable of all processes of a server: the path of its record."""
MOST_STARTS = 3
"""Starts in a row after which a server that never answers is given up."""
BEAT_S = 0.5
SLOW_BEATS = 10
REAP_S = 10.0
SET_PDEATHSIG = 1
SHARED = re.compile(r" (/dev/shm/[^/ ]+)$", re.MULTILINE)


@dataclass
class ServerRecord:
    """State of a server, as its guard writes it; the file's modification is its last sign of life."""

    url: str
    state: Literal["starting", "ready", "failed", "ended"] = "starting"
    pid: int = 0
    guard: int = 0
    starts: int = 0
    shared: list[str] = field(default_factory=list)
    """Names in shared memory that the server has mapped: those of a killed one stay."""


@dataclass(frozen=True)
class Orders:
    """Orders to a guard."""

    record: str
    """Path of the JSON file that says how the server is; its log is beside it."""
    url: str
    command: list[str]
    environment: dict[str, str]
    start_s: float
    """Longest time until it answers."""


class Guard:
    """The server's owner, until its own owner ends."""

    def __init__(self, orders: Orders) -> None:
        self.orders = orders
        self.path = Path(orders.record)
        self.record = ServerRecord(orders.url, guard=os.getpid())
        with suppress(OSError, ValueError, KeyError):  # of a guard that was killed
            self.record.shared = json.loads(self.path.read_text())["shared"]

    def run(self) -> int:
        """Keep the server running; the exit code: 1 where it never answers."""
        failures = 0
        try:
            while failures < MOST_STARTS:
                if self._once():
                    self._note("ended")
                    return 0
                failures = 0 if self.record.state == "ready" else failures + 1
                self._note("starting")
            self._note("failed")
            return 1
        finally:
            self._reap()

    def _once(self) -> bool:
        """Start the server and wait for its end; True if it is not wanted any more."""
        self._reap()  # processes of an earlier guard
        with self.path.with_suffix(".log").open("ab") as log:
            process = subprocess.Popen(
                self.orders.command,
                env=self.orders.environment | {MARK: self.orders.record},
                cwd=self.path.parent,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                preexec_fn=_die_with_parent,
            )
        self.record.pid, self.record.starts = process.pid, self.record.starts + 1
        self._note("starting")
        deadline = time.monotonic() + self.orders.start_s
        is_wanted = True
        for beat in itertools.count():
            if not is_wanted or process.poll() is not None:
                break
            self._look(is_thorough=beat % SLOW_BEATS == 0)
            if self.record.state == "starting" and time.monotonic() > deadline:
                break
            is_wanted = not select.select([0], [], [], BEAT_S)[0]
        self._reap()
        process.wait()
        return not is_wanted

    def _look(self, *, is_thorough: bool) -> None:
        """Note that the server answers, and what it maps: then, and now and then."""
        if self.record.state == "starting":
            with (
                suppress(OSError, ValueError),
                urllib.request.urlopen(f"{self.orders.url}/health", timeout=5),
            ):
                is_thorough = True
                self._note("ready")
        for pid in members(self.orders.record) if is_thorough else ():
            with suppress(OSError):
                mapped = set(SHARED.findall(Path(f"/proc/{pid}/maps").read_text()))
                if new := mapped - set(self.record.shared):
                    self.record.shared += sorted(new)
                    self._note(self.record.state)
        os.utime(self.path)

    def _note(self, state: Literal["starting", "ready", "failed", "ended"]) -> None:
        self.record.state = state
        partial = self.path.with_suffix(".partial")
        partial.write_text(json.dumps(asdict(self.record)) + "\n")
        partial.replace(self.path)

    def _reap(self) -> None:
        reap(self.orders.record)
        for name in self.record.shared:
            Path(name).unlink(missing_ok=True)
        self.record.shared.clear()


def members(record: str) -> list[int]:
    """Processes of a server, dead ones that nobody has waited for left out."""
    mark, found = f"{MARK}={record}".encode(), []
    for entry in os.scandir("/proc"):
        if entry.name.isdecimal():
            with suppress(OSError):
                if mark in Path(entry.path, "environ").read_bytes().split(b"\0"):
                    found.append(int(entry.name))
    return found


def reap(record: str) -> None:
    """End all processes of a server."""
    deadline = time.monotonic() + REAP_S
    while (pids := members(record)) and time.monotonic() < deadline:
        for pid in pids:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        with suppress(ChildProcessError):
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        time.sleep(0.05)


def _die_with_parent() -> None:
    ctypes.CDLL(None).prctl(SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)


def main() -> int:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # its owner decides
    return Guard(Orders(**json.loads(_first_line()))).run()


def _first_line() -> bytes:
    """The orders, without reading on: only the end of input is waited for later."""
    line = bytearray()
    while not line.endswith(b"\n"):
        byte = os.read(0, 1)
        if not byte:
            break
        line += byte
    return bytes(line)


if __name__ == "__main__":
    sys.exit(main())
