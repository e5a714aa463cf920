"""What is measured of a repository once: its tests mapped to lines in pieces, and those left out that judge time."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from woodshed.records import TaskError
from woodshed.synthesis import (
    SynthesisSettings,
    baseline,
    clocks,
    mapping,
    measuring,
    reports,
    repository_context,
    sources,
    suite,
)
from woodshed.synthesis.baseline import Baseline
from woodshed.synthesis.coverage_map import Map
from woodshed.synthesis.mapping import MappingSession, merged
from woodshed.synthesis.progress import Phases
from woodshed.synthesis.reports import notes

CODE = """
def one():
    return 1


def two():
    return one() + 1


def spin():
    for _ in range(300_000):
        one()
    return two()
"""
TESTS = """
import os
import time
from datetime import datetime
from timeit import repeat, timeit

import pytest
from short import one, spin, two


def test_one():
    assert one() == 1


def test_two():
    assert two() == 2


def test_spin():
    assert spin() == 2


def spans(sizes):
    for size in sizes:
        began = time.perf_counter()
        sum(range(size))
        yield time.perf_counter() - began


def test_near_linear():
    short, long = spans((100_000, 200_000))
    assert one() and long < 20 * short + 0.2


def test_not_faster():
    short, long = spans((100_000, 300_000))
    assert one() and long > short - 0.2


def test_quick():
    assert timeit(one, number=10) < 1


def test_date():
    began = datetime.now()
    two()
    assert (datetime.now() - began).total_seconds() < 1


def test_best_of_many():
    assert min(repeat(one, number=10, repeat=20)) < 1


def test_looks_but_does_not_judge(tmp_path):
    began = time.time()
    (tmp_path / "x").write_text("x")
    assert began - 1 < (tmp_path / "x").stat().st_mtime < time.time() + 1


def test_waits_at_least():
    began = time.monotonic()
    time.sleep(0.01)
    assert time.monotonic() - began >= 0.009
"""


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory) -> Baseline:
    root = tmp_path_factory.mktemp("short") / "short"
    root.mkdir()
    (root / "short.py").write_text(CODE)
    (root / "test_short.py").write_text(TESTS)
    (root / "test_plain.py").write_text("import short\n\n\ndef test_plain():\n    assert short.two() == 2\n")
    return baseline.measure(
        sources.fetch(str(root), root.with_name("tree")), limits=suite.SuiteLimits(runs=1)
    )


def names(tests: Sequence[str]) -> set[str]:
    return {test.partition("::")[2].removeprefix("test_") for test in tests}


def test_a_map_is_made_in_pieces_and_gone_on_with(measured: Baseline, tmp_path: Path):
    whole = mapping.measure(measured, tmp_path / "whole", 300)
    assert whole.unmapped == () and ("short.py", "two", "short.py", "one") in whole.calls
    assert names(whole.names(whole.covering("short.py", 7, 7))) >= {"two", "spin", "plain", "date"}
    first, *others = measured.stable
    kept = tmp_path / "kept"
    asked: list[list[str]] = []
    told: list[str] = []

    def session(baseline: Baseline, tests: Sequence[str], seconds: float) -> MappingSession:
        """The real one, which a killed process would have ended after its first test."""
        asked.append(list(tests))
        if len(asked) == 2:
            raise KeyboardInterrupt
        return mapping.trace(baseline, tests, 1e-6 if len(asked) == 1 else seconds)

    with pytest.raises(KeyboardInterrupt):
        mapping.measure(
            measured, kept, 300, lambda done, total, text: told.append(f"{done}/{total} {text}"), session
        )
    (kept / "99999.json").write_text('{"torn')
    again = mapping.measure(measured, kept, 300, session=session)
    assert asked == [[first, *others], others, others]
    assert again.lines.keys() == whole.lines.keys() and again.unmapped == ()
    assert [again.names(again.covering("short.py", n, n)) for n in range(2, 12)] == [
        whole.names(whole.covering("short.py", n, n)) for n in range(2, 12)
    ]
    assert told[0] == "0/11 mapping the tests of short to its lines"
    assert told[-1].startswith("1/11 ")


def test_a_test_that_no_session_survives_is_put_aside(measured: Baseline, tmp_path: Path):
    bad = measured.stable[1]

    def session(baseline: Baseline, tests: Sequence[str], seconds: float) -> MappingSession:
        if bad in tests:
            return MappingSession((), {}, (), (bad,))
        return MappingSession(tuple(tests), {"short.py": {"2": "2"}}, (), ())

    found = mapping.measure(measured, tmp_path, 300, session=session)
    assert found.unmapped == (bad,) and found.names(found.covering("short.py", 2, 2)) == [measured.stable[0]]


def test_what_time_does_not_reach_is_left_unmapped(measured: Baseline, tmp_path: Path):
    def session(baseline: Baseline, tests: Sequence[str], seconds: float) -> MappingSession:
        time.sleep(0.2)
        return MappingSession(tuple(tests[:1]), {}, (), ())

    found = mapping.measure(measured, tmp_path, 0.1, session=session)
    assert found.unmapped == measured.stable[1:]


def test_of_a_package_that_sees_a_clock_only_those_tests_are_in_question_that_run_it(
    measured: Baseline, tmp_path: Path
):
    """`from sqlglot.time import format_time` put all 1478 tests of sqlglot in question."""
    tree = tmp_path / "tree"
    files = {
        "pkg/clock.py": "import os, time\n",
        "pkg/time.py": "from pkg.time import x\nimport pkg.time, a.time\n",
    }
    for path, text in {**files, "test_a.py": "", "test_b.py": "from time import sleep\n"}.items():
        (tree / path).parent.mkdir(parents=True, exist_ok=True)
        (tree / path).write_text(text)
    tests = ("test_a.py::one", "test_a.py::two", "test_a.py::three", "test_b.py::four")
    asked = replace(
        measured,
        repository=replace(measured.repository, tree=tree),
        package_files=tuple(files),
        test_files=("test_a.py", "test_b.py"),
        stable=tests,
    )
    known = Map(tests, {"pkg/clock.py": {"1": "1", "9": "4"}, "pkg/time.py": {"1": "1e"}}, (), tests[2:3])
    assert clocks.seeing(asked, known) == [tests[1], tests[3]]
    left = mapping.restricted(known, tests[1:])
    assert left.names(left.covering("pkg/clock.py")) == [tests[1]] and left.unmapped == tests[2:3]


def test_pieces_are_merged_by_test():
    one = MappingSession(
        ("a", "strange", "b"), {"m.py": {"1": "1", "2": "a", "10": "4"}}, (("m.py", "f", "m.py", "g"),), ()
    )
    two = MappingSession(("c",), {"m.py": {"2": "3"}, "n.py": {"1": "2"}}, (("m.py", "f", "m.py", "g"),), ())
    found = merged([one, two], ("a", "b", "c", "d"))
    assert found.lines == {"m.py": {"1": "1", "2": "f", "10": "0"}, "n.py": {"1": "8"}}
    assert found.calls == (("m.py", "f", "m.py", "g"),) and found.unmapped == ("d",)


def test_a_session_that_never_began_says_so(measured: Baseline, tmp_path: Path):
    (measured.repository.tree / "conftest.py").write_text("raise SystemExit('no way')")
    try:
        with pytest.raises(TaskError, match="before any test"):
            mapping.trace(measured, measured.stable, 10)
    finally:
        (measured.repository.tree / "conftest.py").unlink()


def test_what_was_measured_is_kept_until_more_time_is_given(measured: Baseline, tmp_path: Path):
    settings = SynthesisSettings(mapping_timeout_s=0.001, timeout_s=60)
    said: list[str] = []

    def measure(settings: SynthesisSettings) -> repository_context.RepositoryMeasurements:
        said.clear()
        phases = Phases(lambda done, total, text: said.append(text))
        return measuring.measured_once(measured.repository, tmp_path, settings, phases)

    short = measure(settings)
    first = set(short.map.unmapped)
    assert any("building short" in text for text in said)
    assert measure(settings) == short and said == []
    longer = measure(settings.model_copy(update={"mapping_timeout_s": 300}))
    assert longer.baseline == short.baseline and longer.map.unmapped == () and longer.map.lines
    assert not any("building" in text for text in said)
    assert measure(settings) == longer and said == []
    (kept,) = (tmp_path / ".baselines").iterdir()
    assert json.loads(kept.read_text())["map"]["unmapped"] == [] and kept.suffix == ".json"
    assert names(longer.baseline.timed) == {"near_linear", "not_faster", "quick", "date"}
    assert set(longer.baseline.stable) == set(measured.stable) - set(longer.baseline.timed)
    assert set(longer.baseline.timed) <= set(longer.baseline.broken)  # so the agent is not shown them
    assert names(measured.stable) - names(clocks.seeing(measured, longer.map)) == {"plain"}
    assert re.search(
        r"because they measure time .*: test_\S+, test_\S+, test_\S+ and 1 more$", notes(longer)[0]
    )
    assert not first or "tests could not be mapped" in notes(short)[1]
    lacking = replace(
        longer.baseline,
        timed=(),
        broken=("a::b", "a::c"),
        uncollected=("c.py",),
        left_out=("tox: why",),
        why={"a::b": "a.py:3: assert 1 == 2", "c.py": "KeyError: 'ACME_URL'"},
    )
    log = tmp_path / "reasons"
    reports.write(lacking, log)
    file = f"All reasons are in {log}.log"
    assert (tmp_path / "reasons.log").read_text().splitlines()[:2] == ["a::b", "    a.py:3: assert 1 == 2"]
    assert notes(replace(longer, baseline=lacking, log=log)) == [
        f"short: left out, as they fail here: a::b (a.py:3: assert 1 == 2), a::c. {file}",
        f"short: left out, as pytest cannot collect them here: c.py (KeyError: 'ACME_URL'). {file}",
        "short: not installed: tox: why",
    ]
    assert settings.fingerprint == SynthesisSettings(timeout_s=60).fingerprint
