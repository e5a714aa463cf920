"""Runs some tests once inside a sandbox and notes what each test touches. Standard library, pytest and coverage.

The session is the one that `grading.runner` makes. Coverage is switched to the test's id while a test and its fixtures
run; what runs between tests, imports above all, belongs to no test. Calls between functions of the repository are
seen by the profiler. The answer is a JSON file:

    tests   ids, in the order they ran in
    lines   path to line to a hexadecimal set of bits: bit 0 for "outside of any test", bit i + 1 for tests[i]
    stopped whether the session ended before its tests did, because its seconds were over
    calls   [path of the caller, its qualified name, path of the called, its qualified name]
"""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import CodeType, FrameType

sys.path[:0] = ["/run/woodshed"]
sys.path += ["/run/coverage"]

import coverage  # noqa: E402
import pytest  # noqa: E402

try:
    import woodshed_runner as runner  # pyright: ignore[reportMissingImports]
except ModuleNotFoundError:  # read on the host, not run in a sandbox
    from woodshed.grading import runner

clock = time.monotonic  # as it is before tests can replace it

MOST_EVENTS = 200_000
"""Of a test; whoever calls more than that has shown whom it calls."""


class Mapper(runner.Recorder):  # pyright: ignore[reportGeneralTypeIssues]
    """The runner's plugin, with coverage and the profiler around every test."""

    def __init__(self, request: dict, cover: coverage.Coverage, channel: int) -> None:
        super().__init__(channel, request["nonce"], request["ids"], request["packages"], request["workspace"])
        self.cover, self.tests, self.ours = cover, [], set(request["files"])
        self.now, self.seconds, self.began = Path(request["now"]), request["seconds"], 0.0
        self.stopped, self.events = False, 0
        self.calls: dict[tuple[int, int], tuple[CodeType, CodeType]] = {}

    @pytest.hookimpl(hookwrapper=True, tryfirst=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Iterator[None]:
        self.began = self.began or clock()
        self.now.write_text(item.nodeid, "utf-8")
        self.tests.append(item.nodeid)
        self.events = 0
        self.cover.switch_context(item.nodeid)
        threading.setprofile(self.note)
        sys.setprofile(self.note)
        yield
        sys.setprofile(None)
        threading.setprofile(None)  # type: ignore[arg-type]
        self.cover.switch_context("")
        if clock() > self.began + self.seconds:
            self.stopped = True
            item.session.shouldstop = "its seconds are over"

    def note(self, frame: FrameType, event: str, argument: object) -> None:
        self.events += 1
        if self.events > MOST_EVENTS:
            sys.setprofile(None)
        code, caller = frame.f_code, frame.f_back
        if event == "call" and code.co_filename in self.ours and caller is not None:
            self.calls[id(caller.f_code), id(code)] = (caller.f_code, code)


def qualified(code: CodeType) -> str:
    """The outermost definition that a code object belongs to: "" for a module's own."""
    return code.co_qualname.partition(".<locals>")[0].replace("<module>", "")


def answer(mapper: Mapper, workspace: str) -> dict:
    data, lines = mapper.cover.get_data(), {}
    bits = {test: 2 << index for index, test in enumerate(mapper.tests)} | {"": 1}
    for file in sorted(mapper.ours & set(data.measured_files())):
        contexts = data.contexts_by_lineno(file)
        sets = {line: sum({bits.get(test, 1) for test in tests}) for line, tests in contexts.items()}
        lines[file[len(workspace) + 1 :]] = {line: f"{sets[line]:x}" for line in sorted(sets)}
    calls = {
        (a.co_filename[len(workspace) + 1 :], qualified(a), b.co_filename[len(workspace) + 1 :], qualified(b))
        for a, b in mapper.calls.values()
        if a.co_filename in mapper.ours
    }
    return {"tests": mapper.tests, "lines": lines, "calls": sorted(calls), "stopped": mapper.stopped}


def main() -> None:
    request = json.loads(sys.stdin.buffer.read())
    os.environ["PYTEST_DISABLE_PLUGIN_AUTOLOAD"] = "1"
    os.chdir(request["workspace"])
    cover = coverage.Coverage(data_file=None, config_file=False, include=request["files"], messages=False)
    cover.set_option("run:core", "ctrace")  # the only core that keeps contexts on every Python
    cover.set_option("run:disable_warnings", ["no-data-collected", "module-not-imported"])
    with Path(os.devnull).open("wb") as nothing:
        mapper = Mapper(request, cover, nothing.fileno())
        cover.start()
        cover.switch_context("")
        pytest.main(runner.arguments(request), plugins=[mapper])
        cover.stop()
    Path(request["out"]).write_text(json.dumps(answer(mapper, request["workspace"])), "utf-8")
    os._exit(0)


if __name__ == "__main__":
    main()
