"""The program that looks for hidden tests in a workspace: what pytest collects, and what can be read.

Runs inside the sandbox that it looks at, beside the runner of `grading`. Reads one JSON request from stdin ("ids":
tests whose files to collect, null for all that the project's configuration finds; "hidden": tests to look for;
"options": of pytest), writes a JSON line per collected test and per file that shows a hidden one to descriptor 3, then
{"done": true}.

A test is known by its text: whatever file, class or name pytest finds it under, and whatever archive, encoding or
notebook it lies in. Bytecode is known by its names and constants.
"""

from __future__ import annotations

import inspect
import json
import os
import re
import sys
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from woodshed.synthesis.leaks import fingerprints, readers

RUNNER = "/run/woodshed"
MOST_CHARS = 1 << 16
"""Of a test that is no function: a text file that a conftest collects."""
FEWEST = 8
"""Tokens of a text that says something."""
SAME = 0.9
"""Share of names and constants that two functions have in common when they are one."""


def main() -> None:
    request = json.load(sys.stdin)
    out = os.fdopen(3, "w", encoding="utf-8", errors="backslashreplace")
    workspace = str(Path.cwd())
    for line in shown(workspace, request["hidden"]):  # before any code of the project has run
        out.write(json.dumps(line) + "\n")
    sys.path.insert(0, RUNNER)
    from woodshed_runner import arguments  # pyright: ignore[reportMissingImports]

    os.environ["PYTEST_DISABLE_PLUGIN_AUTOLOAD"] = "1"
    collection = Collection()
    options = arguments({"workspace": workspace, "ids": request["ids"], "options": request["options"]})
    pytest.main([*options, "--collect-only", "--assert=plain"], plugins=[collection])
    for line in collection.tests:
        out.write(json.dumps(line) + "\n")
    out.write(json.dumps({"done": True}) + "\n")
    out.flush()
    os._exit(0)


class Collection:
    """Plugin that notes each test as it is collected, also one that a conftest deselects later."""

    def __init__(self) -> None:
        self.tests: list[dict[str, Any]] = []

    def pytest_itemcollected(self, item: pytest.Item) -> None:
        try:
            text, names = described(item)
        except Exception:  # an item of the project's own, which may raise whatever it likes
            text, names = "", []
        self.tests.append({"id": item.nodeid, "text": text, "names": names})


def described(item: pytest.Item) -> tuple[str, list[str]]:
    """(text of a test without decorators, names and constants of its bytecode)."""
    function = getattr(item, "function", None) or getattr(item, "obj", None)
    function = inspect.unwrap(function) if callable(function) else None
    function = getattr(function, "__func__", function)
    if inspect.isfunction(function):
        names = sorted({function.__name__, *fingerprints.bytecode(function.__code__)})
        return without_decorators(inspect.getsource(function)), names
    if docstring := getattr(getattr(item, "dtest", None), "docstring", ""):
        return docstring, []
    return item.path.read_text("utf-8", errors="replace")[:MOST_CHARS], []


def without_decorators(source: str) -> str:
    start = re.search(r"(?m)^[ \t]*(async\s+)?def\b", source)
    return source[start.start() :] if start else source


def shown(root: str, hidden: list[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """A line for each file that shows a hidden test."""
    needles = [Needle(test) for test in hidden]
    for folder, _, files in os.walk(root) if hidden else ():
        for path in (f"{folder}/{file}" for file in files):
            for content in readers.read(path, data) if (data := contents(path)) is not None else ():
                words = fingerprints.words(content.text)
                text, present = f" {' '.join(words)} ", frozenset(words)
                for number, needle in enumerate(needles):
                    if needle.is_in(text, present, content.code):
                        yield {"shown": number, "where": content.where}


class Needle:
    """A hidden test, as it is looked for."""

    def __init__(self, test: dict[str, Any]) -> None:
        words = fingerprints.words(test["text"])
        self.text = f" {' '.join(words)} " if len(words) >= FEWEST else ""
        self.longest = max(words, key=len, default="")
        self.names = frozenset(test["names"])

    def is_in(self, text: str, present: frozenset[str], module: types.CodeType | None) -> bool:
        if module is None:
            return bool(self.text) and self.longest in present and self.text in text
        return any(
            code.co_name in self.names
            and fingerprints.similarity(self.names, fingerprints.bytecode(code) | {code.co_name}) >= SAME
            for code in fingerprints.code_objects(module)
        )


def contents(path: str) -> bytes | None:
    """The bytes of a regular file."""
    try:
        return Path(path).read_bytes() if Path(path).is_file() and not Path(path).is_symlink() else None
    except OSError:
        return None


if __name__ == "__main__":
    main()
