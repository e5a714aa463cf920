"""Stand-ins: local types and objects whose attributes and methods are those of an object of the other process."""

from __future__ import annotations

import types
from collections.abc import Callable
from typing import Any, Protocol

from .values import CONTAINER_BASES, FORWARDED, KINDS, VALUE_BASES, believed

NUMBER, PEER = "@number", "@peer"
VALUE_BASES_BY_NAME = {base.__name__: base for base in VALUE_BASES}
CONTAINERS_BY_NAME = {base.__name__: base for base in CONTAINER_BASES}
MOST_NAMES = 2000
LOCAL = frozenset(
    ("__class__", "__new__", "__slots__", "__dict__", "__weakref__", "__del__", "__getattribute__")
)
"""Names that no method of a stand-in may have: they would change what it is here."""
NOT_MEMBERS = ("__classcell__", "__module__", "__qualname__", "__annotations__", "__firstlineno__")
ON_ERRORS = ("__call__", "__len__", "__getitem__", "__iter__")
"""Special methods of exceptions that are forwarded."""
ON_TYPES = (
    "len",
    "iter",
    "getitem",
    "contains",
    "bool",
    "or",
    "ror",
    "instancecheck",
    "subclasscheck",
    "reversed",
)
"""Special methods of a type's own type."""


class Asker(Protocol):
    """The end of the line that a stand-in asks (`peer.Peer`)."""

    types: dict[int, Any]

    def answer(self, name: str, ask: Callable[..., Any], subject: Any, arguments: tuple) -> Any:
        """The answer of a stand-in to a special method, as far as this side believes it."""
        ...

    def ask(self, verb: str, *arguments: Any) -> Any: ...


class RemoteType(type):
    """The type of stand-ins for types."""

    def __new__(cls, name: str, bases: tuple, body: dict, *, made: bool = False, **named: Any):
        if made:
            return super().__new__(cls, name, bases, body)
        return subclass(cls, name, bases, body, named)

    def __init__(cls, name: str, bases: tuple, body: dict, **named: Any):
        super().__init__(name, bases, body)

    @classmethod
    def __prepare__(cls, name: str, bases: tuple, /, **named: Any) -> dict:
        return {}

    def __call__(cls, *positional: Any, **named: Any) -> Any:
        if is_made_here(cls) and issubclass(cls, BaseException):
            return super().__call__(*positional, **named)
        return peer_of(cls).ask("call", cls, positional, named)

    def __getattr__(cls, name: str) -> Any:
        if name in (NUMBER, "__isabstractmethod__", "__abstractmethods__"):
            raise AttributeError(name)
        return peer_of(cls).ask("get", cls, name)

    def __setattr__(cls, name: str, value: Any) -> None:
        if type(value) is RemoteMethod:  # put back what was there
            peer_of(cls).ask("delete", cls, name)
        else:
            peer_of(cls).ask("set", cls, name, value)
        if name in cls.__dict__ and name not in LOCAL:
            type.__delattr__(cls, name)

    def __delattr__(cls, name: str) -> None:
        peer_of(cls).ask("delete", cls, name)

    def __dir__(cls) -> list[str]:
        return peer_of(cls).ask("names", cls)


class RemoteModule(types.ModuleType):
    """A stand-in for a module."""

    def __init__(self, name: str, peer: Asker, number: int):
        super().__init__(name)
        self.__dict__.update({NUMBER: number, PEER: peer})
        self.__dict__.pop("__doc__", None)

    def __getattr__(self, name: str) -> Any:
        peer = self.__dict__[PEER]
        if name == "__all__":
            try:
                return peer.ask("get", self, name)
            except AttributeError:
                return [name for name in peer.ask("names", self) if not name.startswith("_")]
        return peer.ask("get", self, name)

    def __setattr__(self, name: str, value: Any) -> None:
        if type(value) is RemoteModule:  # an import here: there the name may mean a function by now
            return
        if name.startswith("__") or isinstance(value, types.ModuleType):  # what the import system writes
            self.__dict__[name] = value
        else:
            self.__dict__[PEER].ask("set", self, name, value)

    def __delattr__(self, name: str) -> None:
        if name in self.__dict__:
            del self.__dict__[name]
        else:
            self.__dict__[PEER].ask("delete", self, name)

    def __dir__(self) -> list[str]:
        return sorted({*self.__dict__[PEER].ask("names", self), *self.__dict__} - {NUMBER, PEER})


class RemoteMethod:
    """A function in the body of a class of the other process, as `super()` and the class itself find it."""

    def __init__(self, peer: Asker, owner: int, name: str):
        self.peer, self.owner, self.name = peer, owner, name

    def __get__(self, instance: Any, owner: Any = None) -> Any:
        if instance is None:
            return self.peer.ask("get", owner, self.name)
        if not is_made_here(type(instance)):
            return self.peer.ask("get", instance, self.name)
        return self.peer.ask("inherited", self.peer.types[self.owner], self.name, instance)

    def __set__(self, instance: Any, value: Any) -> None:
        self.peer.ask("set", instance, self.name, value)

    def __delete__(self, instance: Any) -> None:
        self.peer.ask("delete", instance, self.name)


class RemoteDoc:
    """The docstring of a stand-in's type, and of each stand-in its own."""

    def __init__(self, peer: Asker, text: str | None):
        self.peer, self.text = peer, text

    def __get__(self, instance: Any, owner: Any = None) -> Any:
        return (
            self.text
            if instance is None or NUMBER not in fields_of(instance)
            else self.peer.ask("get", instance, "__doc__")
        )


def is_made_here(kind: type) -> bool:
    """True for a class that this process made below a type of the other one."""
    return "@local" in kind.__dict__


def is_remote(value: Any) -> bool:
    return isinstance(type(value), RemoteType) or isinstance(value, RemoteType) or type(value) is RemoteModule


def number_of(value: Any) -> int:
    if isinstance(value, RemoteType):
        return type.__getattribute__(value, NUMBER)
    return fields_of(value)[NUMBER]


def fields_of(value: Any) -> dict[str, Any]:
    """The namespace that a stand-in has here."""
    fields: Any = object.__getattribute__(value, "__dict__")
    return fields


def peer_of(cls: type) -> Asker:
    return type.__getattribute__(cls, PEER)


def stand_in(peer: Asker, number: int, told: dict[str, Any], above: list[Any]) -> Any:
    """A local type whose instances forward everything to originals of a remote one.

    Args:
        told: as `peer.described` has it; nothing in it is believed but names of the tables.
        above: local types of its bases, most special first.

    Raises:
        TypeError: no description of a type.
    """
    name = _text(told.get("name"))
    bases = _lowest(above)
    is_error = any(issubclass(base, BaseException) for base in bases)
    value_base = VALUE_BASES_BY_NAME.get(_text(told.get("value")))
    body = _body(peer, number, told)
    if is_error:
        body = {m: forward for m, forward in body.items() if m in ON_ERRORS}
        body["__str__"] = shown
    else:
        body |= _changes(peer)
        content = CONTAINERS_BY_NAME.get(_text(told.get("content")))
        claimed = None if value_base else claimed_type(told) or content
        if claimed is not None:
            body["__class__"] = property(lambda self: claimed)
        if content and "__eq__" in body:
            body |= {"__eq__": _same_content(peer), "__ne__": _other_content}
    if value_base and not any(issubclass(base, value_base) for base in bases):
        bases.append(value_base)
    if "__eq__" in body and "__hash__" not in body and not value_base:
        body["__hash__"] = None
    body |= {"__module__": _text(told.get("module")), "__qualname__": name, "__getattr__": _getter(peer)}
    body |= {"__doc__": RemoteDoc(peer, _text(told.get("doc")) or None), NUMBER: number, PEER: peer}
    kind = _type_of_types(peer, bases, [m for m in _names(told.get("meta")) if m in FORWARDED])
    return kind(name.rpartition(".")[2], tuple(bases), body, made=True)


def _lowest(above: list[Any]) -> list[type]:
    """Those of some types that none of the others is below."""
    for base in above:
        if not isinstance(base, type):
            raise TypeError(f"a type below {base!r}")
    return [base for base in dict.fromkeys(above) if not any(base in other.__mro__[1:] for other in above)]


def _body(peer: Asker, number: int, told: dict[str, Any]) -> dict[str, Any]:
    """Methods that forward: those that Python looks up on types, and those that `super()` may ask for."""
    body: dict[str, Any] = {
        m: _forwarder(peer, number, m) for m in _names(told.get("special")) if m in FORWARDED
    }
    for method in _names(told.get("methods")):
        if method not in LOCAL and method not in FORWARDED:  # those are answered in one place only
            body[method] = RemoteMethod(peer, number, method)
    return body


def _changes(peer: Asker) -> dict[str, Any]:
    """Methods that write to, copy and pickle the original."""
    return {
        "__setattr__": _setter(peer),
        "__delattr__": _deleter(peer),
        "__reduce_ex__": _reduce(peer),
        "__copy__": _copier(peer),
        "__deepcopy__": _deep_copier(peer),
        "__init_subclass__": classmethod(lambda cls, **named: None),
    }


def shown(error: BaseException) -> str:
    """The text of an exception whose type redefines it, as the other side wrote it."""
    text = vars(error).get("@shown")
    return BaseException.__str__(error) if text is None else text


def claimed_type(told: dict[str, Any]) -> type | None:
    """The harmless type of the interpreter or the standard library that a type says it is."""
    module, name = _text(told.get("module")), _text(told.get("name"))
    if f"{module}.{name}" in KINDS:
        return KINDS[f"{module}.{name}"]
    try:
        found = believed(module, name)
    except LookupError:
        return None
    return found if isinstance(found, type) and not issubclass(found, BaseException) else None


def subclass(meta: Any, name: str, bases: tuple, body: dict, named: dict) -> Any:
    """A class whose bases are of the other process: a real one there, whose methods call the functions here."""
    remote = next(base for base in bases if isinstance(base, RemoteType))
    peer = peer_of(remote)
    if any(issubclass(base, BaseException) for base in bases):
        kept = {**body, "@local": True}
        return type.__new__(type(remote), name, bases, kept)
    cell = body.get("__classcell__")
    sent = {key: _member(value) for key, value in body.items() if key not in NOT_MEMBERS}
    above = tuple(base for base in bases if isinstance(base, RemoteType) or base is object)
    if len(above) != len(bases):
        mixed = [base for base in bases if not isinstance(base, RemoteType)]
        raise TypeError(f"a class below types of two processes: {mixed[0].__name__}")
    names = [name, str(body.get("__module__")), str(body.get("__qualname__"))]
    number = peer.ask("subclass", names, above, sent, named)
    local = {key: value for key, value in body.items() if key not in LOCAL or key == "__class__"}
    local |= {NUMBER: number, PEER: peer, "@local": True}
    if cell is not None:
        local["__classcell__"] = cell
    made = type.__new__(type(remote), name, bases, local)
    peer.types[number] = made
    return made


def _member(value: Any) -> tuple:
    """A member of a class body, as the other process can make one of its own from it."""
    if isinstance(value, classmethod | staticmethod):
        return type(value).__name__, value.__func__
    if type(value) is property:
        return "property", value.fget, value.fset, value.fdel
    return ("function" if type(value) is types.FunctionType else "value"), value


def _type_of_types(peer: Asker, bases: list[type], special: list[str]) -> type[RemoteType]:
    body = {m: _forwarder(peer, None, m) for m in special if m[2:-2] in ON_TYPES}
    kinds = list(dict.fromkeys(type(base) for base in bases if isinstance(base, RemoteType))) or [RemoteType]
    kinds = [kind for kind in kinds if not any(kind in type.mro(other)[1:] for other in kinds)]
    return type("RemoteType", tuple(kinds), body) if body or len(kinds) > 1 else kinds[0]


def _text(value: Any) -> str:
    return value if type(value) is str else ""


def _names(value: Any) -> list[str]:
    found = value[:MOST_NAMES] if type(value) is list else []
    return [name for name in found if type(name) is str and name.isidentifier()]


def _forwarder(peer: Asker, owner: int | None, name: str) -> Callable[..., Any]:
    if name == "__call__":
        return lambda self, /, *positional, **named: peer.ask("call", self, positional, named)
    if name == "__await__":
        return lambda self, /: _awaited(peer, self)

    def ask(self: Any, /, *arguments: Any) -> Any:
        if owner is not None and is_made_here(type(self)):  # through `super()`
            return peer.ask("special", self, name, arguments, peer.types[owner])
        return peer.ask("special", self, name, arguments)

    return lambda self, /, *arguments: peer.answer(name, ask, self, arguments)


def _awaited(peer: Asker, awaitable: Any) -> Any:
    """Await in the other process, whose loop runs until it is done."""
    return peer.ask("await", awaitable)
    yield  # a generator


def _same_content(peer: Asker) -> Callable[..., Any]:
    """Equality by content, asked for and compared here: the other side has no say."""

    def equal(self: Any, other: Any) -> bool:
        mine = peer.ask("content", self)
        theirs = peer.ask("content", other) if is_remote(other) else other
        return mine == theirs

    return equal


def _other_content(self: Any, other: Any) -> bool:
    return not (self == other)  # noqa: SIM201


def _getter(peer: Asker) -> Callable[..., Any]:
    return lambda self, name: peer.ask("get", self, name)


def _setter(peer: Asker) -> Callable[..., Any]:
    return lambda self, name, value: peer.ask("set", self, name, value)


def _deleter(peer: Asker) -> Callable[..., Any]:
    return lambda self, name: peer.ask("delete", self, name)


def _copier(peer: Asker) -> Callable[..., Any]:
    return lambda self: peer.ask("copy", self)


def _deep_copier(peer: Asker) -> Callable[..., Any]:
    return lambda self, memo: peer.ask("deepcopy", self)


def _reduce(peer: Asker) -> Callable[..., Any]:
    """Pickled there, unpickled there; here the bytes are only bytes."""
    return lambda self, protocol: (Unpickled(), (peer.ask("dumps", self, protocol),))


class Unpickled:
    """Makes the stand-in of an object that was pickled in the other process."""

    peer: Asker

    def __call__(self, data: bytes) -> Any:
        return self.peer.ask("loads", data)

    def __reduce__(self) -> tuple:
        return Unpickled, ()
