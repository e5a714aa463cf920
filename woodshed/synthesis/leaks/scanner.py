"""The program that searches a root file system for code: runs inside the sandbox that it searches, stdlib only.

Reads one JSON request from stdin, writes one JSON line per finding to file descriptor 3, then {"done": files read}.
Inside, because it shall see what an attempt will see, and because files of a hostile repository are opened.
"""

from __future__ import annotations

import ast
import json
import os
import re
import stat
import sys
import types
from collections.abc import Iterator, Sequence
from typing import Any

from woodshed.synthesis.leaks import prints, readers
from woodshed.synthesis.leaks.prints import Body

SKIPPED = ("/proc", "/sys", "/dev", "/run/woodshed", "/run/supervisor.pyc", "/run/watcher.pyc")  # ours
OWN = (
    "/workspace",
    "/home",
    "/tmp",
    "/root",
    "/var",
    "/dev/shm",
    "/run",
    "/srv",
    "/mnt",
    "/opt",
    "/data",
    "environment",
)
"""Places that belong to a task: read whole. What belongs to the machine or to the dependencies is read where it could
hold the body at all."""
PYTHON = "/opt/python/"
NEAR = 200
"""Bytes in which a name and its parameters make a signature."""
PLAUSIBLE = (
    *(".py", ".pyi", ".pyc", ".txt", ".md", ".rst", ".html", ".json", ".ipynb", ".db", ".sqlite", ".pkl"),
    *(".zip", ".whl", ".egg", ".tar", ".tgz", ".tar.gz", ".tar.bz2", ".tar.xz", ".tar.zst"),
)
LONG = re.compile(r"\w{4,}")
MAX_SHARED = 16 << 20
"""Bytes of a file of the machine."""
FAR = 0.6
"""Share of a body's longest names that a file of the machine must hold to be read."""


class Search:
    """All that is looked for."""

    def __init__(self, request: dict[str, Any]) -> None:
        self.bodies = [_body(entry) for entry in request["bodies"]]
        self.runs = prints.Runs(self.bodies)
        self.residue = re.compile(request["residue"])
        self.names: dict[str, list[str]] = request["names"]
        """Task to names that may not stand in residue."""
        self.shapes: dict[str, list[int]] = {}
        for number, body in enumerate(self.bodies):
            if body.shape:
                self.shapes.setdefault(body.shape, []).append(number)
        self.words = {frozenset(body.words) for body in self.bodies if body.words}
        self.codes = {
            number: code for number, body in enumerate(self.bodies) if (code := _compiled(body)) is not None
        }

    def findings(self, where: str, data: bytes, is_own: bool) -> Iterator[dict[str, Any]]:
        """What one file gives away."""
        is_residue = is_own and self.residue.search(where.removeprefix("/workspace/")) is not None
        seen: set[tuple[int, str]] = set()
        for piece in readers.read(where, data):
            if not is_own and piece.code is None and not self.may_hold(piece.text):
                continue
            if piece.problem and is_own:
                yield {"kind": "unread", "where": piece.where, "quote": piece.problem, "body": -1}
            for number, kind, quote in self._in_piece(piece, is_own):
                if (number, kind) not in seen:
                    seen.add((number, kind))
                    yield {"kind": kind, "where": piece.where, "quote": quote[:300], "body": number}
            if is_residue:
                for task, names in self.names.items():
                    if (name := _mentioned(piece, names)) and (-1, task) not in seen:
                        seen.add((-1, task))
                        yield {"kind": "name", "where": piece.where, "quote": name, "body": -1, "task": task}

    def may_hold(self, text: str) -> bool:
        """Whether a text of the machine or the dependencies has most of the longest names of some body."""
        present = set(LONG.findall(text))
        return any(len(words & present) >= FAR * len(words) for words in self.words)

    def _in_piece(self, piece: readers.Piece, is_own: bool) -> Iterator[tuple[int, str, str]]:
        if piece.code is not None:
            yield from self._in_code(piece.code)
            return
        tokens = prints.words(piece.text)
        for number, position in self.runs.find(tokens).items():
            yield number, "body", " ".join(tokens[position : position + 40])
        present = set(tokens)
        if "def" in present and not piece.is_binary:
            yield from self._in_functions(piece.text)
        for number, body in enumerate(self.bodies):
            if body.kind == "gold" and body.name in present:
                if piece.is_binary and (quote := _cluster(body, piece.text)):
                    yield number, "body", quote
                elif is_own and (quote := _signature(body, piece.text)):
                    yield number, "signature", quote

    def _in_functions(self, text: str) -> Iterator[tuple[int, str, str]]:
        """Renamed copies: the same shape, the same attributes, calls and constants."""
        for source in (text, *re.findall(r"(?ms)^[ \t]*(?:async )?def .+?(?=^\S|\Z)", text)):
            try:
                tree = ast.parse(source)
            except (SyntaxError, ValueError, RecursionError, MemoryError):
                continue
            for _, function in prints.functions(tree):
                code = prints.code_body(function)
                for number in self.shapes.get(prints.shape(code)[0], ()):
                    if prints.similarity(prints.marks(code), self.bodies[number].marks) >= 0.7:
                        yield number, "body", ast.unparse(function)
            if source is text:
                return

    def _in_code(self, module: types.CodeType) -> Iterator[tuple[int, str, str]]:
        """Bytecode of the same function, under whatever name."""
        for code in prints.code_objects(module):
            for number, wanted in self.codes.items():
                same_code = code.co_code == wanted.co_code and len(wanted.co_code) > 40
                alike = prints.similarity(prints.bytecode(code), prints.bytecode(wanted))
                if (alike >= 0.8 and (code.co_name == wanted.co_name or same_code)) or (
                    same_code and alike >= 0.6
                ):
                    yield (
                        number,
                        "body",
                        f"code object {code.co_name}: {', '.join(sorted(prints.bytecode(code)))}",
                    )


def main() -> None:
    request = json.load(sys.stdin)
    out = os.fdopen(3, "w", encoding="utf-8", errors="backslashreplace")
    search = Search(request)
    count = 0
    for where, data, is_own in files(request["roots"], request["skip"], search):
        count += 1
        if is_own:
            out.write(json.dumps({"at": where}) + "\n")
            out.flush()
        for finding in search.findings(where, data, is_own):
            out.write(json.dumps(finding) + "\n")
    out.write(json.dumps({"done": count}) + "\n")
    out.flush()


def files(roots: Sequence[str], skip: Sequence[str], search: Search) -> Iterator[tuple[str, bytes, bool]]:
    """Path, content, and whether it is the task's own; the process's environment is one of them."""
    if "/" in roots:
        yield "environment", "\n".join(f"{k}={v}" for k, v in os.environ.items()).encode(), True
    for path in (path for root in roots for path in _walk(root, [*SKIPPED, *skip])):
        is_own = path.startswith(OWN) and not path.startswith(PYTHON)
        if not (is_own or _is_plausible(path)):
            continue
        try:
            with open(path, "rb") as file:
                data = file.read(readers.MAX_BYTES if is_own else MAX_SHARED)
        except OSError:
            continue
        if is_own or readers.is_packed(data) or search.may_hold(data.decode("latin-1")):
            yield path, data, is_own


def _walk(root: str, skip: Sequence[str]) -> Iterator[str]:
    for here, folders, names in os.walk(root):
        folders[:] = sorted(f for f in folders if os.path.join(here, f) not in skip)
        for name in sorted(names):
            path = os.path.join(here, name)
            try:
                if stat.S_ISREG(os.lstat(path).st_mode) and path not in skip:
                    yield path
            except OSError:
                continue


def _is_plausible(path: str) -> bool:
    """Whether a file of the machine or the dependencies is in a form that could hold a copy of a Python package."""
    if path.endswith(".pyc"):
        source = re.sub(r"(__pycache__/)?([^/.]+)\.[^/]*$", r"\2.py", path)
        return not os.path.exists(source)  # else the source is read
    return path.endswith(PLAUSIBLE)


def _signature(body: Body, text: str) -> str:
    """A name with all of its parameters close behind it."""
    if len(body.parameters) < 2:
        return ""
    for match in re.finditer(rf"\b{re.escape(body.name)}\b", text):
        near = text[match.start() : match.start() + NEAR]
        if set(body.parameters) <= set(re.findall(r"\w+", near)):
            return " ".join(near.split())[:160]
    return ""


def _cluster(body: Body, text: str) -> str:
    """Strings of a binary file around a name that hold nearly all identifiers and texts of the body."""
    if len(body.names) < 5:
        return ""
    reach = 400 + 60 * len(body.names)
    for match in re.finditer(rf"\b{re.escape(body.name)}\b", text):
        near = text[max(0, match.start() - reach) : match.start() + reach]
        if sum(name in near for name in body.names) >= 0.9 * len(body.names):
            return " ".join(near.split())[:160]
    return ""


def _mentioned(piece: readers.Piece, names: Sequence[str]) -> str:
    if piece.code is not None:
        text = " ".join(
            f"{code.co_name} {' '.join(code.co_names)}" for code in prints.code_objects(piece.code)
        )
    else:
        text = f"{piece.where}\n{piece.text}"
    return next((name for name in names if re.search(rf"\b{re.escape(name)}\b", text)), "")


def _body(entry: dict[str, Any]) -> Body:
    sets = {key: frozenset(entry[key]) for key in ("marks", "names")}
    lists = {key: tuple(entry[key]) for key in ("tokens", "parameters", "words", "place")}
    return Body(**{**entry, **sets, **lists})


def _compiled(body: Body) -> types.CodeType | None:
    if not body.source:
        return None
    try:
        module = compile(body.source, "gold", "exec", dont_inherit=True)
    except (SyntaxError, ValueError):
        return None
    return next((c for c in prints.code_objects(module) if c.co_name == body.name), None)


if __name__ == "__main__":
    main()
