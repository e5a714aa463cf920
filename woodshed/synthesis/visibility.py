"""Tests that the agent sees: the workspace's test files, and a command that runs some of them."""

from __future__ import annotations

import random
import shlex
from collections.abc import Iterable, Mapping, Set

from woodshed.records import Outcome
from woodshed.sandbox import Sandbox
from woodshed.synthesis import pruning, selection
from woodshed.synthesis.baseline import UNNAMEABLE, settled
from woodshed.synthesis.operators import Deletion
from woodshed.synthesis.repository_context import Rejected, RepositoryContext

MAX_PRUNINGS = 4
NO_TESTS = 'python -c "import {package}"'

State = dict[str, str | None]
"""Test files that differ from the originals, by path; None for one that is gone."""


def show(
    work: RepositoryContext, deletion: Deletion, outcomes: Mapping[str, Outcome], name: str
) -> tuple[State, str]:
    """The visible test files and the command to run, by `SynthesisSettings.visibility`.

    Raises:
        Rejected: too_wide, visible_tests_fail, test_command_fails, or half_visible (no honest half can be shown).
    """
    baseline, mode = work.baseline, work.settings.visibility
    if mode == "none":
        command = NO_TESTS.format(package=baseline.environment.packages[0])
        return dict.fromkeys(sorted(set(baseline.test_files) | set(work.tests))), command
    failing = {test for test, outcome in outcomes.items() if outcome in ("failed", "error")}
    if mode == "shown":
        return _as_it_is(work, deletion, outcomes)
    if mode == "half":
        return _half(work, deletion, outcomes, name)
    visible = pruning.prune(deletion, work.tests, failing | set(baseline.broken))
    return _until_green(work, deletion, outcomes, visible)


def _as_it_is(
    work: RepositoryContext, deletion: Deletion, outcomes: Mapping[str, Outcome]
) -> tuple[State, str]:
    """All tests but those that fail anyway; the command runs the files that have work in them."""
    visible = pruning.drop_failing(work.tests, deletion, work.baseline.broken)
    state = _changed(work, visible, set(work.baseline.uncollected))
    files = _by_loss(outcomes)
    return state, command_for(_plainly(work), files[0])


def _half(
    work: RepositoryContext, deletion: Deletion, outcomes: Mapping[str, Outcome], name: str
) -> tuple[State, str]:
    """A seeded half of the fail-to-pass tests; by whole files where a removal keeps them from being collected."""
    lost = [test for test, outcome in outcomes.items() if outcome != "passed"]
    files = sorted({test.partition("::")[0] for test in lost})
    units = files if deletion.removed else sorted({test.partition("[")[0] for test in lost})
    if unread := [file for file in files if file not in work.tests]:
        raise Rejected("half_visible", f"{unread[0]} cannot be read, so no half of it can be shown")
    if len(units) < 2:
        raise Rejected("half_visible", f"{units[0]} cannot be shown by half")
    hidden = set(random.Random(name).sample(units, len(units) // 2))
    visible_tests = {test for test in lost if not {test.partition("[")[0], test.partition("::")[0]} & hidden}
    failing = set(lost) - visible_tests | set(work.baseline.broken)
    visible = pruning.drop_failing(work.tests, deletion, failing)
    if deletion.removed:
        pruned = pruning.prune(deletion, work.tests, failing)
        visible = {path: pruned[path] if path in hidden else visible[path] for path in visible}
    state = _changed(work, visible, set(work.baseline.uncollected))
    shown = [file for file in _by_loss(outcomes) if file not in hidden]
    return state, command_for(_plainly(work), shown[0])


def command_for(options: str, path: str) -> str:
    """pytest on one file, whatever its name: quoted for the shell, and no option or argument file for pytest."""
    path_argument = f"./{path}" if path.startswith(("-", "@")) else path
    return f"python -m pytest {options} {shlex.quote(path_argument)}"


def _by_loss(outcomes: Mapping[str, Outcome]) -> list[str]:
    """Test files with work in them, most of it first."""
    lost = [test.partition("::")[0] for test, outcome in outcomes.items() if outcome != "passed"]
    return sorted(set(lost), key=lambda file: (-lost.count(file), file))


def _until_green(
    work: RepositoryContext, deletion: Deletion, outcomes: Mapping[str, Outcome], visible: Mapping[str, str]
) -> tuple[State, str]:
    """Prunes again what still fails, until everything that is shown passes."""
    unnameable = {
        path for path in work.baseline.test_files if UNNAMEABLE.search(path)
    }  # nobody knows what they do
    removed, failing, broken = unnameable.union(work.baseline.uncollected), set(), set()
    lost = {test for test, outcome in outcomes.items() if outcome != "passed"}
    for attempt in range(MAX_PRUNINGS):
        state = _changed(work, visible, removed)
        with work.opened({**deletion.changed, **state}) as sandbox:
            run = work.run(sandbox, _touched(work, state, lost))
            all_outcomes = {**outcomes, **run.outcomes}
            failing = {test for test, outcome in run.outcomes.items() if outcome in ("failed", "error")}
            failing |= {t for t in lost if run.outcomes.get(t, "missing") not in ("missing", "passed")}
            broken = set(run.collection_errors) - removed
            if not failing and not broken:
                passing = [test for test, outcome in all_outcomes.items() if outcome == "passed"]
                if len(passing) < max(1.0, (1 - work.settings.max_lost) * len(all_outcomes)):
                    raise Rejected(
                        "too_wide", f"{len(passing)} of {len(all_outcomes)} tests can stay visible"
                    )
                return state, _test_command(work, sandbox, outcomes, passing)
        removed |= broken
        if attempt >= 2:  # tests that no edit of theirs takes away, such as generated ones
            removed |= {test.partition("::")[0] for test in failing}
        visible = pruning.drop_failing(visible, deletion, failing)
    raise Rejected("visible_tests_fail", ", ".join(sorted(failing | broken)))


def _changed(work: RepositoryContext, visible: Mapping[str, str], removed: Iterable[str]) -> State:
    changed: State = {path: text for path, text in visible.items() if text != work.tests[path]}
    changed.update(dict.fromkeys(removed))
    return changed


def _touched(work: RepositoryContext, state: State, lost: Set[str]) -> list[str]:
    """Stable tests that a change of these files can affect, and those that nobody may see any more; results of the
    others are known already."""
    holding = {test.partition("::")[0] for test in work.baseline.stable}
    everywhere = any(path not in holding for path in state)  # a conftest, or a module that tests share
    return [
        test
        for test in work.baseline.stable
        if everywhere or test in lost or test.partition("::")[0] in state
    ]


def _plainly(work: RepositoryContext) -> str:
    """Options of pytest without the repository's addopts, but with its selection."""
    return shlex.join(["-q", "-o", "addopts=", *work.baseline.environment.pytest_options])


def _test_command(
    work: RepositoryContext, sandbox: Sandbox, outcomes: Mapping[str, Outcome], passing: list[str]
) -> str:
    """A command for the agent: the visible tests nearest to the gap, which pass."""
    shown = list(dict.fromkeys(test.partition("::")[0] for test in passing))
    lost = [test.partition("::")[0] for test, outcome in outcomes.items() if outcome != "passed"]
    path = max(shown, key=lambda file: (lost.count(file), -shown.index(file)))
    asked = selection.asked(work.settings.pytest_args, work.settings.deselect)
    for options in (shlex.join(["-q", *asked]), _plainly(work)):
        command = command_for(options, path)
        if settled(sandbox.exec(command, timeout_s=120), command).outcome == "ok":
            return command
    raise Rejected("test_command_fails", command)
