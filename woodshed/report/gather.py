"""What a run folder holds, arranged as a person wants to read it. Half-finished runs are the normal case."""

from __future__ import annotations

import json
import tomllib
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from woodshed.evals import evaluation, measures
from woodshed.evals.evaluation import Evaluation
from woodshed.evals.measures import Row
from woodshed.records import Hint, Rollout, RunError, Task, TaskError, Turn, Verdict
from woodshed.report.curves import Curve, draw, short
from woodshed.rundir import RunDir
from woodshed.tasks import folder

MAX_TRANSCRIPTS = 600  # more make a page that no browser likes; the page says how many it left out

CURVES: tuple[tuple[str, Mapping[str, str]], ...] = (
    ("invalid-call rate", {"invalid_calls": "rate"}),
    ("rollouts with any call fault", {"faulty_rollouts": "rate"}),
    ("mean reward", {"reward": "reward"}),
    ("sampled tokens per rollout", {"tokens": "tokens"}),
    ("targeted divergence", {"kl_loss": "loss"}),
    ("hint gain, nats a turn", {"hint_gain": "gain"}),
    ("gradient norms", {"rl_grad_norm": "policy gradient", "kl_grad_norm": "targeted"}),
    ("divergence from the start", {"kl_to_start": "nats a token"}),
    ("entropy, nats a token", {"entropy": "entropy"}),
    ("sampler against trainer", {"logp_gap_max": "largest gap"}),
    ("warm-up loss", {"sft_loss": "loss"}),
)
"""Title -> {metric: name of its line}; a metric that a run does not have is left out."""


@dataclass(frozen=True)
class StepTable:
    """Metrics of one phase, a row a metric, a column a step."""

    phase: str
    steps: tuple[int, ...]
    rows: tuple[tuple[str, tuple[str, ...]], ...]
    curves: tuple[Curve, ...]


@dataclass(frozen=True)
class TaskLine:
    """One task and how attempts at it went."""

    set: str
    task: Task
    attempts: int
    solved: int


@dataclass(frozen=True)
class TurnView:
    """A turn with the hints that belong to it."""

    number: int
    turn: Turn
    hints: tuple[Hint, ...]
    mean_logp: float | None


@dataclass(frozen=True)
class Transcript:
    """One attempt, readable."""

    phase: str
    step: int
    rollout: Rollout
    verdict: Verdict | None
    turns: tuple[TurnView, ...]
    num_faults: int
    failed: tuple[tuple[str, str], ...]
    """Expected tests that did not pass, with their outcome."""
    instruction: str


@dataclass(frozen=True)
class Page:
    """Everything on the page."""

    name: str
    path: str
    note: str
    status: str
    evaluations: tuple[Evaluation, ...]
    rows: tuple[Row, ...]
    """Before and after; empty where there are not two evaluations."""
    faults: tuple[tuple[str, str, str], ...]
    """Call fault, its share before, its share after."""
    tables: tuple[StepTable, ...]
    tasks: tuple[TaskLine, ...]
    task_problems: tuple[str, ...]
    rejections: tuple[tuple[str, int], ...]
    transcripts: tuple[Transcript, ...]
    num_rollouts: int
    recipe: str
    manifest: tuple[tuple[str, str], ...]


def gather(run: RunDir) -> Page:
    """Read a run folder.

    Raises:
        RunError: the folder was written by another version, or cannot be read.
    """
    try:
        return _gather(run)
    except ValueError as error:
        raise RunError(
            f"{run.path} cannot be read by this version of Woodshed ({error}). "
            f"{run.path / 'manifest.json'} names the version that wrote it."
        ) from error
    except OSError as error:
        raise RunError(f"{run.path} cannot be read: {error}") from error


def _gather(run: RunDir) -> Page:
    recipe = (run.path / "recipe.toml").read_text(encoding="utf-8")
    settings = tomllib.loads(recipe)
    tasks, problems = _tasks(run.path / "tasks")
    rollouts = run.read("rollouts", Rollout)
    verdicts = {verdict.rollout_id: verdict for _, _, verdict in run.read("verdicts", Verdict)}
    evaluations = evaluation.from_records([r for r in rollouts if r[0] == "eval"], verdicts.values())
    tables = _tables(run)
    return Page(
        name=str(settings.get("name") or run.path.name),
        path=str(run.path),
        note=str(settings.get("note", "")),
        status=_status(settings, tables, evaluations, run.path),
        evaluations=tuple(evaluations),
        rows=tuple(evaluation.before_after(evaluations[0], evaluations[-1])) if len(evaluations) > 1 else (),
        faults=_faults(evaluations),
        tables=tables,
        tasks=_task_lines(tasks, [r for _, _, r in rollouts], verdicts),
        task_problems=problems,
        rejections=_rejections(settings),
        transcripts=tuple(_transcripts(run, rollouts, verdicts, [t for _, t in tasks])),
        num_rollouts=len(rollouts),
        recipe=recipe,
        manifest=_flat(run.manifest) if (run.path / "manifest.json").exists() else (),
    )


def _status(
    settings: Mapping[str, Any], tables: Sequence[StepTable], evaluations: Sequence[Evaluation], path: Path
) -> str:
    steps = settings.get("training", {}).get("steps")
    if steps is None:
        return "evaluation" if evaluations else "nothing measured yet"
    done = max((step + 1 for table in tables if table.phase == "train" for step in table.steps), default=0)
    if done < steps:
        return f"{done} of {steps} steps done; go on with `woodshed train --resume {path}`"
    return f"finished, {steps} steps"


def _tasks(path: Path) -> tuple[list[tuple[str, Task]], tuple[str, ...]]:
    """The run's own task folders by set, and why some could not be read."""
    found, problems = [], []
    for task_set in sorted(path.iterdir()) if path.is_dir() else []:
        for task_folder in sorted(p for p in task_set.iterdir() if p.is_dir()):
            try:
                found.append((task_set.name, folder.load(task_folder)))
            except TaskError as error:
                problems.append(str(error))
    return found, tuple(problems)


def _task_lines(
    tasks: Iterable[tuple[str, Task]], rollouts: Iterable[Rollout], verdicts: Mapping[str, Verdict]
) -> tuple[TaskLine, ...]:
    attempts, solved = Counter(), Counter()
    for rollout in rollouts:
        verdict = verdicts.get(rollout.id)
        if verdict is not None and verdict.status == "graded":
            attempts[rollout.task_id] += 1
            solved[rollout.task_id] += verdict.solved
    return tuple(TaskLine(name, task, attempts[task.id], solved[task.id]) for name, task in tasks)


def _rejections(settings: Mapping[str, Any]) -> tuple[tuple[str, int], ...]:
    """Why candidates did not become tasks, counted over the task sets that the recipe names and that still exist."""
    counts: Counter[str] = Counter()
    named = settings.get("tasks", {})
    sets = (named.get("train", ()), named.get("heldout", ())) if isinstance(named, dict) else (named,)
    sources = [path for paths in sets for path in paths]
    for path in {Path(source) / "rejections.jsonl" for source in sources}:
        for line in path.read_text(encoding="utf-8").splitlines() if path.is_file() else []:
            try:
                counts[str(json.loads(line)["reason"])] += 1
            except (ValueError, KeyError, TypeError):
                continue  # torn by a kill
    return tuple(counts.most_common())


def _transcripts(
    run: RunDir,
    rollouts: Sequence[tuple[str, int, Rollout]],
    verdicts: Mapping[str, Verdict],
    tasks: Iterable[Task],
) -> list[Transcript]:
    instructions = {task.id: task.instruction for task in tasks}
    hints: dict[tuple[str, int], list[Hint]] = {}
    for _, _, hint in run.read("hints", Hint):
        hints.setdefault((hint.rollout_id, hint.turn), []).append(hint)
    views = []
    for phase, step, rollout in rollouts[:MAX_TRANSCRIPTS]:
        verdict = verdicts.get(rollout.id)
        turns = tuple(
            TurnView(
                n,
                turn,
                tuple(hints.get((rollout.id, n), ())),
                sum(turn.logps) / len(turn.logps) if turn.logps else None,
            )
            for n, turn in enumerate(rollout.turns)
        )
        failed = (
            () if verdict is None else tuple((i, o) for i, o in verdict.outcomes.items() if o != "passed")
        )
        faults = sum(measures.is_fault(turn) for turn in rollout.turns)
        views.append(
            Transcript(
                phase, step, rollout, verdict, turns, faults, failed, instructions.get(rollout.task_id, "")
            )
        )
    return views


def _faults(evaluations: Sequence[Evaluation]) -> tuple[tuple[str, str, str], ...]:
    """Every kind of call fault, first against last evaluation, the most frequent before first."""
    if not evaluations:
        return ()
    sides = [evaluations[0].summary.faults, evaluations[-1].summary.faults]
    kinds = list(dict.fromkeys(kind for side in sides for kind in side))
    share = measures.MEASURES[0]

    def write(side: Mapping[str, Any], kind: str) -> str:
        if kind not in side:
            return "none"
        return f"{measures.write_estimate(share, side[kind])}, {measures.write_counts(share, side[kind])}"

    return tuple((kind, write(sides[0], kind), write(sides[1], kind)) for kind in kinds)


def _tables(run: RunDir) -> tuple[StepTable, ...]:
    phases: dict[str, dict[int, dict[str, float]]] = {}
    for phase, step, metrics in run.read("metrics"):
        phases.setdefault(phase, {})[step] = _numbers(metrics)
    return tuple(_table(phase, by_step) for phase, by_step in phases.items())


def _table(phase: str, by_step: Mapping[int, Mapping[str, float]]) -> StepTable:
    steps = tuple(sorted(by_step))
    names = dict.fromkeys(name for step in steps for name in by_step[step])
    rows = tuple(
        (name, tuple(short(by_step[step][name]) if name in by_step[step] else "" for step in steps))
        for name in names
    )
    drawn = []
    for title, lines in CURVES:
        series = {
            line: [(step, by_step[step][name]) for step in steps if name in by_step[step]]
            for name, line in lines.items()
        }
        drawn.append(draw(title, series))
    return StepTable(phase, steps, rows, tuple(curve for curve in drawn if curve is not None))


def _numbers(metrics: Mapping[str, Any]) -> dict[str, float]:
    """Every number of a metrics line; an estimate gives its value, other nested numbers get a joined name."""
    flat: dict[str, float] = {}
    for name, value in metrics.items():
        if isinstance(value, Mapping) and "value" in value:
            value = value["value"]
        if isinstance(value, Mapping):
            flat |= {f"{name} {key}": float(v) for key, v in value.items() if isinstance(v, int | float)}
        elif isinstance(value, int | float):
            flat[name] = float(value)
    return flat


def _flat(tree: Mapping[str, Any], prefix: str = "") -> tuple[tuple[str, str], ...]:
    """Nested values as (dotted name, text)."""
    lines: list[tuple[str, str]] = []
    for name, value in tree.items():
        if isinstance(value, Mapping):
            lines += _flat(value, f"{prefix}{name}.")
        else:
            text = ", ".join(map(str, value)) if isinstance(value, list) else str(value)
            lines.append((f"{prefix}{name}", text))
    return tuple(lines)
