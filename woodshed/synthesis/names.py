"""Resolution of names: modules of a code base, their imports, and the definition that a dotted name leads to.

A binding is a (path, name) pair such as ("toolz/itertoolz.py", "groupby") or ("boltons/cacheutils.py", "LRI.get").
Only names that are settled when a module is imported are followed; calls inside functions are not.
"""

from __future__ import annotations

import ast
import builtins
import re
import symtable
from collections.abc import Collection, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass
from functools import lru_cache
from pathlib import PurePosixPath

from woodshed.pysource import syntax
from woodshed.pysource.edits import Source, parse

Binding = tuple[str, str]

MODULE_NAMES = {"__file__", "__name__", "__path__", "__all__", "__package__", "__spec__", "__annotations__"}
WHOLE_MODULE = "*"
"""The name in a binding that stands for a module as such: ("toolz/recipes.py", "*") is removed where the file is."""


Function = ast.FunctionDef | ast.AsyncFunctionDef


def definitions(body: Sequence[ast.stmt], scope: str = "") -> Iterator[tuple[str, Function | ast.ClassDef]]:
    """Functions, methods and classes with their dotted names, in file order; not those inside functions."""
    for node in body:
        match node:
            case ast.FunctionDef() | ast.AsyncFunctionDef():
                yield scope + node.name, node
            case ast.ClassDef():
                yield scope + node.name, node
                yield from definitions(node.body, f"{scope}{node.name}.")
            case ast.If() | ast.Try():
                for block in (node.body, node.orelse, *(h.body for h in getattr(node, "handlers", ()))):
                    yield from definitions(block, scope)


@dataclass(frozen=True, eq=False)
class Module:
    """One parsed file."""

    path: str
    name: str
    """Dotted import name; for a package's __init__ file the package's."""
    source: Source
    imports: dict[str, tuple[str, str]]
    """Local name to (module, name in it), or (module, "") where the module itself is bound."""
    stars: tuple[str, ...]
    """Modules whose public names are imported with '*'."""


class Codebase:
    """The files of one language world (.py, or .pyi) that refer to each other."""

    def __init__(self, texts: Mapping[str, str], roots: Sequence[str], tests: Set[str] = frozenset()) -> None:
        """`texts`: path to text. `roots`: folders on the import path. `tests`: files whose functions count as well."""
        self.texts = dict(texts)
        self.roots = tuple(roots)
        self.tests = tests
        self.modules: dict[str, Module] = {}
        self.by_name: dict[str, Module] = {}
        for path, text in self.texts.items():
            self._add(path, text)

    def replaced(self, texts: Mapping[str, str]) -> Codebase:
        """Code base with some texts changed; unchanged files are not parsed again."""
        return Codebase({**self.texts, **texts}, self.roots, self.tests)

    def without(self, paths: Collection[str]) -> Codebase:
        """Code base without some files."""
        if not paths:
            return self
        remaining = {path: text for path, text in self.texts.items() if path not in paths}
        return Codebase(remaining, self.roots, self.tests)

    def _add(self, path: str, text: str) -> None:
        source = parse(text)
        if source is None:
            return
        names = list(self._names(path))
        imports, stars = _imports(source, path, names[0], inside_functions=path in self.tests)
        module = Module(path, names[0], source, imports, stars)
        self.modules[path] = module
        for name in names:
            self.by_name.setdefault(name, module)

    def _names(self, path: str) -> Iterator[str]:
        """Import names a file may go by: from the deepest source root first, and for tests their bare stem."""
        dotted = PurePosixPath(path).with_suffix("").parts
        dotted = dotted[:-1] if dotted[-1] == "__init__" else dotted
        inside = sorted(
            (r for r in self.roots if r != "." and path.startswith(r + "/")), key=len, reverse=True
        )
        for root in inside:
            yield ".".join(dotted[len(PurePosixPath(root).parts) :])
        yield ".".join(dotted)
        if path in self.tests and dotted:
            yield dotted[-1]

    def leads_into(
        self, module: Module, dotted: Sequence[str], removed: Set[Binding], scope: str = ""
    ) -> bool:
        """True if a dotted name, read in `module`, is or passes through a removed binding."""
        if scope and (module.path, f"{scope}.{dotted[0]}") in removed:
            return True
        target = self.lookup(module, dotted[0], removed)
        for attribute in dotted[1:]:
            if target is None or is_removed(target, removed):
                break
            if isinstance(target, Module):
                target = self.lookup(target, attribute, removed)
            else:
                target = (target[0], f"{target[1]}.{attribute}")
        return is_removed(target, removed)

    def lookup(
        self, module: Module, name: str, removed: Set[Binding], depth: int = 0
    ) -> Module | Binding | None:
        """Definition of a module-level name: one of our modules, a binding, or None for somebody else's."""
        if (module.path, name) in removed or depth > 16:
            return module.path, name
        if name in module.imports:
            origin, inner = module.imports[name]
            home = self.by_name.get(origin)
            if not inner:
                return home
            if home is not None and home is not module:
                return self.lookup(home, inner, removed, depth + 1)
            return self.by_name.get(f"{origin}.{inner}")
        for star in module.stars:
            home = self.by_name.get(star)
            if home is not None and home is not module and not name.startswith("_"):
                star_target = self.lookup(home, name, removed, depth + 1)
                if isinstance(star_target, tuple) and star_target in removed:
                    return star_target
        return self.by_name.get(f"{module.name}.{name}") or (module.path, name)


def is_removed(place: Module | Binding | None, removed: Set[Binding]) -> bool:
    """True if the target of a name is removed: a binding, or a module whose file is."""
    if isinstance(place, Module):
        return (place.path, WHOLE_MODULE) in removed
    return place in removed


def _imports(
    source: Source, path: str, name: str, inside_functions: bool
) -> tuple[dict[str, tuple[str, str]], tuple[str, ...]]:
    imports: dict[str, tuple[str, str]] = {}
    stars: list[str] = []
    for node in walk(source.tree, inside_functions):
        if isinstance(node, ast.Import):
            for alias in node.names:
                top = alias.name.partition(".")[0]
                imports[alias.asname or top] = (alias.name if alias.asname else top, "")
        elif isinstance(node, ast.ImportFrom):
            origin = imported_module(node, path, name)
            for alias in node.names:
                if alias.name == "*":
                    stars.append(origin)
                else:
                    imports[alias.asname or alias.name] = (origin, alias.name)
    return imports, tuple(stars)


def imported_module(node: ast.ImportFrom, path: str, name: str) -> str:
    """Absolute dotted name of the module that a from-import reads."""
    if not node.level:
        return node.module or ""
    package = name.split(".") if PurePosixPath(path).stem == "__init__" else name.split(".")[:-1]
    package = package[: len(package) - (node.level - 1)]
    return ".".join([*package, *([node.module] if node.module else [])])


def walk(node: ast.AST, inside_functions: bool) -> Iterator[ast.AST]:
    """Every node in source order; without `inside_functions`, bodies that do not run at import time are skipped."""
    yield node
    for child in ast.iter_child_nodes(node):
        if inside_functions or not isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            yield from walk(child, inside_functions)
        elif not isinstance(child, ast.Lambda):
            yield child


@lru_cache(maxsize=512)
def unresolved(text: str) -> frozenset[str]:
    """Names that a module reads and that neither it nor Python defines; none where it imports with '*'."""
    text = syntax.plain(text)
    table = symtable.symtable(text, "module", "exec")
    own = {s.get_name() for s in table.get_symbols() if s.is_assigned() or s.is_imported()}
    read, waiting = set(), [table]
    while waiting:
        scope = waiting.pop()
        waiting += scope.get_children()
        for symbol in scope.get_symbols():
            if symbol.is_declared_global() and symbol.is_assigned():
                own.add(symbol.get_name())
            if symbol.is_referenced() and (symbol.is_global() or scope is table):
                read.add(symbol.get_name())
    if re.search(r"^\s*from\s+\S+\s+import\s+\*", text, re.MULTILINE):
        return frozenset()
    return frozenset(read - own - set(dir(builtins)) - MODULE_NAMES)


def dotted_parts(node: ast.expr) -> list[str] | None:
    """["toolz", "curry"] for the expression `toolz.curry`, None for anything that is not a plain dotted name."""
    if isinstance(node, ast.Name):
        return [node.id]
    if isinstance(node, ast.Attribute):
        inner = dotted_parts(node.value)
        return [*inner, node.attr] if inner else None
    return None
