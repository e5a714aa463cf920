"""A run that is killed goes on as if it had never stopped, bit for bit, through the command line."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from forked import Forked
from safetensors.torch import load_file
from tiny_model import write_tiny_model

from woodshed.experience.scripted_expert import ExpertAttempt
from woodshed.records import Hint, Rollout, Task, TokenDivergence, Verdict
from woodshed.runs.folder import RunDir

STEPS = 3

RECIPE = """
name = "whole"
runs = "{runs}"
seed = 5
stages = ["sft", "rl"]
checkpoint_every = 2

[tasks]
train = ["{tasks}"]
heldout = ["{tasks}"]

[policy]
model = "{model}"
lora_rank = 4
codec = "plain"

[agent]
max_turns = 4
turn_tokens = 24
rollout_tokens = 80

[rollout]
attempts = 3

[sft]
steps = 4
attempts = 4
batch = 3
seeded_fault_share = 0.3

[rl]
steps = {steps}
tasks_per_step = 1

[curriculum]
repeats = true

[loss]
kl_coef = 0.01
"""


def metrics(run: Path) -> list[tuple[str, int, dict]]:
    """Everything that was measured, without the seconds it took."""
    lines = RunDir.open(run).read("metrics")
    return [
        (phase, step, {k: v for k, v in record.items() if k != "seconds"}) for phase, step, record in lines
    ]


def lines_of(run: Path, name: str) -> list[dict]:
    path = run / f"{name}.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


@pytest.fixture(scope="module")
def recipe(tiny_task: Task, tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("resume")
    model = write_tiny_model(root / "model")
    path = root / "recipe.toml"
    path.write_text(
        RECIPE.format(runs=root / "runs", tasks=tiny_task.folder.parent, model=model, steps=STEPS),
        encoding="utf-8",
    )
    return path


@pytest.fixture(scope="module")
def whole(recipe: Path) -> Path:
    """The uninterrupted run, of a program that was started like any other."""
    command = [sys.executable, "-m", "woodshed", "train", str(recipe)]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return recipe.parent / "runs" / "whole"


def test_a_run_folder_holds_metrics_rollouts_verdicts_and_hints_of_every_step(whole):
    run = RunDir.open(whole)
    found = [(phase, step) for phase, step, _ in metrics(whole)]
    assert found == [
        *[("sft", step) for step in range(4)],
        ("eval", 0),
        *[("train", step) for step in range(STEPS)],
        ("eval", STEPS),
        ("effort", STEPS),
    ]
    rollouts = run.read("rollouts", Rollout)
    assert [step for phase, step, _ in rollouts if phase == "train"] == [
        s for s in range(STEPS) for _ in range(3)
    ]
    for _, _, made in rollouts:
        assert all(len(turn.sampled_ids) == len(turn.logps) > 0 for turn in made.turns)
    judged = {verdict.rollout_id for _, _, verdict in run.read("verdicts", Verdict)}
    assert judged == {made.id for _, _, made in rollouts}
    assert {hint.rollout_id for _, _, hint in run.read("hints", Hint)} <= judged
    assert run.read("hints", Hint) and run.read("oracle", ExpertAttempt)
    turns = {made.id: made.turns for _, _, made in rollouts}
    token_divergences = [taught for _, _, taught in run.read("divergences", TokenDivergence)]
    assert token_divergences and all(
        len(taught.teacher) == len(turns[taught.rollout_id][taught.turn].sampled_ids)
        for taught in token_divergences
    )
    pieces = {int(i) for _, _, found in run.read("token_texts") for i in found}
    assert pieces == {i for made in turns.values() for turn in made for i in turn.sampled_ids}
    assert run.path.joinpath("report.html").is_file()


@pytest.mark.parametrize(
    "after",
    [
        ("eval", 0),
        ("train", 0),
        pytest.param("oracle", marks=pytest.mark.slow),
        pytest.param(("sft", 2), marks=pytest.mark.slow),
        pytest.param(("train", 1), marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_killed_and_resumed_equals_never_stopped(recipe, whole, after, tmp_path):
    """Killed a moment after `after` was written, so in the middle of what follows it."""
    name = f"killed-{after if isinstance(after, str) else '-'.join(map(str, after))}"
    run = recipe.parent / "runs" / name
    process = Forked(tmp_path / "output", "train", str(recipe), f"name={name}")
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline and process.is_running():
        if isinstance(after, str) and lines_of(run, after):
            break
        if not isinstance(after, str) and any(
            (d["phase"], d["step"]) == after for d in lines_of(run, "metrics")
        ):
            break
        time.sleep(0.02)
    time.sleep(0.15)
    assert process.killed(), "the run ended before it could be killed"

    Forked(tmp_path / "output", "train", "--resume", str(run)).ended()
    assert metrics(run) == metrics(whole)
    final, expected = (load_file(r / "policy" / "adapter_model.safetensors") for r in (run, whole))
    assert expected and all(torch.equal(value, final[key]) for key, value in expected.items())


def test_resuming_a_finished_run_changes_nothing(whole, tmp_path):
    run = tmp_path / "again"
    shutil.copytree(whole, run)
    before = metrics(run)
    Forked(tmp_path / "output", "train", "--resume", str(run)).ended()
    assert metrics(run) == before


def test_a_full_disk_stops_the_run_with_the_way_to_go_on(recipe, whole, tmp_path):
    """The file-size limit stands in for the disk: a write fails in the middle of a step."""
    run = recipe.parent / "runs" / "full"
    output = Forked(tmp_path / "output", "train", str(recipe), "name=full", most_bytes=60_000).ended(2)
    assert "RunError" in output and f"--resume {run}" in output
    Forked(tmp_path / "output", "train", "--resume", str(run)).ended()
    assert metrics(run) == metrics(whole)
