"""Share of hidden tests that are judged with the code in another process, and seconds of grading, by package.

    python benchmarks/isolation.py TASKS... --before TREE --out benchmarks/results/isolation.json

Each task is graded with its original code and with two patches that fail, by this tree and by an earlier one, in turn.
Most attempts fail, so the seconds of failing patches weigh most; a step grades many at once, so those of the processor
count beside those on the clock. Run it on a machine that does nothing else.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from collections import defaultdict
from pathlib import Path
from typing import Any

from woodshed.runs import machine

TREE = Path(__file__).parents[1]
WORKER = """
import json, resource, sys, time
from pathlib import Path
from woodshed import grading
from woodshed.records import Patch
from woodshed.tasks import folder

def busy():
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(each.ru_utime + each.ru_stime for each in used)

for line in sys.stdin:
    task = folder.load(Path(line.strip()))
    gold = folder.gold_patch(task)
    names = [path for path, text in gold.files.items() if text]
    broken = {path: (text or "") + "\\n\\nraise RuntimeError\\n" for path, text in gold.files.items()}
    row = {}
    for kind, patch in (("gold", gold), ("empty", Patch(files={})), ("broken", Patch(files=broken))):
        began, before = time.perf_counter(), busy()
        verdict = grading.grade(task, patch)
        row[kind] = [verdict.reward, time.perf_counter() - began, busy() - before]
        row.setdefault("detail", verdict.detail.partition("\\n")[0])
    print(json.dumps(row), flush=True)
"""


def worker(tree: Path) -> subprocess.Popen[str]:
    """A process that grades by the code of a tree."""
    environment = {**os.environ, "PYTHONPATH": str(tree)}
    return subprocess.Popen(
        [sys.executable, "-c", WORKER],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        cwd=tree,
        env=environment,
    )


def ask(process: subprocess.Popen[str], task: Path) -> dict[str, Any]:
    assert process.stdin and process.stdout
    process.stdin.write(f"{task.resolve()}\n")
    process.stdin.flush()
    return json.loads(process.stdout.readline())


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("tasks", type=Path, nargs="+")
    parser.add_argument("--before", type=Path, required=True)
    parser.add_argument("--timed", type=int, default=2, help="Tasks of each package whose grading is timed.")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    from woodshed.grading.pytest_verifier import isolated_tests
    from woodshed.sandbox import BUBBLEWRAP
    from woodshed.tasks import folder

    processes = {"before": worker(options.before), "now": worker(TREE)}
    rows: list[dict[str, Any]] = []
    for task in folder.load_set(*options.tasks):
        source = str(task.provenance.get("source", "?")).removeprefix("pypi:")
        row: dict[str, Any] = {"task": task.name, "source": source, "hidden": len(task.fail_to_pass)}
        isolated = isolated_tests(task, BUBBLEWRAP)  # kept, so that it is not measured below
        row["isolated"] = len(set(isolated) & set(task.fail_to_pass))
        if sum(other["source"] == source for other in rows) < options.timed:
            for name, process in processes.items():
                ask(process, task.folder)  # whatever is compiled or found once
                row[name] = ask(process, task.folder)
        rows.append(row)
        print(json.dumps(row), flush=True)
    report = {"machine": machine.describe(), "date": time.strftime("%Y-%m-%d"), "rows": rows, **summary(rows)}
    print(json.dumps(summary(rows), indent=1))
    if options.out:
        options.out.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")


def summary(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Shares by package, and medians of seconds by patch and tree."""
    by_source: dict[str, list[int]] = defaultdict(lambda: [0, 0, 0])
    for row in rows:
        counts = by_source[row["source"]]
        for place, more in enumerate((1, row["isolated"], row["hidden"])):
            counts[place] += more
    timed = [row for row in rows if "now" in row]

    def medians(place: int) -> dict[str, float]:
        return {
            f"{kind} {tree}": round(statistics.median(row[tree][kind][place] for row in timed), 3)
            for kind in ("gold", "empty", "broken")
            for tree in ("before", "now")
        }

    return {
        "packages": {
            name: dict(zip(("tasks", "isolated", "hidden"), counts, strict=True))
            for name, counts in by_source.items()
        },
        "share": sum(row["isolated"] for row in rows) / sum(row["hidden"] for row in rows),
        "median_seconds": medians(1),
        "median_cpu_seconds": medians(2),
        "timed": len(timed),
        "gold_paid": sum(row["now"]["gold"][0] == 1 for row in timed),
    }


if __name__ == "__main__":
    main()
