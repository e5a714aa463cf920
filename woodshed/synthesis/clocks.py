"""Tests that judge time are found before a task is made of them: on a busy machine they fail an honest solution.

Those that can see a clock run once more while the process is slowed down (`slowed`), in two phases at once; what fails
then, and passed three times before, is left out.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path, PurePosixPath

from woodshed.grading import session
from woodshed.sandbox import BUBBLEWRAP, SandboxProvider
from woodshed.synthesis.baseline import Baseline
from woodshed.synthesis.coverage_map import Map
from woodshed.synthesis.progress import Progress

SEES_A_CLOCK = re.compile(
    r"(?m)^\s*(?:from\s+(?:time|timeit)\s+import\b|import\s[^#\n]*(?<![\w.])(?:time|timeit)\b)|\b(?:now|utcnow)\("
)
PHASES = (2, 0)
"""Index (of four) of the clock reading that comes late: the end of the first measured span, or of the second."""
PATIENCE_S = 240.0
"""More than its limit for the test that a run is in when it is over."""
MOST_SHARE = 0.25
"""If more of a suite fails, it is not time that it judges, and nothing is left out."""


def without_judges_of_time(
    baseline: Baseline,
    asked: Sequence[str],
    limit_s: float,
    progress: Progress,
    sandboxes: SandboxProvider = BUBBLEWRAP,
) -> Baseline:
    """The baseline without the tests that fail where the process is slowed down; they are in `timed`.

    Of a suite that `limit_s` seconds are too few for, the first tests are tried.

    Args:
        asked: those that can see a clock (`seeing`).
    """
    name = baseline.repository.name
    if not asked:
        return baseline
    progress(
        0,
        0,
        f"searching {name} for tests that judge time, {len(asked)} in question, at most {limit_s / 60:.0f} min",
    )
    with ThreadPoolExecutor(len(PHASES)) as pool:
        runs = list(pool.map(lambda phase: _failing(baseline, asked, phase, limit_s, sandboxes), PHASES))
    failed = set().union(*runs)
    timed = tuple(test for test in baseline.stable if test in failed)
    if len(timed) == len(baseline.stable) or len(timed) > max(4.0, MOST_SHARE * len(baseline.stable)):
        return baseline
    return replace(
        baseline,
        stable=tuple(test for test in baseline.stable if test not in failed),
        broken=tuple(sorted({*baseline.broken, *timed})),
        timed=timed,
    )


def seeing(baseline: Baseline, mapped: Map) -> list[str]:
    """Stable tests of files that mention a clock, and those that run a file of the package that does; all of them where
    a conftest does, and of a helper those of files that name it. What is not mapped yet is in question when it is."""

    def text_of(path: str) -> str:
        return (baseline.repository.tree / path).read_bytes().decode(errors="replace")

    def mentions(path: str) -> bool:
        return SEES_A_CLOCK.search(text_of(path)) is not None

    holding = {test.partition("::")[0] for test in baseline.stable}
    helpers = [path for path in baseline.test_files if path not in holding and mentions(path)]
    if any(path.endswith("conftest.py") for path in helpers):
        return list(baseline.stable)
    names = "|".join(re.escape(PurePosixPath(path.removesuffix("/__init__.py")).stem) for path in helpers)
    importing = re.compile(rf"\b({names or '(?!)'})\b")
    files = {path for path in holding if mentions(path) or importing.search(text_of(path))}
    timed = [path for path in baseline.package_files if path.endswith(".py") and mentions(path)]
    running = {test for path in timed for test in mapped.names(mapped.covering(path))}
    return [test for test in baseline.stable if test.partition("::")[0] in files or test in running]


def _failing(
    baseline: Baseline, tests: Sequence[str], phase: int, limit_s: float, sandboxes: SandboxProvider
) -> set[str]:
    """Tests that fail in one phase; none where the run did not survive it."""
    script = Path(__file__).with_name("slowed.py")
    binds = {**baseline.spec.binds, "/run/woodshed/woodshed_slowed.py": script}
    with sandboxes.open(replace(baseline.spec, binds=binds)) as sandbox:
        request = {"ids": list(tests), "phase": phase, "seconds": limit_s, "workspace": sandbox.workspace}
        request |= {"options": list(baseline.environment.pytest_options), "out": "/tmp/slowed.json"}
        result = sandbox.exec(
            session.PYTHON + "/run/woodshed/woodshed_slowed.py",
            stdin=json.dumps(request).encode(),
            timeout_s=limit_s + PATIENCE_S,
            max_output=1 << 14,
        )
        if result.outcome != "ok":
            return set()
        return set(json.loads(sandbox.read("/tmp/slowed.json"))["failed"])
