"""The only place that makes tensors: rollouts, reminders and hints become padded token batches.

Shapes: B sequences, T positions, N tokens that the policy wrote (padded). Rows of similar length share a micro-batch,
and a micro-batch holds at most `micro_batch_tokens` positions, padding included; a longer row travels alone.
Which tokens count is known by provenance (Turn.sampled_ids), never guessed from roles or token ids.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, TypeVar

import torch
from torch import Tensor

from woodshed.inference.renderer import Renderer
from woodshed.records import Group, Hint, Rollout, Turn, Verdict
from woodshed.training.losses import group_advantages

T = TypeVar("T")


@dataclass(frozen=True)
class Row:
    """One sequence and the positions in it whose tokens count."""

    ids: tuple[int, ...]
    wanted: tuple[int, ...]
    """Indices into ids of the tokens that count; each is predicted at the position before it."""
    logps: tuple[float, ...] = ()
    """Sampler's log-prob of each wanted token, where known."""
    advantage: float = 0.0


@dataclass(frozen=True)
class Padded:
    """Rows as tensors, padded on the right."""

    ids_BT: Tensor
    attention_BT: Tensor
    predict_BN: Tensor
    """Positions whose logits predict the wanted tokens."""
    tokens_BN: Tensor
    mask_BN: Tensor
    """1.0 where a wanted token is real, 0.0 where it is padding."""
    logp_sampler_BN: Tensor
    advantage_BN: Tensor

    @property
    def positions(self) -> int:
        """Real tokens in the batch, padding left out."""
        return int(self.attention_BT.sum())


@dataclass(frozen=True)
class Target:
    """One faulty turn, seen by the student as it was and by the teacher with the hint before it."""

    hint: Hint
    student: Row
    teacher: Row


@dataclass(frozen=True)
class Batch:
    """What one optimizer step consumes."""

    rows: tuple[Row, ...]
    """Rollouts whose gradient is not zero; the others are counted, not computed."""
    targets: tuple[Target, ...]
    num_rollouts: int
    """Every trainable attempt of the step, those without advantage included."""


def pack(
    groups: Sequence[Group],
    verdicts: Mapping[str, Verdict],
    hints: Sequence[Hint],
    renderer: Renderer,
    *,
    placement: Literal["system", "user"] = "system",
    max_targets: int | None = None,
    keep_even: bool = False,
    set_aside: Collection[str] = (),
) -> Batch:
    """The step's batch. Attempts without a graded verdict (lost sandbox, invalid) are left out whole.

    Advantage of an attempt: its reward minus the mean reward of its group's trainable attempts.

    Args:
        placement: whose message a hint is.
        max_targets: more targets than this are thinned evenly.
        keep_even: also keep attempts without advantage (a divergence inside the advantage gives them a gradient).
        set_aside: ids of attempts without advantage and without a part in their group's mean: those that monitors
            flagged. They count as attempts, and hints on their turns are trained on.
    """
    rows: list[Row] = []
    trainable: dict[str, Rollout] = {}
    for group in groups:
        members = [r for r in group.rollouts if is_trainable(r, verdicts)]
        trainable |= {r.id: r for r in members}
        members = [r for r in members if r.id not in set_aside]
        rewards = torch.tensor([_reward(verdicts[r.id]) for r in members], dtype=torch.float64)
        for rollout, advantage in zip(members, group_advantages(rewards).tolist(), strict=True):
            if keep_even or abs(advantage) > 1e-9:  # a group of equal rewards may leave rounding behind
                rows.append(rollout_row(rollout, advantage=advantage))
    targets = [
        target(trainable[hint.rollout_id], hint, renderer, placement=placement)
        for hint in hints
        if hint.rollout_id in trainable
        and hint.text
        and trainable[hint.rollout_id].turns[hint.turn].sampled_ids
    ]
    return Batch(tuple(rows), tuple(thin(targets, max_targets)), len(trainable))


def thin(items: Sequence[T], limit: int | None) -> list[T]:
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
        raise ValueError(
            f"the verdict on {verdict.rollout_id} has reward {verdict.reward}, not one in [0, 1]"
        )
    return verdict.reward


def rollout_row(
    rollout: Rollout,
    *,
    advantage: float = 0.0,
    reminders: Mapping[int, Sequence[int]] | None = None,
    without: Collection[int] = (),
) -> Row:
    """A whole rollout.

    Args:
        reminders: by turn, the tokens of a message inserted before it (warm-up literacy).
        without: turns whose tokens are context only.
    """
    ids: list[int] = []
    wanted: list[int] = []
    logps: list[float] = []
    for index, turn in enumerate(rollout.turns):
        ids += _context(turn, (reminders or {}).get(index, ()))
        if index not in without:
            wanted += range(len(ids), len(ids) + len(turn.sampled_ids))
            logps += turn.logps
        ids += turn.sampled_ids
    return Row(tuple(ids), tuple(wanted), tuple(logps), advantage)


def target(
    rollout: Rollout, hint: Hint, renderer: Renderer, *, placement: Literal["system", "user"] = "system"
) -> Target:
    """The hinted turn twice: on the context as it was, and with the hint's message right before the turn."""
    history: list[int] = []
    for turn in rollout.turns[: hint.turn]:
        history += (*turn.context_ids, *turn.sampled_ids)
    turn = rollout.turns[hint.turn]
    message = renderer.hint(hint.text, placement=placement)
    rows = [_turn_row([*history, *_context(turn, extra)], turn) for extra in ((), message)]
    return Target(hint, student=rows[0], teacher=rows[1])


def row_batches(rows: Sequence[Row], micro_batch_tokens: int) -> Iterator[list[Row]]:
    """Rows in order of length, as many at a time as fit."""
    yield from _chunks(rows, [len(row.ids) for row in rows], micro_batch_tokens)


def target_batches(targets: Sequence[Target], micro_batch_tokens: int) -> Iterator[list[Target]]:
    """Targets in order of their teacher's length (the longer of the two), as many at a time as fit."""
    yield from _chunks(targets, [len(t.teacher.ids) for t in targets], micro_batch_tokens)


def pad(rows: Sequence[Row], device: torch.device | str = "cpu") -> Padded:
    """Rows as right-padded tensors. Padding is known from the lengths, never from token ids."""
    length, width = max(len(r.ids) for r in rows), max(len(r.wanted) for r in rows)

    def table(values: Sequence[Sequence[float]], columns: int, dtype: torch.dtype) -> Tensor:
        return torch.tensor([[*v, *[0] * (columns - len(v))] for v in values], dtype=dtype, device=device)

    return Padded(
        ids_BT=table([r.ids for r in rows], length, torch.long),
        attention_BT=table([[1] * len(r.ids) for r in rows], length, torch.long),
        predict_BN=table([[i - 1 for i in r.wanted] for r in rows], width, torch.long),
        tokens_BN=table([[r.ids[i] for i in r.wanted] for r in rows], width, torch.long),
        mask_BN=table([[1.0] * len(r.wanted) for r in rows], width, torch.float32),
        logp_sampler_BN=table([r.logps or [0.0] * len(r.wanted) for r in rows], width, torch.float32),
        advantage_BN=table([[r.advantage] * len(r.wanted) for r in rows], width, torch.float32),
    )


def _context(turn: Turn, extra: Sequence[int]) -> list[int]:
    """A turn's context with a message inserted right before the tokens that open the assistant's message."""
    cut = len(turn.context_ids) - turn.opening
    return [*turn.context_ids[:cut], *extra, *turn.context_ids[cut:]]


def _turn_row(context: list[int], turn: Turn) -> Row:
    end = len(context) + len(turn.sampled_ids)
    return Row((*context, *turn.sampled_ids), tuple(range(len(context), end)), turn.logps)


def _chunks(items: Sequence[T], lengths: Sequence[int], budget: int) -> Iterator[list[T]]:
    order = sorted(range(len(items)), key=lambda i: lengths[i])
    chunk: list[int] = []
    for i in order:
        if chunk and (len(chunk) + 1) * lengths[i] > budget:
            yield [items[j] for j in chunk]
            chunk = []
        chunk.append(i)
    if chunk:
        yield [items[j] for j in chunk]
