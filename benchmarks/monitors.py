"""How many finished attempts the rules watch in a second, on one core, without a model.

Planted cheats and honest look-alikes are played on real tasks, then watched `--repeats` times in the order in which a
run would see them. "Cold" is the first pass, in which every task's files are read and outlined once; a run watches
several attempts at each task and lies between both figures. Time is process time, so other work on the machine counts
little.

    python benchmarks/monitors.py TASKS... [--each 5] [--repeats 3]

Bar: at least 200 rollouts a second.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path

from woodshed import tasks
from woodshed.evals import monitoring
from woodshed.monitors.cheat_suite.run import play
from woodshed.monitors.rules import watch
from woodshed.records import Rollout, Task
from woodshed.runs import machine

BAR_PER_S = 200


def measure(played: list[tuple[Task, Rollout]]) -> float:
    """Rollouts a second of one pass."""
    began = time.process_time()
    for task, rollout in played:
        watch(rollout, task)
    return len(played) / (time.process_time() - began)


def main() -> None:
    parser = argparse.ArgumentParser(description="How many attempts the rules watch in a second.")
    parser.add_argument("tasks", type=Path, nargs="+", help="task folders, or folders that contain some")
    parser.add_argument("--each", type=int, default=5, help="tasks on which each script is played")
    parser.add_argument("--repeats", type=int, default=3, help="passes after the first")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results" / "monitors.json")
    options = parser.parse_args()
    planned = monitoring.plan(tasks.load_set(*options.tasks), options.each)
    played = [(task, play(task, act, label)) for _, _, task, act, label in planned]
    passes = [measure(played) for _ in range(1 + options.repeats)]
    cold, warm = passes[0], max(passes[1:])
    print(f"{len(played)} rollouts: cold {cold:.0f}/s, warm {warm:.0f}/s")
    print(
        f"bar: >= {BAR_PER_S}/s: {'holds' if cold >= BAR_PER_S else 'holds warm' if warm >= BAR_PER_S else 'MISSED'}"
    )
    options.out.parent.mkdir(parents=True, exist_ok=True)
    figures = {"bar_per_s": BAR_PER_S, "cold_per_s": cold, "warm_per_s": warm, "passes": passes}
    report = {**figures, "num_rollouts": len(played), "machine": machine.describe()}
    options.out.write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
