"""Files of others, read as data: text, JSON and TOML that anybody may have written, by accident or on purpose.

What cannot be read is one error with the file's name, the reason and the way out: a pipe, which would be waited for
without end, a file too large, text that is not UTF-8, values too deep or numbers too long for what comes after.
"""

from __future__ import annotations

import configparser
import json
import os
import stat
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any, BinaryIO

from woodshed.records import WoodshedError

MOST_BYTES = 64 << 20
"""Size of the largest settings, whatever they are called."""
MOST_DATA_BYTES = 8 << 30
"""Size of the largest file of examples, one a line."""
MOST_DEPTH = 100
"""Levels of lists and tables inside each other."""
MOST_BITS = 128
"""Of an integer; "no limit" is spelt with a hundred in models' settings."""

Wrong = type[WoodshedError]


def open_file(path: Path, wrong: Wrong, remedy: str = "") -> BinaryIO:
    """Open a file for reading, its links followed.

    Raises:
        FileNotFoundError: there is none.
        wrong: it is something else than a file, or may not be read; ends with the remedy.
    """
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        mode = os.fstat(descriptor).st_mode
        if stat.S_ISREG(mode):
            return os.fdopen(descriptor, "rb")
        os.close(descriptor)
        why = f"it is {kind(mode)}, not a file"
    except FileNotFoundError:
        raise
    except OSError as error:  # a socket cannot even be opened
        why = str(error.strerror)
    raise wrong(_said(str(path), why, remedy))


def kind(mode: int) -> str:
    """A kind of file in words, by its `st_mode`."""
    kinds = {
        stat.S_IFDIR: "a folder",
        stat.S_IFIFO: "a pipe",
        stat.S_IFSOCK: "a socket",
        stat.S_IFREG: "a file",
    }
    return kinds.get(stat.S_IFMT(mode), "a device")


def read(path: Path, wrong: Wrong, remedy: str = "", *, most: int = MOST_BYTES) -> str:
    """The text of a file of at most `most` bytes, in UTF-8 with or without a byte order mark, line ends as they are.

    Raises:
        FileNotFoundError: there is none.
        wrong: it cannot be read; says why and ends with the remedy.
    """
    with open_file(path, wrong, remedy) as file:
        if os.fstat(file.fileno()).st_size > most:
            raise wrong(_said(str(path), f"it is larger than {most >> 20} MB", remedy))
        data = file.read()
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise wrong(
            _said(str(path), f"it is not UTF-8 ({error.reason} at byte {error.start})", remedy)
        ) from None


def read_json(path: Path, wrong: Wrong, remedy: str = "") -> Any:
    """The value that a JSON file holds. Raises as `read`."""
    return parse_json(read(path, wrong, remedy), str(path), wrong, remedy)


def read_toml(path: Path, wrong: Wrong, remedy: str = "") -> dict[str, Any]:
    """The table that a TOML file holds. Raises as `read`."""
    return parse_toml(read(path, wrong, remedy), str(path), wrong, remedy)


def parse_json(text: str, origin: str, wrong: Wrong, remedy: str = "") -> Any:
    """The value that a text spells in JSON; `origin` names the text.

    Raises:
        wrong: it is no JSON, too deep, or holds a number that is too long.
    """
    return _parsed("JSON", json.loads, text, origin, wrong, remedy)


def parse_toml(text: str, origin: str, wrong: Wrong, remedy: str = "") -> dict[str, Any]:
    """The table that a text spells in TOML. Raises as `parse_json`."""
    return _parsed("TOML", tomllib.loads, text, origin, wrong, remedy)


def parse_ini(text: str) -> configparser.RawConfigParser | None:
    """The sections that a text spells as an INI file, values as they stand; None where it is none."""
    found = configparser.RawConfigParser(strict=False, allow_no_value=True)
    try:
        found.read_string(text)
    except (configparser.Error, AttributeError):  # the latter at a line below a key without a value
        return None
    return found


def _parsed(form: str, parse: Callable[[str], Any], text: str, origin: str, wrong: Wrong, remedy: str) -> Any:
    try:
        value = parse(text)
        why = _excess(value)
    except RecursionError:
        why = TOO_DEEP
    except ValueError as error:
        why = TOO_LONG if "digits" in str(error) else f"it is not valid {form}: {error}"
    if why:
        raise wrong(_said(origin, why, remedy))
    return value


TOO_DEEP = f"its values are nested more than {MOST_DEPTH} levels deep"
TOO_LONG = f"it holds a number of more than {MOST_BITS} bits"


def _excess(value: Any) -> str:
    """Why a value is too deep or too long; "" where it is neither."""
    level, depth = [value], 0
    while level:
        if any(isinstance(each, int) and each.bit_length() > MOST_BITS for each in level):
            return TOO_LONG
        inner = [each for each in level if isinstance(each, dict | list)]
        if inner and depth == MOST_DEPTH:
            return TOO_DEEP
        level = [value for each in inner for value in (each.values() if isinstance(each, dict) else each)]
        depth += 1
    return ""


def _said(origin: str, why: str, remedy: str) -> str:
    return f"{origin} cannot be read: {why}" + (f". {remedy}" if remedy else "")
