"""Deletion operators: what is taken away from a working code base, and where the gap is.

An operator is a function (code, symbol, max_cascade) -> Deletion that raises CascadeError where it cannot work; it is
pure, and what it does not touch stays byte for byte. `OPERATORS` names them all. `combine` puts several together.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from woodshed.synthesis.closure import Trace
from woodshed.synthesis.names import Codebase
from woodshed.synthesis.operators.bodies import gut_class, remove_helpers, stub, stub_bare
from woodshed.synthesis.operators.deletion import (
    CascadeError,
    Deletion,
    Symbol,
    every_symbol,
    gap_line,
    is_public,
    remove_interfaces,
    repair,
    symbols,
)
from woodshed.synthesis.operators.parts import bug, remove_branch, remove_parameter, unregister
from woodshed.synthesis.operators.removals import (
    remove,
    remove_class,
    remove_cluster,
    remove_command,
    remove_module,
    remove_package,
)

Operator = Callable[[Codebase, Symbol, int], Deletion]


def combine(code: Codebase, symbol: Symbol, max_cascade: int = 8) -> Deletion:
    """Several deletions, one after the other; each of `symbol.parts` says in `detail` who takes it: "remove", "bug 3".

    Raises:
        CascadeError: one of them cannot work, or two of them are in one file.
    """
    if len({part.path for part in symbol.parts}) < len(symbol.parts):
        raise CascadeError("the parts of a combination lie in different files")
    deletions: list[Deletion] = []
    current = code
    for part in symbol.parts:
        operator, _, detail = part.detail.partition(" ")
        deletions.append(OPERATORS[operator](current, replace(part, detail=detail), max_cascade))
        current = deletions[-1].code
    first = deletions[0]
    traces: tuple[Trace, ...] = tuple(trace for deletion in deletions for trace in deletion.traces)
    return Deletion(
        operator="combine",
        level=5,
        symbol=symbol,
        code=current,
        changed={path: text for deletion in deletions for path, text in deletion.changed.items()},
        removed=frozenset().union(*(deletion.removed for deletion in deletions)),
        traces=traces,
        gap=first.gap,
        marker=first.marker,
        targets=tuple(target for deletion in deletions for target in deletion.targets),
        absent={path: text for deletion in deletions for path, text in deletion.absent.items()},
    )


OPERATORS: dict[str, Operator] = {
    "remove_branch": remove_branch,
    "bug": bug,
    "unregister": unregister,
    "stub": stub,
    "stub_bare": stub_bare,
    "remove": remove,
    "remove_parameter": remove_parameter,
    "remove_class": remove_class,
    "remove_cluster": remove_cluster,
    "remove_helpers": remove_helpers,
    "gut_class": gut_class,
    "remove_command": remove_command,
    "remove_module": remove_module,
    "combine": combine,
    "remove_package": remove_package,
}
"""Name to operator, in the order of their levels."""
LEVELS = dict(
    remove_branch=0,
    bug=0,
    unregister=1,
    stub=1,
    stub_bare=1,
    remove=2,
    remove_parameter=2,
    remove_class=3,
    remove_cluster=3,
    remove_helpers=3,
    gut_class=3,
    remove_command=4,
    remove_module=4,
    combine=5,
    remove_package=6,
)
"""0 one branch, 1 a stub, 2 a removed function, 3 a class or cluster, 4 a module or command, 5 several, 6 a package."""

__all__ = [
    "LEVELS",
    "OPERATORS",
    "CascadeError",
    "Deletion",
    "Operator",
    "Symbol",
    "combine",
    "every_symbol",
    "gap_line",
    "is_public",
    "remove",
    "remove_interfaces",
    "repair",
    "stub",
    "symbols",
]
