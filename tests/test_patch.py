"""What crosses from an attempt to grading: whole text files, bounded whatever the attempt left behind."""

from __future__ import annotations

import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from woodshed.agent import patch
from woodshed.agent.patch import extract
from woodshed.records import Patch
from woodshed.sandbox import SandboxSpec, open_sandbox

MB = 1 << 20
Extract = Callable[..., Patch]


@pytest.fixture
def left(tmp_path: Path) -> Extract:
    """The patch of a command in a workspace of one file."""
    lower = tmp_path / "lower"
    (lower / "pkg").mkdir(parents=True)
    (lower / "pkg" / "a.py").write_text("x = 1\n")

    def run(command: str, **options: object) -> Patch:
        with open_sandbox(SandboxSpec((lower,))) as sandbox:
            assert sandbox.exec(command, timeout_s=60).outcome == "ok"
            return extract(sandbox, lower, **{"max_bytes": MB, "allowed": ("pkg",), **options})  # type: ignore[arg-type]

    return run


def test_large_files_are_told_by_their_size_and_not_read(left: Extract):
    """A sparse file costs nothing to make; twenty of them took more than a minute to read."""
    command = "for i in $(seq 20); do truncate -s 255M sparse$i; done; truncate -s 1M pkg/edge.txt; echo 2 > pkg/a.py"
    started = time.monotonic()
    found = left(command)
    assert time.monotonic() - started < 10
    assert found.files["pkg/a.py"] == "2\n" and len(found.files["pkg/edge.txt"] or "") == MB
    assert found.skipped == {f"sparse{i}": "too large" for i in range(1, 21)}


def test_many_files_do_not_crowd_out_the_work(left: Extract):
    found = left(
        "mkdir -p a; cd a; seq -f f%05.0f 20000 | xargs touch; cd ..; echo 2 > pkg/a.py; echo 3 > pkg/new.py"
    )
    assert {"pkg/a.py", "pkg/new.py"} <= found.files.keys()
    assert len(found.files) == patch.MOST_FILES
    assert len(found.skipped) == patch.MOST_SKIPPED + 1
    assert found.skipped["..."] == f"and {20_002 - patch.MOST_FILES - patch.MOST_SKIPPED} more"


def test_the_bytes_of_all_files_are_bounded(left: Extract):
    found = left("for i in $(seq 12); do yes $i | head -c 1000000 > big$i; done; echo 2 > pkg/a.py")
    assert sum(len(text or "") for text in found.files.values()) <= patch.MOST_BYTES
    assert found.files["pkg/a.py"] == "2\n"
    assert set(found.skipped.values()) == {f"past {patch.MOST_FILES} files or {patch.MOST_BYTES} bytes"}


def test_files_that_turn_out_to_be_no_text_count_as_read_and_are_not_parsed(left: Extract):
    """A parse of five files of 170,000 lines with one odd byte in a comment took more than half a minute."""
    command = (
        "(yes 'x = 1' | head -n 165000; printf '# \\351\\n') > odd0.py; "
        "for i in $(seq 11); do cp odd0.py odd$i.py; done"
    )
    found = left(command)
    assert not found.files
    reasons = sorted(set(found.skipped.values()))
    assert reasons[0].startswith(f"{patch.NO_SOURCE}: not UTF-8: byte 0xe9 at 990002")
    assert reasons[1:] == [f"past {patch.MOST_FILES} files or {patch.MOST_BYTES} bytes"]
    assert list(found.skipped.values()).count(reasons[0]) == patch.MOST_BYTES // 990_005


def test_odd_entries_are_named_and_end_nothing(left: Extract):
    command = r"""
    mkfifo pipe; ln -s loop loop; ln -s /etc/passwd out; ln -s pkg folder
    /env/bin/python -c 'import socket; socket.socket(socket.AF_UNIX).bind("sock")'
    mkdir shut; echo 1 > shut/a; chmod 000 shut; echo 1 > secret; chmod 000 secret
    printf 1 > $'\xff\xfe.py'; printf 1 > $'new\nline.py'; printf 1 > 'quo"te.py'; printf '\xff' > binary
    printf 1 > "$(printf 'n%.0s' $(seq 255))"
    /env/bin/python - <<'END'
import os
for name, depth in (("d", 2000), ("x" * 250, 60)):
    for _ in range(depth):
        os.mkdir(name); os.chdir(name)
    open("leaf", "w").write("1"); os.chdir("/workspace")
END
    echo 2 > pkg/a.py"""
    found = left(command)
    assert found.files["pkg/a.py"] == "2\n" and found.files["n" * 255] == found.files["new\nline.py"] == "1"
    kinds = dict.fromkeys(("pipe", "loop", "out", "folder", "sock"), "not a regular file")
    assert kinds.items() <= found.skipped.items()
    assert found.skipped["\\xff\\xfe.py"] == "its name is not UTF-8"
    assert found.skipped["binary"] == "not UTF-8: byte 0xff at 0"
    for text in (*found.files, *found.skipped, found.diff):
        text.encode()


def test_the_diff_can_be_applied_whatever_files_are_called(left: Extract, tmp_path: Path):
    found = left(
        """printf 1 > $'new\\nline.py'; printf 2 > 'quo"te.py'; echo ü > ü.py; printf 2 > pkg/a.py"""
    )
    copy = tmp_path / "copy"
    subprocess.run(["cp", "-r", tmp_path / "lower", copy], check=True)
    subprocess.run(["git", "apply", "-"], cwd=copy, input=found.diff.encode(), check=True)
    assert {path: (copy / path).read_text() for path in found.files} == found.files


def test_files_without_a_line_in_common_are_not_compared_for_hours(tmp_path: Path):
    before = "".join(f"{i % 97} {i}\n" for i in range(30_000))
    after = "".join(f"{i % 89} {i}\n" for i in reversed(range(30_000)))
    (tmp_path / "a").write_text(before)
    started = time.monotonic()
    diff = "".join(patch._diff({"a": after}, tmp_path))
    assert time.monotonic() - started < 5
    subprocess.run(["git", "apply", "-"], cwd=tmp_path, input=diff.encode(), check=True)
    assert (tmp_path / "a").read_text() == after
