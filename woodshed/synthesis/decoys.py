"""Decoys of a task: changed copies of its hidden tests, proven to fail with the original code.

A change contradicts the test: where the test asks for a value, the copy asks for another one in the same place; where
it asks for a truth, the copy asks for its opposite; where it asks for an exception, the copy asks for another kind. So
no code passes both, however differently it is written; arguments of the code under test are never changed. Copies that
fail with the original code are kept. Tests that allow none have no decoy (`grading.decoys`).
"""

from __future__ import annotations

import ast
import builtins
import dataclasses
import random
import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence

from woodshed.grading.decoys import (
    TestFunction,
    decoded,
    find,
    inherited,
    path_and_name,
    path_of,
    renamed,
    with_twins,
    without_parameters,
)
from woodshed.grading.results import TestRun
from woodshed.pysource import syntax
from woodshed.records import Decoy

MOST_TESTS = 24
"""Hidden tests of a task for which decoys are sought."""
ROUNDS = 3
"""Sessions with the original code, each of which tries the next candidate of every test that has no decoy yet."""
BUILT_IN = (
    "ValueError",
    "KeyError",
    "TypeError",
    "AttributeError",
    "IndexError",
    "ZeroDivisionError",
    "OSError",
)
UNLIKELY_PARENTS = ("ZeroDivisionError", "NameError", "AssertionError")
"""Exceptions from which an exception of a package's own is hardly derived."""
LITERAL = (
    *(ast.Constant, ast.Tuple, ast.List, ast.Set, ast.Dict, ast.UnaryOp, ast.USub, ast.UAdd, ast.Load),
    *(ast.BinOp, ast.Add, ast.Sub, ast.Mult, ast.Pow),
)
EQUAL_METHODS = frozenset(
    f"assert{kind}" for kind in "Equal Equals ListEqual DictEqual TupleEqual SetEqual".split()
)
CALLED_METHODS = frozenset(
    f"assert_{kind}_with" for kind in "called called_once awaited awaited_once".split()
)
"""Methods of mocks that compare their arguments with those of a call."""
SMALL = 0.01
"""A difference below which two values are equal for a test; other values differ by more (`_other`)."""
OPPOSITE_METHODS = {
    "assertTrue": "assertFalse",
    "assertIn": "assertNotIn",
    "assertIs": "assertIsNot",
    "assertIsNone": "assertIsNotNone",
    "assertIsInstance": "assertNotIsInstance",
}
OPPOSITE_METHODS |= {no: yes for yes, no in OPPOSITE_METHODS.items()}
OPPOSITE = {
    ast.Eq: "!=",
    ast.NotEq: "==",
    ast.In: "not in",
    ast.NotIn: "in",
    ast.Is: "is not",
    ast.IsNot: "is",
}

Change = tuple[int, int, str]
"""Start and end of the replaced text, in characters of the function's text, and the replacement."""


def candidates(text: str, function: TestFunction, rng: random.Random) -> list[Change]:
    """Changes that contradict a test; other values first, they look most like what a test may ask for."""
    spans = _Spans(text, function)
    texts = sorted(
        {n.value for n in ast.walk(function.node) if isinstance(n, ast.Constant) and isinstance(n.value, str)}
    )
    values = [
        (*spans.of(constant), repr(_other(constant.value, texts, rng)))
        for expected in _expected_values(function.node)
        for constant in _constants(expected)
    ]
    kinds: list[Change] = []
    opposites: list[Change] = []
    for node in ast.walk(function.node):
        if isinstance(node, ast.Call) and _name(node.func) in ("raises", "assertRaises") and node.args:
            kinds += [(*spans.of(node.args[0]), name) for name in _other_exceptions(node.args[0])]
        opposites += _opposite(node, spans)
    for changes in (values, kinds, opposites):
        rng.shuffle(changes)
    return values + kinds + opposites


def search(
    sources: Mapping[str, bytes],
    tests: Sequence[str],
    run: Callable[[Mapping[str, bytes], Sequence[str]], TestRun],
    seed: str,
) -> tuple[Decoy, ...]:
    """Decoys of some hidden tests: at most one for each function.

    Args:
        sources: original test files, by path.
        tests: ids of the hidden tests, all of which pass with the original code.
        run: one session with the original code, of these files (the rest as they are) and these tests.
        seed: of the order of candidates.
    """
    by_function: dict[str, list[str]] = {}
    for test in tests:
        if path_of(test) in sources:
            by_function.setdefault(without_parameters(test), []).append(test)
    shared = inherited(sources, by_function)
    by_function = {test: ids for test, ids in by_function.items() if path_and_name(test) not in shared}
    rng = random.Random(seed)
    functions = rng.sample(sorted(by_function), min(MOST_TESTS, len(by_function)))
    waiting = {test: list(_decoys_of(sources[path_of(test)], test, rng)) for test in sorted(functions)}
    proven: dict[str, Decoy] = {}
    for _ in range(ROUNDS):
        trial = {test: decoys.pop(0) for test, decoys in waiting.items() if decoys and test not in proven}
        if not trial:
            break
        proven |= _proven(sources, trial, by_function, run, rng)
    return tuple(proven.values())


def _proven(
    sources: Mapping[str, bytes],
    trial: Mapping[str, Decoy],
    by_function: Mapping[str, Sequence[str]],
    run: Callable[[Mapping[str, bytes], Sequence[str]], TestRun],
    rng: random.Random,
) -> dict[str, Decoy]:
    """Those that fail while the tests that they copy pass."""
    changed: dict[str, bytes] = {}
    names: dict[str, tuple[str, str]] = {}
    for path in sorted({path_of(test) for test in trial}):
        own = {test: decoy for test, decoy in trial.items() if path_of(test) == path}
        changed[path], new = with_twins(sources[path], own, rng)
        names |= new
    originals = {
        renamed(test, original) + i[len(test) :]: i
        for test, (original, _) in names.items()
        for i in by_function[test]
    }
    twins = {
        renamed(test, twin) + parameters: (test, (parameters, contradicts))
        for test, (_, twin) in names.items()
        for parameters, contradicts in _parameters(
            sources[path_of(test)], trial[test], by_function[test]
        ).items()
    }
    outcomes = run(changed, (*originals, *twins)).outcomes
    passed = {i for name, i in originals.items() if outcomes.get(name) == "passed"}
    failing: dict[str, list[tuple[str, str]]] = {}
    for name, (test, parameters) in twins.items():
        if outcomes.get(name) == "failed" and passed.issuperset(by_function[test]):
            failing.setdefault(test, []).append(parameters)
    proven: dict[str, Decoy] = {}
    for test, pairs in failing.items():
        parameters, contradicts = rng.choice(pairs)
        proven[test] = dataclasses.replace(trial[test], parameters=parameters, contradicts=contradicts)
    return proven


def _parameters(source: bytes, decoy: Decoy, tests: Sequence[str]) -> dict[str, str]:
    """Parameters that the copy's ids may end with, the test's own and those with the changed value in them; for each
    the parameters of the test that is contradicted."""
    own = {test[len(decoy.test) :]: test[len(decoy.test) :] for test in tests}
    text, _ = decoded(source)
    function = find(text, decoy.test)
    assert function is not None
    written = text[function.start : function.end][decoy.start : decoy.end]
    try:
        was, now = str(syntax.literal(written)), str(syntax.literal(decoy.text))
    except (ValueError, SyntaxError):
        return own
    places = [(p, match.span()) for p in own for match in re.finditer(re.escape(was), p) if was]
    return {p[:start] + now + p[end:]: p for p, (start, end) in places} | own


def _decoys_of(source: bytes, test: str, rng: random.Random) -> Iterator[Decoy]:
    text, _ = decoded(source)
    function = find(text, test)
    for start, end, replacement in candidates(text, function, rng) if function else ():
        yield Decoy(test, start, end, replacement)


def _expected_values(test: ast.AST) -> Iterator[ast.expr]:
    """Literals that a test compares for equality: written in the comparison, or in a variable or parameter that is used
    for nothing else."""
    compared: list[ast.Name] = []
    for node in ast.walk(test):
        sides: list[ast.expr] = []
        if isinstance(node, ast.Assert) and isinstance(node.test, ast.Compare):
            sides = _compared(node.test)
        elif isinstance(node, ast.Call) and _name(node.func) in EQUAL_METHODS:
            sides = node.args[:2]
        elif isinstance(node, ast.Call) and _name(node.func) == "assertAlmostEqual" and not node.keywords:
            sides = node.args if len(node.args) == 2 else []
        elif isinstance(node, ast.Call) and _name(node.func) in CALLED_METHODS:
            sides = [*node.args, *(keyword.value for keyword in node.keywords)]
        compared += [side for side in sides if isinstance(side, ast.Name)]
        literal = [side for side in sides if _is_literal(side)]
        yield from literal or (_parts_of_object(sides[-1]) if sides else ())
    uses = Counter(n.id for n in ast.walk(test) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Load))
    compared_only = Counter(name.id for name in compared)
    names = {name for name, times in compared_only.items() if times == uses[name]}
    for node in ast.walk(test):
        if isinstance(node, ast.Assign) and _is_literal(node.value):
            if any(isinstance(target, ast.Name) and target.id in names for target in node.targets):
                yield node.value
        elif isinstance(node, ast.Call) and _name(node.func) == "parametrize" and len(node.args) > 1:
            yield from _columns(node.args[0], node.args[1], names)


def _compared(test: ast.Compare) -> list[ast.expr]:
    """The sides of an equality, also of `== approx(x)` and `== call(x)`, and of `abs(a - b) < 1e-6`."""
    sides: list[ast.expr] = []
    if all(isinstance(op, ast.Eq) for op in test.ops):
        for side in (test.left, *test.comparators):
            match side:
                case ast.Call(func, args, []) if _name(func) == "call" or (_name(func), len(args)) == (
                    "approx",
                    1,
                ):
                    sides += args
                case _:
                    sides.append(side)
        return sides
    match test:
        case ast.Compare(
            ast.Call(ast.Name("abs"), [ast.BinOp(left, ast.Sub(), right)]),
            [ast.Lt() | ast.LtE()],
            [ast.Constant(float(most))],
        ) if most <= SMALL:
            return [left, right]
    return []


def _columns(names: ast.expr, rows: ast.expr, compared: set[str]) -> Iterator[ast.expr]:
    """Literals of the parameters that are compared."""
    try:
        given = ast.literal_eval(names)
    except ValueError:
        return
    columns = [name.strip() for name in (given.split(",") if isinstance(given, str) else given)]
    for row in rows.elts if isinstance(rows, ast.List | ast.Tuple) else ():
        if isinstance(row, ast.Call) and _name(row.func) == "param":
            cells = row.args
        else:
            cells = row.elts if len(columns) > 1 and isinstance(row, ast.Tuple | ast.List) else [row]
        for name, cell in zip(columns, cells, strict=False):
            if name in compared and _is_literal(cell):
                yield cell


def _other_exceptions(written: ast.expr) -> list[str]:
    """Exceptions none of which is of the written type, or the other way round."""
    name = _name(written)
    known = getattr(builtins, name, None)
    if not name:
        return []  # a tuple, or an expression
    if known is None:
        return list(UNLIKELY_PARENTS)
    others = [(other, getattr(builtins, other)) for other in BUILT_IN]
    return [other for other, kind in others if not issubclass(kind, known) and not issubclass(known, kind)]


def _is_literal(node: ast.expr) -> bool:
    return all(isinstance(inner, LITERAL) for inner in ast.walk(node))


def _parts_of_object(side: ast.expr) -> Iterator[ast.expr]:
    """Literals of which a test makes the object that it expects: `assert parse("1.2") == Version(1, 2)`."""
    if isinstance(side, ast.Call) and _name(side.func)[:1].isupper():
        for part in (*side.args, *(keyword.value for keyword in side.keywords)):
            yield from [part] if _is_literal(part) else _parts_of_object(part)


def _constants(literal: ast.expr) -> list[ast.Constant]:
    """Constants that can be changed so that the literal is another value; the ones of sums and products may cancel."""
    if any(isinstance(node, ast.BinOp) for node in ast.walk(literal)):
        return []
    return [
        n for n in ast.walk(literal) if isinstance(n, ast.Constant) and not isinstance(n.value, type(...))
    ]


def _other(value: object, texts: Sequence[str], rng: random.Random) -> object:
    """A value that might have been expected in its place; no number is below 0, where the minus is an operator."""
    if isinstance(value, bool):
        return not value
    if isinstance(value, int):
        return rng.choice([other for other in range(abs(value) - 3, abs(value) + 4) if 0 <= other != value])
    if isinstance(value, float):
        return rng.choice([value + step for step in (-2.0, -1.0, -0.5, 0.5, 1.0, 2.0) if value + step >= 0])
    if isinstance(value, complex):
        return value + rng.choice([-1.0, 1.0])
    if isinstance(value, bytes):
        return value[::-1] if value != value[::-1] else value + b"a"
    if isinstance(value, str):
        near = [text for text in texts if text != value and abs(len(text) - len(value)) < 4]
        return rng.choice(near) if near and rng.random() < 0.5 else _similar(value, rng)
    return 0


def _similar(text: str, rng: random.Random) -> str:
    """A text that reads as well: another case, separator or digit, or a word or last letter more or less. Misspelt ones
    are told from right ones by whoever reads them."""
    words = text.split(" ")
    found = [
        text.swapcase(),
        text.capitalize(),
        text[:-1] if text[-1:] == "s" else f"{text}s",
        *(text.replace(mark, other) for mark in " -_" if mark in text for other in " -_"),
        *(" ".join(words[:place] + words[place + 1 :]) for place in range(len(words)) if len(words) > 1),
        *(f"{text[:i]}{(int(c) + 1) % 10}{text[i + 1 :]}" for i, c in enumerate(text) if c in "0123456789"),
        *(
            f"{text[:i]}{c.swapcase()}{text[i + 1 :]}"
            for i, c in enumerate(text)
            if text[:i][-1:] in ("", " ")
        ),
    ]
    return rng.choice(sorted({other for other in found if other != text}) or [f"{text}s"])


def _opposite(node: ast.AST, spans: _Spans) -> list[Change]:
    """The assertion turned into its opposite."""
    if isinstance(node, ast.Call) and (other := OPPOSITE_METHODS.get(_name(node.func))):
        end = spans.of(node.func)[1]
        return [(end - len(_name(node.func)), end, other)]
    if not isinstance(node, ast.Assert):
        return []
    test = node.test
    start, end = spans.of(test)
    if isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not):
        return [(start, spans.of(test.operand)[0], "")]
    if isinstance(test, ast.Compare) and len(test.ops) == 1 and type(test.ops[0]) in OPPOSITE:
        first, last = spans.of(test.left)[1], spans.of(test.comparators[0])[0]
        if not set(spans.text[first:last]) & set("()#\\\n"):
            return [(first, last, f" {OPPOSITE[type(test.ops[0])]} ")]
    return [(start, end, f"not ({spans.text[start:end]})")]


class _Spans:
    """Positions of nodes in a function's text, in characters; `ast` counts bytes of UTF-8."""

    def __init__(self, text: str, function: TestFunction):
        self.text = text[function.start : function.end]
        self.lines = self.text.split("\n")
        self.first = text.count("\n", 0, function.start) + 1
        self.starts = [0]
        for line in self.lines:
            self.starts.append(self.starts[-1] + len(line) + 1)

    def of(self, node: ast.expr) -> tuple[int, int]:
        assert node.end_lineno is not None and node.end_col_offset is not None
        return self._at(node.lineno, node.col_offset), self._at(node.end_lineno, node.end_col_offset)

    def _at(self, line: int, column: int) -> int:
        number = line - self.first
        return self.starts[number] + len(self.lines[number].encode()[:column].decode())


def _name(function: ast.expr) -> str:
    return function.attr if isinstance(function, ast.Attribute) else getattr(function, "id", "")
