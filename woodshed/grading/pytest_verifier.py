"""The verifier of tasks whose hidden tests are pytest's: a hardened session over the restored originals.

A patch is graded where it was never run before: a fresh sandbox of the task's workspace, then the files of the patch
that may cross over, then the original tests and configuration on top. The text of the fail-to-pass tests is only in the
memory of the session that runs them. Four things must hold for a reward: the run can be believed (`results`), the
tests on disk were until the end what they were at the start, every expected test passed, and whatever could be called
before still can be (`api_compat`).
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
import random
import re
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, cast

from woodshed.boundary import contained
from woodshed.grading import api_compat
from woodshed.grading.compiled import compiled_tests
from woodshed.grading.decoys import disguise
from woodshed.grading.patches import LINE_END, added_lines, crossing, lay, left_behind, protected_paths
from woodshed.grading.session import INSIDE, TestRun, run_tests, with_runner
from woodshed.records import Outcome, Patch, SandboxError, Task, Verdict
from woodshed.runs.files import write_atomically
from woodshed.sandbox import SandboxProvider, store
from woodshed.tasks import environment, folder

Isolation = Literal["never", "suspect", "always"]
Files = Mapping[str, bytes | None]
"""Whole files by path; None: deleted."""

MOST_NOTES = 50
SUSPECT = re.compile(
    r"frame|f_back|f_locals|f_globals|(?i:pytest|\btests?\b|\btest_|_tests?\b)|settrace|setprofile|/proc/|woodshed"
    r"|\b(gc|inspect|ctypes|unittest|mock|traceback|linecache|sys|builtins|importlib|__import__|exec|eval)\b"
    r"|__(eq|ne|lt|le|gt|ge|bool|contains|class|hash|subclasses|globals|code|closure|builtins)__"
)
"""Words of code that reaches for its caller, for the tests, or for how values are compared."""
UNREADABLE = "the patch cannot be compared with the interface that it has to keep"
LOST = "the sandbox was lost twice with this patch, and held without it"


@dataclass(frozen=True)
class PytestVerifier:
    """See `verifier.Verifier`."""

    shaped: bool = False
    """As `GradingSettings.shaped`."""
    timeout_s: float | None = None
    """Seconds for one run of the tests; None takes the task's own."""
    isolate_tests: Isolation = "suspect"
    """When the fail-to-pass tests of what passed run once more with tests and code in two processes; then every one
    that passes there with the original code (`isolated_tests`) must pass."""

    def grade(self, task: Task, patch: Patch, sandboxes: SandboxProvider) -> Verdict:
        """The verdict: "invalid" where the sandbox is at fault, which is no reward, not a reward of 0.

        Raises:
            TaskError: the task's environment cannot be built, or its folder is damaged.
        """
        began = time.monotonic()
        expected = (*task.fail_to_pass, *task.pass_to_pass)
        crossed, left = crossing(task, patch)
        notes = left_behind(left)
        limit_s = self.timeout_s or task.verify_timeout_s
        try:
            run = test_patch(task, crossed, expected, limit_s, sandboxes)
            if _solves(run):
                texts = {path: patch.files[path] for path in crossed}
                removed = contained(
                    lambda: api_compat.lost_by(task, texts), lambda error: [f"{UNREADABLE}: {error}"]
                )
                run = dataclasses.replace(run, integrity=tuple(removed[:MOST_NOTES]))
            if _solves(run) and self._isolates(task, crossed):
                isolated = isolated_tests(task, sandboxes)
                notes.append(f"isolated: {len(isolated)} of {len(task.fail_to_pass)} fail-to-pass tests")
                if isolated:
                    again = test_patch(task, crossed, isolated, 2 * limit_s, sandboxes, isolate=True)
                    run = dataclasses.replace(
                        run,
                        outcomes=run.outcomes | again.outcomes,
                        integrity=again.integrity,
                        log=run.log + again.log,
                    )
        except SandboxError as error:
            missing: dict[str, Outcome] = dict.fromkeys(expected, "missing")
            seconds = time.monotonic() - began
            return Verdict("", task.id, "invalid", 0.0, False, missing, (), str(error), seconds)
        solved = _solves(run)
        return Verdict(
            rollout_id="",
            task_id=task.id,
            status="graded" if run.started else "invalid",
            reward=_reward(task, run, solved, self.shaped),
            solved=solved,
            outcomes=run.outcomes,
            integrity=run.integrity,
            detail="\n".join([*notes, run.log[-4000:]]),
            seconds=time.monotonic() - began,
        )

    def _isolates(self, task: Task, crossed: Files) -> bool:
        return self.isolate_tests == "always" or (
            self.isolate_tests == "suspect" and is_suspect(task, crossed)
        )


def is_suspect(task: Task, crossed: Files) -> bool:
    """True if lines that a patch adds mention what would let code look at its tests."""
    for path, data in crossed.items():
        lines = LINE_END.split(data or b"")
        added = b"\n".join(lines[number - 1] for number in added_lines(task, path, data or b""))
        if SUSPECT.search(added.decode("utf-8", errors="replace")):
            return True
    return False


def isolated_tests(task: Task, sandboxes: SandboxProvider) -> tuple[str, ...]:
    """The fail-to-pass tests that pass with the original code in another process; found once per machine.

    The others passed before the patch: it has nothing to win by faking them, and each call from one process to the
    other takes its time.

    Raises:
        SandboxError: the sandbox was lost.
    """
    here = (*INSIDE, "session.py", "patches.py", "decoys.py", Path(__file__).name)
    ours = hashlib.sha256(b"".join(Path(__file__).with_name(name).read_bytes() for name in here)).hexdigest()
    kept = environment.cache_dir() / "isolated" / f"{task.id}-{ours[:16]}.json"
    with contextlib.suppress(OSError, ValueError):
        return tuple(json.loads(kept.read_text("utf-8")))
    crossed, _ = crossing(task, folder.gold_patch(task))
    run = test_patch(task, crossed, task.fail_to_pass, task.verify_timeout_s, sandboxes, isolate=True)
    passed = tuple(test for test, outcome in run.outcomes.items() if outcome == "passed")
    if not run.timed_out:  # else the machine may have been busy
        kept.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(kept, json.dumps(passed))
    return passed


def test_patch(
    task: Task,
    crossed: Files,
    expected: Sequence[str],
    timeout_s: float,
    sandboxes: SandboxProvider,
    *,
    isolate: bool = False,
) -> TestRun:
    """One run in a fresh sandbox, and a second one where the sandbox of the first was lost.

    A sandbox that is lost twice with a patch and holds without it was lost by the patch: no test passed.
    """
    ready = compiled_tests(task, expected, sandboxes)

    def once(files: Files) -> TestRun:
        return _test_once(task, files, expected, timeout_s, sandboxes, isolate, ready)

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
    isolate: bool,
    ready: Mapping[str, Sequence[object]],
) -> TestRun:
    """One run in a fresh sandbox; each original that was altered meanwhile is one more fault.

    An original is altered where the sandbox's own layer says so. Its inode on the host tells nothing: task folders
    share files by hard links, so another run that begins or ends changes link counts and with them ctimes.
    """
    sources = _sources(task)
    session = disguise(sources, expected, task.decoys, random.SystemRandom())
    ready = {path: made for path, made in ready.items() if session.sources.get(path) == sources.get(path)}
    with store.folder() as scratch:
        layer, blanks = scratch / "patch", scratch / "blanks"
        deleted = lay(layer, crossed)
        lay(blanks, dict.fromkeys(sources, b""))
        layers = (layer, folder.hidden_tests(task), blanks)
        with sandboxes.open(with_runner(environment.sandbox_spec(task, extra_lowers=layers))) as sandbox:
            if deleted:
                sandbox.exec(["rm", "-f", "--", *deleted])
            run = run_tests(
                sandbox,
                ids=session.ids,
                packages=task.environment.packages,
                timeout_s=timeout_s,
                patched={path: added_lines(task, path, data or b"") for path, data in crossed.items()},
                sources=session.sources,
                compiled=ready,
                isolate=isolate,
            )
            altered = sandbox.altered(map(str, protected_paths(task)))
    faults = tuple(f"{path} was changed while the tests ran" for path in altered)
    return dataclasses.replace(
        run,
        outcomes=cast("dict[str, Outcome]", session.outcomes(run.outcomes)),
        integrity=run.integrity + faults + session.faults(run.outcomes),
    )


def _sources(task: Task) -> dict[str, bytes]:
    """Files of the fail-to-pass tests, which lie empty in the sandbox: code could look up there what it has to return.

    The rare test that reads its own file (the interpreter prints a traceback) fails then, also with the original code;
    the proof of a task says so.
    """
    wanted = {test.partition("::")[0] for test in task.fail_to_pass}
    return {p: data for p, data in folder.protected_files(task).items() if p in wanted and p.endswith(".py")}


def _solves(run: TestRun) -> bool:
    return not run.integrity and all(outcome == "passed" for outcome in run.outcomes.values())


def _reward(task: Task, run: TestRun, solved: bool, shaped: bool) -> float:
    if solved or run.integrity or not shaped:
        return float(solved)

    def share(tests: Sequence[str]) -> float:
        return sum(run.outcomes[test] == "passed" for test in tests) / max(len(tests), 1)

    # The stub that a patch resembles most decides: none of them earns anything, and no predicate loses half its tests.
    idle = [set[str](), *map(set, task.stub_passes.values())]
    behaviour = min(share([test for test in task.fail_to_pass if test not in tests]) for tests in idle)
    return min(0.9, behaviour * (share(task.pass_to_pass) if task.pass_to_pass else 1.0))
