"""Stored attempts judged again with the rules of today: what would their verdicts be now?"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from woodshed.grading.verifier import GradingSettings, judge
from woodshed.records import Rollout, RunError, Verdict
from woodshed.rundir import RunDir
from woodshed.settings import read
from woodshed.tasks import folder


@dataclass(frozen=True)
class Change:
    """One attempt whose verdict is another one now."""

    before: Verdict
    now: Verdict

    @property
    def why(self) -> str:
        """What the two verdicts differ in, in one line."""
        lost = [
            test for test, outcome in self.now.outcomes.items() if outcome != self.before.outcomes.get(test)
        ]
        new = [check for check in self.now.integrity if check not in self.before.integrity]
        gone = [f"no longer: {check}" for check in self.before.integrity if check not in self.now.integrity]
        tests = [f"{len(lost)} tests differ, {lost[0]} is {self.now.outcomes[lost[0]]}"] if lost else []
        detail = [self.now.detail[:200]] if self.now.status == "invalid" else []
        return "; ".join([*new, *gone, *tests, *detail])


def settings_of(run: RunDir, overrides: Sequence[str] = ()) -> GradingSettings:
    """The run's own grading settings with some changed, as KEY=VALUE.

    Raises:
        RunError: the run's recipe is damaged.
        RecipeError: an unknown key.
    """
    kept = run.section("grading")
    return read(GradingSettings, None, [*(f"{k}={json.dumps(v)}" for k, v in kept.items()), *overrides])


def judge_again(
    run: RunDir, settings: GradingSettings, *, progress: Callable[[int, int, str], None] | None = None
) -> tuple[int, list[Change]]:
    """How many stored attempts were judged again, and those whose verdict changed; nothing is written.

    Raises:
        RunError: the run holds no verdicts, or not its tasks.
    """
    before = {verdict.rollout_id: verdict for _, _, verdict in run.read("verdicts", Verdict)}
    rollouts = [rollout for _, _, rollout in run.read("rollouts", Rollout) if rollout.id in before]
    if not rollouts:
        raise RunError(f"{run.path} does not hold attempts that were judged, so nothing can be judged again")
    now = judge(rollouts, folder.of_run(run).values(), settings, progress=progress)
    pairs = [Change(before[rollout.id], now[rollout.id]) for rollout in rollouts]
    return len(pairs), [pair for pair in pairs if _essence(pair.before) != _essence(pair.now)]


def _essence(verdict: Verdict) -> tuple[object, ...]:
    return verdict.status, verdict.reward, verdict.solved, verdict.outcomes, verdict.integrity
