"""Runs some tests inside a sandbox against many wrong versions of a function. Standard library and pytest; one file.

pytest collects once; then, for every version, a fork puts the code of the wrong version into the function objects that
the tests will call and runs them to the first failure. The test that failed runs first from then on, as it is likely to
notice the next version too. A version costs a fork and a few tests, not a session.

Answer, one letter for each version: k, a test noticed; p, all tests passed; s, the version could not be put in place.
A version that runs on and on is noticed too, by its CPU time, so that a busy machine changes nothing; and so is one
that waits for what never comes, by the seconds that it sleeps.
"""

from __future__ import annotations

import contextlib
import gc
import json
import os
import resource
import select
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from types import CodeType, FunctionType

sys.path[:0] = ["/run/woodshed"]

import pytest  # noqa: E402

try:
    import woodshed_runner as runner  # pyright: ignore[reportMissingImports]
except ModuleNotFoundError:  # read on the host, not run in a sandbox
    from woodshed.grading import runner

MEMORY = 2 << 30  # bytes of address space


class MutationRecorder(runner.Recorder):  # pyright: ignore[reportGeneralTypeIssues]
    """The runner's plugin with its own loop over the tests, once for every version."""

    def __init__(self, request: dict, channel: int) -> None:
        super().__init__(channel, "", request["ids"], [], request["workspace"])
        self.request, self.answers = request, ""

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtestloop(self, session: pytest.Session) -> bool:
        items = [item for item in session.items if item.nodeid in self.wanted]
        began, cpu_began = time.monotonic(), time.process_time()
        if not items or self.fork(items, None, 600, 600) != "p":
            self.answers = "s" * len(self.request["versions"])
            return True
        usage = resource.getrusage(resource.RUSAGE_CHILDREN)
        limit_s = 2 + 5 * max(usage.ru_utime + usage.ru_stime, time.process_time() - cpu_began)
        patience_s = 5 + 5 * (time.monotonic() - began)
        for version in self.request["versions"]:
            self.answers += self.fork(items, version, limit_s, patience_s)
        return True

    def fork(self, items: list[pytest.Item], version: dict | None, limit_s: float, patience_s: float) -> str:
        read_end, write_end = os.pipe()
        os.set_blocking(read_end, False)  # a process that the tests left behind may hold the other end
        child = os.fork()
        if child == 0:
            try:
                resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
                signal.setitimer(signal.ITIMER_PROF, limit_s)
                os._exit(self.run(items, version, write_end))
            finally:
                os._exit(1)
        os.close(write_end)
        status = ended(child, patience_s)
        with contextlib.suppress(BlockingIOError):
            if index := os.read(read_end, 20):
                items.insert(0, items.pop(int(index)))
        os.close(read_end)
        return {0: "p", 2: "s"}.get(os.waitstatus_to_exitcode(status), "k")

    def run(self, items: list[pytest.Item], version: dict | None, write_end: int) -> int:
        if version is not None and not put(version, self.request["workspace"]):
            return 2
        for index, item in enumerate(items):
            item.config.hook.pytest_runtest_protocol(item=item, nextitem=None)
            if self.open_failed:
                os.write(write_end, str(index).encode())
                return 1
        return 0

    open_failed = False

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self.open_failed = self.open_failed or runner.outcome_of(report) in ("failed", "error")


def ended(child: int, patience_s: float) -> int:
    """The status of a process that ends by itself, or is killed after it slept for so long without any CPU time."""
    end = os.pidfd_open(child)
    poll = select.poll()
    poll.register(end, select.POLLIN)
    asleep_s, used = 0, ""
    while not poll.poll(1000):
        state, *fields = Path(f"/proc/{child}/stat").read_text().rpartition(") ")[2].split()
        now = " ".join(fields[10:12])  # user and system time
        asleep_s = asleep_s + 1 if state == "S" and now == used else 0
        used = now
        if asleep_s > patience_s:
            os.kill(child, signal.SIGKILL)
    os.close(end)
    return os.waitpid(child, 0)[1]


def put(version: dict, workspace: str) -> bool:
    """Give every function object of a definition the code of the wrong version."""
    file, name = f"{workspace}/{version['path']}", version["name"]
    module = compile(version["text"], file, "exec", dont_inherit=True)
    new = [code for code in codes(module) if code.co_qualname == name]
    old = [
        f
        for f in gc.get_objects()
        if isinstance(f, FunctionType) and f.__code__.co_qualname == name and f.__code__.co_filename == file
    ]
    try:
        for function in old:
            function.__code__ = new[-1]
    except (ValueError, IndexError):  # other free variables
        return False
    return bool(old)


def codes(code: CodeType) -> Iterator[CodeType]:
    yield code
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from codes(constant)


def main() -> None:
    request = json.loads(sys.stdin.buffer.read())
    os.environ["PYTEST_DISABLE_PLUGIN_AUTOLOAD"] = "1"
    os.chdir(request["workspace"])
    with Path(os.devnull).open("wb") as nothing:
        recorder = MutationRecorder(request, nothing.fileno())
        pytest.main([*runner.arguments(request), "-s"], plugins=[recorder])
    Path(request["out"]).write_text(recorder.answers, "utf-8")
    os._exit(0)


if __name__ == "__main__":
    main()
