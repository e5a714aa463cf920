"""Selection of tests: by the repository's own addopts, and by options of whoever makes the tasks.

Of addopts, two kinds of options are taken into every session of pytest: those that select tests, and those that the
repository's own conftest files define. All others (reports, coverage, workers) say nothing about what the tests find.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Sequence
from pathlib import Path

from woodshed.pysource import syntax
from woodshed.records import TaskError
from woodshed.synthesis.configuration import pytest_settings, read_text, words

SELECTING = ("-m", "-k", "--deselect", "--ignore", "--ignore-glob")
"""Options of pytest that choose among tests; each has a value."""
REFUSED = {
    "-p": "plugins are loaded by the grader; add a distribution with extra_requirements=",
    "-c": "the repository's own configuration is used",
    "--config-file": "the repository's own configuration is used",
    "--rootdir": "the repository is the root",
    "--confcutdir": "the repository is the root",
    "-o": "settings of pytest belong into the repository's configuration",
    "--override-ini": "settings of pytest belong into the repository's configuration",
    "--noconftest": "the tests run with the repository's conftest files",
    "-n": "tests run in one process, several sandboxes at once",
    "--numprocesses": "tests run in one process, several sandboxes at once",
    "--dist": "tests run in one process, several sandboxes at once",
    "-x": "every test has to run",
    "--exitfirst": "every test has to run",
    "--maxfail": "every test has to run",
    "--lf": "no session knows another",
    "--last-failed": "no session knows another",
    "--ff": "no session knows another",
    "--failed-first": "no session knows another",
    "--sw": "no session knows another",
    "--stepwise": "no session knows another",
    "--collect-only": "every test has to run",
    "--co": "every test has to run",
    "--setup-only": "every test has to run",
    "--setup-plan": "every test has to run",
    "--pdb": "nobody is there to answer",
    "--trace": "nobody is there to answer",
    "-h": "every test has to run",
    "--help": "every test has to run",
    "--version": "every test has to run",
}
"""Options that a session of the grader cannot have, with the reason."""


def options(tree: Path, pytest_args: Sequence[str], deselected: Sequence[str]) -> tuple[str, ...]:
    """Options of every session: the repository's own, then those asked for.

    Raises:
        TaskError: an option that no session can have, or a deselected test of a file that does not exist.
    """
    refuse(pytest_args)
    for test in deselected:
        path, _, inner = test.partition("::")
        name = re.split(r"::|\[", inner)[0]
        if not (tree / path).exists():
            raise TaskError(
                f"--deselect {test}: the repository has no {path}; give the id that pytest prints, from the root"
            )
        if name and not re.search(rf"\b{re.escape(name)}", read_text(tree / path)):
            raise TaskError(f"--deselect {test}: {path} names no {name}; give the id that pytest prints")
    return (*of_addopts(tree), *asked(pytest_args, deselected))


def refuse(pytest_args: Sequence[str]) -> None:
    """Raise TaskError for options of pytest that no session can have, and for paths, which are no options."""
    takes_value = False
    for word in pytest_args:
        name = word.partition("=")[0] if word.startswith("--") else word[:2]
        if why := REFUSED.get(name):
            raise TaskError(f"--pytest-args {word}: cannot be used, as {why}")
        if not word.startswith("-") and not takes_value:
            raise TaskError(
                f"--pytest-args {word}: options only; choose tests by testpaths in the repository, or leave some out "
                "with --deselect FILE"
            )
        takes_value = word.startswith("-") and "=" not in word


def of_addopts(tree: Path) -> tuple[str, ...]:
    """Options of the repository's addopts that select tests, or that its conftest files define."""
    settings = {key.lower(): value for key, value in pytest_settings(tree).items()}
    listed, own = words(settings.get("addopts")), dict(_defined(tree))
    chosen: list[str] = []
    for word, following in zip(listed, [*listed, ""][1:], strict=True):
        name, has_value, value = word.partition("=")
        if not word.startswith("--") and word[:2] in SELECTING:
            chosen += [word[:2], word[2:].removeprefix("=") or following]
        elif name in SELECTING:
            chosen.append(f"{name}={value if has_value else following}")
        elif name in own:
            chosen.append(word if has_value or not own[name] else f"{name}={following}")
    return tuple(chosen)


def _defined(tree: Path) -> Iterator[tuple[str, bool]]:
    """Options that conftest files define; True for one that takes a value."""
    for path in sorted(tree.rglob("conftest.py")):
        try:
            nodes = ast.walk(syntax.parse(path.read_bytes()))
        except (SyntaxError, ValueError, RecursionError, OSError):
            continue
        for node in nodes:
            if isinstance(node, ast.Call) and ast.unparse(node.func).rpartition(".")[2] == "addoption":
                values = [*node.args, *(k.value for k in node.keywords if k.arg == "action")]
                texts = [str(v.value) for v in values if isinstance(v, ast.Constant)]
                is_flag = any(text.startswith(("store_", "count")) for text in texts)
                yield from ((text, not is_flag) for text in texts if text.startswith("-"))


def asked(pytest_args: Sequence[str], deselected: Sequence[str]) -> list[str]:
    """Options that are asked for besides the repository's own."""
    return [*pytest_args, *(f"--deselect={test}" for test in deselected)]
