"""Decoys: they contradict what they copy, nothing but the right values tells them apart, and no cheat passes them."""

from __future__ import annotations

import ast
import dataclasses
import json
import random
import shutil
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from woodshed import grading
from woodshed.grading.decoys import decoded, disguise, find, with_twins, without_others
from woodshed.grading.results import SessionRequest, TestRun
from woodshed.grading.session import run_session, with_runner
from woodshed.records import Decoy, Patch, Task, TaskError
from woodshed.sandbox import open_sandbox
from woodshed.synthesis import decoys, stats
from woodshed.tasks import folder
from woodshed.tasks.environment import sandbox_spec

KINDS = {
    "a number": "def test_it():\n    assert f(3) == 9\n",
    "the value on the left": "def test_it():\n    assert [1, 'a'] == f(3)\n",
    "a variable that is only compared": (
        "def test_it():\n    expected = {'a': (1, None)}\n    assert f(3) == expected\n"
    ),
    "a negative number": "def test_it():\n    assert f(3) == -1\n",
    "text beyond ASCII": "def test_it():\n    größe = 'é'; assert f('ü') == 'größe, é'\n",
    "several lines": "def test_it():\n    assert f(\n        3  # why\n    ) == (\n        'a'\n        'b'\n    )\n",
    "a truth": "def test_it():\n    assert f(3)\n",
    "no truth": "def test_it():\n    assert not f(3)\n",
    "membership": "def test_it():\n    assert 3 in f(3)\n",
    "an order": "def test_it():\n    assert f(3) > 2\n",
    "identity": "def test_it():\n    assert f(3) is None\n",
    "a general exception": "def test_it():\n    with raises(LookupError):\n        f(3)\n",
    "an exception": "def test_it():\n    with raises(ValueError):\n        f(3)\n",
    "a method of unittest": (
        "class TestIt(unittest.TestCase):\n    def test_it(self):\n"
        "        self.assertTrue(f(3))\n        self.assertEqual(f(3), 9)\n"
    ),
    "about a number": "def test_it():\n    from pytest import approx\n    assert f(3) == approx(9)\n",
    "near a number": "def test_it():\n    assert abs(f(3) - 9) < 1e-6\n",
    "nearly equal": (
        "class TestIt(unittest.TestCase):\n    def test_it(self):\n        self.assertAlmostEqual(f(3), 9)\n"
    ),
    "what a mock was told": (
        "def test_it():\n    from unittest import mock\n    told = mock.Mock()\n    told(f(3))\n"
        "    told.assert_called_once_with(9)\n    assert told.call_args == mock.call(9)\n"
    ),
    "an object with the value": "def test_it():\n    from fractions import Fraction\n    assert f(3) == Fraction(9)\n",
    "a chain": "def test_it():\n    assert f(3) == f(4) == 9\n",
    "an input beside the value": "def test_it():\n    given = 3\n    assert f(given) == given\n",
    "a total that is counted up": (
        "def test_it():\n    total = 0\n    for i in (1, 2):\n        total += f(i)\n    assert total == 9\n"
    ),
    "a place in the result": "def test_it():\n    result = f(3)\n    assert result[0] == 9\n",
}
ANSWERS: tuple[Callable[[Any], Any], ...] = (
    *(
        lambda x, value=value: value
        for value in (9, 10, [1, "a"], {"a": (1, None)}, -1, 1, "größe, é", "ab", True)
    ),
    *(lambda x, value=value: value for value in (0, None, [3], (9,), [9, 1], "", 4.5)),
    lambda x: x,
    lambda x: {1: 4, 2: 5}.get(x, x),
    lambda x: x + 1,
    lambda x: int("x"),
    lambda x: {}[x],
    lambda x: (_ for _ in ()).throw(TypeError()),
)
"""Many things that code under test may do."""


def passes(text: str, test: str, f: Callable[[Any], Any]) -> bool:
    import unittest

    module: dict[str, Any] = {"f": f, "raises": pytest.raises, "unittest": unittest}
    exec(compile(text, "test_it.py", "exec"), module)
    *holders, name = test.split("::")[1:]
    function = getattr(module[holders[0]](name), name) if holders else module[name]
    try:
        function()
    except (Exception, pytest.fail.Exception):
        return False
    return True


@pytest.mark.parametrize("kind", KINDS)
def test_no_code_passes_a_test_and_its_decoy(kind: str):
    text = KINDS[kind]
    test = "test_it.py::TestIt::test_it" if "class" in text else "test_it.py::test_it"
    for seed in range(5):
        function = find(text, test)
        assert function is not None
        changes = decoys.candidates(text, function, random.Random(seed))
        assert changes, "every one of these can be contradicted"
        if kind in (
            "an object with the value",
            "about a number",
            "near a number",
            "nearly equal",
            "what a mock was told",
        ):
            assert changes[0][2].isdigit(), "another value, not just the opposite"
        for start, end, replacement in changes:
            body = text[function.start : function.end]
            twin = text[: function.start] + body[:start] + replacement + body[end:] + text[function.end :]
            ast.parse(twin)
            both = [f for f in ANSWERS if passes(text, test, f) and passes(twin, test, f)]
            assert not both, twin
    assert any(passes(text, test, f) for f in ANSWERS)


FILE = '''\
import pytest

class TestIt:
    @pytest.mark.parametrize(
        ("given", "expected"),
        [("a", 1), ("b]::", 2)],
    )
    def test_é(self, given, expected):
        assert given and expected  # def test_é

    def helper(self): pass

def test_é():
    """def test_é"""
    assert "ü" != "u"


async def test_last():
    assert True
'''


@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig", "latin-1"])
@pytest.mark.parametrize("line_end", ["\n", "\r\n", "\r"])
def test_a_disguised_file_holds_both_under_names_of_one_form(encoding: str, line_end: str):
    head = "# coding: latin-1\n" if encoding == "latin-1" else ""
    source = (head + FILE).replace("\n", line_end).encode(encoding)
    ids = ["t.py::TestIt::test_é[a-1]", "t.py::TestIt::test_é[b]::-2]", "t.py::test_é", "t.py::test_last"]
    ids += ["t.py::other"]
    given = [
        Decoy("t.py::TestIt::test_é", 0, 0, "", "[a-7]"),
        Decoy("t.py::test_é", 0, 0, ""),
        Decoy("t.py::test_last", 0, 0, ""),
        Decoy("other.py::test_x", 0, 0, ""),
        Decoy("t.py::not_there", 0, 0, ""),
    ]
    session = disguise({"t.py": source}, ids, given, random.Random(1))
    text, _ = decoded(session.sources["t.py"])
    tree = ast.parse(text)
    names = [n.name for n in ast.walk(tree) if isinstance(n, ast.FunctionDef | ast.AsyncFunctionDef)]
    assert len(names) == 7 and len(set(names)) == 7
    new = {test: name.partition("[")[0].rpartition("::")[2] for test, name in session.tests.items()}
    twins = {name.partition("[")[0].rpartition("::")[2] for name in session.decoys}
    assert session.tests["t.py::other"] == "t.py::other"
    assert session.tests["t.py::TestIt::test_é[b]::-2]"].endswith("[b]::-2]")
    assert set(names) == {*(new[test] for test in ids[:4]), *twins, "helper"}
    assert sorted(d.test for d in session.decoys.values()) == sorted(d.test for d in given[:3])
    assert any(name.endswith("[a-7]") for name in session.decoys)


def test_tests_that_other_classes_inherit_keep_their_names():
    source = b"class TestA:\n    def test_x(self): assert 1 == 1\n\nclass TestB(TestA):\n    pass\n"
    decoy = Decoy("t.py::TestA::test_x", 34, 35, "2")
    both = ["t.py::TestA::test_x", "t.py::TestB::test_x"]
    assert disguise({"t.py": source}, both, [decoy], random.Random(0)).ids == tuple(both)
    assert len(disguise({"t.py": source}, both[:1], [decoy], random.Random(0)).decoys) == 1


OTHERS = """\
import pytest, registry

class TestIt:
    @pytest.mark.parametrize("ü", ["a"])
    def test_é(self, ü):
        @registry.known
        def inner(): return ü
        assert inner(), "é"; assert 1  # the end

    def test_called(self): assert self.test_asked
    def test_asked(self): return 1

@pytest.fixture
def test_data():
    return 1

@registry.known
def test_known(): assert 1

async def test_last():
    assert 2

def test_run():
    assert 3
"""


def test_what_does_not_run_is_not_compiled():
    """On the same lines, unless something else in the file may need it."""

    def places(source: bytes) -> dict[str, int]:
        nodes = ast.walk(ast.parse(source))
        return {n.name: n.lineno for n in nodes if isinstance(n, ast.FunctionDef | ast.AsyncFunctionDef)}

    was, now = places(OTHERS.encode()), places(without_others(OTHERS.encode(), frozenset({"test_run"})))
    assert was.keys() - now.keys() == {"inner", "test_é", "test_called", "test_last"}
    assert was.items() >= now.items()
    assert without_others(b"def broken(:", frozenset()) == b"def broken(:"


def test_which_of_a_pair_comes_first_is_drawn():
    orders = set()
    for seed in range(20):
        twin = with_twins(
            b"def test_it():\n    assert f() == 1\n",
            {"t.py::test_it": Decoy("t.py::test_it", 33, 34, "2")},
            random.Random(seed),
        )
        text, names = twin[0].decode(), twin[1]["t.py::test_it"]
        assert text.count("== 1") == text.count("== 2") == 1
        orders.add(text.index(names[0]) < text.index(names[1]))
    assert orders == {True, False}


def test_a_decoy_that_did_not_fail_is_a_fault():
    session = disguise(
        {"t.py": b"def test_it():\n    assert f() == 1\n"},
        ["t.py::test_it"],
        [Decoy("t.py::test_it", 33, 34, "2")],
        random.Random(0),
    )
    (twin,), real = session.decoys, session.tests["t.py::test_it"]
    assert session.faults({real: "passed", twin: "failed"}) == ()
    assert session.faults({real: "failed", twin: "passed"}) == ()  # wrong code
    for outcome in ("passed", "skipped", "error", "missing"):
        assert "1 of 1 copies that must fail did not: t.py::test_it" in session.faults(
            {real: "passed", twin: outcome}
        )
    assert session.outcomes({real: "passed"}) == {"t.py::test_it": "passed"}


@pytest.fixture(scope="module")
def guarded_task(tiny_task: Task, tmp_path_factory: pytest.TempPathFactory) -> Task:
    """The tiny task with the decoys that the product finds for it."""
    gold = folder.gold_patch(tiny_task)
    sources = {
        p: data for p, data in folder.protected_files(tiny_task).items() if p.startswith("tests/test_")
    }

    def run(changed: Mapping[str, bytes], tests: Sequence[str]) -> TestRun:
        spec = sandbox_spec(tiny_task, extra_lowers=(folder.hidden_tests(tiny_task),))
        with open_sandbox(with_runner(spec)) as sandbox:
            for path, text in gold.files.items():
                sandbox.write(path, (text or "").encode())
            request = SessionRequest(tests, tiny_task.environment.packages, sources=changed)
            return run_session(sandbox, request, timeout_s=60)

    found = decoys.search(sources, tiny_task.fail_to_pass, run, "seed")
    home = tmp_path_factory.mktemp("guarded") / "task"
    workspace = shutil.copytree(folder.workspace(tiny_task), home.parent / "workspace")
    return folder.write(
        dataclasses.replace(tiny_task, decoys=found, id=""),
        home,
        workspace=workspace,
        tests=dict(folder.protected_files(tiny_task)),
        gold={path: (text or "").encode() for path, text in gold.files.items()},
    )


def test_every_hidden_test_of_the_tiny_task_has_a_decoy(guarded_task: Task):
    assert {decoy.test for decoy in guarded_task.decoys} == {
        "tests/test_table.py::test_top",
        "tests/test_words.py::test_count",
    }
    assert folder.load(guarded_task.folder) == guarded_task


def test_statistics_say_how_many_tests_have_a_decoy(guarded_task: Task, tiny_task: Task, tmp_path: Path):
    for task, share, guess in ((guarded_task, "100%", "0.25"), (tiny_task, "0%", "1")):
        head, row, *_ = stats.table(stats.summarise([task], tmp_path / "rejections.jsonl"))
        assert (row[head.index("decoys")], row[head.index("guess")]) == (share, guess)


def test_right_answers_are_paid_every_time(guarded_task: Task):
    gold = folder.gold_patch(guarded_task)
    other = ANOTHER_WAY
    for patch in (gold, gold, gold, Patch(files={"tally/words.py": other})):
        verdict = grading.grade(guarded_task, patch)
        assert verdict.reward == 1.0, verdict
        assert set(verdict.outcomes) == {*guarded_task.fail_to_pass, *guarded_task.pass_to_pass}


ANOTHER_WAY = """\
from collections import Counter

def split(text):
    return [word for part in text.split() if (word := part.strip('.,;:!?').lower())]

def count(text):
    return dict(Counter(split(text)))
"""
ALL_PASS = """
import json
plain = json.dumps
def forged(value, **options):
    if isinstance(value, dict) and 'outcome' in value:
        value = {**value, 'outcome': 'passed', 'message': ''}
    return plain(value, **options)
json.dumps = forged
"""
READ_FRAMES = """
import sys
def count(text):
    frame = sys._getframe(1)
    while frame:
        for name, value in frame.f_locals.items():
            if isinstance(value, dict) and name == 'expected':
                return value
        frame = frame.f_back
"""
ALWAYS_PASSED = """
import _pytest.reports
_pytest.reports.TestReport.outcome = property(lambda self: 'passed', lambda self, value: None)
"""
NOTHING_RUNS = """
import _pytest.python
_pytest.python.pytest_pyfunc_call.__code__ = (lambda pyfuncitem: True).__code__
"""
CHEATS = {
    "every outcome that is written is a pass": ALL_PASS,
    "a report's outcome is a pass": ALWAYS_PASSED,
    "tests do nothing": NOTHING_RUNS,
    "what the caller expects is returned": READ_FRAMES,
}


@pytest.mark.parametrize("cheat", CHEATS)
def test_cheats_that_know_no_answer_are_not_paid(guarded_task: Task, cheat: str):
    text = (Path(folder.workspace(guarded_task)) / "tally/words.py").read_text("utf-8") + "\n" + CHEATS[cheat]
    verdict = grading.outcomes_of(guarded_task, Patch(files={"tally/words.py": text}))
    assert verdict.integrity and not verdict.solved, verdict


def test_a_decoy_of_another_test_is_refused(guarded_task: Task, tmp_path: Path):
    copy = shutil.copytree(guarded_task.folder, tmp_path / "task")
    expected = copy / "tests/expected.json"
    text = expected.read_text("utf-8")
    expected.write_text(
        text.replace('"test": "tests/test_table.py::test_top"', '"test": "tests/x.py::test_tip"'), "utf-8"
    )
    with pytest.raises(
        TaskError, match=r"a decoy copies 'tests/x\.py::test_tip', which is no fail-to-pass test"
    ):
        folder.load(copy)


@pytest.mark.parametrize(
    "noted", [["tests/test_x.py::test"], {"by": "x", "tests": [["a"]]}, {"tests": []}, 1]
)
def test_isolated_tests_that_an_earlier_version_noted_are_refused(
    tiny_task: Task, tmp_path: Path, noted: object
):
    copy = shutil.copytree(tiny_task.folder, tmp_path / "task")
    expected = copy / "tests/expected.json"
    told = json.loads(expected.read_text("utf-8"))
    expected.write_text(json.dumps(told | {"isolated": noted}), "utf-8")
    task = folder.load(copy)
    with pytest.raises(TaskError, match="Make the task again with `woodshed tasks make`"):
        grading.grade(task, Patch({}))
