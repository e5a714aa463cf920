"""Features: what could be taken away, from one branch to a sub-package, with the tests that cover it.

Found from the maps alone, without running anything. Everything starts from the tests that cover the code: what no
test covers cannot be asked for, what most tests cover is not one feature (specificity), and symbols that the same tests
cover and that refer to each other are one feature (co-coverage clusters).
"""

from __future__ import annotations

import ast
import math
import random
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from functools import cached_property

from woodshed.pysource.edits import Source
from woodshed.synthesis.coverage_map import AT_IMPORT, Map, dominated, references, users
from woodshed.synthesis.mutations import distinct, mutants
from woodshed.synthesis.names import Binding, Codebase
from woodshed.synthesis.operators.deletion import Function, Symbol, every_symbol, find, is_public
from woodshed.synthesis.operators.parts import branches, optional_parameters, registrations
from woodshed.synthesis.operators.removals import is_command, parsers

MAX_CLUSTER = 6
SIMILAR = 0.6
"""Least Jaccard index of the covering tests of two members of a cluster."""
BUGS_EACH = 2
"""Most bugs that are planted in one function."""
MIN_SPREAD = 8
"""Fewest stable tests for which "covered by most" means anything."""


@dataclass(frozen=True)
class Feature:
    """Something that an operator could take away."""

    operator: str
    symbol: Symbol
    tests: int
    """Set of the stable tests that run its code (`Map`); 0 where only a run can tell."""
    score: float
    """Higher is better: well tested, by few tests in particular, and more than a line or two."""


@dataclass(frozen=True)
class Survey:
    """The maps of one repository, and what follows from them."""

    code: Codebase
    map: Map
    max_share: float
    """Features that a larger share of the suite covers are too central."""
    max_body_lines: int
    """Longest function that is taken away."""
    words: frozenset[str] = frozenset()
    """Every word of the tests."""
    _tests: dict[tuple[str, str], int] = field(default_factory=dict, compare=False, repr=False)

    @cached_property
    def symbols(self) -> list[Symbol]:
        return list(every_symbol(self.code))

    @cached_property
    def functions(self) -> list[Symbol]:
        """Public functions that tests run, none of them while a module is imported."""
        return [
            s
            for s in self.symbols
            if s.kind == "function" and is_public(s.name) and s.body_lines <= self.max_body_lines
        ]

    @cached_property
    def using(self) -> dict[Binding, set[Binding]]:
        return users(references(self.code), self.map)

    @cached_property
    def private(self) -> set[Binding]:
        return {s.binding for s in self.symbols if s.short.startswith("_") and not s.short.endswith("__")}

    def source(self, symbol: Symbol) -> Source:
        return self.code.modules[symbol.path].source

    def body(self, symbol: Symbol) -> tuple[int, int]:
        """Lines of a function that run when it is called."""
        node = find(self.source(symbol), symbol.name)
        source, first = self.source(symbol), node.body[0]
        if ast.get_docstring(node, clean=False) is not None and len(node.body) > 1:
            first = node.body[1]
        return source.line(source.span(first)[0]), symbol.lines[1]

    def tests(self, symbol: Symbol) -> int:
        """The tests that run a function's body, or any method of a class."""
        key = (symbol.path, symbol.name)
        if key not in self._tests:
            self._tests[key] = self._covering(symbol)
        return self._tests[key]

    def _covering(self, symbol: Symbol) -> int:
        if symbol.kind != "class":
            return self.map.covering(symbol.path, *self.body(symbol))
        tests = 0
        for method in self.symbols:
            inside = method.path == symbol.path and method.name.startswith(f"{symbol.name}.")
            if inside and method.kind != "class":
                tests |= self.tests(method)
        return tests

    def helpers(self, symbol: Symbol) -> tuple[Symbol, ...]:
        """Private functions that only `symbol` needs."""
        names = dominated(symbol.binding, self.using, self.private)
        return tuple(
            s for s in self.symbols if s.binding in names and s.kind == "function" and "." not in s.name
        )

    def feature(self, operator: str, symbol: Symbol, tests: int, lines: int) -> Feature | None:
        """A feature, unless its tests are too few or too many."""
        total, count = len(self.map.tests), (tests & ~AT_IMPORT).bit_count()
        if not count or (count > self.max_share * total and total >= MIN_SPREAD):
            return None
        specificity = math.log((1 + total) / count)
        score = math.log1p(min(count, 20)) * (0.3 + specificity) * math.log1p(lines)
        return Feature(operator, symbol, tests & ~AT_IMPORT, round(score, 4))


def discover(survey: Survey, operator: str) -> list[Feature]:
    """The features that an operator could take away, best first; symbols of equal score in file order."""
    features = [feature for feature in FINDERS[operator](survey) if feature is not None]
    unique = {(f.symbol.path, f.symbol.name, f.symbol.detail): f for f in reversed(features)}
    return sorted(reversed(unique.values()), key=lambda feature: -feature.score)


# ---- one symbol -------------------------------------------------------------------------------------------


def _stubs(survey: Survey) -> Iterator[Feature | None]:
    for symbol in survey.functions:
        tests = survey.tests(symbol)
        if not tests & AT_IMPORT:  # a stub that runs while its module is imported breaks the import
            yield survey.feature("stub", symbol, tests, symbol.body_lines)


def _bare_stubs(survey: Survey) -> Iterator[Feature | None]:
    for feature in _stubs(survey):
        if feature and feature.symbol.docstring:
            yield replace(feature, operator="stub_bare")


def _functions(survey: Survey) -> Iterator[Feature | None]:
    for symbol in survey.functions:
        yield survey.feature("remove", symbol, survey.tests(symbol), symbol.body_lines)


def _classes(survey: Survey) -> Iterator[Feature | None]:
    for symbol in survey.symbols:
        if symbol.kind == "class" and is_public(symbol.name):
            yield survey.feature("remove_class", symbol, survey.tests(symbol), symbol.body_lines)


def _gutted(survey: Survey) -> Iterator[Feature | None]:
    for symbol in survey.symbols:
        tests = survey.tests(symbol) if symbol.kind == "class" else 0
        if tests and not tests & AT_IMPORT and is_public(symbol.name):
            yield survey.feature("gut_class", symbol, tests, symbol.body_lines)


def _helped(survey: Survey) -> Iterator[Feature | None]:
    for symbol in survey.functions:
        tests = survey.tests(symbol)
        if not tests & AT_IMPORT and (helpers := survey.helpers(symbol)):
            lines = symbol.body_lines + sum(helper.body_lines for helper in helpers)
            named = replace(symbol, kind="helpers", parts=helpers)
            yield survey.feature("remove_helpers", named, tests, lines)


# ---- parts of a symbol ------------------------------------------------------------------------------------


def _each_function(survey: Survey) -> Iterator[tuple[Symbol, Source, ast.FunctionDef | ast.AsyncFunctionDef]]:
    for symbol in survey.symbols:
        if symbol.kind == "function" and symbol.body_lines <= 4 * survey.max_body_lines:
            node = find(survey.source(symbol), symbol.name)
            if isinstance(node, Function):
                yield symbol, survey.source(symbol), node


def _branches(survey: Survey) -> Iterator[Feature | None]:
    for symbol, source, node in _each_function(survey):
        for index, branch in enumerate(branches(source, node)):
            tests = survey.map.covering(symbol.path, *branch.body)
            lines = branch.body[1] - branch.body[0] + 1
            part = replace(symbol, kind="branch", detail=str(index))
            yield survey.feature("remove_branch", part, tests, lines + 1)


def _parameters(survey: Survey) -> Iterator[Feature | None]:
    for symbol, source, node in _each_function(survey):
        if not is_public(symbol.name):
            continue
        for name in optional_parameters(source, node):
            part = replace(symbol, kind="parameter", detail=name)
            yield survey.feature("remove_parameter", part, survey.tests(symbol), 2)


def _registrations(survey: Survey) -> Iterator[Feature | None]:
    for path, module in survey.code.modules.items():
        for name, what, edits in registrations(module.source):
            line = module.source.line(edits[0].start)
            symbol = Symbol(path, name, module.name, what, "", 1, (line, line), "registration", what)
            functions = [s for s in survey.symbols if s.binding == (path, name)]
            if functions:
                yield survey.feature("unregister", symbol, survey.tests(functions[0]), 2)
            elif survey.words.issuperset(re.findall(r"\w+", what)):
                yield Feature("unregister", symbol, 0, 1.0)  # who needs the entry, only a run can tell


def _bugs(survey: Survey) -> Iterator[Feature | None]:
    for symbol, source, node in _each_function(survey):
        tests = survey.tests(symbol)
        if not tests & AT_IMPORT and symbol.body_lines > 2:
            numbered = list(enumerate(mutants(source, node)))
            draw = random.Random(symbol.name)
            drawn = draw.sample(numbered, min(BUGS_EACH, len(numbered)))
            for index, mutant in distinct(source, node, drawn):
                part = replace(symbol, kind="bug", detail=str(index))
                run = survey.map.covering(symbol.path, mutant.line, mutant.line)
                yield survey.feature("bug", part, run, symbol.body_lines)


# ---- several symbols --------------------------------------------------------------------------------------


def _clusters(survey: Survey) -> Iterator[Feature | None]:
    """Functions of one module that nearly the same tests cover, near each other in the reference graph."""
    tests = {s.binding: survey.tests(s) & ~AT_IMPORT for s in survey.functions}
    for seed in survey.functions:
        members, seed_tests = [seed], tests[seed.binding]
        for other in survey.functions:
            other_tests = tests[other.binding]
            is_near = (
                other.path == seed.path and other is not seed and _jaccard(seed_tests, other_tests) >= SIMILAR
            )
            if is_near and len(members) < MAX_CLUSTER and _related(survey, seed, other):
                members.append(other)
        if len(members) > 1:
            yield _cluster(survey, sorted(members, key=lambda s: s.lines), tests)


def _jaccard(a: int, b: int) -> float:
    return (a & b).bit_count() / max((a | b).bit_count(), 1)


def _related(survey: Survey, symbol: Symbol, other: Symbol) -> bool:
    """True if two definitions are at most two references apart."""
    ours, theirs = survey.using.get(symbol.binding, set()), survey.using.get(other.binding, set())
    return symbol.binding in theirs or other.binding in ours or bool({u for u in ours & theirs if u[1]})


def _cluster(survey: Survey, members: list[Symbol], tests: dict[Binding, int]) -> Feature | None:
    first, union = members[0], 0
    for member in members:
        union |= tests[member.binding]
    name = "+".join(member.short for member in members)
    symbol = replace(first, kind="cluster", detail=name, parts=tuple(members))
    return survey.feature("remove_cluster", symbol, union, sum(m.body_lines for m in members))


def _commands(survey: Survey) -> Iterator[Feature | None]:
    functions = {s.binding: s for s in survey.symbols if s.kind == "function"}
    for path, module in survey.code.modules.items():
        handlers = {handler: command for command, _, handler in parsers(module.source)}
        for (home, name), symbol in functions.items():
            node = find(module.source, name) if home == path else None
            decorated = isinstance(node, Function) and is_command(node)
            if home == path and (name in handlers or decorated):
                part = replace(
                    symbol, kind="command", detail=handlers.get(name, ""), parts=survey.helpers(symbol)
                )
                yield survey.feature("remove_command", part, survey.tests(symbol), symbol.body_lines)


def _modules(survey: Survey) -> Iterator[Feature | None]:
    for path, module in survey.code.modules.items():
        name = path.rpartition("/")[2].removesuffix(".py")
        if not name.startswith("_"):
            yield _files(survey, "remove_module", "module", [path], name, module.name)


def _packages(survey: Survey) -> Iterator[Feature | None]:
    for path, module in survey.code.modules.items():
        folder, _, name = path.rpartition("/")
        nested = "/" in folder and f"{folder.rpartition('/')[0]}/__init__.py" in survey.code.modules
        if name == "__init__.py" and nested:
            paths = [p for p in survey.code.modules if p.startswith(folder + "/")]
            yield _files(survey, "remove_package", "package", paths, folder.rpartition("/")[2], module.name)


def _files(
    survey: Survey, operator: str, kind: str, paths: list[str], name: str, module: str
) -> Feature | None:
    inside = [s for s in survey.symbols if s.path in paths and s.kind == "function"]
    tests = 0
    for symbol in inside:
        tests |= survey.tests(symbol)
    first = next((p for p in paths if p.endswith("__init__.py")), paths[0])
    tree = survey.code.modules[first].source.tree
    lines = survey.code.texts[first].count("\n") + 1
    size = sum(s.body_lines for s in inside)
    symbol = Symbol(first, name, module, "", ast.get_docstring(tree) or "", size, (1, lines), kind)
    return survey.feature(operator, symbol, tests, size)


FINDERS: dict[str, Callable[[Survey], Iterator[Feature | None]]] = {
    "remove_branch": _branches,
    "bug": _bugs,
    "unregister": _registrations,
    "stub": _stubs,
    "stub_bare": _bare_stubs,
    "remove": _functions,
    "remove_parameter": _parameters,
    "remove_class": _classes,
    "remove_cluster": _clusters,
    "remove_helpers": _helped,
    "gut_class": _gutted,
    "remove_command": _commands,
    "remove_module": _modules,
    "remove_package": _packages,
}
"""Operator to what finds its features. Combinations are made of candidates that were found (`make`)."""
