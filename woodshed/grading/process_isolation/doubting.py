"""Doubts of what stand-ins answer to tests, wherever these ask: in a helper, a mock, a lookup, by an operator.

A stand-in's special methods are code under test. So a comparison by one is asked again with changed values, as
`assert_hardening` does around asserts, and what cannot be true ends the test. Numbers are doubted by twins: beside
`it - 9` the test's process makes `it - (9 + s)` and `it - (9 - s)` for some small s and a large one, and does to them
what is done to the first. No number is the same for all three; neither is it zero, or near zero, in all three.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

from .stand_ins import RemoteType, fields_of

TWINS, SIZE = "@twins", "@size"
SPELLED = {"__eq__": "==", "__ne__": "!=", "__lt__": "<", "__le__": "<=", "__gt__": ">", "__ge__": ">="}
EXACT = frozenset(("__add__", "__radd__", "__sub__", "__rsub__"))
"""Operations with a number whose results differ as their operands do."""
DIVIDING = frozenset(("__truediv__", "__rtruediv__"))
"""The same, but for a result of 0; such results are in no order of their operands."""
UNARY = frozenset(f"__{name}__" for name in "neg pos abs round trunc floor ceil int float index bool".split())
LARGE = 1 << 53
"""From here on floats do not tell neighbours apart."""
LITTLE, MUCH = (1, 10), (10**9, 10**10)
"""Bounds of what twins differ by."""
FEW = 4
"""Twins that differ by little: who takes what looks likely for the test's own number has one of nine."""

Ask = Callable[..., Any]
"""Answers a special method of a stand-in: the stand-in, then the arguments."""
Twins = list[tuple[int, Any, Any]]
"""By how much they differ from the first, and the results of more and of less."""


class Doubting:
    """The doubts of one session.

    Args:
        hardening: the module that doubts asserts (`assert_hardening`).
        refute: ends the test that asked, with a message, whatever exceptions it expects.
    """

    def __init__(self, hardening: Any, refute: Callable[[str], Any]):
        self.hardening, self.refute = hardening, refute
        self.is_quiet = False
        hardening.quietly = self.quietly

    @contextlib.contextmanager
    def quietly(self) -> Iterator[None]:
        """Ask without being doubted."""
        before, self.is_quiet = self.is_quiet, True
        try:
            yield
        finally:
            self.is_quiet = before

    def answer(self, name: str, ask: Ask, subject: Any, arguments: tuple) -> Any:
        """The answer to a special method, or the end of the test."""
        if self.is_quiet:
            return ask(subject, *arguments)
        if name in SPELLED:
            return self._compared(name, ask, subject, *arguments)
        if name in EXACT | DIVIDING and is_number(arguments[0]):
            return self._reckoned(name, ask, subject, arguments[0])
        result = ask(subject, *arguments)
        if name in UNARY and (twins := _fields(subject).get(TWINS)):
            self._told_apart(result, self._alike(ask, twins, arguments))
            _fields(result)[SIZE] = name == "__abs__"
        return result

    def _compared(self, name: str, ask: Ask, subject: Any, other: Any) -> Any:
        doubts = self.hardening.before(SPELLED[name], subject, other, "")
        result = ask(subject, other)
        if result is NotImplemented:
            return result
        held = result if type(result) is bool else self.hardening.says_yes(lambda: result)
        try:
            self.hardening.after(doubts, held)
        except AssertionError as error:
            self.refute(str(error))
        if held and name != "__ne__" and is_number(other):
            self._refute_near(name, ask, subject, other)
        return result

    def _refute_near(self, name: str, ask: Ask, subject: Any, number: Any) -> None:
        """Refute a stand-in if what holds for it also holds for a little, or much, more and less."""
        fields = _fields(subject)
        least = 0 if name == "__eq__" else 2 * abs(number)
        if name != "__eq__" and not fields.get(SIZE):  # -50 < 1, and so are its neighbours
            least = max(least, MUCH[0] - 1)
        twins = [twin for twin in fields.get(TWINS, ()) if twin[0] > least]
        if any(more is less is True for _, more, less in self._alike(ask, twins, (number,))):
            self.refute("woodshed: an object is compared as no number is")

    def _reckoned(self, name: str, ask: Ask, subject: Any, number: Any) -> Any:
        draw = self.hardening.DRAW
        shifts = *draw.sample(range(*LITTLE), FEW), draw.randint(*MUCH)
        changes = [0, *shifts, *(-shift for shift in shifts)]
        draw.shuffle(changes)
        results: dict[int, Any] = {}
        for change in changes:  # which of them is the test's own, nobody is told
            results[change] = (
                self._asked(ask, subject, (number + change,)) if change else ask(subject, number)
            )
        if name in EXACT or (is_number(results[0]) and results[0]):
            self._told_apart(results[0], [(shift, results[shift], results[-shift]) for shift in shifts])
        return results[0]

    def _told_apart(self, result: Any, twins: Twins) -> None:
        """Refuse a result that its twins share; twins of a stand-in are kept with it."""
        if type(result) is bool:
            is_shared = not result and any(more is less is False for _, more, less in twins)
        elif is_number(result) and abs(result) < LARGE:
            is_shared = any(is_number(a) and is_number(b) and a == b == result for _, a, b in twins)
        else:
            is_shared = False
            _fields(result)[TWINS] = twins
        if is_shared:
            self.refute("woodshed: an object's arithmetic does not depend on the numbers")

    def _alike(self, ask: Ask, twins: Twins, arguments: tuple) -> Twins:
        return [(s, *(self._asked(ask, twin, arguments) for twin in pair)) for s, *pair in twins]

    def _asked(self, ask: Ask, subject: Any, arguments: tuple) -> Any:
        """The answer; None where there is none."""
        with self.quietly(), contextlib.suppress(Exception):
            return ask(subject, *arguments)
        return None


def is_number(value: Any) -> bool:
    return type(value) is int or type(value) is float


def _fields(value: Any) -> dict[str, Any]:
    """The namespace of a stand-in; a new one for any other value."""
    return fields_of(value) if isinstance(type(value), RemoteType) else {}
