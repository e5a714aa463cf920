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
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from contextlib import closing
from typing import NamedTuple, Protocol, cast

from woodshed.boundary import contained
from woodshed.grading.decoys import Disguise, covered
from woodshed.grading.decoys import disguise as disguised
from woodshed.grading.patches import added_lines, left_behind
from woodshed.grading.results import Kind, SessionRequest, TestRun, drawn
from woodshed.pysource import api_compat, syntax
from woodshed.pysource.api_compat import Api, SourceTree
from woodshed.records import Outcome, Task, Verdict
from woodshed.tasks.contents import original, protected_files

Files = Mapping[str, bytes | None]
"""Whole files by path; None: deleted."""

MOST_NOTES = 50
UNREADABLE = "the patch cannot be compared with the interface that it has to keep"


DISAGREE = "a test passes in some surroundings and not in others"


class Planned(NamedTuple):
    """One run of some tests."""

    tests: Sequence[str]
    timeout_s: float
    kind: Kind


class Box(Protocol):
    """A place where the tests of one patch run, as often as the decision asks."""

    def runs(self, crossed: Files, planned: Sequence[Planned]) -> Generator[TestRun, None, None]:
        """Run tests over the files of a patch, in this order, each with nothing of another run left. Closing it gives
        up what is left."""
        ...

    def original_api(self) -> Api:
        """The definitions of the modules that the solved task changes."""
        ...

    def isolated_tests(self) -> Sequence[str]:
        """Tests that pass with the original code in another process: fail-to-pass, and some of the others."""
        ...


def decide(
    task: Task,
    crossed: Files,
    left: Mapping[str, str],
    box: Box,
    *,
    timeout_s: float,
    shaped: bool,
) -> Verdict:
    """The verdict on the files of a patch that crossed; the id of the rollout and the seconds are left empty.

    Tests that can be isolated come first, since most patches fail there and nothing is left to find out. What may be
    paid then runs in the ordinary process with all others, and what cannot be isolated once more: so each hidden test
    is judged in two surroundings, and pays where both agree.

    Args:
        left: the files that did not cross, with the reason.
        timeout_s: for one run of the tests; a run in two processes has twice as long.
        shaped: as in `GradingSettings`.
    """
    known = set(box.isolated_tests())
    isolated, guards = (
        [test for test in tests if test in known] for tests in (task.fail_to_pass, task.pass_to_pass)
    )
    notes = [*left_behind(left), f"isolated: {len(isolated)} of {len(task.fail_to_pass)} fail-to-pass tests"]
    runs: list[TestRun] = []
    with closing(box.runs(crossed, plan(task, isolated, guards, timeout_s))) as going:
        for run in going:
            runs.append(run)
            if not may_pay(task, runs, isolated, shaped=shaped):
                break
    run = merged((*task.fail_to_pass, *task.pass_to_pass), runs)
    if may_pay(task, runs, isolated, shaped=shaped):
        run = dataclasses.replace(run, integrity=run.integrity + interface_notes(task, crossed, box))
    return Verdict(
        rollout_id="",
        task_id=task.id,
        status="graded" if run.started else "invalid",
        reward=reward(task, run.outcomes, run.integrity, isolated, shaped=shaped),
        solved=solves(run),
        outcomes=run.outcomes,
        integrity=run.integrity,
        detail="\n".join([*notes, run.log[-4000:]]),
    )


def interface_notes(task: Task, crossed: Files, box: Box) -> tuple[str, ...]:
    """Integrity notes on what could be called before and cannot be called any more."""
    removed = contained(
        lambda: removed_api(task, crossed, box.original_api()), lambda error: [f"{UNREADABLE}: {error}"]
    )
    return tuple(removed[:MOST_NOTES])


def plan(task: Task, isolated: Sequence[str], guards: Sequence[str], timeout_s: float) -> list[Planned]:
    """The runs in their order.

    Args:
        guards: isolated tests that passed before: code that breaks them could hide that in the ordinary run alone.
    """
    rest = [test for test in task.fail_to_pass if test not in isolated]
    runs = [
        Planned((*isolated, *guards), 2 * timeout_s, "isolated"),
        Planned((*task.fail_to_pass, *task.pass_to_pass), timeout_s, "ordinary"),
        Planned(rest, timeout_s, "again"),
    ]
    return [run for run in runs if run.tests]


def solves(run: TestRun) -> bool:
    """True if a run can be believed and every expected test passed."""
    return not run.integrity and all(outcome == "passed" for outcome in run.outcomes.values())


def may_pay(task: Task, runs: Sequence[TestRun], isolated: Sequence[str], *, shaped: bool) -> bool:
    """True if there is a reward in it should every test pass that has not run yet."""
    everything = (*task.fail_to_pass, *task.pass_to_pass)
    best: dict[str, Outcome] = dict.fromkeys(everything, "passed")
    run = merged(everything, runs)
    ran = {test for each in runs for test in each.outcomes}
    best |= {test: outcome for test, outcome in run.outcomes.items() if test in ran}
    return run.started and reward(task, best, run.integrity, isolated, shaped=shaped) > 0


def merged(tests: Sequence[str], runs: Sequence[TestRun]) -> TestRun:
    """Several runs of tests as one: a test passed if it did in every run that it was part of.

    A test that passes here and fails there is a fault: code that is right only where it believes to be watched, or
    unwatched, is not right.
    """
    outcomes: dict[str, Outcome] = dict.fromkeys(tests, "missing")
    differing: list[str] = []
    for test in tests:
        seen: list[Outcome] = [run.outcomes[test] for run in runs if test in run.outcomes]
        passed = [outcome == "passed" for outcome in seen]
        if seen:
            outcomes[test] = seen[next((place for place, is_right in enumerate(passed) if not is_right), 0)]
        if any(passed) and not all(passed):
            differing.append(test)
    faults = tuple(dict.fromkeys(fault for run in runs for fault in run.integrity))
    if differing and not faults:
        faults = (f"{DISAGREE}: {', '.join(differing[:3])}",)
    return dataclasses.replace(
        runs[-1],
        outcomes=outcomes,
        durations={k: v for run in runs for k, v in run.durations.items()},
        messages={k: v for run in runs for k, v in run.messages.items()},
        integrity=faults,
        started=all(run.started for run in runs),
        timed_out=any(run.timed_out for run in runs),
        seconds=sum(run.seconds for run in runs),
        log="\n".join(run.log for run in runs),
    )


def reward(
    task: Task,
    outcomes: Mapping[str, Outcome],
    integrity: Sequence[str],
    isolated: Sequence[str],
    *,
    shaped: bool,
) -> float:
    """1 for a run that solves the task, else 0; `shaped` gives a share, at most 0.9, for some of the tests.

    Paid are tests that are isolated or have a decoy: of the others a pass in one process proves little. So a task that
    has no other ones pays nothing.
    """
    is_solved = not integrity and all(outcome == "passed" for outcome in outcomes.values())
    paid = believed(task, isolated)
    if is_solved or integrity or not shaped:
        return float(is_solved and bool(paid))

    def share(tests: Sequence[str], counted: Callable[[str], bool]) -> float:
        return sum(outcomes[test] == "passed" and counted(test) for test in tests) / max(len(tests), 1)

    # The stub that a patch resembles most decides: none of them earns anything, and no predicate loses half its tests.
    idle = [set[str](), *map(set, task.stub_passes.values())]
    behaviour = min(
        share([test for test in task.fail_to_pass if test not in tests], paid.__contains__) for tests in idle
    )
    return min(0.9, behaviour * (share(task.pass_to_pass, lambda test: True) if task.pass_to_pass else 1.0))


def believed(task: Task, isolated: Sequence[str]) -> set[str]:
    """The hidden tests that are isolated or have a decoy."""
    return {test for test in task.fail_to_pass if test in set(isolated) or covered([test], task.decoys)}


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
    kind: Kind,
    *,
    compiled: Mapping[str, Sequence[object]] | None = None,
) -> tuple[SessionRequest, Disguise]:
    """The session of some tests over the files of a patch, among decoys and under names drawn for this run."""
    sources = hidden_sources(task)
    disguise = disguised(sources, tests, task.decoys, random.SystemRandom())
    ready = {p: made for p, made in (compiled or {}).items() if disguise.sources.get(p) == sources.get(p)}
    request = SessionRequest(
        disguise.ids,
        task.environment.packages,
        {path: added_lines(task, path, data or b"") for path, data in crossed.items()},
        disguise.sources,
        ready,
        kind,
        [path for path in protected_files(task) if path.endswith(".py")],
        drawn(kind),
        task.environment.pytest_options,
    )
    return request, disguise


def understood(run: TestRun, disguise: Disguise, altered: Iterable[str]) -> TestRun:
    """The run by the tests' own names; decoys that did not fail and originals that were altered are faults."""
    faults = tuple(f"{path} was changed while the tests ran" for path in altered)
    return dataclasses.replace(
        run,
        outcomes=cast("dict[str, Outcome]", disguise.outcomes(run.outcomes)),
        integrity=run.integrity + faults + disguise.faults(run.outcomes),
    )
