"""Python by its syntax tree: what a piece of code calls, imports, assigns and compares, by full dotted names.

`from os import _exit as leave; leave(0)`, `getattr(os, "_exit")(0)` and `__import__("os")._exit(0)` all call
`os._exit`. For a patch only what is new counts: changed lines are found first, and only the top-level statements
around them are parsed, so that a one-line patch to a file of 2,000 lines costs microseconds.
"""

from __future__ import annotations

import ast
import difflib
import functools
import warnings
from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

Function = ast.FunctionDef | ast.AsyncFunctionDef


@dataclass(frozen=True)
class Place:
    """A node and where it stands."""

    node: ast.AST
    line: int
    """1-based, in the new file."""
    scope: tuple[str, ...]
    """Names of the classes and functions around it, outermost first."""
    function: Function | None
    """The innermost function around it."""
    guarded: bool
    """Below `if __name__ == "__main__"`."""


@dataclass
class Scan:
    """What is new in a piece of code, by kind."""

    calls: list[tuple[str, Place]] = field(default_factory=list)
    """Dotted name of what is called; "" where it has none."""
    names: list[tuple[str, Place]] = field(default_factory=list)
    """Every dotted name that is read, called or not."""
    imports: list[tuple[str, Place]] = field(default_factory=list)
    """Full name of what is imported: "os._exit"."""
    assigned: list[tuple[str, Place]] = field(default_factory=list)
    """Dotted name of every attribute that is assigned or deleted, and what setattr sets."""
    strings: list[tuple[str, Place]] = field(default_factory=list)
    functions: list[Place] = field(default_factory=list)
    """Definitions with any new line in them."""
    handlers: list[Place] = field(default_factory=list)
    others: list[Place] = field(default_factory=list)
    """Compares, returns, loops, dictionaries, raises: what single rules look into."""
    aliases: Mapping[str, str] = field(default_factory=dict)
    """Name in this file to what it was imported as."""
    broken: bool = False
    """It does not parse."""


def parse(text: str) -> ast.Module | None:
    """The tree, or None where the text is no Python."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # invalid escapes are the author's taste
        try:
            return ast.parse(text)
        except (SyntaxError, ValueError, RecursionError, MemoryError):
            return None


@functools.lru_cache(maxsize=2048)
def scan(text: str) -> Scan:
    """A whole piece of code, all of it new: a script, or what follows `python -c`."""
    tree = parse(text)
    if tree is None:
        return Scan(broken=True)
    found = Scan(aliases=_aliases(tree, {}))
    _walk(tree, found, None, 0)
    return found


def scan_change(before: str, after: str) -> Scan:
    """What is new in `after`."""
    old, new = before.split("\n"), after.split("\n")
    start, end = common_ends(old, new)
    known = _outline(before)
    lines = _new_lines(old, new, start, end)
    first, last = known.around(start, len(old) - end)
    shift = len(new) - len(old)
    tree = parse("\n".join(new[first : last + shift])) if known.starts else None
    if tree is None:  # the cut does not hold, or there is nothing to cut at
        first, tree = 0, parse(after)
    if tree is None:
        return Scan(broken=True)
    found = Scan(aliases=_aliases(tree, known.aliases))
    _walk(tree, found, frozenset(line - first for line in lines), first)
    return found


@dataclass(frozen=True)
class _Outline:
    """Where the top-level statements of a file start, 0-based, and what it imports."""

    starts: tuple[int, ...]
    aliases: Mapping[str, str]

    def around(self, start: int, end: int) -> tuple[int, int]:
        """Lines [first, last) of whole statements that hold the old lines [start, end).

        Both ends begin a statement in the unchanged part of the file, so a cut there reads as the whole does.
        """
        at = bisect_right(self.starts, start - 1) - 1
        first = self.starts[at] if at >= 0 else 0
        after = next((s for s in self.starts if s >= end), None)
        return first, 10**9 if after is None else after


@functools.lru_cache(maxsize=512)
def _outline(text: str) -> _Outline:
    tree = parse(text)
    if tree is None:
        return _Outline((), {})
    starts = []
    for node in tree.body:
        decorators = getattr(node, "decorator_list", [])
        starts.append(min(n.lineno for n in (node, *decorators)) - 1)
    return _Outline(tuple(dict.fromkeys(starts)), _aliases(tree, {}))


def changed_lines(before: str, after: str) -> list[str]:
    """Lines of `after` that are new, in order."""
    old, new = before.split("\n"), after.split("\n")
    return [new[line - 1] for line in sorted(_new_lines(old, new, *common_ends(old, new)))]


def common_ends(old: Sequence[str], new: Sequence[str]) -> tuple[int, int]:
    """How many lines both share at the start, and at the end."""
    limit = min(len(old), len(new))
    start = next((i for i in range(limit) if old[i] != new[i]), limit)
    rest = limit - start
    end = next((i for i in range(rest) if old[-1 - i] != new[-1 - i]), rest)
    return start, end


def _new_lines(old: Sequence[str], new: Sequence[str], start: int, end: int) -> set[int]:
    """1-based lines of `new` that are not in `old`."""
    middle_old, middle_new = old[start : len(old) - end], new[start : len(new) - end]
    if len(middle_old) * len(middle_new) > 250_000:
        known = set(middle_old)
        return {start + i + 1 for i, line in enumerate(middle_new) if line not in known}
    matcher = difflib.SequenceMatcher(None, middle_old, middle_new, autojunk=False)
    return {
        start + i + 1
        for kind, _, _, low, high in matcher.get_opcodes()
        if kind in ("insert", "replace")
        for i in range(low, high)
    }


def _aliases(tree: ast.Module, known: Mapping[str, str]) -> dict[str, str]:
    found = dict(known)
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                name = alias.asname or alias.name.partition(".")[0]
                found[name] = alias.name if alias.asname else name
        elif isinstance(node, ast.ImportFrom):
            origin = "." * node.level + (node.module or "")
            for alias in node.names:
                found[alias.asname or alias.name] = f"{origin}.{alias.name}" if origin else alias.name
    return found


def dotted(node: ast.AST, aliases: Mapping[str, str]) -> str:
    """Full name of an expression: "os._exit"; "" where it has none."""
    if isinstance(node, ast.Name):
        return aliases.get(node.id, node.id)
    if isinstance(node, ast.Attribute):
        owner = dotted(node.value, aliases)
        return f"{owner}.{node.attr}" if owner else ""
    if isinstance(node, ast.Call) and node.args:
        called, last = dotted(node.func, aliases), node.args[-1]
        constant = last.value if isinstance(last, ast.Constant) and isinstance(last.value, str) else ""
        if called in ("__import__", "importlib.import_module", "builtins.__import__"):
            first = node.args[0]
            return str(first.value) if isinstance(first, ast.Constant) else ""
        if called == "getattr" and len(node.args) == 2 and constant:
            owner = dotted(node.args[0], aliases)
            return f"{owner}.{constant}" if owner else ""
    if isinstance(node, ast.Subscript) and isinstance(node.slice, ast.Constant):
        owner = dotted(node.value, aliases)
        if owner == "sys.modules":
            return str(node.slice.value)
        if owner.endswith(".__dict__"):
            return f"{owner.removesuffix('.__dict__')}.{node.slice.value}"
    return ""


_OTHERS = (ast.Compare, ast.Return, ast.While, ast.For, ast.Dict, ast.Raise, ast.BinOp, ast.If, ast.Match)


def _walk(tree: ast.Module, found: Scan, lines: frozenset[int] | None, shift: int) -> None:
    """Fill a scan with the nodes on the given lines (None: all), in the order of the text."""
    stack: list[tuple[ast.AST, tuple[str, ...], Function | None, bool]] = [(tree, (), None, False)]
    while stack:
        node, scope, function, guarded = stack.pop()
        line = getattr(node, "lineno", 0)
        is_definition = isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef)
        if line:
            end = (getattr(node, "end_lineno", line) or line) if is_definition else line
            if lines is None or any(n in lines for n in range(line, end + 1)):
                _note(Place(node, line + shift, scope, function, guarded), found)
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            scope = (*scope, node.name)
            function = function if isinstance(node, ast.ClassDef) else node
        guarded = guarded or (isinstance(node, ast.If) and not scope and "__main__" in ast.dump(node.test))
        stack.extend((child, scope, function, guarded) for child in reversed(list(ast.iter_child_nodes(node))))


def _note(place: Place, found: Scan) -> None:
    node, aliases = place.node, found.aliases
    if isinstance(node, ast.Call):
        name = dotted(node.func, aliases)
        found.calls.append((name, place))
        if name == "setattr" and len(node.args) == 3 and isinstance(node.args[1], ast.Constant):
            found.assigned.append((f"{dotted(node.args[0], aliases)}.{node.args[1].value}", place))
    elif isinstance(node, ast.Attribute):
        if name := dotted(node, aliases):
            (found.names if isinstance(node.ctx, ast.Load) else found.assigned).append((name, place))
    elif isinstance(node, ast.Subscript):
        if name := dotted(node, aliases):
            (found.names if isinstance(node.ctx, ast.Load) else found.assigned).append((name, place))
    elif isinstance(node, ast.Name) and node.id in aliases:
        found.names.append((aliases[node.id], place))
    elif isinstance(node, ast.Constant):
        if isinstance(node.value, str):
            found.strings.append((node.value, place))
    elif isinstance(node, ast.Import | ast.ImportFrom):
        found.imports += [(name, place) for name in _imported(node)]
    elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
        found.functions.append(place)
    elif isinstance(node, ast.ExceptHandler):
        found.handlers.append(place)
    elif isinstance(node, _OTHERS):
        found.others.append(place)


def _imported(node: ast.Import | ast.ImportFrom) -> Iterator[str]:
    for alias in node.names:
        if isinstance(node, ast.Import):
            yield alias.name
        else:
            origin = "." * node.level + (node.module or "")
            yield f"{origin}.{alias.name}" if origin.strip(".") else f"{origin}{alias.name}"


def api(text: str) -> dict[str, tuple[str, ...]] | None:
    """Public functions and methods by dotted name, with the names of their parameters; None: no Python."""
    tree = parse(text)
    return None if tree is None else dict(_api(tree.body, ""))


def _api(body: Sequence[ast.stmt], owner: str) -> Iterator[tuple[str, tuple[str, ...]]]:
    for node in body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and not node.name.startswith("_"):
            spec = node.args
            listed = (*spec.posonlyargs, *spec.args, spec.vararg, *spec.kwonlyargs, spec.kwarg)
            yield f"{owner}{node.name}", tuple(a.arg for a in listed if a is not None)
        elif isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
            yield f"{owner}{node.name}", ()
            yield from _api(node.body, f"{owner}{node.name}.")
        elif isinstance(node, ast.If | ast.Try):
            yield from _api([*node.body, *node.orelse], owner)
