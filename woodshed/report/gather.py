"""Contents of run folders, arranged for the page. Half-finished runs are the normal case.

Rollouts are read as a stream: each leaves a `Line` (the fields of tables, figures and the search list) and its
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

from woodshed import documents
from woodshed.evals import evaluation, ledger, variants
from woodshed.evals.ledger import Ledger
from woodshed.evals.measures import BEHAVIOUR, MEASURES, Graded, is_fault, promise
from woodshed.monitors import drift
from woodshed.monitors.drift import Alarm
from woodshed.records import (
    Flag,
    Hint,
    RecipeError,
    RewardTerms,
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

SOLVED = {"solved": True, "partly": False, "failed": False}
"""Results of graded attempts; of others it is not known."""

Point = tuple[
    float, float | None, float | None
]  # a metric's value and the ends of its interval, where it has one
Metrics = Mapping[str, Mapping[int, Mapping[str, Point]]]  # phase -> step -> name


@dataclass(frozen=True)
class Line:
    """Summary of one rollout."""

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
    """"solved", "partly", "failed" (both of which `SOLVED` denies), "void" or "not judged"."""
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
    archive_index: int
    effort: str = ""
    """Effort that its prompt asked for, in practice."""

    @property
    def is_void(self) -> bool:
        return self.result == "void"


@dataclass(frozen=True)
class TaskLine:
    """One task with the outcomes of its attempts."""

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
    ledger: Ledger | None
    """Resources that it used and their cost; None if its price table cannot be read."""
    problems: tuple[str, ...]
    """Files that could not be read and are missing here."""
    alarms: tuple[Alarm, ...]
    """Findings that no single attempt shows (`monitors.drift`)."""

    def evaluations(self) -> dict[int, list[Line]]:
        """Steps of the policy that was measured -> the attempts, oldest first."""
        by_step: dict[int, list[Line]] = {}
        for line in self.lines:
            if line.phase == "eval":
                by_step.setdefault(line.step, []).append(line)
        return dict(sorted(by_step.items()))


@dataclass
class _ByRollout:
    """Records of a run about its rollouts, by their ids."""

    verdicts: dict[str, tuple[Verdict, int]] = field(default_factory=dict)
    """Verdict without the tests that passed, and the number of expected tests."""
    judged: list[tuple[str, int, Verdict]] = field(default_factory=list)
    """The same verdicts with phase and step."""
    hints: dict[str, dict[int, list[Hint]]] = field(default_factory=dict)
    token_divergences: dict[str, dict[int, TokenDivergence]] = field(default_factory=dict)
    flags: dict[str, list[Flag]] | None = None
    """None if no monitor ran."""
    references: Mapping[str, Collection[str]] = field(default_factory=dict)
    """Files of the gold patch by task name."""
    efforts: dict[str, str] = field(default_factory=dict)
    """Effort that the prompt asked for."""
    token_texts: dict[int, str] = field(default_factory=dict)
    gains: dict[str, dict[int, list[float]]] = field(default_factory=dict)


def gather(run: RunDir, number: int, archives: Archives) -> RunRecords:
    """Read a run folder; its transcripts go into `archives` under the run's `number`. Damaged records are left out.

    Raises:
        RunError: the recipe is damaged, or the folder cannot be read.
    """
    try:
        return _gather(run, number, archives)
    except (OSError, ValueError) as error:
        raise RunError(f"{run.path} cannot be read: {error}") from error


def _gather(run: RunDir, number: int, archives: Archives) -> RunRecords:
    settings = run.recipe()
    recipe = documents.read(run.path / "recipe.toml", RunError)
    problems: list[str] = []
    by_rollout = _by_rollout(run, problems)
    used = list(ledger.of_verdicts(by_rollout.judged))
    lines: list[Line] = []
    for phase, step, rollout in run.scan("rollouts", Rollout, problems=problems):
        lines.append(_line(number, phase, step, rollout, by_rollout, archives))
        used.append((phase, step, ledger.of_rollout(rollout)))
    measured = run.read("metrics", problems=problems)
    used += [(phase, step, ledger.of_metrics(line)) for phase, step, line in measured]
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
            name: {step: sum(gains) / len(gains) for step, gains in sorted(steps.items())}
            for name, steps in sorted(by_rollout.gains.items())
        },
        tasks=_task_lines(tasks, lines),
        task_problems=task_problems,
        rejections=_rejections(settings),
        ledger=_ledger(used, manifest, problems),
        problems=tuple(problems),
        alarms=tuple(drift.from_run(run, problems=[])),
    )


def _manifest(run: RunDir, problems: list[str]) -> dict[str, Any]:
    try:
        return run.manifest
    except RunError as error:
        problems.append(str(error))
        return {}


def _ledger(used: Iterable[ledger.Used], manifest: Mapping[str, Any], problems: list[str]) -> Ledger | None:
    try:
        return ledger.add_up(used, manifest)
    except RecipeError as error:
        problems.append(str(error))
        return None


def _by_rollout(run: RunDir, problems: list[str]) -> _ByRollout:
    by_rollout = _ByRollout(references=evaluation.references(run))
    for phase, step, verdict in run.scan("verdicts", Verdict, problems=problems):
        failed = {test: outcome for test, outcome in verdict.outcomes.items() if outcome != "passed"}
        short = dataclasses.replace(verdict, outcomes=failed)
        by_rollout.verdicts[verdict.rollout_id] = (short, len(verdict.outcomes))
        by_rollout.judged.append((phase, step, short))
    for _, _, terms in run.scan("reward_terms", RewardTerms, problems=problems):
        by_rollout.efforts[terms.rollout_id] = terms.effort
    for _, _, hint in run.scan("hints", Hint, problems=problems):
        by_rollout.hints.setdefault(hint.rollout_id, {}).setdefault(hint.turn, []).append(hint)
    for _, step, divergence in run.scan("divergences", TokenDivergence, problems=problems):
        by_rollout.token_divergences.setdefault(divergence.rollout_id, {})[divergence.turn] = divergence
        by_rollout.gains.setdefault(divergence.detector, {}).setdefault(step, []).append(divergence.gain)
    if (flags_raised := evaluation.flags(run, problems=problems)) is not None:
        flags = by_rollout.flags = {}
        for flag in flags_raised:
            flags.setdefault(flag.rollout_id, []).append(flag)
    for _, _, texts in run.scan("token_texts", problems=problems):
        by_rollout.token_texts |= {int(i): text for i, text in texts.items()}
    return by_rollout


def _line(
    number: int, phase: str, step: int, rollout: Rollout, by_rollout: _ByRollout, archives: Archives
) -> Line:
    verdict, num_tests = by_rollout.verdicts.get(rollout.id, (None, 0))
    flags = None if by_rollout.flags is None else tuple(by_rollout.flags.get(rollout.id, ()))
    reference = by_rollout.references.get(rollout.task_name)
    graded = Graded(rollout, verdict, flags, None if reference is None else frozenset(reference))
    hints = by_rollout.hints.get(rollout.id, {})
    remarks = Remarks(hints, by_rollout.token_divergences.get(rollout.id, {}))
    archive, index = archives.add(number, rollout, verdict, num_tests, remarks, by_rollout.token_texts)
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
        archive_index=index,
        effort=by_rollout.efforts.get(rollout.id, ""),
    )


def result_of(graded: Graded) -> str:
    """Result of an attempt at its task, in a word."""
    if graded.is_void:
        return "void"
    if graded.verdict is None:
        return "not judged"
    if graded.verdict.solved:
        return "solved"
    return "partly" if graded.verdict.reward > 0 else "failed"


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
        elif (figure := number(value)) is not None:
            yield prefix + name, (figure, None, None)


def number(value: Any) -> float | None:
    """A number as a float, however long its digits; None for anything else."""
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
        return f"{done} of {steps} steps done; resume with `{RunDir(path).resuming}`"
    return f"finished, {steps} step{'s' if steps != 1 else ''}"


def read_tasks(path: Path) -> tuple[list[tuple[str, Task]], tuple[str, ...]]:
    """The run's own task folders by set, and a sentence for each that could not be read."""
    tasks, problems = [], []
    task_sets = sorted(p for p in path.iterdir() if not p.name.startswith(".")) if path.is_dir() else []
    for task_set in task_sets:  # a dot marks a set that is still being copied
        for task_folder in sorted(p for p in task_set.iterdir() if p.is_dir()):
            try:
                tasks.append((task_set.name, folder.peek(task_folder)))
            except TaskError as error:
                problems.append(str(error))
    return tasks, tuple(problems)


def _task_lines(tasks: Iterable[tuple[str, Task]], lines: Sequence[Line]) -> tuple[TaskLine, ...]:
    attempts, solved = Counter(), Counter()
    for line in lines:
        if line.result in SOLVED:
            attempts[line.task_id] += 1
            solved[line.task_id] += line.result == "solved"
    return tuple(TaskLine(name, task, attempts[task.id], solved[task.id]) for name, task in tasks)


def _rejections(settings: Mapping[str, Any]) -> tuple[tuple[str, int], ...]:
    """Reasons why candidates were rejected, counted over the task sets that the recipe names and that still exist."""
    counts: Counter[str] = Counter()
    task_settings = settings.get("tasks", {})
    is_split = isinstance(task_settings, dict)
    sets = [task_settings.get(name, ()) for name in ("train", "heldout")] if is_split else [task_settings]
    sources = [path for paths in sets for path in paths]
    for path in {Path(source) / "rejections.jsonl" for source in sources}:
        for line in path.read_text(encoding="utf-8").splitlines() if path.is_file() else []:
            try:
                counts[str(json.loads(line)["reason"])] += 1
            except (ValueError, KeyError, TypeError, RecursionError):
                continue  # torn by a kill
    return tuple(counts.most_common())
