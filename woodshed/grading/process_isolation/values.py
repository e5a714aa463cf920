"""Values that cross as they are, and names that the tests' side believes."""

from __future__ import annotations

import builtins
import collections
import collections.abc
import contextlib
import datetime
import decimal
import enum
import fractions
import importlib
import inspect
import ipaddress
import itertools
import math
import numbers
import operator
import pathlib
import re
import sys
import time
import types
import uuid
import zoneinfo
from collections.abc import Callable
from typing import Any

FORWARDED = tuple(
    f"__{name}__"
    for name in (
        "call len iter next getitem setitem delitem contains eq ne lt le gt ge hash bool repr str format int float "
        "index complex bytes fspath enter exit reversed length_hint add radd iadd sub rsub isub mul rmul imul truediv "
        "rtruediv itruediv floordiv rfloordiv ifloordiv mod rmod imod pow rpow ipow and rand iand or ror ior xor rxor "
        "ixor lshift rlshift ilshift rshift rrshift irshift neg pos abs invert round trunc floor ceil divmod rdivmod "
        "matmul rmatmul imatmul get set delete set_name aiter anext await aenter aexit missing sizeof instancecheck "
        "subclasscheck class_getitem dir"
    ).split()
)
"""Methods that Python looks up on types: each type of stand-ins has those that its original has."""
COMPARING = frozenset(f"__{name}__" for name in "contains eq ne lt le gt ge".split())
"""Of these the ones that change nothing, so that no object empties what it is compared with."""
READABLE = frozenset(
    (
        *(
            "__name__",
            "__qualname__",
            "__doc__",
            "__module__",
            "__signature__",
            "__annotations__",
            "__wrapped__",
        ),
        *("__defaults__", "__kwdefaults__"),
    )
)
"""Names that the other side may ask for beside public attributes, of objects that were lent to it."""
BIG = 1 << 53

MADE: dict[type, Callable[[Any], list[Any]]] = {
    datetime.date: lambda d: [d.year, d.month, d.day],
    datetime.time: lambda t: [t.hour, t.minute, t.second, t.microsecond, t.tzinfo, t.fold],
    datetime.datetime: lambda d: [*d.timetuple()[:6], d.microsecond, d.tzinfo, d.fold],
    datetime.timedelta: lambda d: [d.days, d.seconds, d.microseconds],
    datetime.timezone: lambda z: [z.utcoffset(None), z.tzname(None)],
    zoneinfo.ZoneInfo: lambda z: [z.key],
    decimal.Decimal: lambda d: [str(d)],
    fractions.Fraction: lambda f: [f.numerator, f.denominator],
    pathlib.PosixPath: lambda p: [str(p)],
    pathlib.PurePosixPath: lambda p: [str(p)],
    pathlib.PureWindowsPath: lambda p: [str(p)],
    range: lambda r: [r.start, r.stop, r.step],
    slice: lambda s: [s.start, s.stop, s.step],
    complex: lambda c: [c.real, c.imag],
    uuid.UUID: lambda u: [str(u)],
    ipaddress.IPv4Address: lambda a: [str(a)],
    ipaddress.IPv6Address: lambda a: [str(a)],
    ipaddress.IPv4Network: lambda a: [str(a)],
    ipaddress.IPv6Network: lambda a: [str(a)],
    re.Pattern: lambda p: [p.pattern, p.flags],
    time.struct_time: lambda t: [tuple(t)],
    memoryview: lambda m: [bytes(m)],
    collections.OrderedDict: lambda d: [list(d.items())],
    collections.Counter: lambda c: [dict(c)],
    collections.deque: lambda d: [list(d), d.maxlen],
    collections.defaultdict: lambda d: [d.default_factory, list(d.items())],
    types.SimpleNamespace: lambda n: [vars(n)],
    types.GenericAlias: lambda a: [a.__origin__, a.__args__],
    inspect.Parameter: lambda p: [p.name, int(p.kind), p.default, p.annotation],
    inspect.Signature: lambda s: [list(s.parameters.values()), s.return_annotation],
}
"""Types that travel as what they are made of."""
MAKERS: dict[type, Callable[..., Any]] = {
    datetime.time: lambda *t: datetime.time(*t[:5], fold=t[5]),
    datetime.datetime: lambda *d: datetime.datetime(*d[:8], fold=d[8]),
    datetime.timezone: lambda offset, name: (
        datetime.timezone(offset, name)
        if name != datetime.timezone(offset).tzname(None)
        else datetime.timezone(offset)
    ),
    re.Pattern: re.compile,
    types.SimpleNamespace: lambda fields: types.SimpleNamespace(**fields),
    inspect.Parameter: lambda name, kind, default, annotation: inspect.Parameter(
        name, inspect._ParameterKind(kind), default=default, annotation=annotation
    ),
    inspect.Signature: lambda parameters, returned: inspect.Signature(parameters, return_annotation=returned),
}
"""Those that are made by something else than their own type."""
MADE_BY_NAME = {f"{kind.__module__}.{kind.__qualname__}": kind for kind in MADE}
HOLDERS: dict[str, type] = {"list": list, "tuple": tuple, "set": set, "frozenset": frozenset}
CHANGEABLE = (
    *(list, dict, set, bytearray),
    *(collections.OrderedDict, collections.Counter, collections.deque, collections.defaultdict),
)
"""Containers that a call may change: its answer says how."""
VALUE_BASES = (str, int, float, bytes, tuple, frozenset, complex)
"""Instances of types below these are sent with their value: what the type does not redefine is asked of that."""
CONTAINER_BASES = (dict, list, set)
KINDS: dict[str, type] = {
    f"builtins.{kind.__name__}": kind
    for kind in (
        *(types.FunctionType, types.MethodType, types.BuiltinFunctionType, types.GeneratorType),
        *(types.CoroutineType, types.AsyncGeneratorType, types.MappingProxyType, property, staticmethod),
        *(classmethod, type({}.keys()), type({}.values()), type({}.items())),
    )
}
"""Types of the interpreter that a stand-in may claim to be of, beside the ones of `SAFE`."""

_PLAIN_FUNCTIONS = (
    "abs all any ascii bin bool callable chr divmod format hash hex id isinstance issubclass iter len max min next "
    "oct ord pow repr reversed round sorted sum"
).split()
_PLAIN_OPERATORS = [
    name for name in operator.__all__ if name not in ("attrgetter", "itemgetter", "methodcaller")
]
_TYPES_OF = (
    collections,
    collections.abc,
    datetime,
    decimal,
    fractions,
    numbers,
    enum,
    ipaddress,
    pathlib,
    re,
    uuid,
)
_UNSAFE = ("unittest", "doctest", "pdb", "bdb", "asyncio", "concurrent", "_frozen_importlib")


def _safe() -> dict[tuple[str, str], Any]:
    found: dict[tuple[str, str], Any] = {}
    values = [v for v in vars(builtins).values() if isinstance(v, type) and v.__module__ == "builtins"]
    values += [getattr(builtins, name) for name in _PLAIN_FUNCTIONS]
    values += [getattr(operator, name) for name in _PLAIN_OPERATORS]
    values += [value for name, value in vars(math).items() if callable(value) and name[0] != "_"]
    for module in _TYPES_OF:
        values += [
            v for v in vars(module).values() if isinstance(v, type) and v.__module__ == module.__name__
        ]
    values += [value for value in vars(itertools).values() if isinstance(value, type)]
    values += [zoneinfo.ZoneInfo, types.SimpleNamespace, types.GenericAlias, time.struct_time]
    values += [inspect.Signature, inspect.Parameter, inspect._empty, contextlib.AbstractContextManager]
    for value in values:
        found[str(value.__module__), value.__qualname__] = value
    return found


SAFE: dict[tuple[str, str], Any] = _safe()
"""Things that the tests' side takes a name for; beside these only imported exceptions of the standard library."""


def believed(module: Any, name: Any) -> Any:
    """The object of a name that the other side wrote.

    Raises:
        LookupError: it is not known to be harmless.
    """
    if type(module) is not str or type(name) is not str:
        raise LookupError("no name")
    if (module, name) in SAFE:
        return SAFE[module, name]
    top = module.partition(".")[0]
    if top in sys.stdlib_module_names and top not in _UNSAFE and name.isidentifier():
        found = vars(sys.modules.get(module, builtins)).get(name)
        if type(found) is type and issubclass(found, BaseException):
            return found
    raise LookupError(f"{module}.{name} is not believed")


def trusted(module: Any, name: Any) -> Any:
    """The object of a name that the tests' side wrote."""
    value: Any = importlib.import_module(module)
    for part in name.split("."):
        value = getattr(value, part)
    return value


def name_of(value: Any) -> list[str] | None:
    """["name", module, name] of a type or function that both processes find there: one that is installed."""
    module, name = getattr(value, "__module__", None), getattr(value, "__qualname__", "")
    if value is Ellipsis or value is NotImplemented:
        module, name = "builtins", str(value)
    if type(module) is not str or type(name) is not str:
        return None
    found: Any = sys.modules.get(module)
    if module.partition(".")[0] not in sys.stdlib_module_names and not is_installed(found):
        return None
    for part in name.split("."):
        found = getattr(found, part, None)
    return ["name", module, name] if found is value else None


def is_installed(module: Any) -> bool:
    """True for a module of the environment."""
    file = getattr(module, "__file__", None)
    return type(file) is str and file.startswith((sys.prefix, sys.base_prefix))


SAFE["builtins", "Ellipsis"] = Ellipsis
SAFE["builtins", "NotImplemented"] = NotImplemented


def content_of(value: Any) -> Any:
    """The built-in value inside an instance of a type below one of `VALUE_BASES` or `CONTAINER_BASES`, untouched by
    what the type redefines."""
    base = next(base for base in (*VALUE_BASES, *CONTAINER_BASES) if isinstance(value, base))
    return _CONTENT[base](value)


_CONTENT: dict[type, Callable[[Any], Any]] = {
    str: str.__str__,
    int: int.__int__,
    float: float.__float__,
    complex: complex.__pos__,
    bytes: lambda value: bytes(memoryview(value)),
    tuple: lambda value: tuple.__getitem__(value, slice(None)),
    frozenset: lambda value: frozenset(list(frozenset.__iter__(value))),
    set: lambda value: set(set.__iter__(value)),
    list: lambda value: list(list.__iter__(value)),
    dict: lambda value: dict(dict.items(value)),
}


def base_among(kind: type, bases: tuple[type, ...]) -> type | None:
    """The built-in type that a type's instances hold the value of."""
    return next((base for base in kind.__mro__[1:] if base in bases), None)


def is_enum_of_python(value: Any) -> bool:
    """True for a member of an enumeration of the standard library."""
    return isinstance(value, enum.Enum) and name_of(type(value)) is not None


def is_of_pytest(value: Any) -> bool:
    return str(getattr(value, "__module__", "")).partition(".")[0] in ("_pytest", "pytest", "pluggy")
