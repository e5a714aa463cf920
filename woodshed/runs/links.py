"""Links that lead out of a folder, and names that are no files. Both are refused in run folders, since these may come
from somebody else: reading one must not lead anywhere else, nor wait for a pipe."""

from __future__ import annotations

import os
import stat
from collections.abc import Collection
from pathlib import Path

from woodshed import documents
from woodshed.records import RunError


def refuse(folder: Path, *, shared: Collection[str] = (), unread: Collection[str] = ()) -> None:
    """Refuse a run folder with links that lead out of it.

    Args:
        shared: top-level folders that may have hard links.
        unread: top-level folders of other programs, which are not checked because nothing here reads them.

    Raises:
        RunError: names the link and the remedy.
    """
    root = folder.resolve()
    names: dict[tuple[int, int], list[Path]] = {}
    count: dict[tuple[int, int], int] = {}
    for directory, folders, files in os.walk(root):
        if Path(directory) != root and Path(directory).relative_to(root).parts[0] in unread:
            folders.clear()
            continue
        for path in (Path(directory, name) for name in (*folders, *files)):
            try:
                status = path.lstat()
            except OSError:  # removed meanwhile: a run may continue while it is read
                continue
            if stat.S_ISLNK(status.st_mode) and not stays_inside(path, root):
                raise RunError(
                    f"{path} is a link to {str(path.readlink())!r}, outside of the run. If the link is yours, replace "
                    "it by the file or folder itself"
                )
            if not (
                stat.S_ISLNK(status.st_mode) or stat.S_ISDIR(status.st_mode) or stat.S_ISREG(status.st_mode)
            ):
                raise RunError(
                    f"{path} is {documents.kind(status.st_mode)}, and a run holds files only: remove it"
                )
            is_shared = path.relative_to(root).parts[0] in shared
            if stat.S_ISREG(status.st_mode) and status.st_nlink > 1 and not is_shared:
                names.setdefault((status.st_dev, status.st_ino), []).append(path)
                count[status.st_dev, status.st_ino] = status.st_nlink
    for file, paths in names.items():
        if count[file] > len(paths):
            raise RunError(
                f"{paths[0]} is a hard link to a file that is also outside of the run. If the link is yours, use "
                f"a copy: `cp -r --no-preserve=links {folder} OTHER`"
            )


def stays_inside(link: Path, root: Path) -> bool:
    """True if the target of a path, with all links resolved, is inside a folder."""
    try:
        return link.resolve().is_relative_to(root.resolve())
    except (OSError, RuntimeError):  # a loop of links
        return False
