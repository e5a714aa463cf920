"""Exact edits to Python source: everything outside an edit survives byte for byte.

Positions come from `ast` (lines and UTF-8 columns) and are converted to character offsets; items of a bracket are
separated by `tokenize`, which sees commas, comments and parentheses around them.
"""

from __future__ import annotations

import ast
import io
import re
import tokenize
from bisect import bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache

from woodshed.pysource import syntax


@dataclass(frozen=True, order=True)
class Edit:
    """Replace the characters [start, end) with `text`."""

    start: int
    end: int
    text: str = ""


@dataclass(frozen=True)
class Item:
    """One item of a bracket or import list: characters [start, end), and the end of its comma, if any."""

    start: int
    end: int
    comma: int | None


class Source:
    """A Python file's text with its syntax tree and offsets.

    Raises:
        SyntaxError: the running Python cannot parse it.
    """

    def __init__(self, text: str) -> None:
        self.text = text
        self.tree = syntax.parse(text)
        self.start = len(syntax.MARK) if text.startswith(syntax.MARK) else 0
        """Offset of the first character of code, after a byte order mark."""
        ends = syntax.LINE_END.finditer(text)
        self._starts = [self.start, *(match.end() for match in ends)]

    def offset(self, line: int, column: int) -> int:
        """Character offset of a line (1-based) and UTF-8 column, as `ast` counts them."""
        start = self._starts[line - 1]
        prefix = self.text[start : start + column].encode("utf-8", "replace")[:column]
        return start + len(prefix.decode(errors="ignore"))

    def span(self, node: ast.expr | ast.stmt | ast.alias | ast.keyword) -> tuple[int, int]:
        """Offsets of the first character and one past the last; decorators are part of the definition."""
        line, column = node.lineno, node.col_offset
        for decorator in getattr(node, "decorator_list", ()):
            if decorator.lineno < line:  # the '@' stands in the column of the definition
                line = decorator.lineno
        assert node.end_lineno is not None and node.end_col_offset is not None
        return self.offset(line, column), self.offset(node.end_lineno, node.end_col_offset)

    def line(self, offset: int) -> int:
        """Line (1-based) that holds a character."""
        return max(1, bisect_right(self._starts, offset))

    def line_start(self, offset: int) -> int:
        return self._starts[self.line(offset) - 1]

    def line_end(self, offset: int) -> int:
        """One past the newline of the line that holds a character."""
        line = self.line(offset)
        return self._starts[line] if line < len(self._starts) else len(self.text)

    def segment(self, node: ast.expr | ast.stmt) -> str:
        start, end = self.span(node)
        return self.text[start:end]

    @cached_property
    def words(self) -> frozenset[str]:
        """Every identifier-like word, to rule out quickly that a file mentions a name."""
        return frozenset(re.findall(r"\w+", self.text))


@lru_cache(maxsize=2048)
def parse(text: str) -> Source | None:
    """The parsed text, or None if this Python cannot parse it."""
    try:
        return Source(text)
    except (SyntaxError, ValueError, RecursionError):
        return None


def apply(text: str, edits: Iterable[Edit]) -> str:
    """The text after all edits. Edits that overlap must be deletions; they are merged."""
    merged: list[Edit] = []
    for edit in sorted(set(edits)):
        if merged and edit.start < merged[-1].end:
            last = merged.pop()
            edit = Edit(last.start, max(last.end, edit.end), last.text or edit.text)
        merged.append(edit)
    for edit in reversed(merged):
        text = text[: edit.start] + edit.text + text[edit.end :]
    return text


# ---- statements -------------------------------------------------------------------------------------------


def remove_statement(source: Source, statement: ast.stmt, siblings: Sequence[ast.stmt]) -> Edit:
    """Edit that deletes a statement of a block with its lines; for a definition, also its comments and blank lines."""
    start, end = source.span(statement)
    text = source.text
    head, tail = source.line_start(start), source.line_end(end)
    if text[head:start].strip() or text[end:tail].strip(" \t\r\n").lstrip("\\").partition("#")[0]:
        return Edit(start, end, "pass")  # shares its line with other statements
    if not isinstance(statement, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
        return Edit(head, tail)
    indent = start - head
    head = _comments_above(source, head, indent)
    tail = _comments_below(source, tail, indent)
    if statement is not siblings[-1]:
        return Edit(head, _skip_blank(source, tail))
    while head > source.start and not text[source.line_start(head - 1) : head].strip():
        head = source.line_start(head - 1)
    return Edit(head, tail)


def body_end(source: Source, function: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    """One past the last line of a function, comments that trail its body included."""
    start, end = source.span(function)
    return _comments_below(source, source.line_end(end), start - source.line_start(start))


def _comments_above(source: Source, head: int, indent: int) -> int:
    while head > source.start:
        above = source.line_start(head - 1)
        line = source.text[above:head].lstrip("\f")
        if (
            not line.lstrip().startswith("#")
            or len(line) - len(line.lstrip()) != indent
            or line.startswith("#!")
        ):
            break
        head = above
    return head


def _comments_below(source: Source, tail: int, indent: int) -> int:
    """End of the comments below that are indented deeper than the definition: they belong to its body."""
    probe = tail
    while probe < len(source.text):
        end = source.line_end(probe)
        line = source.text[probe:end]
        if line.strip():
            if not line.lstrip().startswith("#") or len(line) - len(line.lstrip()) <= indent:
                break
            tail = end
        probe = end
    return tail


def _skip_blank(source: Source, offset: int) -> int:
    while offset < len(source.text) and not source.text[offset : source.line_end(offset)].strip():
        offset = source.line_end(offset)
    return offset


# ---- items ------------------------------------------------------------------------------------------------


def items(source: Source, node: ast.expr | ast.ImportFrom | ast.Import) -> tuple[list[Item], bool]:
    """The comma-separated items of a literal, call or from-import, in order, and True if brackets enclose them."""
    start, end = source.span(node)
    if isinstance(node, ast.Call):
        start = source.span(node.func)[1]
    segment = source.text[start:end]
    tokens = list(tokenize.generate_tokens(io.StringIO(syntax.plain(segment)).readline))
    if isinstance(node, ast.Call):
        tokens = tokens[next(i for i, t in enumerate(tokens) if t.string == "(") :]
    elif isinstance(node, ast.ImportFrom | ast.Import):
        tokens = tokens[next(i for i, t in enumerate(tokens) if t.string == "import") + 1 :]
    starts = [start, *(start + m.end() for m in syntax.LINE_END.finditer(segment))]
    real = [
        (t.string, starts[t.start[0] - 1] + t.start[1], starts[t.end[0] - 1] + t.end[1])
        for t in tokens
        if t.type
        not in (tokenize.NL, tokenize.NEWLINE, tokenize.COMMENT, tokenize.ENDMARKER, tokenize.INDENT)
        and t.type != tokenize.DEDENT
    ]
    bracketed = not (isinstance(node, ast.Tuple) and not _encloses(real))
    if isinstance(node, ast.ImportFrom | ast.Import):
        bracketed = real[0][0] == "("
    return _split(real[1:-1] if bracketed else real), bracketed


def _encloses(tokens: Sequence[tuple[str, int, int]]) -> bool:
    """True if the first token is a bracket that the last one closes."""
    depth = 0
    for position, (string, _, _) in enumerate(tokens):
        depth += (string in "([{") - (string in ")]}") if len(string) == 1 else 0
        if depth == 0:
            return position > 0 and position == len(tokens) - 1
    return False


def _split(tokens: Sequence[tuple[str, int, int]]) -> list[Item]:
    split: list[Item] = []
    depth, first, last = 0, -1, -1
    for string, start, end in tokens:
        if string == "," and depth == 0:
            split.append(Item(first, last, end))
            first = -1
            continue
        if len(string) == 1:
            depth += (string in "([{") - (string in ")]}")
        first, last = (start if first < 0 else first), end
    return [*split, Item(first, last, None)] if first >= 0 else split


def remove_items(
    source: Source, node: ast.expr | ast.ImportFrom | ast.Import, removed: set[int]
) -> list[Edit]:
    """Edits that delete some items of a literal, call or from-import; a tuple stays a tuple."""
    all_items, bracketed = items(source, node)
    kept_items = [item for index, item in enumerate(all_items) if index not in removed]
    if not kept_items and not bracketed and removed:
        return [Edit(all_items[0].start, all_items[-1].comma or all_items[-1].end, "()")]
    edits = [_without(source, all_items, index, bracketed, removed) for index in sorted(removed)]
    if removed and isinstance(node, ast.Tuple) and len(kept_items) == 1:
        end = kept_items[0].end
        if kept_items[0].comma is None or any(edit.start <= end < edit.end for edit in edits):
            edits.append(Edit(end, end, ","))
    return edits


def _without(source: Source, all_items: list[Item], index: int, bracketed: bool, removed: set[int]) -> Edit:
    item = all_items[index]
    stop = item.end if item.comma is None else item.comma
    head, tail = source.line_start(item.start), source.line_end(stop - 1)
    following = source.text[stop:tail].strip()
    if (
        bracketed
        and not source.text[head : item.start].strip()
        and (not following or following.startswith("#"))
    ):
        return Edit(head, tail)  # alone on its lines
    if item.comma is not None and index + 1 < len(all_items) and all_items[index + 1].start < tail:
        return Edit(item.start, all_items[index + 1].start)
    before = [item_before for i, item_before in enumerate(all_items[:index]) if i not in removed]
    if item.comma is not None and index > 0:
        return Edit(all_items[index - 1].comma or all_items[index - 1].end, stop)
    return Edit(before[-1].end if before else item.start, stop)  # the last one: the comma before it goes too
