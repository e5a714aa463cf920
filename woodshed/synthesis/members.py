"""Members of a repository whose root has no package of its own: each becomes a source of tasks.

Members are made one after the other, each with its own configuration of pytest and its own requirements, as teams run
their suites; one session over all of them would meet two `tests/conftest.py`.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from woodshed.synthesis import git_sources
from woodshed.synthesis.configuration import read_toml, table
from woodshed.synthesis.siblings import ASIDE, DESCRIPTIONS, is_described, is_workspace, modules, projects


def members(tree: Path) -> list[str]:
    """Folders of the members; [] where the root is a project itself, or holds none.

    Raises:
        TaskError: its pyproject.toml cannot be read.
    """
    whole = read_toml(tree / "pyproject.toml")
    uv, poetry = table(whole, "tool", "uv"), table(whole, "tool", "poetry")
    is_package = (
        is_described(tree) and uv.get("package") is not False and poetry.get("package-mode") is not False
    )
    if is_package and not (is_workspace(tree) and "build-system" not in whole):
        return []
    if any(place == "." for _, _, place in modules(tree)):
        return []
    listed = table(uv, "workspace")
    hatch = table(whole, "tool", "hatch", "envs", "default", "workspace")
    found = _matched(tree, listed.get("members")) or _matched(tree, hatch.get("members"))
    if not found:
        return sorted({place for place, _ in projects(tree)} | set(_applications(tree)))
    found -= _matched(tree, listed.get("exclude"))
    return sorted(
        path.relative_to(tree).as_posix()
        for path in found
        if path != tree and any((path / name).is_file() for name in DESCRIPTIONS)
    )


def _matched(tree: Path, patterns: Any) -> set[Path]:
    """Folders below the tree that some patterns name; those that lead elsewhere name none."""
    texts = [text for text in patterns if isinstance(text, str)] if isinstance(patterns, list) else []
    inner = [text for text in texts if text and not Path(text).is_absolute() and ".." not in Path(text).parts]
    return {path for text in inner for path in tree.glob(text) if path.is_dir()}


def _applications(tree: Path) -> Iterator[str]:
    """Folders that describe no distribution, and have requirements and tests of their own."""
    for path in tree.rglob("requirements*"):
        place = path.parent.relative_to(tree).as_posix()
        has_tests = any((path.parent / name).is_dir() for name in ("tests", "test"))
        if has_tests and place != "." and not is_described(path.parent) and not ASIDE & {*Path(place).parts}:
            yield place


def source_of(source: str, place: str) -> str:
    """The source of a member, for that of the repository."""
    git = git_sources.read(source)
    if git is None:
        return str(Path(source).expanduser() / place)
    inner = "/".join(filter(None, (git.subdirectory, place)))
    return f"{source.partition('#')[0]}#subdirectory={inner}"
