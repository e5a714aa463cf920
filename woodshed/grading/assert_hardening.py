"""Comparisons in tests, doubted: an object that says it is equal must be able to say that it is not.

`class Equal: __eq__ = lambda self, other: True` passes every `assert f(x) == expected`. So beside each comparison that
a test makes, its objects are asked to compare with D = `DOUBTS` values that look like the expected one
(`assert_hardening_values`). What is equal to one of those as well fails the test. Values of built-in types, whose
comparison is not Python code, are not doubted: for nearly every comparison nothing is done. Neither are objects that
say of themselves what they are, by str(), float(), as items, before they are shown the other side.

An object may count its comparisons and say yes at the right moment. So the real one and each changed one are asked
R = `REPEATS` times, in an order drawn for every comparison, with the test's own among them; an answer that differs
between two repeats fails the test. A fixed series of answers then passes with a chance of at most

    1 / C((D + 1) R, R) = 1 / C(64, 2) = 1 / 2016

since its R yeses must lie where the real ones do. An object that remembers what it was compared with still has to pick
one of D + 1 values: 1 / 32. What may use its operands up (`in` on an iterator) and orders are asked once: 1 / 32.

Standard library only; one file, and its values. The runner imports it before any code of the repository and hooks it
into pytest's own rewriting of asserts. Objects that live in another process have rules of their own
(`process_isolation.commitments`). Run as a program it compiles test files as that session would (`compiled`).
"""

from __future__ import annotations

import ast
import base64
import builtins
import contextlib
import functools
import importlib
import importlib.util
import json
import linecache
import marshal
import operator
import os
import random
import sys
import types
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

values: Any = None if __name__ == "__main__" else importlib.import_module(f"{__name__}_values")
"""Lies beside this file, also under the names that are drawn for a session. To compile files takes none of it."""
NAME, SIDE = "__woodshed_assert_hardening__", "@_woodshed_side__"  # `install` draws others of the same length
DOUBTS, REPEATS = 31, 2
DRAW = random.SystemRandom()
"""Not `random` itself, whose series belongs to the tests and can be foretold by the code under test."""
OPERATORS: dict[str, Callable[[object, object], object]] = {
    "==": operator.eq,
    "!=": operator.ne,
    "<": operator.lt,
    "<=": operator.le,
    ">": operator.gt,
    ">=": operator.ge,
    "in": lambda item, items: item in items,  # type: ignore[operator]
    "not in": lambda item, items: item not in items,  # type: ignore[operator]
}
OPPOSITE = {"!=": "==", "<": ">=", "<=": ">", ">": "<=", ">=": "<", "not in": "in"}
NODES = (ast.Eq, ast.NotEq, ast.Lt, ast.LtE, ast.Gt, ast.GtE, ast.In, ast.NotIn)
SPELLED: dict[type[ast.cmpop], str] = dict(zip(NODES, OPERATORS, strict=True))
METHODS = {
    **{"assertNotEqual": "!=", "assertIn": "in", "assertNotIn": "not in"},
    **{"assertLess": "<", "assertLessEqual": "<=", "assertGreater": ">", "assertGreaterEqual": ">="},
    **dict.fromkeys(("assertEqual", "assertEquals", "assertAlmostEqual", "assert_equal", "eq_"), "=="),
    **dict.fromkeys(
        (f"assert{k}Equal" for k in "List Tuple Set Dict Sequence Count MultiLine".split()), "=="
    ),
}
"""Functions of tests that compare their first two arguments."""
LOOSE = frozenset(("assertAlmostEqual", "assert_equal", "assertSequenceEqual", "assertCountEqual"))
"""Those that also hold for some values that are not equal."""
FORWARDING = (weakref.ProxyType, weakref.CallableProxyType, types.MappingProxyType)
"""Compiled types that ask what they stand for."""
COMPARING = frozenset(f"__{name}__" for name in "eq ne lt le gt ge contains class".split())

Parted = tuple[list[object], list[object]]  # some parts of the left and of the right side of a comparison
Ready = dict[str, tuple[types.CodeType, frozenset[str]]]  # test file to its code and every name in it
workspace = "/workspace"
patched: dict[str, frozenset[int]] = {}
"""File to the numbers of the lines that a patch brought."""
own_names = [NAME, SIDE]
says_what_it_is: Callable[[type], bool] = lambda kind: False  # noqa: E731
"""True for a type whose instances are compared by what they said before (`process_isolation.commitments`)."""
mentioned: dict[str, frozenset[str]] = {}
"""Test file to every name in it: an object like mock.ANY may be equal to everything where the test asks for it."""


# -- what is asked of values


class Doubts:
    """Questions around one comparison of a test, and their answers."""

    def __init__(self, spelled: str, left: object, right: object, odd: Parted, even: Parted):
        self.kinds = f"{type(left).__name__} and {type(right).__name__}"
        self.real = functools.partial(OPERATORS[spelled], left, right)
        others = _likely(spelled, odd, even)
        self.changed = [_impossible(spelled, left, right, odd, others) for _ in range(DOUBTS)]
        self.early, self.late = order(REPEATS if _is_repeatable(spelled, right) else 1)
        self.answers: set[bool] = set()
        """To the repeats of the real comparison."""
        self.caught: set[bool] = set()
        """Answers to the real comparison that its objects must not give, after what they said to a changed one."""

    def ask(self, numbers: list[int]) -> None:
        """Ask comparisons by number: 0 is the real one."""
        for number in numbers:
            if number:
                self.caught.update(held for held, ask in self.changed[number - 1].items() if says_yes(ask))
            else:
                self.answers.add(says_yes(self.real))


def order(repeats: int) -> tuple[list[int], list[int]]:
    """Numbers of the comparisons to ask before and after the test's own, which is one of the real ones (0)."""
    asked = [number for number in range(DOUBTS + 1) for _ in range(repeats)]
    DRAW.shuffle(asked)
    own = DRAW.choice([position for position, number in enumerate(asked) if number == 0])
    return asked[:own], asked[own + 1 :]


def before(spelled: str, left: object, right: object, file: str) -> Doubts | None:
    """Doubt a comparison that is about to be made, some times; `after` does the rest. None: nothing to doubt.

    What it says is not known yet, so nothing is raised here: `not (a != b)` is how some tests ask for equality.
    """
    if is_plain(left) and is_plain(right):
        return None
    odd, even = _parted(left, right, file)
    if not any(odd) or _is_given_away(spelled, left, right, odd):
        return None
    doubts = Doubts(spelled, left, right, odd, even)
    doubts.ask(doubts.early)
    return doubts


def after(doubts: Doubts | None, held: bool = True, loose: bool = False) -> None:
    """Ask what `before` left, once the comparison has been made.

    Args:
        held: what it said.
        loose: whether it may hold where the operator says no.

    Raises:
        AssertionError: the objects say the same of what cannot be, or not always the same of the same.
    """
    if doubts is None:
        return
    doubts.ask(doubts.late)
    comparison = f"woodshed: this comparison of {doubts.kinds}"
    if held in doubts.caught:
        raise AssertionError(f"{comparison} would hold for other values as well")
    if len(doubts.answers if loose else doubts.answers | {held}) > 1:
        raise AssertionError(f"{comparison} says yes and no to the same values")


def compared(spelled: str, left: object, right: object, file: str) -> object:
    """The comparison itself, with its doubts: for places where statements cannot stand."""
    doubts = before(spelled, left, right, file)
    result = OPERATORS[spelled](left, right)
    if doubts:
        after(doubts, says_yes(lambda: result))
    return result


def chained(first: object, rest: list[tuple[str, Callable[[], object]]], file: str) -> object:
    """a < b < c: each operand is evaluated once, and none after the first no."""
    result: object = True
    for spelled, evaluate in rest:
        following = evaluate()
        if not (result := compared(spelled, first, following, file)):
            return result
        first = following
    return result


def _is_repeatable(spelled: str, right: object) -> bool:
    return spelled in ("==", "!=") or (
        "in" in spelled and any(type(right) is kind for kind in values.CONTAINERS)
    )


def _is_given_away(spelled: str, left: object, right: object, odd: Parted) -> bool:
    """True if an object that is compared with a built-in value says of itself that it is that."""
    for subject, other, strange_ones, plain_side in (
        (left, right, odd[0], odd[1]),
        (right, left, odd[1], odd[0]),
    ):
        if spelled in ("==", "!=") and not plain_side and any(value is subject for value in strange_ones):
            return values.gives_away(subject, other)
    return False


def _likely(spelled: str, odd: Parted, even: Parted) -> Parted:
    """For each side the values that its objects are asked about, since they might be on the other side."""
    found: Parted = [], []
    for place in (0, 1):
        if odd[place]:
            parts = (
                even[1 - place] if even[place] else even[1 - place][:1]
            )  # else the object is the whole side
            found[place].extend(values.likely(parts, DOUBTS))
    return found


def _impossible(
    spelled: str, left: object, right: object, odd: Parted, others: Parted
) -> dict[bool, Callable[[], object]]:
    """For a yes and for a no to a comparison, another one that honest objects who said so deny.

    A no claims something where it says that two values do not differ; any other no claims nothing.

    Args:
        others: as `_likely` has them; each is used up in its turn.
    """
    is_used_up = hasattr(type(right), "__next__") and not any(value is right for value in odd[1])
    if spelled in ("==", "!="):
        place = DRAW.choice([n for n in (0, 1) if odd[n]])
        value = DRAW.choice(odd[place])
        other = others[place].pop() if others[place] else values.stranger()
        if spelled == "==":
            return {True: lambda: value == other}
        return {True: lambda: left == right, False: lambda: not OPERATORS["!="](value, other)}
    if spelled in OPPOSITE:
        return {} if is_used_up else {True: lambda: OPERATORS[OPPOSITE[spelled]](left, right)}
    if any(value is left for value in odd[0]):
        item = others[0].pop() if others[0] else values.stranger()
        return {True: lambda: left in [item]}
    other = values.stranger()
    return {} if is_used_up else {True: lambda: other in right}  # type: ignore[operator]


def _parted(left: object, right: object, file: str) -> tuple[Parted, Parted]:
    """The parts of both sides that are strange, and the others."""
    odd: Parted = [], []
    even: Parted = [], []
    for place, side in enumerate((left, right)):
        for value in values.parts(side):
            (odd if strange(value, file) else even)[place].append(value)
    return odd, even


def says_yes(ask: Callable[[], object]) -> bool:
    """True if a comparison holds; one that cannot be made does not."""
    with contextlib.suppress(Exception):
        return bool(ask())
    return False


def is_plain(value: object) -> bool:
    """True for a value of a built-in type that holds nothing: the fast way out of comparisons in long loops."""
    # By identity: `in` would ask the type's own type, which a patch may have made equal to everything.
    kind = type(value)
    return (
        kind is int or kind is str or kind is float or kind is bool or kind is bytes or kind is types.NoneType
    )


def strange(value: object, file: str) -> bool:
    """True if comparing it runs code that the patch brought, made up, or took from the standard library (mock.ANY).

    Types of installed packages are what the repository's own tests compare with, some by odd rules of their own.
    """
    if is_plain(value) or says_what_it_is(type(value)):
        return False
    if any(type(value) is kind for kind in FORWARDING):
        return True
    for owner in type.__dict__["__mro__"].__get__(type(value)):
        if owner is not object:
            for name, method in type.__dict__["__dict__"].__get__(owner).items():
                if name in COMPARING and _is_strange(method, owner, file):
                    return True
    return False


def _is_strange(method: object, owner: type, file: str) -> bool:
    if method is None or isinstance(method, types.WrapperDescriptorType | types.MethodDescriptorType):
        return False  # compiled code: of Python itself or of an installed package
    module = sys.modules.get(getattr(owner, "__module__", ""))
    code = getattr(getattr(method, "__func__", method), "__code__", None)
    place = code.co_filename if isinstance(code, types.CodeType) else getattr(module, "__file__", None) or ""
    if place in patched:
        return code is None or any(line in patched[place] for *_, line in code.co_lines())
    if place.startswith((sys.prefix, sys.base_prefix)):
        if vars(module).get(owner.__name__) is not owner:
            return True  # only says that it is installed
        return "/site-packages/" not in place and not _asked_for(owner, file)
    return not place.startswith(workspace + "/")


def _asked_for(kind: type, file: str) -> bool:
    """True if an installed type is named, or begins with a name, in the test's file: ANY, approx, Decimal."""
    return (
        kind.__name__.strip("_")
        .lower()
        .startswith(
            tuple(n.lower() for n in mentioned.get(file, ()) if len(n) > 2)  # a variable `a` is not ANY
        )
    )


# -- where it is asked


class Rewriter(ast.NodeTransformer):
    """Puts the doubts into the source of a test file.

    `assert a == b` becomes four statements around an assert that reads as before, so that failures do too; any other
    comparison becomes a call.
    """

    def __init__(self, file: str):
        self.file = file
        self.count = 0

    def visit_Assert(self, node: ast.Assert) -> ast.AST | list[ast.stmt]:
        test = node.test
        if isinstance(test, ast.Compare) and len(test.ops) == 1 and type(test.ops[0]) in SPELLED:
            left, right = self._name(), self._name()
            sides = [self.visit(test.left), self.visit(test.comparators[0])]
            node.test = ast.Compare(_load(left), test.ops, [_load(right)])
            return self._around(node, SPELLED[type(test.ops[0])], {left: sides[0], right: sides[1]})
        return self.generic_visit(node)

    def visit_Expr(self, node: ast.Expr) -> ast.AST | list[ast.stmt]:
        call = node.value
        name = call.func if isinstance(call, ast.Call) else None
        called = str(getattr(name, "attr", getattr(name, "id", "")))
        sides = call.args[:2] if isinstance(call, ast.Call) and called in METHODS else []
        if not isinstance(call, ast.Call) or len(sides) < 2 or any(isinstance(s, ast.Starred) for s in sides):
            return self.generic_visit(node)
        left, right = self._name(), self._name()
        sides = [self.visit(side) for side in sides]
        call.args[:2] = [_load(left), _load(right)]
        return self._around(node, METHODS[called], {left: sides[0], right: sides[1]}, called in LOOSE)

    def visit_Compare(self, node: ast.Compare) -> ast.AST:
        self.generic_visit(node)
        if not all(type(spelled) in SPELLED for spelled in node.ops):
            return node
        words = [ast.Constant(SPELLED[type(spelled)]) for spelled in node.ops]
        if len(words) == 1:
            return self._call("compared", words[0], node.left, node.comparators[0], ast.Constant(self.file))
        bare = ast.arguments([], [], None, [], [], None, [])
        pairs: list[ast.expr] = [
            ast.Tuple([word, ast.Lambda(bare, side)], ast.Load())
            for word, side in zip(words, node.comparators, strict=True)
        ]
        return self._call("chained", node.left, ast.List(pairs, ast.Load()), ast.Constant(self.file))

    def visit_ClassDef(self, node: ast.ClassDef) -> ast.AST:
        """Comparisons right in a class body cannot be chained through lambdas; methods can."""
        node.body = [self.visit(s) if isinstance(s, ast.FunctionDef | ast.ClassDef) else s for s in node.body]
        return node

    def _around(
        self, node: ast.stmt, spelled: str, sides: dict[str, ast.expr], loose: bool = False
    ) -> list[ast.stmt]:
        doubts = self._name()
        given = [ast.Constant(spelled), *map(_load, sides), ast.Constant(self.file)]
        answered = [_load(doubts), ast.Constant(True), ast.Constant(loose)]
        lines: list[ast.stmt] = [ast.Assign([ast.Name(n, ast.Store())], side) for n, side in sides.items()]
        lines.append(ast.Assign([ast.Name(doubts, ast.Store())], self._call("before", *given)))
        lines += [node, ast.Expr(self._call("after", *answered))]
        return [ast.copy_location(line, node) for line in lines]

    def _call(self, function: str, *arguments: ast.expr) -> ast.Call:
        return ast.Call(ast.Attribute(_load(own_names[0]), function, ast.Load()), list(arguments), [])

    def _name(self) -> str:
        self.count += 1
        return f"{own_names[1]}{self.count}"


def _load(name: str) -> ast.Name:
    return ast.Name(name, ast.Load())


def _mentioned(tree: ast.AST) -> frozenset[str]:
    names: set[str] = set()
    for node in ast.walk(tree):
        match node:
            case ast.Name(id=name) | ast.Attribute(attr=name):
                names.add(name)
            case ast.ImportFrom(names=aliases):
                names.update(alias.name.split(".")[-1] for alias in aliases)
    return frozenset(names - set(dir(builtins)))


def install(
    place: str,
    lines: dict[str, list[int]],
    sources: dict[str, str],
    compiled: dict[str, tuple[str, list[str]]],
) -> None:
    """From here on pytest rewrites comparisons in test files and conftests of the workspace.

    Args:
        place: the workspace.
        lines: for each file of a patch, relative to it, the numbers of the lines that the patch brought.
        sources: bytes, as Latin-1, of test files that are empty on disk, so that no code can read its answers there.
        compiled: what `main` made of test files: they are not read again.
    """
    import _pytest.assertion.rewrite as rewriting

    if __name__ != "__main__":  # what is compiled for others has the plain names
        own_names[:] = [f"{old[:2]}{DRAW.getrandbits(128):032x}"[: len(old) - 2] + "__" for old in own_names]
    held = {f"{place}/{path}": text.encode("latin-1") for path, text in sources.items()}
    ready: Ready = {}
    for path, (encoded, names) in compiled.items():  # now: the code under test may change what decodes
        text = base64.b64decode(encoded).replace(NAME.encode(), own_names[0].encode())
        code = marshal.loads(text.replace(SIDE.encode(), own_names[1].encode()))
        if code.co_filename == f"{place}/{path}":  # else it was made for a workspace of another name
            ready[f"{place}/{path}"] = code, frozenset(names)

    global workspace
    workspace = place
    patched.update({f"{place}/{path}": frozenset(numbers) for path, numbers in lines.items()})
    setattr(builtins, own_names[0], sys.modules[__name__])
    _hook_rewriting(rewriting, held)
    _hook_files(rewriting, held, ready)


def _hook_rewriting(rewriting: Any, held: dict[str, bytes]) -> None:
    """Let pytest's rewriting of asserts begin with ours, on the true source of the files that are held."""
    rewrite = rewriting.rewrite_asserts

    def rewrite_asserts(tree: ast.Module, source: bytes, module_path: str | None = None, *rest: Any) -> None:
        if module_path in held:
            source = held[module_path]
            tree.body[:] = ast.parse(source, module_path).body
            _show(module_path, source)
        if module_path and module_path.startswith(workspace + "/"):
            mentioned[module_path] = _mentioned(tree)
            ast.fix_missing_locations(Rewriter(module_path).visit(tree))
        rewrite(tree, source, module_path, *rest)

    rewriting.rewrite_asserts = rewrite_asserts


def _hook_files(rewriting: Any, held: dict[str, bytes], ready: Ready) -> None:
    """Let pytest take the code of compiled files as it is, and no bytecode from the disk where the disk has no say."""
    rewrite, read = rewriting._rewrite_test, rewriting._read_pyc

    def rewrite_test(file: Path, config: Any) -> tuple[Any, types.CodeType]:
        path = str(file)
        if path not in ready:
            return rewrite(file, config)
        code, mentioned[path] = ready[path]
        if path in held:
            _show(path, held[path])
        return None, code  # the first is for bytecode

    def read_pyc(file: Path, *rest: Any) -> types.CodeType | None:
        """None for files that the disk has no say in: bytecode beside them can only be planted."""
        return None if str(file) in ready or str(file) in held else read(file, *rest)

    def write_pyc(*rest: Any) -> bool:
        """Write none: code under test could read there what a test expects."""
        return False

    rewriting._rewrite_test, rewriting._read_pyc, rewriting._write_pyc = rewrite_test, read_pyc, write_pyc


def _show(path: str, source: bytes) -> None:
    """Let tracebacks quote a file that is empty on disk."""
    text = importlib.util.decode_source(source)
    linecache.cache[path] = (len(text), None, [f"{line}\n" for line in text.split("\n")], path)


def main() -> None:
    """Compile the files of a request, path to bytes in base64, as a session in the workspace argv[1] would; answer on
    descriptor 3 with code and mentioned names of each that compiles. A project's `enable_assertion_pass_hook` is not
    known here, and what compiling warns of is heard by nobody."""
    import _pytest.assertion.rewrite as rewriting

    place, found = sys.argv[1], {}
    install(place, {}, {}, {})
    for path, content in json.load(sys.stdin).items():
        file, source = f"{place}/{path}", base64.b64decode(content)
        try:
            tree = ast.parse(source, file)
            rewriting.rewrite_asserts(tree, source, file, None)
            code = marshal.dumps(compile(tree, file, "exec", dont_inherit=True))
        except (SyntaxError, ValueError, RecursionError, MemoryError):
            continue
        found[path] = [base64.b64encode(code).decode(), sorted(mentioned[file])]
    with os.fdopen(3, "w", encoding="utf-8") as out:
        json.dump(found, out)


if __name__ == "__main__":
    main()
