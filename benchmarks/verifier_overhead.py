"""What a verification costs beyond the tests themselves: a sandbox, the start of Python and pytest, the checks.

For each task the gold patch is verified; the same tests then run in plain pytest in an open sandbox, whose own session
time ("6 passed in 0.08s") is taken as the tests' time.

    python benchmarks/verifier_overhead.py TASKS [--repeats 5] [--limit 10]

Bar: at most 0.6 s (median).
"""

from __future__ import annotations

import argparse
import json
import re
import statistics
import time
from pathlib import Path

from woodshed import grading, tasks
from woodshed.records import Task
from woodshed.runs import machine
from woodshed.sandbox import open_sandbox
from woodshed.tasks import gold_folder, hidden_tests

BAR_S = 0.6
SESSION = re.compile(rb" in ([0-9.]+)s")


def tests_alone(task: Task) -> float:
    """Seconds that pytest itself reports for the expected tests, on the solved workspace."""
    layers = (gold_folder(task), hidden_tests(task))
    files = sorted({test.partition("::")[0] for test in (*task.fail_to_pass, *task.pass_to_pass)})
    options = ["-q", "-p", "no:cacheprovider", "-o", "addopts=", "--tb=no"]
    with open_sandbox(tasks.sandbox_spec(task, extra_lowers=layers)) as sandbox:
        result = sandbox.exec(["python", "-m", "pytest", *options, *files], timeout_s=task.verify_timeout_s)
    found = SESSION.findall(result.stdout)
    if not found:
        raise SystemExit(f"{task.name}: {result.stdout[-500:].decode(errors='replace')}")
    return float(found[-1])


def measure(task: Task, repeats: int) -> dict[str, str | float]:
    wall_s, alone_s = [], []
    for _ in range(repeats):
        started = time.perf_counter()
        verdict = grading.grade(task, tasks.gold_patch(task))
        wall_s.append(time.perf_counter() - started)
        if not verdict.solved:
            raise SystemExit(f"{task.name}: the gold patch does not solve it: {verdict.integrity}")
        alone_s.append(tests_alone(task))
    wall, alone = statistics.median(wall_s), statistics.median(alone_s)
    return {
        "task": task.name,
        "wall_s": round(wall, 3),
        "tests_s": round(alone, 3),
        "overhead_s": round(wall - alone, 3),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description="What a verification costs beyond the tests.")
    parser.add_argument("tasks", type=Path, help="a folder of tasks, or one task")
    parser.add_argument("--repeats", type=int, default=5, help="verifications per task")
    parser.add_argument("--limit", type=int, default=10, help="tasks measured")
    parser.add_argument(
        "--out", type=Path, default=Path(__file__).parent / "results" / "verifier_overhead.json"
    )
    options = parser.parse_args()
    print(f"{'task':<40}{'wall s':>8}{'tests s':>9}{'overhead s':>12}")
    rows = []
    for task in tasks.load_set(options.tasks)[: options.limit]:
        row = measure(task, options.repeats)
        rows.append(row)
        print(f"{row['task']:<40}{row['wall_s']:>8}{row['tests_s']:>9}{row['overhead_s']:>12}", flush=True)
    p50 = statistics.median(float(row["overhead_s"]) for row in rows)
    print(f"bar: p50 <= {BAR_S} s: {p50:.3f} s, {'holds' if p50 <= BAR_S else 'MISSED'}")
    options.out.parent.mkdir(parents=True, exist_ok=True)
    report = {"bar_s": BAR_S, "p50_s": p50, "rows": rows, "machine": machine.describe()}
    options.out.write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
