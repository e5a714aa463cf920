"""Lines that match a regular expression of Python.

Runs inside the sandbox, in any Python from 3.8 on, so that hostile files and endless patterns do no harm outside.
Standard library only.
"""

# ruff: noqa: PTH116, PTH123

from __future__ import annotations

import json
import os
import re
import stat
import sys
import warnings

LEFT_OUT = {".git", "__pycache__"}
NEWLINE = re.compile(
    r"\n|(?<!\\)(?:\\\\)*\\(?:n|x0a|u000a|012|N\{LINE FEED\})|\(\?[aLiux]*[sm]", re.IGNORECASE
)
"""Parts of a pattern that match a line end, or flags about lines; such a pattern may match several lines."""


def compiled(pattern):
    """(expression, ""), or (None, the error). Syntax of other dialects that Python reads differently, such as a POSIX
    class, is an error too."""
    with warnings.catch_warnings():
        warnings.simplefilter("error", FutureWarning)
        warnings.simplefilter("ignore", DeprecationWarning)
        try:
            return re.compile(pattern, re.MULTILINE), ""
        except (re.error, OverflowError, RecursionError, ValueError) as error:
            return None, str(error)
        except FutureWarning:
            posix = re.search(r"\[:\^?\w+:\]", pattern)
            return None, f"{posix[0]} is not known" if posix else "a set inside a set has to be escaped"


def files(top):
    """Files at or below a path, sorted by their bytes; links are not followed below it."""
    paths, waiting = [], [top]
    while waiting:
        folder = waiting.pop()
        try:
            entries = list(os.scandir(folder))
        except NotADirectoryError:
            return [folder]
        except OSError:  # no permission, or a path that is too long
            continue
        for entry in entries:
            path = entry.name if folder == "." else folder + "/" + entry.name
            if not entry.is_dir(follow_symlinks=False):
                paths.append(path)
            elif entry.name not in LEFT_OUT:
                waiting.append(path)
    return sorted(paths, key=os.fsencode)


def text_of(path):
    """The text of a file as the policy reads it; None for other files."""
    try:
        if not stat.S_ISREG(os.stat(path, follow_symlinks=False).st_mode):
            return None
        with open(path, "rb") as file:
            head = file.read(8192)
            data = None if b"\0" in head else head + file.read()
    except OSError:
        return None
    if data is None:
        return None
    text = data.decode("utf-8-sig", "backslashreplace").replace("\r\n", "\n")
    return text if "\n" in text else text.replace("\r", "\n")


def hits(expression, text, across):
    """(line number, line) of every line in which a match begins; of those within a line, or across lines."""
    lines = text.split("\n")
    if lines[-1] == "":
        lines.pop()
    if not across:
        yield from ((number, line) for number, line in enumerate(lines, 1) if expression.search(line))
        return
    last = position = 0
    number = 1
    for match in expression.finditer(text):
        number += text.count("\n", position, match.start())
        position = match.start()
        if number != last and number <= len(lines):
            last = number
            yield number, lines[number - 1]


def search(expression, top, most, chars, across):
    """The first hits as [path, line number, beginning of the line, its length], and the number of all hits."""
    shown, total = [], 0
    for path in files(top):
        text = text_of(path)
        for number, line in hits(expression, text, across) if text is not None else ():
            total += 1
            if len(shown) < most:
                name = os.fsencode(path).decode("utf-8", "backslashreplace")
                shown.append([name, number, line[:chars], len(line)])
    return shown, total


def main(pattern, top, most, chars):
    """Print the result as JSON. An invalid expression is searched for as plain text. If no line holds a match, matches
    over several lines are searched for: a negated set or white space may match a line end."""
    expression, fault = compiled(pattern)
    wanted = expression or re.compile(re.escape(pattern))
    shown, total = search(wanted, top, int(most), int(chars), NEWLINE.search(pattern))
    if not shown and expression:
        shown, total = search(wanted, top, int(most), int(chars), True)
    print(json.dumps({"fault": fault, "hits": shown, "total": total}))


if __name__ == "__main__":
    main(*sys.argv[1:])
