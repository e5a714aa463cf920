"""Mapping of a baseline's tests to lines, in sessions that are each kept; a long suite as far as time allows.

A session runs some of the tests under coverage and the profiler (`tracer`) and stops between two of them after
SESSION_S, so that little is lost when it is stopped, and a later call goes on behind it. A test that a session does not
survive is put aside. Tests without a map take away nothing that is true: the proof of a task runs them all.
"""

from __future__ import annotations

import contextlib
import functools
import json
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, replace
from pathlib import Path

from woodshed.grading import session
from woodshed.records import TaskError, from_json, to_json
from woodshed.runs import machine
from woodshed.runs.files import write_atomically
from woodshed.sandbox import BUBBLEWRAP, Result, SandboxProvider
from woodshed.synthesis.baseline import Baseline
from woodshed.synthesis.coverage_map import AT_IMPORT, Map
from woodshed.synthesis.progress import Progress
from woodshed.tasks import environment

COVERAGE = "coverage==7.17.5"
TESTS_EACH = 250
"""Most tests of one session."""
SESSION_S = 60.0
"""A session stops between two tests after so long."""
PATIENCE_S = 240.0
"""More for the test that runs then, and for reading the lines; what takes longer is put aside."""


@dataclass(frozen=True)
class MappingSession:
    """Result of one mapping session."""

    tests: tuple[str, ...]
    """Ids in the order they ran in; bit i + 1 of every set is tests[i]."""
    lines: dict[str, dict[str, str]]
    """As in `Map`."""
    calls: tuple[tuple[str, str, str, str], ...]
    aside: tuple[str, ...]
    """Tests that did not run, or that the session did not survive."""


def measure(
    baseline: Baseline,
    kept: Path,
    limit_s: float,
    progress: Progress = lambda done, total, text: None,
    session: Callable[[Baseline, Sequence[str], float], MappingSession] | None = None,
    sandboxes: SandboxProvider = BUBBLEWRAP,
) -> Map:
    """The map, as far as `limit_s` seconds reach; the folder `kept` holds what earlier calls found.

    Raises:
        TaskError: a session gave no answer and does not say which test it ended in.
    """
    session, began = session or functools.partial(trace, sandboxes=sandboxes), time.monotonic()
    kept.mkdir(parents=True, exist_ok=True)
    pieces, total, stable = list(_pieces(kept)), len(baseline.stable), set(baseline.stable)
    done = {test for piece in pieces for test in (*piece.tests, *piece.aside)} & stable
    waiting = deque(_chunks([test for test in baseline.stable if test not in done]))
    running: dict[Future[MappingSession], Sequence[str]] = {}
    at_once = max(2, machine.cores())
    with ThreadPoolExecutor(at_once) as pool:
        while True:
            passed_s = time.monotonic() - began
            progress(len(done), total, f"mapping the tests of {baseline.repository.name} to its lines")
            while waiting and len(running) < at_once and passed_s < limit_s:
                chunk = waiting.popleft()
                seconds = min(SESSION_S, limit_s - passed_s)
                running[pool.submit(session, baseline, chunk, seconds)] = chunk
            if not running:
                return merged(pieces, baseline.stable)
            for future in wait(running, return_when=FIRST_COMPLETED).done:
                chunk, piece = running.pop(future), future.result()
                write_atomically(kept / f"{len(pieces):05}.json", json.dumps(to_json(piece)))
                pieces.append(piece)
                done |= {*piece.tests, *piece.aside} & stable
                if rest := [test for test in chunk if test not in done]:
                    waiting.appendleft(rest)


def _chunks(tests: list[str]) -> Iterator[list[str]]:
    for at in range(0, len(tests), TESTS_EACH):
        yield tests[at : at + TESTS_EACH]


def _pieces(kept: Path) -> Iterator[MappingSession]:
    """Results of earlier calls; files that are incomplete or not ours are skipped."""
    for file in sorted(kept.glob("*.json")):
        with contextlib.suppress(ValueError, TypeError, KeyError, AttributeError):
            yield from_json(MappingSession, json.loads(file.read_text("utf-8")))


def trace(
    baseline: Baseline, tests: Sequence[str], seconds: float, sandboxes: SandboxProvider = BUBBLEWRAP
) -> MappingSession:
    """One session over some tests, which stops between two of them after so many seconds.

    Raises:
        TaskError: it gave no answer, and no test of it had begun.
    """
    (site,) = (environment.tool(COVERAGE, baseline.environment.python) / "lib").glob("python*/site-packages")
    tracer = Path(__file__).with_name("tracer.py")
    binds = {**baseline.spec.binds, "/run/coverage": site, "/run/woodshed/woodshed_tracer.py": tracer}
    files = [path for path in baseline.package_files if path.endswith(".py")]
    with sandboxes.open(replace(baseline.spec, binds=binds)) as sandbox:
        request = {
            "nonce": "",
            "ids": list(tests),
            "options": list(baseline.environment.pytest_options),
            "packages": [],
            "workspace": sandbox.workspace,
            "files": [f"{sandbox.workspace}/{path}" for path in files],
            "out": "/tmp/map.json",
            "now": "/tmp/now",
            "seconds": seconds,
        }
        result = sandbox.exec(
            session.PYTHON + "/run/woodshed/woodshed_tracer.py",
            stdin=json.dumps(request).encode(),
            timeout_s=seconds + PATIENCE_S,
            max_output=1 << 14,
        )
        if result.outcome != "ok":
            now = sandbox.exec(["cat", "/tmp/now"]).stdout.decode(errors="replace")
            return _put_aside(baseline, result, now, tests)
        answer = json.loads(sandbox.read("/tmp/map.json"))
    ran = set(answer["tests"])
    aside = () if answer["stopped"] else tuple(test for test in tests if test not in ran)
    calls = tuple((a, b, c, d) for a, b, c, d in answer["calls"])
    return MappingSession(tuple(answer["tests"]), answer["lines"], calls, aside)


def _put_aside(baseline: Baseline, result: Result, now: str, tests: Sequence[str]) -> MappingSession:
    """The test that a session ended in; the others are tried again without it."""
    if now in tests:
        return MappingSession((), {}, (), (now,))
    end = (result.stdout + result.stderr).decode(errors="replace").strip()[-400:]
    raise TaskError(
        f"{baseline.repository.name}: the run that maps tests to lines ended as {result.outcome} after "
        f"{result.seconds:.0f} s, before any test. It printed:\n    {end}"
    )


def restricted(mapped: Map, stable: tuple[str, ...]) -> Map:
    """The map of some of its tests."""
    unmapped = set(mapped.unmapped)
    found = merged([MappingSession(mapped.tests, mapped.lines, mapped.calls, ())], stable)
    return replace(found, unmapped=tuple(test for test in stable if test in unmapped))


def merged(pieces: Sequence[MappingSession], stable: tuple[str, ...]) -> Map:
    """One map of the stable tests; of others nothing is kept but that a line ran."""
    place = {test: i + 1 for i, test in enumerate(stable)}
    lines: dict[str, dict[str, int]] = {}
    for piece in pieces:
        moves = [(i + 1, place[test]) for i, test in enumerate(piece.tests) if test in place]
        known: dict[str, int] = {}  # few distinct sets are behind many lines
        for path, of_file in piece.lines.items():
            into = lines.setdefault(path, {})
            for n, text in of_file.items():
                if text not in known:
                    bits = int(text, 16)
                    known[text] = bits & AT_IMPORT | sum(1 << to for at, to in moves if bits >> at & 1)
                into[n] = into.get(n, 0) | known[text]
    texts = {path: {n: f"{lines[path][n]:x}" for n in sorted(lines[path], key=int)} for path in sorted(lines)}
    calls = tuple(sorted({call for piece in pieces for call in piece.calls}))
    mapped = {test for piece in pieces for test in piece.tests}
    return Map(stable, texts, calls, tuple(test for test in stable if test not in mapped))
