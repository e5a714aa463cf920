"""What a sandbox costs: a whole life, a command, a fork after changes of several sizes.

    python benchmarks/sandbox.py [--runs 20]

Bars: create + 5 commands + destroy at most 80 ms, fork at most 50 ms whatever was changed (medians). Where the load
is above the number of cores, others were at work and the figures are upper bounds.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from woodshed.runs import machine
from woodshed.sandbox import SandboxSpec, open_sandbox
from woodshed.sandbox.store import scratch

LIFE_MS, FORK_MS = 80.0, 50.0
CHANGES = {
    "nothing": "true",
    "one file of 100 MB": "head -c 100000000 /dev/zero > large",
    "5,000 files in 50 folders": "for d in $(seq 50); do mkdir $d; touch $d/$(seq -s ' '$d/ 100); done",
}


def main() -> None:
    parser = argparse.ArgumentParser(description="What a sandbox costs.")
    parser.add_argument("--runs", type=int, default=20, help="runs per row")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results" / "sandbox.json")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        spec = workspace(Path(folder))
        rows = [*lives(spec, options.runs), *commands(spec, options.runs)]
        for name, command in CHANGES.items():
            rows += forks(spec, options.runs, name, command)
    print(f"{'':<38}{'p50 ms':>9}{'p90 ms':>9}{'bar ms':>9}")
    for row in rows:
        missed = row["bar_ms"] is not None and row["p50_ms"] > row["bar_ms"]
        bar = "" if row["bar_ms"] is None else f"{row['bar_ms']:.0f}"
        print(f"{row['what']:<38}{row['p50_ms']:>9}{row['p90_ms']:>9}{bar:>9}{'  MISSED' if missed else ''}")
    load = os.getloadavg()[0]
    print(f"load {load:.1f} on {machine.cores()} cores; changes are kept in {scratch()}")
    report = {"rows": rows, "runs": options.runs, "load": load, "machine": machine.describe()}
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.write_text(json.dumps(report, indent=2) + "\n")


def workspace(folder: Path) -> SandboxSpec:
    """A repository of 200 files."""
    for number in range(200):
        path = folder / f"package_{number % 10}" / f"module_{number}.py"
        path.parent.mkdir(exist_ok=True)
        path.write_text("value = 1\n" * 200)
    return SandboxSpec((folder,))


def lives(spec: SandboxSpec, runs: int) -> list[dict[str, Any]]:
    def life(commands: int) -> None:
        with open_sandbox(spec) as sandbox:
            for _ in range(commands):
                assert sandbox.exec("true").outcome == "ok"

    life(5)  # caches are warm from here on
    return [
        row("create + destroy", [timed(lambda: life(0)) for _ in range(runs)]),
        row("create + 5 commands + destroy", [timed(lambda: life(5)) for _ in range(runs)], LIFE_MS),
    ]


def commands(spec: SandboxSpec, runs: int) -> list[dict[str, Any]]:
    with open_sandbox(spec) as sandbox:
        kinds: dict[str, Callable[[], object]] = {
            "exec true": lambda: sandbox.exec(["true"]),
            "exec bash -c true": lambda: sandbox.exec("true"),
            "exec python -c pass": lambda: sandbox.exec(["/env/bin/python", "-c", "pass"]),
            "read 2 kB": lambda: sandbox.read("package_1/module_1.py"),
            "write 2 kB": lambda: sandbox.write("new.py", b"x" * 2000),
        }
        return [row(name, [timed(act) for _ in range(5 * runs)]) for name, act in kinds.items()]


def forks(spec: SandboxSpec, runs: int, name: str, command: str) -> list[dict[str, Any]]:
    """A fork up to and including the child's first command; the parent starts anew with its own next one."""
    forking, resuming = [], []
    for _ in range(runs):
        with open_sandbox(spec) as sandbox:
            assert sandbox.exec(command).outcome == "ok"
            started = time.perf_counter()
            with sandbox.fork() as child:
                child.exec(["true"])
                forking.append(1000 * (time.perf_counter() - started))
                resuming.append(timed(lambda: sandbox.exec(["true"])))
    return [row(f"fork after {name}", forking, FORK_MS), row("  the parent's next command", resuming)]


def timed(act: Callable[[], object]) -> float:
    """Milliseconds."""
    started = time.perf_counter()
    act()
    return 1000 * (time.perf_counter() - started)


def row(what: str, times: list[float], bar_ms: float | None = None) -> dict[str, Any]:
    p90 = sorted(times)[int(0.9 * (len(times) - 1))]
    return {
        "what": what,
        "p50_ms": round(statistics.median(times), 1),
        "p90_ms": round(p90, 1),
        "bar_ms": bar_ms,
    }


if __name__ == "__main__":
    main()
