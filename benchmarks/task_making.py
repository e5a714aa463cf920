"""How fast candidates become tasks: deletion, closure, pruning and every run that proves a task.

    python benchmarks/task_making.py [SOURCE ...] [--candidates 40] [--jobs 2]

A candidate check is a decision on one candidate, with all its runs of the suite. Fetching, building and the baseline
happen once per repository and are shown on their own. Bar: at least 300 checks per hour on 2 cores for toolz. Where
the load is above the number of cores, others were at work and the figures are lower bounds.
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
import time
from pathlib import Path
from typing import Any

from woodshed.runs import machine
from woodshed.synthesis import SynthesisSettings, baseline, mapping, sources
from woodshed.synthesis.candidates import candidates
from woodshed.synthesis.make import decide
from woodshed.synthesis.repository_context import RepositoryMeasurements, read_context

BAR_PER_HOUR = 300
SOURCES = ("pypi:toolz==1.2.0",)


def main() -> None:
    parser = argparse.ArgumentParser(description="How fast candidates become tasks.")
    parser.add_argument("sources", nargs="*", default=SOURCES, metavar="SOURCE")
    parser.add_argument("--candidates", type=int, default=40, help="candidates per source")
    parser.add_argument("--jobs", type=int, default=2, help="candidates at the same time")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results" / "task_making.json")
    options = parser.parse_args()
    rows = [measure(source, options.candidates, options.jobs) for source in options.sources]
    print(
        f"{'source':<28}{'tests':>6}{'baseline s':>12}{'checks':>8}{'tasks':>7}{'s each':>8}{'per hour':>10}"
    )
    for row in rows:
        print(
            f"{row['source']:<28}{row['tests']:>6}{row['baseline_s']:>12}{row['checks']:>8}{row['tasks']:>7}"
            f"{row['s_per_check']:>8}{row['checks_per_hour']:>10}"
            f"{'  MISSED' if row['checks_per_hour'] < BAR_PER_HOUR else ''}"
        )
        print(f"{'':<28}rejected: {row['rejected'] or 'none'}")
    load = os.getloadavg()[0]
    print(
        f"load {load:.1f} on {machine.cores()} cores, {options.jobs} jobs; bar for toolz: {BAR_PER_HOUR} per hour"
    )
    report = {"rows": rows, "jobs": options.jobs, "load": load, "machine": machine.describe()}
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.write_text(json.dumps(report, indent=2) + "\n")


def measure(source: str, count: int, jobs: int) -> dict[str, Any]:
    """One source: its baseline, then the first `count` candidates, kept tasks included."""
    with tempfile.TemporaryDirectory() as scratch:
        began = time.perf_counter()
        measured = baseline.measure(sources.fetch(source, Path(scratch, "tree")))
        found = mapping.measure(measured, Path(scratch, "map"), 1800)
        baseline_s = time.perf_counter() - began
        staging = Path(scratch, "staging")
        staging.mkdir()
        work = read_context(
            RepositoryMeasurements(measured, found, {}), staging, SynthesisSettings(jobs=jobs)
        )
        chosen = candidates(work)[:count]
        began = time.perf_counter()
        results = [result for _, result in decide(work, chosen, staging / "none", {})]
        seconds = time.perf_counter() - began
    rejected: dict[str, int] = {}
    for result in results:
        if reason := getattr(result, "reason", None):
            rejected[reason] = rejected.get(reason, 0) + 1
    return {
        "source": source,
        "tests": len(measured.stable),
        "baseline_s": round(baseline_s, 1),
        "checks": len(results),
        "tasks": len(results) - sum(rejected.values()),
        "rejected": rejected,
        "s_per_check": round(seconds / len(results), 2),
        "checks_per_hour": round(len(results) / seconds * 3600),
    }


if __name__ == "__main__":
    main()
