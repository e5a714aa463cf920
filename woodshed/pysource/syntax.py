"""Python source: bytes to text and back without loss, lines as Python counts them, and parsing.

In memory a source is its decoded text, complete: a byte order mark is the first character, line ends are kept, and the
coding line says in which encoding the text is written again. So edited text is written by `encode` alone, and parts
that were not edited come back byte for byte.

Python 3.11 keeps the depth of the tree under construction in one counter for all threads (cpython issue 106905): if the
garbage collector lets another thread parse in between, the first parse ends in a SystemError, about once in a thousand.
So every parse of a process with threads goes through this module.

Standard library only: programs inside sandboxes import this file too.
"""

from __future__ import annotations

import ast
import codecs
import itertools
import re
import threading
from typing import Any

MARK = "\ufeff"
"""Byte order mark."""
LINE_END = re.compile(r"\r\n|\r|\n")
"""Line ends of Python. Form feeds, U+0085, U+2028 and their like do not, whatever `str.splitlines` says."""
STRAY = re.compile("[\udc80-\udcff]")
"""Bytes outside of a source's encoding, as `decode` keeps them."""
READ = re.compile(
    r"utf-8|ascii|iso8859-\d+|cp\d+|koi8-[rtu]|mac-\w+|kz1048|ptcp154|palmos|hp-roman8|tis-620"
    r"|big5\w*|euc_\w+|gb\w+|hz|iso2022_\w+|johab|shift_jis\w*"
)
"""Encodings that are read, by the names that Python gives them: each decodes in time linear in the size of the file.
Others do not: "punycode" takes hours for a file of some megabytes."""
LONGEST_NAME = 40
"""Characters of the longest name of an encoding; Python knows none that is longer."""
_CODING = re.compile(rb"^[ \t\f]*#.*?coding[:=][ \t]*([-_.a-zA-Z0-9]+)", re.DOTALL)
_BLANK = re.compile(rb"^[ \t\f]*(?:#.*)?$", re.DOTALL)
_ALONE = threading.RLock()


class UnreadableError(ValueError):
    """Bytes that are not a Python source; the message says why."""


def is_source(path: str) -> bool:
    """True if the file has a Python suffix."""
    return path.endswith((".py", ".pyi", ".pyw"))


def decode(data: bytes, *, strays: bool = True) -> str:
    """The text of a Python source, as Python decodes it (PEP 263).

    Args:
        strays: keep bytes outside of the encoding as lone surrogates in comments, where Python ignores them. That takes
            a parse; without it they are refused.

    Raises:
        UnreadableError: Python cannot read it, or writing it would change its bytes.
    """
    if b"\0" in data:
        raise UnreadableError(f"a NUL byte at {data.index(0)}")
    try:
        codec = _readable(data)
    except LookupError as error:
        raise UnreadableError(f"its coding line names {error.args[0]}") from None
    try:
        text = data.decode(codec)
    except UnicodeError as error:
        if not strays or not _is_parsed(data):
            raise UnreadableError(_misfit(data, codec, error)) from None
        text = data.decode(codec, errors="surrogateescape")
    try:
        same = encode(text) == data
    except (UnicodeError, LookupError):
        same = False
    if not same:
        raise UnreadableError(f"as {codec!r} it cannot be written again byte for byte")
    return text


def _is_parsed(data: bytes) -> bool:
    try:
        parse(data)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return False
    return True


def _misfit(data: bytes, codec: str, error: UnicodeError) -> str:
    """The reason why bytes are outside of an encoding."""
    is_byte = isinstance(error, UnicodeDecodeError)
    position = f"byte {data[error.start]:#04x} at {error.start}" if is_byte else str(error)
    advice = "" if codec != "utf-8" else "; Python needs a coding line for other encodings"
    return f"not {codec.replace('utf-', 'UTF-')}: {position}{advice}"


def encode(text: str) -> bytes:
    """The bytes of a Python source: in UTF-8, or as the text's own coding line says.

    Raises:
        UnicodeError, LookupError: its encoding does not have one of its characters, or does not exist.
    """
    head = "".join(lines(text)[:2]).encode("utf-8", "surrogatepass")
    return text.encode(_readable(head), errors="surrogateescape")


def legible(data: bytes) -> str:
    """Text of a Python source for reading only: undecodable bytes are replaced."""
    try:
        return data.decode(_readable(data), errors="replace")
    except (UnicodeError, LookupError):
        return data.decode("utf-8", errors="replace")


def read(path: str, data: bytes) -> str:
    """Text of a file, Python or else UTF-8, without stray bytes, as records hold it.

    Raises:
        UnreadableError: as `decode`; not UTF-8.
    """
    if is_source(path):
        return decode(data, strays=False)
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise UnreadableError(f"not UTF-8: byte {data[error.start]:#04x} at {error.start}") from None


def write(path: str, text: str) -> bytes:
    """Bytes of a file's text: the inverse of `read`.

    Raises:
        UnicodeError, LookupError: as `encode`.
    """
    return encode(text) if is_source(path) else text.encode("utf-8")


def declared(data: bytes) -> str:
    """The encoding that the first two lines declare; a byte order mark is part of the text in UTF-8."""
    mark = MARK.encode()
    first, second = (*re.split(rb"\r\n|\r|\n", data.removeprefix(mark), maxsplit=2), b"")[:2]
    match = _CODING.match(first) or (_CODING.match(second) if _BLANK.match(first) else None)
    name = match[1].decode().lower().replace("_", "-") if match and not data.startswith(mark) else "utf-8"
    return "utf-8" if name in ("utf8", "utf-8-sig") or name.startswith("utf-8-") else name


def _readable(data: bytes) -> str:
    """The declared encoding.

    Raises:
        LookupError: it is not one of READ; says its name and the reason.
    """
    name = declared(data)
    if len(name) > LONGEST_NAME:
        raise LookupError(f"{name[:LONGEST_NAME]!r}..., which is not a text encoding")
    try:
        known = codecs.lookup(name).name
    except LookupError:
        known = ""
    if not READ.fullmatch(known):
        raise LookupError(f"{name!r}, which is not a text encoding that is read here")
    return name


# ---- lines and trees --------------------------------------------------------------------------------------


def lines(text: str) -> list[str]:
    """The lines as Python counts them, each with its end; the text after the last end, even "", is the last line."""
    starts = [0, *(match.end() for match in LINE_END.finditer(text)), len(text)]
    return [text[start:end] for start, end in itertools.pairwise(starts)]


def line_at(text: str, offset: int) -> int:
    """The number (from 1) of the line that holds a character."""
    return sum(1 for _ in LINE_END.finditer(text, 0, offset)) + 1


def line_end(text: str) -> str:
    """Ending of most lines of a text; "\\n" if there are none."""
    ends = [match[0] for match in LINE_END.finditer(text)]
    return max(("\n", "\r\n", "\r"), key=ends.count)


def plain(text: str) -> str:
    """The text as Python's parser has it: no byte order mark, every line ended by \\n, "?" for each stray byte.

    Lines and UTF-8 columns are those of the text, except for the mark's three bytes in the first line.
    """
    return STRAY.sub("?", LINE_END.sub("\n", text.removeprefix(MARK)))


def parse(source: str | bytes, mode: str = "exec") -> Any:
    """Syntax tree of a source, like `ast.parse`, with the same errors. Bytes must be in an encoding of READ."""
    if isinstance(source, bytes):
        try:
            _readable(source)
        except LookupError as error:
            raise SyntaxError(f"unknown encoding: {error.args[0]}") from None
    with _ALONE:
        return ast.parse(plain(source) if isinstance(source, str) else source, mode=mode)


def literal(source: str) -> Any:
    """Value of a Python literal, like `ast.literal_eval`, with the same errors."""
    return ast.literal_eval(parse(source.lstrip(" \t"), mode="eval"))
