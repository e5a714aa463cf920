"""The verbs: exit codes, messages, and what stays clean in a pipe."""

from __future__ import annotations

import dataclasses
import errno
import importlib
import os
import re
import shutil
import signal
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer.main
from typer.testing import CliRunner, Result

from woodshed import __version__
from woodshed.cli import app, terminal
from woodshed.cli.terminal import say
from woodshed.evals import measures
from woodshed.records import ErrorKind, Patch, Rollout, Task, Turn
from woodshed.runs import pace
from woodshed.runs.files import WAYS_OUT, way_out
from woodshed.runs.folder import RunDir
from woodshed.tasks import folder

WOODSHED = [sys.executable, "-m", "woodshed"]


def woodshed(*arguments: str) -> Result:
    return CliRunner().invoke(app, arguments)


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    """A run with one faulty attempt before and a good one after, at each of many tasks."""
    run = RunDir.create(tmp_path / "first", recipe='name = "first"\n', manifest={})
    kinds: list[ErrorKind | None] = ["no_call", None]
    for step, kind in enumerate(kinds):
        turn = Turn((1,), 1, (2,), (-0.5,), ((step, 1),), "stop", "x", (), (), kind)
        made = [
            Rollout(f"eval-{step}-{n}-0", str(n), str(n), 0, 0, (turn,), Patch({}), "max_turns", 1.0)
            for n in range(40)
        ]
        run.append("rollouts", made, "eval", step)
    return run


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["report", "runs/none"], "RunError: no run at runs/none"),
        (
            ["tasks", "check", "tasks/none"],
            "TaskError: no task set at tasks/none. Make one with `woodshed tasks make",
        ),
        (["eval", "tasks/none"], "TaskError: no task set at tasks/none"),
        (
            ["eval", "tasks/none", "agent.max_turn=3"],
            "RecipeError: settings: unknown setting 'agent.max_turn'; did",
        ),
        (["eval", "tasks/none", "--attempts", "x"], "Invalid value for '--attempts': give a whole number"),
        (
            ["eval", "tasks/none", "--attempts", "0"],
            "RecipeError: settings: attempts = 0: give a whole number of attempts, from 1",
        ),
        (
            ["eval", "agent.max_turns=3"],
            "RecipeError: settings: tasks = []: give a list of at least 1, each a path",
        ),
        (["train", "recipes/none.toml"], "RecipeError: no recipe at recipes/none.toml"),
        (["train", "--resume", "runs/none"], "RunError: no run at runs/none"),
        (["train"], "give either a recipe or --resume RUN"),
        (["train", "a.toml", "--resume", "runs/none"], "give either a recipe or --resume RUN"),
        (["tain"], "No such command 'tain'"),
        (
            ["tasks", "make", ".", "--out", "made", "--levels", "4-9"],
            "TaskError: levels '4-9' are outside 0 to 6",
        ),
        (
            ["tasks", "make", ".", "--out", "made", "--levels", "all"],
            "TaskError: levels 'all' cannot be read",
        ),
        (["tasks", "make", ".", "--out", "made", "--operators", "stubb"], "TaskError: settings: operators"),
        (
            ["tasks", "export", "x", "--out", "y", "--format", "z"],
            "TaskError: unknown format 'z'; known are",
        ),
        (["tasks", "stats", "tasks/none"], "TaskError: no task set at tasks/none"),
        (["tasks", "make", "", "--out", "made"], "TaskError: no folder ''"),
        (["tasks", "make", "none", "--out", "a/b/made"], "TaskError: no folder 'none'"),
        (["tasks", "make", ".", "--out", "made", "limit=-1"], "TaskError: settings: limit = -1"),
        (
            ["eval", "--resume", "runs/none", "--attempts", "3"],
            "give either task folders, or only --resume RUN",
        ),
        (["monitor", "bench", "x", "--out", "/proc/x/y"], "/proc/x/y cannot be written: No such file"),
        (["monitor", "bench", "x", "--out", "/"], "is a directory"),
        (["monitor", "bench", "--trace", "none.jsonl"], "does not exist"),
        (["report", "runs/none", "--out", "/proc/x/y"], "/proc/x/y cannot be written: No such file"),
    ],
)
def test_mistakes_exit_with_2_and_one_message(
    arguments: list[str], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.chdir(tmp_path)
    result = woodshed(*arguments)
    assert result.exit_code == 2, result.output
    assert message in " ".join(result.stderr.split()) and "Traceback" not in result.output
    assert not list(tmp_path.iterdir()), "nothing half-written"


LONG = "x" * 300


@pytest.mark.parametrize(
    ("arguments", "reason", "advice"),
    [
        (["report", f"runs/{LONG}"], "no run at runs/xxx", ""),
        (["tasks", "check", LONG], "too long", "shorter name"),
        (["tasks", "stats", LONG], "too long", "shorter name"),
        (["train", "short.toml", f"name={LONG}"], "File name too long", "choose a shorter name"),
        (["train", "short.toml", f"tasks.train=['{LONG}']"], "File name too long", "Choose a shorter name"),
        (["train", "short.toml", "runs=short.toml/runs"], "Not a directory", "one of them is a file"),
        (["train", "short.toml", "runs=loop/runs"], "Too many levels of symbolic links", "form a loop"),
        (["eval", "loop", "--name", "x"], "no task set at loop", ""),
        (["train", "short.toml", "runs=/sys/runs"], "", "choose another location"),
        (["train", "short.toml/x"], "Not a directory", ""),
        (["export", f"{LONG}/run", "--to", "atif"], "File name too long", "Choose a shorter name"),
    ],
)
def test_advice_about_odd_paths_fits_their_fault(
    arguments: list[str], reason: str, advice: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.chdir(tmp_path)
    Path("loop").symlink_to("loop")
    Path("short.toml").write_text('name = "short"\n')
    result = woodshed(*arguments)
    said = " ".join(result.stderr.split())
    assert result.exit_code == 2, (result.output, result.exception)
    assert (
        reason in said
        and advice.lower() in said.lower()
        and "free some space" not in said
        and len(said) < 700
    )
    assert not list(tmp_path.glob("*/*")), "nothing half-written"


def test_every_way_out_fits_its_fault():
    """Only a full disk needs room; a reason that is not known is not advised about."""
    for number, advice in WAYS_OUT.items():
        assert ("space" in advice) == (number in (errno.ENOSPC, errno.EDQUOT)), os.strerror(number)
        assert way_out(OSError(number, os.strerror(number))) == advice
    assert way_out(OSError(errno.EBADF, "x")) == "fix that" == way_out(ValueError("x"))


def test_a_bad_task_exits_with_1_and_its_reason(tmp_path: Path):
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken" / "task.toml").write_text("")
    result = woodshed("tasks", "check", str(tmp_path))
    assert result.exit_code == 1
    assert re.match(rf"bad  .*{tmp_path / 'broken'}.*\n0 of 1 tasks are proven\n$", result.stdout, re.S)


def test_tasks_are_proven_again(tiny_task: Task, tmp_path: Path):
    """One whose visible tests pass, and one whose do not."""
    good = folder.write(
        dataclasses.replace(
            tiny_task, id="", name="good", test_command="python -m pytest -q tests/test_words.py"
        ),
        tmp_path / "good",
        workspace=tiny_task.folder / "environment" / "workspace",
        tests=folder.protected_files(tiny_task),
        gold={path: (text or "").encode() for path, text in folder.gold_patch(tiny_task).files.items()},
    )
    result = woodshed("tasks", "check", str(good.folder))
    assert result.exit_code == 0 and result.stdout == "1 of 1 tasks are proven\n"
    assert f"next: woodshed eval {good.folder} --adapter" in result.stderr
    result = woodshed("tasks", "check", str(good.folder), str(tiny_task.folder))
    assert result.exit_code == 1
    assert result.stdout.startswith(f"bad  {tiny_task.name}: the visible tests do not pass")
    assert result.stdout.endswith("1 of 2 tasks are proven\n")


def test_what_a_repository_says_cannot_steer_the_terminal(capsys: pytest.CaptureFixture[str]):
    say("clean \x1b[2J\x07 title \x9d\ttab")
    assert capsys.readouterr().out == "clean \\x1b[2J\\x07 title \\x9d\ttab\n"


@pytest.mark.parametrize(
    "arguments",
    [
        ["monitor", "bench", "--cases", "nope.jsonl"],
        ["tasks", "leaks", "{tasks}", "--own", "--rules", "nope.json"],
        ["monitor", "bench", "{tasks}", "--each", "-1"],
        ["tasks", "make", "{tasks}", "--out", "x", "--jobs", "0"],
        ["tasks", "export", "{tasks}", "--out", "/proc/x.jsonl"],
        ["eval", "{tasks}", "--name", "a/../../b"],
        ["eval", "{tasks}", "--model", ""],
        ["eval", "{tasks}", "--model", "", "--endpoint", "http://127.0.0.1:1"],
        ["train", "{recipe}", "rl.steps=-3", "--dry-run"],
    ],
)
def test_what_cannot_be_is_refused(
    tiny_task: Task, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, arguments: list[str]
):
    monkeypatch.chdir(tmp_path)
    recipe = Path(__file__).parents[1] / "recipes" / "quickstart.toml"
    result = woodshed(*[each.format(tasks=tiny_task.folder, recipe=recipe) for each in arguments])
    assert result.exit_code == 2, result.output
    assert list(tmp_path.iterdir()) == []


def test_a_set_is_shown_and_exported(tiny_task: Task, tmp_path: Path):
    shutil.copytree(tiny_task.folder, tmp_path / "set" / tiny_task.name)
    result = woodshed("tasks", "stats", str(tmp_path / "set"))
    assert result.exit_code == 0 and result.stdout.splitlines().count("1 tasks") == 1
    assert (tmp_path / "set" / "stats.svg").read_text().startswith("<svg")
    out = tmp_path / "out.jsonl"
    result = woodshed("tasks", "export", str(tmp_path / "set"), "--format", "swesmith", "--out", str(out))
    assert result.exit_code == 0 and result.stdout == f"1 tasks in {out}\n"
    assert len(out.read_text().splitlines()) == 1


def test_view_without_a_terminal_ends_at_once_and_says_what_does_without(run: RunDir):
    result = woodshed("view", str(run.path))
    assert result.exit_code == 2 and "view needs a terminal" in result.output
    assert "woodshed report" in result.output


def test_dry_run_prints_the_resolved_recipe_and_nothing_else(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    Path("short.toml").write_text('name = "short"\n[rl]\nsteps = 2\n')
    result = woodshed("train", "short.toml", "rl.steps=4", "--dry-run")
    assert result.exit_code == 0
    recipe = tomllib.loads(result.stdout)
    assert recipe == {"name": "short", "rl": {"steps": 4}}, "what is as usual is not printed"
    explained = woodshed("train", "short.toml", "--explain")
    assert tomllib.loads(explained.stdout) == {"name": "short", "rl": {"steps": 2}}
    assert (
        "# Optimizer steps of RL and targeted feedback. (a whole number of steps, from 1)" in explained.stdout
    )
    assert "next: woodshed train short.toml rl.steps=4" in result.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["short.toml"]


def test_report_shows_before_and_after(run: RunDir):
    result = woodshed("report", str(run.path))
    assert result.exit_code == 0
    line = next(line for line in result.stdout.splitlines() if line.startswith("invalid-call rate"))
    change = ["-100.0 pp [-100.0, -91.2]", "8.8 pp"]
    figures = ["invalid-call rate", "100.0% [91.2, 100.0]", "0.0% [0.0, 8.8]", *change]
    assert re.split(r"  +", line) == figures
    assert f"report: {run.path / 'report.html'}" in result.stdout
    assert result.stderr.splitlines()[-1] == f"next: woodshed view {run.path}"


def test_a_report_says_by_its_exit_code_whether_it_is_whole(run: RunDir, tmp_path: Path):
    file = woodshed("report", str(run.path / "recipe.toml"))
    assert file.exit_code == 2 and "is a file, and a run is a folder" in file.stderr
    empty = RunDir.create(tmp_path / "empty", recipe='name = "empty"\n', manifest={})
    nothing = woodshed("report", str(empty.path))
    assert nothing.exit_code == 1 and f"{empty.path}: nothing was measured yet" in nothing.stderr
    assert (empty.path / "report.html").exists()
    run.append("rollouts", [{"id": "x", "colour": "red"}], "eval", 0, part=1)
    damaged = woodshed("report", str(run.path))
    assert damaged.exit_code == 1 and "Rollout has no field 'colour'" in damaged.stderr
    assert "invalid-call rate" in damaged.stdout, "the rest is there"


def test_seeds_of_an_arm_are_joined_by_commas(run: RunDir, tmp_path: Path):
    other = RunDir.create(tmp_path / "second", recipe='name = "second"\nmodel = "x"\n', manifest={})
    for kind in ("rollouts", "verdicts"):
        if (run.path / f"{kind}.jsonl").exists():
            shutil.copy(run.path / f"{kind}.jsonl", other.path)
    page = tmp_path / "page.html"
    joined = woodshed("report", f"{run.path},{other.path}", "--out", str(page))
    assert joined.exit_code == 0, joined.output
    assert "(2 seeds)" in page.read_text("utf-8")
    apart = woodshed("report", str(run.path), str(other.path), "--out", str(page))
    assert apart.exit_code == 0 and "seeds)" not in page.read_text("utf-8")
    assert f"next: woodshed eval compare {run.path} {other.path}" in apart.stderr


def test_ctrl_c_exits_with_130():
    process = subprocess.Popen(
        [*WOODSHED, "doctor"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONUNBUFFERED": "1"},
    )
    assert process.stdout is not None
    assert process.stdout.readline().startswith("yes  python")
    process.send_signal(signal.SIGINT)
    _, said = process.communicate(timeout=60)
    assert process.returncode == 130
    assert "interrupted;" in said and "Traceback" not in said


def test_a_reader_that_leaves_early_is_no_error(run: RunDir):
    command = f"{' '.join(WOODSHED)} report {run.path} | true; exit ${{PIPESTATUS[0]}}"
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, timeout=60)
    assert done.returncode in (0, 141)
    assert done.stderr == ""


def test_a_missing_extra_names_itself(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    (tmp_path / "short.toml").write_text('name = "short"\n')
    for part in ("stages", "learning"):
        package = importlib.import_module(f"woodshed.{part}")
        monkeypatch.setattr(sys.modules["woodshed"], part, package)  # undone, it is this one again
    for name in [name for name in sys.modules if name.startswith(("woodshed.stages", "woodshed.learning"))]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "torch", None)
    result = woodshed("train", str(tmp_path / "short.toml"))
    assert result.exit_code == 2
    assert "needs torch; install it with pip install 'woodshed[train]'" in result.stderr


def test_progress_without_a_terminal(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch):
    now = [0.0]
    monkeypatch.setattr(pace.time, "monotonic", lambda: now[0])
    with terminal.progress_bars() as progress:
        for done in range(9):
            now[0] += 9
            progress(done, 8, f"train 0: attempts, turn {done}")
        progress(1, 1, "quick")
        for _ in range(7):
            now[0] += 6
            progress(0, 0, "loading it")
    seen = capsys.readouterr()
    assert seen.out == ""
    assert seen.err.splitlines() == [
        "train 0: attempts, turn 0: 0/8",
        "train 0: attempts, turn 4: 4/8 after 36 s, about 36 s left",
        "train 0: attempts, turn 8: 8/8 after 72 s",
        "loading it",
        "loading it after 36 s",
    ]


def test_no_figure_is_cut_at_its_comma():
    for text, stage, detail in (
        ("sft, loss 0.41", "sft", "loss 0.41"),
        ("reading 1,024 files", "reading 1,024 files", ""),
        (
            "update 4 of 8 (33% invalid calls, reward 0.02), 6 min left",
            "update 4 of 8 (33% invalid calls, reward 0.02)",
            "6 min left",
        ),
        ("an open (bracket, that ends nowhere", "an open (bracket", "that ends nowhere"),
        ("", "", ""),
    ):
        assert terminal.parts(text) == (stage, detail)


def test_the_rest_is_estimated_by_what_was_measured(monkeypatch: pytest.MonkeyPatch):
    """Waiting for other work on the machine counts, and an evaluation is not taken for a step."""
    now = [0.0]
    monkeypatch.setattr(pace.time, "monotonic", lambda: now[0])
    laps = pace.Laps()
    for kind, seconds in (("evaluation", 120.0), ("step", 60.0)):
        assert laps.left({"step": 3, "evaluation": 1}) == ""
        with laps.timing(kind):
            now[0] += seconds
    assert laps.left({"step": 3, "evaluation": 1}) == "about 5 min left"
    with laps.timing("step"):
        now[0] += 180.0
    assert laps.left({"step": 3, "evaluation": 1}) == "about 8 min left"
    assert laps.left({"step": 0, "evaluation": 0}) == ""
    assert [pace.duration(s) for s in (36, 780, 7500)] == ["36 s", "13 min", "2 h 5 min"]


SHELL = {
    "woodshed ev": "eval",
    "woodshed eval tasks --li": "--limit",
    "woodshed train r.toml rl.ste": "rl.steps=",
}


@pytest.mark.parametrize("typed", SHELL)
def test_the_shell_completes_commands_options_and_settings(typed: str):
    """Also the options of the short form of `eval run`."""
    asked = {
        "_WOODSHED_COMPLETE": "complete_bash",
        "COMP_WORDS": typed,
        "COMP_CWORD": str(len(typed.split()) - 1),
    }
    result = CliRunner().invoke(app, [], prog_name="woodshed", env=asked)
    assert result.output.split() == [SHELL[typed]]


def test_version(capsys: pytest.CaptureFixture[str]):
    done = subprocess.run([*WOODSHED, "--version"], capture_output=True, text=True, check=False)
    assert done.returncode == 0 and done.stdout == f"woodshed {__version__}\n"


def test_a_difference_larger_than_any_is_none():
    share = next(measure for measure in measures.MEASURES if measure.key == "invalid_calls")
    assert measures.write_detectable(share, 0.08) == "8.0 pp"
    assert measures.write_detectable(share, 1.3) == "none"


def test_columns_are_aligned(capsys: pytest.CaptureFixture[str]):
    terminal.say_columns([["", "before"], ["solve rate", "12%"]])
    assert capsys.readouterr().out == "            before\nsolve rate  12%\n"


COSTS = ("time", "tokens", "cost", "cost for each")


def test_eval_measures_a_model_and_keeps_everything(
    tiny_task: Task, tiny_model_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.chdir(tmp_path)
    result = woodshed(
        *[
            "eval",
            str(tiny_task.folder),
            "--model",
            str(tiny_model_dir),
            "--attempts",
            "2",
            "--name",
            "first",
        ],
        *["agent.max_turns=2", "agent.turn_tokens=16"],
    )
    assert result.exit_code == 0, result.output
    assert [line for line in result.stderr.splitlines() if line.startswith("next:")] == [
        "next: woodshed view runs/first"
    ], "what belongs to an evaluation, and no training by another recipe"
    assert re.search(r"^invalid-call rate  +\d+\.\d%  +\d / \d turns +-$", result.stdout, re.M), (
        "one task: no interval"
    )
    assert (
        "tasks 1, attempts 2, of these void 0" in result.stdout
        and "report: runs/first/report.html" in result.stdout
    )
    run = RunDir.open(Path("runs/first"))
    assert len(run.read("rollouts", Rollout)) == 2 and len(run.read("verdicts")) == 2
    assert [(phase, step) for phase, step, _ in run.read("metrics")] == [("eval", 0)]
    assert tomllib.loads((run.path / "recipe.toml").read_text())["agent"]["max_turns"] == 2
    again = woodshed("eval", str(tiny_task.folder), "--model", str(tiny_model_dir), "--name", "first")
    assert (
        again.exit_code == 2 and "already has a run. Resume it with `woodshed eval --resume" in again.stderr
    )
    shutil.rmtree(run.path / "tasks")  # as where it was killed before it had kept its tasks
    wall_s = run.manifest["wall_s"]
    resumed = woodshed("eval", "--resume", "runs/first")
    assert resumed.exit_code == 0, resumed.output
    assert "runs/first is finished: nothing is left to do" in resumed.stderr
    assert run.manifest["wall_s"] == wall_s > 0, "looking at it costs nothing"
    lines = [line.split("  ")[0] for line in resumed.stdout.splitlines()]
    assert [line for line in lines if line in COSTS] == list(COSTS), "costs are four lines"
    assert len(run.read("rollouts", Rollout)) == 2 and (run.path / "tasks" / "eval" / tiny_task.name).is_dir()


def test_two_tasks_of_one_name_are_refused(tiny_task: Task, tmp_path: Path):
    copy = tmp_path / tiny_task.name
    shutil.copytree(tiny_task.folder, copy)
    result = woodshed("eval", str(tiny_task.folder), str(copy))
    assert result.exit_code == 2
    assert f"TaskError: two tasks are named '{tiny_task.name}'" in result.stderr


def test_train_measures_before_and_after_and_a_finished_run_stays(
    tiny_task: Task, tiny_model_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.chdir(tmp_path)
    Path("short.toml").write_text(
        f"""
        name = "short"
        note = "Two attempts prove nothing."
        [tasks]
        train = ["{tiny_task.folder}"]
        heldout = ["{tiny_task.folder}"]
        [policy]
        model = "{tiny_model_dir}"
        lora_rank = 2
        [agent]
        max_turns = 1
        turn_tokens = 8
        [rollout]
        attempts = 2
        [rl]
        steps = 1
        tasks_per_step = 1
        """
    )
    trained = woodshed("train", "short.toml")
    assert trained.exit_code == 0, trained.output
    assert trained.stdout.startswith("Two attempts prove nothing.\n")
    assert re.search(r"^ +before +after +change", trained.stdout, re.M)
    assert (
        "report: runs/short/report.html" in trained.stdout
        and "next: woodshed report runs/short" in trained.stderr
    )
    before = {path: path.read_bytes() for path in Path("runs/short").glob("*.jsonl")}
    resumed = woodshed("train", "--resume", "runs/short")
    assert resumed.exit_code == 0 and resumed.stdout == trained.stdout
    assert {path: path.read_bytes() for path in Path("runs/short").glob("*.jsonl")} == before


def test_a_run_goes_on_with_its_own_verb(tmp_path: Path, run: RunDir):
    run.unlock()
    measured = RunDir.create(tmp_path / "measured", recipe='name = "m"\ntasks = ["x"]\n', manifest={})
    measured.unlock()
    result = woodshed("train", "--resume", str(measured.path))
    assert result.exit_code == 2
    assert f"is an evaluation; resume it with `woodshed eval --resume {measured.path}`" in result.stderr
    result = woodshed("eval", "--resume", str(run.path))
    assert result.exit_code == 2
    assert f"is a run of training; resume it with `woodshed train --resume {run.path}`" in result.stderr
    result = woodshed("export", str(measured.path), "--to", "hf")
    assert result.exit_code == 2 and "measured a model and trained none" in result.stderr


@pytest.mark.parametrize(
    "arguments",
    [
        ["export", "{run}", "--to", "atif"],
        ["grade", "{run}"],
        ["report", "{run}"],
        ["train", "--resume", "{run}"],
    ],
)
def test_a_damaged_recipe_of_a_run_is_named(run: RunDir, arguments: list[str]):
    run.unlock()
    (run.path / "recipe.toml").write_text("name = [")
    result = woodshed(*[each.format(run=run.path) for each in arguments])
    assert result.exit_code == 2, result.output
    assert f"RunError: {run.path / 'recipe.toml'} cannot be read" in result.stderr


def test_a_bad_task_does_not_hide_the_verdicts_on_the_others(tiny_task: Task, tmp_path: Path):
    """Whatever its texts hold: all of them once stopped the command at the first bad one, or hung."""
    for name in ("deep", "list", "pipe"):
        shutil.copytree(tiny_task.folder, tmp_path / "set" / name, symlinks=True)
    (tmp_path / "set/deep/tests/expected.json").write_text("[" * 100_000)
    (tmp_path / "set/list/task.toml").write_text('schema_version = "1.4"\nmetadata = 3\n')
    (tmp_path / "set/pipe/instruction.md").unlink()
    os.mkfifo(tmp_path / "set/pipe/instruction.md")
    result = woodshed("tasks", "check", str(tmp_path / "set"))
    assert result.exit_code == 1, result.output
    bad = [line for line in result.stdout.splitlines() if line.startswith("bad  ")]
    assert [re.search(r"levels deep|not made by|is a pipe", line) is not None for line in bad] == [True] * 3
    assert "0 of 3 tasks are proven" in result.stdout


def test_a_recipe_without_a_folder_for_runs_is_refused_before_the_rest(tmp_path: Path):
    result = woodshed("train", "recipes/quickstart.toml", "--dry-run", "runs=")
    assert result.exit_code == 2 and "runs = '': name a folder" in result.stderr


def test_learning_from_a_run_without_its_tasks_names_them(run: RunDir, tiny_task: Task, tmp_path: Path):
    rules = str(tmp_path / "rules.json")
    result = woodshed(
        "tasks", "leaks", str(tiny_task.folder), "--own", "--rules", rules, "--learn", str(run.path)
    )
    assert result.exit_code == 2 and f"{run.path} does not hold its tasks" in result.stderr
    assert not Path(rules).exists()


def test_no_task_is_a_no_and_nothing_is_recommended(tmp_path: Path):
    (tmp_path / "half").mkdir()
    (tmp_path / "half/half.py").write_text("def half(x):\n    return x / 2\n")
    (tmp_path / "half/test_half.py").write_text("import half\ndef test_half(): assert half.half(2) == 1\n")
    arguments = ["tasks", "make", str(tmp_path / "half"), "--out", str(tmp_path / "made")]
    result = woodshed(*arguments, "--operators", "remove_command")  # it has no commands
    assert result.exit_code == 1, result.output
    assert result.stdout.startswith("0 tasks of ") and "next:" not in result.stderr
    assert "no candidate became a task" in result.stderr and "building half" in result.stderr


def test_a_run_that_stops_at_a_mistake_leaves_its_name_free(
    tiny_task: Task, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.chdir(tmp_path)
    Path("short.toml").write_text(f'name = "short"\n[tasks]\ntrain = ["{tiny_task.folder}"]\n')
    for mistake in ("policy.model=nonsense", "tasks.train=['none']"):
        result = woodshed("train", "short.toml", mistake)
        assert result.exit_code == 2 and "already holds" not in result.stderr, result.output
        assert not Path("runs/short").exists()


def test_attempts_without_a_verdict_are_not_compared(run: RunDir):
    result = woodshed("eval", "compare", str(run.path), str(run.path))
    assert result.exit_code == 2
    assert f"not graded yet; `woodshed train --resume {run.path}` grades them" in result.stderr


def test_help_names_kinds_of_values_in_a_persons_words():
    command = typer.main.get_command(app)

    def texts(command: Any, names: tuple[str, ...]) -> Iterator[str]:
        context = command.make_context(" ".join(names), [], resilient_parsing=True)
        yield command.get_help(context)
        for name, inner in getattr(command, "commands", {}).items():
            yield from texts(inner, (*names, name))

    found = list(texts(command, ("woodshed",)))
    assert len(found) > 20 and "--limit NUMBER" in "".join(found)
    for text in found:
        assert not re.search(r"<(str|int|float|list|bool|path)|\bint range", text), text
