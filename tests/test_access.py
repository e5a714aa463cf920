"""Which files an attempt touched: seen whatever program does it, classed by where they lie."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from pathlib import Path

import pytest

from woodshed import tasks
from woodshed.agent.access import accesses, path_class
from woodshed.records import SandboxError, Task
from woodshed.sandbox import Sandbox, SandboxSpec, Touch, Unprotected, open_sandbox
from woodshed.tasks.environment import is_own

READERS = {
    "a program": "cat secret",
    "the shell": "read line < secret",
    "a link": "ln -s secret innocent; cat innocent",
    "a second name": "ln secret innocent; cat innocent",
    "a folder's descriptor": (
        "python -S -c \"import os; d = os.open('/workspace', 0); os.read(os.open('secret', 0, dir_fd=d), 9)\""
    ),
    "its own process folder": "cat /proc/self/cwd/secret",
    "another language": "awk '{print}' secret",
    "a copy": "cp secret /tmp/other",
    "a program left behind": "(setsid cat secret) & sleep 0.2",
    "memory": "python -c \"import mmap; mmap.mmap(open('secret').fileno(), 0, prot=mmap.PROT_READ)\"",
    "another working folder": "cd /tmp && cat ../workspace/./secret",
}


@pytest.fixture(scope="module")
def watched(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Sandbox]:
    folder = tmp_path_factory.mktemp("workspace")
    (folder / "secret").write_text("a line\n")
    with open_sandbox(SandboxSpec((folder,), watch=("tabnanny",))) as sandbox:
        yield sandbox


def seen(sandbox: Sandbox, command: str) -> list[Touch]:
    sandbox.touched()
    sandbox.exec(command)
    return sandbox.touched()


@pytest.mark.parametrize("how", READERS)
def test_every_reader_is_seen(watched: Sandbox, how: str):
    found = {(touch.path, touch.mode) for touch in seen(watched, f"rm -f innocent; {READERS[how]}")}
    assert ("/workspace/secret", "read") in found or ("/workspace/innocent", "read") in found
    if how == "a second name":
        assert ("/workspace/secret", "read") in found  # the name was made, so the file counts as read


def test_writes_and_programs_are_seen(watched: Sandbox):
    found = seen(watched, "echo x > made; mv made moved; truncate -s 0 moved; rm moved; git --version; true")
    kinds = {(touch.path, touch.mode) for touch in found}
    assert {("/workspace/made", "write"), ("/workspace/moved", "write"), ("/usr/bin/rm", "exec")} <= kinds
    assert next(t for t in found if t.path == "/usr/bin/rm").command == "rm moved"
    assert not any(touch.path.startswith(("/usr/lib", "/etc")) for touch in found)


def test_what_is_not_there_is_not_read(watched: Sandbox):
    assert not any("absent" in touch.path for touch in seen(watched, "cat absent; ls -R .; test -e secret"))


def test_names_are_seen_wherever_they_lie(watched: Sandbox):
    found = [touch.path for touch in seen(watched, "python -S -c 'import tabnanny, tokenize'")]
    assert any("/tabnanny." in path for path in found)
    assert not any("/tokenize." in path for path in found)


def test_opening_without_system_calls_is_refused(watched: Sandbox):
    code = (
        "import ctypes, os; print(ctypes.CDLL(None, use_errno=True).syscall(425, 8, 0), ctypes.get_errno())"
    )
    assert watched.exec(["python", "-c", code]).stdout == b"-1 38\n"


def test_limits_and_results_are_as_without(watched: Sandbox):
    assert watched.exec("exit 3").exit_code == 3
    assert watched.exec("sleep 60", timeout_s=0.5).outcome == "timeout"
    assert watched.exec("cat; echo x >&3", stdin=b"in", channel=True).channel == b"x\n"
    assert watched.exec(["no-such-program"]).exit_code == 127
    assert watched.exec("while :; do sleep 0.01 & done", timeout_s=30).outcome == "limit"


def test_the_log_survives_a_fork_and_is_bounded(tmp_path: Path):
    with open_sandbox(SandboxSpec((tmp_path,), watch=())) as sandbox:
        sandbox.exec("echo x > before")
        with sandbox.fork() as twin:
            twin.exec("echo x > after")
            assert "/workspace/after" in [touch.path for touch in twin.touched()]
        assert "/workspace/before" in [touch.path for touch in sandbox.touched()]
        sandbox.exec("for n in $(seq 2000); do echo > f$((n % 100)); done")
        made = [touch for touch in sandbox.touched() if touch.path.startswith("/workspace/f")]
        assert (len(made), sum(touch.count for touch in made)) == (100, 2000)
        assert sandbox.touched() == []


def test_only_bubblewrap_can_watch(tmp_path: Path):
    with pytest.raises(SandboxError, match="cannot watch"):
        Unprotected(unsafe=True).open(SandboxSpec((tmp_path,), watch=()))


@pytest.mark.parametrize(
    ("path", "kind"),
    [
        ("/workspace/tally/words.py", "package"),
        ("/workspace/README.md", "workspace"),
        ("/workspace/tests/test_words.py", "tests"),
        ("/workspace/pyproject.toml", "tests"),
        ("/workspace/.git/packed-refs", "history"),
        ("/workspace/tally/__pycache__/words.cpython-311.pyc", "bytecode"),
        ("/workspace/.mypy_cache/3.11/cache.3.db", "cache"),
        ("/workspace/.pytest_cache/v/cache/nodeids", "cache"),
        ("/home/agent/.cache/pip/wheels/tally-1.0-py3-none-any.whl", "copy"),
        ("/home/agent/tally/words.py", "copy"),
        ("/tmp/old/tally/words.py", "copy"),
        ("/env/lib/python3.11/site-packages/tally/words.py", "copy"),
        ("/env/lib/python3.11/site-packages/tally.py", "copy"),
        ("/env/lib/python3.11/site-packages/tally-1.0.dist-info/METADATA", "environment"),
        ("/usr/lib/python3.11/urllib/tally.py", "system"),
        ("/env/lib/python3.11/site-packages/pytest/__init__.py", "environment"),
        ("/workspace/dist/tally-1.0-py3-none-any.whl", "build"),
        ("/workspace/tally.egg-info/SOURCES.txt", "build"),
        ("/workspace/sitecustomize.py", "hook"),
        ("/home/agent/.bashrc", "hook"),
        ("/tests/expected.json", "grading"),
        ("/logs/verifier/reward.json", "grading"),
        ("/proc/17/mem", "process"),
        ("/proc/cpuinfo", "system"),
        ("/tmp/x", "temporary"),
        ("/usr/bin/git", "system"),
    ],
)
def test_path_classes(tiny_task: Task, path: str, kind: str):
    assert path_class(path, tiny_task) == kind


def test_of_a_namespace_only_the_parts_of_the_repository_are_copies(tiny_task: Task):
    environment = dataclasses.replace(tiny_task.environment, packages=("jaraco.text", "zope.one.two"))
    task, site = dataclasses.replace(tiny_task, environment=environment), "/usr/lib/python3/dist-packages"
    inside = {"jaraco/text/__init__.py", "jaraco/text.py", "zope/one/two/x.py", "a/jaraco/text/y"}
    beside = {"jaraco/functools.py", "jaraco/__init__.py", "text/x.py", "zope/one/x.py", "jaraco/a/text.py"}
    kinds = {path: path_class(f"{site}/{path}", task) for path in inside | beside}
    assert {path for path, kind in kinds.items() if kind == "copy"} == inside
    owned = {name for name in ("jaraco.text", "jaraco.text.x", "zope.one.two") if is_own(environment, name)}
    assert owned == {"jaraco.text", "jaraco.text.x", "zope.one.two"}
    assert not any(is_own(environment, name) for name in ("jaraco", "jaraco.texts", "text", "zope.one"))


def test_ordinary_reads_are_dropped_and_processes_have_no_numbers(tiny_task: Task):
    touched = [
        Touch("/proc/17/environ", "read", "cat", 1),
        Touch("/proc/18/environ", "read", "cat", 2),
        Touch("/usr/lib/locale", "read", "ls", 1),
        Touch("/usr/bin/ls", "exec", "ls", 1),
    ]
    found = accesses(touched, tiny_task, 4)
    assert [(a.path, a.path_class, a.mode, a.turn, a.count) for a in found] == [
        ("/proc/N/environ", "process", "read", 4, 3),
        ("/usr/bin/ls", "system", "exec", 4, 1),
    ]


def test_an_agents_tests_are_seen_in_the_tasks_sandbox(tiny_task: Task):
    with open_sandbox(tasks.sandbox_spec(tiny_task, watch=True)) as sandbox:
        assert b"1 failed" in sandbox.exec(tiny_task.test_command).stdout
        found = accesses(sandbox.touched(), tiny_task, 0)
    assert {"/workspace/tally/words.py", "/workspace/tests/conftest.py"} <= {a.path for a in found}
    assert not dataclasses.replace(tasks.sandbox_spec(tiny_task)).watch
