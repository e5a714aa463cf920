"""Training that torchrun starts on two ranks is training on one, also when a rank is killed and fewer go on."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file
from test_resume import metrics
from tiny_model import write_tiny_model
from typer.testing import CliRunner

from woodshed.cli import app
from woodshed.records import Rollout, Task
from woodshed.runs.folder import RunDir

RECIPE = """
name = "alone"
runs = "{runs}"
seed = 5
stages = ["sft", "rl"]

[tasks]
train = ["{tasks}"]
heldout = ["{tasks}"]

[policy]
model = "{model}"
lora_rank = 0
codec = "plain"

[agent]
max_turns = 3
turn_tokens = 16
rollout_tokens = 40

[rollout]
attempts = 3

[sft]
steps = 2
attempts = 3
batch = 3

[rl]
steps = 2
tasks_per_step = 1

[curriculum]
repeats = true

[optimizer]
learning_rate = 5e-5

[rewards.terms]
message_words = -0.1

[loss]
kl_coef = 0.01

[feedback]
forward = "separate"

[gate]
every = 2
"""


@contextmanager
def on_ranks(*arguments: str) -> Iterator[subprocess.Popen[str]]:
    """`woodshed train` on two ranks."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    with subprocess.Popen(
        [*command, "-m", "woodshed", "train", *arguments],
        env=os.environ | {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"},
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    ) as process:
        try:
            yield process
        finally:
            process.terminate()  # torchrun ends the ranks


def alone(*arguments: str) -> str:
    """`woodshed train` in this process."""
    result = CliRunner().invoke(app, ["train", *arguments], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return result.output


@pytest.fixture(scope="module")
def recipe(tiny_task: Task, tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("ranks")
    model, path = write_tiny_model(root / "model"), root / "recipe.toml"
    path.write_text(RECIPE.format(runs=root / "runs", tasks=tiny_task.folder.parent, model=model))
    return path


@pytest.fixture(scope="module")
def whole(recipe: Path) -> Path:
    """The run of one process."""
    alone(str(recipe))
    return recipe.parent / "runs" / "alone"


@pytest.fixture(scope="module")
def killed(recipe: Path) -> tuple[Path, str]:
    """A run of two ranks, the second of which is killed after a step of RL, and its output."""
    run = recipe.parent / "runs" / "killed"
    with on_ranks(str(recipe), "name=killed", "layout.fsdp=2") as process:
        while process.poll() is None and not any(phase == "train" for phase, *_ in steps_of(run)):
            time.sleep(0.02)
        if process.poll() is None:
            os.kill(pid_of_rank(process, 1), signal.SIGKILL)
        output = process.communicate()[0]
    assert process.returncode and steps_of(run), output
    return run, output


def steps_of(run: Path) -> list[tuple[str, int, dict[str, Any]]]:
    return metrics(run) if (run / "metrics.jsonl").exists() else []


def pid_of_rank(torchrun: subprocess.Popen[str], rank: int) -> int:
    children = Path(f"/proc/{torchrun.pid}/task/{torchrun.pid}/children").read_text().split()
    return next(
        int(pid) for pid in children if f"\0RANK={rank}\0" in Path(f"/proc/{pid}/environ").read_text()
    )


def same(run: Path, whole: Path) -> None:
    """Check that two runs measured and learned the same, up to the order of sums."""
    for (*at, measured), (*at_whole, expected) in zip(metrics(run), metrics(whole), strict=True):
        assert at == at_whole
        assert measured.keys() == expected.keys(), at
        for key in expected:
            assert measured[key] == approximately(expected[key]), (*at, key)
    final, expected = (load_file(path / "policy" / "model.safetensors") for path in (run, whole))
    assert final.keys() == expected.keys()
    assert max(float((final[key] - expected[key]).abs().max()) for key in expected) < 1e-5
    folders = ({file.name for file in (path / "policy").iterdir()} for path in (run, whole))
    assert next(folders) == next(folders)
    assert (run / "policy" / "config.json").read_text() == (whole / "policy" / "config.json").read_text()
    rollouts = [
        [rollout for *_, rollout in RunDir.open(path).read("rollouts", Rollout)] for path in (run, whole)
    ]
    ids = [[(r.id, [turn.sampled_ids for turn in r.turns]) for r in each] for each in rollouts]
    assert ids[0] == ids[1]


def approximately(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: approximately(each) for key, each in value.items()}
    if isinstance(value, list):
        return [approximately(each) for each in value]
    return pytest.approx(value, rel=1e-4, abs=1e-5) if isinstance(value, float) else value


def test_a_killed_rank_ends_the_run_with_one_error_and_the_way_on(killed: tuple[Path, str]):
    run, output = killed
    assert output.count("RunError:") == 1 and output.count("another rank of the run has ended") == 1
    assert f"go on with `torchrun --nproc-per-node 2 -m woodshed train --resume {run}`" in output
    assert "Traceback" not in output.partition("RunError:")[0]


def test_fewer_ranks_go_on_as_one_would_have(killed: tuple[Path, str], whole: Path, tmp_path: Path):
    run = tmp_path / "fewer"
    shutil.copytree(killed[0], run)
    kept = run / "recipe.toml"
    kept.write_text(kept.read_text().replace("fsdp = 2", "fsdp = 1"))
    assert "layout.fsdp was 2 and is 1" in alone("--resume", str(run))
    same(run, whole)


def test_two_ranks_train_as_one_does(killed: tuple[Path, str], whole: Path):
    with on_ranks("--resume", str(killed[0])) as process:
        output = process.communicate()[0]
    assert process.returncode == 0, output
    assert output.count("report:") == 1
    same(killed[0], whole)
