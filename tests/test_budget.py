"""Budgets that keep the package small and its language plain.

Each list below names what exceeds a budget today. A list only shrinks: an entry that no longer exceeds its budget fails
too, and goes.
"""

from __future__ import annotations

import ast
import re
from collections import defaultdict
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import woodshed
from woodshed.settings import leaves
from woodshed.stages.recipe import Recipe

PACKAGE = Path(woodshed.__file__).parent
ROOT = PACKAGE.parent
MAX_FUNCTION_LINES = 45
MAX_PARAMETERS = 8
MAX_FILE_LINES = 500
MAX_SETTINGS = 110
GRAB_BAGS = ("utils", "util", "common", "misc", "base", "helpers", "helper", "lib")
QUESTION = re.compile(r"(What|Which|Whether|How|Where|Who)\b")
RETIRED = re.compile(
    r"\b(rungs?|verbs|lockstep|theft|residue|prober|learnt|studied|the house|this house)\b", re.IGNORECASE
)
PAGES = ("README.md", "CONTRIBUTING.md", "docs/ideas.md", "docs/first-run.md", "docs/how-to.md")

# GPU kernels take every pointer, stride and block size by name, and their bodies do not divide.
KERNELS = {
    "engines/local/kernels.py:attend_kernel",
    "engines/local/kernels.py:linear_kernel",
    "muon/kernels.py:apply_kernel",
    "muon/kernels.py:copy_kernel",
    "muon/kernels.py:pack_kernel",
    "muon/kernels.py:symmetric_kernel",
}
# The parameters of a command are its options.
COMMANDS = {"cli/measure.py:evaluate", "cli/making.py:make_tasks"}
LONG_FUNCTIONS: set[str] = set()
MANY_PARAMETERS: set[str] = set()
LONG_FILES: set[str] = set()
CLASS_NAMES_DEFINED_TWICE: set[str] = set()
FILES_WITH_QUESTIONS: set[str] = set()
FILES_WITH_RETIRED_WORDS: set[str] = set()

Function = ast.FunctionDef | ast.AsyncFunctionDef


@cache
def modules() -> dict[str, ast.Module]:
    """Syntax tree of every module, by its path within the package."""
    return {
        path.relative_to(PACKAGE).as_posix(): ast.parse(path.read_text("utf-8"))
        for path in sorted(PACKAGE.rglob("*.py"))
    }


def functions() -> Iterator[tuple[str, Function]]:
    for path, tree in modules().items():
        for node in ast.walk(tree):
            if isinstance(node, Function):
                yield f"{path}:{node.name}", node


def num_parameters(function: Function) -> int:
    """Number of named parameters, without the instance or class."""
    names = [p.arg for p in (*function.args.posonlyargs, *function.args.args, *function.args.kwonlyargs)]
    return len(names) - (names[:1] in (["self"], ["cls"]))


def docstrings() -> Iterator[tuple[str, str]]:
    """Path and first line of the docstring of every module, class and function."""
    for path, tree in modules().items():
        for node in ast.walk(tree):
            if isinstance(node, ast.Module | ast.ClassDef | Function) and (text := ast.get_docstring(node)):
                yield path, text.splitlines()[0]


def check(exceeding: set[str], listed: set[str], advice: str) -> None:
    assert not exceeding - listed, f"{advice}: {sorted(exceeding - listed)}"
    assert not listed - exceeding, (
        f"no longer exceeds its budget, take it off the list: {sorted(listed - exceeding)}"
    )


def test_functions_fit_on_a_screen():
    long = {
        name for name, node in functions() if (node.end_lineno or 0) - node.lineno + 1 > MAX_FUNCTION_LINES
    }
    check(long - KERNELS, LONG_FUNCTIONS, f"over {MAX_FUNCTION_LINES} lines, name its parts")


def test_functions_take_few_parameters():
    many = {name for name, node in functions() if num_parameters(node) > MAX_PARAMETERS}
    check(many - KERNELS - COMMANDS, MANY_PARAMETERS, f"over {MAX_PARAMETERS} parameters, pass a record")


def test_files_stay_readable():
    long = {
        path for path in modules() if len((PACKAGE / path).read_text("utf-8").splitlines()) > MAX_FILE_LINES
    }
    check(long, LONG_FILES, f"over {MAX_FILE_LINES} lines, make it a folder of the same name")


def test_a_class_name_means_one_thing():
    files = defaultdict(list)
    for path, tree in modules().items():
        for node in ast.walk(tree):
            if isinstance(node, ast.ClassDef):
                files[node.name].append(path)
    check(
        {name for name in files if len(files[name]) > 1},
        CLASS_NAMES_DEFINED_TWICE,
        "defined twice, rename one",
    )


def test_a_recipe_has_few_settings():
    """Each setting of each section counts, also where sections share a class. 221 on 2026-11-30."""
    names = [name for name, _ in leaves(Recipe)]
    assert len(names) <= MAX_SETTINGS, f"{len(names)} settings: a new one replaces another"


def test_docstrings_begin_with_a_noun_or_an_imperative():
    asking = {path for path, line in docstrings() if QUESTION.match(line)}
    check(asking, FILES_WITH_QUESTIONS, "a docstring begins with a question word")


def test_retired_words_are_gone():
    """Docstrings, messages and pages use the field's words; comments are not read."""
    found = {
        page for page in PAGES if (ROOT / page).exists() and RETIRED.search((ROOT / page).read_text("utf-8"))
    }
    for path, tree in modules().items():
        texts = [n.value for n in ast.walk(tree) if isinstance(n, ast.Constant) and isinstance(n.value, str)]
        if any(RETIRED.search(text) for text in texts):
            found.add(path)
    check(found, FILES_WITH_RETIRED_WORDS, f"a retired word ({RETIRED.pattern})")


def test_no_grab_bags():
    names = {part for path in PACKAGE.rglob("*") for part in path.relative_to(PACKAGE).with_suffix("").parts}
    assert not names & set(GRAB_BAGS)


def test_importing_the_package_does_nothing():
    """The package's own file holds the ladder and the version, so importing it touches nothing."""
    code = compile((PACKAGE / "__init__.py").read_text("utf-8"), "woodshed", "exec")
    assert set(code.co_names) <= {"__doc__", "__version__", "__name__", "__annotations__"}
