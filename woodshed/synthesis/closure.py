"""The reference closure: everything that must go with a name so that the code base still imports.

Starting from a set of removed bindings W, to a fixpoint: names leave from-imports and `__all__`; literals at module
level lose only the elements that refer to W; other module-level statements that refer to W go, and what they bound
joins W; so do definitions whose decorator, base class or default refers to W. Calls inside functions stay: they become
honest runtime failures. In test files, functions that refer to W go too.
"""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

from woodshed.pysource.edits import Edit, Source, apply, remove_items, remove_statement
from woodshed.synthesis.names import (
    WHOLE_MODULE,
    Binding,
    Codebase,
    Module,
    dotted_parts,
    imported_module,
    is_removed,
)

CONTAINERS = {
    "dict",
    "list",
    "set",
    "tuple",
    "frozenset",
    "OrderedDict",
    "MappingProxyType",
    "defaultdict",
    "ChainMap",
}
"""Calls that only gather their arguments, so that one argument may be left out."""

MAX_ROUNDS = 40


@dataclass(frozen=True)
class Trace:
    """One place outside the target that lost something, for the instruction."""

    path: str
    what: str
    """Source text of what went, whole."""
    place: str
    """"import", "__all__", "statement", or the name of the literal that lost an element."""


@dataclass(frozen=True)
class Closed:
    """A code base after the closure."""

    code: Codebase
    removed: frozenset[Binding]
    """W at the fixpoint, re-exported names included."""
    cascade: tuple[str, ...]
    """Names of definitions and assignments that had to go besides the target."""
    traces: tuple[Trace, ...]


def close(code: Codebase, removed: Iterable[Binding]) -> Closed:
    """Remove every binding in `removed` and whatever depends on it at import time.

    Raises:
        RecursionError: no fixpoint within MAX_ROUNDS (never seen).
    """
    bindings, cascade, traces = set(removed), [], []
    for _ in range(MAX_ROUNDS):
        changed: dict[str, str] = {}
        before = len(bindings)
        words = {part for _, name in bindings for part in name.split(".")}
        words |= {
            code.modules[path].name.rpartition(".")[2]
            for path, name in bindings
            if name == WHOLE_MODULE and path in code.modules
        }
        for path, module in code.modules.items():
            if (path, WHOLE_MODULE) in bindings or (
                words.isdisjoint(module.source.words) and not module.stars
            ):
                continue
            sweep = Sweep(code, module, bindings)
            sweep.run()
            bindings |= sweep.bound
            if sweep.edits:
                changed[path] = apply(module.source.text, sweep.edits)
            if path not in code.tests:
                cascade += sweep.cascade
                traces += sweep.traces
        code = code.replaced(changed)
        if not changed and len(bindings) == before:
            return Closed(code, frozenset(bindings), tuple(cascade), tuple(traces))
    raise RecursionError("the reference closure did not settle")


def drop_statement(code: Codebase, path: str, line: int) -> tuple[Codebase, set[Binding]]:
    """Remove the module-level statement that covers a line, for the repair loop. Return what it bound."""
    module = code.modules[path]
    sweep = Sweep(code, module, set(), drop_line=line)
    sweep.run()
    return code.replaced({path: apply(module.source.text, sweep.edits)}), sweep.bound


@dataclass
class Sweep:
    """One pass over one file: collects the edits and the bindings that go with them."""

    code: Codebase
    module: Module
    removed: set[Binding]
    drop_line: int = 0
    edits: list[Edit] = field(default_factory=list)
    bound: set[Binding] = field(default_factory=set)
    cascade: list[str] = field(default_factory=list)
    traces: list[Trace] = field(default_factory=list)

    def run(self) -> None:
        self._block(self.source.tree.body, "", nested=False)

    @property
    def source(self) -> Source:
        return self.module.source

    @property
    def strict(self) -> bool:
        """True for a test file, in which references inside functions count, too."""
        return self.module.path in self.code.tests

    def _block(self, body: list[ast.stmt], scope: str, *, nested: bool) -> None:
        removed = [statement for statement in body if self._goes(statement, scope)]
        for statement in removed:
            edit = remove_statement(self.source, statement, body)
            names = set(_bound(statement, scope))
            bindings = {(self.module.path, name) for name in names}
            self.bound |= bindings
            is_target = isinstance(statement, Definition) and not bindings.isdisjoint(self.removed)
            if not is_target and not isinstance(statement, ast.ImportFrom | ast.Import):
                self.cascade += sorted(names)
                self.traces.append(Trace(self.module.path, self.source.segment(statement), "statement"))
            if nested and len(removed) == len(body):
                edit = Edit(*self.source.span(statement), "pass" if statement is body[-1] else "")
            self.edits.append(edit)

    def _goes(self, statement: ast.stmt, scope: str) -> bool:
        """True if a statement is removed as a whole; smaller edits inside it are collected here."""
        if self.drop_line and not isinstance(statement, ast.Try | ast.If | ast.ClassDef):
            start, end = self.source.span(statement)
            return self.source.line(start) <= self.drop_line <= self.source.line(end)
        match statement:
            case ast.FunctionDef() | ast.AsyncFunctionDef():
                return self._definition_goes(statement, scope)
            case ast.ClassDef():
                if self._named(statement.name, scope) or self._any(_evaluated(statement), scope):
                    return True
                self._block(statement.body, _join(scope, statement.name), nested=True)
                return False
            case ast.ImportFrom():
                return self._import_goes(statement)
            case ast.Import():
                return self._modules_go(statement)
            case ast.Assign() | ast.AnnAssign() | ast.AugAssign():
                return self._assignment_goes(statement, scope)
            case ast.Expr(value=value):
                return self._value_goes(value, scope, _extended(value))
            case ast.If() | ast.Try() | ast.With() | ast.For() | ast.While():
                if self._any(_headers(statement), scope):
                    return True
                for block in _blocks(statement):
                    self._block(block, scope, nested=True)
                return False
        return self._any([statement], scope)

    def _definition_goes(self, node: ast.FunctionDef | ast.AsyncFunctionDef, scope: str) -> bool:
        if self._named(node.name, scope) or self._any(_evaluated(node), scope):
            return True
        if not self.strict:
            return False
        arguments = [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs]
        return any(self._is_fixture(a.arg) for a in arguments) or self._any(node.body, scope)

    def _is_fixture(self, name: str) -> bool:
        """True if a test's parameter names a removed fixture, of this file or of a conftest above it."""
        if (self.module.path, name) in self.removed and name not in self.module.imports:
            return True
        folder = self.module.path.rpartition("/")[0]
        return any(
            name == removed_name
            and path.endswith("conftest.py")
            and folder.startswith(path.rpartition("/")[0])
            for path, removed_name in self.removed
        )

    def _import_goes(self, node: ast.ImportFrom) -> bool:
        indices = set()
        home = self._home(node)
        for index, alias in enumerate(node.names):
            binding = (self.module.path, alias.asname or alias.name)
            if alias.name == "*" and is_removed(home, self.removed):
                assert home is not None
                names = {name for path, name in self.removed if path == home.path and "." not in name}
                self.bound |= {(self.module.path, n) for n in names - {WHOLE_MODULE} if n[0] != "_"}
                self.traces.append(Trace(self.module.path, f"everything of {home.name}", "import"))
                return True
            if binding in self.removed or self._imports_removed(node, alias):
                indices.add(index)
                self.bound.add(binding)
                self.traces.append(Trace(self.module.path, alias.name, "import"))
        if indices and len(indices) == len(node.names):
            return True
        self.edits += remove_items(self.source, node, indices) if indices else []
        return False

    def _modules_go(self, node: ast.Import) -> bool:
        """Take removed modules out of an `import a.b, c`."""
        indices = {
            index
            for index, alias in enumerate(node.names)
            if is_removed(self.code.by_name.get(alias.name), self.removed)
        }
        for index in indices:
            alias = node.names[index]
            if alias.asname:
                self.bound.add((self.module.path, alias.asname))
            self.traces.append(Trace(self.module.path, alias.name, "import"))
        if indices and len(indices) == len(node.names):
            return True
        self.edits += remove_items(self.source, node, indices) if indices else []
        return False

    def _assignment_goes(self, node: ast.Assign | ast.AnnAssign | ast.AugAssign, scope: str) -> bool:
        targets = node.targets if isinstance(node, ast.Assign) else [node.target]
        for target in targets:  # a plain name is bound here, anything else is read first
            if self._named(target.id, scope) if isinstance(target, ast.Name) else self._refers(target, scope):
                return True
        return node.value is not None and self._value_goes(node.value, scope, _target_name(targets))

    def _value_goes(self, value: ast.expr, scope: str, name: str) -> bool:
        """True if the value of `name` needs W; if it does not, the elements to remove are collected."""
        refers = self._exports if name == "__all__" else (lambda node: self._refers(node, scope))
        if not refers(value):
            return False
        traces = len(self.traces)
        edits = self._elements(value, refers, name)
        if edits is None:
            del self.traces[traces:]
            return True
        self.edits += edits
        return False

    def _elements(self, node: ast.expr, refers: Refers, name: str) -> list[Edit] | None:
        """Edits that take only the referring elements out of a literal; None where that is not possible."""
        match node:
            case ast.Dict(keys=keys, values=values):
                slots = [[v] if k is None else [k, v] for k, v in zip(keys, values, strict=True)]
            case ast.List(elts=elements) | ast.Set(elts=elements) | ast.Tuple(elts=elements):
                slots = [[element] for element in elements]
            case ast.Call(func=function) if (dotted_parts(function) or [""])[-1] in CONTAINERS:
                slots = [[a] for a in node.args] + [[k.value] for k in node.keywords]
            case ast.Call():
                return self._each([node.func, *node.args, *(k.value for k in node.keywords)], refers, name)
            case ast.BinOp():
                return self._each([node.left, node.right], refers, name)
            case ast.Starred(value=value):
                return self._elements(value, refers, name)
            case _:
                return None
        edits: list[Edit] = []
        indices: set[int] = set()
        for index, parts in enumerate(slots):
            if not any(refers(part) for part in parts):
                continue
            traces = len(self.traces)
            is_key = len(parts) == 2 and refers(parts[0])
            is_record = isinstance(parts[-1], ast.Tuple)  # a tuple inside a literal goes as a whole
            inner_edits = None if is_key or is_record else self._elements(parts[-1], refers, name)
            if inner_edits is None:
                del self.traces[traces:]
                indices.add(index)
                text = self.source.text[self.source.span(parts[0])[0] : self.source.span(parts[-1])[1]]
                self.traces.append(Trace(self.module.path, text, name))
            edits += inner_edits or []
        if isinstance(node, ast.Call) and any(index < len(node.args) for index in indices):
            return None  # a positional argument cannot be left out
        return [*edits, *remove_items(self.source, node, indices)] if indices else edits

    def _each(self, parts: list[ast.expr], refers: Refers, name: str) -> list[Edit] | None:
        edits_of = [self._elements(part, refers, name) for part in parts if refers(part)]
        return None if None in edits_of else [edit for edits in edits_of for edit in edits or ()]

    # -- does it refer to W?

    def _named(self, name: str, scope: str) -> bool:
        return (self.module.path, _join(scope, name)) in self.removed

    def _exports(self, node: ast.AST) -> bool:
        """True if the value of `__all__` holds the text of a removed name, or is computed from one."""
        for inner in ast.walk(node):
            match inner:
                case ast.Constant(value=str(name)) if name.isidentifier():
                    if self.code.leads_into(self.module, [name], self.removed):
                        return True
                case ast.Name() | ast.Attribute() if parts := dotted_parts(inner):
                    if self.code.leads_into(self.module, parts, self.removed):
                        return True
        return False

    def _home(self, node: ast.ImportFrom) -> Module | None:
        return self.code.by_name.get(imported_module(node, self.module.path, self.module.name))

    def _imports_removed(self, node: ast.ImportFrom, alias: ast.alias) -> bool:
        home = self._home(node)
        if home is None:
            return False
        return is_removed(home, self.removed) or is_removed(
            self.code.lookup(home, alias.name, self.removed), self.removed
        )

    def _any(self, nodes: Iterable[ast.AST], scope: str) -> bool:
        return any(self._refers(node, scope) for node in nodes)

    def _refers(self, node: ast.AST, scope: str) -> bool:
        match node:
            case ast.Name() | ast.Attribute() if parts := dotted_parts(node):
                return self.code.leads_into(self.module, parts, self.removed, scope)
            case ast.ImportFrom():
                return any(self._imports_removed(node, alias) for alias in node.names)
            case ast.Lambda() if not self.strict:
                return self._any(_defaults(node.args), scope)
        return self._any(ast.iter_child_nodes(node), scope)


Definition = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef
Refers = Callable[[ast.expr], bool]


def _defaults(arguments: ast.arguments) -> list[ast.expr]:
    return [*arguments.defaults, *(default for default in arguments.kw_defaults if default)]


def _evaluated(node: ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef) -> list[ast.expr]:
    """The parts of a definition that run when it is defined."""
    if isinstance(node, ast.ClassDef):
        return [*node.decorator_list, *node.bases, *(k.value for k in node.keywords)]
    return [*node.decorator_list, *_defaults(node.args)]


def _headers(node: ast.stmt) -> list[ast.AST]:
    match node:
        case ast.If(test=test) | ast.While(test=test):
            return [test]
        case ast.For(target=target, iter=iterable):
            return [target, iterable]
        case ast.With(items=managers):
            return list(managers)
    return []


def _blocks(node: ast.stmt) -> list[list[ast.stmt]]:
    handlers = [handler.body for handler in getattr(node, "handlers", ())]
    blocks = [getattr(node, name, []) for name in ("body", "orelse", "finalbody")]
    return [block for block in [*blocks, *handlers] if block]


def _bound(node: ast.stmt, scope: str) -> Iterable[str]:
    """Names that a statement binds in its scope."""
    match node:
        case ast.FunctionDef() | ast.AsyncFunctionDef() | ast.ClassDef():
            yield _join(scope, node.name)
        case ast.Import() | ast.ImportFrom():
            names = [a.asname or a.name.partition(".")[0] for a in node.names]
            yield from (_join(scope, name) for name in names if name != "*")
        case ast.Assign() | ast.AnnAssign():
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            for target in targets:
                parts = target.elts if isinstance(target, ast.Tuple | ast.List) else [target]
                yield from (_join(scope, p.id) for p in parts if isinstance(p, ast.Name))
        case ast.If() | ast.Try() | ast.With() | ast.For() | ast.While():
            for block in _blocks(node):
                for statement in block:
                    yield from _bound(statement, scope)


def _target_name(targets: Sequence[ast.expr]) -> str:
    return ".".join(dotted_parts(targets[0]) or [])


def _extended(value: ast.expr) -> str:
    """ "__all__" for a call such as `__all__.extend([...])`."""
    parts = dotted_parts(value.func) if isinstance(value, ast.Call) else None
    return parts[0] if parts and parts[0] == "__all__" else ""


def _join(scope: str, name: str) -> str:
    return f"{scope}.{name}" if scope else name
