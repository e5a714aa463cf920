"""Patches that want to outlast, flood or break the grader: each ends in time, with a verdict, and leaves nothing."""

from __future__ import annotations

import os
import tempfile
import time
from pathlib import Path

import pytest

from woodshed import grading
from woodshed.grading import results
from woodshed.records import Patch, Task
from woodshed.tasks import gold_patch

LIMIT_S = 3.0
GRACE_S = 90.0  # a fork bomb makes everything on two cores slow
"""Start, stop and look afterwards, on a machine under load."""
HOSTILE = {
    "hangs and will not be told": (
        "import signal, time\nsignal.signal(signal.SIGTERM, signal.SIG_IGN)\nwhile True: time.sleep(9)"
    ),
    "forks for ever": "import os\nwhile True:\n    try: os.fork()\n    except OSError: pass",
    "starts threads for ever": (
        "import threading, time\nwhile True:\n    try: threading.Thread(target=time.sleep, args=(99,)).start()\n"
        "    except RuntimeError: pass"
    ),
    "prints for ever": "while True: print('passed ' * 9999)",
    "takes memory for ever": "hoard = []\nwhile True: hoard.append(bytearray(1 << 26))",
    "takes memory that belongs to no process": (
        "import os\nkept = []\nwhile True:\n    kept.append(os.memfd_create('x'))\n"
        "    os.write(kept[-1], bytes(1 << 27))"
    ),
    "stops everybody": (
        "import os, signal\nif not os.fork():\n    while True: os.kill(os.getppid(), signal.SIGSTOP)\nwhile True: pass"
    ),
    "fills the disk": (
        "for n in range(9999):\n    with open(f'/workspace/tally/{n}', 'wb') as f: f.write(bytes(1 << 26))"
    ),
    "makes files for ever": "import itertools\nfor n in itertools.count(): open(f'/workspace/tally/{n}', 'w').close()",
    "kills its parent and everybody": (
        "import os, signal\nfor pid in (os.getppid(), 1, -1):\n    try: os.kill(pid, signal.SIGKILL)\n"
        "    except OSError: pass"
    ),
    "floods every descriptor": (
        "import os, threading\n"
        "def flood(fd):\n"
        "    try:\n"
        "        while True: os.write(fd, b'x\\n' * 30000)\n"
        "    except OSError: pass\n"
        "for fd in range(3, 256): threading.Thread(target=flood, args=(fd,), daemon=True).start()\n"
        "import time; time.sleep(3)"
    ),
    "closes every descriptor": "import os\nos.closerange(0, 4096)",
    "swaps files for links while it runs": (
        "import os\nfor place in ('/workspace/tests', '/workspace/tally'):\n"
        "    os.rename(place, place + '.old'); os.symlink('/etc', place)"
    ),
    "makes pipes, sockets and deep folders": (
        "import os, socket\nos.mkfifo('/workspace/tally/p'); socket.socket(socket.AF_UNIX).bind('/workspace/tally/s')\n"
        "os.chdir('/workspace/tally')\nfor _ in range(2000):\n    os.mkdir('d'); os.chdir('d')"
    ),
}


def leftovers() -> dict[str, object]:
    """What grading could leave on this machine."""
    ours = Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()
    return {
        "children": [
            pid for pid in ours if "bwrap" in Path(f"/proc/{pid}/cmdline").read_text(errors="replace")
        ],
        "mounts": len(Path("/proc/self/mountinfo").read_text().splitlines()),
        "descriptors": len(os.listdir("/proc/self/fd")),  # noqa: PTH208
    }


@pytest.fixture(scope="module", autouse=True)
def _prepared(tiny_task: Task):
    """What is made once per process is made."""
    grading.grade(tiny_task, Patch({}))


@pytest.mark.parametrize("how", HOSTILE)
def test_it_ends_in_time_and_leaves_nothing(
    tiny_task: Task, how: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))  # others may grade on this machine as well
    before, started = leftovers(), time.monotonic()
    patch = Patch({"tally/words.py": f"{HOSTILE[how]}\n\ndef split(text): ...\n\ndef count(text): ...\n"})
    verdict = grading.grade(tiny_task, patch, settings=grading.GradingSettings(timeout_s=LIMIT_S))
    assert time.monotonic() - started < LIMIT_S + GRACE_S
    assert (verdict.status, verdict.reward, verdict.solved) == ("graded", 0.0, False)
    assert len(verdict.detail) < 20_000
    after = leftovers()
    assert after["children"] == before["children"] and after["mounts"] == before["mounts"]
    assert after["descriptors"] == before["descriptors"]
    assert list(tmp_path.iterdir()) == []


def test_a_huge_patch_is_left_behind(tiny_task: Task):
    """100 MB in one file, a hundred thousand files, absurd names: not written anywhere, and the notes stay short."""
    files: dict[str, str | None] = {"tally/big.py": "x" * 100_000_000, "tally/" + "n" * 1_000_000 + ".py": ""}
    files |= {f"tally/many/{n}.py": "x = 1\n" for n in range(100_000)} | {f"../{n}": "" for n in range(1000)}
    files |= gold_patch(tiny_task).files
    taken, left = grading.crossing(tiny_task, Patch(files))
    assert len(taken) <= 1000 and "tally/big.py" in left
    verdict = grading.grade(tiny_task, Patch(files))
    assert verdict.status == "graded"
    assert len(verdict.detail) < 40_000


def test_a_flood_in_the_channel_takes_no_time():
    started = time.monotonic()
    report = results.read(b"x\n" * (32 << 20), "nonce")
    assert report.faults == ("no start record",)
    assert time.monotonic() - started < 5.0


def test_isolated_code_runs_as_an_agent_would_see_it_and_ordinary_runs_have_another_user(tiny_task: Task):
    gold = gold_patch(tiny_task).files["tally/words.py"] or ""
    seen = "(os.getuid(), os.environ['USER'], 'pytest' in sys.modules)"
    code = f"import os, sys\nassert {seen} in ((1000, 'agent', False), (1001, 'grader', True))\n"
    assert grading.grade(tiny_task, Patch({"tally/words.py": code + gold})).solved
    code = f"import os, sys\nassert {seen} == (1001, 'grader', True)\n"
    assert grading.outcomes_of(tiny_task, Patch({"tally/words.py": code + gold})).solved
