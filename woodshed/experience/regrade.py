"""Stored attempts judged again with the rules of today: what would their verdicts and flags be now?"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from woodshed.grading import GradingSettings, judge
from woodshed.monitors.flag_policy import THRESHOLD
from woodshed.monitors.judge import JUDGE
from woodshed.monitors.rules import watch_all
from woodshed.records import Flag, Rollout, RunError, Verdict
from woodshed.runs.folder import RunDir
from woodshed.sandbox import BUBBLEWRAP, SandboxSettings
from woodshed.sandbox.provider import PROVIDERS
from woodshed.settings import read
from woodshed.tasks import folder


@dataclass(frozen=True)
class ChangedVerdict:
    """One attempt whose verdict is another one now, or that other rules flag."""

    before: Verdict
    now: Verdict
    flags_before: frozenset[str]
    """Rules that raised a hand; what a reading model said is left out, it is not asked again."""
    flags_now: frozenset[str]

    @property
    def is_one(self) -> bool:
        return _essence(self.before) != _essence(self.now) or self.flags_before != self.flags_now

    @property
    def why(self) -> str:
        """The difference between the two verdicts, in one line."""
        lost = [
            test for test, outcome in self.now.outcomes.items() if outcome != self.before.outcomes.get(test)
        ]
        new = [check for check in self.now.integrity if check not in self.before.integrity]
        gone = [f"no longer: {check}" for check in self.before.integrity if check not in self.now.integrity]
        tests = [f"{len(lost)} tests differ, {lost[0]} is {self.now.outcomes[lost[0]]}"] if lost else []
        detail = [self.now.detail[:200]] if self.now.status == "invalid" else []
        flags = [f"now flagged: {rule}" for rule in sorted(self.flags_now - self.flags_before)]
        flags += [f"no longer flagged: {rule}" for rule in sorted(self.flags_before - self.flags_now)]
        return "; ".join([*new, *gone, *tests, *detail, *flags])


def settings_of(run: RunDir, overrides: Sequence[str] = ()) -> GradingSettings:
    """The run's own grading settings with some changed, as KEY=VALUE.

    Raises:
        RunError: the run's recipe is damaged, or names a verifier that the changes do not.
        RecipeError: an unknown key.
    """
    kept = run.section("grading")
    named = {override.partition("=")[0].strip() for override in overrides}
    if "verifier" in kept and "verifier" not in named:
        raise RunError(
            f"{run.path} was graded by {kept['verifier']!r}, which is code, and a run may be somebody else's: name it "
            f"yourself with verifier={kept['verifier']} if you trust it"
        )
    return read(GradingSettings, None, [*(f"{k}={json.dumps(v)}" for k, v in kept.items()), *overrides])


def judge_again(
    run: RunDir, settings: GradingSettings, *, progress: Callable[[int, int, str], None] | None = None
) -> tuple[int, list[ChangedVerdict]]:
    """Judge stored attempts again: return how many, and those that changed. Nothing is written.

    Raises:
        RunError: the run holds no verdicts, or not its tasks.
    """
    before = {verdict.rollout_id: verdict for _, _, verdict in run.read("verdicts", Verdict)}
    rollouts = [rollout for _, _, rollout in run.read("rollouts", Rollout) if rollout.id in before]
    if not rollouts:
        raise RunError(f"{run.path} does not hold attempts that were judged, so nothing can be judged again")
    tasks = folder.of_run(run).values()
    provider = run.section("sandbox").get("provider", SandboxSettings().provider)
    sandboxes = PROVIDERS.get(provider, BUBBLEWRAP)  # no code that a run's recipe names is imported
    now = judge(rollouts, tasks, settings, sandboxes, progress=progress)
    raised = [flag for _, _, flag in run.read("flags", Flag) if not flag.rule.startswith(f"{JUDGE}:")]
    today = [flag for flag in watch_all(rollouts, tasks, now) if flag.confidence >= THRESHOLD]
    pairs = [
        ChangedVerdict(before[r.id], now[r.id], _rules(raised, r.id), _rules(today, r.id)) for r in rollouts
    ]
    return len(pairs), [pair for pair in pairs if pair.is_one]


def _rules(flags: Sequence[Flag], rollout_id: str) -> frozenset[str]:
    return frozenset(flag.rule for flag in flags if flag.rollout_id == rollout_id)


def _essence(verdict: Verdict) -> tuple[object, ...]:
    return verdict.status, verdict.reward, verdict.solved, verdict.outcomes, verdict.integrity
