"""A stopped run's recipe that was edited: what may change is said and kept, what makes another run is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from tiny_model import write_tiny_model
from typer.testing import CliRunner, Result

from woodshed.cli import app
from woodshed.evals import changes, comparison, suite
from woodshed.records import RunError, Task
from woodshed.runs.folder import RunDir
from woodshed.settings import validate
from woodshed.stages.recipe import Recipe


def woodshed(*arguments: str) -> Result:
    return CliRunner().invoke(app, arguments)


def recipe(**sections: Any) -> Recipe:
    return validate(Recipe, {"name": "x", **sections})


def run_of(path: Path, chosen: Recipe) -> RunDir:
    return RunDir.create(path, recipe=chosen.to_toml(), manifest=changes.settings_of(chosen))


def test_every_name_is_a_setting():
    everything = {
        "stability": {"max_kl_to_start": 1.0},
        "evaluation": {"effort": "low"},
    }
    known = changes.settings_of(recipe(**everything))["settings"]
    names = set(changes.differences(known, {}))
    assert set(changes.NOTED) <= names and set(changes.FREE) <= set(changes.NOTED)


@pytest.mark.parametrize(
    "sections",
    [
        {"optimizer": {"learning_rate": 1e-3}},
        {"optimizer": {"warmup_steps": 9}},
        {"rl": {"steps": 9}},
        {"note": "Slower."},
        {"stability": {"max_kl_to_start": 0.5}},
        {"grading": {"jobs": 7}},
        {"curriculum": {"repeats": True}},
    ],
)
def test_what_may_change_is_noted_once_with_its_step(sections: dict[str, Any], tmp_path: Path):
    run = run_of(tmp_path / "run", recipe())
    options = {"allowed": changes.NOTED, "stage": "rl", "steps_taken": 3}
    assert changes.accept(run, recipe(), **options) == []
    (note,) = changes.accept(run, recipe(**sections), **options)
    assert note.startswith("from step 3 of rl: ") and " was " in note and " and is " in note
    assert run.manifest["changes"] == [note]
    assert changes.accept(run, recipe(**sections), **options) == [], "it goes on with that"
    (back,) = changes.accept(run, recipe(), **options)
    assert run.manifest["changes"] == [note, back]
    assert any(note in warning for warning in comparison.doubts([("runs/x", run.manifest)])[1])


def test_a_run_goes_on_with_servers_that_moved(tmp_path: Path):
    before, after = (
        recipe(engine={"kind": "http", "servers": [{"url": f"http://127.0.0.1:{port}"}]}) for port in (1, 2)
    )
    run = run_of(tmp_path / "run", before)
    (note,) = changes.accept(run, after, allowed=changes.NOTED, stage="rl", steps_taken=3)
    assert "engine.servers was" in note


@pytest.mark.parametrize(
    ("sections", "name"),
    [
        ({"policy": {"model": "other"}}, "policy.model"),
        ({"policy": {"lora_rank": 4}}, "policy.lora_rank"),
        ({"seed": 1}, "seed"),
        ({"tasks": {"train": ["elsewhere"]}}, "tasks.train"),
        ({"agent": {"max_turns": 3}}, "agent.max_turns"),
        ({"rollout": {"attempts": 3}}, "rollout.attempts"),
        ({"rl": {"tasks_per_step": 2}}, "rl.tasks_per_step"),
        ({"optimizer": {"kind": "muon"}}, "optimizer.kind"),
        ({"feedback": {"preset": "sdpo"}}, "feedback."),
        ({"loss": {"weight": 2}}, "loss.weight"),
        ({"evaluation": {"attempts": 2}}, "evaluation.attempts"),
        ({"evaluation": {"effort": "low"}}, "evaluation.effort was unset and is low"),
    ],
)
def test_what_makes_another_run_is_refused_and_nothing_is_noted(
    sections: dict[str, Any], name: str, tmp_path: Path
):
    run = run_of(tmp_path / "run", recipe())
    both = {**sections, "note": "This one may."}
    with pytest.raises(RunError, match=r"was changed since the run began") as caught:
        changes.accept(run, recipe(**both), allowed=changes.NOTED, stage="rl", steps_taken=1)
    assert name in str(caught.value) and "undo the change" in str(caught.value)
    assert "changes" not in run.manifest
    with pytest.raises(RunError, match="begun with other settings"):
        changes.refuse_other(run, recipe(**both))
    changes.refuse_other(run, recipe(note="This one may."))


def test_fewer_steps_than_were_taken_are_refused(tmp_path: Path):
    run = run_of(tmp_path / "run", recipe())
    with pytest.raises(RunError, match=r"rl.steps = 2, but 3 steps were taken"):
        changes.accept(run, recipe(rl={"steps": 2}), allowed=changes.NOTED, stage="rl", steps_taken=3)


def test_a_run_without_a_record_of_its_settings_keeps_them_from_now_on(tmp_path: Path):
    run = RunDir.create(tmp_path / "run", recipe=recipe().to_toml(), manifest={})
    assert changes.accept(run, recipe(seed=4), allowed=changes.NOTED, stage="rl") == []
    with pytest.raises(RunError, match="seed was 4 and is 5"):
        changes.accept(run, recipe(seed=5), allowed=changes.NOTED, stage="rl")


def test_an_evaluation_goes_on_with_what_it_was_measured_by(tmp_path: Path):
    def chosen(**more: Any) -> suite.SuiteSettings:
        return validate(suite.SuiteSettings, {"name": "e", "tasks": ["t"], **more})

    run = RunDir.create(tmp_path / "run", recipe=chosen().to_toml(), manifest=changes.settings_of(chosen()))
    assert changes.accept(run, chosen(note="n"), allowed=changes.FREE)
    for more in (
        {"agent": {"max_turns": 2}},
        {"attempts": 2},
        {"adapter": "a"},
        {"engine": {"temperature": 0.5}},
    ):
        with pytest.raises(RunError, match="was changed since"):
            changes.accept(run, chosen(note="n", **more), allowed=changes.FREE)


RECIPE = """
name = "short"
[tasks]
train = ["{task}"]
[policy]
model = "model"
lora_rank = 2
codec = "plain"
[agent]
max_turns = 1
turn_tokens = 8
[rollout]
attempts = 2
[rl]
steps = 1
tasks_per_step = 1
[curriculum]
repeats = true
[variants]
only = []
"""


def test_a_finished_run_goes_on_for_longer_and_says_so(
    tiny_task: Task, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.chdir(tmp_path)
    write_tiny_model(tmp_path / "model")
    Path("short.toml").write_text(RECIPE.format(task=tiny_task.folder))
    assert woodshed("train", "short.toml", "--variant", "only").exit_code == 0
    kept = Path("runs/short-only-0/recipe.toml")
    begun = kept.read_text()
    other = woodshed("variants", "short.toml", "optimizer.learning_rate=0.5")
    assert other.exit_code == 2 and "optimizer.learning_rate was 0.0002 and is 0.5" in other.stderr

    kept.write_text(begun.replace("max_turns = 1", "max_turns = 2"))
    refused = woodshed("train", "--resume", "runs/short-only-0")
    assert refused.exit_code == 2 and "agent.max_turns was 1 and is 2" in refused.stderr

    again = woodshed("train", "--resume", "runs/short-only-0")
    assert again.exit_code == 2, "the refused change is still in the file"
    kept.write_text(begun)
    finished = woodshed("train", "--resume", "runs/short-only-0")
    assert finished.exit_code == 0 and "is finished: nothing is left to do" in finished.stderr
    assert "woodshed train --resume runs/short-only-0 rl.steps=2` would prolong it" in finished.stderr

    kept.write_text(begun.replace("rate = 0.0002", "rate = 0.01", 1))
    longer = woodshed("train", "--resume", "runs/short-only-0", "rl.steps=2")
    assert longer.exit_code == 0, longer.output
    assert "changed from step 1 of rl: rl.steps was 1 and is 2" in longer.stdout
    assert "changed from step 1 of rl: optimizer.learning_rate was 0.0002 and is 0.01" in longer.stdout
    assert "1 of the 2 tasks drawn had been trained on in an earlier step" in longer.stderr
    assert {path.name for path in kept.parent.glob("policy*")} == {"policy", "policy-earlier"}
    assert RunDir.open(kept.parent).recipe()["rl"]["steps"] == 2
    run = RunDir.open(kept.parent)
    assert [step for phase, step, _ in run.read("metrics") if phase == "train"] == [0, 1]
    assert "changed from step 1 of rl" in (kept.parent / "report.html").read_text("utf-8")
