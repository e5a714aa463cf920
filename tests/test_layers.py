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
    root, over = folder.hidden_tests(tiny_task), threading.Event()

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
        verdict = grading.grade(tiny_task, folder.gold_patch(tiny_task))
    finally:
        over.set()
        thread.join()
    assert (verdict.integrity, verdict.reward) == ((), 1.0)
    assert grading.grade(tiny_task, Patch({})).reward == 0.0


def python(code: str) -> str:
    return f"/env/bin/python -c '{code}'"


RENAMED = python('import os; os.rename("t", "u")')
RENAMES = {
    "mv": "mv t u",
    "os.rename": RENAMED,
    "shutil.move": python('import shutil; shutil.move("t", "u")'),
    "by descriptor": python(
        'import os; f = os.open(".", 0); os.rename("t", "u", src_dir_fd=f, dst_dir_fd=f)'
    ),
    "absolute": python('import os; os.rename("/workspace/t/", "/workspace/u")'),
    "through a link": "ln -s /workspace /tmp/w; " + python('import os; os.rename("/tmp/w/t", "u")'),
    "onto an empty folder": "mkdir u; " + RENAMED,
    "there and back and there": RENAMED + " && mv u t && " + RENAMED,
    "written before": "echo x >> t/a.py; sed -i '$d' t/a.py; " + RENAMED,
    "a part of it before": "mv t/deep t/d && mv t/d t/deep && " + RENAMED,
}


@pytest.mark.parametrize("watch", [None, ()])
def test_folders_are_renamed_as_on_a_plain_disk(lower: Path, watch: tuple[str, ...] | None):
    (lower / "t" / "deep").mkdir()
    (lower / "t" / "deep" / "run.sh").write_text("#!/bin/sh\n")
    (lower / "t" / "deep" / "run.sh").chmod(0o755)
    (lower / "t" / "link").symlink_to("deep/run.sh")
    os.utime(lower / "t" / "a.py", (1, 1))
    expected = {
        ("t", "deleted"),
        ("u", "added"),
        *(
            (f"{top}/{name}", kind)
            for top, kind in (("t", "deleted"), ("u", "added"))
            for name in ("a.py", "deep", "deep/run.sh", "link")
        ),
    }
    with open_sandbox(SandboxSpec((lower,), watch=watch)) as sandbox:
        for name, command in RENAMES.items():
            with sandbox.fork() as fork:
                result = fork.exec(command)
                assert result.outcome == "ok", (name, result.stderr)
                assert {(change.path, change.kind) for change in fork.diff()} == expected, name
                shown = fork.exec("cat u/a.py; readlink u/link; test -x u/deep/run.sh; ls -a").stdout.decode()
                assert shown.startswith("def test(): pass\ndeep/run.sh\n") and "woodshed" not in shown, name
                assert fork.altered(["t/a.py"]) == ["t/a.py"]
                if watch is not None:
                    assert "/workspace/t/a.py" in [t.path for t in fork.touched() if t.mode == "write"], name
        with sandbox.fork() as fork, fork.fork() as later:  # after a fork, what was written is a lower layer
            assert later.exec("mkdir -p n/m; touch n/m/x").outcome == "ok"
            with later.fork() as last:
                command = '/env/bin/python -c \'import os; os.rename("n", "k"); os.rename("k/m", "t/m")\''
                assert last.exec(command).outcome == "ok"
                assert {c.path for c in last.diff()} == {"k", "t/m", "t/m/x"}


def test_git_mv_of_a_folder(lower: Path):
    with open_sandbox(SandboxSpec((lower,))) as sandbox:
        git = "git -c user.name=a -c user.email=a@b"
        assert sandbox.exec(f"git init -q . && git add . && {git} commit -qm one").outcome == "ok"
        with sandbox.fork() as fork:
            result = fork.exec("git mv t lib && git status --porcelain")
            assert (result.outcome, result.stdout) == ("ok", b"R  t/a.py -> lib/a.py\n"), result.stderr
            assert fork.read("lib/a.py") == b"def test(): pass\n"


def test_a_folder_that_cannot_be_copied_stays_whole(lower: Path):
    for spoil in (
        "truncate -s 200M t/b t/c",
        "mkdir t/shut; chmod 0 t/shut",
        "mkdir t/shut; touch t/shut/x; chmod 555 t/shut",
        python('import os; os.chdir("t"); [(os.mkdir("d"), os.chdir("d")) for _ in range(150)]'),
    ):
        with open_sandbox(SandboxSpec((lower,))) as sandbox:
            assert sandbox.exec(spoil).outcome == "ok"
            assert b"Invalid cross-device link" in sandbox.exec(RENAMED).stderr
            assert sandbox.exec("cat t/a.py; ls -A").stdout == b"def test(): pass\nkept.py\nt\n"
