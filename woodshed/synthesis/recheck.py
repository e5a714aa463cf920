"""Proof of a finished task from its folder alone: it fails before the gold patch and passes after it."""

from __future__ import annotations

from woodshed.grading import grade, outcomes_of
from woodshed.records import Patch, Task
from woodshed.sandbox import BUBBLEWRAP, SandboxProvider
from woodshed.synthesis import impossible
from woodshed.synthesis.leaks.shown import shown_tests
from woodshed.tasks import folder
from woodshed.tasks.environment import sandbox_spec


def check(task: Task, sandboxes: SandboxProvider = BUBBLEWRAP) -> list[str]:
    """Reasons why a task is not proven; none if it is."""
    if task.operator == "impossible":
        return impossible.reasons_against(task, sandboxes)
    gold = folder.gold_patch(task)
    if not gold.files:
        return [f"{task.name}: the gold patch is absent: solution/files holds nothing"]
    reasons = []
    before, after = outcomes_of(task, Patch(files={}), sandboxes), grade(task, gold, sandboxes)
    for verdict, moment in ((before, "before any edit"), (after, "after the gold patch")):
        if verdict.status == "invalid" or verdict.integrity:
            detail = "; ".join(verdict.integrity) or verdict.detail.strip()[-300:]
            reasons.append(f"{task.name}: the tests could not be run {moment}: {detail}")
    if task.verifier == "command" and not reasons:
        reasons += [f"{task.name}: its command pays in full before any edit"] if before.solved else []
        reasons += (
            [] if after.solved else [f"{task.name}: its command pays {after.reward:g} after the gold patch"]
        )
    if reasons or task.verifier == "command":
        return reasons
    passing = [test for test in task.fail_to_pass if before.outcomes[test] == "passed"]
    if passing:
        total = len(task.fail_to_pass)
        consequence = "so there is nothing to learn" if len(passing) == total else "so they prove nothing"
        reasons.append(
            f"{task.name}: {len(passing)} of {total} hidden tests already pass before any edit, {consequence}: "
            f"{_some(passing)}"
        )
    if broken := [test for test in task.pass_to_pass if before.outcomes[test] != "passed"]:
        reasons.append(f"{task.name}: {len(broken)} pass-to-pass tests fail before any edit: {_some(broken)}")
    if failing := [test for test, outcome in after.outcomes.items() if outcome != "passed"]:
        reasons.append(f"{task.name}: {len(failing)} tests fail after the gold patch: {_some(failing)}")
    if shown := shown_tests(task, sandboxes):
        tests = _some(list(dict.fromkeys(f"{each.test} in {each.where}" for each in shown)))
        reasons.append(f"{task.name}: {len(shown)} hidden tests can be read in the workspace: {tests}")
    with sandboxes.open(sandbox_spec(task)) as sandbox:
        result = sandbox.exec(task.test_command, timeout_s=task.verify_timeout_s)
    if result.outcome != "ok" and task.provenance.get("visibility") not in ("shown", "half"):
        reasons.append(
            f"{task.name}: the visible tests do not pass: `{task.test_command}` ended as {result.outcome}"
        )
    return reasons


def _some(tests: list[str]) -> str:
    return ", ".join(tests[:3]) + (", ..." if len(tests) > 3 else "")
