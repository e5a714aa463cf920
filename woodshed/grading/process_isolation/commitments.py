"""Comparisons of stand-ins with built-in values: the object says what it is before it is told what a test expects.

A stand-in's special methods are code under test. Asked whether it is 9, an object learns that the test expects 9, and
that a decoy beside it expects 10. So nobody asks: the stand-in is converted to the value's type, as str(), a number or
its items, and what it says then is compared here, as are orders and membership. Where that holds the object is asked
too, since it may know better; it is told nothing then that it did not say itself. An object that converts to nothing is
equal to no value. Where that is wrong the test fails with the original code as well, and is known not to be isolable.

A sum, difference or quotient with a number is one of the number that the object says it is, and is made here.
Two objects of the code under test compare as they like.
"""

from __future__ import annotations

import collections
import contextlib
import datetime
import decimal
import enum
import fractions
import itertools
import operator
import pathlib
import random
import re
import types
import uuid
from collections.abc import Callable
from typing import Any

from .stand_ins import is_remote

NUMBERS = (int, float, decimal.Decimal, fractions.Fraction)
DATES = (datetime.date, datetime.time)
TEXTS = (str, datetime.timedelta, uuid.UUID, pathlib.PurePath)
SEQUENCES = (list, tuple, collections.deque)
COMPARED = (
    *(*NUMBERS, *DATES, *TEXTS, *SEQUENCES, type(None), complex, bytes, bytearray, set, frozenset, dict),
    *(range, types.SimpleNamespace),
)
"""Values that an object must say before it can be equal to them, and instances of types below these."""
NAMED = (
    *(type, types.FunctionType, types.BuiltinFunctionType, types.MethodType, enum.Enum, re.Pattern, slice),
    *(type(Ellipsis), type(NotImplemented)),
)
"""Values that nothing but themselves is equal to, and that cross as what they are."""
MOST_ITEMS = 20_000
"""Of an object that are looked at."""
EQUAL = frozenset(("__eq__", "__ne__"))
ORDERS = {f"__{name}__": getattr(operator, name) for name in ("lt", "le", "gt", "ge")}
SUMS: dict[str, Callable[[Any, Any], Any]] = {
    "__add__": operator.add,
    "__radd__": operator.add,
    "__sub__": operator.sub,
    "__rsub__": lambda number, other: other - number,
    "__truediv__": operator.truediv,
    "__rtruediv__": lambda number, other: other / number,
}
DRAW = random.SystemRandom()


class Broken(Exception):
    """An object reckons with numbers, and is none."""


Ask = Callable[..., Any]
"""Answers a special method of a stand-in: the stand-in, then the arguments."""


def answer(name: str, ask: Ask, subject: Any, arguments: tuple) -> Any:
    """The answer of a stand-in to a special method, as far as it may give one.

    Raises:
        Broken: it reckons with numbers, and does not say which one it is.
    """
    if len(arguments) != 1 or is_remote(other := arguments[0]):
        return ask(subject, *arguments)
    if name in EQUAL and isinstance(other, COMPARED):
        return ask(subject, other) if says(subject, other) else name == "__ne__"
    if name in EQUAL and isinstance(other, NAMED):
        return name == "__ne__"
    if name in ORDERS and isinstance(other, COMPARED):
        return _ordered(name, ask, subject, other)
    if name == "__contains__" and isinstance(other, COMPARED):
        return holds(subject, other) and ask(subject, other)
    if name in SUMS and type(other) in (int, float):
        return _reckoned(name, ask, subject, other)
    return ask(subject, other)


def says(subject: Any, value: Any) -> bool:
    """True if an object says of itself, before it is shown it, that it is a value."""
    with contextlib.suppress(Exception):
        return bool(_says(subject, value))
    return False


def _says(subject: Any, value: Any) -> bool:
    if value is None:
        return False
    if type(value) is bool:
        return bool(subject) is value
    if isinstance(value, NUMBERS):
        return number_of(subject) == value or str(subject) == str(value)
    if isinstance(value, complex):
        return complex(subject) == value
    if isinstance(value, bytes | bytearray):
        return _bytes(subject) == value
    if isinstance(value, dict):
        keys = _items(subject)
        return len(keys) == len(value) and {key: subject[key] for key in keys} == dict(value)
    if isinstance(value, set | frozenset):
        return set(_items(subject)) == set(value)
    if isinstance(value, (*SEQUENCES, range)):
        return _items(subject) == list(value)
    if isinstance(value, types.SimpleNamespace):
        return {name: getattr(subject, name) for name in vars(value)} == vars(value)
    if isinstance(value, DATES):
        return str(subject) == str(value) or subject.isoformat() == value.isoformat()
    return _text(subject) == str(value)


def holds(subject: Any, item: Any) -> bool:
    """True if an object, read from its beginning or as text, turns out to hold an item."""
    if hasattr(type(subject), "__next__"):  # to read it would use it up
        return False
    with contextlib.suppress(Exception):
        if isinstance(item, str) and item in _text(subject):
            return True
    with contextlib.suppress(Exception):
        if isinstance(item, bytes) and item in _bytes(subject):
            return True
    with contextlib.suppress(Exception):
        return item in _items(subject)
    return False


def number_of(subject: Any) -> int | float | None:
    """The number that an object says it is; None if it is none."""
    if isinstance(subject, int | float):  # its value came with it
        return int.__int__(subject) if isinstance(subject, int) else float.__float__(subject)
    for convert in (operator.index, float):
        with contextlib.suppress(Exception):
            number = convert(subject)
            if type(number) in (int, float):
                return number
    return None


def _text(subject: Any) -> str:
    return str.__str__(subject) if isinstance(subject, str) else str(subject)


def _bytes(subject: Any) -> bytes:
    if isinstance(subject, bytes):
        return bytes(memoryview(subject))
    return bytes(subject) if hasattr(type(subject), "__bytes__") else bytes(subject.tobytes())


def _items(subject: Any) -> list[Any]:
    """All items, as if nobody knew how many are wanted."""
    if isinstance(subject, tuple | frozenset):
        return list(tuple.__iter__(subject) if isinstance(subject, tuple) else frozenset.__iter__(subject))
    if hasattr(type(subject), "__next__"):
        raise TypeError("to read it would use it up")
    return list(itertools.islice(iter(subject), MOST_ITEMS))


def _ordered(name: str, ask: Ask, subject: Any, other: Any) -> Any:
    """The order of what an object says it is. One that is not of the value's kind may only say that it has none."""
    said: Any = None
    with contextlib.suppress(Exception):
        if isinstance(other, NUMBERS):
            said = number_of(subject)
        elif isinstance(other, DATES):
            said = type(other).fromisoformat(subject.isoformat())
        elif isinstance(other, SEQUENCES):
            said = type(other)(_items(subject))
        elif isinstance(other, set | frozenset):
            said = set(_items(subject))
        elif isinstance(other, str):
            said = _text(subject)
    if said is None:
        return NotImplemented if ask(subject, _another(other)) is NotImplemented else False
    return ORDERS[name](said, other)


def _reckoned(name: str, ask: Ask, subject: Any, number: Any) -> Any:
    """The result with the number that an object says it is. One that is none is asked about another number, and may
    only say that it does not reckon."""
    said = number_of(subject)
    if said is not None:
        return SUMS[name](said, number)
    if ask(subject, _another(number)) is NotImplemented:
        return NotImplemented
    raise Broken("an object that reckons with numbers does not say which one it is")


def _another(value: Any) -> Any:
    """A value of the same kind that says nothing of this one."""
    if isinstance(value, NUMBERS):
        return type(value)(DRAW.randrange(1, 1000))
    return type(value).min if isinstance(value, (*DATES, datetime.timedelta)) else type(value)()
