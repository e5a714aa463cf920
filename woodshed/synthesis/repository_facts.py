"""A repository as its files describe it: packages, tests, options of pytest. Nothing of it is run."""

from __future__ import annotations

import ast
import shlex
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from woodshed.pysource import syntax
from woodshed.records import TaskError
from woodshed.synthesis import sources
from woodshed.synthesis.configuration import pytest_settings, read_toml, table, words
from woodshed.synthesis.repository_context import SynthesisSettings
from woodshed.tasks.folder import is_protected

SHORT = 8
"""Lines of the longest function that is taken away from a small model; a first run teaches it no more."""
LONGEST = SynthesisSettings().max_body_lines


@dataclass(frozen=True)
class RepositoryFacts:
    """Packages and tests of a repository, as its files describe them."""

    source: str
    """As `woodshed tasks make` is given it."""
    name: str
    packages: tuple[str, ...]
    bodies: tuple[int, ...]
    """Lines of each public function of the packages, shortest first."""
    test_files: int
    num_tests: int
    """Functions of the tests; parametrized ones count once."""
    options: str
    """`addopts` of the configuration of pytest."""
    needed: tuple[str, ...]
    """Environment variables without which the tests end with a KeyError."""
    requirements: tuple[str, ...]
    """Requirements of the project, as pyproject.toml lists them."""

    def longest(self, num_tasks: int, *, is_small: bool) -> int:
        """Lines of the longest function to take away: SHORT for a small model, if enough functions are as short."""
        if is_small and sum(lines <= SHORT for lines in self.bodies) >= 2 * num_tasks:
            return SHORT
        return min(max(self.bodies, default=LONGEST), LONGEST)


def look(source: str) -> RepositoryFacts:
    """Read a source as `woodshed tasks make` would: a clean copy without anything that git ignores.

    Raises:
        TaskError: there is no such source, or it holds no tests or no package.
    """
    with tempfile.TemporaryDirectory(prefix="woodshed-") as scratch:
        repository = sources.fetch(source, Path(scratch, "tree"))
        facts = read(repository.tree, source, repository.name)
    if not facts.packages:
        raise TaskError(
            f"{source} holds no Python package outside of its tests; name the folder that has one"
        )
    if not facts.num_tests:
        raise TaskError(
            f"{source} holds no test that pytest would collect, and a task is proven by its tests"
        )
    return facts


def read(tree: Path, source: str, name: str) -> RepositoryFacts:
    """Facts of a tree."""
    packages, bodies, needed, tests, test_files = set[str](), list[int](), set[str](), 0, 0
    for path in sorted(tree.rglob("*.py")):
        place = path.relative_to(tree).as_posix()
        try:
            module = syntax.parse(path.read_bytes())
        except (SyntaxError, ValueError, RecursionError, OSError):
            continue
        if is_protected(place):
            found = sum(each.name.startswith("test") for each in _functions(module))
            tests, test_files = tests + found, test_files + bool(found)
            needed |= set(_needed(module))
        elif package := _package(tree, path):
            packages.add(package)
            needed |= set(_needed(module))
            bodies += [_lines(each) for each in _functions(module) if not each.name.startswith("_")]
    options = pytest_settings(tree).get("addopts", "")
    project = table(read_toml(tree / "pyproject.toml"), "project")
    return RepositoryFacts(
        source,
        name,
        tuple(sorted(packages)),
        tuple(sorted(bodies)),
        test_files,
        tests,
        options if isinstance(options, str) else shlex.join(words(options)),
        tuple(sorted(needed)),
        tuple(words(project.get("dependencies"))),
    )


def _package(tree: Path, path: Path) -> str:
    """The outermost package of a module; "" for scripts outside of any."""
    found = ""
    for folder in path.parents:
        if folder == tree or not (folder / "__init__.py").is_file():
            break
        found = folder.name
    return found


def _functions(module: ast.Module) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
    return (node for node in ast.walk(module) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef))


def _lines(function: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    is_documented = len(function.body) > 1 and ast.get_docstring(function, clean=False) is not None
    first = function.body[is_documented]
    return (function.end_lineno or first.lineno) - first.lineno + 1


def _needed(module: ast.Module) -> Iterator[str]:
    """Names in `os.environ["NAME"]`, where it is read."""
    for node in ast.walk(module):
        if isinstance(node, ast.Subscript) and isinstance(node.ctx, ast.Load):
            place, key = node.value, node.slice
            is_environment = ast.unparse(place) in ("os.environ", "environ")
            if is_environment and isinstance(key, ast.Constant) and isinstance(key.value, str):
                yield key.value
