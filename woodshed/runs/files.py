"""Files and folders that are whole or absent, and what helps where they cannot be written."""

from __future__ import annotations

import errno
import fcntl
import os
import re
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

WAYS_OUT = {
    errno.ENOSPC: "make room there",
    errno.EDQUOT: "make room there, or raise your quota",
    errno.EFBIG: "raise the limit on the size of files (ulimit -f)",
    errno.EROFS: "name a place that is not read-only",
    errno.EACCES: "get the permission for it, or name another place",
    errno.EPERM: "get the permission for it, or name another place",
    errno.EEXIST: "move away what is there, or name another place",
    errno.ENOTDIR: "name a place whose parents are folders: one of them is a file",
    errno.EISDIR: "name a file: a folder is there",
    errno.ENOENT: "look at its spelling: it is not there",
    errno.ENAMETOOLONG: "choose a shorter name",
    errno.EINVAL: "choose another name: that file system cannot have this one",
    errno.ELOOP: "mend the links there, which lead in a circle",
    errno.EMFILE: "raise the number of files that may be open (ulimit -n)",
    errno.EIO: "look at the disk, which does not answer",
}
"""Faults of a file or folder that a person named, and their remedies."""


def way_out(error: BaseException) -> str:
    """Advice that fits the reason for which a file could not be read or written."""
    if isinstance(error, shutil.Error) or (isinstance(error, OSError) and error.errno is None):
        return "make room there"  # a tree that could not be copied: each file has its own reason
    return WAYS_OUT.get(getattr(error, "errno", None) or 0, "mend that")


def reason(error: Exception) -> str:
    """Why a file could not be read or written, in words."""
    if isinstance(error, shutil.Error) and isinstance(
        error.args[0], list
    ):  # of a whole tree: (from, to, why)
        (_, _, why), *others = error.args[0]
        why = re.sub(r"^\[Errno \d+\] ([^:]*).*", r"\1", str(why))
        return why + (f" (for {len(others) + 1} files)" if others else "")
    return (error.strerror if isinstance(error, OSError) else None) or str(error)


@contextmanager
def made(folder: Path) -> Iterator[None]:
    """A folder, made where it is not there, and taken away again where nothing came into it."""
    new = [path for path in (folder, *folder.parents) if not os.path.exists(path)]  # noqa: PTH110  # as below
    try:
        folder.mkdir(parents=True, exist_ok=True)
        yield
    finally:
        for path in new:
            with suppress(OSError):  # something is in it
                path.rmdir()


@contextmanager
def staged(target: Path, *, keep: bool = False) -> Iterator[Path]:
    """A path beside `target` at which a file or folder is made, and which then takes the place of `target`.

    Whatever stops the work inside, `target` stays as it was and nothing else is left. Only a killed process leaves
    its part behind, for `sweep`. A folder replaces a folder with all that was in it; with `keep`, a folder that
    another process finished meanwhile stays.
    """
    with made(target.parent), _scratch(target) as scratch:
        partial = scratch / target.name
        yield partial
        if partial.is_dir() and target.is_dir() and not keep:
            shutil.rmtree(target)
        try:
            partial.replace(target)
        except OSError:
            if not (keep and target.is_dir()):
                raise


@contextmanager
def _scratch(target: Path) -> Iterator[Path]:
    """A folder beside `target`, locked for as long as this process lives and works in it."""
    while True:
        folder = Path(tempfile.mkdtemp(prefix=f".{target.name}.", suffix=".partial", dir=target.parent))
        with _locked(folder):
            if not folder.is_dir():
                continue  # swept before it was locked
            try:
                yield folder
            finally:
                remove(folder)
            return


@contextmanager
def _locked(path: Path, *, wait: bool = True) -> Iterator[bool]:
    """True if the path is ours alone: no other process works in it, and the file system knows locks."""
    descriptor = None
    try:
        descriptor = os.open(path, os.O_RDONLY)
        fcntl.flock(descriptor, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
        is_ours = True
    except OSError:
        is_ours = False
    try:
        yield is_ours
    finally:
        if descriptor is not None:
            os.close(descriptor)


@contextmanager
def whole_or_as_before(path: Path) -> Iterator[None]:
    """Takes back what was appended to a file where the disk was full in the middle of it."""
    size = path.stat().st_size if path.exists() else 0
    try:
        yield
    except OSError:
        with suppress(OSError):
            os.truncate(path, size)
        raise


def sweep(*folders: Path) -> None:
    """Remove what killed processes left unfinished in these folders, and nothing that one still works in."""
    for partial in [left for folder in folders for left in folder.glob(".*.*.partial")]:
        with _locked(partial, wait=False) as is_ours:
            if is_ours:
                remove(partial)


def write_atomically(path: Path, text: str) -> None:
    """Replace a file's content; readers see the old or the new, never a part."""
    with staged(path) as partial:
        partial.write_text(text, encoding="utf-8")


def remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)


def link_or_copy(source: str, target: str) -> None:
    try:
        os.link(source, target, follow_symlinks=False)
    except OSError:
        shutil.copy2(source, target, follow_symlinks=False)
