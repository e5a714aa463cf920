"""Parsing from many threads."""

from __future__ import annotations

import ast
import gc
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from woodshed import syntax

SHALLOW = "a = 1\n" * 50
DEEP = "\n".join(f"x{n} = {'(' * 20}{n}{' + 1)' * 20}" for n in range(50))


@pytest.fixture
def yielding_collector() -> Iterator[None]:
    """The garbage collector runs all the time, and lets other threads go on meanwhile."""

    def let_others(phase: str, info: dict[str, int]) -> None:
        time.sleep(0)

    before = gc.get_threshold()
    gc.callbacks.append(let_others)
    gc.set_threshold(20)
    yield
    gc.set_threshold(*before)
    gc.callbacks.remove(let_others)


def broken(parse: Callable[[str], object], rounds: int) -> int:
    """How many of the parses of several threads end in a SystemError."""

    def attempt(number: int) -> bool:
        try:
            parse(DEEP if number % 2 else SHALLOW)
        except SystemError:
            return True
        return False

    with ThreadPoolExecutor(4) as pool:
        return sum(pool.map(attempt, range(rounds)))


def test_threads_do_not_break_each_others_parses(yielding_collector):
    assert broken(syntax.parse, 600) == 0


def test_a_tree_a_value_and_an_error_are_those_of_ast():
    assert ast.dump(syntax.parse(DEEP)) == ast.dump(ast.parse(DEEP))
    assert syntax.literal(" {'a': (1, -2.5)}") == {"a": (1, -2.5)}
    for bad in ("f(1)", "1 +"):
        with pytest.raises((ValueError, SyntaxError)):
            syntax.literal(bad)
    with pytest.raises(SyntaxError):
        syntax.parse("def")
