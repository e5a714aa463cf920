"""Parsing Python in one thread at a time.

Python 3.11 counts how deep the tree is that it builds in one place for all threads (cpython issue 106905): where the
garbage collector lets another thread parse in between, the first one's parse ends in a SystemError, once in some
thousand. Every parse of a process that works in threads goes through here.
"""

from __future__ import annotations

import ast
import threading
from typing import Any

_ALONE = threading.RLock()


def parse(source: str | bytes, mode: str = "exec") -> Any:
    """The tree of some source, as `ast.parse` gives it and with its errors."""
    with _ALONE:
        return ast.parse(source, mode=mode)


def literal(source: str) -> Any:
    """The value of a Python literal, as `ast.literal_eval` gives it and with its errors."""
    return ast.literal_eval(parse(source.lstrip(" \t"), mode="eval"))
