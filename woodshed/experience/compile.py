"""Groups, verdicts and hints become training samples: advantages, loss masks and hint branches, without tensors.

Which tokens count is known by provenance (Turn.sampled_ids), never guessed from roles or token ids.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, TypeVar

from woodshed.experience.samples import HintBranch, TrainingSample
from woodshed.records import Group, Hint, Rollout, RunError, Segment, Turn, Verdict
from woodshed.tokens.renderer import Renderer

T = TypeVar("T")
Scope = Literal["turn", "rollout"]

ROUNDING = 1e-9
"""A group of equal rewards may leave an advantage of this size behind."""


@dataclass(frozen=True)
class HintOptions:
    """The hints that become branches, and their form."""

    scope: Scope = "turn"
    """turn: the hinted turn is compared. rollout: every turn is, with the message before the first one of each segment.
    That is how SDFT (arXiv 2601.19897) shows a demonstration and OPSD (arXiv 2601.18734) a solution."""
    skip_first: int = 0
    """Tokens at the start of each turn of weight 0 (SDFT's code skips a few: the student otherwise copies the prefaces
    of a teacher that can see what it speaks of)."""
    context_length: int | None = None
    """Most tokens that a hinted turn may have with everything before it."""
    max_branches: int | None = None
    """More branches than this are thinned evenly."""


@dataclass(frozen=True)
class Compiled:
    """The samples of one optimizer step."""

    samples: tuple[TrainingSample, ...]
    """One for each segment of every attempt that is trained on or counted."""
    skipped_hints: Mapping[str, int]
    """Reason to the number of hints that became no branch."""


def compile_samples(
    groups: Sequence[Group],
    verdicts: Mapping[str, Verdict],
    hints: Sequence[Hint],
    renderer: Renderer,
    options: HintOptions | None = None,
    *,
    flagged_ids: Collection[str] = (),
    reward_terms: Mapping[str, float] | None = None,
) -> Compiled:
    """Make a sample of every segment of every attempt that was graded, and lost no sandbox.

    Advantage of an attempt and all its segments: its reward and its reward terms, minus the mean of that over its
    group's attempts, each counted once. It is not divided by their standard deviation (Dr. GRPO, arXiv 2503.20783, as
    in the Composer 2 report, arXiv 2603.24477, section 4.1), which would blow up differences between good attempts.

    Args:
        flagged_ids: attempts that monitors flagged (`in_baseline`). They count as attempts, and hints on their
            turns are trained on.
        reward_terms: rollout id to what is added to its reward (auxiliary rewards, effort).

    Raises:
        RunError: a reward is not in [0, 1].
    """
    samples: list[TrainingSample] = []
    rollouts: dict[str, Rollout] = {}
    for number, group in enumerate(groups):
        members = [r for r in group.rollouts if is_trainable(r, verdicts)]
        rollouts |= {r.id: r for r in members}
        rewards = [_reward(verdicts[r.id]) + (reward_terms or {}).get(r.id, 0.0) for r in members]
        flagged = [r.id in flagged_ids for r in members]
        counted = in_baseline(rewards, flagged)
        advantages = iter(group_advantages(list(itertools.compress(rewards, counted))))
        for rollout, is_flagged, is_counted in zip(members, flagged, counted, strict=True):
            advantage = next(advantages) if is_counted else 0.0
            advantage = min(0.0, advantage) if is_flagged else advantage
            for sample in rollout_samples(rollout):
                streams = {
                    "advantages": (advantage,) * len(sample.predicted),
                    "rl_weights": (float(is_counted),) * len(sample.predicted),
                }
                samples.append(replace(sample, group=number, **streams))
    branches, skipped = hint_branches(rollouts, hints, renderer, options or HintOptions())
    return Compiled(tuple(with_branches(samples, branches)), skipped)


def in_baseline(rewards: Sequence[float], flagged: Sequence[bool]) -> list[bool]:
    """Say for each attempt of a group if it takes part in the baseline and has a gradient.

    A flag takes away what an attempt would gain and nothing else. A flagged attempt that did better than the mean of
    those without a flag (than 0, where all have one) takes no part. One that did not stays, with an advantage of at
    most 0: else a policy could buy its failures free by raising a flag.
    """
    trusted = [reward for reward, is_flagged in zip(rewards, flagged, strict=True) if not is_flagged]
    reference = _mean(trusted) + ROUNDING
    return [
        not is_flagged or reward <= reference for reward, is_flagged in zip(rewards, flagged, strict=True)
    ]


def group_advantages(rewards: Sequence[float]) -> list[float]:
    """Rewards of one group minus their mean, in float64."""
    mean = _mean(rewards)
    return [0.0 if abs(reward - mean) <= ROUNDING else reward - mean for reward in rewards]


def _mean(values: Sequence[float]) -> float:
    return math.fsum(values) / max(len(values), 1)


def is_trainable(rollout: Rollout, verdicts: Mapping[str, Verdict]) -> bool:
    """Say if an attempt is evidence about the policy: it was graded, and the infrastructure held."""
    verdict = verdicts.get(rollout.id)
    has_tokens = any(turn.sampled_ids for turn in rollout.turns)
    return (
        verdict is not None and verdict.status == "graded" and rollout.ended != "sandbox_lost" and has_tokens
    )


def _reward(verdict: Verdict) -> float:
    if not 0.0 <= verdict.reward <= 1.0:  # NaN too: it would poison the whole group without a word
        raise RunError(
            f"the verdict on {verdict.rollout_id} has reward {verdict.reward}, not one in [0, 1]; take the lines "
            "of its batch out of verdicts.jsonl, and it is judged again"
        )
    return verdict.reward


def rollout_samples(rollout: Rollout, **options: Any) -> list[TrainingSample]:
    """The samples of all segments of a rollout in which a token was sampled, without weights; see `rollout_sample`."""
    samples = [rollout_sample(rollout, segment, **options) for segment in rollout.segments]
    return [sample for sample in samples if sample.predicted]


def rollout_sample(
    rollout: Rollout,
    segment: Segment | None = None,
    *,
    reminders: Mapping[int, Sequence[int]] | None = None,
    context_only: Collection[int] = (),
    masked: Mapping[int, Collection[int]] | None = None,
) -> TrainingSample:
    """One segment of a rollout, without weights.

    Args:
        segment: None for the first one.
        reminders: by turn, the tokens of a message inserted before it.
        context_only: turns whose tokens are not predicted.
        masked: by turn, positions in its message that are not predicted.
    """
    ids: list[int] = []
    predicted: list[int] = []
    logps: list[float] = []
    versions: list[int] = []
    experts = []
    segment = segment or rollout.segments[0]
    for index, turn in zip(segment.indices, segment.turns, strict=True):
        ids += _context(turn, (reminders or {}).get(index, ()))
        if index not in context_only:
            hidden = (masked or {}).get(index, ())
            kept = [position for position in range(len(turn.sampled_ids)) if position not in hidden]
            written_by = [version for version, tokens in turn.versions for _ in range(tokens)]
            predicted += [len(ids) + position for position in kept]
            logps += [turn.logps[position] for position in kept]
            versions += [written_by[position] for position in kept] if written_by else []
        ids += turn.sampled_ids
        if turn.experts and not reminders:  # which shift the places of tokens
            experts.append(turn.experts)
    spans = tuple((version, len(list(tokens))) for version, tokens in itertools.groupby(versions))
    return TrainingSample(
        tuple(ids),
        tuple(predicted),
        tuple(logps),
        spans,
        rollout_id=rollout.id,
        segment=segment.number,
        experts=tuple(experts),
    )


def sft_sample(sample: TrainingSample) -> TrainingSample:
    """The sample with every predicted token imitated."""
    return replace(sample, ce_weights=(1.0,) * len(sample.predicted))


def with_branches(samples: Sequence[TrainingSample], branches: Sequence[HintBranch]) -> list[TrainingSample]:
    """The samples, each with the hints on its turns."""
    of_sample: dict[tuple[str, int], list[HintBranch]] = {}
    for branch in branches:
        of_sample.setdefault(branch.sample_key, []).append(branch)
    return [replace(s, branches=tuple(of_sample.get(s.key, ()))) for s in samples]


def hint_branches(
    rollouts: Mapping[str, Rollout], hints: Sequence[Hint], renderer: Renderer, options: HintOptions
) -> tuple[list[HintBranch], dict[str, int]]:
    """(branches of these rollouts (by id), reason to the number of hints that became none)."""
    branches: list[HintBranch] = []
    skipped: Counter[str] = Counter()
    for hint in hints:
        if hint.rollout_id not in rollouts:
            skipped["attempt not trainable"] += 1
            continue
        rollout = rollouts[hint.rollout_id]
        if reason := _unusable(rollout, hint, options.scope):
            skipped[reason] += 1
            continue
        for segment in rollout.segments:
            if options.scope == "turn" and hint.turn not in segment.indices:
                continue
            if not any(turn.sampled_ids for turn in segment.turns):
                continue
            branch = hint_branch(segment, hint, renderer, options)
            if options.context_length and branch.position + len(branch.ids) > options.context_length:
                skipped["no room for the hint"] += 1
            elif not any(branch.weights):
                skipped["no token counts"] += 1
            else:
                branches.append(branch)
    return subsample(branches, options.max_branches), dict(skipped)


def _unusable(rollout: Rollout, hint: Hint, scope: Scope) -> str:
    """Why nothing can be learned from a hint, or ""."""
    if not hint.text:
        return "empty hint"
    if scope == "rollout":
        return ""
    turn = rollout.turns[hint.turn]
    if not turn.sampled_ids:
        return "no token was sampled"
    if turn.finish_reason == "length" and hint.detector != "truncated":
        return "the turn was cut"  # what it would have said is not known
    return ""


def subsample(items: Sequence[T], limit: int | None) -> list[T]:
    """At most `limit` of the items, evenly spread over their order."""
    if limit is None or len(items) <= limit:
        return list(items)
    return [items[i * len(items) // limit] for i in range(limit)]


def hint_branch(
    segment: Segment, hint: Hint, renderer: Renderer, options: HintOptions | None = None
) -> HintBranch:
    """The turns of a segment that a hint is about, behind the hint's message: a branch of the segment's
    `rollout_sample`."""
    options = options or HintOptions()
    first, end = 0, len(segment.turns)
    if options.scope == "turn":
        first = segment.indices.index(hint.turn)
        end = first + 1
    turn, turns = segment.turns[first], segment.turns[first:end]
    hinted = _context(turn, renderer.hint(hint.text))
    before = sum(len(t.context_ids) + len(t.sampled_ids) for t in segment.turns[:first])
    same = (a == b for a, b in zip(turn.context_ids[: -turn.opening or None], hinted, strict=False))
    shared = sum(itertools.takewhile(bool, same))

    ids, start, predicted = list(hinted), before + len(turn.context_ids), []
    for number, compared in enumerate(turns):
        if number:
            ids += compared.context_ids
            start += len(compared.context_ids)
        predicted += range(start, start + len(compared.sampled_ids))
        ids += compared.sampled_ids
        start += len(compared.sampled_ids)
    behind_last = start - predicted[-1] - 1  # context that nothing predicted stands behind
    return HintBranch(
        hint,
        before + shared,
        tuple(ids[shared : len(ids) - behind_last]),
        tuple(predicted),
        tuple(float(n >= options.skip_first) for t in turns for n in range(len(t.sampled_ids))),
        tuple((segment.indices[first + n], len(compared.sampled_ids)) for n, compared in enumerate(turns)),
        segment.number,
    )


def _context(turn: Turn, extra: Sequence[int]) -> list[int]:
    """A turn's context with a message inserted right before the tokens that open the assistant's message."""
    cut = len(turn.context_ids) - turn.opening
    return [*turn.context_ids[:cut], *extra, *turn.context_ids[cut:]]
