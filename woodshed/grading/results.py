"""Reads what `runner` sent, and decides whether the run can be believed. Standard library only; one file.

`grading.verifier` imports it. A Harbor verifier runs a copy of it, next to a copy of the runner, as a script:
`woodshed_grade.py TESTS WORKSPACE LOGS` restores the original tests, runs them and writes LOGS/reward.json.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import secrets
import shutil
import signal
import subprocess
import sys
import tempfile
from dataclasses import dataclass, field
from pathlib import Path

SENTINELS = ("test_sentinel_assertion", "test_sentinel_exception", "test_sentinel_expectation")
"""Tests of the runner's own that must fail in every believable run."""
MOST_FOREIGN = 1000
SHAPES: dict[str, dict[str, type | tuple[type, ...]]] = {
    "start": {},
    "test": {"id": str, "outcome": str, "seconds": (int, float), "message": str},
    "sentinel": {"name": str, "outcome": str},
    "collection": {"path": str, "message": str},
    "end": {"count": int, "workspace": str, "packages": dict, "patched": list},
}
"""What each kind of record holds at least."""
HOOKS = ("conftest.py", "sitecustomize.py", "usercustomize.py", "pytest.ini", ".pytest.ini", "pytest.toml")


@dataclass(frozen=True)
class Report:
    """What arrived through the channel."""

    started: bool
    """The runner got as far as pytest. If not, nothing of the patch had a part in it."""
    outcomes: dict[str, str] = field(default_factory=dict)
    """Test id to passed, failed, error or skipped. Expected failures and unexpected passes count as skipped."""
    durations: dict[str, float] = field(default_factory=dict)
    """Seconds in set-up, call and tear-down."""
    messages: dict[str, str] = field(default_factory=dict)
    """Why a test did not pass: "path:line: message"."""
    collection_errors: dict[str, str] = field(default_factory=dict)
    """Test file to the end of the error that kept it from being collected."""
    package_files: dict[str, str] = field(default_factory=dict)
    """Import name to the file it was imported from; "" where no test imported it."""
    faults: tuple[str, ...] = ()
    """Integrity checks that failed."""


def read(data: bytes, nonce: str) -> Report:
    """The report in what came through the channel. Forged, missing and garbled parts become faults, never errors."""
    kinds: dict[str, list[dict]] = {kind: [] for kind in SHAPES}
    foreign = 0
    for line in io.BytesIO(data):
        if foreign == MOST_FOREIGN:  # a flood; what follows would only take time
            break
        mark, _, body = line.rstrip(b"\n").partition(b" ")
        if not mark:
            continue
        try:
            record = json.loads(body) if secrets.compare_digest(mark, nonce.encode()) else {}
            kinds[record["kind"]].append(record)
        except (ValueError, KeyError, TypeError, RecursionError):
            foreign += 1
    if not all(_fits(record, SHAPES[kind]) for kind, records in kinds.items() for record in records):
        return Report(started=True, faults=("garbled results",))
    return _report(kinds, foreign)


def _fits(record: dict, shape: dict[str, type | tuple[type, ...]]) -> bool:
    return all(isinstance(record.get(key), kind) for key, kind in shape.items())


def _report(kinds: dict[str, list[dict]], foreign: int) -> Report:
    tests = kinds["test"]
    outcomes: dict[str, str] = {}
    for test in tests:  # a test that ran twice passed only if it passed twice
        outcome = "skipped" if test["outcome"] in ("xpassed", "xfailed") else test["outcome"]
        if outcomes.get(test["id"], "passed") == "passed":
            outcomes[test["id"]] = outcome
    return Report(
        started=bool(kinds["start"]),
        outcomes=outcomes,
        durations={t["id"]: t["seconds"] for t in tests},
        messages={t["id"]: t["message"] for t in tests if t["message"]},
        collection_errors={c["path"]: c["message"] for c in kinds["collection"]},
        package_files=dict(kinds["end"][0]["packages"]) if kinds["end"] else {},
        faults=tuple(_faults(kinds, foreign)),
    )


def _faults(kinds: dict[str, list[dict]], foreign: int) -> list[str]:
    if not kinds["start"]:
        return ["no start record"]
    faults = [f"{foreign} lines in the channel are not the runner's"] if foreign else []
    if not kinds["end"]:
        return [*faults, "no end record: the process ended before pytest did"]
    end, count = kinds["end"][0], len(kinds["test"])
    if len(kinds["end"]) > 1 or end["count"] != count:
        faults.append(f"{count} results arrived, the end record counts {end['count']}")
    failed = {sentinel["name"] for sentinel in kinds["sentinel"] if sentinel["outcome"] == "failed"}
    if failed != set(SENTINELS) or len(kinds["sentinel"]) != len(SENTINELS):
        faults.append(f"tests that must fail did not: {', '.join(sorted(set(SENTINELS) - failed))}")
    if end["patched"]:
        faults.append(f"changed while the tests ran: {', '.join(map(str, end['patched'][:5]))}")
    files = {package: str(file) for package, file in end["packages"].items() if file}
    outside = {p: file for p, file in files.items() if not file.startswith(end["workspace"] + "/")}
    return faults + [
        f"{p} was imported from {file[:300]}, outside the workspace" for p, file in outside.items()
    ]


def grade(tests: Path, workspace: Path, logs: Path) -> None:
    """Restore the original tests, run them, write the reward: 1.0 or 0.0, never a file that says neither."""
    expected = json.loads((tests / "expected.json").read_text("utf-8"))
    originals = {file.relative_to(tests / "files") for file in (tests / "files").rglob("*")}
    for file in sorted(workspace.rglob("*")):
        hook = file.name in HOOKS or file.suffix in (".pyc", ".pth")
        if hook and file.relative_to(workspace) not in originals:
            file.unlink(missing_ok=True)
    shutil.copytree(tests / "files", workspace, dirs_exist_ok=True)
    wanted = [*expected["fail_to_pass"], *expected["pass_to_pass"]]
    report = read(*_session(wanted, expected["packages"], workspace, expected["timeout_s"]))
    passed = sum(report.outcomes.get(test) == "passed" for test in wanted)
    for line in (*report.faults, *(f"{test}: {report.outcomes.get(test, 'missing')}" for test in wanted)):
        print(line)
    reward = float(passed == len(wanted) and not report.faults)
    result = json.dumps({"reward": reward, "passed": passed, "tests": len(wanted)})
    (logs / "reward.json").write_text(result + "\n", encoding="utf-8")


def _session(wanted: list[str], packages: list[str], workspace: Path, timeout_s: float) -> tuple[bytes, str]:
    """What one runner sent, and the nonce it was given."""
    nonce, runner = secrets.token_hex(16), Path(__file__).with_name("woodshed_runner.py")
    environment = {**os.environ, "PYTHONPATH": "", "WOODSHED_PYTHONPATH": os.environ.get("PYTHONPATH", "")}
    with tempfile.TemporaryFile() as channel:
        request = {"nonce": nonce, "ids": wanted, "packages": packages, "workspace": str(workspace)}
        request["channel"] = channel.fileno()
        child = subprocess.Popen(
            [sys.executable, "-P", "-s", "-B", str(runner)],
            stdin=subprocess.PIPE,
            pass_fds=[channel.fileno()],
            env=environment,
            start_new_session=True,
        )
        with contextlib.suppress(subprocess.TimeoutExpired):
            child.communicate(json.dumps(request).encode(), timeout=timeout_s)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(child.pid, signal.SIGKILL)
        child.wait()
        channel.seek(0)
        return channel.read(), nonce


if __name__ == "__main__":
    grade(*(Path(argument) for argument in sys.argv[1:4]))
