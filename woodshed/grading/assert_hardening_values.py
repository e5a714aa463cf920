"""Values that look like the one that a test expects, and objects that say what they are before they are shown it.

An object that cannot know what a test expects still sees it when it is compared, among values that were made up. If
those look made up (nine digits, where the test has one), it is equal to what looks likely, and passes. So made up
values are of one series with the real one, which lies evenly anywhere in it; of texts, some differ in case and
separators alone, since an object may ignore these.

Standard library only. `assert_hardening` imports this file, which lies beside it under its name with "_values".
"""

from __future__ import annotations

import collections
import contextlib
import datetime
import decimal
import fractions
import itertools
import math
import operator
import pathlib
import random
import string
import types
import uuid
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

DRAW = random.SystemRandom()
LETTERS = (string.ascii_lowercase, string.ascii_uppercase, string.digits)
SEPARATORS = " _-./"
MOST_DECIMALS = 6
"""A float with more decimals, or an exponent, was computed: its neighbours differ by parts of it."""
NUMBERS = (decimal.Decimal, fractions.Fraction)
DATES = (datetime.date, datetime.datetime, datetime.timedelta)
PATHS = (pathlib.PosixPath, pathlib.PurePosixPath, pathlib.PureWindowsPath)
CONTAINERS = (list, tuple, set, frozenset, dict)
PLAIN = (int, str, float, bool, bytes, complex, type(None))
HOLDERS: dict[type, Callable[[Any], Iterable[object]]] = {
    **{kind: kind.__iter__ for kind in (list, tuple, set, frozenset, collections.deque)},
    dict: dict.items,
    types.SimpleNamespace: lambda value: object.__getattribute__(value, "__dict__").values(),
}
"""Types that are compared by what they hold."""
DEEPEST, MOST = 6, 2000
"""Of containers inside each other, and of parts, that are looked at."""
MOST_PARTS = 4
"""Parts of one side of a comparison of which look-alikes are made."""
TEXTS = (*NUMBERS, *DATES, *PATHS, datetime.time, uuid.UUID)
"""Types whose text says all about a value."""


# -- values that look alike


def parts(value: object) -> Iterator[object]:
    """The value and what its built-in containers hold, the value first."""
    waiting, seen = [(value, 0)], 0
    while waiting and seen < MOST:
        value, depth = waiting.pop()
        seen += 1
        yield value
        kind = type(value)  # the plain ones first, without a call: some tests compare a million times
        is_plain = kind is str or kind is int or kind is float or kind is bytes or kind is bool
        if depth < DEEPEST and not is_plain:
            waiting += [(item, depth + 1) for item in _contents(value)]


def _contents(value: object) -> list[object]:
    """Parts of a container, also of one of a type below the built-in ones, whatever it says itself."""
    kinds = type.__dict__["__mro__"].__get__(type(value))
    # By identity: `in` would ask a type that says it is equal to everything.
    found = (list(look(value)) for kind, look in HOLDERS.items() if any(kind is owner for owner in kinds))
    return next(found, [])


# -- values that look alike


def look_alikes(value: object, most: int) -> list[object]:
    """Different values that might as well have been expected, in random order: no more than `most`."""
    found = _series(value, most)
    if not found:
        found = [stranger() for _ in range(most)]
    return DRAW.sample(found, min(most, len(found)))


def likely(parts: Sequence[object], most: int) -> list[object]:
    """Look-alikes of some of these values, of each about as many, none of which is equal to one of them."""
    found = [
        other
        for part in DRAW.sample(parts, min(MOST_PARTS, len(parts)))
        for other in look_alikes(part, most)
        if not any(_is_same(other, known) for known in parts)
    ]
    DRAW.shuffle(found)
    return found


def _is_same(value: object, other: object) -> bool:
    kinds = (*PLAIN, *CONTAINERS)
    with contextlib.suppress(Exception):
        return type(value) in kinds and type(other) in kinds and bool(value == other)
    return False


def stranger() -> object:
    """Something that nothing of the repository is equal to."""
    word = "".join(DRAW.choices(string.ascii_lowercase, k=DRAW.randint(3, 9)))
    return DRAW.choice([object(), DRAW.random(), word, f"{DRAW.random()}", [word], {word: DRAW.random()}])


def _built(kind: Any, contents: Iterable[list[Any]]) -> list[object]:
    """Containers of these contents, without those that a set or a dictionary cannot hold, such as a list."""
    built: list[object] = []
    for items in contents:
        with contextlib.suppress(TypeError):
            built.append(kind(items))
    return built


def _series(value: Any, most: int) -> list[object]:
    kind = type(value)
    if value is None or kind is bool:
        return [0.5, "x", not value]
    if kind is int:
        return [value + step for step in _steps(value, DRAW.choice((1, 1, 2, 3)), most)]
    if kind is float or kind is complex:
        return _floats(value, most)
    if kind is str:
        return _texts(value, most)
    if kind is bytes or kind is bytearray:
        texts = _texts(value.decode("latin-1"), most)
        return [kind(text, "latin-1") for text in texts if all(ord(letter) < 256 for letter in text)]
    if kind in CONTAINERS[:4]:
        return _built(kind, _items(list(value), most))
    if kind is dict:
        return _built(dict, _pairs(list(value.items()), most))
    if kind in NUMBERS:
        return [value + step for step in range(1, most + 1)]
    if kind in DATES:
        return [value + datetime.timedelta(days=step) for step in range(1, most + 1)]
    return [kind(text) for text in _texts(str(value), most)] if kind in PATHS else []


def _steps(value: float, step: float, most: int) -> list[float]:
    """Differences to the others of a series of evenly spaced numbers, none below 0 if the value is not."""
    below = most if value < 0 else min(most, int(value // step))
    place = DRAW.randint(0, below)
    return [step * (other - place) for other in range(most + 1) if other != place]


def _floats(value: Any, most: int) -> list[object]:
    if isinstance(value, complex):
        return [complex(real, value.imag) for real in _floats(value.real, most)]  # type: ignore[arg-type]
    if not math.isfinite(value):
        return [0.0, 1.0, -value]
    decimals = len(repr(value).partition(".")[2])
    if "e" in repr(value) or decimals > MOST_DECIMALS:
        found = [value + step for step in _steps(value, abs(value) * 0.05, most)]
    else:
        step = max(10.0**-decimals, round(abs(value) * 0.02, decimals))
        found = [round(value + step, decimals) for step in _steps(value, step, most)]
    return [other for other in found if other != value and math.isfinite(other)]


def _texts(text: str, most: int) -> list[Any]:
    """Texts with other case or separators, and with another letter at one place."""
    loose = {text.swapcase(), text.lower(), text.upper(), text.title()}
    for mark in SEPARATORS:
        if mark in text:
            loose |= {text.replace(mark, other) for other in ("", *SEPARATORS)}
    places = [place for place, letter in enumerate(text) if any(letter in letters for letters in LETTERS)]
    place = DRAW.choice(places) if places else DRAW.randint(0, len(text))
    rest = text[place + bool(places) :]
    letters = next((ones for ones in LETTERS if places and text[place] in ones), string.ascii_lowercase)
    close = [text[:place] + letter + rest for letter in letters]
    close += [f"{other}{letter}" for other in close for letter in letters if len(close) <= most]
    return [*(loose - {text}), *[other for other in dict.fromkeys(close) if other != text][:most]]


def _items(items: list[Any], most: int) -> list[list[Any]]:
    """Other contents of a list or set: another item at one place, one less, one more."""
    if not items:
        return [[item] for item in (0, 1, "", "a", None)]
    place = DRAW.randrange(len(items))
    found = [[*items[:place], other, *items[place + 1 :]] for other in look_alikes(items[place], most)]
    more = [other for other in look_alikes(items[-1], 1) if other not in items]
    return [*found, items[:-1], *([*items, other] for other in more)]


def _pairs(items: list[tuple[Any, Any]], most: int) -> list[list[tuple[Any, Any]]]:
    """Other contents of a dictionary."""
    if not items:
        return [[(key, 0)] for key in ("a", 0, 1)]
    place = DRAW.randrange(len(items))
    key, value = items[place]
    found = [[*items[:place], (key, other), *items[place + 1 :]] for other in look_alikes(value, most)]
    return [*found, [*items[:place], *items[place + 1 :]]]


# -- what objects say of themselves


def gives_away(subject: Any, value: Any) -> bool:
    """True if an object, before it is shown the value, says that it is that, by a conversion to the value's type."""
    for convert in CONVERSIONS.get(type(value), (str,) if type(value) in TEXTS else ()):
        with contextlib.suppress(Exception):
            if convert(subject, value) if convert in HOLDING else _says(convert(subject), value):
                return True
    return False


def _says(given: Any, value: Any) -> bool:
    """Compare as built-in values, whatever the type of what was given redefines."""
    base = next((kind for kind in (str, int, float, complex, bytes) if isinstance(given, kind)), None)
    if base is None:
        return False
    plain = _EXACT[base](given)
    return type(plain) is base and plain == (str(value) if type(value) in TEXTS else value)


def _holds(subject: Any, value: Any) -> bool:
    """Items in the order of a list or tuple, or the ones of a set."""
    if hasattr(type(subject), "__next__"):
        return False
    items = list(itertools.islice(iter(subject), len(value) + 1))
    if len(items) != len(value):
        return False
    if isinstance(value, set | frozenset):
        return all(any(is_known(item, other) for other in value) for item in items)
    return all(map(is_known, items, value))


def _maps(subject: Any, value: Any) -> bool:
    keys = list(itertools.islice(iter(subject), len(value) + 1))
    known = [(key, other) for key in keys for other in value if is_known(key, other)]
    return len(keys) == len(value) == len(known) and all(
        is_known(subject[key], value[other]) for key, other in known
    )


def is_known(given: Any, value: Any) -> bool:
    """True for a built-in value that is equal, or an object that gives that away."""
    if type(given) is type(value) and type(value) in PLAIN:
        return given == value
    return gives_away(given, value)


def _text(subject: Any) -> Any:
    return subject if isinstance(subject, str) else str(subject)


def _bytes(subject: Any) -> Any:
    if isinstance(subject, bytes) or hasattr(
        type(subject), "__bytes__"
    ):  # of a number it would be so many zeros
        return subject if isinstance(subject, bytes) else bytes(subject)
    return None


_EXACT: dict[type, Callable[[Any], Any]] = {
    str: str.__str__,
    int: int.__int__,
    float: float.__float__,
    complex: complex.__pos__,
    bytes: lambda value: bytes(memoryview(value)),
}
HOLDING = (_holds, _maps)
CONVERSIONS: dict[type, Iterable[Callable[..., Any]]] = {
    str: (_text,),
    int: (operator.index, float),
    float: (float,),
    complex: (complex,),
    bytes: (_bytes,),
    **dict.fromkeys((list, tuple, set, frozenset), (_holds,)),
    dict: (_maps,),
}
