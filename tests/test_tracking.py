"""Trackers: the real ones, local, read back; a resumed run tells nothing twice; a broken one stops nothing."""

from __future__ import annotations

import warnings
from pathlib import Path

import pytest

from woodshed.evals import tracking
from woodshed.records import RecipeError
from woodshed.runs.folder import RunDir

pytestmark = pytest.mark.filterwarnings("ignore")  # the trackers' own


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    made = RunDir.create(tmp_path / "tracked", recipe="", manifest={})
    made.append("metrics", [line(0)], "train", 0)
    return made


def line(step: int) -> dict:
    return {
        "reward": {"value": 0.25 * step, "low": 0.0, "high": 1.0},
        "seconds": {"update": 2.0},
        "note": "text",
    }


def follow(run: RunDir, tracker: tracking.Tracker) -> None:
    """A line from before, one while following, a kill, one untold, and a resume."""
    with tracking.following(run, tracker):
        run.append("metrics", [line(1)], "train", 1)
    run.append("metrics", [line(2)], "train", 2)
    with tracking.following(RunDir.open(run.path), tracker):
        pass


def test_numbers_of_a_line():
    assert tracking.numbers(line(1)) == {"reward": 0.25, "seconds.update": 2.0}


def test_tensorboard(run: RunDir):
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    follow(run, "tensorboard")
    found = accumulator.EventAccumulator(str(run.path / "tensorboard"))
    found.Reload()
    tags = found.Tags()
    assert "train/reward" in tags["tensors"] + tags["scalars"]
    events = (
        found.Tensors("train/reward") if "train/reward" in tags["tensors"] else found.Scalars("train/reward")
    )
    assert [event.step for event in events] == [0, 1, 2]


def test_trackio(run: RunDir, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("TRACKIO_DIR", str(run.path / "trackio"))
    pytest.importorskip("trackio")
    from trackio import sqlite_storage

    monkeypatch.setattr("trackio.utils.TRACKIO_DIR", run.path / "trackio", raising=False)
    monkeypatch.setattr(sqlite_storage, "TRACKIO_DIR", run.path / "trackio", raising=False)
    follow(run, "trackio")
    logs = sqlite_storage.SQLiteStorage.get_logs("woodshed", "tracked")
    assert [(entry["step"], entry["train/reward"]) for entry in logs] == [(0, 0.0), (1, 0.25), (2, 0.5)]


def test_wandb(run: RunDir, monkeypatch: pytest.MonkeyPatch):
    pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    follow(run, "wandb")
    written = b"".join(path.read_bytes() for path in sorted(run.path.glob("wandb/offline-run-*/*.wandb")))
    assert written.count(b"train/reward") >= 3
    assert len({path.name.rpartition("-")[2] for path in run.path.glob("wandb/offline-run-*")}) == 1, (
        "one run id"
    )


def test_a_tracker_that_fails_is_a_warning_and_told_later(run: RunDir, monkeypatch: pytest.MonkeyPatch):
    told: list[int] = []
    is_down = True

    def log(phase: str, step: int, values: object) -> None:
        if is_down:
            raise ConnectionError("no route")
        told.append(step)

    monkeypatch.setattr(tracking, "_open", lambda *_: (log, lambda: None))
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        with tracking.following(run, "wandb"):
            run.append("metrics", [line(1)], "train", 1)
            is_down = False
            run.append("metrics", [line(2)], "train", 2)
    assert told == [0, 1, 2] and len(seen) == 1 and "no route" in str(seen[0].message)


def test_a_tracker_that_is_not_installed(run: RunDir, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(__import__("sys").modules, "trackio", None)
    with (
        pytest.raises(RecipeError, match=r"pip install 'woodshed\[tracking\]'"),
        tracking.following(run, "trackio"),
    ):
        pass
    assert run.on_metrics is None
