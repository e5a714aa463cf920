"""Launcher, trainer, collector and engine server under SIGKILL: nothing is lost, counted twice or left running.

The proof with 60 kills is benchmarks/chaos.py.
"""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from woodshed.records import Task

sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))

import chaos

pytestmark = pytest.mark.slow


def test_a_run_under_kills(
    tiny_task: Task, tiny_model_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(chaos, "TASKS", 1)
    row = chaos.measure(tmp_path, tiny_task.folder.parent, tiny_model_dir, kills=6, seed=1, steps=4)
    assert row["kills"] == 6 and row["finished"] >= 4 * chaos.ATTEMPTS + 2
    assert row["lost"] == row["twice"] == row["missing"] == row["left"] == row["changed"] == 0, row
    assert row["youngest"] >= 0 and row["staleness"] <= row["bound"]
