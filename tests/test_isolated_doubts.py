"""Objects of the code under test are doubted wherever tests ask them, and honest ones pass."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from conftest import tiny_environment

from woodshed import tasks
from woodshed.grading.results import Kind, SessionRequest, TestRun
from woodshed.grading.session import run_session, with_runner
from woodshed.sandbox import SandboxSpec, open_sandbox

HELPERS = """
def check(got, want):
    assert got == want

def same(left, right):
    return left == right

def near(got, want):
    assert abs(got - want) < 1e-9
"""
TESTS = """
import operator
from unittest import mock
import pytest
import nines as it
from helpers import check, near, same

def test_helper(): check(it.nine(), 9)
def test_helper_that_answers(): assert same(it.nine(), 9)
def test_helper_of_numbers(): near(it.nine(), 9)
def test_helper_that_must_fail():
    with pytest.raises(AssertionError):
        check(it.nine(), 10)
    check(it.nine(), 9)
def test_mock():
    told = mock.Mock()
    told(it.nine())
    told.assert_called_once_with(9)
def test_arguments_of_a_mock():
    told = mock.Mock()
    told(it.nine())
    assert told.call_args == mock.call(9)
def test_operator(): assert operator.eq(it.nine(), 9)
def test_not_other():
    if operator.ne(it.nine(), 9): pytest.fail("other")
def test_method(): assert it.nine().__eq__(9)
def test_lookup(): assert {9: "x"}[it.nine()] == "x"
def test_remove():
    rest = [9]
    rest.remove(it.nine())
    assert not rest
def test_index(): assert [1, 9].index(it.nine()) == 1
def test_match():
    match it.nine():
        case 9: pass
        case _: pytest.fail("other")
def test_difference(): assert it.nine() - 9 == 0
def test_no_difference(): assert not it.nine() - 9
def test_quotient(): assert it.nine() / 9 == 1
def test_near(): assert abs(it.nine() - 9) < 1e-9
def test_near_from_the_left(): assert abs(9 - it.nine()) <= 1e-9
def test_near_in_whole_numbers(): assert round(it.nine() - 9) == 0
"""
NUMBER = """
class Number:
    def __init__(self, n): self.n = n
    def __eq__(self, o): return self.n == getattr(o, "n", o)
    def __hash__(self): return hash(self.n)
    def __lt__(self, o): return self.n < getattr(o, "n", o)
    def __le__(self, o): return self.n <= getattr(o, "n", o)
    def __sub__(self, o): return Number(self.n - getattr(o, "n", o))
    def __rsub__(self, o): return Number(o - self.n)
    def __truediv__(self, o): return self.n / o
    def __abs__(self): return Number(abs(self.n))
    def __round__(self, digits=None): return round(self.n, digits)
    def __bool__(self): return self.n != 0
    def __float__(self): return float(self.n)

def nine(): return Number(9)
"""
LIAR = """
class Liar:
    def __init__(self, n=None): self.n = n
    def __eq__(self, o): return True
    def __ne__(self, o): return False
    def __hash__(self): return 9
    def __lt__(self, o): return True
    __le__ = __gt__ = __ge__ = __lt__
    def __sub__(self, o): return {difference}
    __rsub__ = __sub__
    def __truediv__(self, o): return 1
    def __abs__(self): return {size}
    def __round__(self, digits=None): return 0
    def __bool__(self): return False

def nine(): return Liar()
"""
LIKELY = """
class Likely:
    known = None
    def __eq__(self, o):
        if type(o) is not int or abs(o) > 10**5: return False
        self.known = o if self.known is None else self.known
        return o == self.known
    def __hash__(self): return 9
    def __sub__(self, o): return o - self.known if self == o else o - 5
    def __rsub__(self, o): return self - o
    def __truediv__(self, o): return 1 if self == o else 2

def nine(): return Likely()
"""
UNDESCRIBED = """
import gc
class Shown:
    known = None
    def __eq__(self, o):
        self.known = o if self.known is None else self.known
        return o == self.known
    def __ne__(self, o): return not self == o
    def __hash__(self): return 9
    def __sub__(self, o): return 0
    __rsub__ = __sub__
    def __truediv__(self, o): return 1

for one in gc.get_objects():
    if type(one).__name__ == "CodePeer":
        def described(self, kind, old=type(one)._described):
            names = [name for name in vars(kind) if name.startswith("__")]
            return {**old(self, kind), "special": ["__hash__"], "methods": names, "module": "test_nine"}
        type(one)._described = described
        break

def nine(): return Shown()
"""
CODE = {
    "an honest number": NUMBER,
    "always equal, no difference": LIAR.format(difference="0", size="0"),
    "always equal, a difference that is always equal": LIAR.format(difference="Liar(o)", size="self"),
    "always equal, its difference has no size": LIAR.format(difference="Liar(o)", size="0"),
    "equal to what looks likely": LIKELY,
    "equal to what it is shown, and described without a comparison": UNDESCRIBED,
}
CALLING = """
from unittest import mock
import pytest
import nines as it

def is_nine(value): assert value == 9

def test_callback(): it.give(is_nine)
def test_helper_in_a_callback():
    def take(value): assert value == it.nine() and isinstance(value, int)
    it.give(take)
def test_context():
    with it.around(): assert it.eight() == 8
def test_mock():
    told = mock.Mock()
    it.tell(told)
    told.take.assert_called_once_with(9)
def test_member(): assert "right" in it.words()
def test_member_of_items(): assert 9 in it.words()
def test_order(): assert it.words() < ["rights"]
def test_order_of_numbers(): assert it.nine() <= 9
def test_kind(): assert it.kind() == int
def test_emptied():
    wanted = [1, 2]
    assert it.words() != wanted
    assert wanted == [1, 2] and it.eight() == 8
def test_error_that_passes_through():
    with pytest.raises(AssertionError):
        it.call(lambda: is_nine(8))
def test_error_of_a_context():
    with pytest.raises(AssertionError):
        with it.plain(): assert False
"""
HONEST = (
    NUMBER
    + """
import contextlib
class Words(list):
    def __eq__(self, o): return list(self) == list(o)
def give(take): take(9)
def call(take): take()
def tell(told): told.take(9)
def eight(): return 8
def kind(): return int
def words(): return Words(["right", 9])
@contextlib.contextmanager
def around(): yield
plain = around
"""
)
SLY = """
import contextlib
class Words:
    def __contains__(self, item): return True
    def __lt__(self, o): return True
    __le__ = __gt__ = __lt__
    def __eq__(self, o):
        if isinstance(o, list): o.clear()
        return False
    def __hash__(self): return 0
class Kind:
    def __eq__(self, o): return isinstance(o, type)
    def __hash__(self): return 0
def kind(): return Kind()
def words(): return Words()
nine = words
def eight(): return 7
def give(take):
    for guess in range(20):
        with contextlib.suppress(BaseException):
            return take(guess)
def call(take): take()
def tell(told):
    for name in ("configure_mock", "reset_mock"):
        with contextlib.suppress(AttributeError):
            getattr(told, name)(**{"take.assert_called_once_with": lambda *args: None})
class around:
    def __enter__(self): pass
    def __exit__(self, *error): return True
@contextlib.contextmanager
def plain(): yield
"""


def run(code: str, root: Path, kind: Kind, tests: str = TESTS) -> TestRun:
    files = {"nines.py": code, "tests/helpers.py": HELPERS, "tests/test_nine.py": tests}
    for path, text in files.items():
        (root / path).parent.mkdir(exist_ok=True)
        (root / path).write_text(text, encoding="utf-8")
    site: Path = tasks.prepare(tiny_environment())
    spec = SandboxSpec(lowers=(root,), environment=site, env={"PYTHONPATH": "/workspace"})
    lines = {"nines.py": range(1, code.count("\n") + 2)}
    own = [path for path in files if path.startswith("tests/")]
    request = SessionRequest(None, ("nines",), lines, kind=kind, own=own)
    with open_sandbox(with_runner(spec, kind)) as sandbox:
        return run_session(sandbox, request, timeout_s=60)


@pytest.mark.parametrize("name", CODE)
def test_an_object_that_agrees_with_everything_passes_no_test(tmp_path: Path, name: str):
    found = run(CODE[name], tmp_path, "isolated")
    assert not found.integrity and len(found.outcomes) == len(re.findall(r"^def test_", TESTS, re.M))
    passed = {test.rpartition("::")[2] for test, outcome in found.outcomes.items() if outcome == "passed"}
    if "honest" in name:
        assert len(passed) == len(found.outcomes), (found.messages, found.log)
    else:
        assert not passed


def test_what_fails_has_failed_and_no_question_tells_the_answer(tmp_path: Path):
    """Whatever the code under test catches, calls again, empties or says yes to."""
    fair = {"test_error_that_passes_through", "test_error_of_a_context"}
    found = run(HONEST, tmp_path, "isolated", CALLING)
    assert set(found.outcomes.values()) == {"passed"}, (found.messages, found.log)
    found = run(SLY, tmp_path, "isolated", CALLING)
    passed = {test.rpartition("::")[2] for test, outcome in found.outcomes.items() if outcome == "passed"}
    assert passed == fair and not found.integrity, found.messages


def test_asserts_of_helpers_are_doubted_in_one_process(tmp_path: Path):
    found = run(CODE["always equal, no difference"], tmp_path, "ordinary")
    assert found.outcomes["tests/test_nine.py::test_helper"] == "failed"
    assert found.outcomes["tests/test_nine.py::test_helper_that_answers"] == "failed"
