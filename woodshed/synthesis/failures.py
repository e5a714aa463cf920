"""Tests that fail without the code, and for the right reason."""

from __future__ import annotations

import re
from collections.abc import Mapping, Set
from dataclasses import dataclass

from woodshed.grading import TestRun
from woodshed.records import Outcome
from woodshed.synthesis.conftests import PrunedConftests, pruned
from woodshed.synthesis.operators import Deletion
from woodshed.synthesis.repository_context import Candidate, Rejected, RepositoryContext

HASH_SEEDS = (2, 3)
"""Of the first two runs in which a fail-to-pass test must fail; the third is the verifier's."""


@dataclass(frozen=True)
class Failures:
    """Outcomes of every stable test without the code."""

    outcomes: Mapping[str, Outcome]
    """With the conftest files as they are shown."""
    conftests: PrunedConftests

    @property
    def lost(self) -> tuple[str, ...]:
        """Tests that miss the behaviour."""
        return tuple(test for test, outcome in self.outcomes.items() if outcome != "passed")

    @property
    def fail_to_pass(self) -> tuple[str, ...]:
        """Tests that fail with the original conftest files: all, where these cannot be imported."""
        return tuple(self.outcomes) if self.conftests.files else self.lost


def what_fails(
    work: RepositoryContext, candidate: Candidate, deletion: Deletion, affected: Set[str]
) -> Failures:
    """The outcome of every stable original test without the code; where a conftest cannot be imported, with that one
    as it will be shown.

    Raises:
        Rejected: conftest_broken, and as `RepositoryContext.run`.
    """
    try:
        return _failures_with(work, candidate, deletion, affected, PrunedConftests())
    except Rejected as rejection:
        if rejection.reason != "conftest_broken":
            raise
    return _failures_with(work, candidate, deletion, affected, pruned(work, deletion))


def _failures_with(
    work: RepositoryContext,
    candidate: Candidate,
    deletion: Deletion,
    affected: Set[str],
    shown: PrunedConftests,
) -> Failures:
    """The outcomes, in two steps.

    The tests that run the code come first, with one test of each file that names what is gone (such files may not be
    collected any more) and all of them that are not mapped. Others that are known to be `affected` run where the first
    ones failed for the right reason. Of the rest it is assumed that they pass, but for those of files that cannot be
    collected.
    """
    stable = work.baseline.stable
    covering = set(work.map.names(candidate.tests)) or set(stable)
    gone = re.compile("|".join(rf"\b{re.escape(name)}\b" for name in sorted(deletion.words)) or "(?!)")
    opening = {test.partition("::")[0]: test for test in reversed(stable)}
    named = {path for path, text in work.tests.items() if gone.search(text)}
    covering |= {test for file, test in opening.items() if file in named}
    covering |= {test for test in work.map.unmapped if test.partition("::")[0] in named}
    first = [test for test in stable if test in covering]
    rest = [test for test in stable if test in affected - covering]
    outcomes: dict[str, Outcome] = dict.fromkeys(stable, "passed")
    words = deletion.words | shown.words
    with work.opened({**deletion.changed, **shown.files}) as sandbox:
        run = work.run(sandbox, first, HASH_SEEDS[0])
        if all(outcome == "passed" for outcome in run.outcomes.values()):
            raise Rejected("no_test_fails", f"{len(first)} tests that run it pass without it")
        _reasons(work, candidate, deletion, run, words)
        outcomes |= run.outcomes
        outcomes |= {test: "missing" for test in stable if test.partition("::")[0] in run.collection_errors}
        _width(work, outcomes)
        if rest:
            run = work.run(sandbox, rest, HASH_SEEDS[0])
            _reasons(work, candidate, deletion, run, words)
            outcomes |= run.outcomes
            _width(work, outcomes)
    return Failures(outcomes, shown)


def _width(work: RepositoryContext, outcomes: Mapping[str, Outcome]) -> None:
    lost = sum(outcome in ("failed", "error") for outcome in outcomes.values())
    if lost > work.settings.max_lost * len(work.baseline.stable):
        raise Rejected("too_wide", f"{lost} of {len(work.baseline.stable)} tests fail")


def _reasons(
    work: RepositoryContext, candidate: Candidate, deletion: Deletion, run: TestRun, words: Set[str]
) -> None:
    for test, outcome in run.outcomes.items():
        if outcome != "passed" and (why := _wrong_reason(work, candidate, deletion, run, test, words)):
            raise Rejected("wrong_reason", f"{test}: {why}")


def _wrong_reason(
    work: RepositoryContext,
    candidate: Candidate,
    deletion: Deletion,
    run: TestRun,
    test: str,
    words: Set[str],
) -> str:
    """Reason why a failure does not look like missing code, or "".

    Right: the file cannot be collected because of a removed name; the message has such a name; or the test ran the
    code that is missing. Wrong: syntax, missing fixtures, time, other stubs, and tests that never touched the code.
    """
    collection = run.collection_errors.get(test.partition("::")[0], "")
    if collection:
        named = any(re.search(rf"\b{re.escape(word)}\b", collection) for word in words)
        return "" if named and "SyntaxError" not in collection else collection.strip().splitlines()[-1]
    message = run.messages.get(test, "")
    if any(re.search(rf"(?<!\w){re.escape(word)}(?!\w)", message) for word in words):
        return ""
    if "CalledProcessError" in message:  # a process of its own ran the code, where nobody could look
        return ""
    strange = ["fixture '.*' not found", r"Timeout \(", "SyntaxError"]
    if not deletion.removed:
        strange.append("NotImplementedError")  # of somebody else's stub
    if re.search("|".join(strange), message):
        return message
    known = candidate.tests | work.map.bits.get(test, 0) == candidate.tests or test in work.map.unmapped
    return (
        ""
        if known or not candidate.tests or deletion.removed
        else message or "fails without running the code"
    )
