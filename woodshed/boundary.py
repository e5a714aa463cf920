"""The boundary around code that reads what a policy wrote.

A policy writes whatever it likes, and after enough steps it has written what nobody thought of. Code that only looks at
it (a monitor, a detector, the reader of a patch) must not end a run of days. So each such look is `contained`: whatever
goes wrong is put into words, and the caller turns the words into a fault of that one attempt that never helps it.

Every Exception is caught, because a list of those that odd input can cause is never complete: besides RecursionError,
MemoryError, OSError and ValueError it is the AttributeError of a rule that met a syntax tree it did not know. Errors of
ours with advice in them (`WoodshedError`: a server that failed, a lost sandbox) go on their way, as do interrupts.
Tests set `strict`, so that they see the error itself instead of a well-contained bug.
"""

from __future__ import annotations

import traceback
from collections.abc import Callable
from typing import TypeVar

from woodshed.records import WoodshedError

T = TypeVar("T")

strict = False
"""Raise what is caught elsewhere: for tests."""


def contained(look: Callable[[], T], broken: Callable[[str], T]) -> T:
    """Return the result of `look`, or `broken` applied to a description of the error."""
    try:
        return look()
    except WoodshedError:
        raise
    except Exception as error:
        if strict:
            raise
        return broken(described(error))


def described(error: Exception) -> str:
    """An error in one short line: its kind, the function that raised it, and what it says."""
    frames = traceback.extract_tb(error.__traceback__)
    place = f" in {frames[-1].name}" if frames else ""
    said = " ".join(str(error).split())[:120].encode("utf-8", "backslashreplace").decode()
    return f"{type(error).__name__}{place}: {said}"
