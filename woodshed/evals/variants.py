"""The variants of an experiment side by side: first against last evaluation of each, each against the first variant."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from woodshed.evals import evaluation, measures
from woodshed.evals.conclusion import conclude
from woodshed.evals.evaluation import Evaluation
from woodshed.evals.measures import Graded
from woodshed.runs.folder import RunDir

SHOWN = ("invalid_calls", "untested", "reward", "solved", "tokens")
"""Measures of the tables, by their keys; pass@k and best@k stand beside them."""


def table(variants: Mapping[str, Sequence[RunDir]]) -> list[list[str]]:
    """A row a variant and measure: before, after, the change, paired by task, over seeds and tasks. Variants whose runs
    were not evaluated twice are left out."""
    rows = [["variant", "seeds", "measure", "before", "after", "change [95% interval]"]]
    for name, runs in variants.items():
        sides = _sides(runs)
        if not sides:
            continue
        seeds = str(len(sides[0]))
        for row in measures.compare_seeds(*sides):
            if row.measure.key in SHOWN or "@" in row.measure.key:
                figures = [measures.write_figure(row.measure, side.value) for side in (row.before, row.after)]
                change = measures.write_change(row.measure, row.change)
                rows.append([name, seeds, row.measure.label, *figures, change])
                name = seeds = ""
        for label, figure in (
            ("first message a call fault", _first_faults),
            ("characters outside calls", _chars),
        ):
            rows.append(["", "", label, *map(figure, sides), ""])
        if (divergence := _moved(runs)) is not None:
            rows.append(["", "", "divergence from the start, nats a token", "", f"{divergence:.3f}", ""])
        rows += [
            ["", "", f"{run.path.name} {reason}", "", "", ""] for run in runs if (reason := stopped(run))
        ]
    return rows


def conclusions(variants: Mapping[str, Sequence[RunDir]]) -> list[str]:
    """One line a variant on what its runs show and what they do not; variants without two evaluations are left out."""
    sides = {name: evaluations for name, runs in variants.items() if (evaluations := _sides(runs))}
    return [
        f"{name}: {conclude(measures.compare_seeds(*evaluations), num_seeds=len(evaluations[0]))}"
        for name, evaluations in sides.items()
    ]


def against(variants: Mapping[str, Sequence[RunDir]]) -> list[list[str]]:
    """The last evaluations of every other variant less those of the first one, paired by task."""
    last_evaluations = {name: sides[1] for name, runs in variants.items() if (sides := _sides(runs))}
    if len(last_evaluations) < 2:
        return []
    first, *others = last_evaluations
    shown = [measure for measure in measures.MEASURES if measure.key in SHOWN]
    rows = [["against " + first, *(measure.label for measure in shown)]]
    for name in others:
        row_of = {
            row.measure.key: row
            for row in measures.compare_seeds(last_evaluations[first], last_evaluations[name])
        }
        rows.append([name, *(measures.write_change(m, row_of[m.key].change) for m in shown)])
    return rows


def stopped(run: RunDir, *, problems: list[str] | None = None) -> str:
    """Reason why a run stopped by itself, or ""; `problems` as in `RunDir.read`."""
    lines = run.read("metrics", problems=problems)
    reasons = [metrics["stopped"] for _, _, metrics in lines if "stopped" in metrics]
    return str(reasons[-1]) if reasons else ""


def repeats(run: RunDir, *, problems: list[str] | None = None) -> str:
    """A sentence on tasks that came again in later steps of training, or ""; `problems` as in `RunDir.read`."""
    lines = [m for phase, _, m in run.read("metrics", problems=problems) if phase == "train"]
    again = sum(int(metrics.get("repeated_tasks", 0)) for metrics in lines)
    draws = sum(int(metrics.get("num_tasks", 0)) for metrics in lines)
    return f"{again} of the {draws} tasks drawn had been trained on in an earlier step" if again else ""


def _sides(runs: Sequence[RunDir]) -> tuple[list[Sequence[Graded]], list[Sequence[Graded]]] | None:
    """Attempts of the first and of the last evaluation of each run that has both."""
    evaluations: list[list[Evaluation]] = [evaluation.from_run(run) for run in runs]
    complete = [several for several in evaluations if len(several) > 1]
    return (
        ([several[0].graded for several in complete], [several[-1].graded for several in complete])
        if complete
        else None
    )


def _first_faults(runs: Sequence[Sequence[Graded]]) -> str:
    """Share of attempts whose first message is a call fault."""
    first = [g.rollout.turns[0] for run in runs for g in run if not g.is_void and g.rollout.turns]
    return f"{100 * sum(map(measures.is_fault, first)) / max(len(first), 1):.1f}%"


def _chars(runs: Sequence[Sequence[Graded]]) -> str:
    """Characters that an attempt writes outside of its calls, in the mean."""
    counts = [g.behaviour.message_chars for run in runs for g in run if not g.is_void]
    return f"{sum(counts) / max(len(counts), 1):.0f}"


def _moved(runs: Sequence[RunDir]) -> float | None:
    """Mean over runs of the divergence from the start at their last step, where it was measured."""
    last = []
    for run in runs:
        measured = [m["kl_to_start"] for _, _, m in run.read("metrics") if "kl_to_start" in m]
        last += measured[-1:]
    return sum(last) / len(last) if last else None
