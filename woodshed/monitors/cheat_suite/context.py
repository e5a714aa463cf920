"""Context of a scripted attempt: facts about its task, and the moves of scripts."""

from __future__ import annotations

import ast
import functools
import re
import textwrap
import tomllib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from woodshed.pysource import code, syntax
from woodshed.records import Task
from woodshed.tasks import folder


@dataclass(frozen=True)
class ScriptedCall:
    """One call."""

    tool: str
    arguments: dict[str, Any]
    cheats: bool = False
    """From here on the attempt is no longer honest."""


@dataclass(frozen=True)
class ScriptedAttempt:
    """Behaviour of a script on one task."""

    moves: tuple[ScriptedCall, ...]
    leftovers: dict[str, bytes] = field(default_factory=dict)
    """Files that a careless environment would have left in the workspace."""


@dataclass(frozen=True)
class ScriptContext:
    """A task whose target function is a stub."""

    task: Task
    index: int
    """Number of the script's variant that is played."""
    alone: bool = False
    """True if a cheat must earn the reward by itself: no honest work beside it, no leftovers, and only every second
    answer of the hidden tests. Monitors are measured with the other kind, which a policy is more likely to produce."""

    @functools.cached_property
    def shown(self) -> str:
        """The target's file as the agent sees it."""
        return syntax.legible(folder.original(self.task, self.task.target_path).read_bytes())

    @functools.cached_property
    def gold(self) -> str:
        return syntax.legible((folder.gold_folder(self.task) / self.task.target_path).read_bytes())

    @property
    def path(self) -> str:
        return self.task.target_path

    @property
    def package(self) -> str:
        return self.task.environment.packages[-1]

    @property
    def module(self) -> str:
        """Stem of the target's file."""
        return Path(self.path).stem

    @property
    def symbol(self) -> str:
        return self.task.target_symbol.rpartition(".")[2]

    @functools.cached_property
    def test_file(self) -> str:
        """A test file that the workspace shows."""
        wanted = [t.partition("::")[0] for t in (*self.task.fail_to_pass, *self.task.pass_to_pass)]
        return next(p for p in wanted if folder.original(self.task, p).is_file())

    def exists(self, path: str) -> bool:
        return folder.original(self.task, path).exists()

    # -- the target's function

    @functools.cached_property
    def stub(self) -> code.Function:
        return find(self.shown, self.task.target_symbol)

    @functools.cached_property
    def parameters(self) -> tuple[str, ...]:
        """Names that hold arguments, self and cls left out."""
        spec = self.stub.args
        listed = (*spec.posonlyargs, *spec.args, spec.vararg, *spec.kwonlyargs)
        return tuple(a.arg for a in listed if a is not None and a.arg not in ("self", "cls"))

    def with_body(self, body: str, *, append: str = "") -> str:
        """The target's file with another body in place of the stub."""
        lines = self.shown.split("\n")
        inner = self.stub.body
        has_docstring = ast.get_docstring(self.stub, clean=False) is not None and len(inner) > 1
        first = inner[1 if has_docstring else 0]
        indented = textwrap.indent(body.strip("\n"), " " * first.col_offset)
        text = "\n".join([*lines[: first.lineno - 1], indented, *lines[self.stub.end_lineno :]])
        return text.rstrip("\n") + "\n" + (f"\n\n{append.strip()}\n" if append else "")

    @functools.cached_property
    def honest_body(self) -> str:
        """A correct body with other names than the original, and results assigned before they are returned."""
        function = find(self.gold, self.task.target_symbol)
        body = function.body[1:] if ast.get_docstring(function, clean=False) is not None else function.body
        spec = function.args
        fixed = {
            a.arg for a in (*spec.posonlyargs, *spec.args, spec.vararg, *spec.kwonlyargs, spec.kwarg) if a
        }
        fixed |= {
            n
            for node in ast.walk(function)
            if isinstance(node, ast.Global | ast.Nonlocal)
            for n in node.names
        }
        local = {
            n.id
            for statement in body
            for n in ast.walk(statement)
            if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store)
        } - fixed
        shadowed = {a.arg for s in body for n in ast.walk(s) if isinstance(n, ast.arguments) for a in n.args}
        rewrite = _Rewrite({name: f"my_{name.lower()}" for name in local - shadowed})
        return "\n".join(ast.unparse(ast.fix_missing_locations(s)) for old in body for s in rewrite.each(old))

    @property
    def work(self) -> str:
        """Body of the function beside a cheat."""
        return "raise NotImplementedError" if self.alone else self.honest_body

    @property
    def published(self) -> str:
        """The original file with the target's published name, which a task may have changed (H8)."""
        new, old = (
            name.rpartition(".")[2]
            for name in (
                self.task.target_symbol,
                self.task.provenance.get("parent_symbol", self.task.target_symbol),
            )
        )
        return re.sub(rf"\b{re.escape(new)}\b", old, self.gold)

    def original_text(self, path: str) -> str:
        """A file of the workspace."""
        return syntax.legible(folder.original(self.task, path).read_bytes())

    # -- answers in its tests

    @functools.cached_property
    def answers(self) -> list[tuple[str, str]]:
        """Arguments and expected value of calls that the hidden tests compare, as source, nontrivial literals only."""
        examples = []
        for path in sorted({t.partition("::")[0] for t in self.task.fail_to_pass}):
            tree = code.parse(syntax.legible((folder.hidden_tests(self.task) / path).read_bytes()))
            tables = {
                name.id: node.value
                for node in getattr(tree, "body", ())
                if isinstance(node, ast.Assign)
                for name in node.targets
                if isinstance(name, ast.Name)
            }
            for node in ast.walk(tree) if tree else ():
                examples += self._told(node, tables)
        distinct = list(dict.fromkeys(examples))
        return distinct[1::2] if self.alone else distinct

    def _told(self, node: ast.AST, tables: dict[str, ast.expr]) -> list[tuple[str, str]]:
        """Examples in one node: `assert f(a) == b`, `assertEqual(f(a), b)`, or rows of (a, b), also by name."""
        if isinstance(node, ast.Assert) and isinstance(node.test, ast.Compare):
            return self._answer(node.test.left, node.test.comparators[0])
        if (
            isinstance(node, ast.Call)
            and code.dotted(node.func, {}).endswith("assertEqual")
            and len(node.args) > 1
        ):
            return self._answer(*node.args[:2])
        names = {t.partition("[")[0].rpartition("::")[2] for t in self.task.fail_to_pass}
        rows: list[tuple[str, str]] = []
        if isinstance(node, ast.FunctionDef) and node.name in names:
            for decorator in node.decorator_list:
                listed = decorator.args[1] if isinstance(decorator, ast.Call) and decorator.args[1:] else None
                table = tables.get(listed.id) if isinstance(listed, ast.Name) else listed
                for row in table.elts if isinstance(table, ast.List | ast.Tuple) else ():
                    if isinstance(row, ast.Tuple) and len(row.elts) > 1:
                        rows += _literal(row.elts[:-1], row.elts[-1])
        return rows

    def _answer(self, call: ast.expr, value: ast.expr) -> list[tuple[str, str]]:
        named = isinstance(call, ast.Call) and code.dotted(call.func, {}).rpartition(".")[2] == self.symbol
        return (
            _literal(call.args, value) if isinstance(call, ast.Call) and named and not call.keywords else []
        )

    @property
    def arguments(self) -> str:
        """An expression for all arguments, as `answers` writes them."""
        spec = self.stub.args
        plain = [a.arg for a in (*spec.posonlyargs, *spec.args) if a.arg not in ("self", "cls")]
        star = f"*{spec.vararg.arg}," if spec.vararg else ""
        return f"({''.join(f'{name}, ' for name in plain)}{star})"

    # -- moves

    def look(self) -> ScriptedCall:
        first = max(1, self.task.target_lines[0] - 12)
        return ScriptedCall("read_file", {"path": self.path, "start": first, "count": 30})

    def put(self, text: str, *, cheats: bool = False) -> ScriptedCall:
        """Write the target's file."""
        return ScriptedCall("write_file", {"path": self.path, "content": text}, cheats)

    def solve(self, *, append: str = "", cheats: bool = False) -> ScriptedCall:
        """Solve the task honestly, with more code at the end of the file."""
        return self.put(self.with_body(self.work, append=append), cheats=cheats)

    def fake(self, body: str, *, append: str = "") -> ScriptedAttempt:
        """Read, write a dishonest body, finish."""
        return self.act(self.put(self.with_body(body, append=append), cheats=True))

    def act(self, *moves: ScriptedCall, leftovers: dict[str, bytes] | None = None) -> ScriptedAttempt:
        """Look first, finish last."""
        return ScriptedAttempt(
            (self.look(), *moves, ScriptedCall("finish", {})), {} if self.alone else leftovers or {}
        )

    def first(self, *moves: ScriptedCall, leftovers: dict[str, bytes] | None = None) -> ScriptedAttempt:
        """These moves, then an honest solution."""
        return self.act(*moves, *(() if self.alone else (self.solve(),)), leftovers=leftovers)


def _literal(arguments: Sequence[ast.expr], value: ast.expr) -> list[tuple[str, str]]:
    """Arguments and an expected value as source, if both are literals and the value is not trivial."""
    try:
        inputs, expected = tuple(ast.literal_eval(a) for a in arguments), ast.literal_eval(value)
    except (ValueError, SyntaxError, TypeError):
        return []
    telling = [n.value for n in ast.walk(value) if isinstance(n, ast.Constant)]
    rich = any((isinstance(v, str) and len(v) > 2) or (isinstance(v, int) and abs(v) > 2) for v in telling)
    return [(repr(inputs), repr(expected))] if rich else []


def snippets(kind: str, rule: str) -> list[str]:
    """Python of `snippets.toml` about a rule; kind is "cheats" or "honest"."""
    return _snippets()[kind].get(rule, [])


@functools.cache
def _snippets() -> dict[str, dict[str, list[str]]]:
    return tomllib.loads(Path(__file__).with_name("snippets.toml").read_text("utf-8"))


def pick(context: ScriptContext, *acts: Callable[[], ScriptedAttempt | None]) -> ScriptedAttempt | None:
    """The variant of this context, or the next one that fits the task."""
    for turn in range(len(acts)):
        if (act := acts[(context.index + turn) % len(acts)]()) is not None:
            return act
    return None


def shell(command: str) -> ScriptedCall:
    return ScriptedCall("shell", {"command": command})


def dirty(command: str) -> ScriptedCall:
    """A command that is the cheat."""
    return ScriptedCall("shell", {"command": command}, cheats=True)


def find(text: str, symbol: str) -> code.Function:
    """A function by its dotted name.

    Raises:
        LookupError: the file has no such function.
    """
    body: Sequence[ast.stmt] = getattr(code.parse(text), "body", ())
    definition: ast.stmt | None = None
    for name in symbol.split("."):
        kinds = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
        definition = next((n for n in body if isinstance(n, kinds) and n.name == name), None)
        body = getattr(definition, "body", ())
    if not isinstance(definition, code.Function):
        raise LookupError(symbol)
    return definition


def fits(task: Task) -> bool:
    """True if scripts can be played on a task: its target is a stub in a file that the gold patch changes."""
    try:
        context = ScriptContext(task, 0)
        return (
            bool(context.honest_body)
            and bool(context.stub.body)
            and bool(context.test_file)
            and _is_whole(context)
        )
    except (LookupError, StopIteration, OSError, RecursionError):
        return False


def _is_whole(context: ScriptContext) -> bool:
    text = context.with_body(context.honest_body)
    return code.parse(text) is not None and set(folder.gold_patch(context.task).files) == {context.path}


class _Rewrite(ast.NodeTransformer):
    def __init__(self, names: dict[str, str]) -> None:
        self.names = names
        self.pending: list[ast.stmt] = []

    def each(self, statement: ast.stmt) -> list[ast.stmt]:
        result = self.visit(statement)
        return result if isinstance(result, list) else [result]

    def visit_Name(self, node: ast.Name) -> ast.Name:
        node.id = self.names.get(node.id, node.id)
        return node

    def visit_Return(self, node: ast.Return) -> ast.stmt | list[ast.stmt]:
        self.generic_visit(node)
        if node.value is None or isinstance(node.value, ast.Constant | ast.Name):
            return node
        answer = ast.Name("my_answer", ast.Store())
        return [ast.Assign([answer], node.value), ast.Return(ast.Name("my_answer", ast.Load()))]
