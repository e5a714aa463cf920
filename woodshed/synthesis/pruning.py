"""The visible tests: the originals without every test that refers to what was removed or fails without it.

Whole test functions and classes go by exact edits, with the helpers and fixtures that only they could use; a file that
cannot be repaired goes as a whole. The originals stay as they were, for grading.
"""

from __future__ import annotations

import ast
from collections.abc import Iterable, Mapping

from woodshed.synthesis.closure import close
from woodshed.synthesis.names import Binding, Codebase, Module, dotted_parts
from woodshed.synthesis.operators import Deletion


def prune(deletion: Deletion, tests: Mapping[str, str], failing: Iterable[str]) -> dict[str, str]:
    """Visible text of every test file: without references to the deletion, and without failing tests.

    Args:
        tests: path to original text of the test files.
        failing: ids of tests that must not be shown.
    """
    texts = {**deletion.code.texts, **deletion.absent, **tests}
    code = Codebase(texts, deletion.code.roots, frozenset(tests))
    return _visible(close(code, deletion.removed | _definitions(code, failing)).code, tests)


def drop_failing(visible: Mapping[str, str], deletion: Deletion, failing: Iterable[str]) -> dict[str, str]:
    """The visible tests without some more that turned out to fail."""
    code = Codebase({**deletion.code.texts, **visible}, deletion.code.roots, frozenset(visible))
    return _visible(close(code, _definitions(code, failing)).code, visible)


def _visible(code: Codebase, tests: Mapping[str, str]) -> dict[str, str]:
    return {path: code.texts[path] for path in tests}


def _definitions(code: Codebase, failing: Iterable[str]) -> set[Binding]:
    """Definitions of the failing tests: a method that a class inherits is found in its base class."""
    bindings: set[Binding] = set()
    for test in failing:
        path, _, inner = test.partition("::")
        names = inner.partition("[")[0].split("::")
        module = code.modules.get(path)
        if module is not None:
            bindings.add(_define(code, module, names) or (path, names[0]))
    return bindings


def _define(code: Codebase, module: Module, names: list[str], depth: int = 0) -> Binding | None:
    """The binding of a function, or of a method looked up through base classes; None where it is not in the text."""
    body: list[ast.stmt] = module.source.tree.body
    for position, name in enumerate(names):
        node = next((n for n in _statements(body) if getattr(n, "name", None) == name), None)
        if node is None:
            return None
        if position == len(names) - 1:
            return module.path, ".".join(names)
        if not isinstance(node, ast.ClassDef):
            return None
        method = names[position + 1]
        if not any(getattr(n, "name", None) == method for n in _statements(node.body)) and depth < 8:
            return _inherited(code, module, node, names[position + 1 :], depth)
        body = node.body
    return None


def _inherited(
    code: Codebase, module: Module, node: ast.ClassDef, remaining: list[str], depth: int
) -> Binding | None:
    for base in node.bases:
        parts = dotted_parts(base)
        target = code.lookup(module, parts[0], frozenset()) if parts else None
        for part in (parts or [])[1:]:
            target = code.lookup(target, part, frozenset()) if isinstance(target, Module) else None
        if isinstance(target, tuple) and target[0] in code.modules:
            binding = _define(code, code.modules[target[0]], [*target[1].split("."), *remaining], depth + 1)
            if binding is not None and binding[0] in code.tests:
                return binding
    return None


def _statements(body: list[ast.stmt]) -> Iterable[ast.stmt]:
    """Definitions of a block, those under `if` and `try` included."""
    for node in body:
        yield node
        if isinstance(node, ast.If | ast.Try | ast.With):
            for name in ("body", "orelse", "finalbody"):
                yield from _statements(getattr(node, name, []))
