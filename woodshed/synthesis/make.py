"""Tasks from repositories: candidates in a seeded order, each proven, the first `limit` of every source kept.

The order in which candidates are decided is fixed, however many workers there are; so the same seed and input give the
same folders, and a run that was stopped goes on where it was. Combinations come last: they are made of what was proven.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import tempfile
import time
from collections import Counter, deque
from collections.abc import Callable, Generator, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from woodshed.records import SandboxError, Task, TaskError
from woodshed.runs.files import write_atomically
from woodshed.synthesis import git_sources, leaks, selection, sources
from woodshed.synthesis.candidates import COMBINED_SHARE, candidates, combinations, derivations
from woodshed.synthesis.history import Commit, commits, revert
from woodshed.synthesis.impossible import contradict
from woodshed.synthesis.measuring import measured_once
from woodshed.synthesis.members import members, source_of
from woodshed.synthesis.operators import Symbol
from woodshed.synthesis.progress import Phases, Progress
from woodshed.synthesis.proof import prove, prove_revert
from woodshed.synthesis.reports import notes
from woodshed.synthesis.repository_context import (
    GENERATOR,
    MAX_TRIES,
    Candidate,
    Rejected,
    RepositoryContext,
    SynthesisSettings,
    folder_name,
    read_context,
)
from woodshed.synthesis.siblings import Origin
from woodshed.synthesis.stats import UNREAD, rejected
from woodshed.synthesis.test_writing import write_tests
from woodshed.tasks import environment, folder

CANDIDATE_S, SUITES_EACH = 15.0, 4.0
"""Seconds of a task before the first one says it better, and so many runs of its suite on top."""
FIRST_ROUND_S = 240.0
"""Tasks are made after so long of running a suite, and so long of mapping it, and then of what is known later."""
AHEAD = 4
"""Candidates of a job that are worked on beside the one that is due."""
MAX_COMMITS = 50
"""Commits that are tried where no limit is given."""


@dataclass
class MakeReport:
    """Outcome of making tasks."""

    accepted: list[Task] = field(default_factory=list)
    """Tasks in the folder, those of earlier runs included, in the order they were decided."""
    rejected: Counter[str] = field(default_factory=Counter)
    """Number of candidates by reason code."""
    files: dict[str, str] = field(default_factory=dict)
    """Files that no task can be made of or shown with, and why."""
    tried: int = 0
    """Candidates decided by this run."""
    seconds: float = 0.0
    """Time that deciding them took; fetching and the baseline are not in it."""
    notes: list[str] = field(default_factory=list)
    """Tests that were left out of every task, or not mapped, and why."""
    decided: set[str] = field(default_factory=set)
    """Names of candidates that are tasks or rejected."""


def make(
    repositories: Sequence[str],
    out: Path,
    settings: SynthesisSettings | None = None,
    progress: Progress = lambda done, total, text: None,
) -> MakeReport:
    """Make tasks of every source, a folder per task in `out`; rejected candidates are in out/rejections.jsonl.

    Raises:
        TaskError: a source that cannot be used, or an `out` that holds tasks made from something else.
    """
    settings = settings or SynthesisSettings()
    selection.refuse(settings.pytest_args)
    _allow_variables(settings.env)
    report, phases = MakeReport(), Phases(progress)
    folder.refuse_run(out)
    with folder.claimed(out), phases.repeated():
        for source in repositories:
            if "revert" in settings.operators:
                _make_reverts(source, out, settings, report, phases)
            if settings.operators == ("revert",):
                continue
            with tempfile.TemporaryDirectory(prefix=".make-", dir=out) as scratch:
                for phase in ("suite", "map"):
                    phases.bound(phase, min(FIRST_ROUND_S, settings.mapping_timeout_s))
                repository = _fetched(source, Path(scratch, "tree"), settings, phases)
                if places := members(repository.tree):
                    _make_members(source, places, out, settings, report, phases)
                else:
                    _make_in_rounds(repository, out, settings, report, phases)
    return report


def _fetched(source: str, tree: Path, settings: SynthesisSettings, phases: Phases) -> sources.Repository:
    phases.named("fetch")(0, 0, f"fetching {git_sources.without_secrets(source)}")
    repository = sources.fetch(source, tree, settings.sandbox.create(), settings.python)
    return replace(repository, setup=settings.setup)


def _make_members(
    source: str,
    places: Sequence[str],
    out: Path,
    settings: SynthesisSettings,
    report: MakeReport,
    phases: Phases,
) -> None:
    """Tasks of the members of a repository, each with its share of the limit. One that cannot be used is noted.

    Raises:
        TaskError: none can be used; all reasons are in it.
    """
    before, failed = len(report.accepted), list[str]()
    last_names = Counter(place.rpartition("/")[2] for place in places)
    for number, place in enumerate(places):
        left = settings.limit and settings.limit - (len(report.accepted) - before)
        if settings.limit and not left:
            break
        share = settings.model_copy(update={"limit": -(-left // (len(places) - number))})
        with tempfile.TemporaryDirectory(prefix=".make-", dir=out) as scratch:
            try:
                repository = _fetched(source_of(source, place), Path(scratch, "tree"), share, phases)
                if last_names[place.rpartition("/")[2]] > 1:
                    repository = replace(repository, name=sources.plain_name(place))
                _make_in_rounds(repository, out, share, report, phases)
            except TaskError as error:
                failed.append(f"{place}: no tasks: {error}")
    if len(failed) == len(places):
        raise TaskError("\n".join(failed))
    report.notes += failed


def _make_in_rounds(
    repository: sources.Repository, out: Path, settings: SynthesisSettings, report: MakeReport, phases: Phases
) -> None:
    """Tasks of a repository, the first of them as soon as some of a long suite is known."""
    before, measured, missing = len(report.accepted), None, 0
    for seconds in rounds(settings.mapping_timeout_s):
        left = settings.limit and settings.limit - (len(report.accepted) - before)
        chosen = settings.model_copy(update={"mapping_timeout_s": seconds, "limit": left})
        measured = measured_once(repository, out, chosen, phases)
        staging = Path(tempfile.mkdtemp(dir=repository.tree.parent))
        missing = _make_from(read_context(measured, staging, chosen), out, report, phases)
        shutil.rmtree(staging)
        if measured.is_whole or (settings.limit and not missing):
            break
    report.notes += notes(measured) if measured else []
    if missing:
        report.notes.append(f"{repository.name}: {missing} fewer than --limit, no candidate is left")


def rounds(total_s: float) -> Iterator[float]:
    """Seconds for the suite, and for its map, of every round: each has twice as many, the last one what is left."""
    seconds = FIRST_ROUND_S
    while total_s > 2 * seconds:
        yield seconds
        total_s, seconds = total_s - seconds, 2 * seconds
    yield total_s


def _allow_variables(entries: Sequence[str]) -> None:
    """Note that tasks may read these variables here.

    Raises:
        TaskError: one that cannot be given to tests, or has no value.
    """
    for entry in entries:
        name, has_value, _ = entry.partition("=")
        if not re.fullmatch(environment.VARIABLE, entry):
            raise TaskError(
                f"--env {name}: cannot be given to tests; expected a name of letters, digits and underscores that "
                "steers neither Python, pytest, the loader nor the sandbox"
            )
        if not has_value and name not in os.environ:
            raise TaskError(f"--env {name}: not set here. export {name}=VALUE, or give --env {name}=VALUE")
        if not has_value:
            environment.allow_variable(name)


# ---- decisions --------------------------------------------------------------------------------------------


def _make_from(work: RepositoryContext, out: Path, report: MakeReport, phases: Phases) -> int:
    """Decide candidates; return how many tasks are missing to the limit."""
    earlier = _earlier_rejections(out, work)
    began, limit = time.monotonic(), work.settings.limit
    _name_unread(work, out, earlier, report)
    singly = [candidate for candidate in candidates(work) if candidate.name not in report.decided]
    suite_s = sum(work.baseline.durations.values())
    phases.expect(
        "tasks", (limit or len(singly)) * (CANDIDATE_S + SUITES_EACH * suite_s) / work.settings.jobs
    )
    progress = phases.named("tasks")
    first = limit - limit // COMBINED_SHARE if "combine" in work.settings.operators else limit
    before, goal = len(report.accepted), first

    def missing() -> int:
        return goal - len(report.accepted) + before if limit else len(singly)

    with contextlib.closing(decide(work, singly, out, earlier, missing)) as singles:
        kept = _take(
            work, singles, len(singly), out, earlier, report, _named(progress, "making tasks"), first
        )
        total = limit or len(kept) + max(1, len(kept) // COMBINED_SHARE)
        pairs = combinations(work, kept) if len(kept) < total else []
        goal = total
        with contextlib.closing(decide(work, pairs, out, earlier, missing)) as paired:
            combining = _named(progress, "combining tasks")
            rest = total - len(kept)
            taken = _take(work, paired, len(pairs), out, earlier, report, combining, rest) if pairs else []
        if limit and len(kept) + len(taken) < limit:  # too few pairs: more of the others
            rest = limit - len(kept) - len(taken)
            going_on = _named(progress, "making more tasks")
            kept += _take(work, singles, len(singly), out, earlier, report, going_on, rest)
        progress(0, 0, f"ending what is begun of {work.baseline.repository.name}")
    for kind in ("impossible", "write_tests"):
        wanted = [c for c in derivations(work, kept) if c.operator == kind]
        with contextlib.closing(decide(work, wanted, out, earlier)) as derived:
            deriving = _named(progress, f"making {kind} tasks")
            _take(work, derived, len(wanted), out, earlier, report, deriving, limit)
    phases.expect("tasks", 0)
    report.seconds += time.monotonic() - began
    return max(limit - len(kept) - len(taken), 0) if limit else 0


def _named(progress: Progress, phase: str) -> Progress:
    """The same progress under the name of a phase."""
    return lambda done, total, text: progress(done, total, f"{phase} {text}")


def _take(
    work: RepositoryContext,
    decided: Iterator[tuple[Candidate, Task | Rejected]],
    count: int,
    out: Path,
    earlier: dict[str, Rejected],
    report: MakeReport,
    progress: Progress,
    limit: int,
) -> list[Candidate]:
    """Take decisions (`count` of them at most) until `limit` are tasks (0: all of them); return those that are."""
    kept: list[Candidate] = []
    progress(0, limit or count, f"of {work.baseline.repository.name}")
    for position, (candidate, result) in enumerate(decided, start=1):
        home = out / candidate.name
        report.decided.add(candidate.name)
        if isinstance(result, Task):
            report.tried += result.folder != home
            if result.folder != home:
                result.folder.rename(home)
            report.accepted.append(replace(result, folder=home))
            kept.append(candidate)
        else:
            report.tried += candidate.name not in earlier
            if candidate.name not in earlier:
                _log(out, work, candidate, result)
            report.rejected[result.reason] += 1
        done, total = (len(kept), limit) if limit else (position, count)
        name = work.baseline.repository.name
        progress(done, total, f"of {name}, {len(kept)} tasks from {position} candidates")
        if limit and len(kept) == limit:
            break
    return kept


def decide(
    work: RepositoryContext,
    chosen: list[Candidate],
    out: Path,
    earlier: dict[str, Rejected],
    missing: Callable[[], int] | None = None,
) -> Generator[tuple[Candidate, Task | Rejected], None, None]:
    """Every candidate with its outcome, in order; up to AHEAD a job are worked on beside the one that is due, which may
    take a minute while others take seconds.

    Not more than twice as many as are `missing`: about so many are needed, and what is worked on when the limit is
    reached is given up.
    """
    most = AHEAD * work.settings.jobs
    pool = ThreadPoolExecutor(work.settings.jobs)
    waiting: deque[tuple[Candidate, Future[Task | Rejected]]] = deque()
    remaining = iter(chosen)
    try:
        while True:
            ahead = most if missing is None else max(1, min(most, 2 * missing()))
            while len(waiting) < ahead and (candidate := next(remaining, None)) is not None:
                waiting.append((candidate, pool.submit(_decide_one, work, candidate, out, earlier)))
            if not waiting:
                return
            candidate, future = waiting.popleft()
            yield candidate, future.result()
    finally:
        pool.shutdown(wait=True, cancel_futures=True)


def _decide_one(
    work: RepositoryContext, candidate: Candidate, out: Path, earlier: dict[str, Rejected]
) -> Task | Rejected:
    if candidate.name in earlier:
        return earlier[candidate.name]
    if (out / candidate.name).exists():
        return _earlier_task(work, out / candidate.name)
    return _settled(work, candidate, lambda: _proven(work, candidate, out))


def _proven(work: RepositoryContext, candidate: Candidate, out: Path) -> Task:
    if candidate.operator == "impossible":
        parent = folder.load(out / candidate.symbol.detail)
        return _without_leak(work, contradict(parent, work.staging / candidate.name, work.sandboxes))
    if candidate.operator == "write_tests":
        return _without_leak(work, write_tests(work, candidate.symbol, candidate.name))
    return _without_leak(work, prove(work, candidate))


def _settled(work: RepositoryContext, candidate: Candidate, decide_it: Callable[[], Task]) -> Task | Rejected:
    """The decision. A failure of the machine is a temporary rejection; a lost sandbox is tried twice before.

    Raises:
        SandboxError: not even the untouched repository has a sandbox.
    """
    for tries_left in (1, 0):
        try:
            return decide_it()
        except Rejected as rejection:
            return rejection
        except TimeoutError as error:
            return Rejected("timeout", str(error))
        except SandboxError as error:
            for leftover in (candidate.name, f".{candidate.name}"):
                shutil.rmtree(work.staging / leftover, ignore_errors=True)
            if not tries_left:
                with work.opened({}):
                    return Rejected("sandbox_lost", str(error))
    raise AssertionError


def _without_leak(work: RepositoryContext, task: Task) -> Task:
    """The gate for tasks of every kind.

    Raises:
        Rejected: leak.
    """
    if leak := leaks.first_leak(task, work.sandboxes):
        shutil.rmtree(task.folder)
        raise Rejected("leak", leak)
    return task


def _make_reverts(
    source: str, out: Path, settings: SynthesisSettings, report: MakeReport, phases: Phases
) -> None:
    """The newest commits that changed code and tests, each taken back in the tree that it made."""
    progress = phases.named("commits")
    with tempfile.TemporaryDirectory(prefix=".make-", dir=out) as scratch:
        history = Path(scratch, "history")
        git = git_sources.read(source)
        if git is None or git.subdirectory:
            raise TaskError(f"commits are reverted of whole git sources; write {git_sources.FORMS}")
        git_sources.clone(git, history)
        address = git_sources.without_secrets(git.address)
        for number, commit in enumerate(commits(history, git.revision, settings.limit or MAX_COMMITS)):
            if commit.problem:
                progress(0, 0, f"commit {commit.sha[:10]} cannot be used: {commit.problem}")
                continue
            tree = Path(scratch, f"tree-{number}")
            repository = _fetched(f"git+file://{history}@{commit.sha}", tree, settings, phases)
            repository = replace(
                repository,
                name=sources.plain_name(git.name),
                source=f"git+{address}@{commit.sha}",
                origin=Origin(tree, tree, is_ours=git.address.startswith("file:")),
            )
            staging = Path(scratch, f"staging-{number}")
            staging.mkdir()
            try:
                work = read_context(measured_once(repository, out, settings, phases), staging, settings)
            except TaskError as error:
                progress(0, 0, f"commit {commit.sha[:10]} cannot be used: {error}".partition("\n")[0])
                continue
            _revert_one(work, commit, out, report)


def _revert_one(work: RepositoryContext, commit: Commit, out: Path, report: MakeReport) -> None:
    earlier = _earlier_rejections(out, work)
    symbol = Symbol("", commit.sha[:10], "", "", "", 0, (1, 1), "commit", commit.subject)
    candidate = Candidate(f"{work.baseline.repository.name}-revert-{commit.sha[:10]}", "revert", symbol)
    home = out / candidate.name
    if home.exists():
        report.accepted.append(_earlier_task(work, home))
        return
    if candidate.name in earlier:
        report.rejected[earlier[candidate.name].reason] += 1
        return
    report.tried += 1

    def reverted() -> Task:
        try:
            deletion = revert(work.code, commit)
        except TaskError as error:
            raise Rejected("no_package_file", str(error)) from None
        return _without_leak(work, prove_revert(work, replace(candidate, symbol=deletion.symbol), deletion))

    result = _settled(work, candidate, reverted)
    if isinstance(result, Rejected):
        _log(out, work, candidate, result)
        report.rejected[result.reason] += 1
        return
    result.folder.rename(home)
    report.accepted.append(replace(result, folder=home))


def _earlier_task(work: RepositoryContext, path: Path) -> Task:
    task = folder.load(path)
    now = {
        "sha256": work.baseline.repository.sha256,
        "generator": GENERATOR,
        "seed": work.settings.seed,
        "settings": work.settings.fingerprint,
    }
    for key, value in now.items():
        if task.provenance.get(key) != value:
            before = task.provenance.get(key)
            raise TaskError(
                f"{path} was made with {key} {before!r}, not {value!r}; use another folder for --out"
            )
    return task


def _earlier_rejections(out: Path, work: RepositoryContext) -> dict[str, Rejected]:
    """Final rejections that earlier runs with the same input wrote down; a torn last line is dropped.

    One that may pass is final once MAX_TRIES runs have written it.
    """
    log = out / "rejections.jsonl"
    if not log.is_file():
        return {}
    whole, _, torn = log.read_text(encoding="utf-8", errors="replace").rpartition("\n")
    if torn:
        write_atomically(log, f"{whole}\n" if whole else "")
    rejections: dict[str, Rejected] = {}
    tries: Counter[str] = Counter()
    for entry in rejected(log):
        ours = (work.baseline.repository.sha256, work.settings.seed, GENERATOR, work.settings.fingerprint)
        if tuple(map(entry.get, ("sha256", "seed", "generator", "settings"))) == ours:
            tries[entry["task"]] += 1
            rejections[entry["task"]] = Rejected(entry["reason"], str(entry.get("detail", "")))
    return {name: why for name, why in rejections.items() if why.is_final or tries[name] >= MAX_TRIES}


def _name_unread(
    work: RepositoryContext, out: Path, earlier: dict[str, Rejected], report: MakeReport
) -> None:
    """Files that no operator can touch: each is in the log and in the report, with the reason."""
    for path, why in sorted(work.unread.items()):
        symbol = Symbol(path, "", "", "", "", 0, (1, 1), "file")
        name = folder_name(f"{work.baseline.repository.name}-file-{path}")
        if name not in earlier:
            _log(out, work, Candidate(name, "", symbol), Rejected(UNREAD, f"{path}: {why}"))
        report.files[path] = why


def _log(out: Path, work: RepositoryContext, candidate: Candidate, rejection: Rejected) -> None:
    entry: dict[str, Any] = {
        "task": candidate.name,
        "reason": rejection.reason,
        "detail": rejection.detail,
        "operator": candidate.operator,
        "path": candidate.symbol.path,
        "symbol": candidate.symbol.name,
        "sha256": work.baseline.repository.sha256,
        "seed": work.settings.seed,
        "generator": GENERATOR,
        "settings": work.settings.fingerprint,
    }
    with (out / "rejections.jsonl").open("a", encoding="utf-8") as log:
        log.write(json.dumps(entry) + "\n")
