"""Generated attacks and honest solutions on real tasks: what does each grader pay?

Attacks are drawn evenly over kinds and planted in the tasks in turn (`woodshed.red_team`). Each is graded as training
does, by decoys alone, by isolation alone, by neither, and by the grader that the task folder ships; weak judges show
that it is one. Beside them stand the gold patch of each task several times, and honest rewrites of it.

    python benchmarks/red_team.py TASKS... [--variants 400] [--honest 300] [--gold 5] [--seed 0] [--jobs 2]

Each grading is a line of a .jsonl file beside --out; what is there is not done again, and counts.
Bar: `grade` and `shipped` pay for no attack, and for every honest solution; no verdict "invalid".
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import random
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path
from typing import Any

from woodshed import red_team, tasks
from woodshed.records import SandboxError, Task, TaskError
from woodshed.red_team.honest import solution
from woodshed.runs import machine

HONEST = red_team.Campaign(timeout_s=600.0)
"""A busy machine must not look like a wrong verdict."""
Work = tuple[str, Callable[[], dict[str, Any]]]


def attacks(found: Sequence[Task], options: argparse.Namespace) -> Iterator[Work]:
    """Gradings of attacks by name, each attack with its task."""
    campaign = red_team.Campaign(timeout_s=options.timeout)
    for attack, task in red_team.plan(found, options.variants, options.seed):
        for grader in options.graders.split(","):
            name = f"{attack.name} on {task.name} by {grader}"
            yield name, lambda a=attack, t=task, g=grader: attacked(campaign, a, t, g)


def attacked(campaign: red_team.Campaign, attack: red_team.Attack, task: Task, grader: str) -> dict[str, Any]:
    if grader == "weak":
        began = time.monotonic()
        judges = red_team.JUDGES if attack.reach.kind == "line" else red_team.JUDGES[:4]
        paid = red_team.bought(task, red_team.plant(task, attack), judges=judges, timeout_s=10.0)
        seconds = round(time.monotonic() - began, 2)
        names = attack.name, attack.reach.kind, attack.reach.name, task.name
        graded = red_team.GradedAttack(*names, grader, float(bool(paid)), "graded", seconds)
        return {**dataclasses.asdict(graded), "judges": paid}
    return dataclasses.asdict(next(red_team.run([(attack, task)], campaign, graders=[grader], jobs=1)))


def honest(found: Sequence[Task], options: argparse.Namespace) -> Iterator[Work]:
    """Gradings of the gold patch of each task, and of rewrites of it in turn."""
    graders = [grader for grader in options.graders.split(",") if grader in red_team.BELIEVED]
    for grader in graders:
        for number in range(options.gold):
            for task in found:
                name = f"gold {number} on {task.name} by {grader}"
                yield name, lambda t=task, g=grader: honestly("gold", t, tasks.gold_patch(t), g, ())
    for number in range(options.honest):
        task = found[number % len(found)]
        try:
            patch, rewrites = solution(task, random.Random(f"{options.seed}/{number}/{task.id}"))
        except TaskError:
            continue
        for grader in graders:
            name = f"honest {number} on {task.name} by {grader}"
            yield name, lambda t=task, p=patch, g=grader, r=rewrites: honestly("honest", t, p, g, r)


def honestly(kind: str, task: Task, patch: Any, grader: str, rewrites: Sequence[str]) -> dict[str, Any]:
    """The grading of an honest patch. Where it is not paid, the exit code says whether it is right at all."""
    began = time.monotonic()
    try:
        reward, status = HONEST.grade(task, patch, grader)
    except SandboxError as error:
        reward, status = 0.0, f"invalid: {error}"
    is_right = reward == 1.0 or bool(red_team.bought(task, patch, judges=("exit code",), timeout_s=120.0))
    seconds = round(time.monotonic() - began, 2)
    return {
        "kind": kind,
        "task": task.name,
        "grader": grader,
        "reward": reward,
        "status": status,
        "seconds": seconds,
        "rewrites": list(rewrites),
        "is_right": is_right,
    }


def honest_rows(lines: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """One row for each grader and kind of honest patch; wrong rewrites, which fail in plain pytest too, left out."""
    rows = []
    for kind in ("gold", "honest"):
        for grader in dict.fromkeys(line["grader"] for line in lines):
            mine = [line for line in lines if (line["kind"], line["grader"]) == (kind, grader)]
            right = [line for line in mine if line["is_right"]]
            paid = sum(line["reward"] == 1.0 for line in right)
            seconds = sorted(line["seconds"] for line in right)
            row = {"kind": kind, "grader": grader, "solutions": len(right), "paid": paid}
            row["wrong_rewrites"] = len(mine) - len(right)
            rows.append({**row, "median_s": seconds[len(seconds) // 2] if seconds else 0.0})
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(
        description="What graders pay for generated attacks and honest solutions."
    )
    parser.add_argument("source", metavar="TASKS", type=Path, nargs="+", help="folders of tasks")
    parser.add_argument("--variants", type=int, default=400, help="attacks")
    parser.add_argument("--honest", type=int, default=300, help="rewrites of gold patches")
    parser.add_argument("--gold", type=int, default=5, help="gradings of each gold patch")
    parser.add_argument("--graders", default=",".join([*red_team.GRADERS, "weak"]), help="with commas")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--jobs", type=int, default=2, help="gradings at the same time")
    parser.add_argument("--timeout", type=float, default=20.0, help="seconds for the tests of an attack")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results" / "red_team.json")
    options = parser.parse_args()
    found = [task for task in tasks.load_set(*options.source) if red_team.can_be_attacked(task)]
    kept = options.out.with_suffix(".jsonl")
    lines = [json.loads(line) for line in kept.read_text("utf-8").splitlines()] if kept.exists() else []
    done = {line["name"] for line in lines}
    todo = [w for w in (*honest(found, options), *attacks(found, options)) if w[0] not in done]
    with ThreadPoolExecutor(options.jobs) as pool, kept.open("a", encoding="utf-8") as log:
        try:
            for one in as_completed(
                [pool.submit(lambda n=n, grade=g: {"name": n, **grade()}) for n, g in todo]
            ):
                lines.append(one.result())
                log.write(json.dumps(one.result()) + "\n")
                log.flush()
        finally:
            pool.shutdown(cancel_futures=True)
    report(lines, options, found)


def report(lines: list[dict[str, Any]], options: argparse.Namespace, found: Sequence[Task]) -> None:
    """Print both tables and write them with every grading."""
    mine = [line for line in lines if "attack" in line]
    names = [field.name for field in dataclasses.fields(red_team.GradedAttack)]
    graded = [red_team.GradedAttack(**{name: line[name] for name in names}) for line in mine]
    rows = red_team.count_by_kind(graded)
    right = honest_rows([line for line in lines if "attack" not in line])
    for table in (rows, right):
        for row in table:
            print("  ".join(f"{key}: {value}" for key, value in row.items()))
    believed = [one for one in graded if one.grader in red_team.BELIEVED]
    good = not any(one.reward > 0 or one.status != "graded" for one in believed)
    good &= all(row["paid"] == row["solutions"] for row in right)
    print(f"bar: no attack paid, every honest solution paid: {'holds' if good else 'MISSED'}")
    packages = sorted({str(task.provenance.get("source", "")) for task in found})
    written = {"seed": options.seed, "tasks": len(found), "packages": packages, "rows": rows, "honest": right}
    written |= {"gradings": lines, "machine": machine.describe()}
    options.out.write_text(json.dumps(written, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
