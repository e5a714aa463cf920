"""Runs some tests inside a sandbox on a machine that seems busy. Standard library and pytest; one file.

The profiler is on, which makes everything a few times slower, and where the repository's code (or `timeit`) looks at a
clock, the process sleeps first, as if another had its turn: at every fourth look of a test, so that of two spans of
time that a test compares one is long. Clocks themselves are left alone, and so agree with each other.

The answer is a JSON file: {"failed": [ids]}.
"""

from __future__ import annotations

import datetime
import json
import os
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import FrameType

sys.path[:0] = ["/run/woodshed"]

import pytest  # noqa: E402

try:
    import woodshed_runner as runner  # pyright: ignore[reportMissingImports]
except ModuleNotFoundError:  # read on the host, not run in a sandbox
    from woodshed.grading import runner

PAUSE_S = 1.2
MOST_PAUSES = 2
"""Of one test."""
CLOCKS = [
    getattr(time, name + suffix) for name in ("time", "monotonic", "perf_counter") for suffix in ("", "_ns")
]
DATES = ("now", "utcnow", "today")
sleep, clock = time.sleep, time.monotonic


class Slowed(runner.Recorder):  # pyright: ignore[reportGeneralTypeIssues]
    """The runner's plugin, with a profiler that sleeps."""

    def __init__(self, request: dict, channel: int) -> None:
        super().__init__(channel, "", request["ids"], [], request["workspace"])
        self.phase, self.looks, self.pauses = request["phase"], 0, 0
        self.seconds, self.began = request["seconds"], 0.0
        self.failed: list[str] = []
        self.ours = (request["workspace"] + "/", "<timeit", str(Path(os.__file__).with_name("timeit.py")))

    @pytest.hookimpl(hookwrapper=True, tryfirst=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Iterator[None]:
        self.looks = self.pauses = 0
        self.began = self.began or clock()
        threading.setprofile(self.look)
        sys.setprofile(self.look)
        yield
        sys.setprofile(None)
        threading.setprofile(None)  # type: ignore[arg-type]
        if clock() > self.began + self.seconds:
            item.session.shouldstop = "its seconds are over"

    def look(self, frame: FrameType, event: str, argument: object) -> None:
        if event != "c_call" or not frame.f_code.co_filename.startswith(self.ours) or not is_clock(argument):
            return
        self.looks += 1
        if self.looks % 4 == self.phase and self.pauses < MOST_PAUSES:
            self.pauses += 1
            sleep(PAUSE_S)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if runner.outcome_of(report) in ("failed", "error") and report.nodeid in (self.wanted or ()):
            self.failed.append(report.nodeid)


def is_clock(function: object) -> bool:
    """True if a function of C reads the clock."""
    owner = getattr(function, "__self__", None)
    if isinstance(owner, type) and issubclass(owner, datetime.date):
        return getattr(function, "__name__", "") in DATES
    return any(function is clock for clock in CLOCKS)


def main() -> None:
    request = json.loads(sys.stdin.buffer.read())
    os.environ["PYTEST_DISABLE_PLUGIN_AUTOLOAD"] = "1"
    os.chdir(request["workspace"])
    with Path(os.devnull).open("wb") as nothing:
        slowed = Slowed(request, nothing.fileno())
        pytest.main(runner.arguments(request), plugins=[slowed])
    Path(request["out"]).write_text(json.dumps({"failed": slowed.failed}), "utf-8")
    os._exit(0)


if __name__ == "__main__":
    main()
