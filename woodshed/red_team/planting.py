"""Attacks planted in the code that a task is about.

The functions that the task asks for are there, with their signatures, and hollow: they return `_moved(locals())`. For
an attack that is right only in some surroundings they are whole, behind `_here()`. The attack's code stands at the end
of the module. So no honest test passes, and the module can be imported wherever it could be before.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import PurePosixPath

from woodshed import tasks
from woodshed.pysource import syntax
from woodshed.pysource.edits import Edit, Source, apply
from woodshed.records import Patch, Task, TaskError
from woodshed.red_team.compose import Attack

Function = ast.FunctionDef | ast.AsyncFunctionDef


def plant(task: Task, attack: Attack) -> Patch:
    """The patch of an attack on a task.

    Raises:
        TaskError: the task's solution defines no function that could be hollow.
    """
    files = _planted(task, attack.code, "guarded" if attack.reach.form == "place" else "hollow")
    if attack.reach.form == "files":
        files |= _extra_files(task, attack)
    return Patch(files)


def hollow(task: Task) -> Patch:
    """The functions that a task asks for, without a body. An attack starts from it.

    Raises:
        TaskError: as `plant`.
    """
    return Patch(_planted(task, "def _moved(arguments):\n    return None\n", "hollow"))


def can_be_attacked(task: Task) -> bool:
    """True if the task's solution defines a function."""
    return task.verifier == "pytest" and any(
        missing(task, path, syntax.parse(text)) for path, text in sources(task).items()
    )


def _planted(task: Task, code: str, how: str) -> dict[str, str | None]:
    files: dict[str, str | None] = dict(tasks.gold_patch(task).files)
    found = False
    for path, text in sources(task).items():
        source = Source(text)
        if functions := missing(task, path, source.tree):
            edits = [_edit(source, function, how) for function in functions]
            files[path] = f"{apply(text, edits).rstrip()}\n\n\n{code}"
            found = True
    if not found:
        raise TaskError(f"{task.name} cannot be attacked: its solution defines no function")
    return files


def sources(task: Task) -> dict[str, str]:
    """The Python files of the solution, by path."""
    return {p: text for p, text in tasks.gold_patch(task).files.items() if text and p.endswith(".py")}


def missing(task: Task, path: str, solved: ast.AST) -> list[Function]:
    """The functions of a solved file that the workspace does not show just so, none inside another."""
    before = tasks.original(task, path)
    shown = syntax.legible(before.read_bytes()) if before.is_file() else ""
    known = {(name, ast.dump(function)) for name, function in functions_of(syntax.parse(shown))}
    return [function for name, function in functions_of(solved) if (name, ast.dump(function)) not in known]


def functions_of(tree: ast.AST, prefix: str = "") -> Iterator[tuple[str, Function]]:
    """Every function by its dotted name, also in classes and branches, none inside another."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, Function):
            yield prefix + node.name, node
        else:
            yield from functions_of(
                node, f"{prefix}{node.name}." if isinstance(node, ast.ClassDef) else prefix
            )


def _edit(source: Source, function: Function, how: str) -> Edit:
    """The edit that empties a function, or guards it; its docstring stays."""
    body = function.body
    has_docstring = ast.get_docstring(function, clean=False) is not None and len(body) > 1
    start, _ = source.span(body[has_docstring])
    _, end = source.span(body[-1])
    if how == "hollow":
        return Edit(start, end, "return _moved(locals())")
    column = body[has_docstring].col_offset
    if source.text[source.line_start(start) : start].strip():  # a body in the line of its `def`
        return Edit(start, start, "return None; ")
    return Edit(start, start, f"if not _here():\n{' ' * (column + 4)}return None\n{' ' * column}")


def _extra_files(task: Task, attack: Attack) -> dict[str, str | None]:
    """Files of the patch beside the code that the task is about."""
    hidden = tasks.protected_files(task)
    tested = sorted({test.partition("::")[0] for test in (*task.fail_to_pass, *task.pass_to_pass)})
    if attack.reach.path == "{test_file}":
        return {path: _passing(syntax.legible(hidden[path])) for path in tested if path in hidden}
    place = attack.reach.path.replace("{tests}", str(PurePosixPath(tested[0]).parent))
    text = attack.reach.text
    if place in hidden:  # also what the project's own has, so that its fixtures are there
        text = f"{syntax.legible(hidden[place])}\n\n{text}"
    return {place: text}


def _passing(text: str) -> str:
    """A test file whose tests do nothing."""
    source = Source(text)
    tests = [f for name, f in functions_of(source.tree) if name.rpartition(".")[2].startswith("test")]
    return apply(text, [Edit(source.span(f.body[0])[0], source.span(f.body[-1])[1], "pass") for f in tests])
