"""What a step of practice hands on: classes through the gate, room for hints, what a reader may not quote."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from scripted import FINISH, SETTINGS, play, renderer
from tiny_model import write_tiny_model

from woodshed.cli.train import run_recipe
from woodshed.engines.scripted import ScriptedEngine
from woodshed.feedback.gate import BARS, GateMeasurement
from woodshed.records import Group, Hint, Rollout, Task, Verdict
from woodshed.runs.folder import RunDir
from woodshed.settings import validate
from woodshed.stages.recipe import Recipe
from woodshed.stages.rl import annotator_of
from woodshed.stages.session import Session
from woodshed.tasks import folder

ROOT = Path(__file__).parent.parent


def recipe_of(task: Task, root: Path, **more: Any) -> Recipe:
    settings: dict[str, Any] = {
        "name": "practice",
        "runs": str(root / "runs"),
        "tasks": {"train": [str(task.folder.parent)], "heldout": []},
        "policy": {"model": str(root / "model"), "lora_rank": 4, "codec": "plain"},
        "agent": {"max_turns": 2, "turn_tokens": 16, "rollout_tokens": 32},
        "rollout": {"attempts": 3},
        "rl": {"steps": 1, "tasks_per_step": 1},
    }
    return validate(Recipe, {**settings, **more})


def metrics_of(recipe: Recipe) -> tuple[dict[str, Any], RunDir]:
    run = RunDir.create(recipe.runs / recipe.name, recipe=recipe.to_toml(), manifest={})
    said: list[str] = []
    run_recipe(recipe, run, lambda _done, _total, text: said.append(text))
    assert said[0].startswith("loading ") and "train 0: attempts" in said
    (update,) = [text for text in said if "update" in text]
    assert update.startswith("train 0: update 1 of 1 (100% invalid calls, reward 0.00)"), update
    (found,) = [record for phase, _, record in run.read("metrics") if phase == "train"]
    return found, run


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("practice")
    write_tiny_model(made / "model")
    return made


def test_classes_that_fail_the_gate_are_measured_and_not_trained_on(tiny_task: Task, root: Path):
    """A random model's reminders help with nothing."""
    trained, _ = metrics_of(recipe_of(tiny_task, root, name="open"))
    assert trained["targets"] > 0 and trained["switched_off"] == {}
    many = {"rollout": {"attempts": 8}, "gate": {"every": 1}}
    stopped, run = metrics_of(recipe_of(tiny_task, root, name="gated", **many))
    measured = [record for _, _, record in run.read("gate", GateMeasurement)]
    often = {m.detector for m in measured if m.num_turns >= BARS.min_turns}
    assert set(stopped["switched_off"]) == often != set()
    hints = [hint for _, _, hint in run.read("hints", Hint)]
    assert stopped["targets"] == sum(hint.detector not in often for hint in hints) < len(hints)
    rare, run = metrics_of(recipe_of(tiny_task, root, name="rare", gate={"every": 1}))
    measured = [record for _, _, record in run.read("gate", GateMeasurement)]
    assert measured and all(0 < m.num_turns < BARS.min_turns for m in measured)
    assert rare["targets"] == trained["targets"] and rare["switched_off"] == {}


def test_few_files_lie_between_the_command_and_the_losses_and_attempts(
    tiny_task: Task, root: Path, monkeypatch: pytest.MonkeyPatch
):
    """As benchmarks/results/call_path.json says, by the stacks of a run: 3 to every loss and 4 to an attempt."""
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    import call_path

    stages = {"stages": ["sft", "rl"], "sft": {"steps": 1, "attempts": 1}, "loss": {"kl_coef": 0.01}}
    recipe = recipe_of(tiny_task, root, name="paths", **stages)
    (root / "paths.toml").write_text(recipe.to_toml())
    paths = call_path.measure([str(root / "paths.toml")])
    assert {name: len(files) for name, files in paths.items() if name != "formula"} == {
        **dict.fromkeys(("ce_loss", "rl_loss", "kl_loss"), 3),
        "attempt": 4,
    }
    assert paths == json.loads((ROOT / "benchmarks/results/call_path.json").read_text("utf-8"))["paths"]


def test_hints_for_which_the_context_has_no_room_are_counted(tiny_task: Task, root: Path):
    trained, run = metrics_of(recipe_of(tiny_task, root, name="roomy"))
    (prompt,) = {len(made.turns[0].context_ids) for _, _, made in run.read("rollouts", Rollout)}
    narrow = write_tiny_model(root / "narrow")
    config = json.loads((narrow / "config.json").read_text())
    config["max_position_embeddings"] = prompt + 24  # a message of 16 and less than a reminder
    (narrow / "config.json").write_text(json.dumps(config))
    policy = {"model": str(narrow), "lora_rank": 4, "codec": "plain"}
    found, _ = metrics_of(recipe_of(tiny_task, root, name="narrow", policy=policy))
    assert trained["targets"] > 0 == found["targets"]
    assert found["skipped_hints"]["no room for the hint"] > 0


def test_a_reader_may_quote_neither_hidden_tests_nor_the_solution(tiny_task: Task, root: Path):
    recipe = recipe_of(tiny_task, root, critic={"rollouts": 1})
    loose = SETTINGS.model_copy(update={"max_turns": 6})
    (made,) = [play(tiny_task, "<call>read_file tally/words.py 1 12</call>", FINISH, settings=loose)]
    made = replace(made, turns=made.turns[:1], ended="max_turns")  # nothing that a rule speaks about
    verdict = Verdict(made.id, tiny_task.id, "graded", 0.0, False, {})
    hidden = next(
        line.strip()
        for data in folder.protected_files(tiny_task).values()
        for line in data.decode().splitlines()
        if "assert" in line
    )
    stub = (tiny_task.folder / "environment" / "workspace" / "tally/words.py").read_text()
    solution = folder.gold_patch(tiny_task).files["tally/words.py"] or ""
    line = max((line.strip() for line in solution.splitlines() if line not in stub), key=len)

    def said(text: str) -> list[str]:
        reading = ScriptedEngine(renderer(), [f"message: 1\nreminder: {text}"] * 3)
        run = RunDir.create(root / "runs" / f"read-{len(text)}", recipe="", manifest={})
        session: Any = Session(recipe, run, None, None, renderer(), reading, lambda *_: None)  # type: ignore[arg-type]
        hints = annotator_of(session).hints([Group(tiny_task.id, (made,))], [tiny_task], {made.id: verdict})
        return [hint.text for hint in hints]

    assert said("Read the tests first.") == ["Reminder: Read the tests first."]
    assert said(f"They check {hidden} so mind that.") == []
    assert said(f"Write {line} there.") == []
