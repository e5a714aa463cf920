"""Requests to `runner`, and what can be believed of its answers. Standard library only.

Both sides of the process that runs the tests know only this form: the verifier with its sandboxes, and the grader that
a task folder ships.
"""

from __future__ import annotations

import dataclasses
import io
import json
import random
import secrets
import string
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, cast

from woodshed.records import Outcome

SENTINELS = ("test_sentinel_assertion", "test_sentinel_exception", "test_sentinel_expectation")
"""Tests of the runner's own that must fail in every believable run."""
NOTHING = ""
"""Path of the collection error of a session that ended before any test, such as by a conftest without its imports."""
MOST_FOREIGN = 1000
SHAPES: dict[str, dict[str, type | tuple[type, ...]]] = {
    "start": {},
    "test": {"id": str, "outcome": str, "seconds": (int, float), "message": str},
    "sentinel": {"name": str, "outcome": str},
    "collection": {"path": str, "message": str},
    "end": {"count": int, "workspace": str, "packages": dict, "patched": list},
}
"""Fields that each kind of record holds at least."""


Kind = Literal["ordinary", "isolated", "again"]
"""Surroundings of a session. "isolated": the packages are in another process than the tests (`process_isolation`), and
all that this process sees is as for a command of an agent: a condition that is false there is false here, whatever else
it names. "ordinary": everything is otherwise than for an agent. "again": as "ordinary", with an agent's surroundings,
and other names, places and order."""
FOLDERS: dict[Kind, str] = {"ordinary": "/run", "isolated": "/opt", "again": "/srv"}
"""Folder of the programs of each kind of session."""
FLAGS: dict[Kind, tuple[str, ...]] = {
    "ordinary": (),
    "isolated": ("-P", "-s", "-B"),
    "again": (),
}
"""Options of Python. An ordinary session writes bytecode of the code under test, and none of tests."""
HASH_SEEDS: dict[Kind, int] = {"ordinary": 1, "isolated": 0, "again": 0}
ENVIRONMENTS: dict[Kind, dict[str, str]] = {
    "ordinary": {"LOGNAME": "grader", "TZ": "UTC0"},
    "isolated": {"USER": "agent"},
    "again": {"USER": "agent"},
}
"""Variables of each kind of session, on top of the sandbox's."""
UNSET: dict[Kind, tuple[str, ...]] = {
    "ordinary": ("PYTHONDONTWRITEBYTECODE",),
    "isolated": (),
    "again": (),
}
"""Variables of the sandbox that a session lacks; an empty one would still be seen in /proc/self/environ."""


@dataclass(frozen=True)
class Programs:
    """Names of the programs of a session, where the code under test may look."""

    folder: str = "/run/woodshed"
    runner: str = "woodshed_runner"
    hardening: str = "woodshed_assert_hardening"
    isolation: str = "woodshed_process_isolation"
    python_path: str = "WOODSHED_PYTHONPATH"
    """Variable that holds PYTHONPATH while the runner starts."""

    def files(self) -> dict[str, str]:
        """Name in the folder to the file or folder of `grading` that it is."""
        return {
            f"{self.runner}.py": "runner.py",
            f"{self.hardening}.py": "assert_hardening.py",
            f"{self.hardening}_values.py": "assert_hardening_values.py",
            self.isolation: "process_isolation",
        }


def drawn(kind: Kind) -> Programs:
    """Names that say nothing, so that no code is right only where it finds them."""
    rng = random.SystemRandom()

    def name(letters: str = string.ascii_lowercase) -> str:
        return "".join(rng.choices(letters, k=rng.randint(6, 9))) + rng.choice(string.digits)

    return Programs(f"{FOLDERS[kind]}/{name()}", name(), name(), name(), name(string.ascii_uppercase))


@dataclass(frozen=True)
class SessionRequest:
    """One session of pytest, as the runner is asked for it."""

    ids: Sequence[str] | None
    """pytest node ids; None for the whole suite, as the project's own configuration finds it."""
    packages: Sequence[str]
    """Import names that must come from the workspace."""
    patched: Mapping[str, Sequence[int]] = field(default_factory=dict)
    """Numbers of the lines that a patch brought, by path; comparisons that they define are doubted."""
    sources: Mapping[str, bytes] = field(default_factory=dict)
    """Test files, by path, that are not what they are on disk."""
    compiled: Mapping[str, Sequence[object]] = field(default_factory=dict)
    """Test files, by path, as `compiled.compiled_tests` made them."""
    kind: Kind = "ordinary"
    own: Sequence[str] = ()
    """Python files of the tests and their helpers, by path: where tests are isolated, all that they import from the
    workspace themselves."""
    programs: Programs = Programs()
    options: Sequence[str] = ()
    """Options of pytest, as the task's environment has them."""

    def encoded(self, nonce: str, workspace: str, **more: object) -> bytes:
        """The request as the runner reads it from stdin."""
        told: dict[str, object] = {
            "nonce": nonce,
            "workspace": workspace,
            "ids": None if self.ids is None else list(self.ids),
            "packages": list(self.packages),
            "patched": {path: list(lines) for path, lines in self.patched.items()},
            "sources": {path: data.decode("latin-1") for path, data in self.sources.items()},
            "compiled": dict(self.compiled),
            "own": list(self.own),
            "options": list(self.options),
            "kind": self.kind,
            "programs": dataclasses.asdict(self.programs),
        }
        return json.dumps({**told, **more}).encode()


@dataclass(frozen=True)
class TestRun:
    """One session of pytest, and what can be believed of it."""

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


@dataclass(frozen=True)
class Report:
    """The records that arrived through the channel."""

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
    end, tests = kinds["end"][0], kinds["test"]
    count = len(tests)
    if len(kinds["end"]) > 1 or end["count"] != count:
        faults.append(f"{count} results arrived, the end record counts {end['count']}")
    failed = {sentinel["name"] for sentinel in kinds["sentinel"] if sentinel["outcome"] == "failed"}
    ended_early = any(record["path"] == NOTHING for record in kinds["collection"])
    is_empty = ended_early and not tests and not kinds["sentinel"]  # so nothing passed that could be doubted
    if not is_empty and (failed != set(SENTINELS) or len(kinds["sentinel"]) != len(SENTINELS)):
        faults.append(f"tests that must fail did not: {', '.join(sorted(set(SENTINELS) - failed))}")
    if end["patched"]:
        faults.append(f"changed while the tests ran: {', '.join(map(str, end['patched'][:5]))}")
    files = {package: str(file) for package, file in end["packages"].items() if file}
    outside = {p: file for p, file in files.items() if not file.startswith(end["workspace"] + "/")}
    return faults + [
        f"{p} was imported from {file[:300]}, outside the workspace" for p, file in outside.items()
    ]


def test_run(
    report: Report,
    ids: Sequence[str] | None,
    *,
    ended: str,
    seconds: float,
    log: str,
    out_of_cpu: bool = False,
) -> TestRun:
    """The session that a report is of.

    Args:
        ids: tests that were asked for; one without a result is missing.
        ended: "timeout", "oom" or "limit" where the session was ended by its limits.
    """
    faults = report.faults
    if ended in ("timeout", "oom", "limit"):
        faults = (f"ended by its limits after {seconds:.1f} s: {ended}", *faults)
    wanted = report.outcomes if ids is None else {test: report.outcomes.get(test, "missing") for test in ids}
    return TestRun(
        outcomes=cast("dict[str, Outcome]", dict(wanted)),
        durations=report.durations,
        messages=report.messages,
        collection_errors=report.collection_errors,
        package_files=report.package_files,
        integrity=faults,
        started=report.started,
        timed_out=ended == "timeout",
        seconds=seconds,
        log=log,
        out_of_cpu=out_of_cpu,
    )


test_run.__test__ = False  # not a test  # type: ignore[attr-defined]
