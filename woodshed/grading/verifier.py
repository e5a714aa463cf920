"""Tests of a patch, and the verdict on it.

A patch is judged where it was never run before: a fresh sandbox of the task's workspace, then the files of the patch
that may cross over, then the original tests and configuration on top. Three things must hold for a reward: the run
can be believed (`results`), the tests on disk were the original ones until the end, and every expected test passed.
"""

from __future__ import annotations

import dataclasses
import json
import secrets
import tempfile
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from pathlib import Path
from typing import cast

from woodshed.grading import results
from woodshed.records import Group, Outcome, Patch, Rollout, SandboxError, Task, TaskError, Verdict
from woodshed.sandbox import Sandbox, SandboxSpec, open_sandbox
from woodshed.settings import Settings
from woodshed.tasks import environment, folder

RUNNER = "/run/woodshed/woodshed_runner.py"
MAX_PATCH_CHARS = 4_000_000
MAX_PATCH_FILES = 1000
LOG_BYTES = 1 << 16

PYTHON = 'WOODSHED_PYTHONPATH="$PYTHONPATH" PYTHONPATH= exec /env/bin/python -P -s -B '
"""A script starts without PYTHONPATH: no file of the workspace may be imported before it has read its request."""
START = PYTHON + RUNNER
CHANGED = """
import os, sys
since, *paths = sys.stdin.read().split("\\0")
for path in paths:
    try:
        changed = os.lstat(path).st_ctime_ns >= int(since)
    except OSError:
        changed = True
    if changed:
        print(path)
"""

Progress = Callable[[int, int, str], None]


class GradingSettings(Settings):
    """How attempts are judged."""

    shaped: bool = False
    """Reward the share of passed tests (fail-to-pass share times pass-to-pass share, at most 0.9) instead of 0 or 1."""
    jobs: int = 2
    """Verifications at the same time."""
    timeout_s: float | None = None
    """Seconds for one verification's tests; None takes each task's own."""


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


def with_runner(spec: SandboxSpec) -> SandboxSpec:
    """The same sandbox, in which `run_tests` can run."""
    runner = Path(__file__).with_name("runner.py")
    return dataclasses.replace(spec, binds={**spec.binds, RUNNER: runner})


def run_tests(
    sandbox: Sandbox,
    *,
    ids: Sequence[str] | None,
    packages: Sequence[str],
    timeout_s: float,
    hash_seed: int = 0,
) -> TestRun:
    """Run the project's tests, or the ones asked for, and tell what can be believed about them.

    Args:
        sandbox: opened from `with_runner(spec)`; the roots of the source come from its PYTHONPATH.
        ids: pytest node ids; None for the whole suite, as the project's own configuration finds it.
        packages: import names that must come from the workspace.

    Raises:
        SandboxError: the sandbox was lost.
    """
    nonce = secrets.token_hex(16)
    request = {"nonce": nonce, "ids": None if ids is None else list(ids), "packages": list(packages)}
    request["workspace"] = sandbox.workspace
    result = sandbox.exec(
        START,
        env={"PYTHONHASHSEED": str(hash_seed)},
        stdin=json.dumps(request).encode(),
        timeout_s=timeout_s,
        max_output=LOG_BYTES,
        channel=True,
    )
    if result.outcome == "sandbox_lost":
        raise SandboxError(
            f"the sandbox was lost while tests ran: {result.stderr[-500:].decode(errors='replace')}"
        )
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
                taken[path] = None if text is None else text.encode("utf-8")
            except UnicodeEncodeError:
                left[path] = "not UTF-8"
    return taken, left


def verify(
    task: Task, patch: Patch, *, shaped: bool = False, timeout_s: float | None = None, rollout_id: str = ""
) -> Verdict:
    """The verdict on a patch. A sandbox that failed makes it "invalid", which is no reward, not a reward of 0.

    Raises:
        TaskError: the task's environment cannot be built, or its folder is damaged.
    """
    began = time.monotonic()
    expected = (*task.fail_to_pass, *task.pass_to_pass)
    taken, left = crossing(task, patch)
    notes = [f"left behind: {path} ({reason})" for path, reason in left.items()]
    try:
        run = _test_patch(task, taken, expected, timeout_s or task.verify_timeout_s)
    except SandboxError as error:
        missing: dict[str, Outcome] = dict.fromkeys(expected, "missing")
        return Verdict(rollout_id, task.id, "invalid", 0.0, False, missing, (), str(error), _since(began))
    solved = not run.integrity and all(outcome == "passed" for outcome in run.outcomes.values())
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
    settings = settings or GradingSettings()
    known = {task.id: task for task in tasks}
    rollouts = [r for a in attempts for r in (a.rollouts if isinstance(a, Group) else (a,))]
    if unknown := sorted({r.task_name for r in rollouts if r.task_id not in known}):
        raise TaskError(
            f"attempts at {', '.join(unknown)} cannot be judged: no such task, or it was changed since. "
            "Judge with the task set that they were made with."
        )
    same: dict[str, list[Rollout]] = {}
    for rollout in rollouts:
        taken, _ = crossing(known[rollout.task_id], rollout.patch)
        key = json.dumps([rollout.task_id, {path: data and data.hex() for path, data in taken.items()}])
        same.setdefault(key if rollout.ended != "sandbox_lost" else rollout.id, []).append(rollout)
    for needed in {known[twins[0].task_id].environment for twins in same.values()}:
        environment.prepare(needed, progress=progress)
    verdicts: dict[str, Verdict] = {}
    with ThreadPoolExecutor(settings.jobs) as pool:
        running = {
            pool.submit(_judge_one, known[twins[0].task_id], twins[0], settings): twins
            for twins in same.values()
        }
        for done in as_completed(running):
            for rollout in running[done]:
                verdicts[rollout.id] = dataclasses.replace(done.result(), rollout_id=rollout.id)
            if progress:
                progress(len(verdicts), len(rollouts), "judging")
    return {rollout.id: verdicts[rollout.id] for rollout in rollouts}


def _judge_one(task: Task, rollout: Rollout, settings: GradingSettings) -> Verdict:
    if rollout.ended == "sandbox_lost":
        missing: dict[str, Outcome] = dict.fromkeys((*task.fail_to_pass, *task.pass_to_pass), "missing")
        return Verdict(
            rollout.id, task.id, "invalid", 0.0, False, missing, (), "the attempt's sandbox was lost"
        )
    return verify(
        task, rollout.patch, shaped=settings.shaped, timeout_s=settings.timeout_s, rollout_id=rollout.id
    )


def _test_patch(
    task: Task, taken: dict[str, bytes | None], expected: Sequence[str], timeout_s: float
) -> TestRun:
    """One run in a fresh sandbox, with one more fault for each original that did not stay as it was."""
    with tempfile.TemporaryDirectory(prefix="woodshed-") as layer:
        deleted = _lay(Path(layer), taken)
        layers = (Path(layer), folder.protected_folder(task))
        with open_sandbox(with_runner(environment.sandbox_spec(task, extra_lowers=layers))) as sandbox:
            if deleted:
                sandbox.exec(["rm", "-f", "--", *deleted])
            since = time.time_ns()
            run = run_tests(sandbox, ids=expected, packages=task.environment.packages, timeout_s=timeout_s)
            originals = "\0".join([str(since), *map(str, _protected_paths(task))])
            check = sandbox.exec(["/env/bin/python", "-I", "-S", "-c", CHANGED], stdin=originals.encode())
    if check.outcome != "ok":
        raise SandboxError("the sandbox could not tell whether the tests stayed as they were")
    tampered = check.stdout.decode(errors="replace").splitlines()
    faults = tuple(f"{path} was changed while the tests ran" for path in tampered)
    return dataclasses.replace(run, integrity=run.integrity + faults)


def _lay(layer: Path, taken: dict[str, bytes | None]) -> list[str]:
    """Write the files of a patch as a layer; the paths that it deletes."""
    layer.chmod(0o755)  # becomes the mode of /workspace
    for path, data in taken.items():
        if data is not None:
            target = layer / path
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_bytes(data)
    return [path for path, data in taken.items() if data is None]


def _protected_paths(task: Task) -> list[Path]:
    root = folder.protected_folder(task)
    return [file.relative_to(root) for file in sorted(root.rglob("*")) if not file.is_dir()]


def _reward(task: Task, run: TestRun, solved: bool, shaped: bool) -> float:
    if solved or run.integrity or not shaped:
        return float(solved)

    def share(tests: Sequence[str]) -> float:
        return sum(run.outcomes[test] == "passed" for test in tests) / max(len(tests), 1)

    return min(0.9, share(task.fail_to_pass) * (share(task.pass_to_pass) if task.pass_to_pass else 1.0))


def _since(began: float) -> float:
    return time.monotonic() - began
