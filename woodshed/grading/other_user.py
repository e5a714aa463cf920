"""Another user, and a box without some folders, for one process: where the kernel grants both without privileges.

A user namespace maps the same user to another number, and a mount namespace has a root that lacks what is hidden. The
process loses all power over both as soon as it executes a program. Standard library only: task folders ship a copy.
"""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

NEW_USER, NEW_MOUNTS = 0x10000000, 0x00020000
BIND, RECURSIVE, PRIVATE = 1 << 12, 1 << 14, 1 << 18
DUMPABLE = 4
NUMBERS = (1000, 1001)


@dataclass(frozen=True)
class OtherUser:
    """See the module.

    Args:
        root: an empty folder, over which the process alone sees its own root.
        hidden: entries of "/" that it does not see.
        folder: where it starts.
        user: number that `subprocess` has it run by; None for this process's own.
    """

    root: Path
    hidden: frozenset[str]
    folder: Path
    user: int | None = None

    def enter(self) -> None:
        """Become it: to be called between fork and exec.

        Raises:
            OSError: the kernel refuses.
        """
        libc = ctypes.CDLL(None, use_errno=True)
        user, group = os.getuid(), os.getgid()
        other = NUMBERS[user == NUMBERS[0]]
        libc.prctl(DUMPABLE, 1, 0, 0, 0)  # else its own /proc/self/uid_map is not its
        _done(libc.unshare(NEW_USER | NEW_MOUNTS))
        Path("/proc/self/setgroups").write_text("deny")
        Path("/proc/self/uid_map").write_text(f"{other} {user} 1")
        Path("/proc/self/gid_map").write_text(f"{other} {group} 1")
        _done(libc.mount(None, b"/", None, RECURSIVE | PRIVATE, None))
        _done(libc.mount(b"tmpfs", os.fsencode(self.root), b"tmpfs", 0, None))
        for entry in os.scandir("/"):
            if entry.name in self.hidden:
                continue
            place = self.root / entry.name
            if entry.is_symlink():
                place.symlink_to(Path(entry.path).readlink())
                continue
            place.mkdir() if entry.is_dir() else place.touch()
            _done(libc.mount(os.fsencode(entry.path), os.fsencode(place), None, BIND | RECURSIVE, None))
        os.chroot(self.root)
        os.chdir(self.folder)

    def is_possible(self) -> bool:
        """True if the kernel grants it."""
        try:
            done = subprocess.run(
                [sys.executable, "-I", "-S", "-c", ""],
                preexec_fn=self.enter,
                user=self.user,
                group=self.user,
                extra_groups=None if self.user is None else [],
                capture_output=True,
                check=False,
            )
        except (OSError, subprocess.SubprocessError):
            return False
        return done.returncode == 0


def tops(paths: Sequence[Path], needed: Sequence[Path]) -> frozenset[str]:
    """The entries of "/" that hold some paths, without those that also hold something that is needed."""
    kept = {path.resolve().parts[1] for path in needed}
    return frozenset(path.resolve().parts[1] for path in paths if len(path.resolve().parts) > 1) - kept


def _done(result: int) -> None:
    if result:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
