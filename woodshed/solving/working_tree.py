"""The working tree of a person's git repository: copied for the policy, and changed only where it is still the same.

The copy holds what git tracks and what it would (untracked files that are not ignored): neither history nor ignored
files, which may hold secrets. Nothing below a `.git` is ever taken back, since git would run it.
"""

from __future__ import annotations

import os
import shutil
import stat
import subprocess
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, replace
from pathlib import Path

from woodshed.pysource import syntax
from woodshed.records import Patch, TaskError
from woodshed.runs.files import staged
from woodshed.runs.machine import git_environment
from woodshed.tasks.diff import unified
from woodshed.tasks.paths import is_clean

ENVIRONMENTS = (".venv", "venv", "env")
"""Folders of a repository in which its virtual environment is looked for; it is no part of the files."""


@dataclass(frozen=True)
class WorkingTree:
    """A git repository with its files."""

    root: Path
    """Its top folder."""
    commit: str
    """The commit that is checked out; "" before the first one."""
    changed: tuple[str, ...]
    """Tracked files that differ from the commit."""
    files: tuple[str, ...]
    """Tracked files, and untracked ones that are not ignored."""

    def copy(self, into: Path) -> None:
        """Copy the files to a folder; links stay links, and what is neither file nor link is left out."""
        into.mkdir(parents=True)
        for path in self.files:
            source, target = self.root / path, into / path
            mode = source.lstat().st_mode if os.path.lexists(source) else 0
            if stat.S_ISREG(mode) or stat.S_ISLNK(mode):
                target.parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(source, target, follow_symlinks=False)


def read_tree(folder: Path) -> WorkingTree:
    """The repository that a folder lies in.

    Raises:
        TaskError: no folder, no git, no repository there, or one without a working tree.
    """
    if not folder.is_dir():
        raise TaskError(f"no folder {folder}; name the repository to work on")
    try:
        root = Path(_git(folder, "rev-parse", "--show-toplevel").rstrip("\n"))
    except _GitError as error:
        raise TaskError(
            f"{folder} is no working tree of a git repository ({error}). Changes are applied where they can be taken "
            f"back: `git init {folder}`, and commit what is there"
        ) from None
    try:
        commit = _git(root, "rev-parse", "--verify", "--quiet", "HEAD").strip()
    except _GitError:
        commit = ""
    try:
        options = ("--porcelain=v1", "-z", "--untracked-files=no", "--no-renames", "--ignore-submodules")
        status = _git(root, "status", *options).split("\0")
        listing = _git(root, "ls-files", "-z", "--cached", "--others", "--exclude-standard").split("\0")
    except _GitError as error:
        raise TaskError(f"git cannot list the files of {root}: {error}") from None
    changed = tuple(entry[3:] for entry in status if entry)
    inside = {f"{name}/" for name in ENVIRONMENTS if (root / name / "pyvenv.cfg").is_file()}
    files = {path for path in listing if path and not path.startswith(tuple(inside))}
    return WorkingTree(root, commit, changed, tuple(sorted(files)))


def own_environment(tree: WorkingTree) -> Path | None:
    """The virtual environment that lies in a repository, or None."""
    folders = (tree.root / name for name in ENVIRONMENTS)
    return next((folder for folder in folders if (folder / "pyvenv.cfg").is_file()), None)


def named(paths: Sequence[str]) -> str:
    """A few of several paths."""
    return ", ".join([*paths[:5], *(["and more"] if paths[5:] else [])])


def usable(patch: Patch) -> Patch:
    """The patch without files that may never come back from a sandbox: those of git, and names that cannot be shown."""
    refused = {
        path: "belongs to git" if ".git" in path.lower().split("/") else "its name cannot be shown"
        for path in patch.files
        if ".git" in path.lower().split("/") or not is_clean(path)
    }
    if not refused:
        return patch
    files = {path: text for path, text in patch.files.items() if path not in refused}
    return replace(patch, files=files, skipped={**patch.skipped, **refused}, diff="")


def difference(files: Mapping[str, str | None], copy: Path) -> str:
    """The diff of changed files against the copy that the policy was given."""
    return "".join(_diffs(files, copy).values())


def changed_lines(files: Mapping[str, str | None], copy: Path) -> Counter[tuple[str, str]]:
    """(file, line with its sign) of every line that the changes add or remove."""
    return Counter(
        (path, line)
        for path, diff in _diffs(files, copy).items()
        for line in diff.split("\n")[2:]  # behind the names of the file
        if line[:1] in ("+", "-")
    )


def _diffs(files: Mapping[str, str | None], copy: Path) -> dict[str, str]:
    return {path: unified(path, _text(path, copy / path), text) for path, text in sorted(files.items())}


def apply(patch: Patch, tree: WorkingTree, copy: Path) -> None:
    """Write the changes into the working tree: all of them or none.

    Args:
        copy: the folder with the files as the policy was given them.

    Raises:
        TaskError: a file is no longer what the policy was given, or a link stands in its way; nothing was written.
        OSError: a file cannot be written; those before it are as they were.
    """
    if conflicts := [path for path in patch.files if not _is_same(tree.root / path, copy / path, tree.root)]:
        raise TaskError(
            f"{named(conflicts)}: no longer as the policy was given it in {tree.root}, or behind a link; nothing was "
            "applied"
        )
    done: list[str] = []
    try:
        for path, text in patch.files.items():
            done.append(path)
            _put(tree.root / path, None if text is None else syntax.write(path, text))
    except BaseException:
        for path in done:
            source = copy / path
            _put(tree.root / path, source.read_bytes() if source.is_file() else None)
        raise


def edited(diff: str, copy: Path, scratch: Path) -> dict[str, str | None]:
    """The changed files that a person's version of the diff makes of the copy.

    Args:
        scratch: a folder that does not exist yet.

    Raises:
        TaskError: the text is no patch, or does not fit the files.
    """
    shutil.copytree(copy, scratch, symlinks=True)
    try:
        if diff.strip():
            options = ("-c", "core.autocrlf=false", "apply", "--whitespace=nowarn", "--recount", "-")
            _git(scratch, *options, given=diff)
    except _GitError as error:
        raise TaskError(f"the edited diff does not fit: {error}") from None
    paths = sorted(_files(scratch) | _files(copy))
    return {p: _text(p, scratch / p) for p in paths if not _same_bytes(scratch / p, copy / p)}


def _files(folder: Path) -> set[str]:
    return {path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()}


def _same_bytes(one: Path, other: Path) -> bool:
    return one.is_file() == other.is_file() and (not one.is_file() or one.read_bytes() == other.read_bytes())


def _text(path: str, file: Path) -> str | None:
    """The text of a file; None where there is none, bytes that are no text as codes."""
    if not file.is_file():
        return None
    data = file.read_bytes()
    try:
        return syntax.read(path, data)
    except syntax.UnreadableError:
        return data.decode("utf-8", errors="backslashreplace")


def _is_same(now: Path, copied: Path, root: Path) -> bool:
    """True if a path of the working tree is what the copy has there, reached without a link."""
    parents = now.relative_to(root).parents
    if any((root / parent).is_symlink() for parent in parents) or now.is_symlink():
        return False
    if any(os.path.lexists(root / parent) and not (root / parent).is_dir() for parent in parents):
        return False
    if not copied.is_file():
        return not os.path.lexists(now)
    return now.is_file() and now.read_bytes() == copied.read_bytes()


def _put(file: Path, data: bytes | None) -> None:
    """Write a file with the mode that it has, or remove it and the folders that this leaves empty."""
    if data is None:
        file.unlink(missing_ok=True)
        with suppress(OSError):  # one that is not empty ends it
            for folder in file.parents:
                folder.rmdir()
        return
    mode = stat.S_IMODE(file.stat().st_mode) if file.is_file() else None
    with ExitStack() as stack:
        partial = stack.enter_context(staged(file))
        partial.write_bytes(data)
        if mode is not None:
            partial.chmod(mode)


class _GitError(Exception):
    """A message of git."""


def _git(folder: Path, *arguments: str, given: str = "") -> str:
    command = ["git", "-c", "core.fsmonitor=false", "-C", str(folder), *arguments]
    try:
        done = subprocess.run(
            command,
            input=os.fsencode(given),
            capture_output=True,
            env={**git_environment(), "GIT_CEILING_DIRECTORIES": str(folder.parent)}
            if given
            else git_environment(),
            timeout=120,
            check=False,
        )
    except FileNotFoundError:
        raise TaskError("git is not installed; it lists the files of a repository") from None
    if done.returncode != 0:
        raise _GitError(done.stderr.decode(errors="replace").strip()[-300:] or f"status {done.returncode}")
    return os.fsdecode(done.stdout)
