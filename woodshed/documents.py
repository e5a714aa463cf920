"""Reading of untrusted text, JSON and TOML files, within limits.

A file that cannot be read is one error with its name, the reason and the remedy: a pipe, which would block without end,
a file that is too large, text that is not UTF-8, values that are nested too deep, or numbers that are too long.
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
"""Limit of the size of settings and other small files."""
MOST_DATA_BYTES = 8 << 30
"""Limit of the size of files of examples, one a line."""
MOST_DEPTH = 100
"""Limit of the levels of nested lists and tables."""
MOST_BITS = 128
"""Limit of the bits of an integer; the settings of some models have 10 ** 30 for "no limit"."""

Wrong = type[WoodshedError]
"""The class of the errors to raise."""


def open_file(path: Path, wrong: Wrong, remedy: str = "") -> BinaryIO:
    """Open a file for reading; links are followed.

    Raises:
        FileNotFoundError: there is no such file.
        wrong: it is not a regular file, or there is no permission to read it; the message ends with the remedy.
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
    raise wrong(_message(str(path), why, remedy))


def kind(mode: int) -> str:
    """The kind of a file in words, by its `st_mode`."""
    kinds = {
        stat.S_IFDIR: "a folder",
        stat.S_IFIFO: "a pipe",
        stat.S_IFSOCK: "a socket",
        stat.S_IFREG: "a file",
    }
    return kinds.get(stat.S_IFMT(mode), "a device")


def read(path: Path, wrong: Wrong, remedy: str = "", *, most: int = MOST_BYTES) -> str:
    """The text of a UTF-8 file of at most `most` bytes, without its byte order mark, line ends unchanged.

    Raises:
        FileNotFoundError: there is no such file.
        wrong: it cannot be read; the message has the reason and ends with the remedy.
    """
    with open_file(path, wrong, remedy) as file:
        if os.fstat(file.fileno()).st_size > most:
            raise wrong(_message(str(path), f"it is larger than {most >> 20} MB", remedy))
        data = file.read()
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise wrong(
            _message(str(path), f"it is not UTF-8 ({error.reason} at byte {error.start})", remedy)
        ) from None


def read_json(path: Path, wrong: Wrong, remedy: str = "") -> Any:
    """The value of a JSON file. Raises as `read`."""
    return parse_json(read(path, wrong, remedy), str(path), wrong, remedy)


def read_toml(path: Path, wrong: Wrong, remedy: str = "") -> dict[str, Any]:
    """The table of a TOML file. Raises as `read`."""
    return parse_toml(read(path, wrong, remedy), str(path), wrong, remedy)


def parse_json(text: str, origin: str, wrong: Wrong, remedy: str = "") -> Any:
    """The value of a JSON text; `origin` names the text in errors.

    Raises:
        wrong: it is not JSON, is nested too deep, or has a number that is too long.
    """
    return _parsed("JSON", json.loads, text, origin, wrong, remedy)


def parse_toml(text: str, origin: str, wrong: Wrong, remedy: str = "") -> dict[str, Any]:
    """The table of a TOML text. Raises as `parse_json`."""
    return _parsed("TOML", tomllib.loads, text, origin, wrong, remedy)


def parse_ini(text: str) -> configparser.RawConfigParser | None:
    """The sections of the text of an INI file, values without interpolation; None if it is not one."""
    parser = configparser.RawConfigParser(strict=False, allow_no_value=True)
    try:
        parser.read_string(text)
    except (configparser.Error, AttributeError):  # AttributeError: a line below a key without a value
        return None
    return parser


def _parsed(form: str, parse: Callable[[str], Any], text: str, origin: str, wrong: Wrong, remedy: str) -> Any:
    try:
        value = parse(text)
        why = _excess(value)
    except RecursionError:
        why = TOO_DEEP
    except ValueError as error:
        why = TOO_LONG if "digits" in str(error) else f"it is not valid {form}: {error}"
    if why:
        raise wrong(_message(origin, why, remedy))
    return value


TOO_DEEP = f"its values are nested more than {MOST_DEPTH} levels deep"
TOO_LONG = f"it holds a number of more than {MOST_BITS} bits"


def _excess(value: Any) -> str:
    """The reason why a value is beyond the limits, or ""."""
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


def _message(origin: str, why: str, remedy: str) -> str:
    return f"{origin} cannot be read: {why}" + (f". {remedy}" if remedy else "")
