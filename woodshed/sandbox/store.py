"""Folders on the host that hold what sandboxes write, and how they go away again."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import secrets
import shutil
import subprocess
import tempfile
import threading
import time
import weakref
from collections.abc import Iterable, Iterator
from pathlib import Path

from woodshed.records import SandboxError

REMEDY = (
    "set WOODSHED_SCRATCH to a folder on a local disk (ext4, xfs, btrfs) or on tmpfs (Linux 6.6 or newer)"
)
ROOMY = 2 << 30
NOTES = "notes"


class Store:
    """The folder of one sandbox and of its forks; deleted when the last of them is released.

    The process that made it holds a lock on it while it lives, so that leftovers of a killed process can be told
    from folders in use (`reap`), in whatever PID namespace it ran.

    Raises:
        SandboxError: no folder on this machine can hold it.
    """

    def __init__(self) -> None:
        root = scratch()
        descriptor = None
        while descriptor is None:  # None: the name is taken, or a reaper was faster
            self.path = root / secrets.token_hex(3)
            with contextlib.suppress(FileExistsError):
                self.path.mkdir()
                descriptor = _lock(self.path)
        self._users, self._layers, self._guard = 1, 0, threading.Lock()
        self._finalizer = weakref.finalize(self, _discard, self.path, descriptor, os.getpid())

    def layer(self) -> Path:
        """A new empty folder. Names are short because all layers must fit into one mount option."""
        with self._guard:
            self._layers += 1
            path = self.path / str(self._layers)
        path.mkdir()
        return path

    def note(self, groups: Iterable[Path]) -> None:
        """Control groups that go when the store goes."""
        with self._guard, (self.path / NOTES).open("a") as notes:
            notes.writelines(f"{group}\n" for group in groups)

    def acquire(self) -> Store:
        with self._guard:
            self._users += 1
        return self

    def release(self) -> None:
        with self._guard:
            self._users -= 1
            last = self._users == 0
        if last:
            self._finalizer()


@contextlib.contextmanager
def folder() -> Iterator[Path]:
    """A folder for the time inside. What a killed process leaves goes with the leftovers of its sandboxes."""
    home = Store()
    try:
        yield home.layer()
    finally:
        home.release()


def scratch() -> Path:
    """This user's folder for stores: below WOODSHED_SCRATCH, else /dev/shm where roomy, else the temporary folder.

    Memory comes before disk because taking an overlay down syncs the whole file system of its upper layer.

    Raises:
        SandboxError: the folder cannot be made, is somebody else's, or cannot hold an upper layer.
    """
    chosen = os.environ.get("WOODSHED_SCRATCH")
    temporary = Path(tempfile.gettempdir())
    places = [Path(chosen)] if chosen else [*([SHARED] if _room(SHARED) >= ROOMY else []), temporary]
    problem = ""
    for place in places:
        folder = place / f"woodshed-{os.getuid()}"
        try:
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            if folder.lstat().st_uid != os.getuid() or folder.is_symlink():
                raise OSError(errno.EPERM, "it belongs to somebody else")
            os.setxattr(folder, "user.overlay.probe", b"y")  # overlayfs marks folders with such attributes
            return folder.resolve()
        except OSError as error:
            problem = f"{folder} cannot hold sandboxes: {error.strerror}"
    raise SandboxError(f"{problem}; {REMEDY}")


SHARED = Path("/dev/shm")


def _room(place: Path) -> int:
    try:
        status = os.statvfs(place)
    except OSError:
        return 0
    return status.f_bavail * status.f_frsize


def reap() -> int:
    """Delete the stores of processes that are gone; how many there were."""
    count = 0
    for path in scratch().iterdir():
        with contextlib.suppress(OSError):
            if (descriptor := _lock(path)) is not None:
                _discard(path, descriptor, os.getpid())
                count += 1
    return count


def _lock(path: Path) -> int | None:
    """A descriptor that holds the lock, or None where somebody else has it or the folder is gone."""
    descriptor = -1
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        path.stat()
        return descriptor
    except (BlockingIOError, FileNotFoundError):
        if descriptor >= 0:
            os.close(descriptor)
        return None


def _discard(path: Path, descriptor: int, owner: int) -> None:
    if os.getpid() != owner:  # a forked child of the owner ends
        return
    with contextlib.suppress(FileNotFoundError):
        for group in (path / NOTES).read_text().splitlines():
            _remove_group(Path(group))
    remove(path)
    os.close(descriptor)


def _remove_group(folder: Path) -> None:
    """Remove a control group; processes that were just killed may still be leaving it."""
    for _ in range(100):
        try:
            return folder.rmdir()
        except OSError as error:
            if error.errno != errno.EBUSY:
                return None
        time.sleep(0.02)
    return None


def remove(tree: Path) -> None:
    """Delete a tree, also one that was made hard to delete: unreadable folders, thousands of folders deep."""
    with contextlib.suppress(OSError, RecursionError):
        return shutil.rmtree(tree)
    subprocess.run(["chmod", "-R", "u+rwx", tree], capture_output=True, check=False)
    subprocess.run(["rm", "-rf", tree], capture_output=True, check=False)
    return None
