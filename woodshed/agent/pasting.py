"""Text of a file as a policy sees it, and the way back: what it read and pasted is found, in the file's own bytes.

What is shown differs from the file in three ways: line ends look alike, a byte order mark is not shown, and control
characters and bytes that are no UTF-8 are written as \\xNN. Other characters that look like nothing or like a space are
shown as they are; where they are the only difference, `difference` names them.
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
MOST_PLACES = 1000
"""Places of a text that are listed."""
MOST_WORK = 10**9
"""Product of the sizes of a file and of a text, up to which \\xNN in the text may be a byte of the file."""
_NAMES = {" ": "a space", "\t": "a tab", "\r": "a carriage return", "\f": "a form feed"}


@dataclass(frozen=True)
class Match:
    """Position of a text that was found."""

    start: int
    end: int
    escapes: dict[str, bytes]
    """Written form of a byte in the text, with the byte or character that the file has there."""


def lines_of(data: bytes) -> list[str]:
    """The lines as a policy reads them. Only where there is no other line end does a carriage return end a line."""
    text = data.decode("utf-8-sig", errors="backslashreplace").replace("\r\n", "\n")
    lines = (text if "\n" in text else text.replace("\r", "\n")).split("\n")
    if lines[-1] == "":
        lines.pop()
    return lines


def places(data: bytes, text: str) -> list[Match]:
    """Places of a text, at most MOST_PLACES, overlapping ones included, whatever line ends either of them has.

    A pattern may take the product of both lengths, so \\xNN in a long text in a large file is only itself.
    """
    if not _ESCAPE.search(text) or len(data) * len(text) > MOST_WORK:
        return _as_written(data, text)
    pattern, escapes, at = [], [], 0
    for match in _PARTS.finditer(text):
        pattern.append(re.escape(text[at : match.start()].encode("utf-8")))
        if match[1]:
            pattern.append(_END)
        else:
            escapes.append(match[2])
            pattern.append(b"(%s)" % b"|".join(_meanings(match[2])))
        at = match.end()
    pattern.append(re.escape(text[at:].encode("utf-8")))
    found = itertools.islice(re.finditer(b"(?=(%s))" % b"".join(pattern), data), MOST_PLACES)
    return [Match(m.start(1), m.end(1), dict(zip(escapes, m.groups()[1:], strict=True))) for m in found]


def _as_written(data: bytes, text: str) -> list[Match]:
    """Places of a text whose characters stand for themselves, found with all line ends alike."""
    wanted, alike = ENDS.sub(b"\n", text.encode("utf-8")), ENDS.sub(b"\n", data)
    longer = [
        match.start() - n for n, match in enumerate(re.finditer(rb"\r\n", data))
    ]  # their places in `alike`
    found: list[Match] = []
    at = alike.find(wanted)
    while at >= 0 and len(found) < MOST_PLACES:
        start, end = (place + bisect.bisect_left(longer, place) for place in (at, at + len(wanted)))
        found.append(Match(start, end, {}))
        at = alike.find(wanted, at + 1)
    return found


def _meanings(escape: str) -> list[bytes]:
    """Texts that \\xNN may stand for: itself, and, if it is the display of a byte, that character or that byte."""
    number = int(escape[2:], 16)
    meanings = [re.escape(escape.encode())]
    if number < 0x20 or 0x7F <= number < 0xA0:
        meanings.append(re.escape(chr(number).encode("utf-8")))
    return [*meanings, re.escape(bytes([number]))] if number >= 0x80 else meanings


def spliced(data: bytes, place: Match, new: str) -> bytes:
    """The file with `new` at a place, in the line ends that are in use there; every other byte stays."""
    end = _end_at(data, place)
    parts = (
        place.escapes.get(part) or ENDS.sub(lambda _: end, part.encode("utf-8"))
        for part in _ESCAPE.split(new)
    )
    return data[: place.start] + b"".join(parts) + data[place.end :]


def _end_at(data: bytes, place: Match) -> bytes:
    """The line end that most of the lines at a place have; else of the line it is in, or the one before."""
    inside = ENDS.findall(data, place.start, place.end)
    if inside:
        return Counter(inside).most_common(1)[0][0]
    if following := ENDS.search(data, place.end):
        return following[0]
    before = ENDS.findall(data, 0, place.start)
    return before[-1] if before else b"\n"


def like(data: bytes, old: bytes) -> bytes:
    """A new content of a file, with the byte order mark of its old one, its line ends where all of those are alike, and
    its control characters where the content spells them as they are shown and the old one never does."""
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

    "" where they look different. They look alike where they differ in white space, in characters without width, in
    accents, or in kinds of quotes and dashes.

    Args:
        begins: the text begins where the line does.
        ends: the text ends where the line does.
    """
    seen, where = _folded(line)
    looked_for, places = _folded(wanted)
    found = seen.find(looked_for)
    if found < 0 or not looked_for:
        return ""
    shift = 0 if begins else where[found] - places[0]
    length = max(len(wanted), len(line) - shift if ends else 0)
    for n in range(length):
        at = n + shift
        here, there = line[at : at + 1] if at >= 0 else "", wanted[n : n + 1]
        if here != there:
            if {here, there} < set(map(chr, range(32, 127))):
                return ""  # anybody can see that
            return f"column {max(at, 0) + 1} has {_named(here)}, not {_named(there)}"
    return ""


_QUOTES = str.maketrans("\u2018\u2019\u201c\u201d\u2010\u2011\u2012\u2013\u2014\u2212", "''\"\"------")


def _folded(line: str) -> tuple[str, list[int]]:
    """A line without its invisible characters, and the position that each remaining character had."""
    left, where = [], []
    for at, character in enumerate(line):
        for part in unicodedata.normalize("NFKD", character).translate(_QUOTES):
            if not part.isspace() and unicodedata.category(part) not in ("Cf", "Cc", "Mn"):
                left.append(part)
                where.append(at)
    return "".join(left), where


def _named(character: str) -> str:
    if not character:
        return "the end of the line"
    if character in _NAMES:
        return _NAMES[character]
    if character.isascii() and character.isprintable():
        return repr(character)
    return f"U+{ord(character):04X} {unicodedata.name(character, '')}".strip()
