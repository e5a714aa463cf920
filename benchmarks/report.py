"""What a big run costs to look at: 5,000 rollouts of 20 turns, written as a page, opened, searched, and viewed.

    python benchmarks/report.py [--run FOLDER] [--keep]

The run folder is made through the real records (tests/lifelike.py), some 330 MB of them. Bars, on 2 cores: the page is
written in 20 s and 1 GB and is below 30 MB; in headless Chromium it paints within 2 s and a search answers within
200 ms; `woodshed view` shows its first transcript within 2 s. Where the load is above the number of cores, others were
at work and wall times are upper bounds; the CPU seconds beside them are less so.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from woodshed.runs import machine

sys.path.append(str(Path(__file__).parent.parent / "tests"))

QUERIES = (
    "threading",
    "def read",
    "has:hint fault:bad_path",
    "socket timeout",
    "task:name_7 is:solved",
    "is:flagged os",
)
WRITE = """
import sys
from pathlib import Path
from woodshed import report
from woodshed.runs.folder import RunDir
report.write(RunDir.open(Path(sys.argv[1])))
"""
VIEW = """
import asyncio, sys
from pathlib import Path
from woodshed.report.view import Reader, Viewer
from woodshed.runs.folder import RunDir
class Once(Viewer):
    def mark(self, number):
        super().mark(number)
        self.call_after_refresh(self.exit)
Once(Reader(RunDir.open(Path(sys.argv[1])))).run(headless=True)
"""
SEARCH = """async (query) => {
  const input = document.getElementById("query"), began = performance.now();
  input.value = query;
  input.dispatchEvent(new Event("input"));
  await new Promise((done) => requestAnimationFrame(() => setTimeout(done)));
  return performance.now() - began;
}"""


def main() -> None:
    parser = argparse.ArgumentParser(description="What a big run costs to look at.")
    parser.add_argument("--run", type=Path, help="a run folder to use instead of a made one")
    parser.add_argument("--keep", action="store_true", help="leave the made run folder behind")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results" / "report.json")
    options = parser.parse_args()
    scratch = Path(tempfile.mkdtemp())
    run = options.run or make(scratch / "big")
    rows = [*written(run), *browsed(run / "report.html"), *viewed(run)]
    print(f"{'':<44}{'measured':>10}{'bar':>8}")
    for row in rows:
        bar = "" if row["bar"] is None else f"{row['bar']:g}"
        missed = row["bar"] is not None and row["value"] > row["bar"]
        print(f"{row['what']:<44}{row['value']:>10.4g}{bar:>8}{'  MISSED' if missed else ''}")
    load = os.getloadavg()[0]
    print(f"load {load:.1f} on {machine.cores()} cores; run folder {run}")
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.write_text(
        json.dumps({"rows": rows, "load": load, "machine": machine.describe()}, indent=2) + "\n"
    )
    if not options.keep:
        shutil.rmtree(scratch)


def make(path: Path) -> Path:
    from lifelike import BIG, make_run  # pyright: ignore[reportMissingImports]

    return make_run(path, BIG).path


def row(what: str, value: float, bar: float | None = None) -> dict[str, Any]:
    return {"what": what, "value": round(value, 4), "bar": bar}


def timed(code: str, run: Path) -> tuple[float, float, float]:
    """Wall seconds, CPU seconds and peak MB of a Python process, its start included."""
    began, before = time.perf_counter(), resource.getrusage(resource.RUSAGE_CHILDREN)
    with subprocess.Popen([sys.executable, "-c", code, str(run)], stdout=subprocess.DEVNULL) as process:
        _, status, used = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode:
        raise SystemExit(f"it ended with {process.returncode}")
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    cpu = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return time.perf_counter() - began, cpu, used.ru_maxrss / 1024


def written(run: Path) -> list[dict[str, Any]]:
    wall, cpu, megabytes = timed(WRITE, run)
    size = (run / "report.html").stat().st_size / 1e6
    return [
        row("page written, s", wall, 20.0),
        row("page written, CPU s", cpu),
        row("memory, MB", megabytes, 1000.0),
        row("size of the page, MB", size, 30.0),
    ]


def viewed(run: Path) -> list[dict[str, Any]]:
    wall, cpu, _ = timed(VIEW, run)
    return [row("view shows its first transcript, s", wall, 2.0), row("view, CPU s", cpu)]


def browsed(page: Path) -> list[dict[str, Any]]:
    from playwright.sync_api import sync_playwright

    chromium = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
    if chromium is None:
        raise SystemExit("no Chromium on this machine: install the package `chromium`")
    with sync_playwright() as play:
        browser = play.chromium.launch(executable_path=chromium, args=["--no-sandbox", "--disable-gpu"])
        tab = browser.new_page(viewport={"width": 1280, "height": 900})
        tab.set_default_timeout(600_000)
        began = time.perf_counter()
        tab.goto(page.resolve().as_uri(), wait_until="commit")
        tab.wait_for_selector("html[data-ready]", state="attached")
        ready = time.perf_counter() - began
        paint = tab.evaluate("performance.getEntriesByName('first-contentful-paint')[0].startTime")
        found = [tab.evaluate(SEARCH, query) for query in QUERIES for _ in range(3)]
        browser.close()
    return [
        row("first paint, s", paint / 1000, 2.0),
        row("all transcripts searchable, s", ready),
        row("search, median ms", statistics.median(found), 200.0),
        row("search, slowest ms", max(found), 200.0),
    ]


if __name__ == "__main__":
    main()
