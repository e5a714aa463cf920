"""Contents of run folders, arranged for reading. Half-finished runs are the normal case.

Rollouts are read as a stream: of each one stay a `Line` (what tables, figures and the search list need) and its
transcript in a compressed archive, so a run of thousands of attempts needs a few hundred megabytes.
"""

from __future__ import annotations

import dataclasses
import json
import math
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from woodshed.evals import evaluation, ledger, variants
from woodshed.evals.ledger import Ledger
from woodshed.evals.measures import BEHAVIOUR, MEASURES, Graded, is_fault, promise
from woodshed.monitors import drift
from woodshed.monitors.drift import Alarm
from woodshed.records import (
    Flag,
    Hint,
    RecipeError,
    Rollout,
    RunError,
    Task,
    TaskError,
    TokenDivergence,
    Verdict,
)
from woodshed.report.transcripts import Archives, Remarks
from woodshed.runs.folder import RunDir
from woodshed.tasks import folder

Point = tuple[
    float, float | None, float | None
]  # a metric's value and the ends of its interval, where it has one
Metrics = Mapping[str, Mapping[int, Mapping[str, Point]]]  # phase -> step -> name


@dataclass(frozen=True)
class Line:
    """One rollout, made small."""

    run: int
    """Index of its run on the page."""
    phase: str
    step: int
    id: str
    task_id: str
    task_name: str
    attempt: int
    ended: str
    result: str
    """"solved", "failed", "void" or "not judged"."""
    reward: float | None
    turns: int
    tokens: int
    """Sampled ones."""
    seconds: float
    faults: Mapping[str, int]
    """Call fault -> turns."""
    hints: tuple[str, ...]
    """Detectors, by turn."""
    targeted: int
    """Turns that the targeted divergence trained on."""
    flags: tuple[Flag, ...]
    integrity: tuple[str, ...]
    sums: Mapping[str, tuple[float, float]]
    """Measure -> its part and whole at this attempt."""
    promise: tuple[float, ...]
    """A rank given without its verdict (`measures.promise`)."""
    archive: int
    place: int

    @property
    def is_void(self) -> bool:
        return self.result == "void"


@dataclass(frozen=True)
class TaskLine:
    """One task and how attempts at it went."""

    set: str
    task: Task
    attempts: int
    solved: int


@dataclass(frozen=True)
class RunRecords:
    """One run."""

    name: str
    path: Path
    note: str
    status: str
    settings: Mapping[str, Any]
    recipe: str
    manifest: Mapping[str, Any]
    lines: tuple[Line, ...]
    metrics: Metrics
    gains: Mapping[str, Mapping[int, float]]
    """Detector -> step -> mean hint gain in nats a turn."""
    tasks: tuple[TaskLine, ...]
    task_problems: tuple[str, ...]
    rejections: tuple[tuple[str, int], ...]
    books: Ledger | None
    """Resources that it used and their cost; None where its table of prices is none."""
    problems: tuple[str, ...]
    """Files that could not be read and are missing here."""
    alarms: tuple[Alarm, ...]
    """Findings that no single attempt shows (`monitors.drift`)."""

    def evaluations(self) -> dict[int, list[Line]]:
        """Steps of the policy that was measured -> the attempts, oldest first."""
        found: dict[int, list[Line]] = {}
        for line in self.lines:
            if line.phase == "eval":
                found.setdefault(line.step, []).append(line)
        return dict(sorted(found.items()))


@dataclass
class _Said:
    """Records of a run about its rollouts, by their ids."""

    verdicts: dict[str, tuple[Verdict, int]] = field(default_factory=dict)
    """Verdict without the tests that passed, and how many were expected."""
    judged: list[tuple[str, int, Verdict]] = field(default_factory=list)
    """The same verdicts with phase and step."""
    hints: dict[str, dict[int, list[Hint]]] = field(default_factory=dict)
    token_divergences: dict[str, dict[int, TokenDivergence]] = field(default_factory=dict)
    flags: dict[str, list[Flag]] | None = None
    """None where no monitor looked."""
    references: Mapping[str, Collection[str]] = field(default_factory=dict)
    """Files of the gold patch by task name."""
    pieces: dict[int, str] = field(default_factory=dict)
    gains: dict[str, dict[int, list[float]]] = field(default_factory=dict)


def gather(run: RunDir, number: int, archives: Archives) -> RunRecords:
    """Read a run folder; its transcripts go into `archives` under the run's `number`. What is damaged is left out.

    Raises:
        RunError: the recipe is damaged, or the folder cannot be read.
    """
    try:
        return _gather(run, number, archives)
    except (OSError, ValueError) as error:
        raise RunError(f"{run.path} cannot be read: {error}") from error


def _gather(run: RunDir, number: int, archives: Archives) -> RunRecords:
    settings = run.recipe()
    recipe = (run.path / "recipe.toml").read_text(encoding="utf-8")
    problems: list[str] = []
    said = _said(run, problems)
    used = list(ledger.of_verdicts(said.judged))
    lines: list[Line] = []
    for phase, step, rollout in run.scan("rollouts", Rollout, problems=problems):
        lines.append(_line(number, phase, step, rollout, said, archives))
        used.append((phase, step, ledger.of_rollout(rollout)))
    measured = run.read("metrics", problems=problems)
    used += [(phase, step, ledger.of_metrics(made)) for phase, step, made in measured]
    metrics = read_metrics(measured)
    tasks, task_problems = read_tasks(run.path / "tasks")
    manifest = _manifest(run, problems)
    return RunRecords(
        name=str(settings.get("name") or run.path.name),
        path=run.path,
        note=str(settings.get("note", "")),
        status=variants.stopped(run, problems=[]) or _status(settings, metrics, run.path),
        settings=settings,
        recipe=recipe,
        manifest=manifest,
        lines=tuple(lines),
        metrics=metrics,
        gains={
            name: {step: sum(found) / len(found) for step, found in sorted(steps.items())}
            for name, steps in sorted(said.gains.items())
        },
        tasks=_task_lines(tasks, lines),
        task_problems=task_problems,
        rejections=_rejections(settings),
        books=_books(used, manifest, problems),
        problems=tuple(problems),
        alarms=tuple(drift.from_run(run, problems=[])),
    )


def _manifest(run: RunDir, problems: list[str]) -> dict[str, Any]:
    try:
        return run.manifest
    except RunError as error:
        problems.append(str(error))
        return {}


def _books(used: Iterable[ledger.Used], manifest: Mapping[str, Any], problems: list[str]) -> Ledger | None:
    try:
        return ledger.add_up(used, manifest)
    except RecipeError as error:
        problems.append(str(error))
        return None


def _said(run: RunDir, problems: list[str]) -> _Said:
    said = _Said(references=evaluation.references(run))
    for phase, step, verdict in run.scan("verdicts", Verdict, problems=problems):
        failed = {test: outcome for test, outcome in verdict.outcomes.items() if outcome != "passed"}
        short = dataclasses.replace(verdict, outcomes=failed)
        said.verdicts[verdict.rollout_id] = (short, len(verdict.outcomes))
        said.judged.append((phase, step, short))
    for _, _, hint in run.scan("hints", Hint, problems=problems):
        said.hints.setdefault(hint.rollout_id, {}).setdefault(hint.turn, []).append(hint)
    for _, step, taught in run.scan("divergences", TokenDivergence, problems=problems):
        said.token_divergences.setdefault(taught.rollout_id, {})[taught.turn] = taught
        said.gains.setdefault(taught.detector, {}).setdefault(step, []).append(taught.gain)
    if (raised := evaluation.flags(run, problems=problems)) is not None:
        flags = said.flags = {}
        for flag in raised:
            flags.setdefault(flag.rollout_id, []).append(flag)
    for _, _, found in run.scan("token_texts", problems=problems):
        said.pieces |= {int(i): text for i, text in found.items()}
    return said


def _line(number: int, phase: str, step: int, rollout: Rollout, said: _Said, archives: Archives) -> Line:
    verdict, num_tests = said.verdicts.get(rollout.id, (None, 0))
    flags = None if said.flags is None else tuple(said.flags.get(rollout.id, ()))
    known = said.references.get(rollout.task_name)
    graded = Graded(rollout, verdict, flags, None if known is None else frozenset(known))
    hints = said.hints.get(rollout.id, {})
    remarks = Remarks(hints, said.token_divergences.get(rollout.id, {}))
    archive, place = archives.add(number, rollout, verdict, num_tests, remarks, said.pieces)
    counters = rollout.counters
    return Line(
        run=number,
        phase=phase,
        step=step,
        id=rollout.id,
        task_id=rollout.task_id,
        task_name=rollout.task_name,
        attempt=rollout.attempt,
        ended=rollout.ended,
        result=result_of(graded),
        reward=None if verdict is None else verdict.reward,
        turns=counters["turns"],
        tokens=counters["sampled_tokens"],
        seconds=rollout.seconds,
        faults=Counter(str(turn.error_kind) for turn in rollout.turns if is_fault(turn)),
        hints=tuple(hint.detector for turn in sorted(hints) for hint in hints[turn]),
        targeted=len(remarks.token_divergences),
        flags=flags or (),
        integrity=() if verdict is None else verdict.integrity,
        sums={m.key: (float(m.part(graded)), float(m.whole(graded))) for m in (*MEASURES, *BEHAVIOUR)},
        promise=promise(graded),
        archive=archive,
        place=place,
    )


def result_of(graded: Graded) -> str:
    """Result of an attempt at its task, in a word."""
    if graded.is_void:
        return "void"
    if graded.verdict is None:
        return "not judged"
    return "solved" if graded.verdict.solved else "failed"


def read_metrics(measured: Iterable[tuple[str, int, Mapping[str, Any]]]) -> Metrics:
    """Every number of the metrics lines; nested ones get a joined name ("faults bad_path")."""
    phases: dict[str, dict[int, dict[str, Point]]] = {}
    for phase, step, metrics in measured:
        phases.setdefault(phase, {})[step] = dict(_points(metrics))
    return phases


def _points(metrics: Mapping[str, Any], prefix: str = "") -> Iterable[tuple[str, Point]]:
    for name, value in metrics.items():
        if isinstance(value, Mapping) and "value" in value:
            ends = [number(value.get(end)) for end in ("value", "low", "high")]
            if ends[0] is not None:
                yield prefix + name, (ends[0], ends[1], ends[2])
        elif isinstance(value, Mapping):
            yield from _points(value, f"{prefix}{name} ")
        elif (found := number(value)) is not None:
            yield prefix + name, (found, None, None)


def number(value: Any) -> float | None:
    """A number as a float, however long its digits; None for what is none."""
    try:
        return float(value) if isinstance(value, int | float) else None
    except OverflowError:
        return math.copysign(math.inf, value)


def _status(settings: Mapping[str, Any], metrics: Metrics, path: Path) -> str:
    steps = settings.get("rl", {}).get("steps")
    if steps is None:
        return "evaluation" if "eval" in metrics else "nothing measured yet"
    done = max((step + 1 for step in metrics.get("train", ())), default=0)
    if done < steps:
        return f"{done} of {steps} steps done; go on with `woodshed train --resume {path}`"
    return f"finished, {steps} steps"


def read_tasks(path: Path) -> tuple[list[tuple[str, Task]], tuple[str, ...]]:
    """The run's own task folders by set, and why some could not be read."""
    found, problems = [], []
    task_sets = sorted(p for p in path.iterdir() if not p.name.startswith(".")) if path.is_dir() else []
    for task_set in task_sets:  # a dot marks a set that is still being copied
        for task_folder in sorted(p for p in task_set.iterdir() if p.is_dir()):
            try:
                found.append((task_set.name, folder.peek(task_folder)))
            except TaskError as error:
                problems.append(str(error))
    return found, tuple(problems)


def _task_lines(tasks: Iterable[tuple[str, Task]], lines: Sequence[Line]) -> tuple[TaskLine, ...]:
    attempts, solved = Counter(), Counter()
    for line in lines:
        if line.result in ("solved", "failed"):
            attempts[line.task_id] += 1
            solved[line.task_id] += line.result == "solved"
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
