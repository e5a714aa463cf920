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
import unicodedata
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence, Set
from dataclasses import dataclass
from itertools import chain, islice
from typing import Any

from woodshed.pysource import syntax
from woodshed.synthesis.leaks import fingerprints, readers
from woodshed.synthesis.leaks.fingerprints import Body

SKIPPED = ("/proc", "/sys", "/dev", "/run/woodshed", "/run/supervisor.pyc", "/run/watcher.pyc")  # ours
NEAR = 200
"""Bytes in which a name and its parameters make a signature."""
PLAUSIBLE = (
    *(".py", ".pyi", ".pyc", ".txt", ".md", ".rst", ".html", ".json", ".ipynb", ".db", ".sqlite", ".pkl"),
    *(".zip", ".whl", ".egg", ".tar", ".tgz", ".tar.gz", ".tar.bz2", ".tar.xz", ".tar.zst"),
)
SPACED = bytes(byte if re.match(rb"\w", bytes([byte])) else 32 for byte in range(256))
"""Leaves the words of a text."""
MAX_SHARED = 16 << 20
"""Bytes of a file of the machine."""
FAR = 0.6
FEW = 4
"""Share of a body's longest names that a file of the machine must hold to be read; of few of them, it must hold all."""

ALIKE = 0.7
"""Share of the marks that a function and its renamed copy have in common."""


@dataclass(frozen=True)
class File:
    """Something to be searched."""

    where: str
    data: bytes
    tasks: tuple[str, ...] = ()
    """Those that have it; () where all do."""
    is_own: bool = False
    """Read whole. What belongs to the machine or to the dependencies is read where it could hold a body at all."""


class Search:
    """All that is looked for."""

    def __init__(self, request: dict[str, Any]) -> None:
        self.bodies = [_body(entry) for entry in request["bodies"]]
        self.runs = fingerprints.Runs(self.bodies)
        self.leftovers = re.compile(request["leftovers"])
        self.names: dict[str, list[str]] = request["names"]
        """Task to names that may not stand in leftovers."""
        self.by_task: dict[str, list[int]] = {task: [] for task in self.names}
        self.by_name: dict[str, list[int]] = {}
        self.by_call: dict[str, list[int]] = {}
        self.by_shape: dict[str, list[int]] = {}
        self.by_code: dict[str | bytes, list[int]] = {}
        """Numbers of the bodies, by their names and by their bytecode."""
        self.outlines = {body.outline for body in self.bodies if body.shape}
        """Of the functions with a shape: what every other function is not worth comparing by."""
        self.spelled = [fingerprints.spelled(body.marks) for body in self.bodies]
        """Of the marks of each body those that stand in every text of it."""
        self.told = [fingerprints.told(body.tokens) for body in self.bodies]
        self.codes: dict[int, types.CodeType] = {}
        for number, body in enumerate(self.bodies):
            self.by_task[body.task].append(number)
            self.by_name.setdefault(body.name if body.kind == "gold" else "", []).append(number)
            self.by_call.setdefault(body.called, []).append(number)
            self.by_shape.setdefault(body.shape, []).append(number)
            if (code := _compiled(body)) is not None:
                self.codes[number] = code
                self.by_code.setdefault(code.co_name, []).append(number)
                self.by_code.setdefault(code.co_code, []).append(number)
        gold = [n for n, body in enumerate(self.bodies) if body.kind == "gold" and body.tokens]
        self.alike: dict[frozenset[str], list[int]] = {}
        """Sets of anchors, to the numbers of the bodies that they are of."""
        for number in gold:
            self.alike.setdefault(_anchors(self.bodies[number]), []).append(number)
        self.alike.pop(frozenset(), None)
        self.holders: dict[bytes, list[frozenset[str]]] = {}
        """Word to the sets of anchors that it is in."""
        for words in self.alike:
            for word in words:
                self.holders.setdefault(word.encode(), []).append(words)
        self.anchors = frozenset(self.holders)

    def tasks_with(self, file: File) -> Sequence[str]:
        return file.tasks or tuple(self.by_task)

    def findings(self, file: File) -> Iterator[dict[str, Any]]:
        """Leaks in one file."""
        in_leftovers = (
            file.is_own and self.leftovers.search(file.where.removeprefix("/workspace/")) is not None
        )
        tests_too = file.is_own and (in_leftovers or not file.where.startswith("/workspace/"))
        tasks = self.tasks_with(file)
        wanted = {n for task in tasks for n in self.by_task[task]}
        if not tests_too:  # visible tests are often copies of hidden ones; the machine has none
            wanted = {n for n in wanted if self.bodies[n].kind == "gold"}
        reported: set[tuple[int, str]] = set()
        contents = readers.read(file.where, file.data)
        if not file.is_own and file.where.endswith((".py", ".pyi")):  # nobody imports what its comments hold
            contents = islice(contents, 1)
        for content in contents:
            finding = {"where": content.where, "body": -1}
            if content.problem and file.is_own:
                yield {
                    **finding,
                    "kind": "unread",
                    "quote": content.problem,
                    "tasks": list(tasks),
                    "in_leftovers": in_leftovers,
                }
            for number, kind, quote in self._in_piece(content, wanted, file.is_own):
                if (number, kind) not in reported:
                    reported.add((number, kind))
                    yield {**finding, "kind": kind, "quote": quote[:300], "body": number}
            for task in tasks if in_leftovers else ():
                if (-1, task) not in reported and (name := _mentioned(content, self.names[task])):
                    reported.add((-1, task))
                    yield {**finding, "kind": "name", "quote": name, "tasks": [task]}

    def held(self, words: Iterable[bytes]) -> Iterator[int]:
        """Numbers of the bodies of which a text of the machine or the dependencies has most of the longest names."""
        present = self.anchors.intersection(words)
        counts = Counter(names for word in present for names in self.holders[word])
        for names, count in counts.items():
            if count >= (FAR * len(names) if len(names) >= FEW else len(names)):
                yield from self.alike[names]

    def may_hold(self, words: Iterable[bytes]) -> bool:
        """True if a text of these words may hold any body."""
        return next(self.held(words), None) is not None

    def _in_piece(
        self, content: readers.Content, wanted: Set[int], is_own: bool
    ) -> Iterator[tuple[int, str, str]]:
        if content.code is not None:
            yield from self._in_code(content.code, wanted)
            return
        if not is_own:
            wanted = wanted & set(self.held(words_of(content.text)))
            if not content.is_binary:
                yield from self._in_shared(content.text, wanted)
        if not wanted or not (is_own or content.is_binary):
            return
        tokens = fingerprints.words(content.text)
        yield from self._in_runs(tokens, wanted)
        present = set(tokens)
        if "def" in present and not content.is_binary:
            yield from self._in_functions(content.text, wanted)
        clustered: set[int] = set()
        for name in present & self.by_name.keys() if content.is_binary else ():
            for number in sorted(wanted & set(self.by_name[name])):
                if quote := _cluster(self.bodies[number], content.text):
                    clustered.add(number)
                    yield number, "body", quote
        signatures: dict[tuple[str, tuple[str, ...]], str] = {}
        for name in present & self.by_call.keys() if is_own else ():
            for number in sorted((wanted & set(self.by_call[name])) - clustered):
                key = name, self.bodies[number].parameters
                if key not in signatures:
                    signatures[key] = _signature(*key, content.text)
                if signatures[key]:
                    yield number, "signature", signatures[key]

    def _in_shared(self, text: str, wanted: Set[int]) -> Iterator[tuple[int, str, str]]:
        """As every text is searched, but first by its words alone: whole libraries are read."""
        present = words_of(text) if wanted else frozenset[bytes]()
        standing = {number for number in wanted if fingerprints.may_stand(self.told[number], present)}
        if standing:
            yield from self._in_runs(fingerprints.words(text), standing)
        if b"def" in present:
            yield from self._in_functions(text, wanted)

    def _in_runs(self, tokens: list[str], wanted: Set[int]) -> Iterator[tuple[int, str, str]]:
        for number, position in self.runs.find(tokens).items():
            if number in wanted:
                yield number, "body", " ".join(tokens[position : position + 40])

    def _may_be_renamed(self, text: str, wanted: Set[int]) -> set[int]:
        """The wanted bodies of whose marks a text has enough to hold a renamed copy."""
        shaped = {number for number in wanted if self.bodies[number].shape}
        present = words_of(text) if shaped else frozenset[bytes]()
        return {
            number
            for number in shaped
            if len(self.spelled[number] - present) <= (1 - ALIKE) * len(self.bodies[number].marks)
        }

    def _in_functions(self, text: str, wanted: Set[int]) -> Iterator[tuple[int, str, str]]:
        """Renamed copies: the same shape, the same attributes, calls and constants."""
        if not self._may_be_renamed(text, wanted):
            return
        for source in (text, *re.findall(r"(?ms)^[ \t]*(?:async )?def .+?(?=^\S|\Z)", text)):
            possible = self._may_be_renamed(source, wanted)
            if not possible:
                continue
            try:
                tree = syntax.parse(source)
            except (SyntaxError, ValueError, RecursionError, MemoryError):
                continue
            for _, function in fingerprints.functions(tree):
                code = fingerprints.code_body(function)
                if fingerprints.outline(code) not in self.outlines:
                    continue
                for number in possible & set(self.by_shape.get(fingerprints.shape(code)[0], ())):
                    if fingerprints.similarity(fingerprints.marks(code), self.bodies[number].marks) >= ALIKE:
                        yield number, "body", ast.unparse(function)
            if source is text:
                return

    def _in_code(self, module: types.CodeType, wanted: Set[int]) -> Iterator[tuple[int, str, str]]:
        """Bytecode of the same function, under whatever name."""
        for code in fingerprints.code_objects(module):
            candidates = {*self.by_code.get(code.co_name, ()), *self.by_code.get(code.co_code, ())}
            constants = fingerprints.bytecode(code) if candidates else frozenset()
            for number in sorted(candidates & wanted):
                original = self.codes[number]
                same_code = code.co_code == original.co_code and len(original.co_code) > 40
                similarity = fingerprints.similarity(constants, fingerprints.bytecode(original))
                if (similarity >= 0.8 and (code.co_name == original.co_name or same_code)) or (
                    same_code and similarity >= 0.6
                ):
                    yield number, "body", f"code object {code.co_name}: {', '.join(sorted(constants))}"


def main() -> None:
    request = json.load(sys.stdin)
    out = os.fdopen(3, "w", encoding="utf-8", errors="backslashreplace")
    search = Search(request)
    counts: Counter[str] = Counter()
    for file in chain(
        shared_files(request["shared"], search), own_files(request["workspaces"], request["skip"])
    ):
        if file.is_own:
            counts.update(search.tasks_with(file))
            out.write(json.dumps({"at": file.where}) + "\n")
            out.flush()
        for finding in search.findings(file):
            out.write(json.dumps(finding) + "\n")
    out.write(json.dumps({"done": counts}) + "\n")
    out.flush()


def shared_files(roots: Sequence[str], search: Search) -> Iterator[File]:
    """Files of the machine and the dependencies that could hold some body."""
    for path in (path for root in roots if not os.path.islink(root) for path in _walk(root, SKIPPED)):
        data = _content(path, MAX_SHARED) if _is_plausible(path) else None
        if data is not None and (readers.is_packed(data) or search.may_hold(data.translate(SPACED).split())):
            yield File(path, data)


def own_files(workspaces: dict[str, str], skip: Sequence[str]) -> Iterator[File]:
    """Files that belong to the tasks.

    Files outside the workspaces, and the environment variables, belong to all of them; of files that workspaces share,
    every different content is read once.
    """
    if not workspaces:
        return
    variables = "\n".join(f"{k}={v}" for k, v in os.environ.items())
    yield File("environment", variables.encode(), is_own=True)
    for path in (path for root in ("/", "/dev/shm") for path in _walk(root, (*SKIPPED, *skip))):
        if (data := _content(path, readers.MAX_BYTES)) is not None:
            yield File(path, data, is_own=True)
    holders: dict[str, list[str]] = {}
    for task, root in workspaces.items():
        for path in _walk(root, ()):
            holders.setdefault(path.removeprefix(root), []).append(task)
    for path, tasks in sorted(holders.items()):
        same: dict[bytes, list[str]] = {}
        for task in tasks:
            if (data := _content(workspaces[task] + path, readers.MAX_BYTES)) is not None:
                same.setdefault(data, []).append(task)
        for data, having in same.items():
            yield File("/workspace" + path, data, tuple(having), is_own=True)


def _content(path: str, most: int) -> bytes | None:
    try:
        with open(path, "rb") as file:
            return file.read(most)
    except OSError:
        return None


def _walk(root: str, skip: Sequence[str]) -> Iterator[str]:
    for folder, folders, names in os.walk(root):
        folders[:] = sorted(f for f in folders if os.path.join(folder, f) not in skip)
        for name in sorted(names):
            path = os.path.join(folder, name)
            try:
                if stat.S_ISREG(os.lstat(path).st_mode) and path not in skip:
                    yield path
            except OSError:
                continue


def _is_plausible(path: str) -> bool:
    """True if a file of the machine or the dependencies has a form that could hold a copy of a Python package."""
    if path.endswith(".pyc"):
        source = re.sub(r"(__pycache__/)?([^/.]+)\.[^/]*$", r"\2.py", path)
        return not os.path.exists(source)  # else the source is read
    return path.endswith(PLAUSIBLE)


def words_of(text: str) -> frozenset[bytes]:
    """The words of a text, also as Python reads them, without letters that are not ASCII."""
    read = text if text.isascii() else f"{text} {unicodedata.normalize('NFKC', text)}"
    return frozenset(read.encode(errors="replace").translate(SPACED).split())


def _signature(name: str, parameters: Sequence[str], text: str) -> str:
    """A name with all of its parameters close behind it."""
    if len(parameters) < 2:
        return ""
    for match in re.finditer(rf"\b{re.escape(name)}\b", text):
        near = text[match.start() : match.start() + NEAR]
        if set(parameters) <= set(re.findall(r"\w+", near)):
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


def _mentioned(content: readers.Content, names: Sequence[str]) -> str:
    if content.code is not None:
        text = " ".join(
            f"{code.co_name} {' '.join(code.co_names)}" for code in fingerprints.code_objects(content.code)
        )
    else:
        text = f"{content.where}\n{content.text}"
    return next((name for name in names if re.search(rf"\b{re.escape(name)}\b", text)), "")


def _anchors(body: Body) -> frozenset[str]:
    """Words by which a file of the machine is chosen; where a body has few long ones its name must be there, too."""
    words = frozenset(filter(str.isascii, body.words))
    return words if len(words) >= FEW else words | set(filter(str.isascii, [body.name])) - {""}


def _body(entry: dict[str, Any]) -> Body:
    sets = {key: frozenset(entry[key]) for key in ("marks", "names")}
    lists = {key: tuple(entry[key]) for key in ("tokens", "parameters", "outline", "words", "place")}
    return Body(**{**entry, **sets, **lists})


def _compiled(body: Body) -> types.CodeType | None:
    if not body.source:
        return None
    try:
        module = compile(body.source, "gold", "exec", dont_inherit=True)
    except (SyntaxError, ValueError):
        return None
    return next((c for c in fingerprints.code_objects(module) if c.co_name == body.name), None)


if __name__ == "__main__":
    main()
