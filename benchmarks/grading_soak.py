"""A thousand gradings in one process: what do they leave behind?

Honest, empty and hostile patches in turn. Every tenth of the way processes, mounts, namespaces, stores, temporary
folders, control groups, open descriptors, threads and resident memory are counted.

    python benchmarks/grading_soak.py TASKS [--gradings 1000] [--jobs 2]

Bar: nothing more at the end than after the first tenth; resident memory within 10% of it.
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
import threading
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from woodshed import grading, tasks
from woodshed.records import Patch, Task
from woodshed.runs import machine
from woodshed.sandbox import store
from woodshed.tasks import original

HOSTILE = (
    "import os; os._exit(0)",
    "import os\nwhile True:\n    try: os.fork()\n    except OSError: pass",
    "while True: print('passed ' * 9999)",
    "import os\nos.closerange(0, 4096)",
    "raise SystemExit(0)",
    "import os, time\nif os.fork() == 0:\n    os.setsid(); time.sleep(600)",
)
RSS_SLACK = 1.10


def patch_of(task: Task, number: int) -> Patch:
    kind = number % 3
    if kind == 0:
        return tasks.gold_patch(task)
    if kind == 1:
        return Patch({})
    shown = original(task, task.target_path).read_text("utf-8")
    return Patch({task.target_path: f"{HOSTILE[number // 3 % len(HOSTILE)]}\n{shown}"})


def count() -> dict[str, int]:
    """What there is of everything that grading makes, in and around this process."""
    namespaces, bwraps = set(), 0
    for process in Path("/proc").glob("[0-9]*"):
        try:
            bwraps += b"bwrap" in (process / "cmdline").read_bytes() and _is_ours(process)
            namespaces.add(os.readlink(process / "ns" / "mnt"))  # noqa: PTH115
        except OSError:
            continue
    mine = os.getpid()
    stores = [path for path in store.scratch().iterdir() if _locked_by(path, mine)]
    groups = Path("/sys/fs/cgroup").glob("**/woodshed-*")
    status = Path("/proc/self/status").read_text()
    return {
        "processes": bwraps,
        "mounts": len(Path("/proc/self/mountinfo").read_text().splitlines()),
        "stores": len(stores),
        "temporary": len(list(Path(tempfile.gettempdir()).glob("woodshed-*"))),
        "groups": sum(1 for group in groups if group.name.split("-")[1] in {path.name for path in stores}),
        "descriptors": len(list(Path("/proc/self/fd").iterdir())),
        "threads": threading.active_count(),
        "rss_mb": int(status.split("VmRSS:")[1].split()[0]) // 1024,
    }


def _is_ours(process: Path) -> bool:
    """Whether a process is a child of this one."""
    return int((process / "stat").read_text().rpartition(")")[2].split()[1]) == os.getpid()


def _locked_by(path: Path, pid: int) -> bool:
    """Whether this process holds the folder open, as the maker of a store does."""
    links = (os.readlink(fd) for fd in Path(f"/proc/{pid}/fd").iterdir() if fd.is_symlink())  # noqa: PTH115
    try:
        return str(path) in set(links)
    except OSError:
        return True


def main() -> None:
    parser = argparse.ArgumentParser(description="What many gradings leave behind.")
    parser.add_argument("tasks", type=Path, help="a folder of tasks")
    parser.add_argument("--gradings", type=int, default=1000)
    parser.add_argument("--jobs", type=int, default=2, help="at the same time")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results" / "grading_soak.json")
    options = parser.parse_args()
    chosen = tasks.load_set(options.tasks)
    own = tempfile.TemporaryDirectory(prefix="soak-")  # others may grade on this machine as well
    tempfile.tempdir = own.name
    counts, verdicts, started = [], Counter(), time.monotonic()

    def grade(number: int) -> tuple[str, float, int]:
        task = chosen[number // 3 % len(chosen)]
        verdict = grading.grade(
            task, patch_of(task, number), settings=grading.GradingSettings(timeout_s=30.0)
        )
        return verdict.status, verdict.reward, number % 3

    step = max(1, options.gradings // 10)
    with ThreadPoolExecutor(options.jobs) as pool:
        for first in range(0, options.gradings, step):
            verdicts.update(pool.map(grade, range(first, min(first + step, options.gradings))))
            counts.append({"gradings": min(first + step, options.gradings), **count()})
            print(counts[-1], flush=True)
    early, late = counts[0], counts[-1]
    more = [name for name in early if name not in ("gradings", "rss_mb") and late[name] > early[name]]
    flat = late["rss_mb"] <= RSS_SLACK * early["rss_mb"]
    paid = sum(n for (_, reward, kind), n in verdicts.items() if kind and reward)
    seconds = time.monotonic() - started
    print({str(key): number for key, number in verdicts.items()}, f"{seconds:.0f} s")
    good = not more and flat and not paid
    print(f"bar: nothing left, memory flat, no reward for nothing: {'holds' if good else f'MISSED: {more}'}")
    report = {"counts": counts, "seconds": seconds, "machine": machine.describe()}
    report["verdicts"] = {str(key): number for key, number in verdicts.items()}
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    own.cleanup()


if __name__ == "__main__":
    main()
