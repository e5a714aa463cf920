"""From a candidate to a proven task, or to one reason why not. Cheap checks first; every run is in a sandbox.

Proven means: the package still imports; the visible tests pass; every hidden fail-to-pass test fails twice, because of
the deletion; every pass-to-pass test passes; and with the original code back, the verifier that will judge attempts
finds the task solved.
"""

from __future__ import annotations

import contextlib
import re
import shutil
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from woodshed.grading.verifier import TestRun, run_tests, verify
from woodshed.records import Outcome, Patch, Task
from woodshed.sandbox import Sandbox, open_sandbox
from woodshed.settings import Settings
from woodshed.synthesis import instructions, leaks, operators, pruning
from woodshed.synthesis.baseline import Baseline, failed_imports
from woodshed.synthesis.edits import parse
from woodshed.synthesis.names import Codebase
from woodshed.synthesis.operators import Deletion, Symbol
from woodshed.tasks import folder
from woodshed.tasks.environment import sandbox_spec

GENERATOR = "woodshed-synthesis-1"
"""Part of every task's provenance; raise when the same input gives other tasks."""
MAX_REPAIRS = 5
MAX_PRUNINGS = 4
REPAIRABLE = ("NameError", "ImportError", "ModuleNotFoundError", "AttributeError")


class SynthesisSettings(Settings):
    """How tasks are made."""

    limit: int = 0
    """Most tasks per source; 0 makes all that can be made."""
    operators: tuple[Literal["stub", "remove"], ...] = ("stub", "remove")
    """What is taken away: a function's body, or the function with everything that needs it to import."""
    seed: int = 0
    """Seeds the order in which candidates are tried."""
    jobs: int = 2
    """Candidates proven at the same time; changes nothing but the time it takes."""
    max_body_lines: int = 30
    """Longest body of a function that is taken away, docstring and comments not counted."""
    max_words: int = 90
    """Longest instruction; the docstring is cut to fit."""
    max_cascade: int = 4
    """Most other definitions that may have to go together with a removed one."""
    max_lost: float = 0.5
    """Largest share of the suite that may be lost; beyond it the function is too central for a task."""
    extra_requirements: tuple[str, ...] = ()
    """Requirements of the tests that the repository does not declare, such as "mock"."""
    timeout_s: float = 120.0
    """Seconds for one run of a suite, here and when the task's attempts are graded."""


class Rejected(Exception):  # an answer, not an error
    """A candidate that is not a task: one reason code, and what was seen."""

    def __init__(self, reason: str, detail: str = "") -> None:
        super().__init__(reason)
        self.reason, self.detail = reason, detail[:500]


@dataclass(frozen=True)
class Bench:
    """Everything that the candidates of one repository share."""

    baseline: Baseline
    code: Codebase
    """The .py files of the packages."""
    interfaces: Codebase
    """The .pyi files."""
    tests: Mapping[str, str]
    """Test files that are UTF-8, by path."""
    staging: Path
    """Where tasks lie until they are proven."""
    settings: SynthesisSettings


@dataclass(frozen=True)
class Candidate:
    """One operator on one symbol."""

    name: str
    """Folder name of the task it may become."""
    operator: str
    symbol: Symbol


def bench(baseline: Baseline, staging: Path, settings: SynthesisSettings) -> Bench:
    """Reads the repository's files; those that are not UTF-8 are left alone by every operator."""

    def texts(paths: Iterable[str], suffix: str) -> dict[str, str]:
        found = {}
        for path in paths:
            with contextlib.suppress(UnicodeDecodeError):
                if path.endswith(suffix):
                    found[path] = (baseline.repository.tree / path).read_bytes().decode()
        return found

    roots = baseline.environment.source_roots
    code = Codebase(texts(baseline.package_files, ".py"), roots)
    interfaces = Codebase(texts(baseline.package_files, ".pyi"), roots)
    return Bench(baseline, code, interfaces, texts(baseline.test_files, ".py"), staging, settings)


def prove(work: Bench, candidate: Candidate) -> Task:
    """The candidate as a proven task in the staging folder.

    Raises:
        Rejected: with the reason code of the first check that failed.
    """
    deletion = _delete(work, candidate)
    outcomes = _failures(work, deletion)
    fail_to_pass = tuple(test for test in work.baseline.stable if outcomes[test] != "passed")
    pass_to_pass = tuple(test for test in work.baseline.stable if outcomes[test] == "passed")
    visible, command = _prune(work, deletion, outcomes)
    with _opened(work, deletion.changed) as sandbox:
        again = _run(work, sandbox, fail_to_pass, hash_seed=2)
    if passed := [test for test in fail_to_pass if again.outcomes[test] == "passed"]:
        raise Rejected("unstable_failure", ", ".join(passed))
    try:
        instruction = instructions.write(deletion, command, max_words=work.settings.max_words)
    except instructions.TooLongError as error:
        raise Rejected("instruction_too_long", str(error)) from None
    task = _task(work, candidate, deletion, instruction, command, fail_to_pass, pass_to_pass)
    task = _write(work, task, deletion, visible)
    verdict = verify(task, folder.gold_patch(task))
    if not verdict.solved:
        shutil.rmtree(task.folder)
        failing = [test for test, outcome in verdict.outcomes.items() if outcome != "passed"]
        raise Rejected("gold_fails", ", ".join([*verdict.integrity, *failing]))
    (report,) = leaks.scan([task], rules=leaks.read_rules(leaks.rules_path()), shared=())
    if report.leaks:
        shutil.rmtree(task.folder)
        first = report.leaks[0]
        raise Rejected("leak", f"{first.kind} of {first.what} in {first.where}")
    return task


# ---- the deleted state ------------------------------------------------------------------------------------


def _delete(work: Bench, candidate: Candidate) -> Deletion:
    """The deletion, repaired until every module imports again."""
    modules = work.baseline.modules
    try:
        deletion = operators.OPERATORS[candidate.operator](
            work.code, candidate.symbol, work.settings.max_cascade
        )
        with _opened(work, {}) as sandbox:
            for _ in range(MAX_REPAIRS + 1):
                if bad := [path for path, text in deletion.changed.items() if parse(text) is None]:
                    raise Rejected("syntax", f"the edited {bad[0]} does not parse")
                for path, text in deletion.changed.items():
                    sandbox.write(path, text.encode())
                failed = failed_imports(sandbox, modules)
                if not failed:
                    return operators.remove_interfaces(work.interfaces, deletion)
                error, place = next((why for why in failed.values() if why[1]), next(iter(failed.values())))
                if place is None or candidate.operator == "stub" or not error.startswith(REPAIRABLE):
                    raise Rejected("import_broken", error)
                deletion = operators.repair(work.code, deletion, *place, work.settings.max_cascade)
    except operators.CascadeError as error:
        raise Rejected("cascade", str(error)) from None
    raise Rejected("import_broken", f"still after {MAX_REPAIRS} repairs: {error}")


def _failures(work: Bench, deletion: Deletion) -> dict[str, Outcome]:
    """The outcome of every stable original test without the code: first where the symbol is named, then elsewhere."""
    word = re.compile(rf"\b{re.escape(deletion.symbol.short)}\b")
    near = {path for path, text in work.tests.items() if word.search(text)}
    first = [test for test in work.baseline.stable if test.partition("::")[0] in near]
    rest = [test for test in work.baseline.stable if test.partition("::")[0] not in near]
    if not first:
        raise Rejected("no_test_fails", "no stable test is in a file that names it")
    with _opened(work, deletion.changed) as sandbox:
        runs = [_run(work, sandbox, first)]
        if all(outcome == "passed" for outcome in runs[0].outcomes.values()):
            raise Rejected("no_test_fails", f"{len(first)} tests of files that name it pass without it")
        runs += [_run(work, sandbox, rest)] if rest else []
    for run in runs:
        for test, outcome in run.outcomes.items():
            if outcome != "passed" and (why := _wrong_reason(run, test, deletion)):
                raise Rejected("wrong_reason", f"{test}: {why}")
    outcomes: dict[str, Outcome] = {test: outcome for run in runs for test, outcome in run.outcomes.items()}
    lost = sum(outcome in ("failed", "error") for outcome in outcomes.values())
    if lost > work.settings.max_lost * len(outcomes):
        raise Rejected("too_wide", f"{lost} of {len(outcomes)} tests fail")
    return outcomes


def _wrong_reason(run: TestRun, test: str, deletion: Deletion) -> str:
    """Why a failure is not what missing code looks like; "" when it is."""
    collection = run.collection_errors.get(test.partition("::")[0], "")
    names = {name.rpartition(".")[2] for _, name in deletion.removed} | {deletion.symbol.short}
    if collection and ("SyntaxError" in collection or not any(name in collection for name in names)):
        return collection.strip().splitlines()[-1]
    message = run.messages.get(test, "")
    strange = ["fixture '.*' not found", r"Timeout \("]
    if deletion.operator == "stub":
        strange.append("NotImplementedError")  # of somebody else's stub
    if re.search("|".join(strange), message) and deletion.marker not in message:
        return message
    return ""


def _prune(
    work: Bench, deletion: Deletion, outcomes: Mapping[str, Outcome]
) -> tuple[dict[str, str | None], str]:
    """The visible test files that differ from the originals (None: gone), and the command that runs some."""
    baseline = work.baseline
    failing = {test for test, outcome in outcomes.items() if outcome in ("failed", "error")}
    visible = pruning.prune(deletion, work.tests, failing | set(baseline.broken))
    gone = set(baseline.uncollected)
    for attempt in range(MAX_PRUNINGS):
        state = _changed(work, visible, gone)
        with _opened(work, {**deletion.changed, **state}) as sandbox:
            run = _run(work, sandbox, _touched(work, state))
            now = {**outcomes, **run.outcomes}
            failing = {test for test, outcome in run.outcomes.items() if outcome in ("failed", "error")}
            broken = set(run.collection_errors) - gone
            if not failing and not broken:
                passing = [test for test, outcome in now.items() if outcome == "passed"]
                if len(passing) < max(1.0, (1 - work.settings.max_lost) * len(now)):
                    raise Rejected("too_wide", f"{len(passing)} of {len(now)} tests can stay visible")
                return state, _test_command(sandbox, outcomes, passing)
        gone |= broken
        if attempt >= 2:  # tests that no edit of theirs takes away, such as generated ones
            gone |= {test.partition("::")[0] for test in failing}
        visible = pruning.drop_failing(visible, deletion, failing)
    raise Rejected("visible_tests_fail", ", ".join(sorted(failing | broken)))


def _changed(work: Bench, visible: Mapping[str, str], gone: set[str]) -> dict[str, str | None]:
    changed: dict[str, str | None] = {p: text for p, text in visible.items() if text != work.tests[p]}
    changed.update(dict.fromkeys(gone))
    return changed


def _touched(work: Bench, state: Mapping[str, str | None]) -> list[str]:
    """Stable tests that a change of these files can affect; results of the others are known already."""
    holding = {test.partition("::")[0] for test in work.baseline.stable}
    everywhere = any(path not in holding for path in state)  # a conftest, or a module that tests share
    return [test for test in work.baseline.stable if everywhere or test.partition("::")[0] in state]


def _test_command(sandbox: Sandbox, outcomes: Mapping[str, Outcome], passing: list[str]) -> str:
    """A command for the agent: the visible tests nearest to the gap, which pass."""
    shown = list(dict.fromkeys(test.partition("::")[0] for test in passing))
    lost = [test.partition("::")[0] for test, outcome in outcomes.items() if outcome != "passed"]
    path = max(shown, key=lambda file: (lost.count(file), -shown.index(file)))
    for options in ("-q", "-q -o addopts="):
        command = f"python -m pytest {options} {path}"
        if sandbox.exec(command, timeout_s=120).outcome == "ok":
            return command
    raise Rejected("test_command_fails", command)


# ---- the task ---------------------------------------------------------------------------------------------


def _task(
    work: Bench,
    candidate: Candidate,
    deletion: Deletion,
    instruction: str,
    command: str,
    fail_to_pass: tuple[str, ...],
    pass_to_pass: tuple[str, ...],
) -> Task:
    repository = work.baseline.repository
    return Task(
        id="",
        name=candidate.name,
        folder=work.staging / candidate.name,
        instruction=instruction,
        environment=work.baseline.environment,
        allowed_paths=work.baseline.allowed_paths,
        fail_to_pass=fail_to_pass,
        pass_to_pass=pass_to_pass,
        operator=deletion.operator,
        level=deletion.level,
        target_path=candidate.symbol.path,
        target_symbol=candidate.symbol.name,
        target_lines=deletion.gap,
        test_command=command,
        verify_timeout_s=work.settings.timeout_s,
        provenance={
            "source": repository.source,
            "sha256": repository.sha256,
            "licence": repository.licence,
            "generator": GENERATOR,
            "seed": work.settings.seed,
        },
    )


def _write(work: Bench, task: Task, deletion: Deletion, visible: Mapping[str, str | None]) -> Task:
    """The task's folder in staging: the deleted state, the original tests, the original code as gold patch."""
    tree = work.baseline.repository.tree
    workspace = work.staging / f".{task.name}"
    shutil.copytree(tree, workspace, symlinks=True)
    for path, text in {**deletion.changed, **visible}.items():
        if text is None:
            (workspace / path).unlink()
        else:
            (workspace / path).write_bytes(text.encode())
    tests = {path: (tree / path).read_bytes() for path in work.baseline.test_files}
    gold = {path: (tree / path).read_bytes() for path in deletion.changed}
    written = folder.write(task, task.folder, workspace=workspace, tests=tests, gold=dict(gold))
    shutil.rmtree(workspace)
    return written


def check(task: Task) -> list[str]:
    """Proves a task again from its folder alone; the reasons why not, none when it holds."""
    gold = folder.gold_patch(task)
    if not gold.files:
        return [f"{task.name}: the gold patch is absent: solution/files holds nothing"]
    reasons = []
    before, after = verify(task, Patch(files={})), verify(task, gold)
    for verdict, when in ((before, "before any edit"), (after, "after the gold patch")):
        if verdict.status == "invalid" or verdict.integrity:
            why = "; ".join(verdict.integrity) or verdict.detail.strip()[-300:]
            reasons.append(f"{task.name}: the tests could not be run {when}: {why}")
    if reasons:
        return reasons
    passing = [test for test in task.fail_to_pass if before.outcomes[test] == "passed"]
    if passing:
        total = len(task.fail_to_pass)
        what = "so there is nothing to learn" if len(passing) == total else "so they prove nothing"
        already = f"{len(passing)} of {total} hidden tests already pass before any edit, {what}"
        reasons.append(f"{task.name}: {already}: {_some(passing)}")
    if broken := [test for test in task.pass_to_pass if before.outcomes[test] != "passed"]:
        reasons.append(f"{task.name}: {len(broken)} pass-to-pass tests fail before any edit: {_some(broken)}")
    if failing := [test for test, outcome in after.outcomes.items() if outcome != "passed"]:
        reasons.append(f"{task.name}: {len(failing)} tests fail after the gold patch: {_some(failing)}")
    with open_sandbox(sandbox_spec(task)) as sandbox:
        result = sandbox.exec(task.test_command, timeout_s=task.verify_timeout_s)
    if result.outcome != "ok":
        reasons.append(
            f"{task.name}: the visible tests do not pass: `{task.test_command}` ended as {result.outcome}"
        )
    return reasons


def _some(tests: list[str]) -> str:
    return ", ".join(tests[:3]) + (", ..." if len(tests) > 3 else "")


# ---- sandboxes --------------------------------------------------------------------------------------------


@contextlib.contextmanager
def _opened(work: Bench, files: Mapping[str, str | None]) -> Iterator[Sandbox]:
    """A fresh sandbox of the repository with some files changed (None: deleted)."""
    with open_sandbox(work.baseline.spec) as sandbox:
        for path, text in files.items():
            if text is not None:
                sandbox.write(path, text.encode())
        if gone := [path for path, text in files.items() if text is None]:
            sandbox.exec(["rm", "-f", "--", *gone])
        yield sandbox


def _run(work: Bench, sandbox: Sandbox, ids: Iterable[str], hash_seed: int = 0) -> TestRun:
    run = run_tests(
        sandbox,
        ids=list(ids),
        packages=work.baseline.environment.packages,
        timeout_s=work.settings.timeout_s,
        hash_seed=hash_seed,
    )
    if run.timed_out:
        raise Rejected("timeout", f"tests ran longer than {work.settings.timeout_s:.0f} s")
    if run.integrity:
        raise Rejected("not_believable", "; ".join(run.integrity))
    return run
