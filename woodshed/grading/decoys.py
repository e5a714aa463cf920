"""Decoys: twins of hidden tests, each with one expectation changed, that must fail.

A graded session runs the hidden tests and some decoys side by side, all under random names, in random order. Code that
turns outcomes into "passed", whatever it does it with, also passes the decoys; code that returns what a test expects
passes them too. Only the right values tell a decoy from the test it copies, so a guess about one pair is right half of
the time. A verdict is believed if every decoy failed.

Standard library only: task folders ship a copy of it.
"""

from __future__ import annotations

import ast
import functools
import io
import random
import re
import tokenize
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from woodshed.pysource import syntax

if TYPE_CHECKING:
    from woodshed.records import Decoy

MOST_PER_RUN = 8
"""Decoys of one session: a blind guess about each of them is right once in 2 ** 8."""
FUNCTION = (ast.FunctionDef, ast.AsyncFunctionDef)


@dataclass(frozen=True)
class Disguise:
    """Test files whose hidden tests and decoys have random names."""

    sources: dict[str, bytes]
    """Text of each test file, by path."""
    tests: dict[str, str]
    """Random id of each test, by its own id. Tests that have no decoy in this session keep theirs."""
    decoys: dict[str, Decoy] = field(default_factory=dict)
    """Decoys, by random id."""

    @property
    def ids(self) -> tuple[str, ...]:
        """Everything that the session runs."""
        return (*self.tests.values(), *self.decoys)

    def outcomes(self, outcomes: Mapping[str, str]) -> dict[str, str]:
        """Outcomes of the tests, by their own ids."""
        return {test: outcomes.get(name, "missing") for test, name in self.tests.items()}

    def faults(self, outcomes: Mapping[str, str]) -> tuple[str, ...]:
        """Reasons not to believe a session: decoys that did not fail though the tests that they contradict passed.

        Wrong code may pass a decoy, and fails its test then.
        """
        own = self.outcomes(outcomes)
        faults = [
            decoy.test
            for name, decoy in self.decoys.items()
            if own.get(decoy.test + decoy.contradicts) == "passed" and outcomes.get(name) != "failed"
        ]
        if not faults:
            return ()
        tests = ", ".join(sorted(set(faults))[:3])
        return (f"{len(faults)} of {len(self.decoys)} copies that must fail did not: {tests}",)


def disguise(
    sources: Mapping[str, bytes],
    tests: Sequence[str],
    decoys: Sequence[Decoy],
    rng: random.Random,
    most: int = MOST_PER_RUN,
) -> Disguise:
    """Put some decoys, at most one for each test, beside the tests that they copy.

    Args:
        sources: original test files, by path.
        tests: ids of everything that is to run.
        decoys: those of the task; the ones of other files and tests are passed over.
        most: number of decoys at most.
    """
    by_test: dict[str, list[Decoy]] = {}
    running = {without_parameters(test) for test in tests}
    shared = inherited(sources, running)
    for decoy in decoys:
        if (
            decoy.test in running
            and path_of(decoy.test) in sources
            and path_and_name(decoy.test) not in shared
        ):
            by_test.setdefault(decoy.test, []).append(decoy)
    drawn = rng.sample(sorted(by_test), min(most, len(by_test)))
    chosen = {test: rng.choice(by_test[test]) for test in drawn}
    changed: dict[str, bytes] = {}
    names: dict[str, tuple[str, str]] = {}
    for path in sorted({path_of(test) for test in chosen}):
        own = {test: decoy for test, decoy in chosen.items() if path_of(test) == path}
        changed[path], new = with_twins(without_others(sources[path], names_in(running)), own, rng)
        names |= new
    new_ids: dict[str, str] = {}
    for test in tests:
        stem = without_parameters(test)
        new_ids[test] = renamed(stem, names[stem][0]) + test[len(stem) :] if stem in names else test
    twins = {
        renamed(test, names[test][1]) + chosen[test].parameters: chosen[test]
        for test in chosen
        if test in names
    }
    return Disguise({**sources, **changed}, new_ids, twins)


def with_twins(
    source: bytes, decoys: Mapping[str, Decoy], rng: random.Random
) -> tuple[bytes, dict[str, tuple[str, str]]]:
    """The file with a changed copy beside each of these tests, and by test the new names of both.

    A test whose function is not found keeps its name and gets no copy.
    """
    text, encoding = decoded(source)
    functions = {test: function for test in decoys if (function := find(text, test))}
    names: dict[str, tuple[str, str]] = {}
    for test in sorted(functions, key=lambda test: functions[test].start, reverse=True):
        function, decoy = functions[test], decoys[test]
        original = text[function.start : function.end]
        twin = original[: decoy.start] + decoy.text + original[decoy.end :]
        first, second = (f"{function.name}_{rng.getrandbits(32):08x}" for _ in range(2))
        pair = [function.rename(original, first), function.rename(twin, second)]
        rng.shuffle(pair)
        text = f"{text[: function.start]}{pair[0]}\n\n{pair[1]}{text[function.end :]}"
        names[test] = first, second
    return text.encode(encoding), names


@functools.lru_cache(maxsize=16)
def without_others(source: bytes, names: frozenset[str]) -> bytes:
    """The file with `pass` in the place of test functions that are not to run, on as many lines.

    A session rewrites the asserts of this file anew, since no two runs have the same decoys and names; of a long file
    with a few tests that run this takes as long as all the rest. A name that stands anywhere else in the file is kept,
    and so is whatever has other decorators than marks: a fixture may be called test_data.

    Args:
        names: of the functions that run.
    """
    text, encoding = decoded(source)
    words, lines = Counter(re.findall(r"\w+", text)), text.split("\n")
    tree = _parsed(text)
    classes = [node for node in getattr(tree, "body", []) if isinstance(node, ast.ClassDef)]
    functions = [
        node
        for scope in filter(None, (tree, *classes))
        for node in scope.body
        if isinstance(node, FUNCTION) and node.name.startswith("test") and node.name not in names
        if words[node.name] == 1 and all(is_mark(decorator) for decorator in node.decorator_list)
    ]
    for node in functions:
        first = min([node.lineno, *(decorator.lineno for decorator in node.decorator_list)])
        last = node.end_lineno or node.lineno
        indent = re.match(r"\s*", lines[first - 1])
        lines[first - 1 : last] = [f"{indent[0] if indent else ''}pass", *[""] * (last - first)]
    return "\n".join(lines).encode(encoding)


def is_mark(decorator: ast.expr) -> bool:
    return ast.unparse(decorator).startswith(("pytest.mark.", "mark."))


def names_in(tests: Iterable[str]) -> frozenset[str]:
    """Names of the functions of some tests, wherever they are defined: a class may have them from another file."""
    return frozenset(path_and_name(test)[1] for test in tests)


@dataclass(frozen=True)
class TestFunction:
    """The lines of one test function, its decorators included, in the text of its file."""

    __test__ = False  # not a test class

    name: str
    start: int
    end: int
    node: ast.FunctionDef | ast.AsyncFunctionDef

    def rename(self, text: str, name: str) -> str:
        """The function's text with another name after its `def`."""
        return re.sub(
            rf"^([ \t]*(?:async[ \t]+)?def[ \t]+){self.name}\b", rf"\g<1>{name}", text, count=1, flags=re.M
        )


def find(text: str, test: str) -> TestFunction | None:
    """The function of a test id in the text of its file; None where no function or more than one has that name."""
    scope: ast.AST | None = _parsed(text)
    *_, name = parts = test.split("::")[1:] or [""]
    for part in parts:
        kinds = FUNCTION if part is name else ast.ClassDef
        nodes = [node for node in getattr(scope, "body", []) if isinstance(node, kinds) and node.name == part]
        if len(nodes) != 1:
            return None
        scope = nodes[0]
    if not isinstance(scope, FUNCTION):
        return None
    starts = line_starts(text)
    first = min([scope.lineno, *(decorator.lineno for decorator in scope.decorator_list)])
    end = starts[scope.end_lineno or scope.lineno]
    lines = text[starts[first - 1] : end]
    return TestFunction(scope.name, starts[first - 1], starts[first - 1] + len(lines.rstrip("\n")), scope)


@functools.lru_cache(maxsize=16)
def _parsed(text: str) -> ast.Module | None:
    try:
        return syntax.parse(text)
    except (SyntaxError, ValueError, RecursionError):
        return None


def inherited(sources: Mapping[str, bytes], tests: Iterable[str]) -> set[tuple[str, str]]:
    """Path and name of functions that a class has from another one: renamed there, they would be missing here."""
    texts = {path: decoded(source)[0] for path, source in sources.items()}
    return {
        path_and_name(test)
        for test in tests
        if path_of(test) in texts and not find(texts[path_of(test)], test)
    }


def path_and_name(test: str) -> tuple[str, str]:
    return path_of(test), without_parameters(test).rpartition("::")[2]


def line_starts(text: str) -> list[int]:
    """Position of each line's first character, and of the end of the text."""
    starts = [0]
    for line in text.split("\n"):
        starts.append(starts[-1] + len(line) + 1)
    return starts


def decoded(source: bytes) -> tuple[str, str]:
    """The text of a Python file with "\\n" as its only line end, and its encoding."""
    source = source.replace(b"\r\n", b"\n").replace(b"\r", b"\n")
    encoding, _ = tokenize.detect_encoding(io.BytesIO(source).readline)
    return source.decode(encoding), encoding


def path_of(test: str) -> str:
    return test.partition("::")[0]


def without_parameters(test: str) -> str:
    """A test id without "[...]" at its end. Parameters may hold brackets and colons of their own."""
    path, mark, rest = test.partition("::")
    return path + mark + rest.partition("[")[0]


def renamed(test: str, name: str) -> str:
    return f"{test.rpartition('::')[0]}::{name}"


def blind_guess(decoys: Iterable[Decoy]) -> float:
    """Chance that code which knows no right value tells every decoy of a session from its test."""
    return 0.5 ** min(MOST_PER_RUN, len({decoy.test for decoy in decoys}))


def covered(tests: Iterable[str], decoys: Iterable[Decoy]) -> float:
    """Share of tests that have a decoy."""
    of = {decoy.test for decoy in decoys}
    stems = [without_parameters(test) for test in tests]
    return sum(stem in of for stem in stems) / max(len(stems), 1)
