"""Fingerprints of code: runs of tokens, shapes of syntax trees, names in bytecode.

Standard library only: the same file runs on the host, where evidence is made, and inside the sandbox that is searched.
"""

from __future__ import annotations

import ast
import builtins
import hashlib
import io
import keyword
import re
import tokenize
import types
from collections import Counter
from collections.abc import Iterator, Sequence, Set
from dataclasses import dataclass, field

from woodshed.pysource import syntax

WORD = re.compile(r"(\w+|([^\w\s()\[\]{}])\2{3,}|[^\w\s])")
"""A word, a ruler (of a table, under a heading), or one sign."""
GRAM, DENSE = 5, 0.85
COMMON = frozenset((*dir(builtins), *keyword.kwlist)) | {
    "self",
    "cls",
    "args",
    "kwargs",
    "key",
    "name",
    "value",
    "items",
    "append",
}
Function = ast.FunctionDef | ast.AsyncFunctionDef
BLOCKS = ("body", "handlers", "orelse", "finalbody", "cases")
"""Fields of statements that hold statements, in the order of the source."""


@dataclass(frozen=True)
class Body:
    """Code that a task asks for, as the ways in which it can be recognised."""

    task: str
    """The task's name."""
    name: str
    """Of the function; "" for a fragment of another file."""
    kind: str
    """"gold", or "test" for a hidden test."""
    tokens: tuple[str, ...]
    """Of what the agent does not see: the whole body, or the part of it that is missing."""
    parameters: tuple[str, ...] = ()
    shape: str = ""
    """Fingerprint of the body's syntax tree without names and constants; "" where it is too small to mean anything."""
    outline: tuple[str, ...] = ()
    """Kinds of the body's statements, not of what is inside: equal where shapes are."""
    marks: frozenset[str] = frozenset()
    """Names that survive a renaming of local variables (attributes, functions that are called), and constants."""
    names: frozenset[str] = frozenset()
    """Every identifier and string constant of the body that is not common to all Python."""
    source: str = ""
    """The function, for its bytecode; "" where only a part is missing."""
    called: str = ""
    """Name before its parameters in a call: its own, or that of its class for `__init__`."""
    place: tuple[str, str] = ("", "")
    """Path and dotted name, where a whole function is missing."""
    stated: bool = False
    """True if the instruction states the signature."""
    words: tuple[str, ...] = field(default=(), compare=False)
    """The longest names, rarest first: a file that holds few of them cannot hold the body."""


def words(text: str) -> list[str]:
    """Tokens of any text; quotes count as equal."""
    return [word for word, _ in WORD.findall(text.replace("'", '"'))]


def code_words(source: str) -> list[str]:
    """Tokens of Python code without its comments."""
    tokens: list[str] = []
    try:
        for token in tokenize.generate_tokens(io.StringIO(syntax.plain(source)).readline):
            if token.type not in (tokenize.COMMENT, tokenize.NL):
                tokens += words(token.string)
    except (tokenize.TokenError, IndentationError, SyntaxError):
        return words(source)
    return tokens


def functions(tree: ast.AST, scope: str = "") -> Iterator[tuple[str, Function]]:
    """Every function with its dotted name."""
    for field_name in BLOCKS:
        for node in getattr(tree, field_name, ()):
            if isinstance(node, Function):
                yield scope + node.name, node
            inner = isinstance(node, Function | ast.ClassDef)
            yield from functions(node, f"{scope}{node.name}." if inner else scope)


def code_body(function: Function) -> list[ast.stmt]:
    """Statements without the docstring."""
    return function.body[ast.get_docstring(function, clean=False) is not None :]


def outline(body: Sequence[ast.stmt]) -> tuple[str, ...]:
    """Kinds of the statements, not of what is inside."""
    return tuple(type(statement).__name__ for statement in body)


def shape(body: Sequence[ast.stmt]) -> tuple[str, int]:
    """Fingerprint of statements without names and constants, and how many nodes they have."""
    kinds = [type(node).__name__ for statement in body for node in _ordered(statement)]
    return hashlib.sha256(" ".join(kinds).encode()).hexdigest()[:16], len(kinds)


def marks(body: Sequence[ast.stmt]) -> frozenset[str]:
    """Features of code that survive a renaming of local variables."""
    features: set[str] = set()
    for node in (node for statement in body for node in ast.walk(statement)):
        if isinstance(node, ast.Attribute):
            features.add(node.attr)
        elif isinstance(node, ast.Constant) and node.value is not None:
            features.add(repr(node.value))
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
            features.add(node.func.id)
    return frozenset(features)


def names(body: Sequence[ast.stmt]) -> frozenset[str]:
    """Identifiers and string constants, without those that are everywhere."""
    identifiers: set[str] = set()
    for node in (node for statement in body for node in ast.walk(statement)):
        for attribute in ("id", "attr", "arg", "name"):
            if isinstance(value := getattr(node, attribute, None), str):
                identifiers.add(value)
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and len(node.value) > 2:
            identifiers.add(node.value)
    return frozenset(name for name in identifiers if len(name) > 2 and name not in COMMON)


def parameters(function: Function) -> tuple[str, ...]:
    """Names of the parameters, without self and cls."""
    arguments = function.args
    listed = [*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs]
    listed += [a for a in (arguments.vararg, arguments.kwarg) if a]
    return tuple(a.arg for a in listed if a.arg not in ("self", "cls"))


def bytecode(code: types.CodeType) -> frozenset[str]:
    """Names and constants of a function's code, inner functions included."""
    values = {*code.co_names, *code.co_varnames, *code.co_freevars, *code.co_cellvars}
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            values |= bytecode(constant)
        elif isinstance(constant, str | int | float | bytes) and constant not in (None, True, False):
            values.add(repr(constant))
    return frozenset(values)


def code_objects(code: types.CodeType) -> Iterator[types.CodeType]:
    """A code object and all inside of it."""
    yield code
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from code_objects(constant)


def similarity(a: frozenset[str], b: frozenset[str]) -> float:
    """Jaccard index; two empty sets have nothing in common."""
    return len(a & b) / len(a | b) if a | b else 0.0


class Runs:
    """Finds long runs of known token sequences in a text.

    Five tokens at a time are looked up; what follows each other in both is a run. A body is there when most of it
    stands in one run, or when nearly all of its five-token pieces stand close together.
    """

    def __init__(self, bodies: Sequence[Body]) -> None:
        self.bodies = bodies
        self._same: dict[tuple[str, tuple[str, ...]], list[int]] = {}
        for number, body in enumerate(bodies):
            self._same.setdefault((body.name, body.tokens), []).append(number)
        self._index: dict[tuple[str, ...], list[tuple[int, int]]] = {}
        for first, *_ in self._same.values():
            for index, gram in enumerate(grams(bodies[first].tokens)):
                self._index.setdefault(gram, []).append((first, index))

    def find(self, tokens: Sequence[str]) -> dict[int, int]:
        """Number of each body that is in the tokens, to the position where."""
        longest: dict[tuple[int, int], int] = {}  # (body, its position of the next gram) -> grams so far
        positions: dict[int, list[tuple[int, int]]] = {}
        starts: dict[int, int] = {}
        for position, gram in enumerate(grams(tokens)):
            matches = self._index.get(gram)
            if matches is None:
                longest = {}
                continue
            runs = {(n, index + 1): longest.get((n, index), 0) + 1 for n, index in matches}
            for number, index in matches:
                body = self.bodies[number]
                run = runs[number, index + 1] + GRAM - 1
                if number not in starts and run >= _enough(len(body.tokens)):
                    begin = position - run + GRAM
                    if len(body.tokens) >= 12 or body.name in tokens[max(0, begin - 60) : begin]:
                        starts[number] = begin
                positions.setdefault(number, []).append((position, index))
            longest = runs
        for number, matched in positions.items():
            if (
                number not in starts
                and (start := _dense(matched, len(self.bodies[number].tokens))) is not None
            ):
                starts[number] = start
        same = {number: self._same[self.bodies[number].name, self.bodies[number].tokens] for number in starts}
        return {twin: index for number, index in starts.items() for twin in same[number]}


def told(tokens: Sequence[str]) -> tuple[bytes, ...]:
    """Tokens that are words, as bytes; empty in place of signs, which nearly every text has, and of other letters."""
    return tuple(token.encode() if re.fullmatch(r"(?a:\w+)", token) else b"" for token in tokens)


def spelled(features: Set[str]) -> frozenset[bytes]:
    """Marks that are names, as bytes; a constant can be written in more than one way."""
    names_only = features - {"Ellipsis", "inf", "infj"}
    return frozenset(name.encode() for name in names_only if name.isascii() and name.isidentifier())


def may_stand(body: Sequence[bytes], present: Set[bytes]) -> bool:
    """True if `Runs` may find a body (`told`) in a text of these words: every word is there of most of the body in one
    run, or of nearly all of its five-token pieces."""
    run = longest = pieces = 0
    for word in body:
        run = run + 1 if not word or word in present else 0
        longest = max(longest, run)
        pieces += run >= GRAM
    num_grams = len(body) - GRAM + 1
    return bool(body) and (longest >= _enough(len(body)) or pieces >= DENSE * num_grams)


def grams(tokens: Sequence[str]) -> Iterator[tuple[str, ...]]:
    return zip(*(tokens[shift:] for shift in range(GRAM)), strict=False)


def _enough(length: int) -> int:
    """Length of a run that gives away a body of `length` tokens: all of a tiny one, most of a longer one."""
    return length if length < 16 else max(16, round(0.6 * length))


def _dense(matches: Sequence[tuple[int, int]], length: int) -> int | None:
    """Start of the first span of three body lengths that holds 85% of the body's n-grams; None if there is none.

    Args:
        matches: position in the searched text and index in the body of every n-gram that both have.
        length: of the body, in tokens.
    """
    num_grams = length - GRAM + 1
    if length < 24 or len(matches) < DENSE * num_grams:
        return None
    inside: Counter[int] = Counter()
    first = 0
    for position, index in matches:
        inside[index] += 1
        while matches[first][0] <= position - 3 * length:
            leaving = matches[first][1]
            inside[leaving] -= 1
            if not inside[leaving]:
                del inside[leaving]
            first += 1
        if len(inside) >= DENSE * num_grams:
            return matches[first][0]
    return None


def _ordered(node: ast.AST) -> Iterator[ast.AST]:
    """Nodes in source order; contexts (load, store) tell nothing."""
    waiting = [node]  # no recursion: a tree may be deeper than that goes
    while waiting:
        node = waiting.pop()
        if not isinstance(node, ast.expr_context):
            yield node
            waiting += reversed(list(ast.iter_child_nodes(node)))
