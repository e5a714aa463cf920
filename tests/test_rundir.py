from __future__ import annotations

import json
import os
import subprocess
import sys
import time

import pytest

from woodshed.records import Hint, RunError, Verdict
from woodshed.runs.files import staged, sweep
from woodshed.runs.folder import DONE, DamagedError, RunDir

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
        "import os, signal, sys; from pathlib import Path; from woodshed.runs.folder import DONE, RunDir;"
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
    with pytest.raises(RunError, match=r"no run at .*empty: the folder has no recipe\.toml"):
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


FULL = """
import json, sys
from pathlib import Path
from woodshed.records import RunError
from woodshed.runs.files import write_atomically
from woodshed.runs.folder import RunDir

disk, tasks = Path(sys.argv[1]), Path(sys.argv[2])
recipe = {"train": "name = 'a'\\n", "eval": "name = 'b'\\ntasks = ['x']\\n"}
runs = {name: RunDir.create(disk / name, recipe=text, manifest={}) for name, text in recipe.items()}
run, big = runs["train"], "0" * 1_000_000
writers = {
    "checkpoint": lambda: run.save_checkpoint("rl-1", lambda at: (at / "w").write_text(big)),
    "manifest": lambda: run.write_manifest({"x": big}),
    "tasks": lambda: run.keep_tasks("eval", sorted(tasks.iterdir())),
    "records": lambda: runs["eval"].append("metrics", [{"x": big}], "eval", 0),
    "text": lambda: write_atomically(run.path / "report.html", big),
    "run": lambda: RunDir.create(disk / "new" / "run", recipe=big, manifest={}),
}
for name, write in writers.items():
    try:
        write()
    except (RunError, OSError) as error:
        left = sorted(str(p.relative_to(disk)) for p in disk.rglob("*") if p.stat().st_size or p.is_dir())
        print(json.dumps([name, str(error), left]))
"""


def test_a_full_disk_leaves_no_part_behind_and_says_how_to_go_on(tmp_path):
    """A file system of 64 KiB, where a hard link to the tasks cannot be made."""
    disk = tmp_path / "disk"
    disk.mkdir()
    for name in ("a", "b"):
        (tmp_path / "set" / name).mkdir(parents=True)
        for number in range(9):
            (tmp_path / "set" / name / f"{number}.py").write_text("x = 1\n" * 1000)
    command = f"mount -t tmpfs -o size=64k none {disk} && exec {sys.executable} - {disk} {tmp_path / 'set'}"
    done = subprocess.run(
        ["unshare", "--user", "--map-root-user", "--mount", "sh", "-c", command],
        input=FULL,
        text=True,
        capture_output=True,
        check=False,
    )
    answers = [json.loads(line) for line in done.stdout.splitlines()]
    assert [name for name, _, _ in answers] == ["checkpoint", "manifest", "tasks", "records", "text", "run"]
    kept = ["eval", "eval/lock", "eval/manifest.json", "eval/recipe.toml"]
    kept += [path.replace("eval", "train") for path in kept]
    for name, message, left in answers:
        assert left == kept, name
        assert "No space left on device" in message and len(message) < 400 and "[(" not in message
        verb = "eval" if name == "records" else "train"
        onward = (
            "The run was not started: free some space there."
            if name == "run"
            else f"`woodshed {verb} --resume {disk / verb}`."
        )
        assert name == "text" or message.endswith(onward), message


def test_what_a_killed_process_left_unfinished_goes_with_the_next_one(run):
    run.unlock()
    script = (
        "import os, signal, sys; from pathlib import Path; from woodshed.runs.folder import RunDir, staged;"
        "run = RunDir.open(Path(sys.argv[1])); run.lock();"
        "begun = staged(run.path / 'policy'); begun.__enter__().mkdir();"
        "run.save_checkpoint('rl-1', lambda _: os.kill(os.getpid(), signal.SIGKILL))"
    )
    subprocess.run([sys.executable, "-c", script, str(run.path)], check=False)
    left = list(run.path.rglob(".*.partial"))
    assert sorted(path.name.split(".")[1] for path in left) == ["policy", "rl-1"]
    with staged(run.path / "report.html") as ours:
        ours.touch()
        run.lock()
        assert list(run.path.rglob(".*.partial")) == [ours.parent]


def test_a_file_never_takes_the_place_of_a_folder(tmp_path):
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "photo").touch()
    with pytest.raises(OSError), staged(tmp_path / "mine") as partial:
        partial.write_text("x")
    sweep(tmp_path)
    assert [path.name for path in tmp_path.rglob("*")] == ["mine", "photo"]


DAMAGED = {
    "a record that is null": b'{"record": null}',
    "a line that is null": b"null",
    "a list": b'{"record": []}',
    "null where a number should be": b'{"record": {"rollout_id": "r", "task_id": "t", "status": "graded",'
    b' "reward": null, "solved": false, "outcomes": {}}}',
    "null where a list should be": b'{"record": {"rollout_id": "r", "integrity": null}}',
    "not JSON": b"\xff\x00{",
}


@pytest.mark.parametrize("kind", DAMAGED)
def test_damaged_records_are_named_or_left_out(run, kind):
    run.append("verdicts", [{}], "eval", 0)
    path = run.path / "verdicts.jsonl"
    line = path.read_bytes().splitlines()[0]
    path.write_bytes(path.read_bytes().replace(line, DAMAGED[kind]))
    place = r"verdicts\.jsonl, eval 0 part 0: "
    with pytest.raises(DamagedError, match=place):
        run.read("verdicts", Verdict)
    with pytest.raises(DamagedError, match=place):
        run.find("verdicts", Verdict, "eval", 0)
    with pytest.raises(DamagedError, match=place):
        list(run.scan("verdicts", Verdict))
    problems: list[str] = []
    assert run.read("verdicts", Verdict, problems=problems) == []
    assert len(problems) == 1 and problems[0].startswith("verdicts.jsonl, eval 0 part 0")


def test_files_of_a_run_that_cannot_be_read_are_named(run):
    (run.path / "rollouts.jsonl").mkdir()
    with pytest.raises(RunError, match=r"rollouts\.jsonl cannot be read: it is a folder"):
        run.has("rollouts")
    run.append("metrics", [{"loss": 1.0}], "train", 0)
    assert run.has("metrics")
    (run.path / "metrics.jsonl").unlink()
    (run.path / "metrics.jsonl").mkdir()
    with pytest.raises(RunError, match=r"metrics\.jsonl cannot be read: it is a folder"):
        run.find("metrics", dict, "train", 0)
    for text in (b"x = [", b"\xff"):
        (run.path / "recipe.toml").write_bytes(text)
        with pytest.raises(RunError, match=r"recipe\.toml cannot be read: .*restore it"):
            run.recipe()
    (run.path / "manifest.json").write_text("[]")
    with pytest.raises(RunError, match=r"manifest\.json cannot be read: it has '\[\]'"):
        _ = run.manifest
    (run.path / "recipe.toml").write_text("grading = 3\n")
    with pytest.raises(RunError, match=r"recipe\.toml: grading = 3 should be a section"):
        run.section("grading")


def test_two_that_begin_one_run_do_not_mix(tmp_path, run):
    (run.path / "recipe.toml").unlink()  # locked, and its recipe not written yet
    with pytest.raises(RunError, match=f"being written by process {os.getpid()}"):
        RunDir.create(run.path, recipe="name = 'two'\n", manifest={})
    assert not (run.path / "recipe.toml").exists()


def test_a_run_that_is_taken_back_takes_nothing_of_others_along(tmp_path):
    (tmp_path / "tasks").mkdir()
    (tmp_path / "tasks" / "mine").touch()
    run = RunDir.create(tmp_path, recipe="", manifest={})
    run.keep_tasks("eval", [])
    run.forget()
    assert sorted(path.name for path in tmp_path.rglob("*")) == ["eval", "mine", "tasks"]
    run = RunDir.create(tmp_path / "runs" / "new", recipe="", manifest={})
    run.append("metrics", [{"loss": 1.0}], "train", 0)
    run.forget()
    assert RunDir.open(run.path).has("metrics")
    RunDir.open(run.path).forget()
    assert RunDir.open(run.path).has("metrics")
