"""Candidates for removal, and a code base with something missing."""

from __future__ import annotations

import ast
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from difflib import SequenceMatcher

from woodshed.pysource import syntax
from woodshed.pysource.edits import Source
from woodshed.records import TaskError
from woodshed.synthesis.closure import Trace, close, drop_statement
from woodshed.synthesis.names import WHOLE_MODULE, Binding, Codebase, Function, definitions, dotted_parts


@dataclass(frozen=True)
class Symbol:
    """Something that could be taken away: a function as a rule, see `kind`."""

    path: str
    name: str
    """Dotted inside its file: "groupby", "LRU.get"; the stem of the file for a module."""
    module: str
    """Import name of its file."""
    header: str
    """Decorators and signature as written, without indentation."""
    docstring: str
    body_lines: int
    """Lines of the body that hold code, docstring left out."""
    lines: tuple[int, int]
    """First line (decorators included) and last line."""
    kind: str = "function"
    """function, class, module, package, cluster, helpers, command, registration, parameter, branch, bug, combination,
    or commit."""
    detail: str = ""
    """Part of it that is removed, "" for all: a parameter's name, a branch's condition, the key of a registration."""
    parts: tuple[Symbol, ...] = ()
    """The members of a cluster, of a combination, a command's or function's own helpers."""

    @property
    def short(self) -> str:
        return self.name.rpartition(".")[2]

    @property
    def binding(self) -> Binding:
        return self.path, self.name


@dataclass(frozen=True)
class Deletion:
    """A code base with something missing."""

    operator: str
    level: int
    symbol: Symbol
    code: Codebase
    """After the deletion."""
    changed: Mapping[str, str | None]
    """New text of every file that differs; None where it is gone."""
    removed: frozenset[Binding]
    """Bindings that no longer exist; empty for a stub."""
    traces: tuple[Trace, ...]
    """Code removed besides the target."""
    gap: tuple[int, int]
    """First and last line of the gap; for a removal the line that now stands there, twice."""
    marker: str
    """A word that failures caused by this deletion show: the removed name or the stub's message."""
    targets: tuple[Symbol, ...] = ()
    """Functions and classes whose code must come back, the first one being the feature's own."""
    absent: Mapping[str, str] = field(default_factory=dict)
    """Original text of the files that are gone."""

    @property
    def words(self) -> frozenset[str]:
        """Short names that a failure caused by this deletion may mention."""
        removed = {name.rpartition(".")[2] for _, name in self.removed if name != WHOLE_MODULE}
        modules = {path.rpartition("/")[2].removesuffix(".py") for path in self.absent}
        named = {self.marker, self.symbol.short, *(t.short for t in self.targets)}
        return frozenset({*removed, *modules, *named} - {""})


class CascadeError(TaskError):
    """Too much depends on the symbol at import time, or the code cannot do without it."""


# ---- the symbol table -------------------------------------------------------------------------------------


def symbols(code: Codebase) -> Iterator[Symbol]:
    """Public functions and methods that are defined once and do something, in file order."""
    return (s for s in every_symbol(code) if s.kind == "function" and is_public(s.name))


def is_public(name: str) -> bool:
    return not any(part.startswith("_") for part in name.split("."))


def every_symbol(code: Codebase) -> Iterator[Symbol]:
    """Functions and methods that are defined once and do something, and classes, in file order."""
    for path, module in code.modules.items():
        defined = list(definitions(module.source.tree.body))
        counts = Counter(
            name for name, node in defined if isinstance(node, ast.ClassDef) or not is_declaration(node)
        )
        for name, node in defined:
            if counts[name] != 1:
                continue
            if isinstance(node, ast.ClassDef):
                yield class_symbol(module.source, path, module.name, name, node)
            elif not is_declaration(node):
                yield function_symbol(module.source, path, module.name, name, node)


def function_symbol(source: Source, path: str, module: str, name: str, function: Function) -> Symbol:
    start, end = source.span(function)
    body = code_body(function)
    first = source.span(function.body[0])[0]
    lines = syntax.plain(source.text[source.span(body[0])[0] : end]).split("\n")
    return Symbol(
        path,
        name,
        module,
        _header(source, start, first),
        ast.get_docstring(function) or "",
        _code_lines(lines),
        (source.line(start), source.line(end)),
    )


def class_symbol(source: Source, path: str, module: str, name: str, node: ast.ClassDef) -> Symbol:
    start, end = source.span(node)
    first = source.span(node.body[0])[0]
    lines = syntax.plain(source.text[first:end]).split("\n")
    span = (source.line(start), source.line(end))
    header, docstring = _header(source, start, first), ast.get_docstring(node) or ""
    return Symbol(path, name, module, header, docstring, _code_lines(lines), span, kind="class")


def _code_lines(lines: Iterable[str]) -> int:
    return sum(1 for line in lines if line.strip() and not line.strip().startswith("#"))


def _header(source: Source, start: int, first: int) -> str:
    """Decorators and signature, without the comments between it and the body."""
    indent = start - source.line_start(start)
    lines = syntax.plain(source.text[start:first].rstrip()).split("\n")
    lines = [line[indent:] if i and not line[:indent].strip() else line for i, line in enumerate(lines)]
    while lines and lines[-1].lstrip().startswith("#"):
        lines.pop()
    return "\n".join(lines).rstrip()


def code_body(function: Function) -> list[ast.stmt]:
    """The body without its docstring (with it, where there is nothing else)."""
    has_docstring = ast.get_docstring(function, clean=False) is not None
    return function.body[1:] if has_docstring and len(function.body) > 1 else function.body


def is_declaration(function: Function) -> bool:
    """Overloads, abstract methods and bodies that do nothing."""
    names = {(dotted_parts(d) or [""])[-1] for d in function.decorator_list}
    return bool(names & {"overload", "abstractmethod", "setter", "deleter"}) or is_empty(function)


def is_empty(function: Function) -> bool:
    """True if a body does nothing, or only raises NotImplementedError."""
    for statement in code_body(function):
        match statement:
            case ast.Pass() | ast.Expr(value=ast.Constant()):
                continue
            case ast.Raise(
                exc=ast.Name(id="NotImplementedError") | ast.Call(func=ast.Name(id="NotImplementedError"))
            ):
                continue
        return False
    return True


def find(source: Source, name: str) -> Function | ast.ClassDef:
    """The definition of a name; of several functions the last that does something.

    Raises:
        CascadeError: it is not there (any more).
    """
    matching = [
        node
        for known, node in definitions(source.tree.body)
        if known == name and (isinstance(node, ast.ClassDef) or not is_declaration(node))
    ]
    if not matching:
        raise CascadeError(f"{name} is not there")
    return matching[-1]


def find_function(source: Source, name: str) -> Function:
    node = find(source, name)
    if isinstance(node, ast.ClassDef):
        raise CascadeError(f"{name} is a class")
    return node


# ---- removal with closure ---------------------------------------------------------------------------------


def removal(
    operator: str,
    level: int,
    code: Codebase,
    symbol: Symbol,
    removed: Iterable[Binding],
    max_cascade: int,
    *,
    started: Codebase | None = None,
    targets: tuple[Symbol, ...] = (),
) -> Deletion:
    """The code base without some bindings and everything that needs them to import.

    Args:
        started: the code base after edits of the operator's own; the closure goes on from there.

    Raises:
        CascadeError: more than `max_cascade` other definitions would have to go.
    """
    start = frozenset(removed)
    closed = close(started or code, start)
    if len(closed.cascade) > max_cascade:
        raise CascadeError(
            f"{len(closed.cascade)} more definitions depend on it: {', '.join(closed.cascade[:6])}"
        )
    absent = {path: code.texts[path] for path, name in start if name == WHOLE_MODULE and path in code.texts}
    after = closed.code.without(absent)
    changed: dict[str, str | None] = {p: text for p, text in after.texts.items() if text != code.texts[p]}
    changed.update(dict.fromkeys(absent))
    line = 1
    if symbol.path in after.texts:
        line = gap_line(code.texts[symbol.path], after.texts[symbol.path], symbol.lines[0])
    return Deletion(
        operator=operator,
        level=level,
        symbol=symbol,
        code=after,
        changed=changed,
        removed=closed.removed,
        traces=closed.traces,
        gap=(line, line),
        marker=symbol.short,
        targets=targets or (symbol,),
        absent=absent,
    )


def repair(code: Codebase, deletion: Deletion, path: str, line: int, max_cascade: int = 4) -> Deletion:
    """The deletion with one more module-level statement gone, which failed when it was imported.

    `code` is the code base before the deletion; `line` counts in the text after it.

    Raises:
        CascadeError: nothing to drop there, or too much has gone by now.
    """
    if path not in deletion.code.modules:
        raise CascadeError(f"{path} cannot be repaired")
    dropped, bound = drop_statement(deletion.code, path, line)
    if dropped.texts[path] == deletion.code.texts[path]:
        raise CascadeError(f"nothing at {path}:{line} can be dropped")
    text = syntax.lines(deletion.code.texts[path])[line - 1].strip()
    again = removal(
        deletion.operator,
        deletion.level,
        code,
        deletion.symbol,
        deletion.removed | bound,
        max_cascade,
        started=dropped.replaced(deletion.absent),
        targets=deletion.targets,
    )
    traces = (*deletion.traces, Trace(path, text, "statement"), *again.traces)
    return replace(again, traces=traces, marker=deletion.marker)


def gap_line(before: str, after: str, line: int) -> int:
    """The line of `after` where a deleted line of `before` stood: that of the statement that followed it."""
    old, new = syntax.plain(before).split("\n"), syntax.plain(after).split("\n")
    blocks = SequenceMatcher(None, old, new, autojunk=False).get_opcodes()
    index = min(next((j1 for _, i1, i2, j1, _ in blocks if i1 < line <= i2)), len(new) - 1)
    follower = next((i for i in range(index, len(new)) if new[i].strip()), index)
    indent = len(old[line - 1]) - len(old[line - 1].lstrip())
    deep_enough = len(new[follower]) - len(new[follower].lstrip()) >= indent
    return (follower if deep_enough else index) + 1


def remove_interfaces(interfaces: Codebase, deletion: Deletion) -> Deletion:
    """The deletion with the same names gone from the .pyi files beside the changed modules."""
    bindings = {(f"{path}i", name) for path, name in deletion.removed if f"{path}i" in interfaces.texts}
    closed = close(interfaces, bindings)
    files = {path for path, name in bindings if name == WHOLE_MODULE}
    changed = {path: text for path, text in closed.code.texts.items() if text != interfaces.texts[path]}
    return replace(deletion, changed={**deletion.changed, **changed, **dict.fromkeys(files)})
