"""Trainer, collector and engine as processes of their own: started, killed and ended as a person's would be."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from local_server import serving

from woodshed.records import Hint, Rollout, Task, Verdict
from woodshed.runs.folder import RunDir

STEPS = 3
RECIPE = """
name = "run"
runs = "{runs}"
seed = 5

[tasks]
train = ["{tasks}"]
heldout = ["{tasks}"]

[policy]
model = "{model}"
lora_rank = 4
codec = "plain"

[engine]
kind = "http"
[[engine.servers]]
url = "{url}"

[agent]
max_turns = 3
turn_tokens = 16
rollout_tokens = 48

[rollout]
attempts = 2

[rl]
steps = {steps}
tasks_per_step = 1
staleness = 1

[curriculum]
repeats = true

[monitors]
honeypots = 0.0
"""


@pytest.fixture
def url(tiny_model_dir: Path) -> Iterator[str]:
    with serving(tiny_model_dir) as (address, _):
        yield address


def woodshed(*arguments: object) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "woodshed", *map(str, arguments)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def written(root: Path, task: Task, model: Path, url: str, steps: int = STEPS) -> Path:
    recipe = root / "recipe.toml"
    text = RECIPE.format(runs=root / "runs", tasks=task.folder.parent, model=model, url=url, steps=steps)
    recipe.write_text(text)
    return recipe


def test_a_run(tiny_task: Task, tiny_model_dir: Path, url: str, tmp_path: Path):
    process = woodshed("train", written(tmp_path, tiny_task, tiny_model_dir, url))
    said, _ = process.communicate(timeout=300)
    assert process.returncode == 0, said
    run = RunDir.open(tmp_path / "runs" / "run")
    steps = [record for phase, _, record in run.read("metrics") if phase == "train"]
    assert len(steps) == STEPS
    print(said)
    print(steps[-1])
