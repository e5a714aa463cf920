"""Files of an overlay, read from its layers.

A layer is a folder. The upper layer of a sandbox holds what was written to its workspace; a deletion is a character
device 0/0 (a whiteout), and a folder that replaces another one carries the attribute user.overlay.opaque
(kernel.org, Documentation/filesystems/overlayfs). Rename redirects are off where bubblewrap mounts: a folder is copied
before it is renamed (`watcher`), so a layer holds nothing but entries, whiteouts and opaque folders.
"""

from __future__ import annotations

import os
import shutil
import stat
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from woodshed.sandbox.spec import Change, FileType

DEEPEST = 100
_TYPES: dict[int, FileType] = {stat.S_IFREG: "file", stat.S_IFDIR: "dir", stat.S_IFLNK: "symlink"}
_NOTHING = os.stat_result((0,) * 19)


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
    """Bytes on disk that a layer takes; every entry counts for at least 4096, so this bounds their number too."""
    return sum(max(4096, _info(layer / path).st_blocks * 512) for path in entries(layer))


def compare(before: Sequence[Path], after: Sequence[Path], candidates: Iterable[str]) -> list[Change]:
    """Candidate paths that differ between two stacks of layers (bottom first), sorted by path."""
    changes = []
    for path in sorted(set(candidates)):
        old, new = find(before, path), find(after, path)
        if new is not None and old is None:
            changes.append(Change(path, "added", _type(new), _size(new)))
        elif old is not None and new is None:
            changes.append(Change(path, "deleted", _type(old)))
        elif old is not None and new is not None and not _same(old, new):
            changes.append(Change(path, "modified", _type(new), _size(new)))
    return changes


def touched(layers: Sequence[Path], lowers: Sequence[Path]) -> Iterator[str]:
    """Every path, not absurdly deep, that the layers may have changed in the lowers below them."""
    for layer in layers:
        for name in entries(layer):
            if name.count("/") > DEEPEST:
                continue
            yield name
            if not stat.S_ISDIR(_info(layer / name).st_mode) or _opaque(layer / name):
                for lower in lowers:  # whatever was below a folder that is gone
                    yield from (f"{name}/{below}" for below in entries(lower / name))


def entries(folder: Path) -> Iterator[str]:
    """Every path below a folder, relative to it; none where it is no folder."""
    waiting = [""] if stat.S_ISDIR(_info(folder).st_mode) else []
    while waiting:
        prefix = waiting.pop()
        for entry in _scan(folder / prefix):
            yield prefix + entry.name
            if entry.is_dir(follow_symlinks=False):
                waiting.append(f"{prefix}{entry.name}/")


def _scan(folder: Path) -> list[os.DirEntry[str]]:
    """Entries of a folder; none if a running command has just deleted it, or if its path is too long."""
    try:
        try:
            return list(os.scandir(folder))
        except PermissionError:  # somebody inside took the permission away; the folder is ours
            folder.chmod(0o700)
            return list(os.scandir(folder))
    except OSError:
        return []


def find(layers: Sequence[Path], path: str) -> Path | None:
    """File on disk behind a path of the merged view, or None; layers bottom first."""
    parts = path.split("/")
    for layer in reversed(layers):
        node, hidden = layer, False
        for depth, part in enumerate(parts, 1):
            node = node / part
            info = _info(node)
            if info is _NOTHING:
                break
            if stat.S_ISCHR(info.st_mode) and info.st_rdev == 0:  # a whiteout
                return None
            if depth == len(parts):
                return node
            if not stat.S_ISDIR(info.st_mode):
                return None
            hidden = hidden or _opaque(node)
        if hidden:
            return None
    return None


def alters(layer: Path, path: str) -> bool:
    """Tell whether a layer stands in front of a file of the layers below it.

    The kernel copies a file up before anything about it changes, and marks what is gone. A folder that both have hides
    nothing.
    """
    node = layer
    for part in path.split("/"):
        node = node / part
        info = _info(node)
        if info is _NOTHING:
            return False
        if not stat.S_ISDIR(info.st_mode) or _opaque(node):
            return True
    return True


def _info(path: Path) -> os.stat_result:
    try:
        return path.lstat()
    except OSError:
        return _NOTHING


def _type(path: Path) -> FileType:
    return _TYPES.get(stat.S_IFMT(_info(path).st_mode), "other")


def _size(path: Path) -> int:
    info = _info(path)
    return info.st_size if stat.S_ISREG(info.st_mode) else 0


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
    if (before.st_mode, before.st_size) != (after.st_mode, after.st_size):
        return False
    try:
        return old.read_bytes() == new.read_bytes()
    except OSError:
        return False
