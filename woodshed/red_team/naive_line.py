"""A judge in two processes that believes everything: `python naive_line.py TESTS...`.

The tests' process imports stand-ins for the packages of the workspace; calls and answers are pickled, in both
directions. So code under test that asks for `builtins.exec` gets it. It knows functions of modules only.
Standard library and pytest; `weak_judges` runs it, in a sandbox.
"""

from __future__ import annotations

import importlib
import importlib.abc
import importlib.machinery
import pickle
import socket
import subprocess
import sys
import types
from pathlib import Path
from typing import Any

import pytest


class NaivePeer:
    """One end of the line."""

    def __init__(self, line: socket.socket):
        self.file = line.makefile("rwb")

    def ask(self, verb: str, *arguments: Any) -> Any:
        """The answer of the other side, which may ask meanwhile."""
        self.send((verb, arguments))
        while True:
            kind, content = pickle.load(self.file)
            if kind == "answer":
                return content
            if kind == "raise":
                raise content
            self.serve(kind, content)

    def send(self, message: object) -> None:
        pickle.dump(message, self.file)
        self.file.flush()

    def serve(self, verb: str, arguments: Any) -> None:
        """Do what the other side asks, and answer."""
        try:
            answer = "answer", VERBS[verb](*arguments)
            pickle.dumps(answer)
        except Exception as error:
            answer = "raise", RuntimeError(repr(error))
        self.send(answer)


def _called(function: Any, positional: Any, named: Any) -> Any:
    if isinstance(function, tuple):
        function = getattr(importlib.import_module(function[0]), function[1])
    return function(*positional, **named)


VERBS = {"call": _called, "import": lambda name: bool(importlib.import_module(name))}


class StandIns(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Imports the packages of the workspace as modules whose functions are asked for."""

    def __init__(self, peer: NaivePeer):
        self.peer = peer

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        top = Path.cwd() / name.partition(".")[0]
        is_ours = (top / "__init__.py").exists() and top.name not in ("test", "tests")
        return importlib.machinery.ModuleSpec(name, self, is_package=True) if is_ours else None

    def create_module(self, spec: Any) -> types.ModuleType:
        self.peer.ask("import", spec.name)
        return types.ModuleType(spec.name)

    def exec_module(self, module: Any) -> None:
        def get(name: str) -> Any:
            if name.startswith("__"):
                raise AttributeError(name)
            where = module.__name__, name
            return lambda *positional, **named: self.peer.ask("call", where, positional, named)

        module.__getattr__ = get


def main() -> None:
    if sys.argv[1] == "--code":
        sys.path.append(str(Path.cwd()))
        peer = NaivePeer(socket.socket(fileno=int(sys.argv[2])))
        while True:
            peer.serve(*pickle.load(peer.file))
    ours, theirs = socket.socketpair()
    command = [sys.executable, __file__, "--code", str(theirs.fileno())]
    subprocess.Popen(command, pass_fds=[theirs.fileno()], stderr=subprocess.DEVNULL)
    theirs.close()
    sys.meta_path.insert(0, StandIns(NaivePeer(ours)))
    sys.exit(pytest.main(["-q", "-p", "no:cacheprovider", "-o", "addopts=", *sys.argv[1:]]))


if __name__ == "__main__":
    main()
