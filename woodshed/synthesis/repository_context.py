"""Shared context of one repository's candidates: settings, texts, maps, and the sandboxes that try them."""

from __future__ import annotations

import contextlib
import hashlib
import json
import math
import re
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

from pydantic import Field

from woodshed.grading.results import NOTHING, SessionRequest, TestRun
from woodshed.grading.session import run_session
from woodshed.pysource import syntax
from woodshed.records import Verdict
from woodshed.sandbox import Sandbox, SandboxProvider, SandboxSettings, SandboxSpec
from woodshed.settings import Settings
from woodshed.synthesis import bytecode, mutation_score
from woodshed.synthesis.baseline import UNNAMEABLE, Baseline
from woodshed.synthesis.coverage_map import Map
from woodshed.synthesis.discovery import Survey
from woodshed.synthesis.instructions import Length
from woodshed.synthesis.mutation_score import MutationScore
from woodshed.synthesis.names import Codebase
from woodshed.synthesis.operators import LEVELS, Symbol

GENERATOR = "woodshed-synthesis-14"
"""Part of every task's provenance; raise when the same input gives other tasks."""
Visibility = Literal["hidden", "half", "shown", "none"]
OperatorName = Literal[
    "remove_branch",
    "bug",
    "unregister",
    "stub",
    "stub_bare",
    "remove",
    "remove_parameter",
    "remove_class",
    "remove_cluster",
    "remove_helpers",
    "gut_class",
    "remove_command",
    "remove_module",
    "combine",
    "remove_package",
    "impossible",
    "write_tests",
    "revert",
]
DERIVED = ("impossible", "write_tests", "revert")
"""Ways to make tasks that are not deletions from a working code base; made where they are asked for."""


class SynthesisSettings(Settings):
    """Settings for making tasks."""

    limit: int = Field(default=0, ge=0)
    """Most tasks per source; 0 makes all that can be made."""
    operators: tuple[OperatorName, ...] = tuple(LEVELS)  # type: ignore[assignment]
    """Kinds of removals (`woodshed.synthesis.operators`), and other ways to make tasks (DERIVED)."""
    levels: tuple[int, ...] = (0, 1, 2, 3, 4, 5, 6)
    """Levels of difficulty, from 0 (one branch) to 6 (a sub-package); see `woodshed.synthesis.operators.LEVELS`."""
    seed: int = Field(default=0, ge=0, lt=1 << 63)
    """Seeds the order in which candidates are tried."""
    jobs: int = Field(default=2, ge=1)
    """Candidates proven at the same time; changes nothing but the time it takes."""
    length: Length = "contextual"
    """Length of the instruction: full, contextual, or terse (200 characters, no file names)."""
    wording_url: str = ""
    """OpenAI-compatible server whose model words the instructions ("http://localhost:8000/v1"); "": templates."""
    wording_model: str = ""
    """Name of that model."""
    visibility: Visibility = "hidden"
    """Fail-to-pass tests that the agent sees: none of them, half, all; or no tests at all ("none")."""
    pass_to_pass: Literal["all", "near"] = "all"
    """Tests that must still pass: all that did, or only those in test files that hold a failing one or that the
    agent's test command runs. Judging is cheaper by as much, and blind to damage elsewhere."""
    max_body_lines: int = Field(default=60, ge=1)
    """Longest body of a function that is taken away, docstring and comments not counted."""
    max_words: int = Field(default=90, ge=1)
    """Longest contextual instruction, per missing definition; the docstring is cut to fit."""
    max_cascade: int = Field(default=4, ge=0)
    """Most other definitions that may have to go together with a removed one."""
    max_lost: float = Field(default=0.5, ge=0, le=1)
    """Largest share of the suite that may be lost; beyond it the function is too central for a task."""
    min_strength: float = Field(default=0.6, ge=0, le=1)
    """Least share of the original code's mutants that the hidden tests must notice."""
    extra_requirements: tuple[str, ...] = ()
    """Requirements of the tests that the repository does not declare, such as "mock"."""
    python: str = ""
    """Version of Python that the repository is built and tested with, such as "3.12"; "" takes Woodshed's own, or the
    newest of this machine that its requires-python admits."""
    setup: str = ""
    """Shell command that prepares the repository for its tests, such as "make proto": run once, in its environment and
    a sandbox without a network. What it writes is part of every task."""
    mapping_timeout_s: float = Field(default=1800.0, gt=0)
    """Seconds for mapping tests to the lines that they touch, and most of them for finding those that judge time. Tests
    that are not mapped by then are left to the proofs; the same command with more seconds goes on with them."""
    timeout_s: float = Field(default=120.0, gt=0)
    """Seconds for one run of a suite, here and when the task's attempts are graded; here half of them on the CPU."""
    pytest_args: tuple[str, ...] = ()
    """Options of every run of pytest, besides those of the repository's own addopts that select tests."""
    deselect: tuple[str, ...] = ()
    """Tests that are left out: ids, or what their ids begin with ("tests/test_web.py::TestLogin")."""
    env: tuple[str, ...] = ()
    """Environment variables of the code and its tests: "NAME=VALUE", or "NAME" for the value of whoever runs the tests,
    which no task holds."""
    sandbox: SandboxSettings = SandboxSettings()
    """Where the repository's code runs."""

    @property
    def fingerprint(self) -> str:
        """Fingerprint of every setting that changes a task; not of those that only decide number and order."""
        order = {"limit", "jobs", "operators", "levels", "seed", "mapping_timeout_s", "sandbox"}
        chosen = self.model_dump(mode="json", exclude=order)
        return hashlib.sha256(json.dumps(chosen, sort_keys=True).encode()).hexdigest()[:8]


CONFTEST_ERROR = re.compile(r"Error while loading conftest '([^'\n]*)'")
"""What pytest prints where it ends before any test: a conftest imports what was removed."""
PASSING = ("timeout", "sandbox_lost", "not_believable")
"""Reasons that another moment or machine may not have; such a candidate is tried again, in up to MAX_TRIES runs."""
MAX_TRIES = 3
CUT_SHORT = ("ended by its limits", "no start record", "no end record")
"""Faults of a run that did not come to its end."""
DELETE = """for path; do
    folder=$(dirname -- "$path"); kept="$folder/__pycache__"
    rm -f -- "$path" "$kept/$(basename -- "$path" .py)".*.pyc
    rmdir -p --ignore-fail-on-non-empty -- "$kept" "$folder" 2>/dev/null
done"""
LONGEST_NAME = 200
"""Characters of a task's folder: tools add their own to it."""
CPU_SHARE = 0.5
"""Of `timeout_s`: so much CPU is too much however busy the machine is."""
FIT = 0.4
"""Of `timeout_s`: so much all tests of a run may take, beside what it takes to start and import."""


class Rejected(Exception):  # an answer, not an error
    """A candidate that is not a task: one reason code, and what was seen."""

    def __init__(self, reason: str, detail: str = "") -> None:
        super().__init__(reason)
        self.reason, self.detail = reason, detail[:500]

    @property
    def is_final(self) -> bool:
        """True if another try would end the same way."""
        return self.reason not in PASSING


def complain_of_the_machine(verdict: Verdict) -> None:
    """Raise if a run with the original code does not finish: that is not the candidate's doing.

    Raises:
        Rejected: timeout, not_believable.
    """
    if any(fault.startswith(CUT_SHORT[0]) and "timeout" in fault for fault in verdict.integrity):
        raise Rejected("timeout", verdict.integrity[0])
    if verdict.status == "invalid" or any(fault.startswith(CUT_SHORT) for fault in verdict.integrity):
        raise Rejected("not_believable", "; ".join(verdict.integrity) or verdict.detail)


@dataclass(frozen=True)
class Candidate:
    """One operator on one symbol."""

    name: str
    """Folder name of the task it may become."""
    operator: str
    symbol: Symbol
    tests: int = 0
    """Set of the stable tests that run its code; 0 where that is not known."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "name", folder_name(self.name))


def folder_name(text: str) -> str:
    """The text as a folder may be called; where that is another or a cut one, its hash tells it from its like."""
    plain = re.sub(r"[^A-Za-z0-9_.-]+|[.]{2,}", "-", text)
    if plain == text and len(text) <= LONGEST_NAME:
        return text
    return f"{plain[: LONGEST_NAME - 7]}-{hashlib.sha256(text.encode()).hexdigest()[:6]}"


@dataclass(frozen=True)
class RepositoryContext:
    """Everything that the candidates of one repository share."""

    baseline: Baseline
    map: Map
    copies: Mapping[tuple[str, str], str]
    code: Codebase
    """The .py files of the packages."""
    interfaces: Codebase
    """The .pyi files."""
    tests: Mapping[str, str]
    """Test files that can be read, by path."""
    unread: Mapping[str, str]
    """Files of the package and the tests that no operator touches, as this Python does not read them, and why."""
    staging: Path
    """Folder of tasks until they are proven."""
    settings: SynthesisSettings
    _strengths: dict[tuple[object, ...], MutationScore] = field(default_factory=dict)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    @property
    def provenance(self) -> dict[str, Any]:
        """Origin of every task of this repository."""
        repository = self.baseline.repository
        return {
            "source": repository.source,
            "sha256": repository.sha256,
            "licence": repository.licence,
            "generator": GENERATOR,
            "seed": self.settings.seed,
            "settings": self.settings.fingerprint,
        }

    @cached_property
    def sandboxes(self) -> SandboxProvider:
        return self.settings.sandbox.create()

    @cached_property
    def survey(self) -> Survey:
        settings = self.settings
        words = frozenset(word for text in self.tests.values() for word in re.findall(r"\w+", text))
        return Survey(self.code, self.map, settings.max_lost, settings.max_body_lines, words)

    def spec(self) -> SandboxSpec:
        """A sandbox of the untouched repository, with its bytecode; made by the first that asks."""
        with self._lock:
            layer = self.staging / ".bytecode"
            if not layer.exists():
                tree = self.baseline.repository.tree
                bytecode.kept(self.baseline.spec, tree, layer, self.settings.timeout_s, self.sandboxes)
        spec = self.baseline.spec
        return replace(spec, lowers=(*spec.lowers, layer))

    def strength(self, function: Symbol, tests: Sequence[str]) -> MutationScore:
        """Sensitivity of some of the tests that cover a function; measured once."""
        key = (*function.binding, *tests)
        with self._lock:
            known = self._strengths.get(key)
        if known is None:
            known = mutation_score.measure(
                self.spec(),
                self.code,
                function,
                tests,
                self.settings.timeout_s,
                self.sandboxes,
                self.baseline.environment.pytest_options,
            )
            with self._lock:
                self._strengths[key] = known
        return known

    @contextlib.contextmanager
    def opened(self, files: Mapping[str, str | None]) -> Iterator[Sandbox]:
        """A fresh sandbox of the repository with some files changed (None: deleted)."""
        with self.sandboxes.open(self.spec()) as sandbox:
            lay(sandbox, files)
            yield sandbox

    def run(self, sandbox: Sandbox, ids: Iterable[str], hash_seed: int = 0) -> TestRun:
        """Some tests, in a run that can be believed.

        Raises:
            Rejected: too_slow, timeout, conftest_broken, not_believable.
        """
        run = self.session(sandbox, ids, hash_seed)
        if run.out_of_cpu:
            raise Rejected("too_slow", f"tests used more than {self.cpu_s} s of CPU")
        if run.timed_out:
            raise Rejected("timeout", f"tests ran longer than {self.settings.timeout_s:.0f} s")
        is_empty = NOTHING in run.collection_errors
        if (run.integrity or is_empty) and (conftest := CONFTEST_ERROR.search(run.log)):
            raise Rejected("conftest_broken", conftest[1])
        if run.integrity:
            raise Rejected("not_believable", "; ".join(run.integrity))
        if is_empty:
            raise Rejected("not_believable", run.collection_errors[NOTHING])
        return run

    def session(
        self,
        sandbox: Sandbox,
        ids: Iterable[str],
        hash_seed: int = 0,
        sources: Mapping[str, bytes] | None = None,
    ) -> TestRun:
        """Some tests, as far as they came; `sources` are read in place of test files on disk."""
        environment = self.baseline.environment
        request = SessionRequest(
            list(ids), environment.packages, sources=sources or {}, options=environment.pytest_options
        )
        timeout_s, cpu_s = self.settings.timeout_s, self.cpu_s
        return run_session(sandbox, request, timeout_s=timeout_s, cpu_s=cpu_s, hash_seed=hash_seed)

    @property
    def fits(self) -> bool:
        """True if all tests can run in one session."""
        seconds = self.baseline.durations
        return sum(seconds.get(test, 0.0) for test in self.baseline.stable) <= FIT * self.settings.timeout_s

    @property
    def cpu_s(self) -> int:
        """CPU seconds that one run of tests may use."""
        return math.ceil(CPU_SHARE * self.settings.timeout_s)


def lay(sandbox: Sandbox, files: Mapping[str, str | None]) -> None:
    """Write files into a sandbox of the repository (None: delete). Their bytecode and emptied folders go too, as a task
    has neither, and a folder that stays can be imported as a namespace package."""
    for path, text in files.items():
        if text is not None:
            sandbox.write(path, syntax.write(path, text))
    if gone := [path for path, text in files.items() if text is None]:
        sandbox.exec(["sh", "-c", DELETE, "delete", *gone])


@dataclass(frozen=True)
class RepositoryMeasurements:
    """Measurements of a repository before anything is removed."""

    baseline: Baseline
    map: Map
    copies: Mapping[tuple[str, str], str]
    """Functions that also stand in libraries, as `leaks.copies` found them."""
    log: Path | None = None
    """Place of the log of its tests, without the ending."""

    @property
    def is_whole(self) -> bool:
        """True if time reached every test."""
        return not self.map.unmapped and not self.baseline.unmeasured


def read_context(
    measured: RepositoryMeasurements, staging: Path, settings: SynthesisSettings
) -> RepositoryContext:
    """Read the repository's files; unreadable ones are left alone by every operator, and named."""
    baseline = measured.baseline
    unread = dict(baseline.repository.left_out)
    roots = baseline.environment.source_roots
    code = Codebase(texts(baseline, baseline.package_files, ".py", unread), roots)
    interfaces = Codebase(texts(baseline, baseline.package_files, ".pyi", unread), roots)
    tests = texts(baseline, baseline.test_files, ".py", unread)
    for path in filter(UNNAMEABLE.search, baseline.test_files):
        unread.setdefault(
            path, "pytest cannot be asked to run a file of this name, so its tests are not used"
        )
    return RepositoryContext(
        baseline, measured.map, measured.copies, code, interfaces, tests, unread, staging, settings
    )


def texts(
    baseline: Baseline, paths: Iterable[str], suffix: str, unread: dict[str, str] | None = None
) -> dict[str, str]:
    """Files with that ending, path to text; `unread` is told of those that are no Python, and why."""
    known, refused = {}, {} if unread is None else unread
    for path in (path for path in paths if path.endswith(suffix)):
        try:
            text = syntax.decode((baseline.repository.tree / path).read_bytes())
            syntax.parse(text)
            known[path] = text
        except syntax.UnreadableError as error:
            refused[path] = str(error)
        except SyntaxError as error:
            refused[path] = f"line {error.lineno}: {error.msg}"
        except (ValueError, RecursionError, MemoryError) as error:
            refused[path] = str(error)
    return known
