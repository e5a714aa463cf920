"""Checkpoints that are written beside what comes after their step."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest
import torch
from tiny_training import tiny_policy

from woodshed.learning import tensor_folder
from woodshed.learning.checkpoint import CheckpointWriter, TrainState, latest, read_position
from woodshed.learning.optimizer import OptimizerSettings
from woodshed.learning.trainer import Trainer
from woodshed.records import RunError
from woodshed.runs.folder import RunDir


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """Files are written once it is set."""
    event, save = threading.Event(), tensor_folder.save

    def wait_and_save(*args: object) -> None:
        assert event.wait(60)
        save(*args)  # type: ignore[arg-type]

    monkeypatch.setattr(tensor_folder, "save", wait_and_save)
    return event


def run_of(path: Path) -> RunDir:
    return RunDir.create(path / "run", recipe="", manifest={})


def test_what_a_step_left_is_written_while_the_next_one_is_taken(gate: threading.Event, tmp_path: Path):
    trainer, run = Trainer(tiny_policy(), OptimizerSettings()), run_of(tmp_path)
    writer, before = CheckpointWriter(run), trainer.policy.snapshot()
    writer.begin(trainer, TrainState("rl", 1))
    assert latest(run, ("rl",)) is None, "it is complete or absent"
    with torch.no_grad():
        for weight in trainer.policy.trainable.values():
            weight.add_(1.0)
    trainer.taken = 7
    gate.set()
    writer.finish()
    (newest,) = run.checkpoints("rl-")
    assert read_position(newest).step == 1
    trainer.load(newest)
    assert trainer.taken == 0
    assert all(torch.equal(trainer.policy.trainable[name], value) for name, value in before.items())


def test_a_checkpoint_waits_for_the_one_before(gate: threading.Event, tmp_path: Path):
    trainer, run = Trainer(tiny_policy(), OptimizerSettings()), run_of(tmp_path)
    writer = CheckpointWriter(run)
    writer.begin(trainer, TrainState("rl", 1), kept=1)
    threading.Timer(0.2, gate.set).start()
    writer.begin(trainer, TrainState("rl", 2), kept=1)
    assert run.checkpoints("rl-"), "the first one is complete"
    writer.finish()
    assert [path.name for path in run.checkpoints("rl-")] == ["rl-000002"]


def test_what_could_not_be_written_is_told_where_the_run_waits_for_it(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
):
    trainer, run = Trainer(tiny_policy(), OptimizerSettings()), run_of(tmp_path)
    writer = CheckpointWriter(run)
    writer.begin(trainer, TrainState("rl", 1))
    writer.finish()

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(tensor_folder, "save", full)
        writer.begin(trainer, TrainState("rl", 2))
        with pytest.raises(RunError, match="No space left"):
            writer.finish()
    assert [path.name for path in run.checkpoints("rl-")] == ["rl-000001"]
    assert not list((run.path / "checkpoints").glob(".*")), "nothing is left behind"
    writer.begin(trainer, TrainState("rl", 3))
    writer.finish()
