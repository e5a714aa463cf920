"""The verifier of tasks whose hidden tests are pytest's: a hardened session over the restored originals.

A patch is graded where it was never run before: a fresh sandbox of the task's workspace, then the files of the patch
that may cross over, then the original tests and configuration on top. The text of the fail-to-pass tests is only in the
memory of the session that runs them. What the runs add up to is for `decision` to say.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from woodshed.grading.compiled import compiled_tests
from woodshed.grading.decision import Files, Isolation, decide, session_of, understood
from woodshed.grading.patches import crossing, lay, protected_paths
from woodshed.grading.results import TestRun
from woodshed.grading.session import INSIDE, run_session, with_runner
from woodshed.pysource.api_compat import Api
from woodshed.records import Outcome, Patch, SandboxError, Task, Verdict
from woodshed.runs.files import write_atomically
from woodshed.sandbox import SandboxProvider, store
from woodshed.tasks import environment, folder

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
        crossed, left = crossing(task, patch)
        try:
            verdict = decide(
                task,
                crossed,
                left,
                FreshSandboxes(task, sandboxes),
                timeout_s=self.timeout_s or task.verify_timeout_s,
                isolate_tests=self.isolate_tests,
                shaped=self.shaped,
            )
        except SandboxError as error:
            missing: dict[str, Outcome] = dict.fromkeys((*task.fail_to_pass, *task.pass_to_pass), "missing")
            verdict = Verdict("", task.id, "invalid", 0.0, False, missing, (), str(error))
        return dataclasses.replace(verdict, seconds=time.monotonic() - began)


@dataclass(frozen=True)
class FreshSandboxes:
    """See `decision.Box`: each run has a sandbox of its own."""

    task: Task
    sandboxes: SandboxProvider

    def run(self, crossed: Files, tests: Sequence[str], timeout_s: float, *, isolate: bool) -> TestRun:
        return test_patch(self.task, crossed, tests, timeout_s, self.sandboxes, isolate=isolate)

    def original_api(self) -> Api:
        return folder.original_api(self.task)

    def isolated_tests(self) -> Sequence[str]:
        return isolated_tests(self.task, self.sandboxes)


def isolated_tests(task: Task, sandboxes: SandboxProvider) -> tuple[str, ...]:
    """The fail-to-pass tests that pass with the original code in another process; found once per machine.

    The others passed before the patch: it has nothing to win by faking them, and each call from one process to the
    other takes its time.

    Raises:
        SandboxError: the sandbox was lost.
    """
    here = (
        *INSIDE,
        "session.py",
        "results.py",
        "decision.py",
        "patches.py",
        "decoys.py",
        Path(__file__).name,
    )
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
    request, disguise = session_of(task, crossed, expected, compiled=ready, isolate=isolate)
    with store.folder() as scratch:
        layer, blanks = scratch / "patch", scratch / "blanks"
        deleted = lay(layer, crossed)
        lay(blanks, dict.fromkeys(request.sources, b""))
        layers = (layer, folder.hidden_tests(task), blanks)
        with sandboxes.open(with_runner(environment.sandbox_spec(task, extra_lowers=layers))) as sandbox:
            if deleted:
                sandbox.exec(["rm", "-f", "--", *deleted])
            run = run_session(sandbox, request, timeout_s=timeout_s)
            altered = sandbox.altered(map(str, protected_paths(task)))
    return understood(run, disguise, altered)


def keep_isolated_tests(task: Task, sandboxes: SandboxProvider) -> None:
    """Note in the task's folder which tests pass in two processes, for the grader that it ships; once per folder.

    Raises:
        SandboxError: the sandbox was lost.
    """
    file = folder.grading_files(task) / "expected.json"
    known = json.loads(file.read_text("utf-8"))
    if known["isolated"] is None:
        known["isolated"] = isolated_tests(task, sandboxes)
        write_atomically(file, json.dumps(known, indent=1, ensure_ascii=True) + "\n")
