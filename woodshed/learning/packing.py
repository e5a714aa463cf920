"""The only place that makes tensors: rollouts, reminders and hints become padded token batches.

Shapes: B sequences, T positions, N tokens that the policy wrote (padded). Rows of similar length share a micro-batch,
and a micro-batch holds at most `micro_batch_tokens` positions, padding included; a longer row travels alone.
Which tokens count is known by provenance (Turn.sampled_ids), never guessed from roles or token ids.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal, TypeVar

import numpy as np
import torch
from torch import Tensor

from woodshed.learning.losses import group_advantages
from woodshed.records import Group, Hint, Rollout, RunError, Turn, Verdict
from woodshed.tokens.renderer import Renderer
from woodshed.tokens.token_kinds import Kind, token_kinds

T = TypeVar("T")
Placement = Literal["system", "user", "tool"]
Scope = Literal["turn", "rollout"]


@dataclass(frozen=True)
class Row:
    """One sequence and the positions in it whose tokens count."""

    ids: tuple[int, ...]
    wanted: tuple[int, ...]
    """Indices into ids of the tokens that count; each is predicted at the position before it."""
    logps: tuple[float, ...] = ()
    """Engine's log-prob of each wanted token, where known."""
    advantage: float = 0.0
    counted: tuple[bool, ...] = ()
    """Whether each wanted token counts in its loss; empty where all do."""
    rollout_id: str = ""
    group: int = 0
    """Number of the group whose mean is the baseline of the advantage."""


@dataclass(frozen=True)
class Padded:
    """Rows as tensors, padded on the right."""

    ids_BT: Tensor
    positions: int
    """Real tokens in the batch, padding left out."""
    predict_BN: Tensor
    """Positions whose logits predict the wanted tokens."""
    tokens_BN: Tensor
    mask_BN: Tensor
    """1.0 where a wanted token is real, 0.0 where it is padding."""
    logp_sampler_BN: Tensor
    advantage_BN: Tensor
    counted_BN: Tensor
    """1.0 where a wanted token counts in its loss."""
    positions_BT: Tensor | None = None
    """Position of each token, where that is not its index."""
    visible: Tensor | None = None
    """(B, 1, K, T) whom the last K positions attend to, where that is not everything before."""


@dataclass(frozen=True)
class Target:
    """One faulty turn, or a whole rollout, seen by the student as it was and by the teacher with the hint before it."""

    hint: Hint
    student: Row
    teacher: Row
    shared: int
    """How many first tokens both have in common by design: everything before the hint."""
    spans: tuple[tuple[int, int], ...]
    """(turn, tokens) of each turn whose tokens are wanted, in order."""


@dataclass(frozen=True)
class Batch:
    """What one optimizer step consumes."""

    rows: tuple[Row, ...]
    """Rollouts whose gradient is not zero; the others are counted, not computed."""
    targets: tuple[Target, ...]
    num_rollouts: int
    """Every trainable attempt of the step, those without advantage included."""
    skipped: Mapping[str, int] = field(default_factory=dict)
    """Why hints did not become targets, counted."""


def pack(
    groups: Sequence[Group],
    verdicts: Mapping[str, Verdict],
    hints: Sequence[Hint],
    renderer: Renderer,
    *,
    scope: Scope = "turn",
    placement: Placement = "system",
    max_targets: int | None = None,
    keep_zero_advantage: bool = False,
    excluded_ids: Collection[str] = (),
    skip: Sequence[Kind] = (),
    skip_first: int = 0,
    context_length: int | None = None,
    reward_terms: Mapping[str, float] | None = None,
) -> Batch:
    """The step's batch. Attempts without a graded verdict (lost sandbox, invalid) are left out whole.

    Advantage of an attempt: its reward and its pay, minus the mean of that over its group's trainable attempts.
    A hint that cannot be trained on is left out and counted with its reason.

    Args:
        scope: what a hint is about: its turn, or the whole rollout (it stands before the first turn).
        placement: whose message a hint is, or "tool" for the end of the last result.
        max_targets: more targets than this are thinned evenly.
        keep_even: also keep attempts without advantage (a divergence inside the advantage gives them a gradient).
        set_aside: ids of attempts without advantage and without a part in their group's mean: those that monitors
            flagged. They count as attempts, and hints on their turns are trained on.
        skip: kinds of tokens that do not count in the divergence.
        skip_first: tokens at the start of each turn that do not count either.
        context_length: most tokens that a hinted turn may have with everything before it.
        pay: rollout id to what is added to its reward (auxiliary rewards, effort).
    """
    rows: list[Row] = []
    trainable: dict[str, Rollout] = {}
    for number, group in enumerate(groups):
        members = [r for r in group.rollouts if is_trainable(r, verdicts)]
        trainable |= {r.id: r for r in members}
        members = [r for r in members if r.id not in excluded_ids]
        paid = [_reward(verdicts[r.id]) + (reward_terms or {}).get(r.id, 0.0) for r in members]
        rewards = torch.tensor(paid, dtype=torch.float64)
        for rollout, advantage in zip(members, group_advantages(rewards).tolist(), strict=True):
            if (
                keep_zero_advantage or abs(advantage) > 1e-9
            ):  # a group of equal rewards may leave rounding behind
                rows.append(replace(rollout_row(rollout, advantage=advantage), group=number))
    targets, skipped = targets_of(
        trainable,
        hints,
        renderer,
        scope=scope,
        placement=placement,
        skip=skip,
        skip_first=skip_first,
        context_length=context_length,
        max_targets=max_targets,
    )
    return Batch(tuple(rows), targets, len(trainable), skipped)


def targets_of(
    rollouts: Mapping[str, Rollout],
    hints: Sequence[Hint],
    renderer: Renderer,
    *,
    scope: Scope,
    placement: Placement,
    skip: Sequence[Kind],
    skip_first: int,
    context_length: int | None,
    max_targets: int | None,
) -> tuple[tuple[Target, ...], dict[str, int]]:
    """What the hints make of these rollouts (by id), and why some make nothing, counted. Arguments as of `pack`."""
    targets: list[Target] = []
    skipped: Counter[str] = Counter()
    for hint in hints:
        if hint.rollout_id not in rollouts:
            skipped["attempt not trainable"] += 1
            continue
        rollout = rollouts[hint.rollout_id]
        if reason := _unusable(rollout, hint, scope):
            skipped[reason] += 1
            continue
        made = target(
            rollout, hint, renderer, scope=scope, placement=placement, skip=skip, skip_first=skip_first
        )
        if len(made.teacher.ids) > (context_length or len(made.teacher.ids)):
            skipped["no room for the hint"] += 1
        elif made.student.counted and not any(made.student.counted):
            skipped["no token counts"] += 1
        else:
            targets.append(made)
    return tuple(subsample(targets, max_targets)), dict(skipped)


def _unusable(rollout: Rollout, hint: Hint, scope: Scope) -> str:
    """Why nothing can be learnt from a hint, or ""."""
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


def is_trainable(rollout: Rollout, verdicts: Mapping[str, Verdict]) -> bool:
    """Whether an attempt says anything about the policy: it was graded, and the infrastructure held."""
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


def rollout_row(
    rollout: Rollout,
    *,
    advantage: float = 0.0,
    reminders: Mapping[int, Sequence[int]] | None = None,
    without: Collection[int] = (),
    masked: Mapping[int, Collection[int]] | None = None,
) -> Row:
    """A whole rollout.

    Args:
        reminders: by turn, the tokens of a message inserted before it (warm-up literacy).
        without: turns whose tokens are context only.
        masked: by turn, positions in its message that are context only.
    """
    ids: list[int] = []
    wanted: list[int] = []
    logps: list[float] = []
    for index, turn in enumerate(rollout.turns):
        ids += _context(turn, (reminders or {}).get(index, ()))
        if index not in without:
            hidden = (masked or {}).get(index, ())
            kept = [position for position in range(len(turn.sampled_ids)) if position not in hidden]
            wanted += [len(ids) + position for position in kept]
            logps += [turn.logps[position] for position in kept]
        ids += turn.sampled_ids
    return Row(tuple(ids), tuple(wanted), tuple(logps), advantage, rollout_id=rollout.id)


def target(
    rollout: Rollout,
    hint: Hint,
    renderer: Renderer,
    *,
    scope: Scope = "turn",
    placement: Placement = "system",
    skip: Sequence[Kind] = (),
    skip_first: int = 0,
) -> Target:
    """What the hint is about twice: on the context as it was, and with the hint's message right before it.

    Args:
        scope: the hinted turn, or the whole rollout, with the message before its first turn and every turn wanted.
            That is how SDFT (arXiv 2601.19897) shows a demonstration and OPSD (arXiv 2601.18734) a solution.
        skip: kinds of tokens that do not count in the divergence.
        skip_first: tokens at the start of a turn that do not count either (SDFT's code skips a few: the student
            otherwise copies the prefaces of a teacher that can see what it speaks of).
    """
    first, end = (hint.turn, hint.turn + 1) if scope == "turn" else (0, len(rollout.turns))
    before, turn, after = rollout.turns[:first], rollout.turns[first], rollout.turns[first + 1 : end]
    hinted = _hinted_context(rollout, first, hint, renderer, placement)
    counted = _counted((turn, *after), renderer, skip, skip_first)

    def row(context: Sequence[int]) -> Row:
        seen = replace(rollout, turns=(*before, replace(turn, context_ids=tuple(context)), *after))
        return replace(rollout_row(seen, without=range(first)), counted=counted)

    same = (a == b for a, b in zip(turn.context_ids[: -turn.opening or None], hinted, strict=False))
    shared = sum(len(t.context_ids) + len(t.sampled_ids) for t in before) + sum(
        itertools.takewhile(bool, same)
    )
    spans = tuple((first + n, len(wanted.sampled_ids)) for n, wanted in enumerate((turn, *after)))
    return Target(hint, row(turn.context_ids), row(hinted), shared, spans)


def _counted(
    turns: Sequence[Turn], renderer: Renderer, skip: Sequence[Kind], skip_first: int
) -> tuple[bool, ...]:
    """Whether each sampled token of these turns counts; empty where all do."""
    if not skip and not skip_first:
        return ()
    kinds = [token_kinds(turn, renderer) for turn in turns]
    return tuple(n >= skip_first and kind not in skip for found in kinds for n, kind in enumerate(found))


def _hinted_context(
    rollout: Rollout, number: int, hint: Hint, renderer: Renderer, placement: Placement
) -> list[int]:
    """The context of a turn with the hint in it. Before the first turn there is no result to stand in."""
    turn = rollout.turns[number]
    before = rollout.turns[number - 1] if number else None
    if placement == "tool" and before is not None and before.observations:
        *others, last = before.observations
        seen = (*others, replace(last, text=f"{last.text}\n{hint.text}"))
        return list(renderer.extend(before.sampled_ids, before.finish_reason, seen, before.calls).ids)
    side = "user" if placement == "tool" else placement
    return _context(turn, renderer.hint(hint.text, placement=side))


def row_batches(rows: Sequence[Row], micro_batch_tokens: int) -> Iterator[list[Row]]:
    """Rows in order of length, as many at a time as fit."""
    yield from chunks(rows, [len(row.ids) for row in rows], micro_batch_tokens)


def target_batches(targets: Sequence[Target], micro_batch_tokens: int) -> Iterator[list[Target]]:
    """Targets in order of their teacher's length (the longer of the two), as many at a time as fit."""
    yield from chunks(targets, [len(t.teacher.ids) for t in targets], micro_batch_tokens)


def pad(rows: Sequence[Row], device: torch.device | str = "cpu") -> Padded:
    """Rows as right-padded tensors. Padding is known from the lengths, never from token ids."""
    length, width = max(len(r.ids) for r in rows), max(len(r.wanted) for r in rows)

    def real(values: Sequence[Sequence[float]]) -> Tensor:
        return table(values, width, device, dtype=np.float32)

    return Padded(
        ids_BT=table([r.ids for r in rows], length, device),
        positions=sum(len(r.ids) for r in rows),
        predict_BN=table([[i - 1 for i in r.wanted] for r in rows], width, device),
        tokens_BN=table([[r.ids[i] for i in r.wanted] for r in rows], width, device),
        mask_BN=real([[1.0] * len(r.wanted) for r in rows]),
        logp_sampler_BN=real([r.logps or [0.0] * len(r.wanted) for r in rows]),
        advantage_BN=real([[r.advantage] * len(r.wanted) for r in rows]),
        counted_BN=real([r.counted or [1.0] * len(r.wanted) for r in rows]),
    )


def table(
    rows: Sequence[Sequence[float]],
    width: int,
    device: torch.device | str = "cpu",
    *,
    padding: int = 0,
    dtype: type[np.generic] = np.int64,
) -> Tensor:
    """(len(rows), width): rows of numbers, padded at the right. No GPU is waited for."""
    padded = np.full((len(rows), width), padding, dtype)
    for row, values in zip(padded, rows, strict=True):
        row[: len(values)] = values
    made = torch.from_numpy(padded)
    if torch.device(device).type != "cuda":
        return made.to(device)
    return made.pin_memory().to(device, non_blocking=True)


def _context(turn: Turn, extra: Sequence[int]) -> list[int]:
    """A turn's context with a message inserted right before the tokens that open the assistant's message."""
    cut = len(turn.context_ids) - turn.opening
    return [*turn.context_ids[:cut], *extra, *turn.context_ids[cut:]]


def chunks(items: Sequence[T], lengths: Sequence[int], budget: int) -> Iterator[list[T]]:
    """Items in order of length, as many at a time as fit into `budget` positions, padding included."""
    order = sorted(range(len(items)), key=lambda i: lengths[i])
    chunk: list[int] = []
    for i in order:
        if chunk and (len(chunk) + 1) * lengths[i] > budget:
            yield [items[j] for j in chunk]
            chunk = []
        chunk.append(i)
    if chunk:
        yield [items[j] for j in chunk]
