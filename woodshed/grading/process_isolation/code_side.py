"""The process that holds the code under test: it does what the tests' side asks, until that is gone."""

from __future__ import annotations

import builtins
import codecs
import contextlib
import copy
import importlib
import inspect
import io
import logging
import os
import pickle
import random
import socket
import sys
import threading
import types
import warnings
from pathlib import Path
from typing import Any

from . import confinement, values
from .line import LineError, MessageLine
from .peer import Peer
from .stand_ins import RemoteModule, Unpickled, is_remote

originals: dict[tuple[int, str], Any] = {}
"""Attributes that tests have set: their values before, by object and name."""
_loops: list[Any] = []
call_handlers = logging.Logger.callHandlers


class CodePeer(Peer):
    """See `peer.Peer`. It lends everything and believes every name: there is nothing to protect here."""

    def do(self, verb: str, arguments: list[Any], content: list[Any]) -> Any:
        return VERBS[verb](*arguments)

    def may_lend(self, value: Any) -> bool:
        return True

    def name_of(self, value: Any) -> list[str] | None:
        name = values.name_of(value)
        if name is None:
            return None
        try:
            return name if values.believed(*name[1:]) is value else None
        except LookupError:
            return None

    def named(self, module: Any, name: Any) -> Any:
        return values.trusted(module, name)

    def module(self, name: str, number: int) -> Any:
        try:
            return importlib.import_module(name)
        except ImportError:
            return RemoteModule(name, self, number)

    def hear(self, news: dict[str, Any]) -> None:
        super().hear(news)
        for name, value in news.get("environment", {}).items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value
        if "folder" in news:
            os.chdir(news["folder"])
        if "arguments" in news:
            sys.argv[:] = news["arguments"]
        if "seed" in news:
            random.seed(self.decode(news["seed"]))


def call(subject: Any, positional: tuple, named: dict) -> Any:
    return subject(*positional, **named)


def special(subject: Any, name: str, arguments: tuple, owner: Any = None) -> Any:
    return getattr(type(subject) if owner is None else owner, name)(subject, *arguments)


def get(subject: Any, name: str) -> Any:
    if name == "__signature__":
        return inspect.signature(subject)
    return getattr(subject, name)


def write(subject: Any, name: str, value: Any) -> None:
    """Set an attribute, and remember what it was: whoever patches code takes his own value away afterwards, since to
    him the namespace of a stand-in looks empty."""
    if name in getattr(subject, "__dict__", ()):
        originals.setdefault((id(subject), name), subject.__dict__[name])
    setattr(subject, name, value)


def remove(subject: Any, name: str) -> None:
    """Delete an attribute, or give it back the value that it had before the tests set it."""
    if (id(subject), name) in originals:
        setattr(subject, name, originals.pop((id(subject), name)))
    else:
        delattr(subject, name)


def inherited(owner: type, name: str, instance: Any) -> Any:
    """An attribute as `super()` finds it, from one class upwards."""
    value = next(vars(kind)[name] for kind in owner.__mro__ if name in vars(kind))
    bind = getattr(type(value), "__get__", None)
    return bind(value, instance, type(instance)) if bind else value


def subclass(names: list[str], bases: tuple, members: dict, named: dict) -> int:
    """The number of a new class whose functions are the tests'."""
    name, module, qualname = names

    def fill(body: dict) -> None:
        body |= {key: _member(key, *parts) for key, parts in members.items()}
        body |= {"__module__": module, "__qualname__": qualname}

    made = types.new_class(name, bases, named, fill)
    peer.told.add(peer._number(made))
    return peer.numbers[id(made)]


def _member(name: str, kind: str, *parts: Any) -> Any:
    if kind == "property":
        return property(*(part and _function(name, part) for part in parts))
    if kind in ("classmethod", "staticmethod"):
        return getattr(builtins, kind)(_function(name, parts[0]))
    return _function(name, parts[0]) if kind == "function" else parts[0]


def _function(name: str, remote: Any) -> Any:
    """A function, which becomes a method where a stand-in would not."""
    if not is_remote(remote):
        return remote

    def method(*positional: Any, **named: Any) -> Any:
        return remote(*positional, **named)

    method.__name__ = name
    return method


def wait_for(awaitable: Any) -> Any:
    import asyncio  # takes a tenth of a second, which few need

    async def waited() -> Any:
        return await awaitable

    if not _loops:
        _loops.append(asyncio.new_event_loop())
    return _loops[0].run_until_complete(waited())


VERBS: dict[str, Any] = {
    "call": call,
    "special": special,
    "get": get,
    "set": write,
    "delete": remove,
    "names": dir,
    "import": importlib.import_module,
    "inherited": inherited,
    "subclass": subclass,
    "copy": copy.copy,
    "deepcopy": copy.deepcopy,
    "dumps": pickle.dumps,
    "loads": pickle.loads,
    "content": values.content_of,
    "await": wait_for,
}

peer: CodePeer


class Output(io.RawIOBase):
    """Text that the code prints, written by the tests' process."""

    mode = "w"

    def __init__(self, stream: str):
        self.stream = stream
        self.decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def write(self, data: Any) -> int:
        if text := self.decoder.decode(bytes(data)):
            peer.ask("write", self.stream, text)
        return len(data)

    def writable(self) -> bool:
        return True

    @classmethod
    def of(cls, stream: str) -> io.TextIOWrapper:
        """A stream as a program has it, but that nothing waits in it."""
        raw: Any = cls(stream)
        text = io.TextIOWrapper(raw, "utf-8", "backslashreplace", newline="\n", write_through=True)
        text.mode = "w"  # type: ignore[misc]
        return text


class Input:
    """Standard input of the tests' process."""

    encoding, closed = "utf-8", False

    def read(self, size: int = -1) -> str:
        return peer.ask("read", "read", size)

    def readline(self, size: int = -1) -> str:
        return peer.ask("read", "readline", size)

    def __iter__(self) -> Any:
        return iter(self.readline, "")

    def isatty(self) -> bool:
        return False


def tell(logger: logging.Logger, record: logging.LogRecord) -> None:
    """Log a record with the handlers that code has added here, and where it reaches the root, in the tests' process."""
    if logger.hasHandlers():
        call_handlers(logger, record)
    place = logger
    while place.propagate and place.parent:
        place = place.parent
    if place.parent is None:
        text = logging.Formatter().formatException(record.exc_info) if record.exc_info else ""
        places = [record.pathname, record.funcName or "", record.lineno]
        peer.ask("log", record.name, record.levelno, record.getMessage(), text, places)


def show_warning(message: Any, category: Any, filename: str, lineno: int, *_: Any) -> None:
    peer.ask("warn", str(message), category, filename, lineno)


def _connect() -> None:
    """Send over to the tests whatever code prints, reads, logs and warns of."""
    sys.stdout, sys.stderr = Output.of("stdout"), Output.of("stderr")
    sys.stdin = Input()  # type: ignore[assignment]
    builtins.input = lambda prompt="", /: peer.ask("input", str(prompt))
    logging.Logger.callHandlers = tell  # type: ignore[method-assign]
    logging.getLogger().setLevel(1)
    warnings.simplefilter("always")
    warnings.showwarning = show_warning  # type: ignore[assignment]


def main(
    line: socket.socket, tests: int, paths: list[str], packages: list[str], environment: dict[str, str]
) -> None:
    """Serve. Nothing of the repository is imported before the filter of system calls holds."""
    global peer
    confinement.confine(tests)
    os.environ.clear()
    confinement.begin_with(environment)
    os.environ.update(environment)
    os.chdir(paths[-1])
    place = next((i for i, entry in enumerate(sys.path) if "-packages" in entry), len(sys.path))
    sys.path[place:place] = paths
    end = line.dup()  # neither to be found by its number, nor inherited
    with Path(os.devnull).open("rb") as nothing:
        os.dup2(nothing.fileno(), line.detach())
    peer = Unpickled.peer = CodePeer(MessageLine(end))
    os.register_at_fork(after_in_child=peer.line.close)  # two that read one line would wait for ever
    peer.serves_in = threading.get_ident()
    _connect()
    for package in packages:  # in an order of their own
        with contextlib.suppress(BaseException):  # the tests will see
            importlib.import_module(package)
    while True:
        try:
            verb, content, news = peer.line.receive()
            peer.hear(news)
            peer.serve(verb, content)
        except (LineError, OSError):
            os._exit(0)
