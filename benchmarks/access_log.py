"""What the access log costs on the test suite that an agent sees, watched and not; and on the task's own test command.

Both kinds of sandbox are opened once per task; runs alternate, so that a change of the machine's load meets both.

    python benchmarks/access_log.py TASKS [--repeats 7] [--limit 5]

The task's command runs one file of tests for some tenths of a second, most of which is the start of Python.

Bar: at most 10% more time on the suite (median over tasks of the ratio of medians).
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import statistics
import time
from pathlib import Path

from woodshed import tasks
from woodshed.records import Task
from woodshed.runs import machine
from woodshed.sandbox import Sandbox, open_sandbox

BAR = 0.10


def seconds(sandbox: Sandbox, command: str) -> float:
    started = time.perf_counter()
    result = sandbox.exec(command, timeout_s=600)
    if result.outcome not in ("ok", "nonzero"):
        raise SystemExit(f"{command!r} ended with {result.outcome}")
    return time.perf_counter() - started


def measure(task: Task, command: str, repeats: int) -> dict[str, str | float | int]:
    spec = tasks.sandbox_spec(task)
    watched = dataclasses.replace(spec, watch=task.environment.packages)
    plain_s, watched_s, kept, opened = [], [], 0, 0
    with open_sandbox(spec) as plain, open_sandbox(watched) as seen:
        for place in range(repeats + 1):
            times = (seconds(plain, command), seconds(seen, command))
            touched = seen.touched()
            if place:  # the first of each fills the page cache
                plain_s.append(times[0])
                watched_s.append(times[1])
                kept, opened = len(touched), sum(touch.count for touch in touched)
    plain_p50, watched_p50 = statistics.median(plain_s), statistics.median(watched_s)
    return {
        "task": task.name,
        "plain_s": round(plain_p50, 3),
        "watched_s": round(watched_p50, 3),
        "more": round(watched_p50 / plain_p50 - 1, 4),
        "entries": kept,
        "opens_kept": opened,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description="What the access log costs on a test run.")
    parser.add_argument("tasks", type=Path, help="a folder of tasks, or one task")
    parser.add_argument("--repeats", type=int, default=7, help="runs per task and kind")
    parser.add_argument("--limit", type=int, default=5, help="tasks measured, one per package first")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results" / "access_log.json")
    options = parser.parse_args()
    by_package: dict[tuple[str, ...], list[Task]] = {}
    for task in tasks.load_set(options.tasks):
        by_package.setdefault(task.environment.packages, []).append(task)
    chosen = [task for nth in zip(*by_package.values(), strict=False) for task in nth][: options.limit]
    print(f"{'task':<40}{'plain s':>9}{'watched s':>11}{'more':>8}{'entries':>9}{'command':>9}")
    rows = []
    for task in chosen:
        row = measure(task, task.test_command.rpartition(" ")[0], options.repeats)
        row["more_of_command"] = measure(task, task.test_command, options.repeats)["more"]
        rows.append(row)
        print(
            f"{row['task']:<40}{row['plain_s']:>9}{row['watched_s']:>11}{row['more']:>8.1%}{row['entries']:>9}"
            f"{row['more_of_command']:>9.1%}",
            flush=True,
        )
    more = statistics.median(float(row["more"]) for row in rows)
    print(f"bar: at most {BAR:.0%} more: {more:.1%}, {'holds' if more <= BAR else 'MISSED'}")
    options.out.parent.mkdir(parents=True, exist_ok=True)
    report = {"bar": BAR, "more_p50": more, "rows": rows, "machine": machine.describe()}
    options.out.write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
