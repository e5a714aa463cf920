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
from bisect import bisect_left
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from woodshed.pysource import syntax

Function = ast.FunctionDef | ast.AsyncFunctionDef


@dataclass(frozen=True)
class NewNode:
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
    """New names and constants in a piece of code, by kind."""

    calls: list[tuple[str, NewNode]] = field(default_factory=list)
    """Dotted name of what is called; "" where it has none."""
    names: list[tuple[str, NewNode]] = field(default_factory=list)
    """Every dotted name that is read, called or not."""
    imports: list[tuple[str, NewNode]] = field(default_factory=list)
    """Full name of what is imported: "os._exit"."""
    assigned: list[tuple[str, NewNode]] = field(default_factory=list)
    """Dotted name of every attribute that is assigned or deleted, and what setattr sets."""
    strings: list[tuple[str, NewNode]] = field(default_factory=list)
    functions: list[NewNode] = field(default_factory=list)
    """Definitions with any new line in them."""
    handlers: list[NewNode] = field(default_factory=list)
    others: list[NewNode] = field(default_factory=list)
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
            return syntax.parse(text)
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


def scan_pieces(before: str, after: str, pieces: Sequence[CodePiece]) -> Scan:
    """Scan of the code that is new in `after`; `pieces` are those of `pieces(before, after)`."""
    found = Scan(aliases=_outline(before).aliases)
    parsed = [(piece, parse(piece.text)) for piece in pieces]
    if any(tree is None for _, tree in parsed):  # a cut that does not hold: read the file as a whole
        tree = parse(after)
        if tree is None:
            return Scan(broken=True)
        lines = [piece.first + line for piece in pieces for line in piece.new_lines]
        parsed = [(CodePiece(after, 0, "", tuple(lines)), tree)]
    for _, tree in parsed:
        found.aliases = _aliases(tree, found.aliases) if tree else found.aliases
    for piece, tree in parsed:
        if tree is not None:
            _walk(tree, found, piece.new_lines, piece.first)
    return found


@dataclass(frozen=True)
class CodePiece:
    """Neighbouring top-level statements of a file, of which some are new."""

    text: str
    first: int
    """Lines of the file before it."""
    old: str
    """Text that it replaces."""
    fixed: tuple[int, ...] = ()

    @property
    def new_lines(self) -> tuple[int, ...]:
        """1-based numbers, inside the piece, of the lines that `old` does not have."""
        return self.fixed or self._numbers[1]

    @property
    def gone(self) -> list[str]:
        """Lines of `old` that the piece does not have."""
        split = self.old.split("\n")
        return [split[n - 1] for n in self._numbers[0]]

    @functools.cached_property
    def _numbers(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Numbers of the lines of `old` and of the piece that the other one lacks."""
        old, new = self.old.split("\n"), self.text.split("\n")
        limit = min(len(old), len(new))
        start = next((n for n in range(limit) if old[n] != new[n]), limit)
        rest = limit - start
        end = next((n for n in range(rest) if old[-1 - n] != new[-1 - n]), rest)
        middles = old[start : len(old) - end], new[start : len(new) - end]
        changed = [("replace", 0, len(middles[0]), 0, len(middles[1]))]
        if len(middles[0]) * len(middles[1]) < 40_000:  # else all of it counts as changed
            matcher = difflib.SequenceMatcher(None, *middles, autojunk=False)
            changed = [code for code in matcher.get_opcodes() if code[0] != "equal"]
        return (
            tuple(start + n + 1 for _, low, high, _, _ in changed for n in range(low, high)),
            tuple(start + n + 1 for _, _, _, low, high in changed for n in range(low, high)),
        )

    @property
    def lines(self) -> list[str]:
        split = self.text.split("\n")
        return [split[n - 1] for n in self.new_lines]


@dataclass(frozen=True)
class _Outline:
    """The top-level statements of a file, each with the comments behind it, and what the file imports."""

    statements: tuple[str, ...]
    aliases: Mapping[str, str]


@functools.lru_cache(maxsize=512)
def _outline(text: str) -> _Outline:
    text = syntax.plain(text)
    tree = parse(text)
    body = tree.body if tree is not None else []
    starts = {min(n.lineno for n in (node, *getattr(node, "decorator_list", []))) - 1 for node in body}
    lines, cuts = text.split("\n"), sorted({0, *starts})
    spans = zip(cuts, [*cuts[1:], len(lines)], strict=True)
    statements = ("\n".join(lines[first:last]).rstrip("\n") for first, last in spans)
    aliases = _aliases(ast.Module(_shallow(body), []), {})
    return _Outline(tuple(s for s in statements if s), aliases)


def _shallow(body: Sequence[ast.stmt]) -> list[ast.stmt]:
    """Imports of a module, also those that it makes conditionally, without looking into functions."""
    found: list[ast.stmt] = []
    for node in body:
        if isinstance(node, ast.Import | ast.ImportFrom):
            found.append(node)
        elif isinstance(node, ast.If | ast.Try):
            handlers = [s for h in getattr(node, "handlers", []) for s in h.body]
            found += _shallow([*node.body, *node.orelse, *handlers])
    return found


def pieces(before: str, after: str) -> list[CodePiece]:
    """Pieces of `after` that are not, statement for statement, in `before`.

    Old statements are found again in order; what lies between two of them is new or changed. Each cut is the beginning
    of a statement right behind complete ones, so a piece reads alone as it does in the file; where that fails (a string
    that was opened and never closed) it does not parse, and the caller reads the whole file.
    """
    after, statements = syntax.plain(after), _outline(before).statements
    found: list[CodePiece] = []
    gone: list[str] = []
    position = line = 0

    def cut(end: int) -> None:
        text = after[position:end]
        if text.strip() or gone:
            blank = len(text) - len(text.lstrip("\n"))
            found.append(CodePiece(text.strip("\n"), line + blank, "\n".join(gone)))

    for number, statement in enumerate(statements):
        at = _find(after, statement, position)
        following = statements[number + 1] if number + 1 < len(statements) else None
        if at > position + 1 and following is not None and 0 <= _find(after, following, position) < at:
            at = -1  # the same text, but somewhere else
        if at < 0:
            gone.append(statement)
            continue
        cut(at)
        line += after.count("\n", position, at + len(statement))
        position, gone = at + len(statement), []
    cut(len(after))
    return found


def _find(text: str, statement: str, position: int) -> int:
    """Offset of whole lines at or after a position; -1 where they are not."""
    at = text.find(statement, position)
    while at >= 0:
        end = at + len(statement)
        if (at == 0 or text[at - 1] == "\n") and (end == len(text) or text[end] == "\n"):
            return at
        at = text.find(statement, at + 1)
    return -1


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
    attributes: list[str] = []
    while isinstance(node, ast.Attribute):  # a chain may be longer than Python's stack
        attributes.append(node.attr)
        node = node.value
    owner = _named(node, aliases)
    return ".".join([owner, *reversed(attributes)]) if owner else ""


def _named(node: ast.AST, aliases: Mapping[str, str]) -> str:
    """Full name of an expression that is no attribute of another."""
    if isinstance(node, ast.Name):
        return aliases.get(node.id, node.id)
    if isinstance(node, ast.Call) and node.args:
        called, last = dotted(node.func, aliases), text_of(node.args[-1])
        if called in ("__import__", "importlib.import_module", "builtins.__import__"):
            return text_of(node.args[0])
        if called == "getattr" and len(node.args) == 2 and last:
            owner = dotted(node.args[0], aliases)
            return f"{owner}.{last}" if owner else ""
    if isinstance(node, ast.Subscript) and (key := text_of(node.slice)):
        owner = dotted(node.value, aliases)
        if owner == "sys.modules":
            return key
        if owner.endswith(".__dict__"):
            return f"{owner.removesuffix('.__dict__')}.{key}"
    return ""


def source(node: ast.AST) -> str:
    """An expression as text, however it was written. The longer form of its tree where it is too deep to be written."""
    try:
        return ast.unparse(node)
    except RecursionError:
        return " ".join(f"{type(inner).__name__}:{_word(inner)}" for inner in ast.walk(node))


def _word(node: ast.AST) -> str:
    words = (getattr(node, name, None) for name in ("id", "attr", "value", "arg"))
    return next((word for word in words if isinstance(word, str)), "")


def text_of(node: ast.AST) -> str:
    """Value of a string literal; "" for any other expression."""
    return node.value if isinstance(node, ast.Constant) and isinstance(node.value, str) else ""


_OTHERS = (
    ast.Assign,
    ast.Compare,
    ast.Return,
    ast.While,
    ast.For,
    ast.Dict,
    ast.Raise,
    ast.BinOp,
    ast.If,
    ast.Match,
)


def _walk(tree: ast.Module, found: Scan, lines: Sequence[int] | None, shift: int) -> None:
    """Fill a scan with the nodes on the given lines (ascending; None: all), in the order of the text."""
    stack: list[tuple[ast.AST, tuple[str, ...], Function | None, bool]] = [(tree, (), None, False)]
    while stack:
        node, scope, function, guarded = stack.pop()
        line = getattr(node, "lineno", 0)
        is_definition = isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef)
        if line and lines is not None:
            first = min([line, *(d.lineno for d in node.decorator_list)]) if is_definition else line
            at = bisect_left(lines, first)
            if at == len(lines) or lines[at] > (getattr(node, "end_lineno", line) or line):
                continue  # nothing in it is new
            if lines[at] != line and not is_definition:
                line = 0
        if line:
            _note(NewNode(node, line + shift, scope, function, guarded), found)
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            scope = (*scope, node.name)
            function = function if isinstance(node, ast.ClassDef) else node
        guarded = guarded or (isinstance(node, ast.If) and not scope and _asks_for_main(node.test))
        stack.extend(
            (child, scope, function, guarded) for child in reversed(list(ast.iter_child_nodes(node)))
        )


def _asks_for_main(test: ast.expr) -> bool:
    return any(text_of(node) == "__main__" for node in ast.walk(test))


def _note(place: NewNode, found: Scan) -> None:
    node, aliases = place.node, found.aliases
    if isinstance(node, ast.Call):
        name = dotted(node.func, aliases)
        found.calls.append((name, place))
        if name == "setattr" and len(node.args) == 3 and text_of(node.args[1]):
            found.assigned.append((f"{dotted(node.args[0], aliases)}.{text_of(node.args[1])}", place))
    elif isinstance(node, ast.Attribute | ast.Subscript):
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
