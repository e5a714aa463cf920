"""Operators that remove definitions, with everything that needs them in order to import."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from woodshed.pysource.edits import Edit, Source, apply, remove_statement
from woodshed.synthesis.names import WHOLE_MODULE, Binding, Codebase, definitions, dotted_parts
from woodshed.synthesis.operators.deletion import (
    CascadeError,
    Deletion,
    Function,
    Symbol,
    every_symbol,
    is_public,
    removal,
)


def remove(code: Codebase, symbol: Symbol, max_cascade: int = 4) -> Deletion:
    """O3: a function or method goes.

    Raises:
        CascadeError: more than `max_cascade` other definitions would have to go.
    """
    return removal("remove", 2, code, symbol, {symbol.binding}, max_cascade)


def remove_class(code: Codebase, symbol: Symbol, max_cascade: int = 4) -> Deletion:
    """O4: a class goes."""
    return removal("remove_class", 3, code, symbol, {symbol.binding}, max_cascade)


def remove_cluster(code: Codebase, symbol: Symbol, max_cascade: int = 4) -> Deletion:
    """O3 on several symbols that the same tests cover."""
    bindings = {part.binding for part in symbol.parts}
    return removal("remove_cluster", 3, code, symbol, bindings, max_cascade, targets=symbol.parts)


def remove_module(code: Codebase, symbol: Symbol, max_cascade: int = 8) -> Deletion:
    """O7: a file goes, with what the package exports from it."""
    return _files_gone("remove_module", 4, code, symbol, [symbol.path], max_cascade)


def remove_package(code: Codebase, symbol: Symbol, max_cascade: int = 8) -> Deletion:
    """O7 on a sub-package: the folder goes with every module in it."""
    folder = symbol.path.rpartition("/")[0] + "/"
    paths = sorted(path for path in code.texts if path.startswith(folder))
    return _files_gone("remove_package", 6, code, symbol, paths, max_cascade)


def _files_gone(
    operator: str, level: int, code: Codebase, symbol: Symbol, paths: list[str], max_cascade: int
) -> Deletion:
    if any(path not in code.modules for path in paths):
        raise CascadeError(f"{paths} cannot all be read")
    bindings: set[Binding] = {(path, WHOLE_MODULE) for path in paths}
    targets = tuple(
        s for s in every_symbol(code) if s.path in paths and "." not in s.name and is_public(s.name)
    )
    for path in paths:
        bindings |= {(path, name) for name in top_names(code.modules[path].source)}
    return removal(operator, level, code, symbol, bindings, max_cascade, targets=targets)


def top_names(source: Source) -> set[str]:
    """Names that a module defines in its own statements."""
    names = {name for name, _ in definitions(source.tree.body) if "." not in name}
    for node in source.tree.body:
        targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
        names |= {name.id for t in targets if t for name in ast.walk(t) if isinstance(name, ast.Name)}
    return names


# ---- sub-commands -----------------------------------------------------------------------------------------


def remove_command(code: Codebase, symbol: Symbol, max_cascade: int = 4) -> Deletion:
    """O6: one sub-command of a command line, with its handler and the helpers that only it uses.

    argparse: the statements about the parser that `add_parser("<detail>")` made go from the function that builds it,
    which is in the handler's own file.
    click and typer: the command is the decorated function (`detail` is "").
    """
    edited = code
    if symbol.detail:
        source = code.modules[symbol.path].source
        text = apply(source.text, list(_parser_edits(source, symbol.detail)))
        edited = code.replaced({symbol.path: text})
    bindings = {symbol.binding, *(part.binding for part in symbol.parts)}
    targets = (symbol, *symbol.parts)
    return removal("remove_command", 4, code, symbol, bindings, max_cascade, started=edited, targets=targets)


def parsers(source: Source) -> Iterator[tuple[str, str, str]]:
    """argparse sub-commands that a module's functions add: name, variable of the parser, name of the handler."""
    for _, node in definitions(source.tree.body):
        if not isinstance(node, Function):
            continue
        for statement in node.body:
            if (added := _added(statement)) is not None:
                handlers = [h for s in node.body if (h := _handler(s, added[1]))]
                if len(handlers) == 1:
                    yield *added, handlers[0]


def _added(statement: ast.stmt) -> tuple[str, str] | None:
    """Command and variable of `variable = parsers.add_parser("command", ...)`."""
    match statement:
        case ast.Assign(
            targets=[ast.Name(id=variable)],
            value=ast.Call(func=ast.Attribute(attr="add_parser"), args=[ast.Constant(value=str(name)), *_]),
        ):
            return name, variable
    return None


def _handler(statement: ast.stmt, variable: str) -> str:
    """The function of `variable.set_defaults(func=function)`, else ""."""
    match statement:
        case ast.Expr(value=ast.Call(func=ast.Attribute(value=ast.Name(id=name), attr="set_defaults"))) if (
            name == variable
        ):
            assert isinstance(statement.value, ast.Call)
            handlers = [k.value.id for k in statement.value.keywords if isinstance(k.value, ast.Name)]
            return handlers[0] if len(handlers) == 1 else ""
    return ""


def _parser_edits(source: Source, command: str) -> Iterator[Edit]:
    for _, node in definitions(source.tree.body):
        if not isinstance(node, Function):
            continue
        variables = {a[1] for s in node.body if (a := _added(s)) and a[0] == command}
        for statement in node.body if variables else ():
            used = {n.id for n in ast.walk(statement) if isinstance(n, ast.Name)}
            if used & variables and isinstance(statement, ast.Assign | ast.Expr | ast.For):
                targets = statement.targets if isinstance(statement, ast.Assign) else []
                variables |= {
                    target.id for target in targets if isinstance(target, ast.Name)
                }  # its own sub-parsers
                yield remove_statement(source, statement, node.body)


def is_command(node: Function) -> bool:
    """True if a click or typer decorator makes a function a sub-command."""
    calls = [d.func if isinstance(d, ast.Call) else d for d in node.decorator_list]
    return any(
        isinstance(call, ast.Attribute) and call.attr == "command" and dotted_parts(call) is not None
        for call in calls
    )
