"""Requests to a sandbox and its answers."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, Protocol

WORKSPACE = "/workspace"
HOME = "/home/agent"

ENVIRONMENT = {
    "PATH": "/env/bin:/usr/local/bin:/usr/bin:/bin",
    "HOME": HOME,
    "USER": "agent",
    "SHELL": "/bin/bash",
    "LANG": "C.UTF-8",
    "TZ": "UTC",
    "TERM": "dumb",
    "PAGER": "cat",
    "GIT_PAGER": "cat",
    "CI": "1",
    "PYTHONHASHSEED": "0",
    "PYTHONDONTWRITEBYTECODE": "1",
    "PYTHONUNBUFFERED": "1",  # so that a command that is killed leaves what it printed
    "OMP_NUM_THREADS": "1",  # thread pools sized by the host's cores would run into the limit on threads
    "OPENBLAS_NUM_THREADS": "1",
}
"""The environment of every command; `SandboxSpec.env` and `exec(env=...)` come on top."""


@dataclass(frozen=True)
class Limits:
    """Limits of a command. One that exceeds them ends with "oom" or "limit"."""

    memory_mb: int = 2048
    """Resident memory of everything that the command started, together."""
    pids: int = 128
    """Processes and threads, together."""
    file_mb: int = 256
    """Size of any one file."""
    disk_mb: int = 1024
    """All changes to the workspace, together; checked twice a second."""
    tmp_mb: int = 256
    """Each of /tmp, /dev/shm and the home directory; they live in memory."""
    open_files: int = 1024
    """Per process."""
    output_mb: int = 64
    """Printed by one command, whether it is kept or not."""


@dataclass(frozen=True)
class SandboxSpec:
    """Parts of a sandbox. None of them is ever written to."""

    lowers: tuple[Path, ...]
    """Read-only layers of the workspace, bottom first; shown copy-on-write at /workspace."""
    environment: Path | None = None
    """A virtual environment of a Python on this machine, read-only at /env. None: an empty one of this Python."""
    binds: Mapping[str, Path] = field(default_factory=dict)
    """Extra read-only files or folders: absolute path in the sandbox, outside the workspace, to path on the host."""
    scratch: tuple[str, ...] = ()
    """Extra empty folders in memory that commands may write to: absolute paths outside the workspace."""
    env: Mapping[str, str] = field(default_factory=dict)
    """Environment variables on top of the fixed ones; none of the host's are passed on."""
    limits: Limits = Limits()
    user: Literal["agent", "grader"] = "agent"
    """User that runs commands: uid 1000 or 1001."""
    watch: tuple[str, ...] | None = None
    """Keep what commands touch (`Sandbox.touched`), but for ordinary reads of /usr and /env: those only where one
    of these names is a folder or a file (with any ending) on the way. None: nothing is watched, which is faster."""


@dataclass(frozen=True)
class Touch:
    """One file that one command opened, changed or ran, however often."""

    path: str
    """Absolute, as the sandbox sees it, links followed."""
    mode: Literal["read", "write", "exec"]
    command: str
    """Arguments of the process, joined by spaces, cut."""
    count: int


Outcome = Literal["ok", "nonzero", "timeout", "oom", "limit", "sandbox_lost"]


@dataclass(frozen=True)
class Result:
    """Result of one command."""

    outcome: Outcome
    """"limit": too many processes, too large a file, too much output or disk. "sandbox_lost": no news of the
    command, only of the sandbox; never show it to a policy."""
    exit_code: int | None
    """128 + n where signal n ended it; None where we ended it."""
    stdout: bytes
    """If `truncated`, its beginning and its end, with a line in between that counts the missing bytes."""
    stderr: bytes
    truncated: bool
    seconds: float
    channel: bytes = b""
    """Bytes that the command wrote to its file descriptor 3 (exec with channel=True)."""


FileType = Literal["file", "dir", "symlink", "other"]


@dataclass(frozen=True)
class Change:
    """One path of the workspace that differs from the lowers."""

    path: str
    """Relative to the workspace. A renamed file is one "deleted" and one "added"."""
    kind: Literal["added", "modified", "deleted"]
    file_type: FileType
    """Its present type; for a deleted one, its former type."""
    size: int = field(default=0, compare=False)
    """Bytes of the file that it is now."""


@dataclass(frozen=True)
class Check:
    """One line of `woodshed doctor`."""

    name: str
    ok: bool
    detail: str
    remedy: str = ""
    """Remedy, if it is not ok."""


class Sandbox(Protocol):
    """A place where untrusted code runs. Calls from several threads are safe and take turns."""

    @property
    def workspace(self) -> str:
        """Absolute path of the workspace as commands see it: "/workspace"."""
        ...

    def exec(
        self,
        command: str | Sequence[str],
        *,
        cwd: str | None = None,
        env: Mapping[str, str] | None = None,
        stdin: bytes = b"",
        timeout_s: float = 120.0,
        max_output: int = 1 << 20,
        channel: bool = False,
    ) -> Result:
        """Run a command (a string goes to the shell) to its end. Whatever it leaves running is killed.

        Args:
            cwd: absolute or relative to the workspace, which is the default.
            max_output: bytes kept of stdout, and of stderr.
            channel: give the command a pipe as file descriptor 3 and return what it wrote there.
        """
        ...

    def read(self, path: str, most: int | None = None) -> bytes:
        """A regular file of at most `most` bytes and `Limits.file_mb`; path absolute or relative to the workspace.

        Raises:
            OSError: the sandbox's own reason (FileNotFoundError, IsADirectoryError, EFBIG, ...).
            SandboxError: the sandbox was lost.
        """
        ...

    def write(self, path: str, data: bytes) -> None:
        """Create or overwrite a regular file, and the folders above it. Raises like `read`."""
        ...

    def diff(self) -> list[Change]:
        """Differences between the workspace and the lowers, sorted by path."""
        ...

    def altered(self, paths: Iterable[str]) -> list[str]:
        """Those of some files of the lowers that somebody inside wrote to, replaced, moved or removed, or whose mode or
        times somebody inside set, whatever they hold now. What happens to them on the host does not count."""
        ...

    def touched(self) -> list[Touch]:
        """Paths that commands touched since the last call, in order of first use; empty unless `SandboxSpec.watch`."""
        ...

    def fork(self) -> Sandbox:
        """A second sandbox with the same workspace, independent from now on.

        Files outside the workspace (/tmp, the home directory) start empty again, in both.
        """
        ...

    def alive(self) -> bool: ...

    def close(self) -> None:
        """Kill everything inside and delete what it wrote. Closing twice is fine."""
        ...

    def __enter__(self) -> Sandbox: ...

    def __exit__(self, *exception: object) -> None: ...
