"""Inputs that nobody would write, to everything of grading that reads what others wrote.

A slice of a second or two for each target; before a release minutes, as in

    WOODSHED_FUZZ_S=600 pytest tests/adversaries/test_fuzz.py
"""

from __future__ import annotations

import json
import os
import random
import shutil
import string
import time
from collections.abc import Iterator
from pathlib import Path

from woodshed import grading, tasks
from woodshed.grading import patches, results
from woodshed.records import Patch, Task, TaskError
from woodshed.tasks import folder

SECONDS = float(os.environ.get("WOODSHED_FUZZ_S", "1.5"))
NONCE = "0123456789abcdef"
JUNK = [None, True, 0, -1, 1e308, "", "x" * 1000, [], {}, ["t"], {"id": 1}, "passed", "\ud800", "a\0b"]
PARTS = [
    "tally",
    "tests",
    "..",
    ".",
    "",
    "~",
    "conftest.py",
    "a\nb",
    "\ud800",
    "\0",
    "CON",
    "x" * 300,
    "words.py",
]
PARTS += ["\u202e", "*", "-rf", "__pycache__", ".git", "é", "e\u0301", "x.pth", "tally.egg-info", "/", "\\"]


def rounds() -> Iterator[random.Random]:
    """A new source of chance for each round, until the time is up; at least 50."""
    end, number = time.monotonic() + SECONDS, 0
    while time.monotonic() < end or number < 50:
        yield random.Random(number)
        number += 1
    print(f"{number} rounds")


def record(chance: random.Random) -> bytes:
    kind = chance.choice(["start", "test", "sentinel", "collection", "end", "lie", chance.choice(JUNK)])
    keys = [
        "id",
        "outcome",
        "seconds",
        "message",
        "name",
        "path",
        "count",
        "workspace",
        "packages",
        "patched",
        "kind",
    ]
    body = {key: chance.choice(JUNK) for key in chance.sample(keys, chance.randint(0, 8))} | {"kind": kind}
    whole = {
        "test": {"id": "t", "outcome": "passed", "seconds": 0.1, "message": ""},
        "sentinel": {"name": chance.choice(results.SENTINELS), "outcome": "failed"},
        "end": {"count": 1, "workspace": "/workspace", "packages": {}, "patched": []},
    }.get(kind if isinstance(kind, str) else "", {})
    if chance.random() < 0.6:
        body |= whole
    mark = NONCE if chance.random() < 0.8 else chance.choice(["", "forged", NONCE[:-1], " "])
    return f"{mark} {json.dumps(body)}\n".encode()


def test_whatever_comes_through_the_channel():
    """Never an exception; and believed only where every part of a whole session is there."""
    for chance in rounds():
        data = b"".join(record(chance) for _ in range(chance.randint(0, 12)))
        if chance.random() < 0.5 and data:
            noisy = bytearray(data)
            for _ in range(chance.randint(1, 6)):
                place = chance.randrange(len(noisy))
                noisy[place : place + chance.randint(0, 5)] = chance.randbytes(chance.randint(0, 5))
            data = bytes(noisy)
        report = results.read(data, NONCE)
        if not report.faults:
            assert data.count(b'"sentinel"') >= len(results.SENTINELS)
            assert b'"start"' in data and b'"end"' in data


def path(chance: random.Random) -> str:
    text = "/".join(chance.choice(PARTS) for _ in range(chance.randint(1, 4)))
    return text if chance.random() < 0.7 else "tally/" + "".join(chance.choices(string.printable, k=5))


def test_whatever_a_patch_names(tiny_task: Task, tmp_path: Path):
    """Only files below the allowed folder are written, whatever the names, and nothing else changes on this machine."""
    guard = tmp_path / "guard"
    guard.write_text("untouched")
    for number, chance in enumerate(rounds()):
        texts = ["x = 1\n", "", "\ud800", "\0" * 10, "\ufeff" + "y" * 1000, None]
        patch = Patch({path(chance): chance.choice(texts) for _ in range(chance.randint(1, 12))})
        taken, left = grading.crossing(tiny_task, patch)
        assert taken.keys() | left.keys() == patch.files.keys()
        layer = tmp_path / f"layer-{number % 7}"
        shutil.rmtree(layer, ignore_errors=True)
        layer.mkdir()
        patches.lay(layer, taken)
        written = [file.relative_to(layer).as_posix() for file in layer.rglob("*") if file.is_file()]
        assert set(written) == {name for name, data in taken.items() if data is not None}
        assert all(f"{name}/".startswith("tally/") and not folder.is_protected(name) for name in written)
    assert guard.read_text() == "untouched"


def damage(root: Path, chance: random.Random) -> None:
    files = [file for file in sorted(root.rglob("*")) if file.is_file() and not file.is_symlink()]
    file = chance.choice(files)
    how = chance.randrange(6)
    if how == 0:
        data = bytearray(file.read_bytes() or b"x")
        data[chance.randrange(len(data))] ^= 1 << chance.randrange(8)
        file.write_bytes(data)
    elif how == 1:
        file.unlink()
    elif how == 2:
        file.write_bytes(chance.randbytes(chance.randint(0, 100)))
    elif how == 3:
        file.unlink()
        file.symlink_to(chance.choice(["/etc/passwd", "../../..", file.name, "nowhere"]))
    elif how == 4:
        os.mkfifo(file.with_name(f"pipe-{chance.randrange(1 << 30)}"))
    else:
        file.write_text(json.dumps(chance.choice(JUNK)), errors="replace")


def test_whatever_a_task_folder_holds(tiny_task: Task, tmp_path: Path):
    """A damaged task is refused with a TaskError, or what was damaged does not matter to it."""
    for chance in rounds():
        copy = tmp_path / tiny_task.name
        shutil.rmtree(copy, ignore_errors=True)
        shutil.copytree(tiny_task.folder, copy, symlinks=True)
        for _ in range(chance.randint(1, 3)):
            damage(copy, chance)
        try:
            task = folder.load(copy)
        except TaskError:
            continue
        assert task.id == tiny_task.id
        assert tasks.protected_files(task) == tasks.protected_files(tiny_task)


def test_no_reward_for_noise(tiny_task: Task):
    """Random files in place of the solution, judged in full: a verdict, and no reward."""
    for number in range(max(2, int(SECONDS / 3))):
        chance = random.Random(number)
        noise = "".join(chr(chance.choice([*range(32, 127), 10, 9, 0x202E, 0xFEFF, 0])) for _ in range(400))
        starts = ["", "def count(text): return ", "raise ", "import os; os.", "#"]
        verdict = grading.grade(
            tiny_task,
            Patch({"tally/words.py": chance.choice(starts) + noise}),
            settings=grading.GradingSettings(timeout_s=20),
        )
        assert (verdict.status, verdict.reward) == ("graded", 0.0)
