"""What a scripted thief earns: every trick it knows, on tasks drawn at random. Must be 0 on all of them.

    python benchmarks/thief.py TASKS... [--count 50] [--seed 0] [--jobs 2]

Prints a line per task and writes JSON. A task that was stolen names the trick; ends with 1 then.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from pathlib import Path

from woodshed.runs import machine
from woodshed.synthesis.leaks import ExploitResult, run_exploit
from woodshed.tasks import load, task_folders


def main() -> None:
    parser = argparse.ArgumentParser(description="What a scripted thief earns.")
    parser.add_argument("tasks", nargs="+", type=Path)
    parser.add_argument("--count", type=int, default=50)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results" / "thief.json")
    options = parser.parse_args()
    known = {path.name: path for given in options.tasks for path in task_folders(given)}
    names = random.Random(options.seed).sample(sorted(known), min(options.count, len(known)))

    def one(name: str) -> tuple[ExploitResult, float]:
        began = time.monotonic()
        return run_exploit(load(known[name])), time.monotonic() - began

    thefts: list[ExploitResult] = []
    seconds = 0.0
    with ThreadPoolExecutor(options.jobs) as pool:
        for theft, took in pool.map(one, names):
            thefts.append(theft)
            seconds += took
            loot = sum(theft.tricks.values())
            print(
                f"{theft.reward:4.1f}  {theft.task:50} {loot:3} loot {theft.tried} tries {took:6.1f} s {theft.trick}",
                flush=True,
            )
    stolen = [theft for theft in thefts if theft.reward > 0]
    tricks = max((len(theft.tricks) for theft in thefts), default=0)
    print(
        f"{len(stolen)} of {len(thefts)} tasks stolen, {tricks} tricks, {seconds / len(thefts):.1f} s a task"
    )
    report = {"thefts": [asdict(t) for t in thefts], "seconds": seconds, "machine": machine.describe()}
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.write_text(json.dumps(report, indent=1) + "\n")
    sys.exit(bool(stolen))


if __name__ == "__main__":
    main()
