"""Runs of a whole suite, in slices of which each is kept as soon as it is known.

The tests of a slice run several times at the same moment, with different hash seeds. A test that a session does not
survive is put aside, with the reason. What time does not reach is left to a later call, which goes on from there.
"""

from __future__ import annotations

import contextlib
import json
import re
import time
from collections import Counter, deque
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol

from woodshed.grading import session
from woodshed.grading.results import NOTHING, TestRun
from woodshed.grading.session import run_tests
from woodshed.records import Environment, from_json, to_json
from woodshed.runs import machine
from woodshed.runs.files import write_atomically
from woodshed.sandbox import SandboxProvider, SandboxSpec
from woodshed.synthesis.progress import Progress
from woodshed.synthesis.sources import Repository

FIRST = 200
"""Tests of the first slice; the following are as large as SLICE_S lets them be."""
FEWEST, MOST = 20, 500
SLICE_S = 60.0
BLOCK = 50
"""So many tests of a file follow each other before the next file has its turn: what time does not reach is spread."""
PROGRESS = re.compile(r"[.FEsxX]*\s*(\[ *\d+%\])?")
"""Lines of pytest that say nothing about what ended it."""
CUT_SHORT = ("ended by its limits", "no end record")
"""Faults of a run that one of its tests ended."""


class SuiteDraft(Protocol):
    """A `baseline.Baseline` as far as its tests need it to run."""

    @property
    def repository(self) -> Repository: ...

    @property
    def environment(self) -> Environment: ...

    @property
    def spec(self) -> SandboxSpec: ...


@dataclass(frozen=True)
class SuiteSlice:
    """Results of some tests."""

    runs: tuple[TestRun, ...]
    """One for each hash seed."""
    known: tuple[str, ...]
    """Tests that are not to be run again."""
    aside: dict[str, str]
    """Those of them that a session did not survive, with the reason."""
    seconds: float


@dataclass(frozen=True)
class SuiteRuns:
    """Results of a suite."""

    runs: tuple[TestRun, ...]
    """One for each hash seed, of the tests that time reached."""
    aside: dict[str, str]
    """Tests that a session did not survive, with the reason."""
    unmeasured: tuple[str, ...]
    """Tests that time did not reach."""


@dataclass(frozen=True)
class SuiteLimits:
    """Extent of the measurement of a suite."""

    runs: int = 3
    timeout_s: float = 120.0
    """For one session alone; several at once may take as many times as long."""
    whole_s: float = 1800.0
    """For all sessions together; no slice begins later."""


LIMITS = SuiteLimits()


def measure(
    draft: SuiteDraft, kept: Path, limits: SuiteLimits, progress: Progress, sandboxes: SandboxProvider
) -> SuiteRuns:
    """The runs of a suite, as far as time reaches; the folder `kept` holds what earlier calls found.

    A suite in which nothing can be collected runs once as it is: pytest says why.
    """
    kept.mkdir(parents=True, exist_ok=True)
    name = draft.repository.name
    progress(0, 0, f"collecting the tests of {name}")
    ids, errors = _collected(draft, limits.timeout_s * limits.runs, sandboxes)
    if not ids:
        runs = _sessions(draft, None, limits, sandboxes)
        return SuiteRuns(tuple(replace(run, collection_errors=_of_files(run)) for run in runs), {}, ())
    slices = list(_slices(kept))
    done = {test for each in slices for test in each.known}
    waiting = deque(test for test in _in_turns(ids) if test not in done)
    began, size, at_once = time.monotonic(), FIRST, max(1, machine.cores() // limits.runs)
    with ThreadPoolExecutor(at_once) as pool:
        while True:
            text = f"running the tests of {name} {limits.runs} times"
            progress(len(ids) - len(waiting), len(ids), text)
            if not waiting or (slices and time.monotonic() >= began + limits.whole_s):
                break
            asked = [list(_taken(waiting, size)) for _ in range(at_once)]
            for tests, one in zip(
                asked, pool.map(lambda t: _slice(draft, t, limits, sandboxes), asked), strict=True
            ):
                if tests:
                    write_atomically(kept / f"{len(slices):05}.json", json.dumps(to_json(one)))
                    slices.append(one)
                    waiting.extendleft(test for test in reversed(tests) if test not in one.known)
                    size = _size(one)
    return _merged(ids, errors, slices, limits.runs, tuple(waiting))


def _collected(
    draft: SuiteDraft, timeout_s: float, sandboxes: SandboxProvider
) -> tuple[list[str], dict[str, str]]:
    """Ids of the suite in their order, and the errors of files that cannot be collected; none where pytest fails."""
    script = Path(__file__).with_name("collector.py")
    binds = {**draft.spec.binds, "/run/woodshed/woodshed_collector.py": script}
    with sandboxes.open(replace(draft.spec, binds=binds)) as sandbox:
        request = {"ids": None, "workspace": sandbox.workspace, "out": "/tmp/collected.json"}
        request["options"] = list(draft.environment.pytest_options)
        result = sandbox.exec(
            session.PYTHON + "/run/woodshed/woodshed_collector.py",
            stdin=json.dumps(request).encode(),
            timeout_s=timeout_s,
            max_output=1 << 14,
        )
        if result.outcome != "ok":
            return [], {}
        answer: dict[str, Any] = json.loads(sandbox.read("/tmp/collected.json"))
    return answer["ids"], answer["errors"]


def _in_turns(ids: Sequence[str]) -> list[str]:
    """The ids, BLOCK tests of every file first, then the next BLOCK."""
    nth: Counter[str] = Counter()
    turns = []
    for test in ids:
        path = test.partition("::")[0]
        turns.append((nth[path] // BLOCK, test))
        nth[path] += 1
    return [test for _, test in sorted(turns, key=lambda turn: turn[0])]


def _taken(waiting: deque[str], size: int) -> Iterator[str]:
    for _ in range(min(size, len(waiting))):
        yield waiting.popleft()


def _slices(kept: Path) -> Iterator[SuiteSlice]:
    """Results of earlier calls; files that are incomplete or not ours are skipped."""
    for file in sorted(kept.glob("*.json")):
        with contextlib.suppress(ValueError, TypeError, KeyError, AttributeError):
            yield from_json(SuiteSlice, json.loads(file.read_text("utf-8")))


def _size(last: SuiteSlice) -> int:
    """Number of tests of the next slice."""
    return max(FEWEST, min(MOST, int(SLICE_S * len(last.known) / max(last.seconds, 0.1))))


def _slice(
    draft: SuiteDraft, tests: Sequence[str], limits: SuiteLimits, sandboxes: SandboxProvider
) -> SuiteSlice:
    """The runs of some tests. Where a session ends in a test, that one is put aside, and those behind it wait."""
    began = time.monotonic()
    if not tests:
        return SuiteSlice((), (), {}, 0.0)
    runs = _sessions(draft, tests, limits, sandboxes)
    aside, waiting = dict[str, str](), set[str]()
    for run in runs:
        if any(fault.startswith(CUT_SHORT) for fault in run.integrity):
            missing = [
                t
                for t in tests
                if run.outcomes[t] == "missing" and t.partition("::")[0] not in run.collection_errors
            ]
            waiting |= set(missing[1:])
            if missing:
                aside[missing[0]] = _end_of(run)
    waiting -= aside.keys()
    known = tuple(test for test in tests if test not in waiting)
    return SuiteSlice(runs, known, aside, time.monotonic() - began)


def _of_files(run: TestRun) -> dict[str, str]:
    """Errors of collection, without that of a session that collected nothing."""
    return {path: text for path, text in run.collection_errors.items() if path != NOTHING}


def _end_of(run: TestRun) -> str:
    """Words for a session that a test did not let end."""
    if run.timed_out:
        return f"it was still running when its session ended after {run.seconds:.0f} s"
    lines = [line for line in run.log.splitlines() if not PROGRESS.fullmatch(line)]
    return f"it ended the process of the tests{f', which last printed: {lines[-1][:200]}' if lines else ''}"


def _sessions(
    draft: SuiteDraft, ids: Sequence[str] | None, limits: SuiteLimits, sandboxes: SandboxProvider
) -> tuple[TestRun, ...]:
    """Sessions at the same time, each with its own hash seed."""

    def session_of(hash_seed: int) -> TestRun:
        with sandboxes.open(draft.spec) as sandbox:
            return run_tests(
                sandbox,
                ids=ids,
                packages=draft.environment.packages,
                timeout_s=limits.timeout_s * limits.runs,
                hash_seed=hash_seed,
                options=draft.environment.pytest_options,
            )

    with ThreadPoolExecutor(limits.runs) as pool:
        return tuple(pool.map(session_of, range(limits.runs)))


def _merged(
    ids: Sequence[str],
    errors: dict[str, str],
    slices: Sequence[SuiteSlice],
    runs: int,
    unmeasured: tuple[str, ...],
) -> SuiteRuns:
    """The slices as runs of the whole suite: outcomes in the order of the suite, files as any slice imported them."""
    aside = {test: why for each in slices for test, why in each.aside.items()}
    whole: list[TestRun] = []
    for seed in range(runs):
        parts = [(each, each.runs[seed]) for each in slices]
        outcomes = {t: part.outcomes[t] for each, part in parts for t in each.known if t not in aside}
        imported: dict[str, str] = {}
        for _, part in parts:
            imported |= {
                package: file
                for package, file in part.package_files.items()
                if file or package not in imported
            }
        first = parts[0][1]
        whole.append(
            replace(
                first,
                outcomes={test: outcomes[test] for test in ids if outcomes.get(test, "missing") != "missing"},
                durations={t: s for _, part in parts for t, s in part.durations.items()},
                messages={t: text for _, part in parts for t, text in part.messages.items()},
                collection_errors=errors
                | {p: text for _, part in parts for p, text in _of_files(part).items()},
                package_files=imported,
                integrity=tuple(
                    f for _, part in parts for f in part.integrity if not f.startswith(CUT_SHORT)
                ),
                timed_out=False,
                seconds=sum(part.seconds for _, part in parts),
                log="\n".join(part.log for _, part in parts),
            )
        )
    return SuiteRuns(tuple(whole), aside, unmeasured)
