"""Paths inside a task: which are sound, which belong to tests, and a walk over all of them."""

from __future__ import annotations

import os
import re
import stat
import unicodedata
from collections.abc import Iterator
from pathlib import Path, PurePosixPath

from woodshed import documents
from woodshed.records import TaskError
from woodshed.runs.links import stays_inside

NEVER_CROSS = re.compile(
    r"(^|/)(tests?|__pycache__|[^/]+\.(dist|egg)-info)/"  # test folders, installed metadata
    r"|(^|/)(conftest|sitecustomize|usercustomize|test_[^/]*|[^/]*_tests?)\.py$"
    r"|\.(ini|toml|cfg|pth|pyc)$"
)
"""Paths of tests, of what configures or hooks the test runner, and of what Python runs at start."""


def is_protected(path: str) -> bool:
    """True if a workspace-relative path is restored for grading and never taken from an agent's patch."""
    return NEVER_CROSS.search(path) is not None


def is_inside(path: str) -> bool:
    """True if a path is relative, normal, UTF-8, not too long, and stays below its root, whatever its characters."""
    pure = PurePosixPath(path)
    normal = str(pure) == path and path != "." and not pure.is_absolute() and ".." not in pure.parts
    try:
        sizes = [len(part.encode()) for part in (path, *pure.parts)]
    except UnicodeEncodeError:
        return False
    return normal and "\0" not in path and sizes[0] < 1024 and all(size < 256 for size in sizes[1:])


def is_clean(path: str) -> bool:
    """True if a path is inside, and printable: spaces of every width may be in it, line ends and controls may not."""
    return is_inside(path) and all(c.isprintable() or unicodedata.category(c) == "Zs" for c in path)


def tree(root: Path) -> Iterator[tuple[str, Path]]:
    """Every file below a folder, sorted by path.

    Raises:
        TaskError: a device, socket or pipe, a name that is not UTF-8, or a symlink that leaves the folder.
    """
    for here, folders, names in os.walk(root):
        folders.sort()
        links = [name for name in folders if Path(here, name).is_symlink()]
        for name in sorted(names + links):
            file = Path(here, name)
            path = file.relative_to(root).as_posix()
            try:
                path.encode()
            except UnicodeEncodeError:
                raise TaskError(f"{root}: file name {path!r} is not UTF-8") from None
            mode = file.lstat().st_mode
            if stat.S_ISLNK(mode):
                if file.readlink().is_absolute() or not stays_inside(file, root):
                    raise TaskError(
                        f"{file}: symlink to {str(file.readlink())!r} leaves {root}. Replace it by the file itself."
                    )
            elif not stat.S_ISREG(mode):
                raise TaskError(f"{file} is neither a file nor a folder; a task holds nothing else.")
            yield path, file


REMEDY = "Restore it, or make the task again with `woodshed tasks make`"


def mode(file: Path) -> int:
    mode = file.lstat().st_mode
    return 0o777 if stat.S_ISLNK(mode) else 0o755 if mode & 0o100 else 0o644


def text_of(file: Path) -> str:
    """The text of a file of a task.

    Raises:
        FileNotFoundError: there is none.
        TaskError: it cannot be read.
    """
    return documents.read(file, TaskError, REMEDY)
