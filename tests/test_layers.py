"""What a sandbox's own layer tells: which files were altered, whatever happens to the same inodes on the host."""

from __future__ import annotations

import os
import threading
import time
from pathlib import Path

import pytest

from woodshed import grading
from woodshed.records import Patch, Task
from woodshed.sandbox import SandboxSpec, open_sandbox
from woodshed.tasks import folder

ALTERATIONS = {
    "write": "echo more >> t/a.py",
    "write and put back": "cp -p t/a.py /tmp/a; echo x > t/a.py; cp -p /tmp/a t/a.py",
    "set the times back": "m=$(stat -c %y t/a.py); echo '# 1' > t/a.py; touch -d \"$m\" t/a.py",
    "replace and restore": "cp -p t/a.py /tmp/a; rm t/a.py; cp -p /tmp/a t/a.py",
    "rename and back": "mv t/a.py t/b.py; mv t/b.py t/a.py",
    "mode": "chmod 000 t/a.py; chmod 644 t/a.py",
    "times": "touch -d @1 t/a.py",
    "remove": "rm t/a.py",
    "remove the folder": "rm -r t",
    "the folder becomes a link": "mv t /tmp/t; ln -s /tmp/t t",
    "the folder is exchanged": "cp -a t new; rm -r t; mv new t",
    "another name that writes": "ln t/a.py t/b.py; echo x >> t/b.py",
    "a link that writes": "ln -s $PWD/t/a.py /tmp/l; echo x >> /tmp/l",
    "truncate": "/env/bin/python -c 'import os; os.truncate(\"t/a.py\", 3)'",
    "a folder in its place": "rm t/a.py; mkdir t/a.py",
}


@pytest.fixture
def lower(tmp_path: Path) -> Path:
    (tmp_path / "lower" / "t").mkdir(parents=True)
    (tmp_path / "lower" / "t" / "a.py").write_text("def test(): pass\n")
    (tmp_path / "lower" / "kept.py").write_text("1\n")
    return tmp_path / "lower"


def test_every_alteration_of_a_file_is_told(lower: Path):
    files = ["t/a.py", "kept.py"]
    with open_sandbox(SandboxSpec((lower,))) as sandbox:
        assert sandbox.altered(files) == []
        sandbox.exec("cat t/a.py kept.py; touch t/new.py other; chmod 700 t; ls -l t; mkdir -p t/deep")
        assert sandbox.altered(files) == []
        for name, command in ALTERATIONS.items():
            with sandbox.fork() as fork:
                assert fork.exec(command).outcome == "ok", name
                assert fork.altered(files) == ["t/a.py"], name
                with fork.fork() as later:
                    assert later.altered(files) == ["t/a.py"], name


def test_what_happens_on_the_host_is_no_alteration(lower: Path, tmp_path: Path):
    file = lower / "t" / "a.py"
    with open_sandbox(SandboxSpec((lower,))) as sandbox:
        sandbox.exec("cat t/a.py")
        os.link(file, tmp_path / "run")
        (tmp_path / "run").unlink()
        file.chmod(0o600)
        os.utime(file, (1, 1))
        (tmp_path / "copy").write_bytes(file.read_bytes())
        assert sandbox.altered(["t/a.py"]) == []


def test_runs_that_begin_and_end_meanwhile_cost_no_honest_attempt(tiny_task: Task, tmp_path: Path):
    """A run's folder shares task files by hard links."""
    root, over = folder.protected_folder(tiny_task), threading.Event()

    def other_runs() -> None:
        while not over.is_set():
            for number, file in enumerate(sorted(root.rglob("*"))):
                if file.is_file():
                    os.link(file, tmp_path / str(number))
                    (tmp_path / str(number)).unlink()
            time.sleep(0.01)

    thread = threading.Thread(target=other_runs)
    thread.start()
    try:
        verdict = grading.verify(tiny_task, folder.gold_patch(tiny_task))
    finally:
        over.set()
        thread.join()
    assert (verdict.integrity, verdict.reward) == ((), 1.0)
    assert grading.verify(tiny_task, Patch({})).reward == 0.0
