"""The controller's end of the line to a supervisor: frames over a socket, every wait bounded."""

from __future__ import annotations

import contextlib
import errno
import os
import re
import select
import socket
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import IO, Any, cast

from woodshed.records import SandboxError
from woodshed.sandbox import watcher
from woodshed.sandbox.cgroups import roomy
from woodshed.sandbox.spec import Limits, Outcome, Result, Touch

SUPERVISOR = Path(__file__).with_name("supervisor.py")
WATCHER = Path(__file__).with_name("watcher.py")
START_S = 30.0
"""A machine that swaps may need seconds to start an interpreter."""
GRACE_S = 30.0
"""Seconds beyond a command's own timeout after which a supervisor that does not answer counts as lost."""
WATCH_EVERY_S = 0.5
FRAME_BYTES = 1 << 30

OUTCOMES: dict[bytes, Outcome] = {b"exit": "ok", b"timeout": "timeout", b"oom": "oom", b"limit": "limit"}

Excess = Callable[[], str]
"""Looks from outside whether a running command takes too much; says what, or ""."""


class _LostError(Exception):
    """The supervisor is gone or silent."""


class Supervisor:
    """A running supervisor process. Calls from several threads take turns."""

    def __init__(self, process: subprocess.Popen[bytes], line: socket.socket):
        self.process = process
        self._line = line
        self._turn = threading.RLock()
        self._lost = False

    def alive(self) -> bool:
        """True if it answers within five seconds."""
        try:
            return self._ask([b"ping"], timeout_s=5.0) == [b"ok"]
        except _LostError:
            return False

    def exec(
        self,
        command: str | Sequence[str],
        *,
        cwd: str,
        env: Mapping[str, str],
        stdin: bytes,
        timeout_s: float,
        max_output: int,
        channel: bool,
        excess: Excess | None = None,
    ) -> Result:
        argv = ["/bin/bash", "-c", command] if isinstance(command, str) else command
        words, variables = "\0".join(argv), "\0".join(f"{name}={value}" for name, value in env.items())
        texts = [cwd, repr(float(timeout_s)), str(max_output), str(int(channel)), words, variables]
        if words.count("\0") >= len(argv) or not all(map(_encodable, texts)):
            return Result("nonzero", 127, b"", b"cannot start: not text, or a NUL in it\n", False, 0.0)
        request = [b"exec", *map(os.fsencode, texts[:4]), stdin, *map(os.fsencode, texts[4:])]
        started = time.monotonic()
        try:
            reply = self._ask(request, timeout_s=timeout_s + GRACE_S, excess=excess)
            end, code, seconds, truncated, stdout, stderr, side = reply
            exit_code = int(code) if code else None
            outcome = OUTCOMES[end] if exit_code is None or exit_code == 0 else "nonzero"
            return Result(outcome, exit_code, stdout, stderr, truncated == b"1", float(seconds), side)
        except (_LostError, KeyError, ValueError):
            self._lost = True
            return Result("sandbox_lost", None, b"", b"", False, time.monotonic() - started)

    def touched(self) -> list[Touch]:
        try:
            fields = [
                field.decode(errors="backslashreplace") for field in self._ask([b"touched"], timeout_s=30.0)
            ]
        except _LostError:
            return []
        return [
            Touch(path, cast("Any", mode), command, int(count))
            for mode, path, command, count in zip(*[iter(fields)] * 4, strict=True)
        ]

    def read(self, path: str, most: int) -> bytes:
        return self._file(b"read", path, str(most).encode())[0]

    def write(self, path: str, data: bytes) -> None:
        self._file(b"write", path, data)

    def _file(self, verb: bytes, path: str, argument: bytes) -> list[bytes]:
        if not _encodable(path):
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL), path)
        try:
            status, *fields = self._ask([verb, os.fsencode(path), argument], timeout_s=60.0)
        except _LostError:
            raise SandboxError(f"the sandbox was lost while it handled {path!r}") from None
        if status == b"error":
            number = int(fields[0])
            raise OSError(number, os.strerror(number), path)
        return fields

    def hang_up(self) -> None:
        """The supervisor exits and takes every process of its sandbox along. Does not wait for that (`stop` does)."""
        self._lost = True
        with contextlib.suppress(OSError):
            self._line.shutdown(socket.SHUT_RDWR)  # wakes a thread that waits for a reply; closing would not

    def stop(self) -> None:
        self.hang_up()
        try:
            self.process.wait(5.0)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        with self._turn:
            self._line.close()

    def _ask(self, fields: list[bytes], *, timeout_s: float, excess: Excess | None = None) -> list[bytes]:
        with self._turn:
            if self._lost:
                raise _LostError
            deadline = time.monotonic() + timeout_s
            try:
                self._line.settimeout(timeout_s)
                self._line.sendall(_frame(fields))
                self._watch(deadline, excess)
                return self._receive(deadline)
            except (OSError, ValueError) as error:
                self._lost = True
                raise _LostError from error

    def _watch(self, deadline: float, excess: Excess | None) -> None:
        """Wait for the reply to begin; stop the command once it takes too much."""
        poll, pause = select.poll(), WATCH_EVERY_S
        poll.register(self._line, select.POLLIN)
        while not poll.poll(1000 * min(pause, max(0.0, deadline - time.monotonic()))):
            started = time.monotonic()
            if started >= deadline:
                raise TimeoutError
            if excess is not None and (what := excess()):
                self._line.sendall(_frame([b"stop", b"limit", what.encode()]))
                excess = None
            pause = max(WATCH_EVERY_S, 20 * (time.monotonic() - started))

    def _receive(self, deadline: float) -> list[bytes]:
        def exactly(size: int) -> bytes:
            if size > FRAME_BYTES:
                raise ValueError("frame too large")
            data = bytearray()
            while len(data) < size:
                self._line.settimeout(max(0.001, deadline - time.monotonic()))
                part = self._line.recv(min(size - len(data), 1 << 20))
                if not part:
                    raise ConnectionError
                data += part
            return bytes(data)

        def number() -> int:
            return int.from_bytes(exactly(4), "little")

        return [exactly(number()) for _ in range(number())]


def _encodable(text: str) -> bool:
    """Not so for half of a surrogate pair, which a policy can write in JSON."""
    try:
        os.fsencode(text)
    except UnicodeEncodeError:
        return False
    return True


def _frame(fields: Sequence[bytes]) -> bytes:
    parts = [len(fields).to_bytes(4, "little")]
    for field in fields:
        parts += [len(field).to_bytes(4, "little"), field]
    return b"".join(parts)


def launch(
    command: Sequence[str],
    *,
    workspace: str,
    limits: Limits,
    log: Path,
    fallbacks: bool = False,
    watch: Sequence[str] | None = None,
    moves: bool = False,
    filtered: bool = False,
) -> Supervisor:
    """Start a command that ends in a supervisor, without waiting for it (`handshake` does).

    The command line gets the supervisor's own arguments appended: the socket's number, the workspace, the limits.

    Args:
        log: where bubblewrap's complaints go.
        watch: names for `SandboxSpec.watch`.
        moves: let folders of the workspace be renamed although it is an overlay, where this kernel can.
        filtered: the command is bubblewrap, and is to refuse the system calls that hoard memory.
        fallbacks: no control group limits memory and processes, so let the kernel limit each process.
    """
    most = {**vars(limits), "address_mb": 0, "nproc": 0, "moves": int(moves)}
    if fallbacks:
        most["address_mb"] = 8 * limits.memory_mb  # programs reserve much more than they use
        if os.getuid() != 0 and _kernel() >= (5, 14):  # never counts root; counts per sandbox from 5.14 on
            most["nproc"] = roomy(limits.pids)
    ours, theirs = socket.socketpair()
    words = [f"{name}={value}" for name, value in most.items()]
    words += [] if watch is None else [f"watch={','.join(watch)}"]
    with theirs, log.open("wb") as output, tempfile.TemporaryFile() as rules:
        options = ["--seccomp", str(rules.fileno())] if filtered and watcher.HOARDS else []
        rules.write(watcher.program((), watcher.HOARDS))
        rules.seek(0)
        line = [command[0], *options, *command[1:], str(theirs.fileno()), workspace, *words]
        try:
            process = _LAUNCHER.submit(_popen, line, [theirs.fileno(), rules.fileno()], output).result()
        except OSError as error:
            ours.close()
            raise SandboxError(f"{command[0]} does not start: {error}") from None
    return Supervisor(process, ours)


def handshake(supervisor: Supervisor) -> bool:
    """True once the supervisor says that it is ready; if not, its log tells why."""
    try:
        return supervisor._receive(time.monotonic() + START_S) == [b"ready"]
    except (OSError, ValueError):
        return False


def _kernel() -> tuple[int, ...]:
    return tuple(int(part) for part in re.findall(r"\d+", os.uname().release)[:2])


def _popen(command: Sequence[str], descriptors: Sequence[int], output: IO[bytes]) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=output,
        stderr=output,
        pass_fds=descriptors,
        env={},
        start_new_session=True,  # Ctrl-C is for the controller, which then closes its sandboxes
    )


def _renew_launcher() -> None:
    global _LAUNCHER
    _LAUNCHER = ThreadPoolExecutor(1, thread_name_prefix="sandbox-launcher")


# bwrap --die-with-parent means the *thread* that started it. So one thread, which lives as long as we do, starts all.
_LAUNCHER = ThreadPoolExecutor(1, thread_name_prefix="sandbox-launcher")
os.register_at_fork(after_in_child=_renew_launcher)
