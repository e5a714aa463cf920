"""A command's output as the policy reads it: short, printable, and the same on every run.

Reproducible rollouts need observations without random parts. Two runs of one command differ in durations, memory
addresses, temporary names and process ids. Only these forms are masked, because wider patterns would also hide values
that the program printed.
"""

from __future__ import annotations

import re

LINE_CHARS = 300
"""Limit of the characters shown of one line of a file or of a search hit."""
QUOTED_CHARS = 200
"""Limit of the characters that an observation quotes of a path or other text of a call or a workspace."""
_ESCAPES = re.compile(
    r"\x1b\][^\x07\x1b]*(?:\x07|\x1b\\)?"  # operating system command: window titles, links
    r"|\x1b\[[0-?]*[ -/]*[@-~]"  # control sequence: colours, cursor moves
    r"|\x1b[PX^_][^\x1b]*(?:\x1b\\)?"  # device control and other strings
    r"|\x1b[ -/]*[0-~]"  # two-character escapes
)
_CONTROLS = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")
_MASKS = (
    (re.compile(r"\bin \d+\.\d+s( \(\d+:\d\d:\d\d\))?"), "in #s"),  # pytest, unittest
    (re.compile(r"^\d+\.\d+s (?=(call|setup|teardown)\b)", re.M), "#s "),  # pytest --durations
    (re.compile(r"^(real|user|sys)(\s+)\d+m\d+[.,]\d+s$", re.M), r"\1\2#s"),  # time
    (re.compile(r"\bat 0x[0-9a-f]{6,16}\b", re.I), "at 0x#"),  # <object at 0x7f12...>
    (re.compile(r"\b0x(7f|5[56])[0-9a-f]{10}\b", re.I), "0x#"),  # other pointers into heap and stack
    (re.compile(r"/tmp/tmp[a-z0-9_]{8}\b"), "/tmp/tmp#"),  # tempfile
    (re.compile(r"/tmp/tmp\.[A-Za-z0-9]{6,10}\b"), "/tmp/tmp.#"),  # mktemp
    (re.compile(r"(\bline \d+: +)\d+ (?=[A-Z][a-z]+)"), r"\1"),  # bash: line 1:   4711 Segmentation fault
)


def clean(data: bytes) -> str:
    """Output bytes as text without escapes, overwritten progress, control characters and random values."""
    text = _ESCAPES.sub("", data.decode("utf-8", errors="backslashreplace"))
    lines = [_overwritten(line).rstrip() for line in text.replace("\r\n", "\n").split("\n")]
    text = printable("\n".join(lines).strip("\n"))
    for pattern, mask in _MASKS:
        text = pattern.sub(mask, text)
    return text


def printable(text: str) -> str:
    """Text whose control characters, except tab and newline, are written as \\xNN."""
    return _CONTROLS.sub(lambda match: f"\\x{ord(match[0]):02x}", text)


def clip(text: str, limit: int) -> str:
    """The first and the last half of `limit` characters, with the number of dropped ones between them."""
    if len(text) <= limit:
        return text
    head, tail = text[: limit - limit // 2], text[len(text) - limit // 2 :]
    return f"{head}\n[{len(text) - limit} characters cut]\n{tail}"


def short(text: str) -> str:
    """Text of a call or a workspace, as an observation quotes it."""
    text = printable(text)
    return (
        text
        if len(text) <= QUOTED_CHARS
        else f"{text[:QUOTED_CHARS]}[{len(text) - QUOTED_CHARS} more characters]"
    )


def cut(line: str, num_missing: int = 0) -> str:
    """A line as it is shown; `num_missing` characters at its end were cut before."""
    line = printable(line)
    num_hidden = len(line) - LINE_CHARS + num_missing
    return line if num_hidden <= 0 else f"{line[:LINE_CHARS]} [{num_hidden} more characters]"


def _overwritten(line: str) -> str:
    """A line as a terminal shows it in the end: the part after the last carriage return before its end."""
    return line.rstrip("\r").rpartition("\r")[2]
