"""Comparison of two policies on the same tasks, refused if their scores were made under different conditions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from woodshed.evals import evaluation, measures
from woodshed.evals.evaluation import Evaluation
from woodshed.evals.manifest import differences
from woodshed.evals.measures import Graded, MeasureRow
from woodshed.records import RunError
from woodshed.runs.folder import RunDir


@dataclass(frozen=True)
class Comparison:
    """Comparison of side B with side A."""

    rows: tuple[MeasureRow, ...]
    """Every headline measure; "before" is A, "after" is B."""
    won: tuple[str, ...]
    """Names of tasks that B solves more often than A."""
    lost: tuple[str, ...]
    num_void: tuple[int, int]
    """Attempts of A and B that enter no figure but the strict one."""
    refusals: tuple[str, ...]
    """Reasons not to compare the two; empty if there are none."""
    warnings: tuple[str, ...]


def compare(a: Sequence[RunDir], b: Sequence[RunDir]) -> Comparison:
    """The last evaluation of each run of side B against those of side A. Several runs of a side are its seeds.

    Raises:
        RunError: a run without a finished and judged evaluation, or no task in common.
    """
    problems: list[str] = []
    sides = [[last(run, problems) for run in side] for side in (a, b)]
    graded: list[list[Sequence[Graded]]] = [[each.graded for each in side] for side in sides]
    refusals, warnings = doubts([(str(run.path), run.manifest) for run in (*a, *b)])
    warnings += [f"left out: {problem}" for problem in problems]
    tasks = [
        set.intersection(*({g.rollout.task_id for g in attempts} for attempts in side)) for side in graded
    ]
    if not tasks[0] & tasks[1]:
        raise RunError(
            f"{a[0].path} and {b[0].path} have no task in common, so they cannot be paired; evaluate both on the same "
            "tasks"
        )
    if num_unpaired := len(tasks[0] ^ tasks[1]):
        warnings.append(f"{num_unpaired} tasks were attempted on one side only and are left out")
    rows = measures.compare_seeds(*graded)
    won, lost = _won_and_lost(*graded)
    void = tuple(sum(g.is_void for attempts in side for g in attempts) for side in graded)
    return Comparison(tuple(rows), won, lost, (void[0], void[1]), tuple(refusals), tuple(warnings))


def last(run: RunDir, problems: list[str]) -> Evaluation:
    """The newest evaluation of a run.

    Raises:
        RunError: there is none, or it is not graded yet.
    """
    evaluations = evaluation.from_run(run, problems=problems)
    if not evaluations:
        detail = f" ({problems[-1]})" if problems else ""
        raise RunError(f"{run.path} holds no finished evaluation{detail}; `{run.resuming}` resumes the run")
    if not any(attempt.verdict for attempt in evaluations[-1].graded):
        raise RunError(
            f"{run.path}: the attempts of its last evaluation are not graded yet; `{run.resuming}` grades them"
        )
    return evaluations[-1]


def doubts(runs: Sequence[tuple[str, Mapping[str, Any]]]) -> tuple[list[str], list[str]]:
    """Reasons that forbid a comparison of these runs (path and manifest of each), and cautions for the reader."""
    refusals: dict[str, None] = {}
    warnings: dict[str, None] = {}
    (_, first), *others = runs
    for _, manifest in others:
        against, aware = differences(first, manifest)
        refusals |= dict.fromkeys(against)
        warnings |= dict.fromkeys(aware)
    for path, manifest in runs:
        if changed := manifest.get("changed"):
            warnings[f"{path}: {', '.join(changed)} changed between its evaluations"] = None
        warnings |= {f"{path}: changed {note}": None for note in manifest.get("changes", ())}
    return list(refusals), list(warnings)


def _won_and_lost(
    a: Sequence[Sequence[Graded]], b: Sequence[Sequence[Graded]]
) -> tuple[tuple[str, ...], tuple[str, ...]]:
    rates = []
    for side in (a, b):
        solves: dict[str, list[bool]] = {}
        for attempt in (g for run in side for g in run if g.verdict is not None and not g.is_void):
            solves.setdefault(attempt.rollout.task_id, []).append(
                bool(attempt.verdict and attempt.verdict.solved)
            )
        rates.append({task: sum(s) / len(s) for task, s in solves.items()})
    names = {g.rollout.task_id: g.rollout.task_name for side in (a, b) for run in side for g in run}
    common = sorted(set(rates[0]) & set(rates[1]), key=names.__getitem__)
    won = tuple(names[task] for task in common if rates[1][task] > rates[0][task])
    lost = tuple(names[task] for task in common if rates[1][task] < rates[0][task])
    return won, lost
