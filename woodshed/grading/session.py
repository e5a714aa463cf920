"""One session of pytest in a sandbox, and what can be believed of it."""

from __future__ import annotations

import dataclasses
import json
import secrets
import signal
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import cast

from woodshed.grading import results
from woodshed.records import Outcome, SandboxError
from woodshed.sandbox import Sandbox, SandboxSpec

INSIDE = {
    "runner.py": "/run/woodshed/woodshed_runner.py",
    "assert_hardening.py": "/run/woodshed/woodshed_assert_hardening.py",
    "process_isolation.py": "/run/woodshed/woodshed_process_isolation.py",
}
"""Files of this package and where a sandbox shows them."""
LOG_BYTES = 1 << 16

PYTHON = 'WOODSHED_PYTHONPATH="$PYTHONPATH" PYTHONPATH= exec /env/bin/python -P -s -B '
"""A script starts without PYTHONPATH: no file of the workspace may be imported before it has read its request."""

START = PYTHON + INSIDE["runner.py"]


@dataclass(frozen=True)
class TestRun:
    """One session of pytest in a sandbox."""

    __test__ = False  # not a test class

    outcomes: dict[str, Outcome]
    """Test id, from a hook, to its outcome. An expected failure or an unexpected pass counts as skipped."""
    durations: dict[str, float]
    """Seconds in set-up, call and tear-down."""
    messages: dict[str, str]
    """Why a test did not pass: "path:line: message"."""
    collection_errors: dict[str, str]
    """Test file to the end of the error that kept it from being collected."""
    package_files: dict[str, str]
    """Import name to the file it was imported from; "" where no test imported it."""
    integrity: tuple[str, ...]
    """Why the outcomes cannot be believed; empty when they can."""
    started: bool
    """Whether pytest was reached. If not, the infrastructure failed, not the code under test."""
    timed_out: bool
    seconds: float
    log: str
    """The end of what pytest printed, for people."""
    out_of_cpu: bool = False
    """Whether it had used the CPU seconds it was given, which does not depend on what else the machine does."""


def with_runner(spec: SandboxSpec) -> SandboxSpec:
    """The same sandbox, in which `run_tests` can run, as another user than the agent."""
    files = {place: Path(__file__).with_name(name) for name, place in INSIDE.items()}
    return dataclasses.replace(spec, binds={**spec.binds, **files}, user="grader")


def run_tests(
    sandbox: Sandbox,
    *,
    ids: Sequence[str] | None,
    packages: Sequence[str],
    timeout_s: float,
    cpu_s: int | None = None,
    hash_seed: int = 0,
    patched: Mapping[str, Sequence[int]] | None = None,
    sources: Mapping[str, bytes] | None = None,
    compiled: Mapping[str, Sequence[object]] | None = None,
    isolate: bool = False,
) -> TestRun:
    """Run the project's tests, or the ones asked for, and tell what can be believed about them.

    Args:
        sandbox: opened from `with_runner(spec)`; the roots of the source come from its PYTHONPATH.
        ids: pytest node ids; None for the whole suite, as the project's own configuration finds it.
        packages: import names that must come from the workspace.
        cpu_s: CPU seconds that the session may use; None: as many as it likes.
        patched: numbers of the lines that a patch brought, by path; comparisons that they define are doubted.
        sources: test files, by path, that are not what they are on disk.
        compiled: test files, by path, as `compiled.compiled_tests` made them.
        isolate: keep the packages in another process than the tests (`process_isolation`); some honest tests fail so.

    Raises:
        SandboxError: the sandbox was lost.
    """
    nonce = secrets.token_hex(16)
    request: dict[str, object] = {
        "nonce": nonce,
        "ids": None if ids is None else list(ids),
        "packages": list(packages),
    }
    request |= {"isolate": isolate, "patched": {path: list(lines) for path, lines in (patched or {}).items()}}
    request["sources"] = {path: data.decode("latin-1") for path, data in (sources or {}).items()}
    request |= {"compiled": dict(compiled or {}), "workspace": sandbox.workspace}
    result = sandbox.exec(
        f"ulimit -S -t {cpu_s or 'unlimited'}; {START}",
        env={"PYTHONHASHSEED": str(hash_seed)},
        stdin=json.dumps(request).encode(),
        timeout_s=timeout_s,
        max_output=LOG_BYTES,
        channel=True,
    )
    if result.outcome == "sandbox_lost":
        said = result.stderr[-500:].decode(errors="replace") or "it said nothing"
        raise SandboxError(f"the sandbox was lost while tests ran: {said}")
    report = results.read(result.channel, nonce)
    faults = report.faults
    if result.outcome in ("timeout", "oom", "limit"):
        faults = (f"ended by its limits after {result.seconds:.1f} s: {result.outcome}", *faults)
    wanted = report.outcomes if ids is None else {test: report.outcomes.get(test, "missing") for test in ids}
    return TestRun(
        outcomes=cast("dict[str, Outcome]", dict(wanted)),
        durations=report.durations,
        messages=report.messages,
        collection_errors=report.collection_errors,
        package_files=report.package_files,
        integrity=faults,
        started=report.started,
        timed_out=result.outcome == "timeout",
        seconds=result.seconds,
        log=(result.stdout + result.stderr).decode(errors="replace")[-LOG_BYTES:],
        out_of_cpu=cpu_s is not None and result.exit_code == 128 + signal.SIGXCPU,
    )
