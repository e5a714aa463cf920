"""Tests in one process, the code under test in another: what works over the line, and what it does not reach."""

from __future__ import annotations

import functools
import json
import os
import random
import socket
import subprocess
import sys
import textwrap
import threading
import time
import unittest
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from woodshed.grading.process_isolation import confinement, imports, values
from woodshed.grading.process_isolation.line import MOST_BYTES, LineError, MessageLine, is_message
from woodshed.grading.process_isolation.tests_side import TestsPeer

HERE = str(Path(__file__).parent)


class Ends:
    """The tests' side, and the bare socket of a process that says whatever it likes."""

    def __init__(self) -> None:
        ours, self.theirs = socket.socketpair()
        self.theirs.settimeout(10)
        self.peer = TestsPeer(MessageLine(ours), HERE)

    def close(self) -> None:
        for end in (self.theirs, self.peer.line.file, self.peer.line.end):
            end.close()

    def say(self, message: Any) -> None:
        data = json.dumps(message).encode()
        self.theirs.sendall(len(data).to_bytes(4, "little") + data)

    def hear(self) -> list:
        size = int.from_bytes(self.theirs.recv(4), "little")
        data = b""
        while len(data) < size:
            data += self.theirs.recv(size - len(data))
        return json.loads(data)

    def answered(self, *says: Any, lends: tuple = ()) -> list[list]:
        """What the tests' side answers to these messages while it waits for the answer to a question of its own."""
        heard: list[list] = []

        def other() -> None:
            self.hear()
            for message in says:
                self.say(message)
                heard.append(self.hear())
            self.say(["answer", [None, []], {}])

        thread = threading.Thread(target=other, daemon=True)
        thread.start()
        self.peer.ask("call", *lends)
        thread.join(10)
        return heard


@pytest.fixture
def ends() -> Iterator[Ends]:
    made = Ends()
    yield made
    made.close()


SECRET = "the right answer"


def test_lent() -> None:
    """Its globals hold what the hidden tests expect."""


class Plain:
    """A class of a test file."""

    limit = 3

    def __init__(self) -> None:
        self.value = 1

    def check(self) -> str:
        return SECRET


class Holds:
    def __init__(self, **fields: Any) -> None:
        self.__dict__.update(fields)


REACHES: dict[str, tuple[Any, list]] = {
    "globals of a function": (test_lent, ["get", [["yours", 1], "__globals__"], {}]),
    "code of a function": (test_lent, ["get", [["yours", 1], "__code__"], {}]),
    "closure of a function": (test_lent, ["get", [["yours", 1], "__closure__"], {}]),
    "builtins of a function": (test_lent, ["get", [["yours", 1], "__builtins__"], {}]),
    "globals by a dotted name": (test_lent, ["get", [["yours", 1], "x.__globals__"], {}]),
    "a name that is no text": (test_lent, ["get", [["yours", 1], ["tuple", ["__globals__"]]], {}]),
    "getattribute as a special method": (
        test_lent,
        ["special", [["yours", 1], "__getattribute__", ["tuple", ["__globals__"]]], {}],
    ),
    "reduce as a special method": (
        test_lent,
        ["special", [["yours", 1], "__reduce_ex__", ["tuple", [4]]], {}],
    ),
    "format of a value": (test_lent, ["get", ["{0.__globals__}", "format"], {}]),
    "call of a value": (
        test_lent,
        ["call", [["name", "builtins", "len"], ["tuple", ["x"]], ["dict", []]], {}],
    ),
    "exec by name": (
        test_lent,
        ["call", [["yours", 1], ["tuple", [["name", "builtins", "exec"]]], ["dict", []]], {}],
    ),
    "attrgetter by name": (
        test_lent,
        ["call", [["yours", 1], ["tuple", [["name", "operator", "attrgetter"]]], ["dict", []]], {}],
    ),
    "a type of pytest by name": (
        test_lent,
        ["call", [["yours", 1], ["tuple", [["name", "_pytest.outcomes", "Skipped"]]], ["dict", []]], {}],
    ),
    "popen by name": (
        test_lent,
        ["call", [["yours", 1], ["tuple", [["name", "subprocess", "Popen"]]], ["dict", []]], {}],
    ),
    "a type of unittest by name": (
        test_lent,
        ["call", [["yours", 1], ["tuple", [["name", "unittest.case", "SkipTest"]]], ["dict", []]], {}],
    ),
    "a new method": (Plain(), ["set", [["yours", 1], "check", ["name", "builtins", "len"]], {}]),
    "an attribute of a class": (Plain, ["set", [["yours", 1], "limit", 4], {}]),
    "globals of a method": (Plain().check, ["get", [["yours", 1], "__func__"], {}]),
    "self of a method": (Plain().check, ["get", [["yours", 1], "__self__"], {}]),
    "init of a class": (Plain, ["get", [["yours", 1], "__init__"], {}]),
    "subclasses of a class": (Plain, ["get", [["yours", 1], "__subclasses__"], {}]),
    "a module that an object holds": (Holds(sys=sys), ["get", [["yours", 1], "sys"], {}]),
    "a frame that an object holds": (Holds(frame=sys._getframe()), ["get", [["yours", 1], "frame"], {}]),
    "pytest's object that an object holds": (
        Holds(raises=pytest.raises),
        ["get", [["yours", 1], "raises"], {}],
    ),
    "the namespace of such an object": (Holds(raises=pytest.raises), ["get", [["yours", 1], "__dict__"], {}]),
    "frame of a generator": ((i for i in range(3)), ["get", [["yours", 1], "gi_frame"], {}]),
    "what the tests' side asks": (test_lent, ["import", ["os"], {}]),
    "an unknown verb": (test_lent, ["eval", ["1 + 1"], {}]),
    "private methods": (test_lent, ["_number", [["yours", 1]], {}]),
    "deletion": (Plain(), ["delete", [["yours", 1], "value"], {}]),
    "an object that was not lent": (test_lent, ["get", [["yours", 99], "__name__"], {}]),
    "a made value of another type": (
        test_lent,
        ["call", [["yours", 1], ["tuple", [["made", "os.system", ["true"]]]], ["dict", []]], {}],
    ),
    "output to another stream": (test_lent, ["write", ["__class__", "x"], {}]),
    "output of what is no text": (test_lent, ["input", [["environment"]], {}]),
    "another method of the input": (test_lent, ["read", ["__class__", 1], {}]),
}


@pytest.mark.parametrize("reach", REACHES)
def test_what_the_other_side_may_not_reach_is_an_error_there(ends: Ends, reach: str):
    thing, message = REACHES[reach]
    ends.peer.numbers[id(thing)], ends.peer.lent[1], ends.peer.count = 1, thing, 1
    (answer,) = ends.answered(message)
    assert answer[0] == "raise", answer
    assert SECRET not in json.dumps(answer)
    assert Plain.limit == 3


NOT_LENT = {
    "a module": sys,
    "a frame": sys._getframe(),
    "code": test_lent.__code__,
    "what checks for an exception": pytest.raises(ValueError),
    "an approximation": pytest.approx(1),
    "a test case": unittest.TestCase("run"),
    "a test case's own method": unittest.TestCase("run").fail,
    "a function of the library that has no name": functools.wraps(os.system)(lambda: None).__wrapped__,
    "a process": subprocess.Popen,
}


@pytest.mark.parametrize("what", NOT_LENT)
def test_what_belongs_to_the_interpreter_or_to_pytest_is_not_lent(ends: Ends, what: str):
    assert not ends.peer.may_lend(NOT_LENT[what])


def test_fixtures_are_not_lent(
    ends: Ends,
    request: pytest.FixtureRequest,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture,
    tmp_path_factory: pytest.TempPathFactory,
):
    for fixture in (
        request,
        monkeypatch,
        capsys,
        tmp_path_factory,
        request.config,
        request.config.hook,
        sys.stdout,
    ):
        assert not ends.peer.may_lend(fixture), fixture


def test_public_attributes_and_calls_of_what_tests_lend_work(ends: Ends):
    thing = Plain()
    ends.peer.numbers[id(thing)], ends.peer.lent[1], ends.peer.count = 1, thing, 1
    value, changed = ends.answered(
        ["get", [["yours", 1], "value"], {}], ["set", [["yours", 1], "value", ["list", [1, 2]]], {}]
    )
    assert value[:2] == ["answer", [1, []]] and changed[0] == "answer"
    assert thing.value == [1, 2]


BAD_MESSAGES = [
    [],
    {},
    ["answer"],
    ["answer", 1, {}],
    ["answer", [1, []], []],
    ["answer", [["object", 1, ["type", 5]], []], {}],
    ["answer", [["type", 7, {"name": 3, "bases": [["type", 7]]}], []], {}],
    ["answer", [["nothing"], []], {}],
    ["answer", [["_lend", 1], []], {}],
    ["answer", [["object", 1, ["name", "builtins", "int"]], []], {}],
    ["answer", [["error", 1, ["name", "builtins", "int"], [], None, ["dict", []], []], []], {}],
    ["answer", [["given", 3], []], {}],
    ["answer", [None, [[0, ["list", []]]]], {}],
    ["answer", [["int", "z"], []], {}],
    ["answer", [["made", "re.Pattern", ["(", 0]], []], {}],
    ["answer", [None, []], {"dropped": [[5, 1]]}],
    ["raise", [1], {}],
    ["raise", [], {}],
]


@pytest.mark.parametrize("message", BAD_MESSAGES, ids=lambda message: json.dumps(message)[:40])
def test_what_is_no_answer_is_an_error_of_the_test(ends: Ends, message: Any):
    ends.say(message)
    with pytest.raises(Exception):  # noqa: B017  # whichever: the test that asked fails by it
        ends.peer.ask("call")


def test_messages_are_bounded(ends: Ends):
    deep: Any = 1
    for _ in range(200):
        deep = [deep]
    assert not is_message(["answer", deep, {}])
    assert is_message(["answer", [["list", [["list", []]]]], {}])
    ends.theirs.sendall((MOST_BYTES + 1).to_bytes(4, "little"))
    with pytest.raises(LineError):
        ends.peer.ask("call")
    with pytest.raises(LineError):  # and stays an error
        ends.peer.ask("call")


def fuzz(seconds: float, seed: int) -> int:
    """Random messages, near valid ones: whatever is said, the tests' side answers or raises an ordinary exception."""
    rng, count, until = random.Random(seed), 0, time.monotonic() + seconds
    words = [*("get set call special import yours name type object error made list tuple dict set int float bytes"
               " given member module environment answer raise warn log write read input copy deepcopy".split()),
             "builtins", "exec", "__globals__", "__call__", "name", "bases", "special", "os", "dropped"]  # fmt: skip

    def value(depth: int) -> Any:
        kind = rng.randrange(8)
        if kind < 3 or depth > 5:
            return rng.choice([None, True, 1, -1, 99, "", "x", rng.choice(words), 10**30])
        if kind == 3:
            return {rng.choice(words): value(depth + 1) for _ in range(rng.randrange(3))}
        return [rng.choice(words), *(value(depth + 1) for _ in range(rng.randrange(4)))]

    while time.monotonic() < until:
        ends = Ends()
        thing = Plain()
        ends.peer.numbers[id(thing)], ends.peer.lent[1], ends.peer.count = 1, thing, 1
        for _ in range(20):
            verb = rng.choice(words)
            ends.say([verb, [value(0) for _ in range(rng.randrange(4))], {}])
            count += 1
        ends.say(["answer", [None, []], {}])
        try:
            ends.peer.ask("call")
        except Exception as error:
            assert SECRET not in repr(error)
        ends.theirs.setblocking(False)
        with pytest.raises(OSError):
            data = b""
            while part := ends.theirs.recv(1 << 16):
                data += part
                assert SECRET.encode() not in data
        ends.close()
    return count


def test_no_message_harms_the_tests_side():
    assert fuzz(1.0, 0) > 100


def test_names_are_believed_only_from_the_table():
    for module, name in [
        *(
            ("builtins", name)
            for name in ("exec", "eval", "compile", "open", "__import__", "getattr", "breakpoint")
        ),
        *(
            ("operator", "attrgetter"),
            ("operator", "methodcaller"),
            ("functools", "reduce"),
            ("os", "system"),
        ),
        *(("_pytest.outcomes", "Exit"), ("pytest", "skip"), ("unittest.case", "SkipTest"), ("sys", "exit")),
        *(
            ("types", "FunctionType"),
            ("types", "CodeType"),
            ("pickle", "loads"),
            ("builtins", "len.__class__"),
        ),
    ]:
        with pytest.raises(LookupError):
            values.believed(module, name)
    assert values.believed("builtins", "len") is len
    assert values.believed("json.decoder", "JSONDecodeError") is json.JSONDecodeError


def test_only_files_that_were_there_are_imported(tmp_path: Path):
    """A program of its own: guards are for the rest of a process."""
    (tmp_path / "own.py").write_text("VALUE = 1\n")
    program = f"""
    import pickle, sys
    from woodshed.grading.process_isolation import imports
    place = {str(tmp_path)!r}
    import importlib.util, pathlib, py_compile
    import _pytest.assertion.rewrite as rewriting
    beside = importlib.util.cache_from_source(place + "/own.py")
    unchecked = py_compile.PycInvalidationMode.UNCHECKED_HASH
    py_compile.compile(place + "/own.py", beside, invalidation_mode=unchecked)
    imports.guard(place, {{"own.py": b"VALUE = 2\\n"}})
    sys.path.insert(0, place)
    assert rewriting._read_pyc(pathlib.Path(place, "own.py"), pathlib.Path(beside)) is None
    import own
    assert own.VALUE == 2  # the text that was there
    open(place + "/colorsys.py", "w").write("raise SystemExit('planted')")
    open(place + "/planted.py", "w").write("raise SystemExit('planted')")
    import colorsys  # of the standard library, from bytecode if it has some
    assert colorsys.__cached__.startswith(sys.base_prefix)
    for name in ("planted", "sub.planted"):
        try:
            __import__(name)
        except ImportError:
            continue
        raise SystemExit(name)
    hostile = b"cposix\\nsystem\\n(S'true'\\ntR."
    for load in (pickle.loads, lambda data: pickle.Unpickler(__import__("io").BytesIO(data)).load()):
        try:
            load(hostile)
        except pickle.UnpicklingError:
            continue
        raise SystemExit("unpickled")
    assert pickle.loads(pickle.dumps([1, {{2: (3.5, None)}}])) == [1, {{2: (3.5, None)}}]
    import runpy
    spec = importlib.util.spec_from_file_location("planted", place + "/planted.py")
    for run in (lambda: spec.loader.exec_module(importlib.util.module_from_spec(spec)), lambda: runpy.run_path(
        place + "/planted.py")):
        try:
            run()
        except (ImportError, RuntimeError):
            continue
        raise SystemExit("named to a loader")
    print("held")
    """
    done = subprocess.run(
        [sys.executable, "-B", "-c", textwrap.dedent(program)], capture_output=True, text=True, timeout=60
    )
    assert done.stdout == "held\n", done


def test_text_is_not_evaluated_for_test_files():
    guarded = imports._guarded("eval", eval, HERE)
    with pytest.raises(RuntimeError, match="do not eval text"):
        guarded("1 + 1")
    assert imports._guarded("eval", eval, "/elsewhere")("1 + len('ab')") == 3


def test_the_filter_takes_calls_that_reach_other_processes():
    """In a process of its own, which tries them on this one's child."""
    program = """
    import ctypes, errno, fcntl, os, signal, sys
    from woodshed.grading.process_isolation import confinement
    tests = os.getppid()
    confinement.confine(tests)
    libc = ctypes.CDLL(None, use_errno=True)
    def refused(act):
        try:
            act()
        except PermissionError:
            return True
        return False
    assert refused(lambda: os.kill(tests, 0)) and refused(lambda: os.kill(-1, 0))
    assert refused(lambda: os.killpg(os.getpgid(tests), 0))
    assert refused(lambda: os.pidfd_open(os.getpid()))
    assert refused(lambda: fcntl.fcntl(0, 8, tests))
    assert libc.ptrace(16, tests, 0, 0) == -1 and ctypes.get_errno() == errno.EPERM
    import resource
    assert refused(lambda: resource.prlimit(tests, resource.RLIMIT_CPU))
    os.kill(os.getpid(), 0)
    child = os.fork()
    if child == 0:
        signal.pause()
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    resource.getrlimit(resource.RLIMIT_CPU)
    print("held")
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(program)], capture_output=True, text=True, timeout=60
    )
    assert done.stdout == "held\n", done
    assert confinement.MACHINES
