"""Run folders of others: no name in them leads out of them, whatever is done with the run."""

from __future__ import annotations

import json
import os
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from woodshed.cli import app
from woodshed.learning import checkpoint
from woodshed.records import (
    Hint,
    RunError,
)
from woodshed.runs.folder import RunDir

PLACES = (
    "metrics.jsonl",
    "rollouts.jsonl",
    "manifest.json",
    "recipe.toml",
    "lock",
    "checkpoints",
    "checkpoints/rl-000001",
    "checkpoints/rl-000001/optimizer/shard-00001-model-00001-of-00001.safetensors",
    "policy/adapter_config.json",
    "tasks/eval",
    "tasks/eval/one/instruction.md",
    "report.html",
    "atif",
)
VERBS = (
    ("report", "RUN"),
    ("view", "RUN"),
    ("export", "RUN", "--to", "atif"),
    ("export", "RUN", "--to", "hf"),
    ("grade", "RUN"),
    ("train", "--resume", "RUN"),
    ("eval", "--resume", "RUN"),
    ("eval", "compare", "RUN", "RUN"),
    ("eval", "costs", "RUN"),
)


@pytest.fixture
def run(tmp_path: Path) -> Path:
    with closing(_Closed(RunDir.create(tmp_path / "run", recipe="name = 'run'\n", manifest={}))) as made:
        made.run.append("hints", [Hint("r", 0, "no_call", "x")], "train", 0)
    return tmp_path / "run"


class _Closed:
    def __init__(self, run: RunDir) -> None:
        self.run = run

    def close(self) -> None:
        self.run.unlock()


@pytest.mark.parametrize("kind", ["symbolic", "dangling", "hard"])
@pytest.mark.parametrize("place", PLACES)
def test_no_link_leads_out_of_a_run(run: Path, tmp_path: Path, place: str, kind: str) -> None:
    target, link = tmp_path / "secret", run / place
    if kind != "dangling":
        target.write_text("name = 'secret'\n")
    link.parent.mkdir(parents=True, exist_ok=True)
    link.unlink(missing_ok=True)
    if kind == "hard":
        os.link(target, link)
        if place.startswith("tasks/") or link.parent.name == "eval":
            return  # our own: a run shares the files of its tasks
    else:
        link.symlink_to(target)
    if place != "recipe.toml" or kind == "hard":
        with pytest.raises(RunError, match="link"):
            RunDir.open(run)
    with pytest.raises(RunError):
        RunDir(run).lock()
    assert not target.exists() or target.read_text() == "name = 'secret'\n"
    assert target.exists() == (kind != "dangling")


@pytest.mark.parametrize("verb", VERBS, ids=" ".join)
def test_every_verb_refuses_a_run_with_a_link(run: Path, tmp_path: Path, verb: tuple[str, ...]) -> None:
    (tmp_path / "secret").write_text("")
    (run / "metrics.jsonl").symlink_to(tmp_path / "secret")
    result = CliRunner().invoke(app, [str(run) if word == "RUN" else word for word in verb])
    assert result.exit_code == 2 and "outside of the run" in result.stderr, result.output
    assert (tmp_path / "secret").read_text() == ""


def test_a_planted_folder_is_no_place_for_a_new_run(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "lock").symlink_to(tmp_path / "precious")
    with pytest.raises(RunError, match="outside of the run"):
        RunDir.create(tmp_path / "run", recipe="", manifest={})
    assert not (tmp_path / "precious").exists()


def test_links_inside_a_run_and_to_a_run_are_fine(run: Path, tmp_path: Path) -> None:
    (run / "newest").symlink_to("hints.jsonl")
    os.link(run / "hints.jsonl", run / "twin")
    (tmp_path / "alias").symlink_to(run)
    assert RunDir.open(tmp_path / "alias").read("hints", Hint)


@pytest.mark.parametrize(
    "data", [{"stage": "../../x", "step": 1}, {"stage": "rl", "step": "1/../.."}, {"stage": "rl", "step": -1}]
)
def test_a_position_is_no_path(tmp_path: Path, data: dict[str, Any]) -> None:
    (tmp_path / "position.json").write_text(json.dumps({"watch": {}, **data}))
    with pytest.raises(RunError, match="cannot be read"):
        checkpoint.read_position(tmp_path)
