"""Counters of one attempt: tokens by kind, calls and errors by tool, seconds by part, files, tests, words.

Pure functions of a rollout and of its verdict and flags; `measures` turns them into figures with intervals.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass

from woodshed.agent.effects import effect
from woodshed.feedback.detectors import executed
from woodshed.records import Flag, Rollout, Turn, Verdict

_TEST_COMMAND = re.compile(r"\b(pytest|unittest|doctest|nox|tox|make\s+(test|check))\b|\btest_\w+\.py\b")


@dataclass(frozen=True)
class Behaviour:
    """The counters of one attempt."""

    sampled_tokens: int
    """Written by the policy."""
    context_tokens: int
    """Added by the harness: prompts and observations, each counted once."""
    reread_tokens: int
    """Prompt tokens that an earlier turn had already read or written, summed over turns: a prefix cache saves these."""
    turns: int
    calls: dict[str, int]
    """Tool to its calls; calls that could not be read are under ""."""
    call_errors: dict[str, int]
    """Tool to those of its calls that gave an error, failed commands included."""
    error_kinds: dict[str, int]
    """Error kind to the number of calls (or messages without a call) that had it."""
    seconds: dict[str, float]
    """"sampling", "tools", "waiting" (for other attempts in flight) and, if it was graded, "grading"."""
    files_touched: int
    """Files that the patch changes, makes or deletes, including those that grading does not take."""
    files_expected: int | None
    """Files of the reference patch; None if the task is not available."""
    files_shared: int | None
    """Files of both."""
    test_runs: int
    """Shell commands that ran tests."""
    message_chars: int
    """Characters that the policy wrote outside of its calls."""
    edit_fallbacks: int
    """Whole-file writes to a file in which an edit had failed before."""
    flags: dict[str, int] | None
    """Monitor rule to the number of its flags; None if no monitor ran."""

    @property
    def num_calls(self) -> int:
        return sum(self.calls.values())

    @property
    def num_call_errors(self) -> int:
        return sum(self.call_errors.values())


def of(
    rollout: Rollout,
    verdict: Verdict | None = None,
    *,
    flags: Sequence[Flag] | None = None,
    reference: Collection[str] | None = None,
) -> Behaviour:
    """Counters of an attempt. `reference` names the files of the task's gold patch."""
    counters = rollout.counters
    touched = {*rollout.patch.files, *rollout.patch.skipped}
    expected = None if reference is None else set(reference)
    return Behaviour(
        sampled_tokens=counters["sampled_tokens"],
        context_tokens=counters["context_tokens"],
        reread_tokens=sum(prompt_lengths(rollout)) - counters["context_tokens"],
        turns=len(rollout.turns),
        calls=dict(Counter(call.tool for turn in rollout.turns for call in turn.calls)),
        call_errors=_call_errors(rollout.turns),
        error_kinds=dict(
            Counter(str(o.error_kind) for t in rollout.turns for o in t.observations if o.error_kind)
        ),
        seconds=_seconds(rollout, verdict),
        files_touched=len(touched),
        files_expected=None if expected is None else len(expected),
        files_shared=None if expected is None else len(touched & expected),
        test_runs=sum(_is_test_run(turn) for turn in rollout.turns),
        message_chars=sum(max(0, len(t.text) - sum(len(c.raw) for c in t.calls)) for t in rollout.turns),
        edit_fallbacks=_edit_fallbacks(rollout.turns),
        flags=None if flags is None else dict(Counter(flag.rule for flag in flags)),
    )


def prompt_lengths(rollout: Rollout) -> list[int]:
    """Tokens of the prompt of each turn: everything in its segment before its sampled ids."""
    lengths, before = [], {}
    for turn in rollout.turns:
        lengths.append(before.get(turn.segment, 0) + len(turn.context_ids))
        before[turn.segment] = lengths[-1] + len(turn.sampled_ids)
    return lengths


def _call_errors(turns: Sequence[Turn]) -> dict[str, int]:
    errors: Counter[str] = Counter()
    for turn in turns:
        kinds = {observation.call_id: observation.error_kind for observation in turn.observations}
        errors.update(call.tool for call in turn.calls if call.error_kind or kinds.get(call.id))
    return dict(errors)


def _seconds(rollout: Rollout, verdict: Verdict | None) -> dict[str, float]:
    sampling, tools = sum(t.sample_s for t in rollout.turns), sum(t.tools_s for t in rollout.turns)
    seconds = {
        "sampling": sampling,
        "tools": tools,
        "waiting": max(0.0, rollout.seconds - sampling - tools),
    }
    return seconds if verdict is None else seconds | {"grading": verdict.seconds}


def _is_test_run(turn: Turn) -> bool:
    return any(
        call.error_kind is None and _TEST_COMMAND.search(effect(call).command) is not None
        for call, _ in executed(turn)
    )


def _edit_fallbacks(turns: Sequence[Turn]) -> int:
    failed: set[str] = set()
    fallbacks = 0
    for turn in turns:
        for call, observation in executed(turn):
            done = effect(call)
            if done.kind == "write" and not done.is_whole and observation.error_kind is not None:
                failed.add(done.path)
            elif done.kind == "write" and observation.error_kind is None:
                fallbacks += done.is_whole and done.path in failed
                failed.discard(done.path)
    return fallbacks
