"""What it costs to search tasks of one environment for leaks: CPU seconds for the machine, and for the tasks.

    python benchmarks/leak_scan.py [pypi:toolz==1.2.0] [--count 50]

Bar: 50 tasks in less than 3 CPU minutes, with the machine and the dependencies. The tasks are drafts: deletions that
were not proven, with the tests hidden that run the code; a search costs the same for them.
"""

from __future__ import annotations

import argparse
import json
import resource
import tempfile
import time
from pathlib import Path

from task_factory import EXTRA

from woodshed.records import Task
from woodshed.runs import machine
from woodshed.synthesis import leaks, operators, pruning
from woodshed.synthesis.candidates import candidates
from woodshed.synthesis.leaks.scan import SHARED
from woodshed.synthesis.measuring import measured_once
from woodshed.synthesis.progress import Phases
from woodshed.synthesis.proof import _task, _write
from woodshed.synthesis.repository_context import (
    Candidate,
    RepositoryContext,
    SynthesisSettings,
    read_context,
)
from woodshed.synthesis.sources import fetch
from woodshed.tasks import prepare


def main() -> None:
    parser = argparse.ArgumentParser(description="What a search for leaks costs.")
    parser.add_argument("source", nargs="?", default="pypi:toolz==1.2.0")
    parser.add_argument("--count", type=int, default=50)
    parser.add_argument("--build", type=Path, help="folder of a build whose baseline is taken")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results" / "leak_scan.json")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        tasks = drafts(options, Path(scratch))
        prepare(tasks[0].environment)
        rows = []
        for shared, what in (((), "the tasks alone"), (SHARED, "with machine and dependencies")):
            began, cpu = time.monotonic(), cpu_s()
            reports = leaks.scan(tasks, shared=shared)
            row = {"what": what, "tasks": len(tasks), "cpu_s": round(cpu_s() - cpu, 1)}
            row |= {
                "wall_s": round(time.monotonic() - began, 1),
                "leaks": sum(bool(r.leaks) for r in reports),
            }
            print("  ".join(f"{key} {value}" for key, value in row.items()), flush=True)
            rows.append(row)
            for leak in (leak for report in reports for leak in report.leaks):
                print(f"      {leak.kind}: {leak.what} in {leak.where}: {leak.quote[:100]}")
    print(f"bar: 50 tasks in 180 CPU s{'' if rows[-1]['cpu_s'] < 180 else '  MISSED'}")
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.write_text(json.dumps({"rows": rows, "machine": machine.describe()}, indent=1) + "\n")


def cpu_s() -> float:
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(u.ru_utime + u.ru_stime for u in used)


def drafts(options: argparse.Namespace, scratch: Path) -> list[Task]:
    """Tasks of one repository that were not proven."""
    repository = fetch(options.source, scratch / "tree")
    settings = SynthesisSettings(extra_requirements=EXTRA.get(options.source, ()))
    measured = measured_once(
        repository, options.build or scratch / "build", settings, Phases(lambda done, total, text: None)
    )
    staging = scratch / "staging"
    staging.mkdir()
    work = read_context(measured, staging, settings)
    made: list[Task] = []
    for candidate in candidates(work):
        if len(made) < options.count and (task := draft(work, candidate)) is not None:
            made.append(task)
    return made


def draft(work: RepositoryContext, candidate: Candidate) -> Task | None:
    try:
        deletion = operators.OPERATORS[candidate.operator](work.code, candidate.symbol, 4)
    except operators.CascadeError:
        return None
    failing = tuple(work.map.names(candidate.tests)) or work.baseline.stable[:1]
    shown = pruning.prune(deletion, work.tests, set(failing))
    visible = {path: text for path, text in shown.items() if text != work.tests[path]}
    passing = tuple(test for test in work.baseline.stable if test not in set(failing))
    task = _task(
        work, candidate, deletion, f"Bring {candidate.symbol.name} back.\n", "", failing, passing, {}
    )
    return _write(work, task, deletion, visible)


if __name__ == "__main__":
    main()
