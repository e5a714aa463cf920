"""Operators that take a part out of something that stays: a registration, a parameter, a branch, or its being right."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from woodshed.pysource import syntax
from woodshed.pysource.edits import Edit, Source, apply, remove_items, remove_statement
from woodshed.synthesis.closure import Trace
from woodshed.synthesis.mutations import mutants
from woodshed.synthesis.names import Codebase, dotted_parts
from woodshed.synthesis.operators.deletion import CascadeError, Deletion, Symbol, find_function

ORDINARY = {
    "property",
    "staticmethod",
    "classmethod",
    "overload",
    "abstractmethod",
    "wraps",
    "setter",
    "getter",
    "deleter",
    "override",
    "final",
    "command",
    "group",
}
"""Decorators that say what a definition is; taking them away is not taking a feature away."""


def _edited(
    operator: str,
    level: int,
    code: Codebase,
    symbol: Symbol,
    edits: Iterable[Edit],
    marker: str,
    traces: tuple[Trace, ...] = (),
    targets: tuple[Symbol, ...] = (),
) -> Deletion:
    """A deletion that is a few edits in one file."""
    source, edits = code.modules[symbol.path].source, sorted(edits)
    if not edits:
        raise CascadeError(f"nothing to take out of {symbol.name}")
    text = apply(source.text, edits)
    gap = min(source.line(edits[0].start), len(syntax.lines(text)))
    changed = {symbol.path: text}
    return Deletion(
        operator=operator,
        level=level,
        symbol=symbol,
        code=code.replaced(changed),
        changed=changed,
        removed=frozenset(),
        traces=traces,
        gap=(gap, gap),
        marker=marker,
        targets=targets,
    )


# ---- O5: registrations ------------------------------------------------------------------------------------


def unregister(code: Codebase, symbol: Symbol, max_cascade: int = 0) -> Deletion:
    """O5: a decorator, an entry of a dispatch table, or a call that registers something goes; `detail` says which."""
    source = code.modules[symbol.path].source
    for name, text, edits in registrations(source):
        if (name, text) == (symbol.name, symbol.detail):
            key = re.sub(r"\W+", " ", text).split()
            kind = "decorator" if text.startswith("@") else name
            trace = Trace(symbol.path, text, kind)
            return _edited("unregister", 1, code, symbol, edits, key[0] if key else name, (trace,))
    raise CascadeError(f"{symbol.detail!r} of {symbol.name} is not there")


def registrations(source: Source) -> Iterator[tuple[str, str, list[Edit]]]:
    """Name of what is registered (or of the table), source text of the registration, and the edits that undo it."""
    yield from _decorators(source, source.tree.body, "")
    for node in source.tree.body:
        match node:
            case ast.Assign(targets=[ast.Name(id=name)], value=ast.Dict() as table):
                yield from _entries(source, name, table)
            case ast.AnnAssign(target=ast.Name(id=name), value=ast.Dict() as table):
                yield from _entries(source, name, table)
            case ast.Expr(value=ast.Call(func=function, args=[*_, ast.Name(id=name)])):
                if "register" in (dotted_parts(function) or [""])[-1]:
                    text = source.segment(node)
                    yield name, text, [remove_statement(source, node, source.tree.body)]


def _decorators(source: Source, body: list[ast.stmt], scope: str) -> Iterator[tuple[str, str, list[Edit]]]:
    for node in body:
        if isinstance(node, ast.ClassDef):
            yield from _decorators(source, node.body, f"{scope}{node.name}.")
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            for decorator in node.decorator_list:
                call = decorator.func if isinstance(decorator, ast.Call) else decorator
                if (dotted_parts(call) or ["property"])[-1] not in ORDINARY:
                    start, end = source.span(decorator)
                    edit = Edit(source.line_start(start), source.line_end(end))
                    yield scope + node.name, "@" + source.text[start:end], [edit]


def _entries(source: Source, name: str, table: ast.Dict) -> Iterator[tuple[str, str, list[Edit]]]:
    if len(table.keys) < 3:
        return
    for index, (key, value) in enumerate(zip(table.keys, table.values, strict=True)):
        if not isinstance(key, ast.Constant) or not isinstance(key.value, str | int):
            continue
        if isinstance(value, ast.Name | ast.Attribute | ast.Call | ast.Lambda | ast.Tuple):
            yield name, source.segment(key), remove_items(source, table, {index})


# ---- O9: branches -----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Branch:
    """One way through a function that can be taken out."""

    condition: str
    body: tuple[int, int]
    """First and last line of what it does."""
    edit: Edit


def remove_branch(code: Codebase, symbol: Symbol, max_cascade: int = 0) -> Deletion:
    """O9: remove one branch of an `if` or `match`, or one exception handler; `detail` is its number in `branches`."""
    source = code.modules[symbol.path].source
    all_branches = branches(source, find_function(source, symbol.name))
    if not symbol.detail.isdigit() or int(symbol.detail) >= len(all_branches):
        raise CascadeError(f"{symbol.name} has no branch {symbol.detail!r}")
    branch = all_branches[int(symbol.detail)]
    trace = Trace(symbol.path, branch.condition, "branch")
    return _edited("remove_branch", 0, code, symbol, [branch.edit], symbol.short, (trace,), (symbol,))


def branches(source: Source, function: ast.FunctionDef | ast.AsyncFunctionDef) -> list[Branch]:
    """Branches in source order; those that cannot be removed without moving other code are left out."""
    listed: list[Branch] = []
    for node in ast.walk(function):
        for name in ("body", "orelse", "finalbody"):
            block = getattr(node, name, [])
            for child in block if isinstance(block, list) else []:
                if isinstance(child, ast.If):
                    listed += _branches_of(source, child, block)
        if isinstance(node, ast.Try) and len(node.handlers) > 1:
            listed += [_handler(source, handler) for handler in node.handlers]
        if isinstance(node, ast.Match) and len(node.cases) > 1:
            listed += [_case(source, case) for case in node.cases]
    return sorted(listed, key=lambda branch: branch.edit)


def _branches_of(source: Source, node: ast.If, block: list[ast.stmt]) -> Iterator[Branch]:
    (start, end), text = source.span(node), source.text
    body = (source.line(source.span(node.body[0])[0]), source.line(source.span(node.body[-1])[1]))
    condition, is_elif = source.segment(node.test), text.startswith("elif", start)
    if source.line(start) == body[0]:  # on one line with its body
        return
    if not node.orelse:
        if is_elif:
            yield Branch(condition, body, Edit(source.line_start(start), source.line_end(end)))
        elif len(block) > 1:
            yield Branch(condition, body, remove_statement(source, node, block))
        return
    other = source.span(node.orelse[0])[0]
    if len(node.orelse) == 1 and text.startswith("elif", other):
        yield Branch(condition, body, Edit(start, other if is_elif else other + 2))
    elif is_elif:
        after = source.line_end(source.span(node.body[-1])[1])
        if (word := re.compile(r"[ \t]*else\b").search(text, after, other)) is not None:
            yield Branch(condition, body, Edit(source.line_start(start), word.start()))


def _handler(source: Source, handler: ast.ExceptHandler) -> Branch:
    start = source.offset(handler.lineno, handler.col_offset)
    end = source.span(handler.body[-1])[1]
    condition = "except " + (source.segment(handler.type) if handler.type else "everything")
    edit = Edit(source.line_start(start), source.line_end(end))
    return Branch(condition, (source.line(source.span(handler.body[0])[0]), source.line(end)), edit)


def _case(source: Source, case: ast.match_case) -> Branch:
    start = source.offset(case.pattern.lineno, case.pattern.col_offset)
    end = source.span(case.body[-1])[1]
    edit = Edit(source.line_start(start), source.line_end(end))
    body = (source.line(source.span(case.body[0])[0]), source.line(end))
    return Branch("case " + ast.unparse(case.pattern), body, edit)


# ---- bugs -------------------------------------------------------------------------------------------------


def bug(code: Codebase, symbol: Symbol, max_cascade: int = 0) -> Deletion:
    """One mutant of a function replaces it; `detail` is its number among `mutations.mutants`."""
    source = code.modules[symbol.path].source
    all_mutants = mutants(source, find_function(source, symbol.name))
    if not symbol.detail.isdigit() or int(symbol.detail) >= len(all_mutants):
        raise CascadeError(f"{symbol.name} has no mutant {symbol.detail!r}")
    return _edited(
        "bug", 0, code, symbol, [all_mutants[int(symbol.detail)].edit], symbol.short, targets=(symbol,)
    )


# ---- O8: parameters ---------------------------------------------------------------------------------------


def remove_parameter(code: Codebase, symbol: Symbol, max_cascade: int = 0) -> Deletion:
    """O8: an optional parameter (`detail`) goes with its branches: the function does what it did by default."""
    source = code.modules[symbol.path].source
    function = find_function(source, symbol.name)
    removable = optional_parameters(source, function)
    if symbol.detail not in removable:
        raise CascadeError(f"{symbol.name} has no parameter {symbol.detail!r} that can go")
    default = removable[symbol.detail]
    edits = [
        _parameter_edit(source, function, symbol.detail),
        *_docstring_edits(source, function, symbol.detail),
        *(edit for statement in function.body for edit in _fold(source, statement, symbol.detail, default)),
    ]
    trace = Trace(symbol.path, f"{symbol.detail}={source.segment(default)}", "parameter")
    return _edited("remove_parameter", 2, code, symbol, edits, symbol.detail, (trace,), (symbol,))


def optional_parameters(
    source: Source, function: ast.FunctionDef | ast.AsyncFunctionDef
) -> dict[str, ast.Constant]:
    """Parameters with a constant default that can go without moving others and that the body only reads."""
    arguments = function.args
    pairs = [(a, d) for a, d in zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True) if d]
    if arguments.vararg is None and len(arguments.kwonlyargs) == 1:
        pairs = []  # a bare '*' must have something after it
    if arguments.defaults and arguments.args and arguments.vararg is None:
        pairs.append((arguments.args[-1], arguments.defaults[-1]))
    inside = [node for statement in function.body for node in ast.walk(statement)]
    written = {n.id for n in inside if isinstance(n, ast.Name) and not isinstance(n.ctx, ast.Load)}
    written |= {argument.arg for n in inside if isinstance(n, ast.arguments) for argument in _every(n)}
    read = {n.id for n in inside if isinstance(n, ast.Name)}
    if read & {"locals", "vars"}:
        return {}
    return {
        a.arg: default
        for a, default in pairs
        if isinstance(default, ast.Constant) and a.arg in read - written
    }


def _every(arguments: ast.arguments) -> list[ast.arg]:
    return [*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs]


def _parameter_edit(source: Source, function: ast.FunctionDef | ast.AsyncFunctionDef, name: str) -> Edit:
    """Edit that takes `name[: annotation] = default` and one comma out of the signature."""
    arguments = function.args
    listed = [*arguments.posonlyargs, *arguments.args, *([arguments.vararg] if arguments.vararg else [])]
    listed += arguments.kwonlyargs
    index = next(i for i, a in enumerate(listed) if a.arg == name)
    argument, defaults = listed[index], dict(_defaults(arguments))
    start = source.offset(argument.lineno, argument.col_offset)
    end = source.span(defaults[name])[1]
    comma = re.compile(r"\s*,[ \t]*(#[^\r\n]*)?").match(source.text, end)
    if comma:
        line = source.line_start(start)
        ends = syntax.LINE_END.match(source.text, comma.end())
        if not source.text[line:start].strip() and ends:
            return Edit(line, ends.end())  # on lines of its own
        return Edit(start, comma.end())
    return Edit(source.text.rindex(",", 0, start) if index else start, end)


def _defaults(arguments: ast.arguments) -> Iterator[tuple[str, ast.expr]]:
    positional = [*arguments.posonlyargs, *arguments.args]
    count = len(arguments.defaults)
    yield from (
        (a.arg, d) for a, d in zip(positional[-count:] if count else [], arguments.defaults, strict=True)
    )
    yield from ((a.arg, d) for a, d in zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True) if d)


def _docstring_edits(
    source: Source, function: ast.FunctionDef | ast.AsyncFunctionDef, name: str
) -> Iterator[Edit]:
    """Lines of the docstring that describe the parameter, with the deeper lines below them."""
    if ast.get_docstring(function) is None:
        return
    start, end = source.span(function.body[0])
    opening = re.compile(rf"(:(param|type|keyword)[^:]*\b{name}:|\*?`*{name}`*\s*(\([^)]*\))?\s*:)")
    depth = -1
    for line in range(source.line(start) + 1, source.line(end)):
        first = source.offset(line, 0)
        text = source.text[first : source.line_end(first)]
        indent = len(text) - len(text.lstrip())
        if opening.match(text.strip()):
            depth = indent
        elif text.strip() and indent <= depth:
            depth = -1
        if depth >= 0 and text.strip():
            yield Edit(first, source.line_end(first))


def _fold(source: Source, node: ast.AST, name: str, default: ast.Constant) -> list[Edit]:
    """Edits that put the default in the parameter's place, and drop what then never runs."""
    match node:
        case ast.If(test=test) if (value := _decided(test, name, default.value)) is not None:
            if value is False and (edit := _drop_if(source, node)) is not None:
                return [edit] if not node.orelse else [edit, *_each(source, node.orelse, name, default)]
            if value is True and not node.orelse and (edits := _keep_body(source, node)) is not None:
                return [*edits, *_each(source, node.body, name, default)]
        case ast.IfExp(test=test) if (value := _decided(test, name, default.value)) is not None:
            chosen = node.body if value else node.orelse
            (start, end), (first, last) = source.span(node), source.span(chosen)
            return [Edit(start, first), *_fold(source, chosen, name, default), Edit(last, end)]
        case ast.Name(id=used) if used == name:
            return [Edit(*source.span(node), repr(default.value))]
    return _each(source, ast.iter_child_nodes(node), name, default)


def _each(source: Source, nodes: Iterable[ast.AST], name: str, default: ast.Constant) -> list[Edit]:
    return [edit for node in nodes for edit in _fold(source, node, name, default)]


def _decided(test: ast.expr, name: str, value: object) -> bool | None:
    """Value of a condition when the parameter has its default; None if that does not decide it."""
    match test:
        case ast.Name(id=used) if used == name:
            return bool(value)
        case ast.UnaryOp(op=ast.Not(), operand=operand):
            inner = _decided(operand, name, value)
            return None if inner is None else not inner
        case ast.Compare(left=ast.Name(id=used), ops=[operator], comparators=[ast.Constant(value=other)]):
            if used == name and isinstance(operator, ast.Is | ast.Eq):
                return value is other if isinstance(operator, ast.Is) else value == other
            if used == name and isinstance(operator, ast.IsNot | ast.NotEq):
                return value is not other if isinstance(operator, ast.IsNot) else value != other
        case ast.BoolOp(op=operator, values=values):
            stops = isinstance(operator, ast.Or)
            inner = [_decided(v, name, value) for v in values]
            if stops in inner:
                return stops
            return None if None in inner else not stops
    return None


def _drop_if(source: Source, node: ast.If) -> Edit | None:
    """The edit that removes a branch that never runs; None if other code would have to move."""
    start, end = source.span(node)
    is_elif = source.text.startswith("elif", start)
    if not node.orelse:
        head, tail = source.line_start(start), source.line_end(end)
        if is_elif:
            return Edit(head, tail)
        return Edit(start, end, "pass")
    other = source.span(node.orelse[0])[0]
    if len(node.orelse) == 1 and source.text.startswith("elif", other):
        return Edit(start, other if is_elif else other + 2)
    return None


def _keep_body(source: Source, node: ast.If) -> list[Edit] | None:
    """Edits that leave only the body of an `if` that always runs; None where it cannot be moved to the left."""
    start, end = source.span(node)
    first = source.span(node.body[0])[0]
    depth = (first - source.line_start(first)) - (start - source.line_start(start))
    lines = range(source.line(first), source.line(end) + 1)
    inside = [n for s in node.body for n in ast.walk(s) if isinstance(n, ast.Constant | ast.JoinedStr)]
    if source.text.startswith("elif", start) or source.line(first) == source.line(start):
        return None
    if any((n.end_lineno or 0) > n.lineno for n in inside):
        return None
    edits = [Edit(source.line_start(start), source.line_start(first))]
    for line in lines:
        begin = source.offset(line, 0)
        if source.text[begin : source.line_end(begin)].strip():
            edits.append(Edit(begin, begin + depth))
    return edits
