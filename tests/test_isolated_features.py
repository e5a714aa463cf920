"""A suite of a made-up package that runs with the package in another process: what works there, and what is refused."""

from __future__ import annotations

from pathlib import Path

import pytest
from conftest import tiny_environment

from woodshed import tasks
from woodshed.grading.results import SessionRequest, TestRun
from woodshed.grading.session import run_session, with_runner
from woodshed.sandbox import SandboxSpec, open_sandbox

PACKAGE = '''
"""Things of every kind."""
import asyncio, collections, contextlib, enum, logging, os, sys, time, warnings
from dataclasses import dataclass
from functools import wraps

LIMIT = 3
log = logging.getLogger("zoo")

class ZooError(ValueError):
    def __str__(self):
        return f"zoo: {self.args[0]}"

class Base:
    kind = "base"
    def __init__(self, size=1):
        self.size = size
    def grow(self):
        return self.size + self.extra()
    def extra(self):
        return 1
    def __getitem__(self, key):
        return key * self.size
    @property
    def double(self):
        return 2 * self.size
    @classmethod
    def big(cls):
        return cls(10)

class Bag(dict):
    """A dictionary that counts."""
    def add(self, key):
        self[key] = self.get(key, 0) + 1

class Name(str):
    def shout(self):
        return self.upper() + "!"

Point = collections.namedtuple("Point", "x y")
Colour = enum.Enum("Colour", "RED GREEN")

@dataclass
class Pair:
    left: int
    right: int = 2

def greet(name, *, polite=True):
    """Say hello."""
    print("hello", name)
    print("hm", file=sys.stderr)
    log.warning("greeted %s", name)
    return "Dear " + name if polite else name

def old():
    warnings.warn("too old", DeprecationWarning, stacklevel=2)

def limit():
    return LIMIT

def fail(cause=None):
    raise ZooError("no") from cause

def here():
    return os.getcwd(), os.environ.get("ZOO"), list(sys.argv)

def ask():
    return input("name? ") + sys.stdin.readline()

def each(items, act):
    for item in items:
        yield act(item)

def fill(items, table):
    items.append(len(items))
    table["n"] = len(items)
    return items

def counted(function):
    @wraps(function)
    def inner(*args, **kwargs):
        inner.calls += 1
        return function(*args, **kwargs)
    inner.calls = 0
    return inner

@contextlib.contextmanager
def held():
    try:
        yield 5
    finally:
        print("out")

async def later(value):
    await asyncio.sleep(0)
    return value + 1

def read(stream):
    return stream.read()

def wait(seconds):
    time.sleep(seconds)
'''
TESTS = '''
import collections, copy, enum, inspect, io, logging, pickle, sys, unittest, warnings
from unittest import mock
import pytest
import zoo
from zoo import Bag, Base, Colour, Name, Pair, Point, ZooError

def test_values_and_arguments_that_change():
    items, table = [1], {}
    assert zoo.fill(items, table) is items
    assert (items, table) == ([1, 1], {"n": 2})

def test_callbacks_and_generators():
    assert list(zoo.each(iter([1, 2]), lambda n: n * 2)) == [2, 4]
    found = []
    list(zoo.each("ab", found.append))
    assert found == ["a", "b"]

def test_attributes():
    base = Base(3)
    base.size += 1
    assert (base.size, base.double, base["ab"], Base.kind) == (4, 8, "abababab", "base")
    assert isinstance(Base.big(), Base) and not isinstance(3, Base) and issubclass(Base, object)

def test_subclass_whose_methods_are_called_from_there():
    class Mine(Base):
        """Mine."""
        def __init__(self):
            super().__init__(size=5)
            self.seen = []
        def extra(self):
            self.seen.append("extra")
            return super().extra() + 10
        def __getitem__(self, key):
            return "<" + super().__getitem__(key) + ">"
        @classmethod
        def make(cls):
            return cls()
    mine = Mine.make()
    assert (mine.grow(), mine["a"], mine.double) == (16, "<aaaaa>", 10)
    assert isinstance(mine, Mine) and isinstance(mine, Base) and type(mine) is Mine

def test_errors():
    with pytest.raises(ZooError, match="zoo: no") as raised:
        zoo.fail(KeyError("why"))
    assert isinstance(raised.value, ValueError) and raised.value.args == ("no",)
    assert isinstance(raised.value.__cause__, KeyError)
    class Own(ZooError):
        pass
    def act(item):
        raise Own(item)
    with pytest.raises(Own):
        list(zoo.each([1], act))

def test_warnings():
    with pytest.warns(DeprecationWarning, match="too old"):
        zoo.old()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(DeprecationWarning):
            zoo.old()

def test_output_and_logs(capsys, caplog):
    assert zoo.greet("you") == "Dear you"
    assert capsys.readouterr() == ("hello you\\n", "hm\\n")
    assert [(r.name, r.levelno, r.getMessage()) for r in caplog.records] == [("zoo", logging.WARNING, "greeted you")]

def test_signature_and_names():
    assert str(inspect.signature(zoo.greet)) == "(name, *, polite=True)"
    assert (zoo.greet.__name__, zoo.greet.__doc__, Base.__name__) == ("greet", "Say hello.", "Base")
    assert inspect.isfunction(zoo.greet) and callable(zoo.greet) and inspect.isclass(Base)

def test_decorated():
    @zoo.counted
    def mine(a, b=2):
        """Mine."""
        return a + b
    assert (mine(1), mine(1, b=5), mine.calls) == (3, 6, 2)
    assert (mine.__name__, mine.__doc__) == ("mine", "Mine.")

def test_surroundings(monkeypatch, tmp_path):
    monkeypatch.setenv("ZOO", "open")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["zoo", "x"])
    assert zoo.here() == (str(tmp_path), "open", ["zoo", "x"])
    monkeypatch.setattr("builtins.input", lambda prompt: "me")
    monkeypatch.setattr(sys, "stdin", io.StringIO("line\\n"))
    assert zoo.ask() == "meline\\n"

def test_patched(monkeypatch):
    monkeypatch.setattr(zoo, "LIMIT", 7)
    assert zoo.limit() == 7
    monkeypatch.undo()
    assert zoo.limit() == 3
    with mock.patch("zoo.Base.extra", return_value=5) as extra:
        assert Base().grow() == 6
    extra.assert_called_once()
    assert Base().grow() == 2
    with monkeypatch.context() as patches:
        patches.setattr(Base, "extra", lambda self: 40)
        patches.setattr("zoo.Base.kind", "other")
        assert (Base().grow(), Base.kind) == (41, "other")
    assert (Base().grow(), Base.kind) == (2, "base")

def test_containers_and_values_with_methods():
    bag = Bag(a=1)
    bag.add("a")
    assert bag == {"a": 2} and isinstance(bag, dict) and bag["a"] == 2 and list(bag.items()) == [("a", 2)]
    assert bag != {"a": 3} and not bag == {}
    name = Name("joe")
    assert name == "joe" and isinstance(name, str) and name.shout() == "JOE!" and f"{name}?" == "joe?"
    point = Point(1, y=2)
    assert point == (1, 2) and point.y == 2 and point._replace(x=5) == (5, 2) and isinstance(point, tuple)
    assert Colour.RED is Colour.RED and Colour["RED"].name == "RED" and len(Colour) == 2
    assert [colour.name for colour in Colour] == ["RED", "GREEN"] and Colour(1) == Colour.RED
    assert Pair(1) == Pair(1, 2) and Pair(1) != Pair(2) and repr(Pair(1)) == "Pair(left=1, right=2)"

def test_copies():
    base = Base(4)
    for other in (copy.copy(base), copy.deepcopy(base), pickle.loads(pickle.dumps(base))):
        assert other is not base and other.size == 4 and isinstance(other, Base)

def test_contexts(capsys):
    with pytest.raises(KeyError), zoo.held() as value:
        assert value == 5
        raise KeyError(value)
    assert capsys.readouterr().out == "out\\n"

def test_awaited():
    import asyncio
    async def twice():
        return await zoo.later(1) + await zoo.later(2)
    assert asyncio.run(twice()) == 5

def test_streams():
    assert zoo.read(io.StringIO("text")) == "text"
    assert zoo.read(io.BytesIO(b"bytes")) == b"bytes"

class TestOld(unittest.TestCase):
    def test_equal(self):
        self.assertEqual(zoo.limit(), 3)
        with self.assertRaises(ZooError):
            zoo.fail()

def test_refused_evaluation():
    assert eval(repr(zoo.limit())) == 3

def test_refused_patch_of_the_library(monkeypatch):
    monkeypatch.setattr("time.sleep", lambda seconds: None)
    import time
    began = time.monotonic()
    zoo.wait(0.2)
    assert time.monotonic() - began < 0.1

def test_refused_fixture(monkeypatch):
    zoo.fill([], {"it": monkeypatch})
'''
PARK = {
    "park/__init__.py": "from park.walk import walk\n",
    "park/walk.py": "def walk(): return 5\n",
    "tests/test_park.py": """
import park.walk
from park import walk

def test_a_function_is_not_hidden_by_the_module_of_its_name():
    assert walk() == park.walk() == 5
""",
}


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> TestRun:
    root = tmp_path_factory.mktemp("zoo")
    for path, text in {"zoo.py": PACKAGE, "tests/test_zoo.py": TESTS, **PARK}.items():
        (root / path).parent.mkdir(exist_ok=True)
        (root / path).write_text(text, encoding="utf-8")
    site: Path = tasks.prepare(tiny_environment())
    spec = SandboxSpec(lowers=(root,), environment=site, env={"PYTHONPATH": "/workspace"})
    request = SessionRequest(
        None, ("zoo", "park"), kind="isolated", own=("tests/test_zoo.py", "tests/test_park.py")
    )
    with open_sandbox(with_runner(spec, "isolated")) as sandbox:
        return run_session(sandbox, request, timeout_s=60)


def test_what_tests_do_works_with_the_code_in_another_process(run: TestRun):
    wrong = {
        test: run.messages.get(test)
        for test, o in run.outcomes.items()
        if o != "passed" and "refused" not in test
    }
    assert not wrong and len(run.outcomes) == 21, (wrong, run.log[-3000:])
    assert not run.integrity


def test_what_would_run_their_text_or_touch_the_library_is_not_isolated(run: TestRun):
    refused = {test for test in run.outcomes if "refused" in test}
    assert len(refused) == 3 and {run.outcomes[test] for test in refused} == {"failed"}
