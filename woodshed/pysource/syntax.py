"""Python source: bytes to text and back without losing one, lines as Python counts them, and parsing.

In memory a source is the text that Python makes of its bytes, everything in it: a byte order mark is its first
character, line ends stay as they are, and a coding line says in which encoding the text becomes bytes again. So text
that is edited is written by `encode` alone, and what no edit touched comes back byte for byte.

Python 3.11 counts how deep the tree is that it builds in one place for all threads (cpython issue 106905): where the
garbage collector lets another thread parse in between, the first one's parse ends in a SystemError, once in some
thousand. Every parse of a process that works in threads goes through here.

Standard library only: programs that run inside sandboxes import this file as well.
"""

from __future__ import annotations

import ast
import itertools
import re
import threading
from typing import Any

MARK = "\ufeff"
"""Byte order mark."""
LINE_END = re.compile(r"\r\n|\r|\n")
"""Line ends of Python. Form feeds, U+0085, U+2028 and their like do not, whatever `str.splitlines` says."""
STRAY = re.compile("[\udc80-\udcff]")
"""Bytes that are not of a source's encoding, as `decode` keeps them."""
_CODING = re.compile(rb"^[ \t\f]*#.*?coding[:=][ \t]*([-_.a-zA-Z0-9]+)", re.DOTALL)
_BLANK = re.compile(rb"^[ \t\f]*(?:#.*)?$", re.DOTALL)
_ALONE = threading.RLock()


class UnreadableError(ValueError):
    """Bytes that no Python source consists of; says why."""


def is_source(path: str) -> bool:
    """True if the name of a file says that it is Python."""
    return path.endswith((".py", ".pyi", ".pyw"))


def decode(data: bytes) -> str:
    """The text of a Python source, as Python decodes it (PEP 263).

    Bytes that are not of the encoding are kept as lone surrogates where Python passes over them: in comments.

    Raises:
        UnreadableError: Python does not read it, or it would not be the same bytes again.
    """
    if b"\0" in data:
        raise UnreadableError(f"a NUL byte at {data.index(0)}")
    codec = declared(data)
    try:
        text = data.decode(codec)
    except LookupError:
        raise UnreadableError(f"its coding line names {codec!r}, which is no encoding of text") from None
    except UnicodeError as error:
        text = _with_strange_comments(data, codec, error)
    try:
        same = encode(text) == data
    except (UnicodeError, LookupError):
        same = False
    if not same:
        raise UnreadableError(f"as {codec!r} it cannot be written again byte for byte")
    return text


def _with_strange_comments(data: bytes, codec: str, error: UnicodeError) -> str:
    try:
        parse(data)
        return data.decode(codec, errors="surrogateescape")
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        why = (
            f"byte {data[error.start]:#04x} at {error.start}"
            if isinstance(error, UnicodeDecodeError)
            else str(error)
        )
        said = "" if codec != "utf-8" else "; Python needs a coding line for other encodings"
        raise UnreadableError(f"not {codec.replace('utf-', 'UTF-')}: {why}{said}") from None


def encode(text: str) -> bytes:
    """The bytes of a Python source: in UTF-8, or as the text's own coding line says.

    Raises:
        UnicodeError, LookupError: its encoding does not have one of its characters, or does not exist.
    """
    head = "".join(lines(text)[:2]).encode("utf-8", "surrogatepass")
    return text.encode(declared(head), errors="surrogateescape")


def legible(data: bytes) -> str:
    """The text of a Python source for somebody who only looks: what is not text is replaced."""
    try:
        return data.decode(declared(data), errors="replace")
    except (UnicodeError, LookupError):
        return data.decode("utf-8", errors="replace")


def read(path: str, data: bytes) -> str:
    """The text of a file that may be Python: else it is UTF-8. Texts that records hold, so no stray bytes.

    Raises:
        UnreadableError: as `decode`; not UTF-8.
    """
    if is_source(path):
        text = decode(data)
        if STRAY.search(text):
            raise UnreadableError("bytes in a comment are not of its encoding")
        return text
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise UnreadableError(f"not UTF-8: byte {data[error.start]:#04x} at {error.start}") from None


def write(path: str, text: str) -> bytes:
    """The bytes of a file's text: `read` turned round.

    Raises:
        UnicodeError, LookupError: as `encode`.
    """
    return encode(text) if is_source(path) else text.encode("utf-8")


def declared(data: bytes) -> str:
    """The encoding that the first two lines declare; a byte order mark is part of the text in UTF-8."""
    mark = MARK.encode()
    first, second = (*re.split(rb"\r\n|\r|\n", data.removeprefix(mark), maxsplit=2), b"")[:2]
    found = _CODING.match(first) or (_CODING.match(second) if _BLANK.match(first) else None)
    name = found[1].decode().lower().replace("_", "-") if found and not data.startswith(mark) else "utf-8"
    return "utf-8" if name in ("utf8", "utf-8-sig") or name.startswith("utf-8-") else name


# ---- lines and trees --------------------------------------------------------------------------------------


def lines(text: str) -> list[str]:
    """The lines as Python counts them, each with its end; what follows the last end, if only "", is the last."""
    starts = [0, *(match.end() for match in LINE_END.finditer(text)), len(text)]
    return [text[start:end] for start, end in itertools.pairwise(starts)]


def line_at(text: str, offset: int) -> int:
    """The number (from 1) of the line that holds a character."""
    return sum(1 for _ in LINE_END.finditer(text, 0, offset)) + 1


def line_end(text: str) -> str:
    """Ending of most lines of a text; "\\n" if there are none."""
    found = [match[0] for match in LINE_END.finditer(text)]
    return max(("\n", "\r\n", "\r"), key=found.count)


def plain(text: str) -> str:
    """The text as Python's parser has it: no byte order mark, every line ended by \\n, a sign for each stray byte.

    Lines and UTF-8 columns are those of the text, but for the mark's three bytes in the first line.
    """
    return STRAY.sub("?", LINE_END.sub("\n", text.removeprefix(MARK)))


def parse(source: str | bytes, mode: str = "exec") -> Any:
    """The tree of some source, as `ast.parse` gives it and with its errors."""
    with _ALONE:
        return ast.parse(plain(source) if isinstance(source, str) else source, mode=mode)


def literal(source: str) -> Any:
    """The value of a Python literal, as `ast.literal_eval` gives it and with its errors."""
    return ast.literal_eval(parse(source.lstrip(" \t"), mode="eval"))
