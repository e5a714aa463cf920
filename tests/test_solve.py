"""`woodshed solve`: what a person's working tree, and the records of their decisions, look like afterwards."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from scripted import EDIT, FINISH, MODULE, PROSE, SETTINGS, SOLVED, UNREADABLE, renderer
from typer.testing import CliRunner

from woodshed.cli import app
from woodshed.cli import solve as command
from woodshed.engines.scripted import ScriptedEngine
from woodshed.experience import transcripts
from woodshed.records import Patch, RecipeError, Rollout, RunError, TaskError, Verdict
from woodshed.runs.folder import RunDir
from woodshed.sandbox import BUBBLEWRAP
from woodshed.solving import working_tree
from woodshed.solving.decisions import Solution, kept_share, verdict
from woodshed.solving.keeping import SolveSettings, keep, solutions_folder
from woodshed.solving.request import open_request


def git(folder: Path, *arguments: str) -> str:
    name = ("-c", "user.name=a", "-c", "user.email=a@b")
    done = subprocess.run(
        ["git", "-C", str(folder), *name, *arguments], check=True, capture_output=True, text=True
    )
    return done.stdout


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    root = tmp_path / "calc"
    root.mkdir()
    (root / "calc.py").write_text(MODULE)
    (root / "run.sh").write_text("echo one\n")
    (root / "run.sh").chmod(0o755)
    (root / ".gitignore").write_text("secret.env\n")
    git(root, "init", "-q")
    git(root, "add", ".")
    git(root, "commit", "-qm", "first")
    (root / "secret.env").write_text("KEY=1\n")
    (root / "notes.txt").write_text("not yet tracked\n")
    return root


@pytest.fixture
def terminal(monkeypatch: pytest.MonkeyPatch) -> Iterator[int]:
    """A terminal as the standard input; what is written to the descriptor is what the person types."""
    ours, theirs = os.openpty()
    with os.fdopen(theirs, "r") as stdin:
        monkeypatch.setattr(sys, "stdin", stdin)
        yield ours
    os.close(ours)


def work(root: Path, runs: Path, *messages: str, ask: bool = True) -> tuple[RunDir, Rollout, Verdict | None]:
    """What `woodshed solve` does once model and settings are there; the records that it keeps."""
    chosen = SolveSettings(runs=runs, agent=SETTINGS)
    run = solutions_folder(chosen, {})
    engine = ScriptedEngine(renderer(), [*messages, FINISH])
    with open_request(working_tree.read_tree(root), "Implement double.", None, BUBBLEWRAP) as request:
        command._serve(command.RequestSession(run, request, chosen, engine), ask=ask)
    verdicts = [each for _, _, each in run.read("verdicts", Verdict)]
    return run, run.read("rollouts", Rollout)[-1][2], verdicts[-1] if verdicts else None


def state(root: Path) -> dict[str, bytes]:
    return {str(p.relative_to(root)): p.read_bytes() for p in root.rglob("*") if p.is_file()}


def test_the_copy_holds_what_git_would_track_and_nothing_else(repository: Path, tmp_path: Path):
    tree = working_tree.read_tree(repository / ".git" / "..")
    tree.copy(tmp_path / "copy")
    assert sorted(state(tmp_path / "copy")) == [".gitignore", "calc.py", "notes.txt", "run.sh"]
    assert (tmp_path / "copy" / "run.sh").stat().st_mode & 0o111
    assert (tree.changed, tree.root) == ((), repository)
    (repository / "calc.py").write_text("x\n")
    assert working_tree.read_tree(repository).changed == ("calc.py",)


def test_a_yes_applies_the_change_and_nothing_else_and_sft_can_imitate_it(
    repository: Path, tmp_path: Path, terminal: int, capfd: pytest.CaptureFixture[str]
):
    before = state(repository)
    os.write(terminal, b"y\n")
    run, rollout, judged = work(repository, tmp_path / "runs", EDIT)
    assert state(repository) == before | {"calc.py": SOLVED.encode()}
    assert judged is not None and (judged.reward, judged.solved, judged.detail) == (1.0, True, "accepted")
    assert rollout.patch.diff in capfd.readouterr().out
    assert len(transcripts.read(run.path, renderer())) == 1
    solution = run.read("solutions", Solution)[0][2]
    assert (
        solution.applied == rollout.patch and solution.commit == git(repository, "rev-parse", "HEAD").strip()
    )


def test_a_no_is_a_failure_that_is_kept_and_changes_nothing(repository: Path, tmp_path: Path, terminal: int):
    before = state(repository)
    os.write(terminal, b"what\nn\n")
    run, _, judged = work(repository, tmp_path / "runs", EDIT)
    assert state(repository) == before
    assert judged is not None and (judged.reward, judged.status, judged.detail) == (0.0, "graded", "rejected")
    with pytest.raises(RecipeError, match="nothing to imitate"):
        transcripts.read(run.path, renderer())


def test_an_edited_solution_is_paid_by_what_stayed(
    repository: Path, tmp_path: Path, terminal: int, monkeypatch: pytest.MonkeyPatch
):
    editor = tmp_path / "editor"
    editor.write_text("#!/bin/sh\nsed -i 's/return 2 . x/return x + x/' \"$1\"\n")
    editor.chmod(0o755)
    monkeypatch.setenv("EDITOR", str(editor))
    monkeypatch.delenv("VISUAL", raising=False)
    os.write(terminal, b"e\ny\n")
    _, rollout, judged = work(repository, tmp_path / "runs", EDIT)
    assert (repository / "calc.py").read_text() == SOLVED.replace("2 * x", "x + x")
    assert judged is not None and judged.detail == "edited" and not judged.solved
    assert judged.reward == pytest.approx(1 / 3)  # the removed line stayed, of three in both
    assert "2 * x" in rollout.patch.diff


@pytest.mark.parametrize("messages", [(PROSE,), (UNREADABLE, UNREADABLE, UNREADABLE), ()])
def test_questions_and_broken_calls_are_kept_and_not_paid(
    repository: Path, tmp_path: Path, messages: tuple[str, ...]
):
    before = state(repository)
    _, rollout, judged = work(repository, tmp_path / "runs", *messages)
    assert state(repository) == before and len(rollout.turns) >= len(messages)
    assert judged is not None and (judged.reward, judged.status, judged.detail) == (
        0.0,
        "graded",
        "unchanged",
    )


def test_without_a_terminal_nothing_is_applied_and_the_patch_is_kept(
    repository: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
):
    before = state(repository)
    run, _, judged = work(repository, tmp_path / "runs", EDIT)
    assert state(repository) == before and judged is None
    next_command = capfd.readouterr().err.partition("next: ")[2].splitlines()[0]
    subprocess.run(next_command, shell=True, check=True)
    assert (repository / "calc.py").read_text() == SOLVED
    assert run.read("solutions", Solution)[0][2].decision is None


def test_a_file_that_changed_meanwhile_stops_the_whole_change(repository: Path, tmp_path: Path):
    write = "<call>write_file {}\n<<<<\nnew\n>>>>\n</call>"
    tree = working_tree.read_tree(repository)
    with open_request(tree, "Do it.", None, BUBBLEWRAP) as request:
        chosen = SolveSettings(runs=tmp_path / "runs", agent=SETTINGS)
        engine = ScriptedEngine(renderer(), [EDIT, write.format("other/new.txt"), FINISH])
        rollout = request.attempt(engine, chosen, "solve-1")
        (repository / "calc.py").write_text(MODULE + "# mine\n")
        before = state(repository)
        with pytest.raises(TaskError, match=r"calc\.py: no longer as the policy was given it"):
            working_tree.apply(rollout.patch, tree, request.copy)
        assert state(repository) == before
        session = command.RequestSession(
            solutions_folder(chosen, {}), request, chosen, ScriptedEngine(renderer(), [EDIT, FINISH])
        )
        with pytest.raises(TaskError, match=r"git -C \S* apply --3way"):
            command._serve(session, ask=False)
        assert state(repository) == before


def test_a_write_that_fails_takes_back_those_before_it(repository: Path, tmp_path: Path):
    tree = working_tree.read_tree(repository)
    tree.copy(tmp_path / "copy")
    before = state(repository)
    patch = Patch(
        {"calc.py": SOLVED, "run.sh": None, "a/b.txt": "new\n", "x" * 255 + ".py": "too long a name"}
    )
    with pytest.raises(OSError, match="name too long"):
        working_tree.apply(patch, tree, tmp_path / "copy")
    assert state(repository) == before and not (repository / "a").exists()
    working_tree.apply(
        Patch({"run.sh": "echo two\n", "notes.txt": None, "a/b.txt": "new\n"}), tree, tmp_path / "copy"
    )
    assert (repository / "run.sh").stat().st_mode & 0o111
    assert not (repository / "notes.txt").exists() and (repository / "a" / "b.txt").read_text() == "new\n"


def test_what_git_would_run_and_what_lies_behind_links_never_comes_back(repository: Path, tmp_path: Path):
    (tmp_path / "outside").mkdir()
    (repository / "link").symlink_to(tmp_path / "outside")
    (repository / "secret.env").chmod(0o644)
    shell = (
        "<call>shell mkdir -p .git/hooks sub/.GIT; echo x > .git/hooks/pre-commit; echo x > sub/.GIT/config; "
        "rm link; mkdir link; echo x > link/f; echo mine > secret.env; ln -s /etc/passwd taken</call>"
    )
    tree = working_tree.read_tree(repository)
    before = state(repository)
    with open_request(tree, "Do it.", None, BUBBLEWRAP) as request:
        rollout = request.attempt(
            ScriptedEngine(renderer(), [shell, FINISH]), SolveSettings(agent=SETTINGS), "solve-1"
        )
        assert sorted(rollout.patch.files) == ["link/f", "secret.env"]
        assert {".git/hooks/pre-commit", "sub/.GIT/config", "taken"} <= set(rollout.patch.skipped)
        for path in rollout.patch.files:
            with pytest.raises(TaskError, match="no longer"):
                working_tree.apply(Patch({path: "x"}), tree, request.copy)
    assert state(repository) == before and not list((tmp_path / "outside").iterdir())


def test_the_command_works_from_repository_to_applied_change(
    repository: Path, tmp_path: Path, tiny_model_dir: Path, monkeypatch: pytest.MonkeyPatch
):
    (tmp_path / "worker.py").write_text(
        "from woodshed.engines.scripted import ScriptedEngine\n"
        "def scripted(settings, renderer, model=None):\n"
        f"    return ScriptedEngine(renderer, {[EDIT, FINISH]!r})\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.chdir(tmp_path)
    arguments = ["calc", "Implement double.", "codec=plain", "engine.kind=worker:scripted", "--yes"]
    result = CliRunner().invoke(app, ["solve", *arguments, "--policy", str(tiny_model_dir)])
    assert result.exit_code == 0, result.output
    assert (repository / "calc.py").read_text() == SOLVED
    for said in (
        "no .venv in the repository",
        "turn 1: edit_file calc.py",
        "+    return 2 * x",
        "applied to",
    ):
        assert said in result.output
    for verb in ("report", "view", "export"):
        out = ("--to", "atif", "--out", str(tmp_path / "out")) if verb == "export" else ()
        shown = CliRunner().invoke(app, [verb, f"runs/solve-{tiny_model_dir.name}", *out])
        assert shown.exit_code == 0 or "terminal" in shown.output, (verb, shown.output)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("none", "x"), "TaskError: no folder none"),
        (("plain", "x"), "git init plain"),
        (("calc", "  "), "RecipeError: the request is empty"),
        (("calc", "x", "--environment", "plain"), "RecipeError: plain is no virtual environment"),
        (("calc", "x", "agent.max_turn=3"), "unknown setting 'agent.max_turn'; did you mean"),
        (("calc", "x", "--policy", "none/such/model"), "ModelError: no model at 'none/such/model'"),
        (
            ("calc", "x", "--policy", "unfinished"),
            "RunError: unfinished is not finished and has no policy yet",
        ),
        (("dirty", "x"), "uncommitted changes (calc.py), which could then not be told"),
        (("calc", "x", "name=taken"), "taken is a run of something else than solutions"),
        (("calc", "x", "name=other"), "holds solutions of model = 'another'"),
    ],
)
def test_bad_input_is_one_message_and_changes_nothing(
    arguments: tuple[str, ...], message: str, repository: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.chdir(repository.parent)
    Path("plain").mkdir()
    git(Path(), "clone", "-q", "calc", "dirty")
    Path("dirty/calc.py").write_text("x\n")
    RunDir.create(Path("unfinished"), recipe='name = "x"\nstages = ["rl"]\n', manifest={}).unlock()
    RunDir.create(Path("runs/taken"), recipe='name = "x"\nstages = ["rl"]\n', manifest={}).unlock()
    RunDir.create(Path("runs/other"), recipe='name = "x"\nmodel = "another"\n', manifest={}).unlock()
    before = state(Path())
    result = CliRunner().invoke(app, ["solve", *arguments])
    assert result.exit_code == 2 and message in result.output, result.output
    after = state(Path())
    assert after == before


def test_the_settings_of_a_run_are_those_that_its_policy_was_trained_with(tmp_path: Path):
    recipe = 'name = "x"\nseed = 3\n[policy]\nmodel = "smollm2-135m"\ncodec = "json"\n'
    recipe += "[agent]\nmax_turns = 5\n[agent.tools]\noutput_chars = 77\n[engine]\ntemperature = 0.5\n"
    run = RunDir.create(tmp_path / "x", recipe='stages = ["rl"]\n' + recipe, manifest={})
    run.write_text("policy/adapter_config.json", "{}")
    chosen = command.settings_of(str(run.path), "", ["agent.max_turns=6"])
    assert (chosen.model, chosen.adapter, chosen.codec) == ("smollm2-135m", str(run.path / "policy"), "json")
    assert (chosen.agent.max_turns, chosen.agent.tools.output_chars, chosen.seed) == (6, 77, 3)
    assert (chosen.engine.temperature, chosen.name) == (0.5, "solve-x")


def test_shares_and_void_attempts():
    one, other = (
        working_tree.Counter({("a", "+x"): 2, ("a", "-y"): 1}),
        working_tree.Counter({("a", "+x"): 1}),
    )
    assert kept_share(one, one) == 1.0 and kept_share(one, other) == pytest.approx(1 / 3)
    assert kept_share(working_tree.Counter(), working_tree.Counter()) == 0.0
    lost = Rollout("r", "t", "t", 0, 0, (), Patch({}), "sandbox_lost", 1.0)
    assert (verdict(lost, "accepted").status, verdict(lost, "accepted").solved) == ("invalid", False)


def test_solutions_of_two_commands_are_both_kept(tmp_path: Path, repository: Path):
    chosen = SolveSettings(runs=tmp_path / "runs")
    first, second = solutions_folder(chosen, {}), solutions_folder(chosen, {})
    for number, run in enumerate((first, second, first)):
        rollout = Rollout(f"solve-{number}", "t", "t", 0, 0, (), Patch({}), "finished", 1.0)
        solution = Solution(rollout.id, "x", str(repository), "", "rejected", None)
        keep(run, rollout, renderer(), solution, verdict(rollout, "rejected"))
    kept = RunDir.open(first.path).read("solutions", Solution)
    assert [each.rollout_id for _, _, each in kept] == ["solve-0", "solve-1", "solve-2"]
    with pytest.raises(RunError, match="holds solutions of codec"):
        solutions_folder(SolveSettings(runs=tmp_path / "runs", codec="json"), {})
