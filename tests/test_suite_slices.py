"""Long suites: run in slices that are kept, tests that end a session put aside, the first tasks before all is known."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from woodshed.grading import assert_hardening_values
from woodshed.sandbox import BUBBLEWRAP
from woodshed.synthesis import baseline, measuring, sources, suite
from woodshed.synthesis.baseline import Baseline
from woodshed.synthesis.make import rounds
from woodshed.synthesis.progress import Phases
from woodshed.synthesis.suite import SuiteLimits

TESTS = """
import os, pytest, short

@pytest.mark.parametrize("n", range(3))
def test_one(n):
    assert short.one() == 1

def test_end():
    print("about to leave")
    os._exit(7)

def test_two():
    assert short.one() == 2, "one is not two"

def test_three():
    assert short.one() == 1
"""


@pytest.fixture(scope="module")
def draft(tmp_path_factory: pytest.TempPathFactory) -> Baseline:
    root = tmp_path_factory.mktemp("short") / "short"
    root.mkdir()
    (root / "short.py").write_text("def one():\n    return 1\n")
    (root / "test_long.py").write_text(TESTS)
    (root / "test_other.py").write_text("import short\ndef test_other(): assert short.one()\n")
    (root / "test_bad.py").write_text("import short\nassert short.one() == 3, 'three'\n")
    found = baseline._draft_of(
        sources.fetch(str(root), root.with_name("tree")), (), (), (), lambda *told: None, BUBBLEWRAP
    )
    return found[0]


def test_a_suite_goes_on_where_it_stopped(draft: Baseline, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("woodshed.runs.machine.cores", lambda: 2)  # one slice at once
    monkeypatch.setattr(suite, "FIRST", 4)
    monkeypatch.setattr(suite, "FEWEST", 2)
    monkeypatch.setattr(suite, "SLICE_S", 0.0)
    told: list[str] = []

    def measured(seconds: float) -> suite.SuiteRuns:
        limits = SuiteLimits(runs=2, timeout_s=300, whole_s=seconds)
        progress = lambda done, total, text: told.append(f"{done}/{total}")  # noqa: E731
        return suite.measure(draft, tmp_path, limits, progress, BUBBLEWRAP)

    first = measured(0)
    assert set(first.aside) == {"test_long.py::test_end"}
    assert first.aside["test_long.py::test_end"] == "it ended the process of the tests"
    assert first.unmeasured == (
        "test_long.py::test_two",
        "test_long.py::test_three",
        "test_other.py::test_other",
    )
    assert told[-1] == "4/7"
    (tmp_path / "99999.json").write_text('{"torn')
    told.clear()
    run, _ = (whole := measured(300)).runs
    assert told[1] == "4/7" and told[-1] == "7/7" and whole.unmeasured == ()
    assert {test.partition("::test_")[2]: outcome for test, outcome in run.outcomes.items()} == {
        "one[0]": "passed",
        "one[1]": "passed",
        "one[2]": "passed",
        "two": "failed",
        "three": "passed",
        "other": "passed",
    }
    assert (
        "'three'" in run.collection_errors["test_bad.py"] or "three" in run.collection_errors["test_bad.py"]
    )
    assert run.package_files["short"].endswith("/short.py") and run.integrity == ()
    reasons = baseline._reasons(whole, ["test_long.py::test_two"])
    assert "one is not two" in reasons["test_long.py::test_two"] and reasons["test_bad.py"].endswith("three")


def test_what_does_not_fit_into_one_run_loses_its_slowest(draft: Baseline):
    tests = tuple(f"test_a.py::test_{name}" for name in "abcd")
    known = replace(draft, stable=tests, durations=dict(zip(tests, (1.0, 30.0, 2.0, 40.0), strict=True)))
    left = measuring.without_slowest(known, 33.0)
    assert (
        left.stable == (tests[0], tests[1], tests[2]) and left.slow == (tests[3],) and tests[3] in left.broken
    )
    assert measuring.without_slowest(known, 73.0).slow == ()


def test_files_take_turns():
    ids = [f"a.py::{n}" for n in range(120)] + [f"b.py::{n}" for n in range(3)]
    turns = suite._in_turns(ids)
    assert turns[:50] == ids[:50] and turns[50:53] == ids[120:] and sorted(turns) == sorted(ids)


def test_the_first_tasks_come_before_all_is_known():
    assert list(rounds(1800.0)) == [240.0, 480.0, 1080.0]
    assert list(rounds(300.0)) == [300.0]


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[float]]:
    now = [0.0]
    monkeypatch.setattr("time.monotonic", lambda: now[0])
    yield now


def test_an_estimate_of_the_whole_stands_beside_every_phase(clock: list[float]):
    told: list[str] = []
    phases = Phases(lambda done, total, text: told.append(text))
    phases.bound("suite", 1800)
    phases.bound("map", 1800)
    phases.named("fetch")(0, 0, "fetching it")
    running = phases.named("suite", {"map": 2.0})
    running(0, 100, "running it")
    clock[0] = 60.0
    running(10, 100, "running it")  # 6 s a test: 9 minutes are left, and mapping takes 20
    clock[0] = 120.0
    phases._beat()
    phases.expect("suite", 0)
    phases.expect("tasks", 30)
    phases.named("map")(0, 100, "mapping it")
    phases.expect("map", 0)
    phases.named("tasks")(0, 2, "making tasks")
    assert told == [
        "fetching it, at most 1 h 0 min to the first tasks",
        "running it, at most 1 h 0 min to the first tasks",
        "running it, about 29 min to the first tasks",
        "running it, about 28 min to the first tasks",
        "mapping it, about 20 min for the whole build",
        "making tasks, less than a minute for the whole build",
    ]


def test_sets_are_doubted_without_what_no_set_can_hold():
    """A list among the doubts made tests of sqlglot fail with "unhashable type", and their candidates were refused."""
    sets = [{1, 2, "a"}, frozenset({(1, 2)}), {"a": 1, (1,): 2}]
    assert all(assert_hardening_values._series(value, 8) for value in sets for _ in range(200))
