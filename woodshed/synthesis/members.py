"""Members of a repository whose root has no package of its own: each becomes a source of tasks.

Members are made one after the other, each with its own configuration of pytest and its own requirements, as teams run
their suites; one session over all of them would meet two `tests/conftest.py`.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from woodshed.synthesis import git_sources
from woodshed.synthesis.configuration import read_toml, table, words
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
    patterns, excluded = words(listed.get("members")), words(listed.get("exclude"))
    hatch = table(whole, "tool", "hatch", "envs", "default", "workspace")
    patterns = patterns or [text for text in hatch.get("members", []) if isinstance(text, str)]
    if not patterns:
        return sorted({place for place, _ in projects(tree)} | set(_applications(tree)))
    left_out = {path for pattern in excluded for path in tree.glob(pattern)}
    found = {path for pattern in patterns for path in tree.glob(pattern)} - left_out
    return sorted(
        path.relative_to(tree).as_posix()
        for path in found
        if path != tree and any((path / name).is_file() for name in DESCRIPTIONS)
    )


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
