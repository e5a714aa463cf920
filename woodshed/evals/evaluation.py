"""Evaluations in a run folder: all attempts of one policy at a set of tasks."""

from __future__ import annotations

import functools
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass

from woodshed.evals import measures
from woodshed.evals.measures import Graded, MeasureRow, Summary
from woodshed.records import Flag, Rollout, Verdict
from woodshed.runs.folder import RunDir


@dataclass(frozen=True)
class Evaluation:
    """All attempts of one policy at a set of tasks."""

    step: int
    """Optimizer steps behind the policy."""
    graded: tuple[Graded, ...]

    @functools.cached_property
    def summary(self) -> Summary:
        """Every measure with its interval."""
        return measures.summary(self.graded)


def from_run(run: RunDir, phase: str = "eval", *, problems: list[str] | None = None) -> list[Evaluation]:
    """The attempts of one phase that a run folder holds, one evaluation per step, oldest first.

    Args:
        problems: receives a sentence for every batch that cannot be read; None raises instead.

    Raises:
        ValueError: a record of another version, or a damaged one.
    """
    return from_records(
        [record for record in run.read("rollouts", Rollout, problems=problems) if record[0] == phase],
        [verdict for _, _, verdict in run.read("verdicts", Verdict, problems=problems)],
        flags=flags(run, problems=problems),
        references=references(run),
    )


def from_records(
    rollouts: Iterable[tuple[str, int, Rollout]],
    verdicts: Iterable[Verdict],
    *,
    flags: Iterable[Flag] | None = None,
    references: Mapping[str, Collection[str]] | None = None,
) -> list[Evaluation]:
    """Rollouts of one phase as (phase, step, rollout), an evaluation per step."""
    steps: dict[int, list[Rollout]] = {}
    for _, step, rollout in rollouts:
        steps.setdefault(step, []).append(rollout)
    verdicts, flags = list(verdicts), None if flags is None else list(flags)
    return [
        Evaluation(step, tuple(measures.pair(steps[step], verdicts, flags=flags, references=references)))
        for step in sorted(steps)
    ]


def flags(run: RunDir, *, problems: list[str] | None = None) -> list[Flag] | None:
    """Flags that monitors raised in a run; None if no monitor ran."""
    if not run.has("flags"):
        return None
    return [flag for _, _, flag in run.read("flags", Flag, problems=problems)]


def references(run: RunDir) -> dict[str, set[str]]:
    """Files of the gold patch by task name, from the run's own copies of its tasks."""
    references_of: dict[str, set[str]] = {}
    for solution in (run.path / "tasks").glob("*/*/solution"):
        gold = solution / "files"
        files = {p.relative_to(gold).as_posix() for p in gold.rglob("*") if not p.is_dir()}
        deletes = solution / "deletes"
        files |= set(deletes.read_text(encoding="utf-8").splitlines()) if deletes.exists() else set()
        references_of[solution.parent.name] = files
    return references_of


def before_after(before: Evaluation, after: Evaluation) -> list[MeasureRow]:
    """Every measure on both sides, the difference paired by task."""
    return measures.compare(before.graded, after.graded)
