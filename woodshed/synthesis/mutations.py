"""Small changes that make a function wrong: bugs to be found, and the measure of what hidden tests notice.

The catalogue is that of mutation testing (mutmut, cosmic-ray) and of SWE-smith's procedural modifiers
(arXiv:2504.21798): one exact text edit each, everything else stays byte for byte.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import ClassVar

from woodshed.pysource import edits, syntax
from woodshed.pysource.edits import Edit, Source

COMPARISONS: dict[type[ast.cmpop], tuple[str, str]] = {
    ast.Lt: ("<", "<="),
    ast.LtE: ("<=", "<"),
    ast.Gt: (">", ">="),
    ast.GtE: (">=", ">"),
    ast.Eq: ("==", "!="),
    ast.NotEq: ("!=", "=="),
    ast.In: ("in", "not in"),
    ast.Is: ("is", "is not"),
}
ARITHMETIC: dict[type[ast.operator], tuple[str, str]] = {
    ast.Add: ("+", "-"),
    ast.Sub: ("-", "+"),
    ast.Mult: ("*", "+"),
    ast.Div: ("/", "*"),
    ast.FloorDiv: ("//", "/"),
    ast.Mod: ("%", "*"),
    ast.BitAnd: ("&", "|"),
    ast.BitOr: ("|", "&"),
    ast.LShift: ("<<", ">>"),
    ast.RShift: (">>", "<<"),
}


@dataclass(frozen=True)
class Mutant:
    """One way to be wrong."""

    kind: str
    """comparison, arithmetic, logic, negation, constant, result, statement, jump or arguments."""
    line: int
    """First line of what changed, in the original."""
    edit: Edit


def mutants(source: Source, function: ast.FunctionDef | ast.AsyncFunctionDef) -> list[Mutant]:
    """Every mutant of a function's body, in source order; docstrings, annotations and messages of errors are left."""
    all_mutants: list[Mutant] = []
    for statement in function.body:
        for node in _walk(statement):
            for kind, edit in _of(source, node):
                all_mutants.append(Mutant(kind, source.line(edit.start), edit))
    return sorted(set(all_mutants), key=lambda mutant: (mutant.edit, mutant.kind))


def distinct(
    source: Source, function: ast.FunctionDef | ast.AsyncFunctionDef, numbered: Sequence[tuple[int, Mutant]]
) -> list[tuple[int, Mutant]]:
    """Mutants with their numbers, the first of those that are the same program: `a not in b` is `not (a in b)`."""
    first = source.line_start(source.offset(function.lineno, function.col_offset))
    end = source.span(function)[1]
    by_meaning: dict[str, tuple[int, Mutant]] = {}
    for number, mutant in numbered:
        moved = Edit(mutant.edit.start - first, mutant.edit.end - first, mutant.edit.text)
        text = edits.apply(source.text[first:end], [moved])
        tree = syntax.parse(f"if True:\n{text}" if text[:1].isspace() else text)
        by_meaning.setdefault(ast.dump(_Positive().visit(tree)), (number, mutant))
    return list(by_meaning.values())


class _Positive(ast.NodeTransformer):
    """Write a negated comparison or negation as what it means."""

    INVERSE: ClassVar[dict[type[ast.cmpop], type[ast.cmpop]]] = {
        ast.In: ast.NotIn,
        ast.NotIn: ast.In,
        ast.Is: ast.IsNot,
        ast.IsNot: ast.Is,
        ast.Eq: ast.NotEq,
        ast.NotEq: ast.Eq,
    }

    def visit_UnaryOp(self, node: ast.UnaryOp) -> ast.AST:
        self.generic_visit(node)
        match node:
            case ast.UnaryOp(op=ast.Not(), operand=ast.Compare(ops=[operator]) as inner):
                if type(operator) in self.INVERSE:
                    inner.ops = [self.INVERSE[type(operator)]()]
                    return inner
            case ast.UnaryOp(op=ast.Not(), operand=ast.UnaryOp(op=ast.Not(), operand=operand)):
                return operand
        return node


def _walk(node: ast.AST) -> Iterator[ast.AST]:
    match node:
        case ast.Expr(value=ast.Constant()) | ast.Raise() | ast.Assert():
            return
        case ast.JoinedStr():
            return
    yield node
    for child in ast.iter_child_nodes(node):
        yield from _walk(child)


def _of(source: Source, node: ast.AST) -> Iterator[tuple[str, Edit]]:
    match node:
        case ast.Compare(left=left, ops=[operator], comparators=[right]) if type(operator) in COMPARISONS:
            yield from _swap("comparison", source, left, right, *COMPARISONS[type(operator)])
        case ast.BinOp(left=left, op=operator, right=right) if type(operator) in ARITHMETIC:
            yield from _swap("arithmetic", source, left, right, *ARITHMETIC[type(operator)])
        case ast.BoolOp(op=operator, values=[left, right]):
            words = ("and", "or") if isinstance(operator, ast.And) else ("or", "and")
            yield from _swap("logic", source, left, right, *words)
        case ast.UnaryOp(op=ast.Not()):  # the operand's own place leaves out its parentheses
            start, end = source.span(node)
            yield "negation", Edit(start, end - len(source.text[start + len("not") : end].lstrip()))
        case ast.If(test=test) | ast.While(test=test) | ast.IfExp(test=test):
            if not isinstance(test, ast.UnaryOp | ast.Constant):
                start, end = source.span(test)
                yield "negation", Edit(start, end, f"not ({source.text[start:end]})")
        case ast.Constant(value=bool(value)):
            yield "constant", Edit(*source.span(node), str(not value))
        case ast.Constant(value=int(value)):
            yield "constant", Edit(*source.span(node), str(value + 1))
        case ast.Return(value=value) if value is not None and not isinstance(value, ast.Constant):
            yield "result", Edit(*source.span(value), "None")
        case ast.AugAssign() | ast.Expr(value=ast.Call()):
            yield "statement", Edit(*source.span(node), "pass")
        case ast.Break():
            yield "jump", Edit(*source.span(node), "continue")
        case ast.Continue():
            yield "jump", Edit(*source.span(node), "break")
        case ast.Call(args=[first, second], keywords=[]) if not any(
            isinstance(a, ast.Starred) for a in (first, second)
        ):
            a, b = source.segment(first), source.segment(second)
            span = (source.span(first)[0], source.span(second)[1])
            if a != b and source.text[source.span(first)[1] : source.span(second)[0]].strip() == ",":
                yield "arguments", Edit(*span, f"{b}, {a}")


def _swap(
    kind: str, source: Source, left: ast.expr, right: ast.expr, old: str, new: str
) -> Iterator[tuple[str, Edit]]:
    """The operator between two operands, replaced; it may stand among brackets, comments and line ends."""
    start, end = source.span(left)[1], source.span(right)[0]
    between = re.sub(r"#[^\r\n]*", lambda m: " " * len(m[0]), source.text[start:end])
    word = rf"\b{old}\b" if old.isalpha() else re.escape(old)
    if match := re.search(word, between):
        yield kind, Edit(start + match.start(), start + match.end(), new)
