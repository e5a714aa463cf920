"""Deletion operators: what is taken away from a working code base, and where the gap is.

`stub` keeps the signature and docstring of one function and replaces its body by a single line that raises; `remove`
deletes the function with its reference closure. Both are text edits; what they do not touch stays byte for byte.
"""

from __future__ import annotations

import ast
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from difflib import SequenceMatcher

from woodshed.records import TaskError
from woodshed.synthesis.closure import Trace, close, drop_statement
from woodshed.synthesis.edits import Edit, Source, apply, body_end
from woodshed.synthesis.names import Binding, Codebase, dotted_parts

Function = ast.FunctionDef | ast.AsyncFunctionDef


@dataclass(frozen=True)
class Symbol:
    """A function or method that could be taken away."""

    path: str
    name: str
    """Dotted inside its file: "groupby", "LRU.get"."""
    module: str
    """Import name of its file."""
    header: str
    """Decorators and signature as written, without indentation."""
    docstring: str
    body_lines: int
    """Lines of the body that hold code, docstring left out."""
    lines: tuple[int, int]
    """First line (decorators included) and last line."""

    @property
    def short(self) -> str:
        return self.name.rpartition(".")[2]


@dataclass(frozen=True)
class Deletion:
    """A code base with something missing."""

    operator: str
    level: int
    symbol: Symbol
    code: Codebase
    """After the deletion."""
    changed: Mapping[str, str]
    """New text of every file that differs."""
    removed: frozenset[Binding]
    """Bindings that no longer exist; empty for a stub."""
    traces: tuple[Trace, ...]
    """What went besides the target."""
    gap: tuple[int, int]
    """First and last line of the gap; for a removal the line that now stands there, twice."""
    marker: str
    """A word that failures caused by this deletion show: the removed name or the stub's message."""


class CascadeError(TaskError):
    """Too much depends on the symbol at import time."""


def symbols(code: Codebase) -> Iterator[Symbol]:
    """Public functions and methods that are defined once and do something, in file order."""
    for path, module in code.modules.items():
        definitions = list(_definitions(module.source.tree.body, ""))
        counts = Counter(name for name, function in definitions if not _is_declaration(function))
        for name, function in definitions:
            private = any(part.startswith("_") for part in name.split("."))
            if not private and counts[name] == 1 and not _is_declaration(function):
                yield _symbol(module.source, path, module.name, name, function)


def _definitions(body: list[ast.stmt], scope: str) -> Iterator[tuple[str, Function]]:
    for node in body:
        match node:
            case ast.FunctionDef() | ast.AsyncFunctionDef():
                yield scope + node.name, node
            case ast.ClassDef():
                yield from _definitions(node.body, f"{scope}{node.name}.")
            case ast.If() | ast.Try():
                for block in (node.body, node.orelse, *(h.body for h in getattr(node, "handlers", ()))):
                    yield from _definitions(block, scope)


def _symbol(source: Source, path: str, module: str, name: str, function: Function) -> Symbol:
    start, end = source.span(function)
    body = _code_body(function)
    first = source.span(function.body[0])[0]
    header = source.text[start:first].rstrip()
    indent = start - source.line_start(start)
    header = "\n".join(
        line[indent:] if i and not line[:indent].strip() else line
        for i, line in enumerate(header.split("\n"))
    )
    lines = source.text[source.span(body[0])[0] : end].split("\n")
    count = sum(1 for line in lines if line.strip() and not line.strip().startswith("#"))
    docstring = ast.get_docstring(function) or ""
    return Symbol(
        path,
        name,
        module,
        _without_comments(header),
        docstring,
        count,
        (source.line(start), source.line(end)),
    )


def _without_comments(header: str) -> str:
    """The signature's own lines; comments between it and the body are not part of it."""
    lines = header.split("\n")
    while lines and lines[-1].lstrip().startswith("#"):
        lines.pop()
    return "\n".join(lines).rstrip()


def _code_body(function: Function) -> list[ast.stmt]:
    """The body without its docstring (with it, where there is nothing else)."""
    has_docstring = ast.get_docstring(function, clean=False) is not None
    return function.body[1:] if has_docstring and len(function.body) > 1 else function.body


def _is_declaration(function: Function) -> bool:
    """Overloads, abstract methods and bodies that do nothing."""
    names = {(dotted_parts(d) or [""])[-1] for d in function.decorator_list}
    if names & {"overload", "abstractmethod", "setter", "deleter"}:
        return True
    for statement in _code_body(function):
        match statement:
            case ast.Pass() | ast.Expr(value=ast.Constant()):
                continue
            case ast.Raise(
                exc=ast.Name(id="NotImplementedError") | ast.Call(func=ast.Name(id="NotImplementedError"))
            ):
                continue
        return False
    return True


def _find(source: Source, name: str) -> Function:
    return [f for n, f in _definitions(source.tree.body, "") if n == name and not _is_declaration(f)][-1]


# ---- stub -------------------------------------------------------------------------------------------------


def stub(code: Codebase, symbol: Symbol, max_cascade: int = 0) -> Deletion:
    """Replaces a body by one line `raise NotImplementedError("<name>")` that occurs once in the file."""
    source = code.modules[symbol.path].source
    function = _find(source, symbol.name)
    body = _code_body(function)
    line = f'raise NotImplementedError("{symbol.name}")'
    start, (_, end) = source.span(body[0])[0], source.span(function)
    if not source.text[source.line_start(start) : start].strip():  # the body has lines of its own
        previous = (
            source.span(function.body[0])[1] if body[0] is not function.body[0] else _colon(source, function)
        )
        indent = source.text[source.line_start(start) : start]
        edit = Edit(source.line_end(previous), body_end(source, function), f"{indent}{line}\n")
    else:
        edit = Edit(start, end, line)
    text = apply(source.text, [edit])
    if text.count(line) != 1:
        raise CascadeError(f"{symbol.path} already raises {line!r}")
    gap = text.count("\n", 0, text.index(line)) + 1
    changed = {symbol.path: text}
    return Deletion(
        "stub", 1, symbol, code.replaced(changed), changed, frozenset(), (), (gap, gap), symbol.name
    )


def _colon(source: Source, function: Function) -> int:
    """Offset near the end of the line that ends the signature."""
    arguments = function.args
    after = [*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs, *arguments.defaults]
    after += [a for a in (arguments.vararg, arguments.kwarg, *arguments.kw_defaults, function.returns) if a]
    last = max(
        (source.offset(n.end_lineno or 0, n.end_col_offset or 0) for n in after),
        default=source.offset(function.lineno, 0),
    )
    return source.text.index(":", last)


# ---- remove -----------------------------------------------------------------------------------------------


def remove(code: Codebase, symbol: Symbol, max_cascade: int = 4) -> Deletion:
    """Deletes a function or method with its reference closure.

    Raises:
        CascadeError: more than `max_cascade` other definitions would have to go.
    """
    return _closed(code, code, symbol, {(symbol.path, symbol.name)}, max_cascade)


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
    before = deletion.code.texts[path]
    what = before.split("\n")[line - 1].strip()
    again = _closed(code, dropped, deletion.symbol, deletion.removed | bound, max_cascade)
    return replace(again, traces=(*deletion.traces, Trace(path, what, "statement"), *again.traces))


def _closed(
    original: Codebase,
    code: Codebase,
    symbol: Symbol,
    removed: set[Binding] | frozenset[Binding],
    max_cascade: int,
) -> Deletion:
    closed = close(code, removed)
    if len(closed.cascade) > max_cascade:
        raise CascadeError(
            f"{len(closed.cascade)} more definitions depend on it: {', '.join(closed.cascade[:6])}"
        )
    changed = {path: text for path, text in closed.code.texts.items() if text != original.texts[path]}
    line = _gap_line(original.texts[symbol.path], closed.code.texts[symbol.path], symbol.lines[0])
    return Deletion(
        "remove", 2, symbol, closed.code, changed, closed.removed, closed.traces, (line, line), symbol.short
    )


def _gap_line(before: str, after: str, line: int) -> int:
    """The line of `after` where a deleted line of `before` stood: that of the statement that followed it."""
    old, new = before.split("\n"), after.split("\n")
    blocks = SequenceMatcher(None, old, new).get_opcodes()
    at = min(next((j1 for _, i1, i2, j1, _ in blocks if i1 < line <= i2)), len(new) - 1)
    follower = next((i for i in range(at, len(new)) if new[i].strip()), at)
    indent = len(old[line - 1]) - len(old[line - 1].lstrip())
    deep_enough = len(new[follower]) - len(new[follower].lstrip()) >= indent
    return (follower if deep_enough else at) + 1


def remove_interfaces(interfaces: Codebase, deletion: Deletion) -> Deletion:
    """The deletion with the same names gone from the .pyi files beside the changed modules."""
    places = {(f"{path}i", name) for path, name in deletion.removed if f"{path}i" in interfaces.texts}
    closed = close(interfaces, places)
    changed = {path: text for path, text in closed.code.texts.items() if text != interfaces.texts[path]}
    return replace(deletion, changed={**deletion.changed, **changed})


OPERATORS: dict[str, Callable[..., Deletion]] = {"stub": stub, "remove": remove}
