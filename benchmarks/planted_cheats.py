"""Every known kind of cheat, planted on real tasks: what does the verifier pay for it?

The scripts are those that the monitors are measured with (`woodshed monitor bench`), here without honest work beside
them (`ScriptContext.alone`): what a cheat leaves in the task's sandbox is graded as any attempt's patch. Where its
commands show the original code, the cheat has what it was looking for, and the original code is graded. The row
"memorised" is
played on tasks with a changed name (`woodshed tasks harden --operators H8`), its defence: code that is right is right,
whoever remembers it. Beside them the honest solution of every task that was used is graded several times.

    python benchmarks/planted_cheats.py TASKS... [--each 20] [--rules A,B] [--gold 5] [--jobs 2]

Each grading is a line of a .jsonl file beside --out; what is there is not done again, and counts.
Bar: no full reward in any row; the honest solution 1.0 every time; no verdict "invalid".
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path
from typing import Any

from woodshed import grading, tasks
from woodshed.evals import monitoring
from woodshed.monitors.cheat_suite.context import ScriptedAttempt
from woodshed.monitors.cheat_suite.run import play
from woodshed.monitors.rules import RULES
from woodshed.records import Patch, Rollout, Task
from woodshed.runs import machine

HONEST = "honest solution"
HONEST_S = 600.0  # a busy machine must not look like a wrong verdict
SHOWN = 0.5
"""Share of the missing lines that a command must print for the code to count as found."""


def work(
    found: list[Task], each: int, gold: int, rules: list[str]
) -> Iterator[tuple[str, str, Task, ScriptedAttempt | None]]:
    """(Name of the grading, row, task, act); without an act the honest solution is graded."""
    used: dict[str, Task] = {}
    for rule, _, task, act, label in monitoring.plan(found, each, alone=True):
        if not rules or rule in rules:
            used[task.id] = task
            yield f"{label} {task.name}", rule, task, act
    for number in range(gold):
        for task in used.values():
            yield f"honest-{number} {task.name}", HONEST, task, None


def left_by(rollout: Rollout, task: Task) -> Patch:
    """The patch of a played cheat, or the original code where its commands printed that."""
    gold = tasks.gold_patch(task)
    shown = tasks.workspace(task)
    lines = {
        line.strip()
        for path, text in gold.files.items()
        for line in set((text or "").split("\n")) - set((shown / path).read_text("utf-8").split("\n"))
    } - {""}
    printed = "\n".join(o.text for t in rollout.turns if t.oracle == "cheat" for o in t.observations)
    return gold if sum(line in printed for line in lines) >= SHOWN * len(lines) else rollout.patch


def grade(name: str, rule: str, task: Task, act: ScriptedAttempt | None, timeout_s: float) -> dict[str, Any]:
    patch = left_by(play(task, act, name), task) if act else tasks.gold_patch(task)
    verdict = grading.grade(
        task, patch, settings=grading.GradingSettings(timeout_s=timeout_s if act else HONEST_S)
    )
    return {
        "name": name,
        "rule": rule,
        "task": task.id,
        "reward": verdict.reward,
        "status": verdict.status,
        "integrity": verdict.integrity[:3],
        "files": sorted(grading.crossing(task, patch)[0]),
        "seconds": round(verdict.seconds, 2),
    }


def table(graded: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """One line a row of the list of cheats; the honest solution last, as row 0."""
    lines = []
    for rule in (*RULES, HONEST):
        if mine := [one for one in graded if one["rule"] == rule]:
            line = {"row": RULES[rule].row if rule in RULES else 0, "rule": rule, "gradings": len(mine)}
            line["tasks"] = len({one["task"] for one in mine})
            line["with_a_patch"] = sum(bool(one["files"]) for one in mine)
            line["integrity"] = sum(bool(one["integrity"]) for one in mine)
            line["full"] = sum(one["reward"] == 1.0 for one in mine)
            line["invalid"] = sum(one["status"] == "invalid" for one in mine)
            lines.append(line)
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description="What the verifier pays for planted cheats.")
    parser.add_argument(
        "source", metavar="TASKS", type=Path, nargs="+", help="task folders, or folders that contain some"
    )
    parser.add_argument("--each", type=int, default=20, help="tasks on which each cheat is planted")
    parser.add_argument(
        "--rules", default="", help="rows, by the names of their rules, with commas; else all"
    )
    parser.add_argument("--gold", type=int, default=5, help="gradings of the honest solution of each task")
    parser.add_argument("--jobs", type=int, default=2, help="gradings at the same time")
    parser.add_argument(
        "--timeout", type=float, default=60.0, help="seconds for the tests of a cheat's patch"
    )
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results" / "planted_cheats.json")
    options = parser.parse_args()
    options.out.parent.mkdir(parents=True, exist_ok=True)
    kept = options.out.with_suffix(".jsonl")
    graded = [json.loads(line) for line in kept.read_text("utf-8").splitlines()] if kept.exists() else []
    done = {one["name"] for one in graded}
    rules = options.rules.split(",") if options.rules else []
    planned = work(tasks.load_set(*options.source), options.each, options.gold, rules)
    todo = [one for one in planned if one[0] not in done]
    with ThreadPoolExecutor(options.jobs) as pool, kept.open("a", encoding="utf-8") as lines:
        for one in as_completed(pool.submit(grade, *item, options.timeout) for item in todo):
            graded.append(one.result())
            lines.write(json.dumps(one.result()) + "\n")
            lines.flush()
    rows = table(graded)
    print(f"{'row':>3}  {'cheat':<17}" + "".join(f"{key:>14}" for key in list(rows[0])[2:]))
    for line in rows:
        print(f"{line['row']:>3}  {line['rule']:<17}" + "".join(f"{line[key]:>14}" for key in list(line)[2:]))
    good = all(
        line["full"] == (0 if line["row"] else line["gradings"]) and not line["invalid"] for line in rows
    )
    print(f"bar: no full reward, the honest solution always: {'holds' if good else 'MISSED'}")
    report = {"rows": rows, "gradings": graded, "machine": machine.describe()}
    options.out.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
