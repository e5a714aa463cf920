"""Bytes of Python to text and back, lines as Python counts them, and parsing from many threads."""

from __future__ import annotations

import ast
import codecs
import contextlib
import encodings.aliases
import gc
import itertools
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

import woodshed
from woodshed.pysource import syntax

SHALLOW = "a = 1\n" * 50
DEEP = "\n".join(f"x{n} = {'(' * 20}{n}{' + 1)' * 20}" for n in range(50))


@pytest.fixture
def yielding_collector() -> Iterator[None]:
    """The garbage collector runs all the time, and lets other threads go on meanwhile."""

    def let_others(phase: str, info: dict[str, int]) -> None:
        time.sleep(0)

    before = gc.get_threshold()
    gc.callbacks.append(let_others)
    gc.set_threshold(20)
    yield
    gc.set_threshold(*before)
    gc.callbacks.remove(let_others)


def broken(parse: Callable[[str], object], rounds: int) -> int:
    """How many of the parses of several threads end in a SystemError."""

    def attempt(number: int) -> bool:
        try:
            parse(DEEP if number % 2 else SHALLOW)
        except SystemError:
            return True
        return False

    with ThreadPoolExecutor(4) as pool:
        return sum(pool.map(attempt, range(rounds)))


def test_threads_do_not_break_each_others_parses(yielding_collector):
    assert broken(syntax.parse, 200) == 0


def test_nobody_parses_beside_the_lock():
    """A parse of one's own breaks another thread's. What runs inside sandboxes has no threads."""
    package = Path(woodshed.__file__).parent
    inside = {"grading/assert_hardening.py", "pysource/syntax.py"}
    parsers = []
    for path in sorted(package.rglob("*.py")):
        tree = ast.parse(path.read_text("utf-8"))
        calls = [ast.unparse(node.func) for node in ast.walk(tree) if isinstance(node, ast.Call)]
        if "ast.parse" in calls and path.relative_to(package).as_posix() not in inside:
            parsers.append(path.relative_to(package).as_posix())
    assert parsers == []


def test_a_tree_a_value_and_an_error_are_those_of_ast():
    assert ast.dump(syntax.parse(DEEP)) == ast.dump(ast.parse(DEEP))
    assert syntax.literal(" {'a': (1, -2.5)}") == {"a": (1, -2.5)}
    for bad in ("f(1)", "1 +"):
        with pytest.raises((ValueError, SyntaxError)):
            syntax.literal(bad)
    with pytest.raises(SyntaxError):
        syntax.parse("def")


# ---- bytes, text, lines -----------------------------------------------------------------------------------

SOURCES = {
    "plain": b"x = 1\n",
    "empty": b"",
    "no newline at the end": b"def f():\n    return 1",
    "mark": b"\xef\xbb\xbfx = '\xc3\xa9'\n",
    "mark and coding line": b"\xef\xbb\xbf# coding: utf-8\nx = '\xc3\xa9'\n",
    "Windows": b"x = 1\r\ny = 2\r\n",
    "old Macintosh": b"x = 1\ry = 2\r",
    "converted twice": b"def f():\r\r\n    return 1\r\r\n",
    "lone return in a comment": b"# a\r# b\nx = 1\n",
    "form feed": b"x = 1\n\x0cdef f():\n    return 'a\x0cb'\n",
    "separators of other worlds": "x = 'a\u2028b\x85c\x1cd\x0be'\ny = 2\n".encode(),
    "latin-1": b"# -*- coding: latin-1 -*-\nx = '\xe9'\n",
    "cp1252": b"#!/usr/bin/python\n# vim: set fileencoding=cp1252 :\nx = '\x80'\n",
    "coding below strange bytes": b"# \xe9\n# coding: latin-1\nx = 1\n",
    "coding behind a lone return": b"#\r# coding: latin-1\nx = '\xe9'\n",
    "coding line that counts no more": b"x = 1\n# coding: latin-1\ny = '\xc3\xa9'\n",
    "Japanese": "# coding: iso2022_jp\nx = '\u3042'\n".encode("iso2022_jp"),
    "strange bytes in a comment": b"x = 1  # \xe9\n",
}


@pytest.mark.parametrize("name", SOURCES)
def test_a_source_is_read_as_python_reads_it_and_written_byte_for_byte(name):
    data = SOURCES[name]
    try:
        expected = ast.dump(ast.parse(data), include_attributes=True)
    except SyntaxError:  # newer Pythons look into comments, too
        assert name == "strange bytes in a comment"
        with pytest.raises(syntax.UnreadableError, match="not UTF-8: byte 0xe9 at 9"):
            syntax.decode(data)
        return
    text = syntax.decode(data)
    assert ast.dump(syntax.parse(text), include_attributes=True) == expected
    assert syntax.encode(text) == data
    assert "".join(syntax.lines(text)) == text
    assert len(syntax.lines(text)) == len(syntax.plain(text).split("\n"))


REFUSED = {
    b"x = '\xe9'\n": "not UTF-8: byte 0xe9 at 5; Python needs a coding line",
    b"x = 1\0\n": "a NUL byte at 5",
    b"# coding: nope\nx = 1\n": "'nope', which is not a text encoding",
    b"# coding: rot13\nx = 1\n": "'rot13', which is not a text encoding",
    b"# coding: cp1252\nx = '\x81'\n": "not cp1252: byte 0x81 at 22",
    b"# coding: utf-7\nx = '+AOk-'\n": "cannot be written again byte for byte",
    b"# coding: idna\nx = 1\n": "'idna', which is not a text encoding that is read here",
    b"# coding: hz\nx = '~{~}'\n": "cannot be written again byte for byte",
    b"# coding: " + b"a" * 1_000_000 + b"\nx = 1\n": "names '"
    + "a" * 40
    + "'..., which is not a text encoding$",
    "x = 1\n".encode("utf-16"): "NUL byte",
}


@pytest.mark.parametrize("data", REFUSED)
def test_what_is_no_source_is_refused_with_the_reason(data):
    with pytest.raises(syntax.UnreadableError, match=REFUSED[data]):
        syntax.decode(data)
    assert isinstance(syntax.legible(data), str)


def test_an_edit_may_take_the_coding_line_away():
    text = syntax.decode(b"# coding: latin-1\nx = '\xe9'\n")
    assert syntax.encode(text.partition("\n")[2]) == "x = 'é'\n".encode()


def test_text_of_records_holds_no_stray_bytes():
    with pytest.raises(syntax.UnreadableError):
        syntax.read("a.py", b"x = 1  # \xe9\n")
    with pytest.raises(syntax.UnreadableError, match="byte 0xff at 1"):
        syntax.read("a.txt", b"a\xff")
    assert syntax.read("a.txt", b"# coding: latin-1\n\xc3\xa9") == "# coding: latin-1\né"
    assert syntax.write("a.txt", "# coding: latin-1\né") == b"# coding: latin-1\n\xc3\xa9"


def test_most_lines_decide_how_a_new_one_ends():
    assert syntax.line_end("") == syntax.line_end("a\nb\r\nc\n") == "\n"
    assert syntax.line_end("a\r\nb\r\nc\n") == syntax.line_end("a\r\r\nb\r\r\n") == "\r\n"
    assert syntax.line_end("a\rb\r") == "\r"
    assert [syntax.line_at("a\r\nb\rc\nd", offset) for offset in (0, 3, 5, 7)] == [1, 2, 3, 4]


def test_encodings_are_read_in_a_time_that_grows_with_the_file():
    """Every encoding that is read decodes what is worst for it in the time of a few hundred microseconds a kilobyte;
    "punycode" needs the square: minutes for this file."""
    worst = [
        b"\xff" * 20_000,
        b"+2AA\xff\\u12\\N{x" * 1500,
        bytes(range(128, 256)) * 150,
        b"~{ab~}\x1b$Bab\x1b(B" * 1500,
    ]
    squared = b"# coding: punycode\nx = 1\n#" + b"zz9" * 30_000
    started = time.process_time()
    with pytest.raises(syntax.UnreadableError):
        syntax.decode(squared)
    with pytest.raises(SyntaxError):
        syntax.parse(squared)
    with pytest.raises(LookupError):
        syntax.encode(squared.decode())
    assert syntax.legible(squared) == squared.decode()
    assert time.process_time() - started < 1
    known = {*encodings.aliases.aliases.values(), "unicode_escape", "raw_unicode_escape"} - {"mbcs", "oem"}
    names = {codecs.lookup(name).name for name in known}
    read = [name for name in names if syntax.READ.fullmatch(name)]
    assert len(read) > 80 and not {"punycode", "idna", "rot13", "undefined"} & set(read)
    for name, junk in itertools.product(read, worst):
        data = f"# coding: {name}\nx = 1\n#".encode() + junk
        started = time.process_time()
        with contextlib.suppress(syntax.UnreadableError):
            syntax.read("a.py", data)
        assert time.process_time() - started < 1, name
