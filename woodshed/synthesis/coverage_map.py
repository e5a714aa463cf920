"""Map of tests to lines, of callers to callees and of references: the extent of a feature.

The test-to-line map comes from runs of the suite under coverage with a context per test (`mapping`), so lines that run
while a module is imported count for no test. Sets of tests are integers, one bit per stable test of the baseline.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property

from woodshed.synthesis.names import Binding, Codebase, Module, definitions, dotted_parts

AT_IMPORT = 1
"""The bit of a line that ran outside of any test."""
Function = ast.FunctionDef | ast.AsyncFunctionDef


@dataclass(frozen=True)
class Map:
    """Lines that the tests of a baseline run."""

    tests: tuple[str, ...]
    """The baseline's stable tests; bit i + 1 of every set is tests[i]."""
    lines: dict[str, dict[str, str]]
    """Path to line to a hexadecimal set of tests; bit 0: ran outside of any test, when a module was imported."""
    calls: tuple[tuple[str, str, str, str], ...] = ()
    """Path and qualified name of a function that called, and of the one that it called; "" is a module's own code."""
    unmapped: tuple[str, ...] = ()
    """Tests of which nobody knows what they touch, for want of time."""
    _sets: dict[str, dict[int, int]] = field(default_factory=dict, compare=False, repr=False)

    def covering(self, path: str, first: int = 1, last: int | None = None) -> int:
        """The tests that ran a line of a span (of the whole file), with AT_IMPORT if one ran outside of them."""
        if path not in self._sets:
            self._sets[path] = {int(n): int(text, 16) for n, text in self.lines.get(path, {}).items()}
        tests, sets = 0, self._sets[path]
        last = max(sets, default=0) if last is None else last
        for line in range(first, last + 1):
            tests |= sets.get(line, 0)
        return tests

    def names(self, tests: int) -> list[str]:
        """Ids of a set, in the order of the suite."""
        return [test for i, test in enumerate(self.tests) if tests >> (i + 1) & 1]

    @cached_property
    def bits(self) -> dict[str, int]:
        """Test id to its bit."""
        return {test: 2 << i for i, test in enumerate(self.tests)}


# ---- the reference graph ----------------------------------------------------------------------------------


def references(code: Codebase) -> dict[Binding, set[Binding]]:
    """References by definition (and, as "", by every module's own statements): the definitions that its text names.

    A name inside a class stands for the class's own attribute where `self.` or `cls.` precedes it.
    """
    homes = {
        (path, name) for path in code.modules for name, _ in definitions(code.modules[path].source.tree.body)
    }
    graph: dict[Binding, set[Binding]] = {}
    for path, module in code.modules.items():
        for name, node in [("", module.source.tree), *definitions(module.source.tree.body)]:
            targets = graph.setdefault((path, name), set())
            for parts in _dotted(node):
                targets |= _leads_to(code, module, name, parts, homes)
            targets.discard((path, name))
    return graph


def _dotted(node: ast.AST) -> Iterator[list[str]]:
    """Every dotted name in a definition, without those of definitions inside a class or module."""
    waiting = [*ast.iter_child_nodes(node)]
    while waiting:
        child = waiting.pop()
        if isinstance(child, Function | ast.ClassDef) and not isinstance(node, Function):
            waiting += child.decorator_list
            continue
        if isinstance(child, ast.expr) and (parts := dotted_parts(child)):
            yield parts
        else:
            waiting += ast.iter_child_nodes(child)


def _leads_to(
    code: Codebase, module: Module, scope: str, parts: list[str], homes: set[Binding]
) -> set[Binding]:
    owner = scope.rpartition(".")[0]
    if parts[0] in ("self", "cls") and owner and len(parts) > 1:
        target: Module | Binding | None = (module.path, f"{owner}.{parts[1]}")
        attributes = parts[2:]
    else:
        target, attributes = code.lookup(module, parts[0], frozenset()), parts[1:]
    reached = set()
    for attribute in [*attributes, ""]:
        if isinstance(target, tuple) and target in homes:
            reached.add(target)
        if isinstance(target, Module):
            target = code.lookup(target, attribute, frozenset()) if attribute else None
        elif target is not None:
            target = (target[0], f"{target[1]}.{attribute}")
    return reached


def users(graph: Mapping[Binding, set[Binding]], calls: Map) -> dict[Binding, set[Binding]]:
    """Callers of each definition: the graph reversed, with the calls that tests made."""
    using: dict[Binding, set[Binding]] = {}
    for user, used in graph.items():
        for definition in used:
            using.setdefault(definition, set()).add(user)
    for a_path, a_name, b_path, b_name in calls.calls:
        if (b_path, b_name) in graph and (a_path, a_name) != (b_path, b_name):
            using.setdefault((b_path, b_name), set()).add((a_path, a_name))
    return using


def dominated(entry: Binding, using: Mapping[Binding, set[Binding]], private: set[Binding]) -> list[Binding]:
    """Private definitions that nothing reaches but through `entry`: they are its own helpers, in no other's service."""
    inside = {entry}
    while True:
        added = {
            definition
            for definition in private - inside
            if (needed_by := using.get(definition, set()) - {definition}) and needed_by <= inside
        }
        if not added:
            return sorted(inside - {entry})
        inside |= added
