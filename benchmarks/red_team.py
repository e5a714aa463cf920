"""Generated attacks and honest solutions on real tasks: what does each grader pay?

Attacks are drawn evenly over kinds and planted in the tasks in turn (`woodshed.red_team`). Each is graded as training
does, by decoys alone, by isolation alone, by neither, and by the grader that the task folder ships; weak judges show
that it is one. Beside them stand the gold patch of each task several times, and honest rewrites of it.

    python benchmarks/red_team.py TASKS... [--jobs 16] [--seconds 540] [--variants N] [--honest 300] [--gold 5]

Each grading is a line of a .jsonl file beside --out; what is there is not done again, and counts. So the command can be
stopped at any time, by itself after --seconds, and goes on when it is given again. What matters most comes first:
`grade` on everything, then every grader on some attacks of each kind, then `shipped` on everything, then the rest.
Bar: `grade` and `shipped` pay for no attack, and for every honest solution; no verdict "invalid".
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import multiprocessing
import random
import statistics
import tempfile
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from woodshed import grading, red_team, tasks
from woodshed.records import Patch, SandboxError, Task, TaskError
from woodshed.red_team.honest import solution
from woodshed.red_team.shipped import renewed
from woodshed.runs import machine
from woodshed.sandbox import BUBBLEWRAP

EVERY_GRADER = 260
"""Attacks that every grader sees before `shipped` sees them all: about twenty of each kind."""
FRUITLESS = 200
"""Tries in a row that made no new honest solution, after which the tasks have no more."""
HONEST = red_team.Campaign(timeout_s=600.0)
"""A busy machine must not look like a wrong verdict."""


@dataclass(frozen=True)
class Work:
    """One grading that is to be done."""

    name: str
    kind: str
    """attack, gold or honest."""
    grader: str
    task: str
    attack: red_team.Attack | None = None
    patch: Patch | None = None
    rewrites: tuple[str, ...] = ()


def planned(found: Sequence[Task], options: argparse.Namespace) -> Iterator[Work]:
    """All gradings, in their order."""
    graders = options.graders.split(",")
    attacks = red_team.plan(found, options.variants, options.seed)
    solutions = list(gold(found, options.gold)) + list(honest(found, options.honest, options.seed))

    def of_attacks(chosen: Sequence[str], those: Sequence[tuple[red_team.Attack, Task]]) -> Iterator[Work]:
        for attack, task in those:
            for grader in [grader for grader in chosen if grader in graders]:
                yield Work(f"{attack.name} on {task.name} by {grader}", "attack", grader, task.name, attack)

    def of_solutions(grader: str) -> Iterator[Work]:
        if grader in graders:
            yield from (
                dataclasses.replace(w, name=f"{w.name} by {grader}", grader=grader) for w in solutions
            )

    rest = [grader for grader in graders if grader not in red_team.BELIEVED]
    yield from of_attacks(["grade"], attacks)
    yield from of_solutions("grade")
    yield from of_attacks(rest, attacks[:EVERY_GRADER])
    yield from of_solutions("shipped")
    yield from of_attacks(["shipped"], attacks)
    yield from of_attacks(rest, attacks[EVERY_GRADER:])


def gold(found: Sequence[Task], times: int) -> Iterator[Work]:
    for number in range(times):
        for task in found:
            yield Work(f"gold {number} on {task.name}", "gold", "", task.name, patch=tasks.gold_patch(task))


def honest(found: Sequence[Task], number: int, seed: int) -> Iterator[Work]:
    """Rewrites of gold patches, of the tasks in turn, no two of them alike; fewer where the tasks allow no more."""
    seen: set[str] = set()
    since, tried = 0, 0
    while len(seen) < number and since < FRUITLESS:
        task = found[tried % len(found)]
        tried, since = tried + 1, since + 1
        with contextlib.suppress(TaskError):
            patch, rewrites = solution(task, random.Random(f"{seed}/{tried}/{task.id}"), most=1 + tried % 6)
            if (text := json.dumps([task.id, patch.files])) not in seen:
                seen.add(text)
                since = 0
                yield Work(f"honest {tried} on {task.name}", "honest", "", task.name, None, patch, rewrites)


_tasks: dict[str, Task] = {}
_options = argparse.Namespace()


def prepare(home: str, options: argparse.Namespace) -> None:
    """Load the tasks in a process that grades."""
    global _options
    _options = options
    _tasks.update({task.name: task for task in tasks.load_set(Path(home))})


def isolated(name: str) -> None:
    grading.keep_isolated_tests(_tasks[name], BUBBLEWRAP)


def graded(work: Work) -> dict[str, Any]:
    """The line of one grading."""
    task = _tasks[work.task]
    if work.attack is None:
        return {"name": work.name, **honestly(work, task)}
    if work.grader == "weak":
        return {"name": work.name, **weakly(task, work.attack)}
    campaign = red_team.Campaign(timeout_s=_options.timeout)
    found = next(red_team.run([(work.attack, task)], campaign, graders=[work.grader], jobs=1))
    return {"name": work.name, **dataclasses.asdict(found)}


def weakly(task: Task, attack: red_team.Attack) -> dict[str, Any]:
    """The grading of an attack by weak judges, and the names of those that paid."""
    began = time.monotonic()
    judges = red_team.JUDGES if attack.reach.kind == "line" else red_team.JUDGES[:4]
    paid = red_team.bought(task, red_team.plant(task, attack), judges=judges, timeout_s=10.0)
    seconds = round(time.monotonic() - began, 2)
    names = attack.name, attack.reach.kind, attack.reach.name, task.name
    found = red_team.GradedAttack(*names, "weak", float(bool(paid)), "graded", seconds)
    return {**dataclasses.asdict(found), "judges": paid}


def honestly(work: Work, task: Task) -> dict[str, Any]:
    """The grading of an honest patch. Where it is not paid, the exit code says whether it is right at all."""
    assert work.patch is not None
    began = time.monotonic()
    try:
        reward, status = HONEST.grade(task, work.patch, work.grader)
    except SandboxError as error:
        reward, status = 0.0, f"invalid: {error}"
    seconds = round(time.monotonic() - began, 2)
    is_right = reward == 1.0 or bool(
        red_team.bought(task, work.patch, judges=("exit code",), timeout_s=120.0)
    )
    told = {"kind": work.kind, "task": task.name, "grader": work.grader, "reward": reward, "status": status}
    return {**told, "seconds": seconds, "rewrites": list(work.rewrites), "is_right": is_right}


def run(
    todo: Sequence[Work], home: Path, names: Sequence[str], log: Any, options: argparse.Namespace
) -> list[Any]:
    """Lines of the gradings that were done before the time was up; each is written at once."""
    lines: list[dict[str, Any]] = []
    until = time.monotonic() + options.seconds
    processes = multiprocessing.get_context("spawn")
    pool = ProcessPoolExecutor(options.jobs, processes, prepare, (str(home), options))
    try:
        list(pool.map(isolated, names))
        with contextlib.suppress(TimeoutError):
            left = max(0.0, until - time.monotonic())
            for one in as_completed([pool.submit(graded, work) for work in todo], timeout=left):
                lines.append(one.result())
                log.write(json.dumps(one.result()) + "\n")
                log.flush()
                if len(lines) % 100 == 0:
                    print(f"{len(lines)} of {len(todo)}", flush=True)
    finally:
        pool.shutdown(cancel_futures=True)
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(
        description="What graders pay for generated attacks and honest solutions."
    )
    parser.add_argument("source", metavar="TASKS", type=Path, nargs="+", help="folders of tasks")
    parser.add_argument(
        "--variants", type=int, default=len(red_team.attacks()), help="attacks; all by default"
    )
    parser.add_argument("--honest", type=int, default=300, help="rewrites of gold patches")
    parser.add_argument("--gold", type=int, default=5, help="gradings of each gold patch")
    parser.add_argument("--graders", default=",".join([*red_team.GRADERS, "weak"]), help="with commas")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--jobs", type=int, default=2, help="processes that grade")
    parser.add_argument("--seconds", type=float, default=1e6, help="begin no grading after these")
    parser.add_argument("--timeout", type=float, default=20.0, help="seconds for the tests of an attack")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results" / "red_team.json")
    options = parser.parse_args()
    kept = options.out.with_suffix(".jsonl")
    lines = [json.loads(line) for line in kept.read_text("utf-8").splitlines()] if kept.exists() else []
    done = {line["name"] for line in lines}
    with tempfile.TemporaryDirectory(prefix="woodshed-") as home:
        loaded = [task for task in tasks.load_set(*options.source) if red_team.can_be_attacked(task)]
        found = [renewed(task, Path(home, task.name)) for task in loaded]
        todo = [work for work in planned(found, options) if work.name not in done]
        print(f"{len(todo)} gradings on {len(found)} tasks, {len(done)} done before", flush=True)
        with kept.open("a", encoding="utf-8") as log:
            lines += run(todo, Path(home), [task.name for task in found], log, options)
    report(lines, options, found)


def honest_rows(lines: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """One row for each grader and kind of honest patch; wrong rewrites, which fail in plain pytest too, left out."""
    rows = []
    for kind in ("gold", "honest"):
        for grader in dict.fromkeys(line["grader"] for line in lines):
            mine = [line for line in lines if (line["kind"], line["grader"]) == (kind, grader)]
            right = [line for line in mine if line["is_right"]]
            paid = sum(line["reward"] == 1.0 for line in right)
            row = {"kind": kind, "grader": grader, "solutions": len(right), "paid": paid}
            rows.append({**row, "wrong_rewrites": len(mine) - len(right), "median_s": median_s(right)})
    return rows


def median_s(lines: Sequence[dict[str, Any]]) -> float:
    return round(statistics.median([line["seconds"] for line in lines] or [0.0]), 2)


def report(lines: list[dict[str, Any]], options: argparse.Namespace, found: Sequence[Task]) -> None:
    """Print both tables and write them, with the gradings that miss the bar."""
    mine = [line for line in lines if "attack" in line]
    names = [field.name for field in dataclasses.fields(red_team.GradedAttack)]
    attacks = [red_team.GradedAttack(**{name: line[name] for name in names}) for line in mine]
    rows = red_team.count_by_kind(attacks)
    right = honest_rows([line for line in lines if "attack" not in line])
    seconds = {
        g: median_s([line for line in mine if line["grader"] == g]) for g in options.graders.split(",")
    }
    for table in (rows, right, [seconds]):
        for row in table:
            print("  ".join(f"{key}: {value}" for key, value in row.items()))
    believed = [one for one in attacks if one.grader in red_team.BELIEVED]
    wrong = [one for one in believed if one.reward > 0 or one.status != "graded"]
    for one in wrong:
        print(f"{one.status}, reward {one.reward} by {one.grader}: {one.attack} on {one.task}")
    good = not wrong and all(row["paid"] == row["solutions"] for row in right)
    print(f"bar: no attack paid, every honest solution paid: {'holds' if good else 'MISSED'}")
    packages = sorted({str(task.provenance.get("source", "")) for task in found})
    written = {"seed": options.seed, "tasks": len(found), "packages": packages, "rows": rows, "honest": right}
    exceptions = [dataclasses.asdict(one) for one in wrong]
    exceptions += [
        line for line in lines if "attack" not in line and line["is_right"] and line["reward"] < 1.0
    ]
    written |= {"attack_median_s": seconds, "exceptions": exceptions, "jobs": options.jobs}
    options.out.write_text(json.dumps({**written, "machine": machine.describe()}, indent=1) + "\n", "utf-8")


if __name__ == "__main__":
    main()
