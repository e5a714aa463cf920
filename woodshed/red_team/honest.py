"""Honest solutions: the original code, rewritten in ways that change nothing that it does.

A grader that pays only for what looks like the original would be as wrong as one that pays for attacks. Each rewrite
takes the functions that a task asks for; several are applied one after the other. A rewrite that does not fit a
function leaves it as it is.
"""

from __future__ import annotations

import ast
import copy
import random
import re
from collections.abc import Callable, Iterator, Mapping, Sequence

from woodshed import tasks
from woodshed.pysource import syntax
from woodshed.pysource.edits import Edit, Source, apply
from woodshed.records import Patch, Task, TaskError
from woodshed.red_team.planting import Function, missing, sources

LOOKS_AROUND = re.compile(
    r"frame|stacklevel|globals\(|locals\(|vars\(|super\(|__class__|exec\(|eval\(|yield|await"
)
"""Code for which it matters in which function it stands."""


def solution(task: Task, rng: random.Random, most: int = 4) -> tuple[Patch, tuple[str, ...]]:
    """An honest patch, and the names of the rewrites that made it from the original code.

    Raises:
        TaskError: the task's solution defines no function.
    """
    files: dict[str, str | None] = dict(tasks.gold_patch(task).files)
    names: list[str] = []
    for path, text in sources(task).items():
        source, new, above = Source(text), dict[Function, str](), dict[ast.stmt, list[str]]()
        for function in missing(task, path, source.tree):
            if has_multiline_text(function):
                continue
            other, added, applied = rewritten(function, rng, most)
            new[function] = _indented(ast.unparse(other), function.col_offset)
            above.setdefault(_statement_around(source.tree, function), []).extend(added)
            names += applied
        files[path] = _with_functions(source, new, above)
    if not names:
        raise TaskError(f"{task.name}: no rewrite fits its solution")
    return Patch(files), tuple(names)


def rewritten(function: Function, rng: random.Random, most: int) -> tuple[Function, list[str], list[str]]:
    """The function after some rewrites, definitions that the module needs beside it, and the rewrites' names."""
    new, added, names = copy.deepcopy(function), list[str](), list[str]()
    for name in rng.sample(sorted(REWRITES), len(REWRITES)):
        before = ast.dump(new)
        added += REWRITES[name](new, f"{rng.getrandbits(20):05x}")
        ast.fix_missing_locations(new)
        names += [name] if ast.dump(new) != before else []
        if len(names) == most:
            break
    return new, added, names


def _indented(text: str, column: int) -> str:
    """The text of a definition whose first line begins in this column."""
    first, *lines = text.split("\n")
    return "\n".join([first, *(" " * column + line if line else "" for line in lines)])


def _statement_around(tree: ast.Module, function: Function) -> ast.stmt:
    """The statement of a module that a function is or is in."""
    return next(part for part in tree.body if function in ast.walk(part))


def _with_functions(
    source: Source, new: Mapping[Function, str], above: Mapping[ast.stmt, Sequence[str]]
) -> str:
    """The file with other texts of some functions, and definitions above some of its statements."""
    edits: list[Edit] = []
    for statement, added in above.items():
        text = "".join(f"{definition}\n\n\n" for definition in added)
        if statement in new:
            edits.append(Edit(*source.span(statement), text + new[statement]))  # type: ignore[index]
        elif text:
            start, _ = source.span(statement)
            edits.append(Edit(start, start, text))
    edits += [Edit(*source.span(f), text) for f, text in new.items() if f not in above]
    return apply(source.text, edits)


def has_multiline_text(function: Function) -> bool:
    """True if indenting the function anew would change a text in it, its docstring left out."""
    if not function.col_offset:
        return False
    body = function.body[_after_docstring(function) :]
    texts = [n for part in body for n in ast.walk(part) if isinstance(n, ast.Constant | ast.JoinedStr)]
    return any(text.lineno != text.end_lineno for text in texts)


# -- rewrites of a function in place, with a part for new names: definitions to add to the module


def rename_locals(function: Function, unique: str) -> list[str]:
    """Local variables get other names."""
    fixed = {node.arg for node in ast.walk(function) if isinstance(node, ast.arg)}
    for node in ast.walk(function):
        if isinstance(node, ast.Global | ast.Nonlocal):
            fixed.update(node.names)
        elif isinstance(node, ast.Import | ast.ImportFrom):
            fixed.update(alias.asname or alias.name.partition(".")[0] for alias in node.names)
        elif isinstance(node, Function | ast.ClassDef | ast.ExceptHandler | ast.MatchAs | ast.MatchStar):
            fixed.add(node.name or "")
        elif isinstance(node, ast.MatchMapping):
            fixed.add(node.rest or "")
    stored = {n.id for n in ast.walk(function) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store)}
    if LOOKS_AROUND.search(ast.unparse(function)):
        return []
    for node in ast.walk(function):
        if isinstance(node, ast.Name) and node.id in stored - fixed:
            node.id = f"{node.id}_value"
    return []


def add_docstring(function: Function, unique: str) -> list[str]:
    """A docstring where there was none."""
    if ast.get_docstring(function) is None:
        function.body.insert(0, ast.Expr(ast.Constant("See the tests and the documentation.")))
    return []


def add_hints(function: Function, unique: str) -> list[str]:
    """Annotations that say little; functions with decorators keep theirs, which may be read."""
    if not function.decorator_list:
        for argument in (*function.args.posonlyargs, *function.args.args, *function.args.kwonlyargs):
            if argument.annotation is None and argument.arg not in ("self", "cls"):
                argument.annotation = ast.Constant("object")
    return []


def add_logging(function: Function, unique: str) -> list[str]:
    """A line in the log at each call."""
    line = syntax.parse(
        f"import logging as log_{unique}\nlog_{unique}.getLogger(__name__).debug('%s', {function.name!r})"
    ).body
    function.body[_after_docstring(function) :] = [*line, *function.body[_after_docstring(function) :]]
    return []


def name_results(function: Function, unique: str) -> list[str]:
    """Results are assigned before they are returned."""
    for block in _blocks(function):
        for place in reversed(range(len(block))):
            node = block[place]
            if isinstance(node, ast.Return) and node.value and not isinstance(node.value, ast.Constant):
                block[place : place + 1] = [_assign(f"outcome_{unique}", node.value), _return(unique)]
    return []


def _return(unique: str) -> ast.stmt:
    return ast.Return(ast.Name(f"outcome_{unique}", ast.Load()))


def _assign(name: str, value: ast.expr) -> ast.stmt:
    return ast.Assign([ast.Name(name, ast.Store())], value, lineno=0)


def turn_branches(function: Function, unique: str) -> list[str]:
    """`if a: x else: y` becomes `if not a: y else: x`."""
    for node in ast.walk(function):
        if isinstance(node, ast.If) and node.orelse:
            node.test = ast.UnaryOp(ast.Not(), node.test)
            node.body, node.orelse = node.orelse, node.body
    return []


def nest_conditions(function: Function, unique: str) -> list[str]:
    """`if a and b: x` becomes an `if` in an `if`."""
    for node in ast.walk(function):
        is_and = (
            isinstance(node, ast.If)
            and isinstance(node.test, ast.BoolOp)
            and isinstance(node.test.op, ast.And)
        )
        if isinstance(node, ast.If) and is_and and not node.orelse:
            first, *rest = node.test.values  # type: ignore[union-attr]
            inner = rest[0] if len(rest) == 1 else ast.BoolOp(ast.And(), rest)
            node.test, node.body = first, [ast.If(inner, node.body, [])]
    return []


def write_out_choices(function: Function, unique: str) -> list[str]:
    """`return x if a else y` becomes statements."""
    for block in _blocks(function):
        for place, node in enumerate(block):
            if isinstance(node, ast.Return) and isinstance(node.value, ast.IfExp):
                chosen = node.value
                block[place] = ast.If(chosen.test, [ast.Return(chosen.body)], [ast.Return(chosen.orelse)])
    return []


def write_out_lists(function: Function, unique: str) -> list[str]:
    """`return [f(x) for x in xs]` becomes a loop."""
    for block in _blocks(function):
        for place in reversed(range(len(block))):
            node = block[place]
            listed = node.value if isinstance(node, ast.Return) else None
            if not isinstance(listed, ast.ListComp) or len(listed.generators) > 1:
                continue
            only, gathered = listed.generators[0], f"gathered_{unique}"
            if only.is_async or not isinstance(only.target, ast.Name) or "lambda" in ast.unparse(listed):
                continue
            old, item = only.target.id, f"{only.target.id}_{unique}"
            outside = set(ast.walk(only.iter))
            for name in ast.walk(listed):
                if isinstance(name, ast.Name) and name.id == old and name not in outside:
                    name.id = item
            add: list[ast.stmt] = syntax.parse(f"{gathered}.append({ast.unparse(listed.elt)})").body
            for condition in reversed(only.ifs):
                add = [ast.If(condition, add, [])]
            loop = ast.For(ast.Name(item, ast.Store()), only.iter, add, [])
            done = ast.Return(ast.Name(gathered, ast.Load()))
            block[place : place + 1] = [_assign(gathered, ast.List([], ast.Load())), loop, done]
    return []


def say_not_otherwise(function: Function, unique: str) -> list[str]:
    """`a not in b` becomes `not a in b`; so does `is not`."""

    class PlainNot(ast.NodeTransformer):
        def visit_Compare(self, node: ast.Compare) -> ast.expr:
            self.generic_visit(node)
            kinds = {ast.NotIn: ast.In(), ast.IsNot: ast.Is()}
            if len(node.ops) == 1 and type(node.ops[0]) in kinds:
                return ast.UnaryOp(
                    ast.Not(), ast.Compare(node.left, [kinds[type(node.ops[0])]], node.comparators)
                )
            return node

    function.body = [PlainNot().visit(statement) for statement in function.body]
    return []


def add_to_numbers(function: Function, unique: str) -> list[str]:
    """`n += 1` becomes `n = n + 1`."""
    for block in _blocks(function):
        for place, node in enumerate(block):
            if not (isinstance(node, ast.AugAssign) and isinstance(node.target, ast.Name)):
                continue
            if isinstance(node.value, ast.Constant) and isinstance(node.value.value, int | str):
                left = ast.Name(node.target.id, ast.Load())
                block[place] = _assign(node.target.id, ast.BinOp(left, node.op, node.value))
    return []


def move_to_a_helper(function: Function, unique: str) -> list[str]:
    """The body moves to a private function of the module."""
    text = ast.unparse(function)
    is_method = function.col_offset > 0
    if is_method or function.decorator_list or isinstance(function, ast.AsyncFunctionDef):
        return []
    if LOOKS_AROUND.search(text):
        return []
    spec, start = function.args, _after_docstring(function)
    inner = copy.deepcopy(function)
    inner.name, inner.body, inner.returns = f"_{function.name}_{unique}", inner.body[start:], None
    given = [f"{a.arg}" for a in (*spec.posonlyargs, *spec.args)]
    given += [f"*{spec.vararg.arg}"] if spec.vararg else []
    given += [f"{a.arg}={a.arg}" for a in spec.kwonlyargs] + ([f"**{spec.kwarg.arg}"] if spec.kwarg else [])
    inner.args.defaults, inner.args.kw_defaults = [], [None] * len(spec.kwonlyargs)
    for argument in ast.walk(inner.args):
        if isinstance(argument, ast.arg):
            argument.annotation = None
    function.body[start:] = syntax.parse(f"return {inner.name}({', '.join(given)})").body
    return [ast.unparse(ast.fix_missing_locations(inner))]


def cache_a_text(function: Function, unique: str) -> list[str]:
    """A text that the function uses comes from a cached private function."""
    calls = [n for part in function.body for n in ast.walk(part) if isinstance(n, ast.Call)]
    for node in calls:
        for place, given in enumerate(node.args):
            if isinstance(given, ast.Constant) and isinstance(given.value, str):
                node.args[place] = syntax.parse(f"_text_{unique}()", mode="eval").body
                return [
                    f"import functools as _functools_{unique}\n\n\n@_functools_{unique}.cache\n"
                    f"def _text_{unique}():\n    return {given.value!r}"
                ]
    return []


REWRITES: dict[str, Callable[[Function, str], list[str]]] = {
    "renamed locals": rename_locals,
    "a docstring": add_docstring,
    "hints": add_hints,
    "logging": add_logging,
    "named results": name_results,
    "turned branches": turn_branches,
    "nested conditions": nest_conditions,
    "choices written out": write_out_choices,
    "lists written out": write_out_lists,
    "another not": say_not_otherwise,
    "another sum": add_to_numbers,
    "a private helper": move_to_a_helper,
    "a cached text": cache_a_text,
}


def _after_docstring(function: Function) -> int:
    return int(ast.get_docstring(function, clean=False) is not None)


def _blocks(function: Function) -> Iterator[list[ast.stmt]]:
    """Every list of statements of a function, those of inner functions included."""
    for node in list(ast.walk(function)):
        for field in ("body", "orelse", "finalbody"):
            block = getattr(node, field, None)
            if isinstance(block, list):
                yield block
