"""Overlay layers on disk: where they live, what they change, how they go away.

A layer is a folder. The upper layer of a sandbox holds what was written to its workspace; a deletion is a character
device 0/0 (a whiteout), and a folder that replaces another one carries the attribute user.overlay.opaque
(kernel.org, Documentation/filesystems/overlayfs). Rename redirects are off where bubblewrap mounts: a renamed folder
is copied by `mv`, so a layer holds nothing but entries, whiteouts and opaque folders.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import secrets
import shutil
import stat
import tempfile
import threading
import weakref
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from woodshed.records import SandboxError
from woodshed.sandbox.spec import Change, FileType

_TYPES: dict[int, FileType] = {stat.S_IFREG: "file", stat.S_IFDIR: "dir", stat.S_IFLNK: "symlink"}


class Store:
    """The folder of one sandbox and of its forks; deleted when the last of them is released.

    Its owner holds a lock on it for as long as the owner lives, so that leftovers of a killed process can be told
    from folders in use (`reap`), whatever PID namespace they come from.
    """

    def __init__(self) -> None:
        root = scratch()
        while True:
            self.path = root / secrets.token_hex(3)
            try:
                self.path.mkdir()
                descriptor = _lock(self.path)
            except FileExistsError:
                continue
            except OSError as error:
                raise SandboxError(f"cannot write to {root}: {error.strerror}; {SCRATCH_REMEDY}") from None
            if descriptor is not None:  # else a reaper was faster
                break
        self._users, self._layers, self._guard = 1, 0, threading.Lock()
        self._finalizer = weakref.finalize(self, _discard, self.path, descriptor)

    def layer(self) -> Path:
        """A new empty folder."""
        with self._guard:
            self._layers += 1
            path = self.path / str(self._layers)
        path.mkdir()
        return path

    def note(self, folders: Iterable[Path]) -> None:
        """Empty folders elsewhere that go when the store goes."""
        with self._guard, (self.path / NOTES).open("a") as notes:
            notes.writelines(f"{folder}\n" for folder in folders)

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


SCRATCH_REMEDY = (
    "set WOODSHED_SCRATCH to a folder on a local disk (ext4, xfs, btrfs) or on tmpfs (Linux 6.6 or newer)"
)
ROOMY = 2 << 30
NOTES = "notes"


def scratch() -> Path:
    """This user's folder for stores: below WOODSHED_SCRATCH, else /dev/shm where roomy, else the temporary folder.

    Memory comes before disk because taking an overlay down syncs the whole file system of its upper layer.

    Raises:
        SandboxError: the folder cannot be made, is somebody else's, or cannot hold an upper layer.
    """
    chosen = os.environ.get("WOODSHED_SCRATCH")
    places = [Path(chosen)] if chosen else [Path("/dev/shm"), Path(tempfile.gettempdir())]
    if not chosen and not _roomy(places[0]):
        del places[0]
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
    raise SandboxError(f"{problem}; {SCRATCH_REMEDY}")


def _roomy(place: Path) -> bool:
    try:
        room = os.statvfs(place)
    except OSError:
        return False
    return room.f_bavail * room.f_frsize >= ROOMY


def reap() -> int:
    """Delete the stores of processes that are gone; how many there were."""
    count = 0
    for path in scratch().iterdir():
        with contextlib.suppress(OSError):
            descriptor = _lock(path)
            if descriptor is not None:
                _discard(path, descriptor)
                count += 1
    return count


def _lock(path: Path) -> int | None:
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        path.stat()
    except OSError:
        os.close(descriptor)
        return None
    return descriptor


def _discard(path: Path, descriptor: int) -> None:
    with contextlib.suppress(FileNotFoundError):
        for folder in (path / NOTES).read_text().splitlines():
            with contextlib.suppress(OSError):
                Path(folder).rmdir()
    remove(path)
    os.close(descriptor)


def remove(tree: Path) -> None:
    """Delete a tree, also one whose folders were made unreadable (overlayfs itself makes one)."""
    shutil.rmtree(tree, ignore_errors=True)
    if tree.exists():
        _open_up(tree)
        shutil.rmtree(tree, ignore_errors=True)


def _open_up(folder: Path) -> None:
    folder.chmod(0o700)
    for entry in os.scandir(folder):
        if entry.is_dir(follow_symlinks=False):
            _open_up(Path(entry.path))


def freeze(upper: Path, into: Path) -> Path:
    """Move what an upper layer holds to a folder that was never an upper layer.

    The kernel takes mounts down in its own time, and calls a layer that is still one mount's upper and already
    another's lower undefined behaviour. Moving costs one rename per entry at the top.
    """
    for entry in os.scandir(upper):
        Path(entry.path).rename(into / entry.name)
    shutil.copystat(upper, into)
    return into


def usage(layer: Path) -> int:
    """Bytes on disk that a layer takes."""
    return sum(_info(path).st_blocks * 512 for path, _ in _walk(layer))


def compare(before: Sequence[Path], after: Sequence[Path], candidates: Iterable[str]) -> list[Change]:
    """Which of the candidate paths differ between two stacks of layers, bottom first; sorted by path."""
    changes = []
    for path in sorted(set(candidates)):
        old, new = find(before, path), find(after, path)
        if old is None and new is not None:
            changes.append(Change(path, "added", _type(new)))
        elif old is not None and new is None:
            changes.append(Change(path, "deleted", _type(old)))
        elif old is not None and new is not None and not _same(old, new):
            changes.append(Change(path, "modified", _type(new)))
    return changes


def touched(layers: Sequence[Path], lowers: Sequence[Path]) -> Iterator[str]:
    """Every path that the layers may have changed in the lowers below them."""
    for layer in layers:
        for path, name in _walk(layer):
            yield name
            if not stat.S_ISDIR(_info(path).st_mode) or _opaque(path):
                for lower in lowers:
                    if stat.S_ISDIR(_mode(lower / name)):
                        yield from (f"{name}/{below}" for _, below in _walk(lower / name))


def everything(layer: Path) -> Iterator[str]:
    """Every path in a layer."""
    return (name for _, name in _walk(layer))


def find(layers: Sequence[Path], path: str) -> Path | None:
    """What a path of the merged view is on disk, or None; layers bottom first."""
    parts = path.split("/")
    for layer in reversed(layers):
        node, hidden = layer, False
        for depth, part in enumerate(parts, 1):
            node = node / part
            mode = _mode(node)
            if mode == 0:
                break
            if _whiteout(node):
                return None
            if depth == len(parts):
                return node
            if not stat.S_ISDIR(mode):
                return None
            hidden = hidden or _opaque(node)
        if hidden:
            return None
    return None


def _walk(folder: Path, prefix: str = "") -> Iterator[tuple[Path, str]]:
    try:
        entries = sorted(os.scandir(folder), key=lambda entry: entry.name)
    except PermissionError:  # somebody inside took the permission away; the folder is ours
        folder.chmod(0o700)
        entries = sorted(os.scandir(folder), key=lambda entry: entry.name)
    except FileNotFoundError:  # a command is running
        return
    for entry in entries:
        yield Path(entry.path), prefix + entry.name
        if entry.is_dir(follow_symlinks=False):
            yield from _walk(Path(entry.path), f"{prefix}{entry.name}/")


def _info(path: Path) -> os.stat_result:
    try:
        return path.lstat()
    except OSError:
        return os.stat_result((0,) * 19)


def _mode(path: Path) -> int:
    return _info(path).st_mode


def _type(path: Path) -> FileType:
    return _TYPES.get(stat.S_IFMT(_mode(path)), "other")


def _whiteout(path: Path) -> bool:
    info = _info(path)
    return stat.S_ISCHR(info.st_mode) and info.st_rdev == 0


def _opaque(folder: Path) -> bool:
    try:
        return os.getxattr(folder, "user.overlay.opaque", follow_symlinks=False) == b"y"
    except OSError:
        return False


def _same(old: Path, new: Path) -> bool:
    before, after = _info(old), _info(new)
    if stat.S_IFMT(before.st_mode) != stat.S_IFMT(after.st_mode):
        return False
    if stat.S_ISDIR(before.st_mode):
        return True
    if stat.S_ISLNK(before.st_mode):
        return old.readlink() == new.readlink()
    if not stat.S_ISREG(before.st_mode):
        return before.st_rdev == after.st_rdev
    if before.st_mode != after.st_mode or before.st_size != after.st_size:
        return False
    try:
        return old.read_bytes() == new.read_bytes()
    except OSError:
        return False
