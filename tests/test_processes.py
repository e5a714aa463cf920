"""Processes of a run: restarted where they were killed, ended with whoever started them, never another's."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from woodshed.records import RunError
from woodshed.runs import processes
from woodshed.runs.folder import RunDir
from woodshed.stages.asynchronous import launcher

SLEEPS = "import time; print('ready', flush=True); time.sleep(600)"


def python(code: str) -> tuple[str, ...]:
    return (sys.executable, "-S", "-c", code)


def until(is_true: Callable[[], object], seconds: float = 20.0) -> None:
    deadline = time.monotonic() + seconds
    while not is_true():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def is_alive(pid: int) -> bool:
    return processes.started_at(pid) > 0


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    return RunDir.create(tmp_path / "run", recipe="", manifest={})


def test_a_killed_process_is_started_again_and_the_run_ends_with_its_trainer(run: RunDir):
    """The trainer kills itself twice; the collector runs on until nobody needs it."""
    count = run.path / "count"
    dies = f"""
import os, pathlib, signal
path = pathlib.Path({str(count)!r})
count = len(path.read_text()) if path.exists() else 0
path.write_text("x" * (count + 1))
print("start", count, flush=True)
if count < 2: os.kill(os.getpid(), signal.SIGKILL)
"""
    waits = f"import pathlib, time\nwhile not len(pathlib.Path({str(count)!r}).read_text()) == 3: time.sleep(0.02)"
    said: list[str] = []
    until_there = f"import os, time\nwhile not os.path.exists({str(count)!r}): time.sleep(0.02)\n"
    launcher.launch(run, {"trainer": python(dies), "collector": python(until_there + waits)}, said.append)
    assert [line for line in said if "start" in line and "again" not in line] == [
        f"trainer: start {n}" for n in range(3)
    ]
    assert said.count("the trainer ended (signal 9) and is started again") == 2
    table = json.loads((run.path / "processes.json").read_text())
    assert table["trainer"]["starts"] == 3 and table["collector"]["starts"] == 1
    assert not any(is_alive(table[name]["pid"]) for name in ("trainer", "collector"))


@pytest.mark.parametrize(
    ("code", "says"),
    [
        ("print('RecipeError: no such task'); raise SystemExit(2)", "no such task.*--resume"),
        ("import os; os.kill(os.getpid(), 9)", r"signal 9, 2 times in a row without any progress"),
        ("raise SystemExit(3)", r"exit code 3, 2 times in a row without any progress"),
    ],
)
def test_who_cannot_go_on_ends_the_run_and_nothing_is_left(
    run: RunDir, monkeypatch: pytest.MonkeyPatch, code: str, says: str
):
    monkeypatch.setattr(launcher, "STARTS", 2)
    with pytest.raises(RunError, match=f"the collector of .*{says}"):
        launcher.launch(run, {"trainer": python(SLEEPS), "collector": python(code)}, lambda _: None)
    table = json.loads((run.path / "processes.json").read_text())
    assert not is_alive(table["trainer"]["pid"])


def test_children_end_with_a_launcher_that_is_killed(run: RunDir):
    """Also those of its children that ask the kernel for it, as the ranks of torchrun do."""
    rank = f"from woodshed.runs import processes; processes.die_with_parent(); {SLEEPS}"
    agent = f"""
import subprocess, sys
rank = subprocess.Popen([sys.executable, "-c", {rank!r}], start_new_session=True)
print(rank.pid, flush=True)
rank.wait()
"""
    code = f"""
from pathlib import Path
from woodshed.runs.folder import RunDir
from woodshed.stages.asynchronous import launcher
import sys
launcher.launch(RunDir(Path({str(run.path)!r})), {{"trainer": (sys.executable, "-c", {agent!r})}}, print)
"""
    begun = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.DEVNULL)
    log = run.path / "logs" / "trainer.log"
    until(lambda: log.exists() and "ready" in log.read_text())
    rank_pid = int(log.read_text().split()[0])
    table = json.loads((run.path / "processes.json").read_text())
    assert is_alive(rank_pid) and is_alive(table["trainer"]["pid"])
    begun.kill()
    begun.wait()
    until(lambda: not is_alive(rank_pid) and not is_alive(table["trainer"]["pid"]))


def test_what_an_earlier_launcher_left_is_ended_and_nobody_else(tmp_path: Path):
    ours, other = (
        subprocess.Popen(python(SLEEPS), stdout=subprocess.DEVNULL, start_new_session=True) for _ in "ab"
    )
    try:
        table = {
            "launcher": {"pid": os.getpid(), "started_at": processes.started_at(os.getpid())},
            "collector": {"pid": ours.pid, "started_at": processes.started_at(ours.pid)},
            "trainer": {"pid": other.pid, "started_at": processes.started_at(other.pid) - 1},
        }
        (tmp_path / "processes.json").write_text(json.dumps(table))
        assert processes.reap(tmp_path / "processes.json") == ["collector"]
        assert ours.wait(5) == -signal.SIGTERM and other.poll() is None
    finally:
        for each in (ours, other):
            each.kill()
            each.wait()
