"""Tests of a patch, and the verdict on it.

A patch is judged where it was never run before: a fresh sandbox of the task's workspace, then the files of the patch
that may cross over, then the original tests and configuration on top. The text of the fail-to-pass tests is only in the
memory of the session that runs them. Four things must hold for a reward: the run can be believed (`results`), the
tests on disk were until the end what they were at the start, every expected test passed, and whatever could be called
before still can be (`interface`).
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
import re
import secrets
import signal
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, as_completed
from contextvars import ContextVar
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, cast

from pydantic import Field

from woodshed.boundary import contained
from woodshed.grading import api_compat, results
from woodshed.grading.compiled import compiled_tests
from woodshed.pysource import syntax
from woodshed.records import (
    Environment,
    Group,
    Outcome,
    Patch,
    Rollout,
    SandboxError,
    Task,
    TaskError,
    Verdict,
)
from woodshed.runs.files import write_atomically
from woodshed.sandbox import Sandbox, SandboxSpec, open_sandbox, store
from woodshed.settings import Settings
from woodshed.tasks import environment, folder

INSIDE = {
    "runner.py": "/run/woodshed/woodshed_runner.py",
    "assert_hardening.py": "/run/woodshed/woodshed_assert_hardening.py",
}
INSIDE["process_isolation.py"] = "/run/woodshed/woodshed_process_isolation.py"
"""Files of this room and where a sandbox shows them."""
MAX_PATCH_CHARS = 4_000_000
MAX_PATCH_FILES = 1000
MOST_NOTES = 50
LOG_BYTES = 1 << 16

PYTHON = 'WOODSHED_PYTHONPATH="$PYTHONPATH" PYTHONPATH= exec /env/bin/python -P -s -B '
"""A script starts without PYTHONPATH: no file of the workspace may be imported before it has read its request."""
START = PYTHON + INSIDE["runner.py"]
Progress = Callable[[int, int, str], None]


Apart = Literal["never", "suspect", "always"]
LINE_END = re.compile(rb"\r\n|\r|\n")
"""What ends a line for Python: a patch that counts otherwise must not hide where its code stands."""
SUSPECT = re.compile(
    r"frame|f_back|f_locals|f_globals|(?i:pytest|\btests?\b|\btest_|_tests?\b)|settrace|setprofile|/proc/|woodshed"
    r"|\b(gc|inspect|ctypes|unittest|mock|traceback|linecache|sys|builtins|importlib|__import__|exec|eval)\b"
    r"|__(eq|ne|lt|le|gt|ge|bool|contains|class|hash|subclasses|globals|code|closure|builtins)__"
)
"""Words of code that reaches for its caller, for the tests, or for how values are compared."""
UNREADABLE = "the patch cannot be compared with the interface that it has to keep"
LOST = "the sandbox was lost twice with this patch, and held without it"


class GradingSettings(Settings):
    """How attempts are judged."""

    shaped: bool = False
    """Reward the share of passed tests (fail-to-pass share times pass-to-pass share, at most 0.9) instead of 0 or 1.
    Of the fail-to-pass tests only those count that ask for more than a name (`Task.stub_passes`)."""
    jobs: int = Field(default=2, ge=1)
    """Verifications at the same time."""
    timeout_s: float | None = Field(default=None, gt=0)
    """Seconds for one verification's tests; None takes each task's own."""
    apart: Apart = "suspect"
    """Run the fail-to-pass tests of what passed a second time, tests and code under test in two processes: "always"
    (high stakes), "never", or where the patch mentions frames, the collector, pytest or comparisons of its own."""


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
    apart: bool = False,
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
        apart: keep the packages in another process than the tests (`apart`). Some honest tests fail there.

    Raises:
        SandboxError: the sandbox was lost.
    """
    nonce = secrets.token_hex(16)
    request: dict[str, object] = {
        "nonce": nonce,
        "ids": None if ids is None else list(ids),
        "packages": list(packages),
    }
    request |= {"apart": apart, "patched": {path: list(lines) for path, lines in (patched or {}).items()}}
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


def crossing(task: Task, patch: Patch) -> tuple[dict[str, bytes | None], dict[str, str]]:
    """The files of a patch that may reach the tests (None: deleted), and the others with the reason.

    Only files in the task's allowed paths cross, and never tests, configuration, or what Python runs at start.
    """
    taken: dict[str, bytes | None] = {}
    left = dict(patch.skipped)
    originals = {str(path) for path in _protected_paths(task)}
    size = 0
    for path, text in sorted(patch.files.items()):
        if not folder.is_clean(path):
            left[path] = "not a plain path inside the workspace"
        elif not any(path == allowed or path.startswith(allowed + "/") for allowed in task.allowed_paths):
            left[path] = "outside the allowed paths"
        elif path in originals or folder.is_protected(path):
            left[path] = "a test, or configuration"
        elif any(str(parent) in taken for parent in Path(path).parents):
            left[path] = "below a file"
        elif size + len(text or "") > MAX_PATCH_CHARS or len(taken) == MAX_PATCH_FILES:
            left[path] = f"past {MAX_PATCH_CHARS} characters or {MAX_PATCH_FILES} files"
        else:
            size += len(text or "")
            try:
                taken[path] = None if text is None else syntax.write(path, text)
            except (UnicodeError, LookupError):
                left[path] = (
                    "no text in the encoding that it declares" if syntax.is_source(path) else "not UTF-8"
                )
    return taken, left


def verify(
    task: Task,
    patch: Patch,
    *,
    shaped: bool = False,
    timeout_s: float | None = None,
    rollout_id: str = "",
    apart: Apart = "suspect",
) -> Verdict:
    """The verdict on a patch: "invalid" where the sandbox is at fault, which is no reward, not a reward of 0.

    `apart` says when the fail-to-pass tests of what passed run once more with tests and code in two processes: then
    every one that passes there with the original code (`judged_apart`) must pass.

    Raises:
        TaskError: the task's environment cannot be built, or its folder is damaged.
    """
    began = time.monotonic()
    expected = (*task.fail_to_pass, *task.pass_to_pass)
    taken, left = crossing(task, patch)
    notes = [f"left behind: {path[:200]} ({reason})" for path, reason in list(left.items())[:MOST_NOTES]]
    limit_s = timeout_s or task.verify_timeout_s
    try:
        run = _test_patch(task, taken, expected, limit_s)
        if _solves(run):
            texts = {path: patch.files[path] for path in taken}
            lost = contained(
                lambda: api_compat.lost_by(task, texts), lambda error: [f"{UNREADABLE}: {error}"]
            )
            run = dataclasses.replace(run, integrity=tuple(lost[:MOST_NOTES]))
        if _solves(run) and (apart == "always" or (apart == "suspect" and is_suspect(task, taken))):
            judged = judged_apart(task)
            notes.append(f"judged apart: {len(judged)} of {len(task.fail_to_pass)} fail-to-pass tests")
            if judged:
                again = _test_patch(task, taken, judged, 2 * limit_s, apart=True)
                run = dataclasses.replace(
                    run,
                    outcomes=run.outcomes | again.outcomes,
                    integrity=again.integrity,
                    log=run.log + again.log,
                )
    except SandboxError as error:
        missing: dict[str, Outcome] = dict.fromkeys(expected, "missing")
        return Verdict(rollout_id, task.id, "invalid", 0.0, False, missing, (), str(error), _since(began))
    solved = _solves(run)
    return Verdict(
        rollout_id=rollout_id,
        task_id=task.id,
        status="graded" if run.started else "invalid",
        reward=_reward(task, run, solved, shaped),
        solved=solved,
        outcomes=run.outcomes,
        integrity=run.integrity,
        detail="\n".join([*notes, run.log[-4000:]]),
        seconds=_since(began),
    )


def is_suspect(task: Task, taken: dict[str, bytes | None]) -> bool:
    """Whether lines that a patch adds mention what would let code look at its tests."""
    for path, data in taken.items():
        lines = LINE_END.split(data or b"")
        added = b"\n".join(lines[number - 1] for number in brought(task, path, data or b""))
        if SUSPECT.search(added.decode("utf-8", errors="replace")):
            return True
    return False


def brought(task: Task, path: str, data: bytes) -> list[int]:
    """Numbers (from 1, as Python counts) of the lines of a patched file that are nowhere in the original one."""
    original = folder.original(task, path)
    known = set(LINE_END.split(original.read_bytes())) if original.is_file() else set()
    return [number for number, line in enumerate(LINE_END.split(data), 1) if line not in known]


def judged_apart(task: Task) -> tuple[str, ...]:
    """The fail-to-pass tests that pass with the original code where tests and code are apart; found once per machine.

    The others passed before the patch: it has nothing to win by faking them, and each call from one process to the
    other takes its time.

    Raises:
        SandboxError: the sandbox was lost.
    """
    ours = hashlib.sha256(
        b"".join(Path(__file__).with_name(name).read_bytes() for name in (*INSIDE, Path(__file__).name))
    ).hexdigest()
    kept = environment.cache_dir() / "apart" / f"{task.id}-{ours[:16]}.json"
    with contextlib.suppress(OSError, ValueError):
        return tuple(json.loads(kept.read_text("utf-8")))
    taken, _ = crossing(task, folder.gold_patch(task))
    run = _test_patch(task, taken, task.fail_to_pass, task.verify_timeout_s, apart=True)
    found = tuple(test for test, outcome in run.outcomes.items() if outcome == "passed")
    if not run.timed_out:  # else the machine may have been busy
        kept.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(kept, json.dumps(found))
    return found


class Held:
    """Sandboxes in use, which can be closed from outside; then no more are let in."""

    def __init__(self) -> None:
        self._lock, self._open, self._closed = threading.Lock(), list[Sandbox](), False

    @contextlib.contextmanager
    def hold(self, sandbox: Sandbox) -> Iterator[None]:
        """Raises SandboxError once all were closed."""
        with self._lock:
            if self._closed:
                raise SandboxError("judging was broken off")
            self._open.append(sandbox)
        try:
            yield
        finally:
            with self._lock:
                self._open.remove(sandbox)

    def close(self) -> None:
        with self._lock:
            self._closed, held = True, list(self._open)
        for sandbox in held:
            sandbox.close()


_HELD: ContextVar[Held | None] = ContextVar("held", default=None)
"""Who closes the sandboxes of the verifications in this context, where somebody does."""


class Judging:
    """Verdicts on attempts while others are still being made. The same patch to the same task is run once.

    As a context manager. Whatever is raised inside closes the sandboxes of the verifications that run.
    """

    def __init__(self, tasks: Iterable[Task], settings: GradingSettings | None = None) -> None:
        self.settings = settings or GradingSettings()
        self._tasks = {task.id: task for task in tasks}
        self._ready: set[Environment] = set()
        self._running: dict[str, Future[Verdict]] = {}
        self._of: dict[str, Future[Verdict]] = {}
        self._held = Held()
        self._pool = ThreadPoolExecutor(self.settings.jobs, thread_name_prefix="judging")

    def __enter__(self) -> Judging:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is not None:
            self._held.close()
        self._pool.shutdown(cancel_futures=True)

    def add(self, rollout: Rollout) -> None:
        """Begin the verdict on an attempt, if nobody has.

        Raises:
            TaskError: its task is not among the tasks.
        """
        self._prepare([rollout])
        if rollout.id in self._of:
            return
        task = self._tasks[rollout.task_id]
        taken, _ = crossing(task, rollout.patch)
        key = json.dumps([task.id, {p: None if data is None else data.hex() for p, data in taken.items()}])
        key = key if rollout.ended != "sandbox_lost" else rollout.id
        if key not in self._running:
            self._running[key] = self._pool.submit(self._judge, task, rollout)
        self._of[rollout.id] = self._running[key]

    def verdicts(
        self, rollouts: Sequence[Rollout], *, progress: Progress | None = None
    ) -> dict[str, Verdict]:
        """By rollout id, in the order of the attempts, each of which is added.

        Raises:
            TaskError: as `add`.
        """
        self._prepare(rollouts, progress)
        for rollout in rollouts:
            self.add(rollout)
        waiting, done = Counter(self._of[rollout.id] for rollout in rollouts), 0
        for future in as_completed(waiting):
            done += waiting[future]
            if progress:
                progress(done, len(rollouts), "judging")
        return {r.id: dataclasses.replace(self._of[r.id].result(), rollout_id=r.id) for r in rollouts}

    def _prepare(self, rollouts: Sequence[Rollout], progress: Progress | None = None) -> None:
        """All tasks are known, and their environments built, before the first test runs."""
        if unknown := sorted({r.task_name for r in rollouts if r.task_id not in self._tasks}):
            raise TaskError(
                f"attempts at {', '.join(unknown)} cannot be judged: no such task, or it was changed since. "
                "Judge with the task set that they were made with."
            )
        for needed in {self._tasks[r.task_id].environment for r in rollouts} - self._ready:
            environment.prepare(needed, progress=progress)
            self._ready.add(needed)

    def _judge(self, task: Task, rollout: Rollout) -> Verdict:
        _HELD.set(self._held)
        return _judge_one(task, rollout, self.settings)


def judge(
    attempts: Iterable[Group | Rollout],
    tasks: Iterable[Task],
    settings: GradingSettings | None = None,
    *,
    progress: Progress | None = None,
) -> dict[str, Verdict]:
    """Verdicts by rollout id. The same patch to the same task is run once.

    Raises:
        TaskError: an attempt at a task that is not among the tasks.
    """
    rollouts = [r for a in attempts for r in (a.rollouts if isinstance(a, Group) else (a,))]
    with Judging(tasks, settings) as judging:
        return judging.verdicts(rollouts, progress=progress)


def _judge_one(task: Task, rollout: Rollout, settings: GradingSettings) -> Verdict:
    if rollout.ended == "sandbox_lost":
        missing: dict[str, Outcome] = dict.fromkeys((*task.fail_to_pass, *task.pass_to_pass), "missing")
        return Verdict(
            rollout.id, task.id, "invalid", 0.0, False, missing, (), "the attempt's sandbox was lost"
        )
    return verify(
        task,
        rollout.patch,
        shaped=settings.shaped,
        timeout_s=settings.timeout_s,
        rollout_id=rollout.id,
        apart=settings.apart,
    )


def _solves(run: TestRun) -> bool:
    return not run.integrity and all(outcome == "passed" for outcome in run.outcomes.values())


def _test_patch(
    task: Task,
    taken: dict[str, bytes | None],
    expected: Sequence[str],
    timeout_s: float,
    *,
    apart: bool = False,
) -> TestRun:
    """One run in a fresh sandbox, and a second one where the sandbox of the first was lost.

    A sandbox that is lost twice with a patch and holds without it was lost by the patch: no test passed.
    """
    ready = compiled_tests(task, expected)
    for _ in range(2):
        with contextlib.suppress(SandboxError):
            return _test_once(task, taken, expected, timeout_s, apart, ready)
    held = _test_once(task, {}, expected, timeout_s, apart, ready)
    return dataclasses.replace(
        held, outcomes=dict.fromkeys(expected, "missing"), integrity=(LOST,), log=f"{LOST}\n"
    )


def _test_once(
    task: Task,
    taken: dict[str, bytes | None],
    expected: Sequence[str],
    timeout_s: float,
    apart: bool,
    ready: Mapping[str, Sequence[object]],
) -> TestRun:
    """One run in a fresh sandbox; each original that was altered meanwhile is one more fault.

    An original is altered where the sandbox's own layer says so. Its inode on the host tells nothing: task folders
    share files by hard links, so another run that begins or ends changes link counts and with them ctimes.
    """
    sources = _sources(task)
    with store.folder() as scratch:
        layer, blanks = scratch / "patch", scratch / "blanks"
        deleted = _lay(layer, taken)
        _lay(blanks, dict.fromkeys(sources, b""))
        layers = (layer, folder.hidden_tests(task), blanks)
        with (
            open_sandbox(with_runner(environment.sandbox_spec(task, extra_lowers=layers))) as sandbox,
            held.hold(sandbox) if (held := _HELD.get()) else contextlib.nullcontext(),
        ):
            if deleted:
                sandbox.exec(["rm", "-f", "--", *deleted])
            run = run_tests(
                sandbox,
                ids=expected,
                packages=task.environment.packages,
                timeout_s=timeout_s,
                patched={path: brought(task, path, data or b"") for path, data in taken.items()},
                sources=sources,
                compiled=ready,
                apart=apart,
            )
            altered = sandbox.altered(map(str, _protected_paths(task)))
    faults = tuple(f"{path} was changed while the tests ran" for path in altered)
    return dataclasses.replace(run, integrity=run.integrity + faults)


def _lay(layer: Path, taken: dict[str, bytes | None]) -> list[str]:
    """Write files as a layer; the paths that are to be deleted."""
    layer.mkdir(exist_ok=True)
    layer.chmod(0o755)  # becomes the mode of /workspace
    for path, data in taken.items():
        if data is not None:
            target = layer / path
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_bytes(data)
    return [path for path, data in taken.items() if data is None]


def _sources(task: Task) -> dict[str, bytes]:
    """Files of the fail-to-pass tests, which lie empty in the sandbox: code could look up there what it has to return.

    The rare test that reads its own file (the interpreter prints a traceback) fails then, also with the original code;
    the proof of a task says so.
    """
    wanted = {test.partition("::")[0] for test in task.fail_to_pass}
    return {p: data for p, data in folder.protected_files(task).items() if p in wanted and p.endswith(".py")}


def _protected_paths(task: Task) -> list[Path]:
    root = folder.hidden_tests(task)
    return [file.relative_to(root) for file in sorted(root.rglob("*")) if not file.is_dir()]


def _reward(task: Task, run: TestRun, solved: bool, shaped: bool) -> float:
    if solved or run.integrity or not shaped:
        return float(solved)

    def share(tests: Sequence[str]) -> float:
        return sum(run.outcomes[test] == "passed" for test in tests) / max(len(tests), 1)

    # The stub that a patch resembles most decides: none of them earns anything, and no predicate loses half its tests.
    idle = [set[str](), *map(set, task.stub_passes.values())]
    behaviour = min(share([test for test in task.fail_to_pass if test not in tests]) for tests in idle)
    return min(0.9, behaviour * (share(task.pass_to_pass) if task.pass_to_pass else 1.0))


def _since(began: float) -> float:
    return time.monotonic() - began
