"""Time from a command to the first task of a repository with a long suite, and what is on screen meanwhile.

    python benchmarks/first_task.py [SOURCE] [--limit 2] [--kill-after SECONDS] [--folder FOLDER]

Bar: a suite of 800 tests or more gives its first task within 15 minutes on two cores, with an estimate in every line,
and no silence longer than 10 s. Where the load is above the number of cores, others were at work: read the CPU seconds
then. With --kill-after the process is killed once, by a signal that it cannot catch, and started again.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import re
import resource
import signal
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

from woodshed.runs import machine

BAR_S = 900.0
ESTIMATE = re.compile(r"to the first tasks|for the whole build")


def main() -> None:
    parser = argparse.ArgumentParser(description="Time to the first task of a repository with a long suite.")
    parser.add_argument("source", nargs="?", default="pypi:tomlkit==0.15.2")
    parser.add_argument("--limit", type=int, default=2, help="tasks to make")
    parser.add_argument("--kill-after", type=float, default=0.0, help="seconds; 0: never")
    parser.add_argument(
        "--folder", type=Path, help="where the tasks are made; by default one that is deleted"
    )
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results" / "first_task.json")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        folder = options.folder or Path(scratch, "tasks")
        row = measure(options.source, folder, options.limit, options.kill_after)
    report = {"row": row, "bar_s": BAR_S, "machine": machine.describe()}
    options.out.write_text(json.dumps(report, indent=2) + "\n")
    print(json.dumps({key: value for key, value in row.items() if key != "screen"}, indent=2))


def measure(source: str, folder: Path, limit: int, kill_after: float) -> dict[str, Any]:
    """One build, started again after it was killed if that is asked for."""
    command = [sys.executable, "-u", "-m", "woodshed", "tasks", "make", source, "--out", str(folder)]
    command += ["--limit", str(limit)]
    began, screen, loads = time.monotonic(), list[tuple[float, str]](), [os.getloadavg()[0]]
    first_s = 0.0
    for is_killed in (True, False) if kill_after else (False,):
        build = subprocess.Popen(command, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True)
        reader = threading.Thread(target=_read, args=(build, screen, began))
        reader.start()
        while build.poll() is None:
            time.sleep(0.2)
            if not first_s and any(folder.glob("*/task.toml")):
                first_s = time.monotonic() - began
            if is_killed and time.monotonic() > began + kill_after:
                build.send_signal(signal.SIGKILL)
        reader.join()
    loads.append(os.getloadavg()[0])
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    times = [0.0, *(at for at, _ in screen)]
    working = [line for _, line in screen if not line.startswith("next: ")]
    return {
        "source": source,
        "first_task_s": round(first_s, 1),
        "whole_s": round(time.monotonic() - began, 1),
        "cpu_s": round(used.ru_utime + used.ru_stime, 1),
        "tasks": len(list(folder.glob("*/task.toml"))),
        "killed_after_s": kill_after,
        "longest_silence_s": round(max(b - a for a, b in itertools.pairwise(times)), 1),
        "lines": len(working),
        "lines_with_estimate": sum(bool(ESTIMATE.search(line)) for line in working),
        "load": [round(load, 1) for load in loads],
        "cores": machine.cores(),
        "screen": [f"{at:.0f} s  {line}" for at, line in screen],
    }


def _read(build: subprocess.Popen[str], screen: list[tuple[float, str]], began: float) -> None:
    assert build.stderr is not None
    for line in build.stderr:
        screen.append((time.monotonic() - began, line.rstrip()))
        print(line, end="", file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()
