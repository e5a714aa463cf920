"""Names in a folder that lead out of it: a folder of somebody else must not have us read or write anywhere else."""

from __future__ import annotations

import os
import stat
from collections.abc import Collection
from pathlib import Path

from woodshed.records import RunError


def refuse(folder: Path, *, shared: Collection[str] = (), unread: Collection[str] = ()) -> None:
    """Look at every name of a run folder.

    Args:
        shared: names at its top below which hard links are ours.
        unread: folders at its top that another program fills and nobody here reads; what they hold is not looked at.

    Raises:
        RunError: names the link, and the way out.
    """
    root = folder.resolve()
    names: dict[tuple[int, int], list[Path]] = {}
    count: dict[tuple[int, int], int] = {}
    for here, folders, files in os.walk(root):
        if Path(here) != root and Path(here).relative_to(root).parts[0] in unread:
            folders.clear()
            continue
        for place in (Path(here, name) for name in (*folders, *files)):
            try:
                found = place.lstat()
            except OSError:  # gone meanwhile: a run may go on while it is read
                continue
            if stat.S_ISLNK(found.st_mode) and not stays_inside(place, root):
                raise RunError(
                    f"{place} is a link to {str(place.readlink())!r}, outside of the run. If that is yours, put the "
                    "file or folder itself in its place"
                )
            is_shared = place.relative_to(root).parts[0] in shared
            if stat.S_ISREG(found.st_mode) and found.st_nlink > 1 and not is_shared:
                names.setdefault((found.st_dev, found.st_ino), []).append(place)
                count[found.st_dev, found.st_ino] = found.st_nlink
    for file, places in names.items():
        if count[file] > len(places):
            raise RunError(
                f"{places[0]} is a hard link to a file that also lies outside of the run. If that is yours, go on "
                f"with a copy: `cp -r --no-preserve=links {folder} OTHER`"
            )


def stays_inside(link: Path, root: Path) -> bool:
    """True if the target of a path lies in a folder, however many links lead to it."""
    try:
        return link.resolve().is_relative_to(root.resolve())
    except (OSError, RuntimeError):  # a loop of links
        return False
