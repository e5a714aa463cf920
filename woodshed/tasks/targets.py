"""Definitions that tasks are about, and choices of tasks by them: a held-out share, and a sample over sources."""

from __future__ import annotations

import ast
import difflib
import random
from collections.abc import Iterable, Sequence

from woodshed.pysource import code, syntax
from woodshed.records import RecipeError, Task
from woodshed.tasks.contents import gold_files, original

Target = tuple[str, str, str]
"""Repository, file and dotted name: ("pypi:toolz", "toolz/dicttoolz.py", "merge_with")."""


def targets(task: Task) -> frozenset[Target]:
    """The named definition and every other one whose own lines the gold patch changes.

    All versions of a repository are one, and a function inside a function is part of it.
    """
    source = repository(task)
    found = {(source, task.target_path, task.target_symbol)}
    for path, file in gold_files(task).items():
        if file is not None and syntax.is_source(path):
            after, place = syntax.legible(file.read_bytes()), original(task, path)
            before = syntax.legible(place.read_bytes()) if place.is_file() else ""
            found |= {(source, path, name) for name in _changed_definitions(before, after)}
    return frozenset(found)


def repository(task: Task) -> str:
    """The source of a task without its version: "pypi:toolz", "git+https://example.org/a.git"."""
    source = str(task.provenance.get("source", ""))
    kept = source.partition("==")[0]
    return kept.rpartition("@")[0] or kept if kept.startswith("git+") else kept


def _changed_definitions(before: str, after: str) -> set[str]:
    """Dotted names of the functions and classes of `after` that hold a changed line outside of those inside them."""
    tree = code.parse(after)
    if tree is None:
        return set()
    owners, lines = dict(_owners(tree, "")), after.splitlines()
    matcher = difflib.SequenceMatcher(None, before.splitlines(), lines, autojunk=False)
    changed: set[int] = set()
    for tag, _, _, start, end in matcher.get_opcodes():
        if tag == "delete":
            changed.add(start)  # the line that follows what is too much
        elif tag != "equal":
            changed |= {line for line in range(start, end) if lines[line].strip()}
    return {owners[line + 1] for line in changed if line + 1 in owners}


def _owners(node: ast.AST, prefix: str) -> Iterable[tuple[int, str]]:
    """Pairs (line, dotted name of its function, or else of its class); what is inside a class comes after it."""
    for child in ast.iter_child_nodes(node):
        name = f"{prefix}{getattr(child, 'name', '')}"
        if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield from ((line, name) for line in range(child.lineno, (child.end_lineno or 0) + 1))
        if isinstance(child, ast.ClassDef):
            yield from _owners(child, f"{name}.")
        elif not isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef):
            yield from _owners(child, prefix)


def groups(tasks: Sequence[Task]) -> tuple[list[list[Task]], list[Task]]:
    """Tasks that share a target together, by the smallest id in each group; and wide tasks, which touch several groups.

    Narrow tasks come first, so that a removed module does not join all that its functions are the targets of.
    """
    targets_of = {task.id: targets(task) for task in tasks}
    owned: list[tuple[set[Target], list[Task]]] = []
    wide = []
    for task in sorted(tasks, key=lambda task: (len(targets_of[task.id]), task.id)):
        own = targets_of[task.id]
        touched = [group for group in owned if group[0] & own]
        if len(touched) > 1:
            wide.append(task)
        elif touched:
            touched[0][0].update(own)
            touched[0][1].append(task)
        else:
            owned.append((set(own), [task]))
    found = [sorted(members, key=lambda task: task.id) for _, members in owned]
    return sorted(found, key=lambda group: group[0].id), sorted(wide, key=lambda task: task.id)


def split(tasks: Sequence[Task], share: float) -> tuple[list[Task], list[Task]]:
    """Tasks to practise on, and about `share` of them held out, no target being on both sides.

    A wide task that touches both sides is on neither. Ids are hashes, so their order is a fixed draw: every seed of an
    experiment is measured on the same tasks.

    Raises:
        RecipeError: the tasks cannot be parted, as all of them share code.
    """
    if not share:
        return list(tasks), []
    parted, wide = groups(tasks)
    wanted, heldout = round(share * sum(map(len, parted))), list[Task]()
    for group in parted:
        if len(heldout) + len(group) <= wanted:
            heldout += group
    if wanted and not heldout and len(parted) > 1:
        heldout += min(parted, key=len)
    if wanted and not heldout:
        raise RecipeError(
            f"tasks.heldout_share = {share:g}, but the {len(tasks)} tasks share code with each other, so that none "
            "can be held out. Name other tasks as tasks.heldout, or make some of more modules"
        )
    held = {target for task in heldout for target in targets(task)}
    ids = {task.id for task in heldout}
    practised = {
        target for group in parted for task in group if task.id not in ids for target in targets(task)
    }
    neither = set[str]()
    for task in wide:
        own = targets(task)
        if own & held and own & practised:
            neither.add(task.id)
        elif own & held:
            heldout.append(task)
            held |= own
        else:
            practised |= own
    ids = {task.id for task in heldout} | neither
    return [task for task in tasks if task.id not in ids], heldout


def sample(tasks: Sequence[Task], limit: int, seed: int) -> list[Task]:
    """At most `limit` tasks (0: all), by name: repositories take turns in a seeded order, and in each its targets."""
    if not limit or limit >= len(tasks):
        return list(tasks)
    draw = random.Random(f"{seed} sample of tasks")
    shuffled = draw.sample(sorted(tasks, key=lambda task: task.name), len(tasks))
    turns: dict[tuple[str, ...], int] = {}
    ranked = []
    for task in shuffled:
        target = (repository(task), task.target_path, task.target_symbol)
        again = turns[target] = turns.get(target, -1) + 1
        source = (target[0], str(again))
        turn = turns[source] = turns.get(source, -1) + 1
        ranked.append((again, turn, len(ranked), task))
    chosen = {id(task) for *_, task in sorted(ranked, key=lambda entry: entry[:3])[:limit]}
    return [task for task in tasks if id(task) in chosen]
