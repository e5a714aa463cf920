"""Scans of Python code: calls, imports, assignments and comparisons by full dotted names.

`from os import _exit as leave; leave(0)`, `getattr(os, "_exit")(0)` and `__import__("os")._exit(0)` all call
`os._exit`. For a patch only new code counts: changed lines are found first, and only the top-level statements
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
    """A node of a syntax tree and its position."""

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
    """New names and constants in some code, by kind."""

    calls: list[tuple[str, NewNode]] = field(default_factory=list)
    """Dotted name of each called object; "" if it has none."""
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
    """Comparisons, returns, loops, dictionaries, raises: nodes that single rules inspect."""
    aliases: Mapping[str, str] = field(default_factory=dict)
    """Name in this file to the full name of its import."""
    broken: bool = False
    """It does not parse."""


def parse(text: str) -> ast.Module | None:
    """The tree, or None if the text is not Python."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # about invalid escapes
        try:
            return syntax.parse(text)
        except (SyntaxError, ValueError, RecursionError, MemoryError):
            return None


@functools.lru_cache(maxsize=2048)
def scan(text: str) -> Scan:
    """Scan of code that is new as a whole: a script, or the text after `python -c`."""
    tree = parse(text)
    if tree is None:
        return Scan(broken=True)
    result = Scan(aliases=_aliases(tree, {}))
    _walk(tree, result, None, 0)
    return result


def scan_segments(before: str, after: str, segments: Sequence[CodeSegment]) -> Scan:
    """Scan of the code that is new in `after`; `segments` are those of `segments(before, after)`."""
    result = Scan(aliases=_outline(before).aliases)
    parsed = [(segment, parse(segment.text)) for segment in segments]
    if any(tree is None for _, tree in parsed):  # a cut that does not hold: read the file as a whole
        tree = parse(after)
        if tree is None:
            return Scan(broken=True)
        lines = [segment.first + line for segment in segments for line in segment.new_lines]
        parsed = [(CodeSegment(after, 0, "", tuple(lines)), tree)]
    for _, tree in parsed:
        result.aliases = _aliases(tree, result.aliases) if tree else result.aliases
    for segment, tree in parsed:
        if tree is not None:
            _walk(tree, result, segment.new_lines, segment.first)
    return result


@dataclass(frozen=True)
class CodeSegment:
    """Neighbouring top-level statements of a file, some of them new."""

    text: str
    first: int
    """Lines of the file before it."""
    old: str
    """Text that it replaces."""
    fixed: tuple[int, ...] = ()

    @property
    def new_lines(self) -> tuple[int, ...]:
        """1-based numbers, inside the segment, of the lines that `old` does not have."""
        return self.fixed or self._numbers[1]

    @property
    def removed_lines(self) -> list[str]:
        """Lines of `old` that the segment does not have."""
        split = self.old.split("\n")
        return [split[n - 1] for n in self._numbers[0]]

    @functools.cached_property
    def _numbers(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Numbers of the lines of `old` and of the segment that the other one lacks."""
        old, new = self.old.split("\n"), self.text.split("\n")
        limit = min(len(old), len(new))
        start = next((n for n in range(limit) if old[n] != new[n]), limit)
        remaining = limit - start
        end = next((n for n in range(remaining) if old[-1 - n] != new[-1 - n]), remaining)
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
    imports: list[ast.stmt] = []
    for node in body:
        if isinstance(node, ast.Import | ast.ImportFrom):
            imports.append(node)
        elif isinstance(node, ast.If | ast.Try):
            handlers = [s for h in getattr(node, "handlers", []) for s in h.body]
            imports += _shallow([*node.body, *node.orelse, *handlers])
    return imports


def segments(before: str, after: str) -> list[CodeSegment]:
    """Pieces of `after` that are not, statement for statement, in `before`.

    Old statements are found again in order; what lies between two of them is new or changed. Each cut is the beginning
    of a statement right behind complete ones, so a segment reads alone as it does in the file; if that fails (a string
    that was opened and never closed), it does not parse, and the caller scans the whole file.
    """
    after, statements = syntax.plain(after), _outline(before).statements
    changed: list[CodeSegment] = []
    removed: list[str] = []
    position = line = 0

    def cut(end: int) -> None:
        text = after[position:end]
        if text.strip() or removed:
            blank = len(text) - len(text.lstrip("\n"))
            changed.append(CodeSegment(text.strip("\n"), line + blank, "\n".join(removed)))

    for number, statement in enumerate(statements):
        start = _find(after, statement, position)
        following = statements[number + 1] if number + 1 < len(statements) else None
        if start > position + 1 and following is not None and 0 <= _find(after, following, position) < start:
            start = -1  # the same text, but somewhere else
        if start < 0:
            removed.append(statement)
            continue
        cut(start)
        line += after.count("\n", position, start + len(statement))
        position, removed = start + len(statement), []
    cut(len(after))
    return changed


def _find(text: str, statement: str, position: int) -> int:
    """Offset of whole lines at or after a position; -1 if there are none."""
    start = text.find(statement, position)
    while start >= 0:
        end = start + len(statement)
        if (start == 0 or text[start - 1] == "\n") and (end == len(text) or text[end] == "\n"):
            return start
        start = text.find(statement, start + 1)
    return -1


def _aliases(tree: ast.Module, known: Mapping[str, str]) -> dict[str, str]:
    aliases = dict(known)
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                name = alias.asname or alias.name.partition(".")[0]
                aliases[name] = alias.name if alias.asname else name
        elif isinstance(node, ast.ImportFrom):
            origin = "." * node.level + (node.module or "")
            for alias in node.names:
                aliases[alias.asname or alias.name] = f"{origin}.{alias.name}" if origin else alias.name
    return aliases


def dotted(node: ast.AST, aliases: Mapping[str, str]) -> str:
    """Full name of an expression: "os._exit"; "" if it has none."""
    attributes: list[str] = []
    while isinstance(node, ast.Attribute):  # a chain may be longer than Python's stack
        attributes.append(node.attr)
        node = node.value
    owner = _named(node, aliases)
    return ".".join([owner, *reversed(attributes)]) if owner else ""


def _named(node: ast.AST, aliases: Mapping[str, str]) -> str:
    """Full name of an expression that is not an attribute."""
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
    """An expression as normalised text; a list of its nodes if it is too deeply nested."""
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


def _walk(tree: ast.Module, result: Scan, lines: Sequence[int] | None, shift: int) -> None:
    """Fill a scan with the nodes on the given lines (ascending; None: all), in the order of the text."""
    stack: list[tuple[ast.AST, tuple[str, ...], Function | None, bool]] = [(tree, (), None, False)]
    while stack:
        node, scope, function, guarded = stack.pop()
        line = getattr(node, "lineno", 0)
        is_definition = isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef)
        if line and lines is not None:
            first = min([line, *(d.lineno for d in node.decorator_list)]) if is_definition else line
            index = bisect_left(lines, first)
            if index == len(lines) or lines[index] > (getattr(node, "end_lineno", line) or line):
                continue  # nothing in it is new
            if lines[index] != line and not is_definition:
                line = 0
        if line:
            _note(NewNode(node, line + shift, scope, function, guarded), result)
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            scope = (*scope, node.name)
            function = function if isinstance(node, ast.ClassDef) else node
        guarded = guarded or (isinstance(node, ast.If) and not scope and _asks_for_main(node.test))
        stack.extend(
            (child, scope, function, guarded) for child in reversed(list(ast.iter_child_nodes(node)))
        )


def _asks_for_main(test: ast.expr) -> bool:
    return any(text_of(node) == "__main__" for node in ast.walk(test))


def _note(new_node: NewNode, result: Scan) -> None:
    node, aliases = new_node.node, result.aliases
    if isinstance(node, ast.Call):
        name = dotted(node.func, aliases)
        result.calls.append((name, new_node))
        if name == "setattr" and len(node.args) == 3 and text_of(node.args[1]):
            result.assigned.append((f"{dotted(node.args[0], aliases)}.{text_of(node.args[1])}", new_node))
    elif isinstance(node, ast.Attribute | ast.Subscript):
        if name := dotted(node, aliases):
            (result.names if isinstance(node.ctx, ast.Load) else result.assigned).append((name, new_node))
    elif isinstance(node, ast.Name) and node.id in aliases:
        result.names.append((aliases[node.id], new_node))
    elif isinstance(node, ast.Constant):
        if isinstance(node.value, str):
            result.strings.append((node.value, new_node))
    elif isinstance(node, ast.Import | ast.ImportFrom):
        result.imports += [(name, new_node) for name in _imported(node)]
    elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
        result.functions.append(new_node)
    elif isinstance(node, ast.ExceptHandler):
        result.handlers.append(new_node)
    elif isinstance(node, _OTHERS):
        result.others.append(new_node)


def _imported(node: ast.Import | ast.ImportFrom) -> Iterator[str]:
    for alias in node.names:
        if isinstance(node, ast.Import):
            yield alias.name
        else:
            origin = "." * node.level + (node.module or "")
            yield f"{origin}.{alias.name}" if origin.strip(".") else f"{origin}{alias.name}"
