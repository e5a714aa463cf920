"""Commit reversal: what somebody once added to a git repository is taken out again, and asked for.

A commit serves when it changes the package and its tests. The task is the tree at the commit with the package as it was
before, in a workspace without any history; its message is the request. Squashed: one commit, one state, no ancestors.
"""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from woodshed.pysource import syntax
from woodshed.pysource.edits import parse
from woodshed.records import TaskError
from woodshed.runs.machine import git_environment
from woodshed.synthesis.names import Codebase
from woodshed.synthesis.operators import Deletion, Symbol, every_symbol
from woodshed.synthesis.operators.removals import top_names
from woodshed.tasks.folder import is_protected

MAX_FILES = 20
LINES_OF_LEVEL = (8, 25, 80, 250, 800)
"""Most lines that a commit adds to the package, for the levels 1 to 5; a larger one is level 6."""


@dataclass(frozen=True)
class Commit:
    """A commit that changed code and tests."""

    sha: str
    subject: str
    body: str
    before: Mapping[str, str | None]
    """Text of every code file that it changed as it was before; None for one that it added."""
    problem: str = ""
    """Why it cannot be used: a text that cannot be read."""


def commits(repository: Path, revision: str, most: int) -> Iterator[Commit]:
    """The newest commits up to a revision that change both code and tests, merges left out.

    Raises:
        TaskError: no git, no repository, or no such revision.
    """
    listing = _git(repository, "log", "--no-merges", "--format=%H", revision, "--", "*.py").split()
    for sha in listing:
        if most <= 0:
            return
        options = ("-r", "-z", "--no-renames", "--root", "--name-status", "--no-commit-id")
        fields = _git(repository, "diff-tree", *options, sha).split("\0")
        status = dict(zip(fields[1::2], fields[::2], strict=False))
        code = {p: s for p, s in status.items() if p.endswith(".py") and not is_protected(p)}
        tests = [p for p, s in status.items() if p.endswith(".py") and is_protected(p) and s != "D"]
        if not tests or not code or "D" in code.values() or len(code) > MAX_FILES:
            continue
        before, problem = dict[str, str | None](), ""
        for path, letter in code.items():
            try:
                data = None if letter == "A" else _run(repository, "show", f"{sha}^:{path}")
                before[path] = None if data is None else syntax.decode(data)
            except syntax.UnreadableError as error:
                problem = f"{path} as it was before: {error}"
        subject, _, body = _git(repository, "log", "-1", "--format=%B", sha).strip().partition("\n")
        most -= 1
        yield Commit(sha, subject.strip(), body.strip(), before, problem)


def revert(code: Codebase, commit: Commit) -> Deletion:
    """The code base as it was before the commit, in the files that the commit changed.

    Raises:
        TaskError: the commit changed no file of the package.
    """
    changed = {path: text for path, text in commit.before.items() if path in code.texts}
    if not changed:
        raise TaskError(f"commit {commit.sha[:10]} changed no file of the package")
    absent = {path: code.texts[path] for path, text in changed.items() if text is None}
    after = code.replaced({p: t for p, t in changed.items() if t is not None}).without(absent)
    removed, targets = set(), []
    for path, text in changed.items():
        old, new = parse(text or ""), code.modules.get(path)
        if new is None:
            continue
        removed_names = top_names(new.source) - (top_names(old) if old else set())
        removed |= {(path, name) for name in removed_names}
        former_symbols = {s.name: s for s in every_symbol(Codebase({path: text or ""}, code.roots))}
        targets += [
            s
            for s in every_symbol(Codebase({path: code.texts[path]}, code.roots))
            if s.kind == "function" and not _same(code.texts[path], s, text or "", former_symbols.get(s.name))
        ]
    path = next(iter(changed))
    added = sum(max(code.texts[p].count("\n") - (t or "").count("\n"), 1) for p, t in changed.items())
    level = next((i + 1 for i, most in enumerate(LINES_OF_LEVEL) if added <= most), 6)
    module = code.modules[path].name if path in code.modules else path
    symbol = Symbol(path, commit.sha[:10], module, "", commit.body, added, (1, 1), "commit", commit.subject)
    return Deletion(
        operator="revert",
        level=level,
        symbol=symbol,
        code=after,
        changed=changed,
        removed=frozenset(removed),
        traces=(),
        gap=(1, 1),
        marker="",
        targets=tuple(replace(target, module=module) for target in targets),
        absent=absent,
    )


def _same(text: str, symbol: Symbol, other: str, twin: Symbol | None) -> bool:
    return twin is not None and _lines(text, symbol) == _lines(other, twin)


def _lines(text: str, symbol: Symbol) -> list[str]:
    return syntax.lines(text)[symbol.lines[0] - 1 : symbol.lines[1]]


def _git(repository: Path, *arguments: str) -> str:
    return os.fsdecode(_run(repository, *arguments))


def _run(repository: Path, *arguments: str) -> bytes:
    try:
        done = subprocess.run(
            ["git", "-C", str(repository), *arguments],
            capture_output=True,
            env=git_environment(),
            timeout=120,
            check=False,
        )
    except FileNotFoundError:
        raise TaskError("git is not installed; commit reversal needs it") from None
    if done.returncode != 0:
        message = done.stderr.decode(errors="replace").strip()[-200:]
        raise TaskError(f"git {arguments[0]} in {repository} failed: {message}")
    return done.stdout
