"""Text of a file as a policy sees it, and the search for pasted text in the bytes of the file.

The shown text differs from the file in three ways: all line ends look alike, a byte order mark is not shown, and
control characters and bytes that are not UTF-8 are written as \\xNN. Other invisible characters are shown as they are;
if they are the only difference, `difference` names them.
"""

from __future__ import annotations

import bisect
import itertools
import re
import unicodedata
from collections import Counter
from dataclasses import dataclass

MARK = b"\xef\xbb\xbf"
ENDS = re.compile(rb"\r\n|\n|\r")
_END = rb"(?:\r\n|(?<!\r)\n|\r(?!\n))"
_PARTS = re.compile(r"(\r\n|\n|\r)|(\\x[0-9a-f]{2})")
_ESCAPE = re.compile(r"(\\x[0-9a-f]{2})")
MAX_MATCHES = 1000
"""Limit of the matches of a text that are listed."""
MAX_WORK = 10**9
"""Product of the sizes of a file and of a text, up to which \\xNN in the text may be a byte of the file."""
_NAMES = {" ": "a space", "\t": "a tab", "\r": "a carriage return", "\f": "a form feed"}


@dataclass(frozen=True)
class Match:
    """Position of a text in a file."""

    start: int
    end: int
    escapes: dict[str, bytes]
    """Escapes of the text, each with the byte or character of the file at that position."""


def lines_of(data: bytes) -> list[str]:
    """The lines as a policy reads them. A carriage return ends a line only in files without other line ends."""
    text = data.decode("utf-8-sig", errors="backslashreplace").replace("\r\n", "\n")
    lines = (text if "\n" in text else text.replace("\r", "\n")).split("\n")
    if lines[-1] == "":
        lines.pop()
    return lines


def find(data: bytes, text: str) -> list[Match]:
    """Matches of a text, at most MAX_MATCHES, overlapping ones included; kinds of line ends are ignored.

    A pattern may take time in the product of both lengths, so \\xNN in a long text in a large file matches only itself.
    """
    if not _ESCAPE.search(text) or len(data) * len(text) > MAX_WORK:
        return _find_as_written(data, text)
    pattern, escapes, position = [], [], 0
    for match in _PARTS.finditer(text):
        pattern.append(re.escape(text[position : match.start()].encode("utf-8")))
        if match[1]:
            pattern.append(_END)
        else:
            escapes.append(match[2])
            pattern.append(b"(%s)" % b"|".join(_meanings(match[2])))
        position = match.end()
    pattern.append(re.escape(text[position:].encode("utf-8")))
    matches = itertools.islice(re.finditer(b"(?=(%s))" % b"".join(pattern), data), MAX_MATCHES)
    return [Match(m.start(1), m.end(1), dict(zip(escapes, m.groups()[1:], strict=True))) for m in matches]


def _find_as_written(data: bytes, text: str) -> list[Match]:
    """Matches of a text without escapes; both texts are compared with their line ends replaced by "\\n"."""
    plain_text, plain_data = ENDS.sub(b"\n", text.encode("utf-8")), ENDS.sub(b"\n", data)
    # positions in `plain_data` of the line ends that are one byte longer in `data`
    longer = [match.start() - n for n, match in enumerate(re.finditer(rb"\r\n", data))]
    matches: list[Match] = []
    start = plain_data.find(plain_text)
    while start >= 0 and len(matches) < MAX_MATCHES:
        end = start + len(plain_text)
        matches.append(
            Match(start + bisect.bisect_left(longer, start), end + bisect.bisect_left(longer, end), {})
        )
        start = plain_data.find(plain_text, start + 1)
    return matches


def _meanings(escape: str) -> list[bytes]:
    """Texts that \\xNN may stand for: itself, and, if it is the display of a byte, that character or that byte."""
    number = int(escape[2:], 16)
    meanings = [re.escape(escape.encode())]
    if number < 0x20 or 0x7F <= number < 0xA0:
        meanings.append(re.escape(chr(number).encode("utf-8")))
    return [*meanings, re.escape(bytes([number]))] if number >= 0x80 else meanings


def spliced(data: bytes, match: Match, new: str) -> bytes:
    """The file with `new` in place of a match, with the line ends around it; every other byte stays."""
    end = _end_at(data, match)
    parts = (
        match.escapes.get(part) or ENDS.sub(lambda _: end, part.encode("utf-8"))
        for part in _ESCAPE.split(new)
    )
    return data[: match.start] + b"".join(parts) + data[match.end :]


def _end_at(data: bytes, match: Match) -> bytes:
    """The most common line end in a match; without one, that of its own line, or of the line before."""
    inside = ENDS.findall(data, match.start, match.end)
    if inside:
        return Counter(inside).most_common(1)[0][0]
    if following := ENDS.search(data, match.end):
        return following[0]
    before = ENDS.findall(data, 0, match.start)
    return before[-1] if before else b"\n"


def like(data: bytes, old: bytes) -> bytes:
    """New content of a file with the byte order mark of the old one, its line ends if they are all alike, and its
    control characters if the new content has them in their shown form and the old one never does."""
    for escape in {match[0] for match in _ESCAPE.finditer(data.decode("utf-8", "replace"))}:
        number = int(escape[2:], 16)
        if number < 0x20 and bytes([number]) in old and escape.encode() not in old:
            data = data.replace(escape.encode(), bytes([number]))
    ends = set(ENDS.findall(old))
    if len(ends) == 1 and b"\r" not in data:
        data = data.replace(b"\n", ends.pop())
    return MARK + data if old.startswith(MARK) and not data.startswith(MARK) else data


def difference(line: str, wanted: str, *, begins: bool = False, ends: bool = False) -> str:
    """The first character in which a line of a file differs from a text that looks like it, or like a part of it.

    "" if they look different. They look alike if they differ only in white space, in invisible characters, in accents,
    or in kinds of quotes and dashes.

    Args:
        begins: the text begins where the line does.
        ends: the text ends where the line does.
    """
    folded_line, line_positions = _folded(line)
    folded_text, text_positions = _folded(wanted)
    offset = folded_line.find(folded_text)
    if offset < 0 or not folded_text:
        return ""
    shift = 0 if begins else line_positions[offset] - text_positions[0]
    length = max(len(wanted), len(line) - shift if ends else 0)
    for index in range(length):
        column = index + shift
        actual, expected = line[column : column + 1] if column >= 0 else "", wanted[index : index + 1]
        if actual != expected:
            if {actual, expected} < set(map(chr, range(32, 127))):
                return ""  # a visible difference
            return f"column {max(column, 0) + 1} has {_named(actual)}, not {_named(expected)}"
    return ""


_QUOTES = str.maketrans("\u2018\u2019\u201c\u201d\u2010\u2011\u2012\u2013\u2014\u2212", "''\"\"------")


def _folded(line: str) -> tuple[str, list[int]]:
    """A line without its invisible characters, and the position of each remaining character."""
    characters, positions = [], []
    for position, character in enumerate(line):
        for part in unicodedata.normalize("NFKD", character).translate(_QUOTES):
            if not part.isspace() and unicodedata.category(part) not in ("Cf", "Cc", "Mn"):
                characters.append(part)
                positions.append(position)
    return "".join(characters), positions


def _named(character: str) -> str:
    if not character:
        return "the end of the line"
    if character in _NAMES:
        return _NAMES[character]
    if character.isascii() and character.isprintable():
        return repr(character)
    return f"U+{ord(character):04X} {unicodedata.name(character, '')}".strip()
