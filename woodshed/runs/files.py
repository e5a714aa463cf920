"""Files and folders that are either complete or absent, and advice for errors of reading and writing."""

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
    errno.ENOSPC: "free some space there",
    errno.EDQUOT: "free some space there, or raise your quota",
    errno.EFBIG: "raise the limit on the size of files (ulimit -f)",
    errno.EROFS: "choose a location that is not read-only",
    errno.EACCES: "get the permission for it, or choose another location",
    errno.EPERM: "get the permission for it, or choose another location",
    errno.EEXIST: "move the existing file or folder away, or choose another location",
    errno.ENOTDIR: "choose a location whose parents are folders: one of them is a file",
    errno.EISDIR: "choose a file name: this is a folder",
    errno.ENOENT: "check its spelling: it does not exist",
    errno.ENAMETOOLONG: "choose a shorter name",
    errno.EINVAL: "choose another name: that file system does not allow this one",
    errno.ELOOP: "repair the symbolic links there, which form a loop",
    errno.EMFILE: "raise the limit on open files (ulimit -n)",
    errno.EIO: "check the disk: it reports an error",
}
"""Remedies by error number."""


def way_out(error: BaseException) -> str:
    """Remedy for an error of reading or writing a file."""
    if isinstance(error, shutil.Error) or (isinstance(error, OSError) and error.errno is None):
        return "free some space there"  # of a whole tree; each file has its own reason
    return WAYS_OUT.get(getattr(error, "errno", None) or 0, "fix that")


def reason(error: Exception) -> str:
    """Reason of an error of reading or writing a file, in words."""
    if isinstance(error, shutil.Error) and isinstance(
        error.args[0], list
    ):  # of a whole tree: (from, to, why)
        (_, _, cause), *others = error.args[0]
        cause = re.sub(r"^\[Errno \d+\] ([^:]*).*", r"\1", str(cause))
        return cause + (f" (for {len(others) + 1} files)" if others else "")
    return (error.strerror if isinstance(error, OSError) else None) or str(error)


@contextmanager
def created(folder: Path) -> Iterator[None]:
    """Create a folder if it does not exist, and remove a new one again if it stays empty."""
    new = [path for path in (folder, *folder.parents) if not os.path.exists(path)]  # noqa: PTH110  # as below
    try:
        folder.mkdir(parents=True, exist_ok=True)
        yield
    finally:
        for path in new:
            with suppress(OSError):  # it is not empty
                path.rmdir()


@contextmanager
def staged(target: Path, *, keep: bool = False) -> Iterator[Path]:
    """A temporary path beside `target` for a new file or folder, which replaces `target` at the end.

    After an error, `target` is unchanged and the temporary path is removed. Only a killed process leaves it behind, for
    `sweep`. A folder replaces a whole folder; with `keep`, a folder that another process finished meanwhile stays.
    """
    with created(target.parent), _scratch(target) as scratch:
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
    """A temporary folder beside `target`, locked while this process uses it."""
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
    """True if this process has the lock of the path; False if another has it, or the file system has no locks."""
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
def restored_on_error(path: Path) -> Iterator[None]:
    """Restore the old size of a file if appending to it fails."""
    size = path.stat().st_size if path.exists() else 0
    try:
        yield
    except OSError:
        with suppress(OSError):
            os.truncate(path, size)
        raise


def sweep(*folders: Path) -> None:
    """Remove unfinished files of killed processes from these folders, but none of living ones."""
    for partial in [partial_path for folder in folders for partial_path in folder.glob(".*.*.partial")]:
        with _locked(partial, wait=False) as is_ours:
            if is_ours:
                remove(partial)


def write_atomically(path: Path, text: str) -> None:
    """Replace the content of a file; readers see the old or the new content, never a part."""
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
