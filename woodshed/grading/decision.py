"""The decision on a patch: the runs of the tests that it takes, and the verdict that they add up to.

`pytest_verifier` runs tests in fresh sandboxes, and what a task folder ships (`shipped`) runs them in the box of
another harness. Both are a `Box` and are decided on here, by the same lines. Four things must hold for a reward: the
run can be believed (`results`), the tests on disk were until the end what they were at the start, every expected test
passed, and whatever could be called before still can be (`api_compat`).

Standard library only.
"""

from __future__ import annotations

import dataclasses
import random
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Literal, Protocol, cast

from woodshed.boundary import contained
from woodshed.grading.decoys import Disguise
from woodshed.grading.decoys import disguise as disguised
from woodshed.grading.patches import LINE_END, added_lines, left_behind
from woodshed.grading.results import SessionRequest, TestRun
from woodshed.pysource import api_compat, syntax
from woodshed.pysource.api_compat import Api, SourceTree
from woodshed.records import Outcome, Task, Verdict
from woodshed.tasks.contents import original, protected_files

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


class Box(Protocol):
    """A place where the tests of one patch run, as often as the decision asks."""

    def run(self, crossed: Files, tests: Sequence[str], timeout_s: float, *, isolate: bool) -> TestRun:
        """Run some tests over the files of a patch, with nothing of an earlier run left."""
        ...

    def original_api(self) -> Api:
        """The definitions of the modules that the solved task changes."""
        ...

    def isolated_tests(self) -> Sequence[str]:
        """Fail-to-pass tests that pass with the original code in another process."""
        ...


def decide(
    task: Task,
    crossed: Files,
    left: Mapping[str, str],
    box: Box,
    *,
    timeout_s: float,
    isolate_tests: Isolation,
    shaped: bool,
) -> Verdict:
    """The verdict on the files of a patch that crossed; the id of the rollout and the seconds are left empty.

    Args:
        left: the files that did not cross, with the reason.
        timeout_s: for one run of the tests; a run in two processes has twice as long.
        isolate_tests, shaped: as in `GradingSettings`.
    """
    notes = left_behind(left)
    run = box.run(crossed, (*task.fail_to_pass, *task.pass_to_pass), timeout_s, isolate=False)
    if solves(run):
        removed = contained(
            lambda: removed_api(task, crossed, box.original_api()), lambda error: [f"{UNREADABLE}: {error}"]
        )
        run = dataclasses.replace(run, integrity=tuple(removed[:MOST_NOTES]))
    is_due = isolate_tests == "always" or (isolate_tests == "suspect" and is_suspect(task, crossed))
    if solves(run) and is_due:
        isolated = box.isolated_tests()
        notes.append(f"isolated: {len(isolated)} of {len(task.fail_to_pass)} fail-to-pass tests")
        if isolated:
            again = box.run(crossed, isolated, 2 * timeout_s, isolate=True)
            outcomes, log = run.outcomes | again.outcomes, run.log + again.log
            run = dataclasses.replace(run, outcomes=outcomes, integrity=again.integrity, log=log)
    return Verdict(
        rollout_id="",
        task_id=task.id,
        status="graded" if run.started else "invalid",
        reward=reward(task, run.outcomes, run.integrity, shaped=shaped),
        solved=solves(run),
        outcomes=run.outcomes,
        integrity=run.integrity,
        detail="\n".join([*notes, run.log[-4000:]]),
    )


def solves(run: TestRun) -> bool:
    """True if a run can be believed and every expected test passed."""
    return not run.integrity and all(outcome == "passed" for outcome in run.outcomes.values())


def reward(task: Task, outcomes: Mapping[str, Outcome], integrity: Sequence[str], *, shaped: bool) -> float:
    """1 for a run that solves the task, else 0; `shaped` gives a share, at most 0.9, for some of the tests."""
    is_solved = not integrity and all(outcome == "passed" for outcome in outcomes.values())
    if is_solved or integrity or not shaped:
        return float(is_solved)

    def share(tests: Sequence[str]) -> float:
        return sum(outcomes[test] == "passed" for test in tests) / max(len(tests), 1)

    # The stub that a patch resembles most decides: none of them earns anything, and no predicate loses half its tests.
    idle = [set[str](), *map(set, task.stub_passes.values())]
    behaviour = min(share([test for test in task.fail_to_pass if test not in tests]) for tests in idle)
    return min(0.9, behaviour * (share(task.pass_to_pass) if task.pass_to_pass else 1.0))


def removed_api(task: Task, files: Mapping[str, bytes | str | None], right: Api) -> list[str]:
    """Lines on what a patch takes from those who call the task's code (`api_compat.narrowed`)."""

    def shown(path: str) -> str | None:
        try:
            return syntax.legible(original(task, path).read_bytes())
        except (OSError, ValueError):  # none there, or no name that a file could have
            return None

    def patched(path: str) -> str | None:
        text = files[path] if path in files else shown(path)
        return syntax.legible(text) if isinstance(text, bytes) else text

    roots = task.environment.source_roots
    return api_compat.narrowed(
        SourceTree(shown, roots),
        SourceTree(patched, roots),
        [path for path in files if path.endswith(".py")],
        original=right,
        words=api_compat.words_of(task.instruction),
        private=task.target_symbol,
    )


def is_suspect(task: Task, crossed: Files) -> bool:
    """True if lines that a patch adds mention what would let code look at its tests."""
    for path, data in crossed.items():
        lines = LINE_END.split(data or b"")
        added = b"\n".join(lines[number - 1] for number in added_lines(task, path, data or b""))
        if SUSPECT.search(added.decode("utf-8", errors="replace")):
            return True
    return False


def hidden_sources(task: Task) -> dict[str, bytes]:
    """Files of the fail-to-pass tests, which lie empty in a box: code could look up there what it has to return.

    The rare test that reads its own file (the interpreter prints a traceback) fails then, also with the original code;
    the proof of a task says so.
    """
    wanted = {test.partition("::")[0] for test in task.fail_to_pass}
    return {p: data for p, data in protected_files(task).items() if p in wanted and p.endswith(".py")}


def session_of(
    task: Task,
    crossed: Files,
    tests: Sequence[str],
    *,
    compiled: Mapping[str, Sequence[object]] | None = None,
    isolate: bool,
) -> tuple[SessionRequest, Disguise]:
    """The session of some tests over the files of a patch, among decoys and under names drawn for this run."""
    sources = hidden_sources(task)
    disguise = disguised(sources, tests, task.decoys, random.SystemRandom())
    ready = {p: made for p, made in (compiled or {}).items() if disguise.sources.get(p) == sources.get(p)}
    patched = {path: added_lines(task, path, data or b"") for path, data in crossed.items()}
    packages = task.environment.packages
    return SessionRequest(disguise.ids, packages, patched, disguise.sources, ready, isolate), disguise


def understood(run: TestRun, disguise: Disguise, altered: Iterable[str]) -> TestRun:
    """The run by the tests' own names; decoys that did not fail and originals that were altered are faults."""
    faults = tuple(f"{path} was changed while the tests ran" for path in altered)
    return dataclasses.replace(
        run,
        outcomes=cast("dict[str, Outcome]", disguise.outcomes(run.outcomes)),
        integrity=run.integrity + faults + disguise.faults(run.outcomes),
    )
