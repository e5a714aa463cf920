"""Leftovers of deleted code: names of files and folders that hold copies or traces of it.

One list for three uses: what `scrub` deletes from a tree, where the scan lets no name of the missing code stand, and
what a person can extend. Rules that a run taught (a monitor saw an attempt profit from a place) are kept in a JSON file
beside the other caches:

    [{"pattern": "\\.lsp-index/", "why": "an attempt read signatures there", "provenance": "run x, rollout y"}]

`pattern` is a regular expression, searched in the path of a file relative to the workspace, or absolute elsewhere.
"""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from woodshed import documents
from woodshed.records import TaskError
from woodshed.runs.files import write_atomically
from woodshed.tasks.environment import cache_dir

NAMES = {
    "version control": r"\.git|\.hg|\.svn|\.jj|\.bzr|CVS|\.gitmodules|\.pijul|_darcs|\.fslckout|.+\.bundle",
    "compiled Python": r"__pycache__|.+\.py[co]|.+\.pyd|__pypackages__",
    "type checkers": r"\.mypy_cache|\.dmypy\.json|\.pytype|\.pyre|\.pyright|\.basedpyright|\.pyrefly_cache|\.ty_cache",
    "linters and tests": r"\.ruff_cache|\.pytest_cache|\.hypothesis|\.testmondata.*|\.benchmarks|\.mutmut-cache"
    r"|\.cosmic-ray.*|\.coverage(\..+)?|htmlcov|coverage\.(xml|json|lcov)|\.stestr|\.tox|\.nox|junit.*\.xml",
    "indexes": r"\.cache|\.jedi|tags|TAGS|GTAGS|GRTAGS|GPATH|cscope\.out|\.ropeproject|\.clangd|\.ccls-cache|\.aider.*"
    r"|\.cursor|\.continue|\.serena|objects\.inv|\.doctrees|searchindex\.js",
    "editors": r"\.idea|\.vscode|\.vs|\.history|\.ipynb_checkpoints|\.netrwhist|.+\.(orig|rej|bak|swp|swo|swn)"
    r"|.*~|\.\#.*|\#.*\#|\.DS_Store|.+\.code-workspace",
    "histories": r"\.bash_history|\.zsh_history|\.python_history|\.node_repl_history|\.sqlite_history"
    r"|\.lesshst|\.viminfo|nohup\.out|core\.\d+|vgcore\..*",
    "builds": r".+\.egg-info|.+\.dist-info|\.eggs|.+\.(whl|egg|pex|pyz)|\.venv|venv|pip-wheel-metadata|wheelhouse"
    r"|__editable__.*|\.pybuild|\.numba_cache|node_modules|.+\.tsbuildinfo",
}
"""Tool that leaves it behind, and the whole names of files or folders that it uses."""

LEFTOVERS = re.compile("|".join(NAMES.values()))
FOLDERS = ("__pycache__", "__pypackages__", "CVS", "venv", "wheelhouse", "htmlcov", "node_modules", "_darcs")
"""Leftover folders whose names could be packages, and are not."""
BUILD_FOLDERS = ("build", "dist")
"""Removed at the top of a tree only: deeper down they are packages of people's own."""


@dataclass(frozen=True)
class LeftoverRule:
    """One more place, learned from a run or written by a person."""

    pattern: str
    why: str
    provenance: str = ""


def is_leftover(path: Path) -> bool:
    """True if a file or folder is a leftover by its name. A folder `tags` or a module `core.py` is not."""
    if LEFTOVERS.fullmatch(path.name) is None:
        return False
    if path.is_dir() and not path.is_symlink():
        return not path.name.isidentifier() or path.name in FOLDERS
    return True


def scrub(tree: Path, rules: Sequence[LeftoverRule] = ()) -> None:
    """Deletes leftovers, what the rules name, and symbolic links that lead out of the tree."""
    for name in BUILD_FOLDERS:
        if not (tree / name / "__init__.py").exists():
            shutil.rmtree(tree / name, ignore_errors=True)
    root, learned = tree.resolve(), _any(rules)
    for directory, folders, files in os.walk(tree):
        for name in [*folders, *files]:
            path = Path(directory, name)
            is_folder = path.is_dir() and not path.is_symlink()
            inner = path.relative_to(tree).as_posix() + "/" * is_folder
            if is_leftover(path) or (learned and learned.search(inner)):
                shutil.rmtree(path) if is_folder else path.unlink()
            elif path.is_symlink() and not _stays_in(path, root):
                path.unlink()
        folders[:] = [name for name in folders if Path(directory, name).is_dir()]


def _stays_in(link: Path, root: Path) -> bool:
    """True if a link leads to a place below the root; one that leads in a circle leads nowhere."""
    try:
        return link.resolve().is_relative_to(root)
    except (RuntimeError, OSError):
        return False


def pattern(rules: Sequence[LeftoverRule] = ()) -> str:
    """Regular expression of leftovers in a path: the names, the build folders and the rules."""
    builds = "|".join(BUILD_FOLDERS)
    whole = rf"(^|/)({LEFTOVERS.pattern})(/|$)|^({builds})/"
    return "|".join([whole, *(f"(?:{rule.pattern})" for rule in rules)])


def rules_path() -> Path:
    """Default file of the learned rules."""
    return cache_dir() / "leak-rules.json"


def read_rules(path: Path) -> list[LeftoverRule]:
    """The learned rules; none where there is no such file.

    Raises:
        TaskError: a file that does not hold rules, or a pattern that is no regular expression.
    """
    if not path.exists():
        return []
    try:
        entries = documents.read_json(path, TaskError)
        if not isinstance(entries, list):
            raise ValueError("not a list")
        rules = [LeftoverRule(**entry) for entry in entries]
        for rule in rules:
            re.compile(rule.pattern)
    except (ValueError, TypeError, re.error) as error:
        raise TaskError(
            f"{path} holds no leak rules ({error}). Expected a list of objects with "
            '"pattern", "why" and "provenance".'
        ) from None
    return rules


def add_rules(path: Path, rules: Iterable[LeftoverRule]) -> list[LeftoverRule]:
    """Writes rules that are not known yet to the file; all that it holds now."""
    known = read_rules(path)
    patterns = {rule.pattern for rule in known}
    for rule in rules:
        re.compile(rule.pattern)
        if rule.pattern not in patterns:
            known.append(rule)
            patterns.add(rule.pattern)
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(path, json.dumps([asdict(rule) for rule in known], indent=1) + "\n")
    return known


def _any(rules: Sequence[LeftoverRule]) -> re.Pattern[str] | None:
    return re.compile("|".join(f"(?:{rule.pattern})" for rule in rules)) if rules else None
