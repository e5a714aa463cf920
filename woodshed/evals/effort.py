"""Effort against difficulty: tokens and turns that a policy spends on easy and on hard tasks."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from woodshed.evals import statistics
from woodshed.evals.measures import Graded
from woodshed.evals.statistics import Estimate
from woodshed.records import to_json

EDGES = (0.0, 0.25, 0.5, 0.75, 1.0)


@dataclass(frozen=True)
class DifficultyBucket:
    """Tasks of similar difficulty."""

    low: float
    """Difficulty, 1 - pooled solve rate, from `low` (included) ..."""
    high: float
    """... to `high` (excluded; the last bucket includes 1)."""
    num_tasks: int
    tokens: Estimate
    """Sampled tokens per attempt."""
    turns: Estimate
    solved: Estimate


@dataclass(frozen=True)
class Spent:
    """Effort of one attempt that is not void."""

    task_id: str
    solved: bool | None
    """None if it was not graded."""
    tokens: int
    """Sampled ones."""
    turns: int


def spent_on(graded: Iterable[Graded]) -> list[Spent]:
    """Effort of the attempts, without void ones."""
    return [
        Spent(
            g.rollout.task_id,
            None if g.verdict is None else g.verdict.solved,
            g.behaviour.sampled_tokens,
            g.behaviour.turns,
        )
        for g in graded
        if not g.is_void
    ]


def difficulties(spent: Iterable[Spent]) -> dict[str, float]:
    """Task id to 1 - solve rate over all judged attempts at it. Pool several policies, so that no policy defines its
    own."""
    solved: dict[str, list[bool]] = {}
    for attempt in spent:
        if attempt.solved is not None:
            solved.setdefault(attempt.task_id, []).append(attempt.solved)
    return {task: 1 - sum(outcomes) / len(outcomes) for task, outcomes in solved.items()}


def by_difficulty(spent: Sequence[Spent], difficulty: Mapping[str, float]) -> list[DifficultyBucket]:
    """Effort by difficulty of the task; buckets without attempts are left out."""
    buckets = []
    for low, high in itertools.pairwise(EDGES):
        inside = {
            task for task, d in difficulty.items() if low <= d < high or (high == EDGES[-1] and d == high)
        }
        attempts = [attempt for attempt in spent if attempt.task_id in inside]
        judged = [attempt for attempt in attempts if attempt.solved is not None]
        if attempts:
            tasks = [attempt.task_id for attempt in attempts]
            tokens = statistics.mean([float(attempt.tokens) for attempt in attempts], tasks)
            turns = statistics.mean([float(attempt.turns) for attempt in attempts], tasks)
            solves = [float(attempt.solved or 0) for attempt in judged]
            solved = statistics.mean(solves, [attempt.task_id for attempt in judged], is_share=True)
            buckets.append(DifficultyBucket(low, high, len(set(tasks)), tokens, turns, solved))
    return buckets


def calibration(spent: Iterable[Spent], difficulty: Mapping[str, float]) -> float | None:
    """Rank correlation (Spearman) of a task's difficulty and the mean tokens spent on it.

    1: the harder, the more; 0: no relation; None: fewer than three tasks, or all equal.
    """
    tokens: dict[str, list[int]] = {}
    for attempt in spent:
        if attempt.task_id in difficulty:
            tokens.setdefault(attempt.task_id, []).append(attempt.tokens)
    difficulty_N = _ranks([difficulty[task] for task in tokens])
    cost_N = _ranks([sum(counts) / len(counts) for counts in tokens.values()])
    if len(tokens) < 3 or not difficulty_N.std() or not cost_N.std():
        return None
    return float(np.corrcoef(difficulty_N, cost_N)[0, 1])


def change(before: Sequence[Graded], after: Sequence[Graded]) -> dict[str, Any]:
    """Effort against difficulty in two evaluations of the same tasks, as a metrics line keeps it.

    A task's difficulty is pooled over both, so that neither defines its own. `calibration` is 1 where harder tasks
    got more tokens; None where too few tasks differ.
    """
    sides = {"before": spent_on(before), "after": spent_on(after)}
    difficulty = difficulties(itertools.chain(*sides.values()))
    lines: dict[str, Any] = {}
    for name, side in sides.items():
        buckets = {f"difficulty {b.low:g} to {b.high:g}": b for b in by_difficulty(side, difficulty)}
        lines[name] = {
            "tasks": {bucket: b.num_tasks for bucket, b in buckets.items()},
            "tokens": {bucket: to_json(b.tokens) for bucket, b in buckets.items()},
            "turns": {bucket: to_json(b.turns) for bucket, b in buckets.items()},
            "solved": {bucket: to_json(b.solved) for bucket, b in buckets.items()},
            "calibration": calibration(side, difficulty),
        }
    return lines


def _ranks(values: Sequence[float]) -> np.ndarray:
    """Ranks from 0, equal values share the mean of theirs."""
    value_N = np.asarray(values, dtype=float)
    below_N = (value_N[:, None] > value_N).sum(1)
    return below_N + ((value_N[:, None] == value_N).sum(1) - 1) / 2
