"""Tests in one process, the code under test in another: what they exchange is written values and numbered objects.

The tests' process imports stand-ins for the repository's packages. A call goes over a socket to the process that holds
the real ones, which answers with a value (None, numbers, text, built-in containers of these, a few types of the
standard library, by exact type) or with the number of an object that stays where it is. Both sides do the same, so
callbacks, generators, context managers and exceptions work; what needs more (frames, subclassing, signatures) does not,
and such tests are judged in the ordinary run alone (`pytest_verifier.isolated_tests`).

The tests' process never runs a line of the repository: no way from there to pytest, to the channel, its nonce, the
expected values or the outcome. It cannot be traced or read through /proc, and what it lends to the other side can be
called and asked for public attributes, nothing else. An object's own `==` is still its own, so it is doubted (`doubt`).

Standard library only; one file, run by the runner: it is imported in the tests' process and started for the other.
"""

from __future__ import annotations

import contextlib
import ctypes
import datetime
import decimal
import fractions
import importlib
import importlib.abc
import importlib.machinery
import json
import os
import pathlib
import re
import socket
import subprocess
import sys
import threading
import types
import weakref
from collections.abc import Callable, Sequence
from typing import Any

FORWARDED = tuple(
    f"__{name}__"
    for name in (
        "call len iter next getitem setitem delitem contains eq ne lt le gt ge hash bool repr str format int float "
        "index complex bytes fspath enter exit reversed length_hint add radd iadd sub rsub isub mul rmul imul truediv "
        "rtruediv floordiv rfloordiv mod rmod pow rpow and rand or ror xor rxor lshift rlshift rshift rrshift ior iand "
        "ixor neg pos abs invert round trunc floor ceil divmod matmul get set_name aiter anext await"
    ).split()
)
"""Methods that Python looks up on types: each type of stand-ins has those that its original has."""
READABLE = ("__name__", "__qualname__", "__doc__", "__module__")
"""What the other side may ask for beside public attributes, of objects that were lent to it."""
PRIVATE = re.compile(r"^_|^(gi|cr|ag|f|tb|co|func)_")
TESTS = {"test", "tests", "testing"}
MADE: dict[type, Callable[[Any], list[Any]]] = {
    datetime.date: lambda d: [d.year, d.month, d.day],
    datetime.time: lambda t: [t.hour, t.minute, t.second, t.microsecond, t.tzinfo],
    datetime.datetime: lambda d: [
        d.year,
        d.month,
        d.day,
        d.hour,
        d.minute,
        d.second,
        d.microsecond,
        d.tzinfo,
    ],
    datetime.timedelta: lambda d: [d.days, d.seconds, d.microseconds],
    datetime.timezone: lambda z: [z.utcoffset(None)],
    decimal.Decimal: lambda d: [str(d)],
    fractions.Fraction: lambda f: [f.numerator, f.denominator],
    pathlib.PosixPath: lambda p: [str(p)],
    range: lambda r: [r.start, r.stop, r.step],
    slice: lambda s: [s.start, s.stop, s.step],
    complex: lambda c: [c.real, c.imag],
}
"""Types that travel as what they are made of."""
HOLDERS: dict[str, type] = {"list": list, "tuple": tuple, "set": set, "frozenset": frozenset}
CHANGEABLE = (list, dict, set)
LENDABLE = frozenset(
    ("builtins", "operator", "math", "functools", "itertools", "collections", "collections.abc")
)
"""Modules of the standard library whose functions travel by name to the tests' side; to the other side, all do."""


class Peer:
    """One end of the socket.

    Args:
        guarded: whether this is the tests' side, which lends little and believes no names.
    """

    def __init__(self, line: socket.socket, *, guarded: bool):
        self.line, self.guarded = line.makefile("rwb"), guarded
        self.lent: dict[int, object] = {}
        self.numbers: dict[int, int] = {}
        self.held: weakref.WeakValueDictionary[int, Any] = weakref.WeakValueDictionary()
        self.types: dict[int, Any] = {}
        self.turn = threading.RLock()

    # -- messages

    def ask(self, verb: str, *arguments: object) -> Any:
        """The answer of the other side. Meanwhile it may ask in its turn."""
        with self.turn:
            self.send([verb, [self.encode(argument) for argument in arguments]])
            while True:
                kind, content = self.receive()
                if kind == "answer":
                    value, changed = content
                    self._apply(arguments, changed)
                    return self.decode(value)
                if kind == "raise":
                    raise self.decode(content)
                self.serve(kind, content)

    def send(self, message: object) -> None:
        data = json.dumps(message).encode()
        self.line.write(len(data).to_bytes(8, "little") + data)
        self.line.flush()

    def receive(self) -> tuple[str, Any]:
        size = int.from_bytes(self.line.read(8), "little")
        data = self.line.read(size) if 0 < size < 1 << 28 else b""
        if not data:
            raise EOFError("the process of the code under test has gone")
        kind, content = json.loads(data)
        return kind, content

    def serve(self, verb: str, content: list) -> None:
        """Do what the other side asks, and answer."""
        try:
            arguments = [self.decode(value) for value in content]
            result = self._do(verb, *arguments)
            changed = [[n, new] for n, new in self._changes(arguments, content)]
            answer = ["answer", [self.encode(result), changed]]
        except (SystemExit, Exception) as error:
            answer = ["raise", self.encode(error)]
        self.send(answer)

    def _do(self, verb: str, subject: Any, *rest: Any) -> Any:
        if verb == "call":
            positional, named = rest
            return subject(*positional, **named)
        if verb == "special" and rest[0] in FORWARDED:
            return getattr(type(subject), rest[0])(subject, *rest[1])
        if verb == "get" and (not self.guarded or rest[0] in READABLE or not PRIVATE.search(rest[0])):
            return getattr(subject, rest[0])
        if not self.guarded:
            if verb == "import":
                return importlib.import_module(subject)
            if verb == "set":
                return setattr(subject, *rest)
            if verb == "delete":
                return delattr(subject, *rest)
            if verb == "names":
                return [name for name in dir(subject) if not name.startswith("_")]
        raise AttributeError(f"{type(subject).__name__} is not lent for {verb} {rest[:1]}")

    def _changes(self, arguments: Sequence[object], before: Sequence[Any]):
        """Containers among the arguments of a call that it changed: (path, new content)."""
        if len(arguments) == 3 and isinstance(arguments[1], tuple):
            for place, value in enumerate(arguments[1]):
                if type(value) in CHANGEABLE and (after := self.encode(value)) != before[1][1][place]:
                    yield place, after

    def _apply(self, arguments: Sequence[Any], changed: list) -> None:
        for place, new in changed:
            old, value = arguments[1][place], self.decode(new)
            if type(old) not in CHANGEABLE or type(value) is not type(old):
                raise TypeError("only containers can be changed from afar")
            old.clear()
            old.extend(value) if isinstance(old, list) else old.update(value)

    # -- values

    def encode(self, value: Any) -> Any:
        kind = type(value)
        if value is None or kind in (bool, int, str):
            return ["value", value]
        if kind is float:
            return ["float", repr(value)]
        if kind in (bytes, bytearray):
            return [kind.__name__, value.hex()]
        if kind in (list, tuple, set, frozenset):
            return [kind.__name__, [self.encode(item) for item in value]]
        if kind is dict:
            return ["dict", [[self.encode(k), self.encode(v)] for k, v in value.items()]]
        if value is Ellipsis or value is NotImplemented:
            return ["name", "builtins", str(value)]
        if kind in MADE:
            return [
                "made",
                kind.__module__,
                kind.__qualname__,
                [self.encode(part) for part in MADE[kind](value)],
            ]
        if isinstance(kind, RemoteType) or isinstance(value, RemoteType | RemoteModule):
            return ["yours", number_of(value)]
        if isinstance(value, types.ModuleType):
            return ["module", value.__name__, self._lend(value)]
        if isinstance(value, type | types.FunctionType | types.BuiltinFunctionType) and _standard(value):
            return ["name", value.__module__, value.__qualname__]
        if isinstance(value, type):
            return ["type", self._lend(value), self._described(value)]
        if isinstance(value, BaseException):
            arguments = [self.encode(part) for part in value.args]
            return ["error", self._lend(value), self.encode(kind), arguments]
        return ["object", self._lend(value), self.encode(kind), self._described(kind)]

    def _lend(self, value: object) -> int:
        if id(value) not in self.numbers:
            self.numbers[id(value)] = len(self.numbers)
            self.lent[self.numbers[id(value)]] = value
        return self.numbers[id(value)]

    def _described(self, kind: type) -> list:
        """Name, module, the types above it that the other side needs, and which special methods it has."""
        above = [base for base in kind.__mro__[1:] if base is not object]
        bases = [
            self.encode(base) for base in above if not _standard(base) or issubclass(base, BaseException)
        ]
        special = [name for name in FORWARDED if any(name in vars(owner) for owner in (kind, *above))]
        return [kind.__qualname__, kind.__module__, bases, special]

    def decode(self, data: Any) -> Any:
        tag, *rest = data
        if tag == "value":
            return rest[0]
        if tag == "float":
            return float(rest[0])
        if tag in ("bytes", "bytearray"):
            return (bytes if tag == "bytes" else bytearray).fromhex(rest[0])
        if tag in HOLDERS:
            return HOLDERS[tag](self.decode(item) for item in rest[0])
        if tag == "dict":
            return {self.decode(key): self.decode(value) for key, value in rest[0]}
        if tag == "made":
            kind = next(kind for kind in MADE if (kind.__module__, kind.__qualname__) == tuple(rest[:2]))
            return kind(*(self.decode(part) for part in rest[2]))
        if tag == "yours":
            return self.lent[rest[0]]
        if tag == "name":
            return self._named(*rest)
        if tag == "module":
            return self._module(*rest)
        if tag == "type":
            return self._type(*rest)
        if tag == "error":
            number, kind, arguments = rest
            error = self.decode(kind)
            if not (isinstance(error, type) and issubclass(error, BaseException)):
                raise TypeError("not an exception")
            made = error.__new__(error, *(self.decode(part) for part in arguments))
            made.args = tuple(self.decode(part) for part in arguments)
            if isinstance(error, RemoteType):
                made.__dict__[NUMBER] = number
            return made
        number, kind, described = rest
        if number in self.held:
            return self.held[number]
        local = self.decode(kind)
        if not isinstance(local, RemoteType):  # of a built-in type: a function, a generator, a lock
            local = self._stand_in(described)
        made = object.__new__(local)
        object.__setattr__(made, NUMBER, number)
        self.held[number] = made
        return made

    def _named(self, module: str, name: str) -> Any:
        value: Any = sys.modules[module] if self.guarded else importlib.import_module(module)
        for part in name.split("."):
            value = getattr(value, part)
        if self.guarded and not (isinstance(value, type) or module in LENDABLE):
            raise ImportError(f"{module}.{name} is not believed")
        return value

    def _module(self, name: str, number: int) -> Any:
        if name.partition(".")[0] in sys.stdlib_module_names:
            return sys.modules[name] if self.guarded else importlib.import_module(name)
        if name in sys.modules and (not self.guarded or isinstance(sys.modules[name], RemoteModule)):
            return sys.modules[name]
        return RemoteModule(name, self, number)

    def _type(self, number: int, described: list) -> Any:
        if number not in self.types:
            self.types[number] = self._stand_in(described)
            type.__setattr__(self.types[number], NUMBER, number)
        return self.types[number]

    def _stand_in(self, described: list) -> Any:
        """A local type whose instances forward everything to originals of a remote one."""
        name, module, above, special = described
        bases: list[type] = []
        for base in (self.decode(base) for base in above):
            if not any(issubclass(other, base) for other in bases):
                bases.append(base)
        body: dict[str, Any] = {m: _forwarder(self, m) for m in special if m in FORWARDED}
        if "__eq__" in special and "__hash__" not in special:
            body["__hash__"] = None
        body |= {
            "__module__": str(module),
            "__qualname__": str(name),
            "__getattr__": _getter(self),
            PEER: self,
        }
        is_error = any(issubclass(base, BaseException) for base in bases)
        if is_error:
            body = {key: value for key, value in body.items() if key not in FORWARDED}
        else:
            body |= {"__setattr__": _setter(self), "__delattr__": _deleter(self)}
            body |= {"__reduce_ex__": _refuse, "__init_subclass__": classmethod(_refuse)}
        return RemoteType(str(name).rpartition(".")[2], tuple(bases), body, made=True)


NUMBER, PEER = "@number", "@peer"


class RemoteType(type):
    """The type of stand-ins for types."""

    def __new__(cls, name: str, bases: tuple, body: dict, *, made: bool = False, **named: Any):
        if not made:
            raise TypeError("a type of another process cannot be subclassed")
        return super().__new__(cls, name, bases, body)

    def __init__(cls, name: str, bases: tuple, body: dict, *, made: bool = False):
        super().__init__(name, bases, body)

    def __call__(cls, *positional: Any, **named: Any) -> Any:
        return peer_of(cls).ask("call", cls, positional, named)

    def __getattr__(cls, name: str) -> Any:
        if name in (NUMBER, "__isabstractmethod__"):
            raise AttributeError(name)
        return peer_of(cls).ask("get", cls, name)

    def __setattr__(cls, name: str, value: Any) -> None:
        peer_of(cls).ask("set", cls, name, value)

    def __delattr__(cls, name: str) -> None:
        peer_of(cls).ask("delete", cls, name)


class RemoteModule(types.ModuleType):
    """A stand-in for a module."""

    def __init__(self, name: str, peer: Peer, number: int):
        super().__init__(name)
        self.__dict__.update({NUMBER: number, PEER: peer})

    def __getattr__(self, name: str) -> Any:
        peer = self.__dict__[PEER]
        if name == "__all__":
            try:
                return peer.ask("get", self, name)
            except AttributeError:
                return peer.ask("names", self)
        return peer.ask("get", self, name)

    def __setattr__(self, name: str, value: Any) -> None:
        if name.startswith("__") or isinstance(value, types.ModuleType):  # what the import system writes
            self.__dict__[name] = value
        else:
            self.__dict__[PEER].ask("set", self, name, value)

    def __delattr__(self, name: str) -> None:
        self.__dict__[PEER].ask("delete", self, name)


def number_of(value: Any) -> int:
    if isinstance(value, RemoteType):
        return type.__getattribute__(value, NUMBER)
    return object.__getattribute__(value, "__dict__")[NUMBER]


def peer_of(cls: type) -> Peer:
    return type.__getattribute__(cls, PEER)


def _forwarder(peer: Peer, name: str) -> Callable[..., Any]:
    if name == "__call__":
        return lambda self, /, *positional, **named: peer.ask("call", self, positional, named)
    return lambda self, /, *arguments: peer.ask("special", self, name, arguments)


def _getter(peer: Peer) -> Callable[..., Any]:
    return lambda self, name: peer.ask("get", self, name)


def _setter(peer: Peer) -> Callable[..., Any]:
    return lambda self, name, value: peer.ask("set", self, name, value)


def _deleter(peer: Peer) -> Callable[..., Any]:
    return lambda self, name: peer.ask("delete", self, name)


def _refuse(*_: Any, **__: Any) -> Any:
    raise TypeError("an object of another process cannot be copied or subclassed")


def _standard(value: Any) -> bool:
    """True if a function or type can be found by its name in the standard library."""
    module, name = getattr(value, "__module__", None), getattr(value, "__qualname__", "")
    if not isinstance(module, str) or module.partition(".")[0] not in sys.stdlib_module_names:
        return False
    found: Any = sys.modules.get(module)
    for part in name.split("."):
        found = getattr(found, part, None)
    return found is value


class Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Imports the repository's packages as stand-ins; its tests, also those inside a package, are imported here."""

    def __init__(self, peer: Peer, packages: Sequence[str]):
        self.peer, self.packages = peer, frozenset(packages)

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        parts = name.split(".")
        above = {".".join(parts[:count]) for count in range(1, len(parts) + 1)}
        if self.packages.isdisjoint(above) or TESTS & set(parts) or parts[-1] == "conftest":
            return None
        if parts[-1].startswith("test_") or parts[-1].endswith("_test"):
            return None
        return importlib.machinery.ModuleSpec(name, self)

    def create_module(self, spec: Any) -> Any:
        return self.peer.ask("import", spec.name)

    def exec_module(self, module: Any) -> None:
        for name in ("__path__", "__file__"):
            with contextlib.suppress(AttributeError):
                module.__dict__[name] = self.peer.ask("get", module, name)


def install(packages: Sequence[str], python_path: str) -> None:
    """Start the other process and import the packages from there, from now on."""
    ctypes.CDLL(None).prctl(4, 0, 0, 0, 0)  # PR_SET_DUMPABLE: neither ptrace nor /proc reach this process
    ours, theirs = socket.socketpair()
    command = [sys.executable, "-P", "-s", "-B", __file__, str(theirs.fileno())]
    environment = {**os.environ, "PYTHONPATH": python_path}
    subprocess.Popen(command, pass_fds=[theirs.fileno()], env=environment)
    theirs.close()
    sys.meta_path.insert(0, Finder(Peer(ours, guarded=True), packages))


def main() -> None:
    """The other process: serves until the tests' process is gone."""
    line = socket.socket(fileno=int(sys.argv[1]))
    line.set_inheritable(False)
    peer = Peer(line, guarded=False)
    while True:
        try:
            verb, content = peer.receive()
        except (EOFError, OSError):
            os._exit(0)
        peer.serve(verb, content)


if __name__ == "__main__":
    main()
