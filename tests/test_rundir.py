from __future__ import annotations

import json
import os
import subprocess
import sys
import time

import pytest

from woodshed.records import Hint, RunError
from woodshed.rundir import DONE, RunDir

HINTS = [
    Hint("r0", 1, "unknown_tool", "Reminder: é ✓ \udcff \u2028 \x85 \x0c"),
    Hint("r1", 0, "no_call", "x\ny"),
]


@pytest.fixture
def run(tmp_path):
    made = RunDir.create(tmp_path / "runs" / "one", recipe="name = 'one'\n", manifest={"seed": 0})
    yield made
    made.unlock()


def test_records_come_back_as_they_were_and_are_made_once(run):
    assert run.once("hints", Hint, "train", 0, lambda: HINTS) == HINTS
    assert run.once("hints", Hint, "train", 0, lambda: pytest.fail("made again")) == HINTS
    assert run.once("hints", Hint, "train", 1, lambda: []) == []
    assert run.once("hints", Hint, "train", 1, lambda: pytest.fail("made again")) == []
    assert run.read("hints", Hint) == [("train", 0, hint) for hint in HINTS]


def test_records_stream_in_order_and_batches_are_named(run):
    run.append("hints", HINTS, "train", 0)
    run.append("hints", HINTS[:1], 'a "quoted\\ phase', 3, part=2)
    assert list(run.scan("hints", Hint)) == run.read("hints", Hint)
    assert run.batches("hints") == [("train", 0, 0), ('a "quoted\\ phase', 3, 2)]
    run.append("metrics", [{"loss": float("nan")}], "train", 0)
    assert next(run.scan("metrics"))[2]["loss"] != 0.0


def test_long_lines_are_told_from_completion_lines_at_once():
    """A pattern that backtracks over whole lines made opening a big run take a minute."""
    line = (
        b'{"phase": "train", "step": 1, "part": 0, "record": {"text": "'
        + b'", "step": 1, "part": 0, ' * 40_000
    )
    began = time.process_time()
    assert DONE.fullmatch(line + b'"}}\n') is None
    assert time.process_time() - began < 0.01


def test_a_torn_last_line_is_ignored_and_does_not_swallow_what_follows(run):
    run.append("metrics", [{"loss": 1.0}], "train", 0)
    with (run.path / "metrics.jsonl").open("a") as file:
        file.write('{"phase": "train", "step": 1, "part": 0, "record": {"lo')
    assert [r for _, _, r in run.read("metrics")] == [{"loss": 1.0}]
    run.append("metrics", [{"loss": 2.0}], "train", 1)
    assert [(s, r) for _, s, r in run.read("metrics")] == [(0, {"loss": 1.0}), (1, {"loss": 2.0})]


def test_a_file_cut_at_any_byte_yields_only_whole_batches(run):
    run.append("hints", HINTS, "train", 0)
    run.append("hints", HINTS[:1], "train", 1)
    path = run.path / "hints.jsonl"
    whole = path.read_bytes()
    for cut in range(len(whole)):
        path.write_bytes(whole[:cut])
        assert len(run.read("hints", Hint)) in (0, 2, 3)


def test_a_batch_without_its_completion_line_is_made_again_and_counted_once(run):
    lines = [{"phase": "train", "step": 0, "part": 0, "record": {"loss": 9.0}}]
    (run.path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert run.find("metrics", dict, "train", 0) is None
    run.append("metrics", [{"loss": 1.0}], "train", 0)
    assert [r for _, _, r in run.read("metrics")] == [{"loss": 1.0}]


def test_a_second_writer_is_refused_with_the_process_that_writes(run):
    with pytest.raises(RunError, match=str(os.getpid())):
        RunDir.open(run.path).lock()


def test_the_lock_of_a_killed_process_is_free(tmp_path, run):
    script = (
        "import os, signal, sys; from pathlib import Path; from woodshed.rundir import DONE, RunDir;"
        "RunDir.create(Path(sys.argv[1]), recipe='', manifest={}); os.kill(os.getpid(), signal.SIGKILL)"
    )
    subprocess.run([sys.executable, "-c", script, str(tmp_path / "killed")], check=False)
    again = RunDir.open(tmp_path / "killed")
    again.lock()
    again.unlock()


def test_a_folder_that_holds_a_run_is_not_overwritten(run):
    with pytest.raises(RunError, match="--resume"):
        RunDir.create(run.path, recipe="", manifest={})


def test_opening_nothing_names_the_runs_beside_it(run):
    with pytest.raises(RunError, match="runs there: one"):
        RunDir.open(run.path.parent / "two")


def test_a_file_or_an_empty_folder_is_no_run(tmp_path, run):
    (tmp_path / "empty").mkdir()
    with pytest.raises(RunError, match=r"recipe\.toml is a file, and a run is a folder; its run is "):
        RunDir.open(run.path / "recipe.toml")
    with pytest.raises(RunError, match=r"no run at .*empty: the folder holds no recipe\.toml"):
        RunDir.open(tmp_path / "empty")


def test_a_damaged_batch_is_left_out_whole(run):
    for part in range(3):
        run.append("gate", [{"n": part}, {"n": part + 10}], "train", 0, part=part)
    path = run.path / "gate.jsonl"
    path.write_text(path.read_text().replace('{"n": 11}', '{"n: 11}'))
    problems: list[str] = []
    kept = [record["n"] for _, _, record in run.scan("gate", problems=problems)]
    assert kept == [0, 10, 2, 12] and len(problems) == 1 and "gate.jsonl, train 0 part 1" in problems[0]
    with pytest.raises(RunError, match="part 1"):
        list(run.scan("gate"))


def test_a_checkpoint_is_whole_or_absent(run):
    def broken(folder):
        (folder / "weights").write_text("half")
        raise OSError(28, "No space left on device")

    with pytest.raises(RunError, match="No space left"):
        run.save_checkpoint("rl-000001", broken)
    assert run.checkpoints("rl-") == []
    run.save_checkpoint("rl-000001", lambda folder: (folder / "weights").write_text("whole"))
    assert [p.name for p in run.checkpoints("rl-")] == ["rl-000001"]
