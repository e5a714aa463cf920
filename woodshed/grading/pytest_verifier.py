"""The verifier of tasks whose hidden tests are pytest's: a hardened session over the restored originals.

A patch is graded where it was never run before: a fresh sandbox of the task's workspace, then the files of the patch
that may cross over, then the original tests and configuration on top. The text of the fail-to-pass tests is only in the
memory of the session that runs them. What the runs add up to is for `decision` to say.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import hashlib
import json
import os
import random
import shutil
import time
from collections.abc import Callable, Generator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from woodshed.grading.compiled import compiled_tests
from woodshed.grading.decision import Files, Planned, believed, decide, session_of, understood
from woodshed.grading.decoys import path_of, without_parameters
from woodshed.grading.patches import crossing, lay, protected_paths
from woodshed.grading.results import Kind, Programs, TestRun
from woodshed.grading.session import run_session, with_copies
from woodshed.pysource.api_compat import Api
from woodshed.records import Outcome, Patch, SandboxError, Task, Verdict
from woodshed.runs.files import write_atomically
from woodshed.sandbox import Revocable, SandboxProvider, store
from woodshed.tasks import environment, folder

MOST_SEARCHES = 8
MOST_GUARDS = 16
"""Pass-to-pass tests of a task that are isolated."""
BROKEN_LINE = "LineError"
LOST = "the sandbox was lost twice with this patch, and held without it"


@dataclass(frozen=True)
class PytestVerifier:
    """See `verifier.Verifier`."""

    shaped: bool = False
    """As `GradingSettings.shaped`."""
    timeout_s: float | None = None
    """Seconds for one run of the tests; None takes the task's own."""

    def grade(self, task: Task, patch: Patch, sandboxes: SandboxProvider) -> Verdict:
        """The verdict: "invalid" where the sandbox is at fault, which is no reward, not a reward of 0.

        Raises:
            TaskError: the task's environment cannot be built, or its folder is damaged.
        """
        began = time.monotonic()
        crossed, left = crossing(task, patch)
        try:
            verdict = decide(
                task,
                crossed,
                left,
                FreshSandboxes(task, sandboxes),
                timeout_s=self.timeout_s or task.verify_timeout_s,
                shaped=self.shaped,
            )
        except SandboxError as error:
            verdict = lost(task, error)
        return dataclasses.replace(verdict, seconds=time.monotonic() - began)


def lost(task: Task, error: SandboxError) -> Verdict:
    """The verdict where the sandbox is at fault."""
    missing: dict[str, Outcome] = dict.fromkeys((*task.fail_to_pass, *task.pass_to_pass), "missing")
    return Verdict("", task.id, "invalid", 0.0, False, missing, (), str(error))


def has_idle_core() -> bool:
    """True if fewer threads want to run at this moment than there are cores for this process."""
    try:
        wanting = int(Path("/proc/loadavg").read_text("ascii").split()[3].partition("/")[0])
    except (OSError, ValueError, IndexError):
        return False
    return wanting < len(os.sched_getaffinity(0))


@dataclass(frozen=True)
class FreshSandboxes:
    """See `decision.Box`: each run has a sandbox of its own."""

    task: Task
    sandboxes: SandboxProvider
    is_idle: Callable[[], bool] = has_idle_core

    def runs(self, crossed: Files, planned: Sequence[Planned]) -> Generator[TestRun, None, None]:
        """Each run in turn, and the next one beside it where a core is idle and the patch holds anything.

        Most patches fail in the first run, so a busy machine does not begin what it will probably throw away.
        """
        sandboxes, begun = Revocable(self.sandboxes), list[Future[TestRun]]()
        with ThreadPoolExecutor(max(1, len(planned))) as pool, contextlib.closing(sandboxes):
            for number in range(len(planned)):
                ahead = 1 if crossed and self.is_idle() else 0
                for tests, timeout_s, kind in planned[len(begun) : number + 1 + ahead]:
                    run = (self.task, crossed, tests, timeout_s, sandboxes, kind)
                    begun.append(pool.submit(test_patch, *run))
                yield begun[number].result()

    def original_api(self) -> Api:
        return folder.original_api(self.task)

    def isolated_tests(self) -> Sequence[str]:
        return isolated_tests(self.task, self.sandboxes)


def run_once(task: Task, patch: Patch, sandboxes: SandboxProvider) -> Verdict:
    """See `verifier.outcomes_of`."""
    crossed, left = crossing(task, patch)
    try:
        return decide(
            task, crossed, left, OneRun(task, sandboxes), timeout_s=task.verify_timeout_s, shaped=False
        )
    except SandboxError as error:
        return lost(task, error)


class OneRun(FreshSandboxes):
    """See `decision.Box`: all tests run once, in the ordinary way, and are believed."""

    def runs(self, crossed: Files, planned: Sequence[Planned]) -> Generator[TestRun, None, None]:
        for tests, timeout_s, kind in planned:
            if kind == "ordinary":
                yield test_patch(self.task, crossed, tests, timeout_s, self.sandboxes)

    def isolated_tests(self) -> Sequence[str]:
        return self.task.fail_to_pass


def isolated_tests(task: Task, sandboxes: SandboxProvider) -> tuple[str, ...]:
    """The fail-to-pass tests that pass with the original code in another process, and some of the others.

    The task says so, or it is found once per machine. A few of the others are enough, since each call from one process
    to the other takes its time: a patch that breaks something, and hides it in the ordinary run, knows not which.

    Raises:
        SandboxError: the sandbox was lost.
    """
    ours = version()
    known = folder.isolated_tests(task)
    if known is not None and known[0] == ours:
        return known[1]
    kept = environment.cache_dir() / "isolated" / f"{task.id}-{ours}.json"
    with contextlib.suppress(OSError, ValueError):
        return tuple(json.loads(kept.read_text("utf-8")))
    passed, is_certain = search_isolated(task, task.fail_to_pass, sandboxes)
    guards, is_certain_too = search_isolated(task, guards_of(task), sandboxes)
    passed += guards
    if is_certain and is_certain_too:  # else the machine may have been busy
        kept.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(kept, json.dumps(passed))
    return passed


@functools.cache
def version() -> str:
    """Digest of the code by which tests are isolated."""
    here = (
        *Programs().files().values(),
        "session.py",
        "results.py",
        "decision.py",
        "patches.py",
        "decoys.py",
        Path(__file__).name,
    )
    places = [Path(__file__).with_name(name) for name in here]
    files = [file for place in places for file in (sorted(place.glob("*.py")) if place.is_dir() else [place])]
    return hashlib.sha256(b"".join(file.read_bytes() for file in files)).hexdigest()[:16]


def guards_of(task: Task) -> tuple[str, ...]:
    """Some tests that passed before, one of each function, in the files of the fail-to-pass tests if possible."""
    files = set(map(path_of, task.fail_to_pass))
    by_function: dict[str, list[str]] = {}
    for test in task.pass_to_pass:
        by_function.setdefault(without_parameters(test), []).append(test)
    rng = random.Random(task.id)
    names = rng.sample(sorted(by_function), len(by_function))
    names = sorted(names, key=lambda name: path_of(name) not in files)[:MOST_GUARDS]
    chosen = {rng.choice(by_function[name]) for name in names}
    return tuple(test for test in task.pass_to_pass if test in chosen)


def search_isolated(
    task: Task, wanted: tuple[str, ...], sandboxes: SandboxProvider
) -> tuple[tuple[str, ...], bool]:
    """The tests of the largest set that is found in a few runs to pass as a whole; False if a run took too long.

    One test may end the line that all of them use. So whoever failed by that is tried again without the first of them.
    """
    crossed, _ = crossing(task, folder.gold_patch(task))
    is_certain = True
    for _ in range(MOST_SEARCHES):
        if not wanted:
            break
        run = test_patch(task, crossed, wanted, 2 * task.verify_timeout_s, sandboxes, "isolated")
        is_certain = is_certain and not run.timed_out
        passed = {test for test, outcome in run.outcomes.items() if outcome == "passed"}
        if len(passed) == len(wanted) and not run.integrity:
            return wanted, is_certain
        cut_off = [test for test in run.outcomes if BROKEN_LINE in run.messages.get(test, "")]
        wanted = tuple(test for test in wanted if test in passed or test in cut_off[1:])
    return (), is_certain


def test_patch(
    task: Task,
    crossed: Files,
    expected: Sequence[str],
    timeout_s: float,
    sandboxes: SandboxProvider,
    kind: Kind = "ordinary",
) -> TestRun:
    """One run in a fresh sandbox, and a second one where the sandbox of the first was lost.

    A sandbox that is lost twice with a patch and holds without it was lost by the patch: no test passed.
    """
    ready = compiled_tests(task, expected, sandboxes)

    def once(files: Files) -> TestRun:
        return _test_once(task, files, expected, timeout_s, sandboxes, kind, ready)

    for _ in range(2):
        with contextlib.suppress(SandboxError):
            return once(crossed)
    held = once({})
    return dataclasses.replace(
        held, outcomes=dict.fromkeys(expected, "missing"), integrity=(LOST,), log=f"{LOST}\n"
    )


test_patch.__test__ = False  # not a test  # type: ignore[attr-defined]


def _test_once(
    task: Task,
    crossed: Files,
    expected: Sequence[str],
    timeout_s: float,
    sandboxes: SandboxProvider,
    kind: Kind,
    ready: Mapping[str, Sequence[object]],
) -> TestRun:
    """One run in a fresh sandbox; each original that was altered meanwhile is one more fault.

    An original is altered where the sandbox's own layer says so. Its inode on the host tells nothing: task folders
    share files by hard links, so another run that begins or ends changes link counts and with them ctimes.
    """
    request, disguise = session_of(task, crossed, expected, kind, compiled=ready)
    with store.folder() as scratch:
        names = request.programs  # the list of mounts tells these paths
        layer, blanks, hidden = scratch / names.runner, scratch / names.hardening, folder.hidden_tests(task)
        if kind == "ordinary":
            hidden = shutil.copytree(hidden, scratch / names.python_path, symlinks=True)
        deleted = lay(layer, crossed)
        lay(blanks, dict.fromkeys(request.sources, b""))
        spec = environment.sandbox_spec(task, extra_lowers=(layer, hidden, blanks))
        with sandboxes.open(with_copies(spec, request, scratch / names.isolation)) as sandbox:
            if deleted:
                sandbox.exec(["rm", "-f", "--", *deleted])
            run = run_session(sandbox, request, timeout_s=timeout_s)
            altered = sandbox.altered(map(str, protected_paths(task)))
    return understood(run, disguise, altered)


def believed_tests(task: Task) -> set[str]:
    """The hidden tests of a task that are paid: its folder says which are isolated."""
    known = folder.isolated_tests(task)
    return believed(task, known[1] if known else ())


def keep_isolated_tests(task: Task, sandboxes: SandboxProvider) -> None:
    """Note in the task's folder which tests pass in two processes; once per folder and version.

    Raises:
        SandboxError: the sandbox was lost.
    """
    known = folder.isolated_tests(task)
    if known is None or known[0] != version():
        folder.keep_isolated_tests(task, isolated_tests(task, sandboxes), version())
