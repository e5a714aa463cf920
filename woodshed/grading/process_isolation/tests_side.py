"""The process that imports test files and decides: it holds stand-ins for the packages of the other process."""

from __future__ import annotations

import copy
import inspect
import logging
import os
import random
import socket
import subprocess
import sys
import warnings
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from . import commitments, confinement, imports, values
from .lending import Lending
from .line import LineError, MessageLine
from .peer import Peer
from .stand_ins import NUMBER, RemoteModule, RemoteType, Unpickled

MOST_TEXT = 1 << 20
"""Characters of one warning, log record or printed text."""
PRIVATE = ("PYTEST_",)
"""Beginnings of variables that the other process does not have."""
START = "import socket; line = socket.socket(fileno=0); exec(line.recv({}, socket.MSG_WAITALL))"
"""All that its command line says; what it is to do comes through its standard input."""
BEGIN = """import sys
sys.path[:] = [{!r}, *filter(None, sys.path)]
from {} import code_side
del sys.path[0]
code_side.main(line, *{!r})
"""
HOMELESS = {"HOME": "/0"}
"""While it starts no folder is imported from that an attempt may have filled; nor has it a PYTHONPATH."""


class TestsPeer(Peer):
    """See `peer.Peer`. What it does for the other side is what `Lending` allows, and what `TOLD` lists."""

    __test__ = False

    def __init__(self, line: MessageLine, workspace: str):
        super().__init__(line)
        self.lending = Lending(workspace)
        self.environment: dict[str, str] = {}
        self.raw: dict[Any, Any] = {}
        self.folder, self.arguments = "", list(sys.argv)
        self.seed: list[Any] = []
        self.failures: list[BaseException] = []
        """Failed assertions of tests on their way through the other process."""
        self.depth = 0
        """Questions of the other side that are being answered."""

    def answer(self, name: str, ask: Callable[..., Any], subject: Any, arguments: tuple) -> Any:
        try:
            return commitments.answer(name, ask, subject, arguments)
        except commitments.Broken as error:
            self.failures += [error] if self.depth else []
            raise refuted(error) from None

    # A failed assertion stays one, whoever catches it: code that a test calls back, or enters as a context, could else
    # try again until it holds. On its way it says nothing, since its text holds what was expected.

    def ask(self, verb: str, *arguments: Any) -> Any:
        try:
            result = super().ask(verb, *arguments)
        except BaseException as error:
            self._forget([error])
            self._end_if_failed()
            raise
        if verb == "special" and arguments[1] == "__exit__" and not result:  # it goes on from there by itself
            self._forget(arguments[2])
        self._end_if_failed()
        return result

    def serve(self, verb: str, content: list) -> None:
        self.depth += 1
        try:
            super().serve(verb, content)
        finally:
            self.depth -= 1

    def _forget(self, known: Sequence[Any]) -> None:
        self.failures = [failure for failure in self.failures if not any(one is failure for one in known)]

    def _end_if_failed(self) -> None:
        if self.failures:
            failure = self.failures[-1]
            if not self.depth:
                self.failures = []
            raise refuted(failure)

    def _encode_error(self, error: BaseException, depth: int = 0) -> Any:
        is_raised = error.__traceback__ is not None and type(vars(error).get(NUMBER)) is not int
        if is_raised and (isinstance(error, AssertionError) or values.is_of_pytest(type(error))):
            if not any(failure is error for failure in self.failures):
                self.failures.append(error)
            return [
                "error",
                self._number(error),
                ["name", "builtins", "AssertionError"],
                [],
                None,
                ["dict", []],
                [],
            ]
        return super()._encode_error(error, depth)

    def may_lend(self, value: Any) -> bool:
        return self.lending.allows(value)

    def name_of(self, value: Any) -> list[str] | None:
        return None if values.is_of_pytest(value) else values.name_of(value)

    def named(self, module: Any, name: Any) -> Any:
        return values.believed(module, name)

    def module(self, name: str, number: int) -> Any:
        if type(name) is not str or type(number) is not int:
            raise LineError("no module")
        if name.partition(".")[0] in sys.stdlib_module_names and name in sys.modules:
            return sys.modules[name]
        known = sys.modules.get(name)
        return known if isinstance(known, RemoteModule) else RemoteModule(name, self, number)

    def do(self, verb: str, arguments: list[Any], content: list[Any]) -> Any:
        if verb in TOLD:
            return TOLD[verb](*map(plain, arguments))
        subject, *rest = arguments
        if type(content[0]) is not list or content[0][0] != "yours":
            raise AttributeError("only of lent objects anything can be asked")
        if verb == "call" and self.lending.allows(subject):
            positional, named = rest
            return subject(*positional, **named)
        if verb == "special" and self.lending.may_do(subject, rest[0]):
            return getattr(type(subject), rest[0])(subject, *rest[1])
        if verb == "get" and self.lending.may_get(subject, rest[0]):
            return attribute(subject, rest[0])
        if verb in COPIES and self.lending.allows(subject) and not isinstance(subject, type):
            return COPIES[verb](subject)
        if verb == "set" and self.lending.may_set(subject, rest[0]):
            return setattr(subject, *rest)
        raise AttributeError(f"{type(subject).__name__} is not lent for {verb} {str(rest[:1])[:100]}")

    def news(self) -> dict[str, Any]:
        """Objects that were let go, and what tests changed of the surroundings that code sees."""
        news = super().news()
        raw = getattr(os.environ, "_data", os.environ)  # a test may have put a plain dictionary there
        if raw != self.raw:  # to decode it takes as long as many a call
            self.raw = dict(raw)
            now = {k: v for k, v in os.environ.items() if not k.startswith(PRIVATE)}
            gone = dict.fromkeys(self.environment.keys() - now.keys())
            news["environment"] = {k: v for k, v in now.items() if self.environment.get(k) != v} | gone
            self.environment = now
        try:
            folder = os.getcwd()  # noqa: PTH109
        except OSError:
            folder = self.folder
        if folder != self.folder:
            news["folder"] = self.folder = folder
        if sys.argv != self.arguments:
            news["arguments"] = [str(word) for word in sys.argv]
            self.arguments = list(sys.argv)
        if self.seed:
            news["seed"] = self.encode(self.seed.pop())
        return news


def attribute(subject: Any, name: str) -> Any:
    """An attribute, as far as it is data: namespaces as new dictionaries, signatures that are made when asked for."""
    if name == "__signature__":
        return inspect.signature(subject)
    value = getattr(subject, name)
    return dict(value) if name == "__dict__" else value


def plain(value: Any) -> Any:
    """A text, number, list of these, or type: all that a request without an object is made of.

    Raises:
        TypeError: it is something else.
    """
    if type(value) is list:
        return [plain(item) for item in value]
    if type(value) in (str, int) or isinstance(value, type):
        return value
    raise TypeError("only texts and numbers")


def warn(message: str, category: Any, filename: str, lineno: int) -> None:
    warnings.warn_explicit(message[:MOST_TEXT], category, filename, lineno)


def log(name: str, level: int, text: str, exception: str, places: list[Any]) -> None:
    logger = logging.getLogger(name)
    if logger.isEnabledFor(level):
        path, function, line = places
        record = logging.LogRecord(name, level, str(path), line, text[:MOST_TEXT], (), None, str(function))
        record.exc_text = exception[:MOST_TEXT] or None
        logger.handle(record)


def write(stream: str, text: str) -> None:
    {"stdout": sys.stdout, "stderr": sys.stderr}[stream].write(text[:MOST_TEXT])


def read(method: str, size: int) -> str:
    stream: Any = sys.stdin
    return str({"read": stream.read, "readline": stream.readline}[method](size))


def ask_input(prompt: str) -> str:
    return str(input(prompt))


COPIES = {"copy": copy.copy, "deepcopy": copy.deepcopy}
TOLD = {"warn": warn, "log": log, "write": write, "read": read, "input": ask_input}
"""Requests that the other side may make without an object: each takes and returns plain values."""


def refuted(failure: BaseException) -> BaseException:
    """The end of a test that no `except Exception`, and no expected AssertionError, takes for its own."""
    text = (
        str(failure)
        if isinstance(failure, commitments.Broken)
        else "an assertion failed, and code under test went on"
    )
    return pytest.fail.Exception(f"woodshed: {text}", pytrace=False)


def begun(environment: Mapping[str, str]) -> dict[str, str]:
    """Variables with which the other process begins: harmless, and as long as those that it will have."""
    kept = {k: v for k, v in environment.items() if k not in ("PYTHONPATH", "PYTHONUSERBASE")} | HOMELESS
    free = len(confinement.block(environment)) - len(confinement.block({**kept, "_0": ""}))
    return {**kept, "_0": "0" * free}


def install(
    workspace: str,
    packages: Sequence[str],
    python_path: str,
    own: Mapping[str, bytes],
    hardening: Any,
) -> None:
    """Start the other process and import the packages from there, from now on.

    Args:
        own: text of the tests and their helpers, by path in the workspace: all that is imported here.
        hardening: the module that doubts asserts, as far as it was imported.
    """
    confinement.close_memory()
    confinement.confine()
    ours, theirs = socket.socketpair()
    paths = [*filter(None, python_path.split(":")), workspace]
    environment = {k: v for k, v in os.environ.items() if not k.startswith(PRIVATE)}
    environment["PYTHONPATH"] = python_path
    told = os.getpid(), paths, list(packages), environment
    begin = BEGIN.format(str(Path(__file__).parent.parent), __package__, told).encode()
    with Path(os.devnull).open("r+b") as nothing:
        subprocess.Popen(
            [sys.executable, "-c", START.format(len(begin))],
            env=begun(environment),
            cwd="/",
            stdin=theirs.fileno(),
            stdout=nothing,
            stderr=nothing,
            start_new_session=True,
        )
    theirs.close()
    ours.sendall(begin)
    peer = Unpickled.peer = TestsPeer(MessageLine(ours), workspace)
    hardening.says_what_it_is = lambda kind: isinstance(kind, RemoteType)
    imports.guard(workspace, own)
    sys.meta_path.insert(0, imports.Finder(peer, packages))
    seed = random.seed

    def seeded(a: Any = None, version: int = 2) -> None:
        seed(a, version)
        if isinstance(a, int | str | bytes | float):
            peer.seed[:] = [a]

    random.seed = seeded
