"""Reports on a repository's tests: which were left out and why, which are slow, and the log with every reason."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from woodshed.runs.files import write_atomically
from woodshed.synthesis.baseline import Baseline

if TYPE_CHECKING:
    from woodshed.synthesis.repository_context import RepositoryMeasurements

VARYING = ("durations", "why")
"""Fields of a baseline that differ from run to run; they are kept beside it."""
SLOW_SHARE, SLOW_S = 0.2, 5.0
"""A test with such a share of its suite's seconds, and as many, is named."""


def write(baseline: Baseline, log: Path) -> None:
    """Write what differs from run to run: `log`.json for us, `log`.log with every reason for people."""
    log.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(
        log.with_name(f"{log.name}.json"), json.dumps({k: getattr(baseline, k) for k in VARYING})
    )
    lines = [f"{test}\n    {why}" for test, why in sorted(baseline.why.items())]
    write_atomically(_file(log), "\n".join([*lines, ""]))


def with_report(baseline: Baseline, log: Path) -> Baseline:
    """The baseline with what `write` kept of it, if that is still there."""
    try:
        known = json.loads(log.with_name(f"{log.name}.json").read_text("utf-8"))
        return replace(baseline, **{key: dict(known[key]) for key in VARYING})
    except (OSError, ValueError, KeyError, TypeError):
        return baseline


def _file(log: Path) -> Path:
    return log.with_name(f"{log.name}.log")


def notes(measured: RepositoryMeasurements) -> list[str]:
    """Remarks on a repository's tests that a person should read: everything that is left out, and why."""
    baseline, unmapped = measured.baseline, measured.map.unmapped
    name, timed = baseline.repository.name, baseline.timed
    others = {*timed, *baseline.slow, *baseline.unmeasured}
    failing = [test for test in baseline.broken if test not in others]
    remarks = []
    if timed:
        remarks.append(
            f"{name}: left out, because they measure time and would fail on a busy machine: {_some(timed)}"
        )
    if unmapped:
        remarks.append(
            f"{name}: {len(unmapped)} of {len(measured.map.tests)} tests could not be mapped to lines in time; what "
            f"only they run gives no task. {MORE_TIME}"
        )
    if baseline.unmeasured:
        remarks.append(
            f"{name}: {len(baseline.unmeasured)} tests could not be run in time, and are left out: "
            f"{_some(baseline.unmeasured)}. {MORE_TIME}"
        )
    if failing:
        remarks.append(
            f"{name}: left out, as they fail here: {_with_reasons(failing, baseline, measured.log)}"
        )
    if baseline.uncollected:
        files = _with_reasons(baseline.uncollected, baseline, measured.log)
        remarks.append(f"{name}: left out, as pytest cannot collect them here: {files}")
    if baseline.left_out:
        remarks.append(f"{name}: not installed: {'; '.join(baseline.left_out)}")
    return remarks + _on_slow_tests(baseline)


MORE_TIME = (
    "The same command with mapping_timeout_s=SECONDS, and more of them, goes on where this one stopped."
)


def _on_slow_tests(baseline: Baseline) -> list[str]:
    """Remarks on tests that take much of the time of every proof and grading, with the way out."""
    name, seconds = baseline.repository.name, baseline.durations
    total_s = sum(seconds.values())
    if baseline.slow:
        share = sum(seconds.get(test, 0.0) for test in baseline.slow) / max(total_s, 0.001)
        slow = [f"{test} ({seconds.get(test, 0.0):.1f} s)" for test in _slowest(baseline.slow, seconds)]
        return [
            f"{name}: left out, because all tests are too many for one run: the {len(slow)} slowest, {share:.0%} of "
            f"its {total_s:.0f} s: {_some(slow)}. To have them too, judge by the tests near to what is missing ("
            "pass_to_pass=near), or give a run more seconds (timeout_s=SECONDS)"
        ]
    slow = [t for t in baseline.stable if seconds.get(t, 0.0) >= max(SLOW_S, SLOW_SHARE * total_s)]
    return [
        f"{name}: {test} takes {seconds[test]:.0f} of the {total_s:.0f} s of its suite "
        f"({seconds[test] / total_s:.0%}), in every proof and grading. Leave it out with --deselect '{test}', or judge "
        "by the tests near to what is missing with pass_to_pass=near"
        for test in _slowest(slow, seconds)
    ]


def _slowest(tests: Iterable[str], seconds: dict[str, float]) -> list[str]:
    return sorted(tests, key=lambda test: (-seconds.get(test, 0.0), test))


def _with_reasons(names: Sequence[str], baseline: Baseline, log: Path | None) -> str:
    """The first three with the last line of their errors, the number of the others, and the log with all of them."""
    told = [f"{each} ({baseline.why[each][:200]})" if each in baseline.why else each for each in names]
    return _some(told) + (f". All reasons are in {_file(log)}" if log and _file(log).is_file() else "")


def _some(names: Sequence[str]) -> str:
    """The first three names, and the number of the others."""
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
