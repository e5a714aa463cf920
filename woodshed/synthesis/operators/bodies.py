"""Operators that keep the outside and take the inside: bodies become one line that raises."""

from __future__ import annotations

import ast
from dataclasses import replace

from woodshed.pysource import syntax
from woodshed.pysource.edits import Edit, Source, apply, body_end
from woodshed.synthesis.names import Codebase, definitions
from woodshed.synthesis.operators.deletion import (
    CascadeError,
    Deletion,
    Function,
    Symbol,
    code_body,
    find,
    find_function,
    is_declaration,
    removal,
)


def stub(code: Codebase, symbol: Symbol, max_cascade: int = 0) -> Deletion:
    """O1: a body becomes one line `raise NotImplementedError("<name>")` that occurs once in the file."""
    return _stubbed("stub", code, symbol, keep_docstring=True)


def stub_bare(code: Codebase, symbol: Symbol, max_cascade: int = 0) -> Deletion:
    """O2: like `stub`, and the docstring goes as well."""
    if not symbol.docstring:
        raise CascadeError(f"{symbol.name} has no docstring")
    return _stubbed("stub_bare", code, symbol, keep_docstring=False)


def _stubbed(operator: str, code: Codebase, symbol: Symbol, *, keep_docstring: bool) -> Deletion:
    source = code.modules[symbol.path].source
    edit = body_edit(source, find_function(source, symbol.name), symbol.name, keep_docstring=keep_docstring)
    line = _raises(symbol.name)
    text = apply(source.text, [edit])
    if text.count(line) != 1:
        raise CascadeError(f"{symbol.path} already raises {line!r}")
    gap = syntax.line_at(text, text.index(line))
    changed = {symbol.path: text}
    return Deletion(
        operator=operator,
        level=1,
        symbol=symbol,
        code=code.replaced(changed),
        changed=changed,
        removed=frozenset(),
        traces=(),
        gap=(gap, gap),
        marker=symbol.name,
        targets=(symbol,),
    )


def _raises(name: str) -> str:
    return f'raise NotImplementedError("{name}")'


def body_edit(
    source: Source, function: Function, name: str, *, keep_docstring: bool = True, line: str = ""
) -> Edit:
    """The edit that makes a body one line: `line`, else the one that raises."""
    body = code_body(function) if keep_docstring else function.body
    line = line or _raises(name)
    start, (_, end) = source.span(body[0])[0], source.span(function)
    if source.text[source.line_start(start) : start].strip():
        return Edit(start, end, line)
    bare = body[0] is function.body[0]
    previous = _colon(source, function) if bare else source.span(function.body[0])[1]
    indent = source.text[source.line_start(start) : start]
    return Edit(
        source.line_end(previous), body_end(source, function), f"{indent}{line}{syntax.line_end(source.text)}"
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


def gut_class(code: Codebase, symbol: Symbol, max_cascade: int = 0) -> Deletion:
    """O11: a class keeps its signatures, attributes and docstrings; the methods' bodies go. `__init__` stays."""
    source = code.modules[symbol.path].source
    node = find(source, symbol.name)
    if not isinstance(node, ast.ClassDef):
        raise CascadeError(f"{symbol.name} is not a class")
    methods = [
        (name, method)
        for name, method in definitions(node.body, f"{symbol.name}.")
        if isinstance(method, Function) and not is_declaration(method) and not _builds(name)
    ]
    if len(methods) < 2:
        raise CascadeError(f"{symbol.name} has fewer than two methods with a body")
    edits = [body_edit(source, method, name) for name, method in methods]
    text = apply(source.text, edits)
    gap = syntax.line_at(text, text.index(_raises(methods[0][0])))
    last = syntax.line_at(text, text.index(_raises(methods[-1][0])))
    changed = {symbol.path: text}
    return Deletion(
        operator="gut_class",
        level=3,
        symbol=symbol,
        code=code.replaced(changed),
        changed=changed,
        removed=frozenset(),
        traces=(),
        gap=(gap, last),
        marker=f"{symbol.name}.",
        targets=(symbol,),
    )


def _builds(name: str) -> bool:
    return name.rpartition(".")[2] in ("__init__", "__new__", "__init_subclass__")


def remove_helpers(code: Codebase, symbol: Symbol, max_cascade: int = 4) -> Deletion:
    """O10: a public function becomes a stub, and the private helpers that only it uses are removed."""
    if not symbol.parts:
        raise CascadeError(f"{symbol.name} has no helpers of its own")
    stubbed = stub(code, symbol)
    helpers = [part.binding for part in symbol.parts]
    closed = removal("remove_helpers", 3, code, symbol, helpers, max_cascade, started=stubbed.code)
    text = closed.changed[symbol.path] or ""
    gap = syntax.line_at(text, text.index(_raises(symbol.name)))
    return replace(closed, gap=(gap, gap), marker=symbol.name, targets=(symbol, *symbol.parts))
