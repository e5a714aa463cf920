"""Tasks from repositories: candidates in a seeded order, each proven, the first `limit` of every source kept.

The order in which candidates are decided is fixed, however many workers there are; so the same seed and input give the
same folders, and a run that was stopped goes on where it was.
"""

from __future__ import annotations

import base64
import hashlib
import json
import random
import re
import shutil
import tempfile
import time
from collections import Counter, deque
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from woodshed.records import Task, TaskError, from_json, to_json
from woodshed.synthesis import operators, sources
from woodshed.synthesis.baseline import Baseline, Progress, measure
from woodshed.synthesis.project import PYTHON
from woodshed.synthesis.proof import GENERATOR, Bench, Candidate, Rejected, SynthesisSettings, bench, prove
from woodshed.tasks import folder


@dataclass
class MakeReport:
    """What came of it."""

    accepted: list[Task] = field(default_factory=list)
    """Tasks in the folder, those of earlier runs included, in the order they were decided."""
    rejected: Counter[str] = field(default_factory=Counter)
    """Reason code to how many candidates."""
    tried: int = 0
    """Candidates decided by this run."""
    seconds: float = 0.0
    """Time that deciding them took; fetching and the baseline are not in it."""


def make(
    repositories: Sequence[str],
    out: Path,
    settings: SynthesisSettings | None = None,
    progress: Progress = lambda done, total, text: None,
) -> MakeReport:
    """Makes tasks of every source, a folder per task in `out`; rejected candidates are in out/rejections.jsonl.

    Raises:
        TaskError: a source that cannot be used, or an `out` that holds tasks made from something else.
    """
    settings = settings or SynthesisSettings()
    report = MakeReport()
    out.mkdir(parents=True, exist_ok=True)
    for leftover in out.glob(".make-*"):
        shutil.rmtree(leftover, ignore_errors=True)
    for source in repositories:
        with tempfile.TemporaryDirectory(prefix=".make-", dir=out) as scratch:
            progress(0, 0, f"fetching {source}")
            repository = sources.fetch(source, Path(scratch, "tree"))
            baseline = _measured_once(repository, out, settings, progress)
            staging = Path(scratch, "staging")
            staging.mkdir()
            _make_from(bench(baseline, staging, settings), out, report, progress)
    return report


def _measured_once(
    repository: sources.Repository, out: Path, settings: SynthesisSettings, progress: Progress
) -> Baseline:
    """The baseline, kept beside the tasks: all tasks of a set share one environment, whenever they were made."""
    asked = [GENERATOR, repository.sha256, PYTHON, *settings.extra_requirements]
    key = hashlib.sha256(json.dumps(asked).encode()).hexdigest()[:16]
    kept = out / ".baselines" / f"{repository.name}-{key}.json"
    if kept.exists():
        known = json.loads(kept.read_text(encoding="utf-8"))
        for path, content in known.pop("contents").items():
            (repository.tree / path).parent.mkdir(parents=True, exist_ok=True)
            (repository.tree / path).write_bytes(base64.b64decode(content))
        return from_json(Baseline, {**known, "repository": to_json(repository)})
    extra = settings.extra_requirements
    measured = measure(repository, extra_requirements=extra, timeout_s=settings.timeout_s, progress=progress)
    measured = replace(measured, durations={})  # the only part that differs from run to run
    contents = {p: base64.b64encode((repository.tree / p).read_bytes()).decode() for p in measured.generated}
    known = {**to_json(measured), "contents": contents}
    del known["repository"]
    kept.parent.mkdir(exist_ok=True)
    partial = kept.with_suffix(".part")
    partial.write_text(json.dumps(known, indent=1), encoding="utf-8")
    partial.replace(kept)
    return measured


def candidates(work: Bench) -> list[Candidate]:
    """Public functions that tests name, in seeded order: modules take turns, and so do the operators."""
    settings = work.settings
    words = {word for text in work.tests.values() for word in re.findall(r"\w+", text)}
    known = list(operators.symbols(work.code))
    times = Counter(symbol.name.lower() for symbol in known)
    by_path: dict[str, list[operators.Symbol]] = {}
    for symbol in known:
        if symbol.short in words and symbol.body_lines <= settings.max_body_lines:
            by_path.setdefault(symbol.path, []).append(symbol)
    repository = work.baseline.repository.name
    draw = random.Random(f"{settings.seed} {repository}")
    queues = [by_path[path] for path in sorted(by_path)]
    for queue in queues:
        draw.shuffle(queue)
    draw.shuffle(queues)
    longest = max(map(len, queues), default=0)
    order = [queue[turn] for turn in range(longest) for queue in queues if turn < len(queue)]
    found = []
    for turn in range(len(settings.operators)):
        for position, symbol in enumerate(order):
            operator = settings.operators[(position + turn) % len(settings.operators)]
            place = f"{symbol.module}." if times[symbol.name.lower()] > 1 else ""
            found.append(Candidate(f"{repository}-{operator}-{place}{symbol.name}", operator, symbol))
    return found


def _make_from(work: Bench, out: Path, report: MakeReport, progress: Progress) -> None:
    found, name = candidates(work), work.baseline.repository.name
    earlier = _earlier_rejections(out, work)
    limit = work.settings.limit
    kept, began = 0, time.monotonic()
    for position, (candidate, result) in enumerate(decide(work, found, out, earlier), start=1):
        home = out / candidate.name
        if isinstance(result, Task):
            report.tried += result.folder != home
            if result.folder != home:
                result.folder.rename(home)
            report.accepted.append(replace(result, folder=home))
            kept += 1
        else:
            report.tried += candidate.name not in earlier
            if candidate.name not in earlier:
                _log(out, work, candidate, result)
            report.rejected[result.reason] += 1
        done, total = (kept, limit) if limit else (position, len(found))
        progress(done, total, f"making tasks of {name}, {kept} tasks from {position} candidates")
        if limit and kept == limit:
            break
    report.seconds += time.monotonic() - began


def decide(
    work: Bench, found: list[Candidate], out: Path, earlier: dict[str, Rejected]
) -> Iterator[tuple[Candidate, Task | Rejected]]:
    """Every candidate with its outcome, in order; up to `jobs` are worked on ahead of the one that is due."""
    jobs = work.settings.jobs
    pool = ThreadPoolExecutor(jobs)
    waiting: deque[tuple[Candidate, Future[Task | Rejected]]] = deque()
    remaining = iter(found)
    try:
        while True:
            while len(waiting) < jobs + 1 and (candidate := next(remaining, None)) is not None:
                waiting.append((candidate, pool.submit(_decide_one, work, candidate, out, earlier)))
            if not waiting:
                return
            candidate, future = waiting.popleft()
            yield candidate, future.result()
    finally:
        pool.shutdown(wait=True, cancel_futures=True)


def _decide_one(
    work: Bench, candidate: Candidate, out: Path, earlier: dict[str, Rejected]
) -> Task | Rejected:
    if candidate.name in earlier:
        return earlier[candidate.name]
    if (out / candidate.name).exists():
        return _earlier_task(work, out / candidate.name)
    try:
        return prove(work, candidate)
    except Rejected as rejection:
        return rejection


def _earlier_task(work: Bench, path: Path) -> Task:
    task = folder.load(path)
    now = {"sha256": work.baseline.repository.sha256, "generator": GENERATOR, "seed": work.settings.seed}
    for key, value in now.items():
        if task.provenance.get(key) != value:
            before = task.provenance.get(key)
            raise TaskError(
                f"{path} was made with {key} {before!r}, not {value!r}; use another folder for --out"
            )
    return task


def _earlier_rejections(out: Path, work: Bench) -> dict[str, Rejected]:
    """Rejections that an earlier run with the same input wrote down; a torn last line is dropped."""
    log = out / "rejections.jsonl"
    if not log.exists():
        return {}
    text = log.read_text(encoding="utf-8")
    whole, _, torn = text.rpartition("\n")
    if torn:
        log.write_text(f"{whole}\n" if whole else "", encoding="utf-8")
    found = {}
    for line in whole.splitlines():
        entry = json.loads(line)
        if (entry["sha256"], entry["seed"]) == (work.baseline.repository.sha256, work.settings.seed):
            found[entry["task"]] = Rejected(entry["reason"], entry["detail"])
    return found


def _log(out: Path, work: Bench, candidate: Candidate, rejection: Rejected) -> None:
    entry: dict[str, Any] = {
        "task": candidate.name,
        "reason": rejection.reason,
        "detail": rejection.detail,
        "operator": candidate.operator,
        "path": candidate.symbol.path,
        "symbol": candidate.symbol.name,
        "sha256": work.baseline.repository.sha256,
        "seed": work.settings.seed,
    }
    with (out / "rejections.jsonl").open("a", encoding="utf-8") as log:
        log.write(json.dumps(entry) + "\n")
