"""How many proven tasks an hour gives, over eight real packages; and what screening with the covering tests saves.

    python benchmarks/task_factory.py [--target 500] [--build tasks/factory] [--minutes 60] [--jobs 3] [--timeout 120]
    woodshed tasks check tasks/factory && woodshed tasks leaks tasks/factory
    python benchmarks/scripted_exploit.py tasks/factory --count 50

Bars, on 2 cores: 500 accepted tasks in 60 minutes, at least 60% of the tried candidates accepted, 8 operators and the
levels 0 to 5 among them, no repository above 30%. All packages give a round of tasks; then whichever gave the most a
minute in its last round gives another, up to its share of the target. A package that cannot be used is told and left
out. It stops at the target or when the time of this run is up, and a second run goes on from the folder, its time added
(of a run that was killed, all but the candidates it was at). CPU seconds stand beside the wall clock: on a machine that
others use, they are what can be compared.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import json
import math
import os
import resource
import tempfile
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from woodshed.records import Task, TaskError
from woodshed.runs import machine
from woodshed.runs.files import write_atomically
from woodshed.synthesis import SynthesisSettings, make, stats
from woodshed.synthesis.candidates import candidates
from woodshed.synthesis.measuring import measured_once
from woodshed.synthesis.progress import Phases
from woodshed.synthesis.repository_context import read_context
from woodshed.synthesis.sources import fetch
from woodshed.tasks import folder

SOURCES = (
    "pypi:toolz==1.2.0",
    "pypi:boltons==26.2.0",
    "pypi:python-slugify==9.2.0",
    "pypi:humanize==4.17.0",
    "pypi:cachetools==8.0.2",
    "pypi:semver==3.1.2",
    "pypi:tabulate==0.10.0",
    "pypi:markdown-it-py==4.3.0",
)
EXTRA = {"pypi:markdown-it-py==4.3.0": ("pytest-regressions",)}
"""Requirements of tests that a package does not declare in a way that can be read."""
ROUND = 50
"""Tasks that a package adds in a round."""
MOST_SHARE = 0.3
"""Of the target, from one package."""
BEFORE_TESTS = {"cascade", "syntax", "undefined_name", "import_broken", "command_broken", "copy"}
SCREENED = {"no_test_fails", "wrong_reason", "too_wide", "trivial", "weak_tests"}
"""Reasons that are found before, and by, the covering tests; the full suite ran only for the others. A "copy" is a leak
that was known before any test ran; the gate finds the others last."""


def main() -> None:
    parser = argparse.ArgumentParser(description="How many proven tasks an hour gives.")
    parser.add_argument("sources", nargs="*", default=SOURCES, metavar="SOURCE")
    parser.add_argument("--target", type=int, default=500, help="accepted tasks")
    parser.add_argument("--minutes", type=float, default=60.0, help="stop after this long")
    parser.add_argument("--jobs", type=int, default=3, help="one more than cores: tests wait, too")
    parser.add_argument(
        "--timeout", type=float, default=120.0, help="for a run of a suite; more on a busy machine"
    )
    parser.add_argument("--build", type=Path, default=Path("tasks/factory"), help="folder of the build")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results" / "task_factory.json")
    options = parser.parse_args()
    spent = build(options)
    report = {**figures(options, spent), "machine": machine.describe(), "load": os.getloadavg()[0]}
    show(report)
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.write_text(json.dumps(report, indent=2) + "\n")


def build(options: argparse.Namespace) -> dict[str, float]:
    """Rounds until the target, the time, or the end of all candidates; seconds spent, earlier runs included."""
    spent = Spent.read(options.build / ".factory.json")
    options.build.mkdir(parents=True, exist_ok=True)
    with ThreadPoolExecutor(options.jobs) as pool:
        list(pool.map(functools.partial(prepare, options), options.sources))
    print(f"{len(options.sources)} packages measured, {spent.wall_s / 60:.1f} min", flush=True)
    most = max(1, int(MOST_SHARE * options.target))
    pace = dict.fromkeys(options.sources, math.inf)
    given = dict.fromkeys(options.sources, 0)
    count = len(folder.task_folders(options.build)) if any(options.build.glob("*/task.toml")) else 0
    while pace and count < options.target and spent.wall_s - spent.earlier_s < 60 * options.minutes:
        source, began = max(pace, key=lambda s: pace[s]), time.monotonic()
        limit = min(given[source] + ROUND, most, given[source] + options.target - count)
        try:
            report = make(
                [source], options.build, settings_of(source, limit, options), lambda *_: spent.keep()
            )
        except TaskError as error:
            print(f"{source} is left out: {error}", flush=True)
            del pace[source]
            continue
        spent.tried += report.tried
        spent.keep()
        if report.tried:  # else all of it was there before
            pace[source] = (len(report.accepted) - given[source]) / (time.monotonic() - began)
        given[source] = len(report.accepted)
        if given[source] < limit or limit == most:
            del pace[source]  # all of its candidates are decided, or it has its share
        count = len(folder.task_folders(options.build)) if report.accepted else count
        print(f"{source}: {count} tasks, {spent.wall_s / 60:.1f} min, {spent.cpu_s:.0f} CPU s", flush=True)
    return spent.figures()


def prepare(options: argparse.Namespace, source: str) -> None:
    """Measures a package beside the others; what is wrong with it is told in its turn."""
    with tempfile.TemporaryDirectory() as scratch, contextlib.suppress(TaskError):
        repository = fetch(source, Path(scratch, "tree"))
        measured_once(
            repository, options.build, settings_of(source, 0, options), Phases(lambda done, total, text: None)
        )


class Spent:
    """Time and candidates, written down as they go."""

    def __init__(self, kept: Path, wall_s: float = 0.0, cpu_s: float = 0.0, tried: int = 0) -> None:
        self.kept, self.tried, self.earlier_s, self.earlier_cpu_s = kept, tried, wall_s, cpu_s
        self.began, self.cpu_before_s = time.monotonic(), _cpu_s()

    @classmethod
    def read(cls, kept: Path) -> Spent:
        return cls(kept, **json.loads(kept.read_text())) if kept.exists() else cls(kept)

    @property
    def wall_s(self) -> float:
        return self.earlier_s + time.monotonic() - self.began

    @property
    def cpu_s(self) -> float:
        return self.earlier_cpu_s + _cpu_s() - self.cpu_before_s

    def figures(self) -> dict[str, float]:
        return {"wall_s": self.wall_s, "cpu_s": self.cpu_s, "tried": self.tried}

    def keep(self) -> None:
        if self.kept.parent.is_dir():
            write_atomically(self.kept, json.dumps(self.figures()))


def settings_of(source: str, limit: int, options: argparse.Namespace) -> SynthesisSettings:
    extra = EXTRA.get(source, ())
    return SynthesisSettings(
        limit=limit, jobs=options.jobs, extra_requirements=extra, timeout_s=options.timeout
    )


def _cpu_s() -> float:
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(u.ru_utime + u.ru_stime for u in used)


def figures(options: argparse.Namespace, spent: dict[str, float]) -> dict[str, Any]:
    tasks = folder.load_set(options.build)
    found = stats.summarise(tasks, options.build / "rejections.jsonl")
    shares = Counter(str(task.provenance["source"]) for task in tasks)
    return {
        "tasks": len(tasks),
        "tasks_per_hour": round(3600 * len(tasks) / max(spent["wall_s"], 1)),
        "cpu_s_per_task": round(spent["cpu_s"] / max(len(tasks), 1), 2),
        "acceptance": round(found.acceptance, 3),
        "operators": len({task.operator for task in tasks}),
        "levels": sorted({task.level for task in tasks}),
        "largest_share": round(max(shares.values()) / len(tasks), 3),
        "table": stats.table(found),
        "rejected": found.rejected,
        "screening": screening(options, tasks),
        **spent,
    }


def screening(options: argparse.Namespace, tasks: list[Task]) -> dict[str, float]:
    """Tests that were run to decide all candidates, against running the whole suite for each of them."""
    run = whole = 0
    log = options.build / "rejections.jsonl"
    lines = log.read_text().splitlines() if log.exists() else []
    reasons = {
        entry["task"]: "copy"
        if entry["reason"] == "leak" and "also stands in" in entry["detail"]
        else entry["reason"]
        for entry in map(json.loads, lines)
    }
    used = {str(task.provenance["source"]) for task in tasks}
    for source in (source for source in options.sources if source in used):
        with tempfile.TemporaryDirectory() as scratch:
            repository = fetch(source, Path(scratch, "tree"))
            settings = settings_of(source, 0, options)
            measured = measured_once(
                repository, options.build, settings, Phases(lambda done, total, text: None)
            )
            work = read_context(measured, Path(scratch), settings)
            total = len(work.baseline.stable)
            for candidate in candidates(work):
                covering = candidate.tests.bit_count() or total
                reason = reasons.get(candidate.name, "")
                if reason or any(task.name == candidate.name for task in tasks):
                    whole += total
                    run += 0 if reason in BEFORE_TESTS else covering if reason in SCREENED else total
    return {"tests_run": run, "tests_without_screening": whole, "saved": round(1 - run / max(whole, 1), 3)}


def show(report: dict[str, Any]) -> None:
    widths = [max(len(row[i]) for row in report["table"]) for i in range(len(report["table"][0]))]
    for row in report["table"]:
        print("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())
    for name, value, bar, ok in (
        ("tasks per hour", report["tasks_per_hour"], "500", report["tasks_per_hour"] >= 500),
        ("acceptance", report["acceptance"], "0.6", report["acceptance"] >= 0.6),
        ("operators", report["operators"], "8", report["operators"] >= 8),
        ("levels", report["levels"], "0 to 5", set(range(6)) <= set(report["levels"])),
        ("largest repository", report["largest_share"], "at most 0.3", report["largest_share"] <= 0.3),
    ):
        print(f"{name:<20}{value!s:>22}   bar {bar}{'' if ok else '  MISSED'}")
    print(f"CPU seconds per task {report['cpu_s_per_task']}, load {report['load']:.1f}")
    saved = report["screening"]
    print(f"screening saves {saved['saved']:.0%} of {saved['tests_without_screening']} test runs")
    print(f"rejected: {report['rejected']}")


if __name__ == "__main__":
    main()
