"""The examples of docs/how-to.md, taken from the page and run from a folder outside of the package."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest
from scripted import EDIT, FINISH, READ, calc_task, play, renderer
from typer.testing import CliRunner

from woodshed import feedback, parts, settings
from woodshed.cli import app
from woodshed.engines import local
from woodshed.engines.create import create
from woodshed.engines.engine import SampleRequest, sample_all
from woodshed.feedback import rewards
from woodshed.records import Group
from woodshed.stages.recipe import Recipe
from woodshed.tokens.renderer import create_renderer

PAGE = Path(__file__).parent.parent / "docs" / "how-to.md"


def section(title: str) -> dict[str, str]:
    """The blocks of one section, by their language."""
    text = PAGE.read_text("utf-8").split(f"\n## {title}\n", 1)[1].split("\n## ", 1)[0]
    return dict(re.findall(r"^```(\w+)\n(.*?)^```", text, re.S | re.M))


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    parts._imported.cache_clear()
    yield tmp_path
    sys.modules.pop("mine", None)


def recipe_with(title: str, folder: Path) -> Recipe:
    blocks = section(title)
    if code := blocks.get("python"):
        assert len(code.splitlines()) <= 30
        (folder / "mine.py").write_text(code)
    (folder / "recipe.toml").write_text('name = "own"\n\n' + blocks["toml"])
    chosen = settings.read(Recipe, folder / "recipe.toml")
    assert "mine" not in sys.modules, "reading a recipe imports nothing"
    parts.check(chosen)
    return chosen


def test_a_detector_with_its_hint(folder: Path):
    recipe = recipe_with("A detector with its hint", folder)
    task = calc_task(folder / "calc")
    careless, careful = play(task, EDIT, FINISH), play(task, READ, EDIT, FINISH)
    hints = feedback.write(
        [Group(task.id, (careless, careful))],
        [task],
        renderer().codec,
        detectors=feedback.named(recipe.feedback.detectors),
    )
    found = [hint for hint in hints if hint.detector == "mine:unread_edit"]
    assert [(hint.rollout_id, hint.turn) for hint in found] == [(careless.id, 0)]
    assert found[0].text == "Reminder: read a file before you edit it."
    assert feedback.choose(hints, recipe.feedback.detectors) == found


def test_a_reward_term(folder: Path):
    recipe = recipe_with("A reward term", folder)
    task = calc_task(folder / "calc")
    edited, idle = play(task, EDIT, FINISH), play(task, FINISH)
    paid = rewards.auxiliary(task, edited, recipe.rewards.terms)
    assert paid == {"mine:changed_lines": pytest.approx(-0.002)}
    assert rewards.auxiliary(task, idle, recipe.rewards.terms) == {"mine:changed_lines": 0.0}


def test_an_engine(folder: Path, tiny_model_dir: Path):
    recipe = recipe_with("An engine", folder)
    loaded = local.load(str(tiny_model_dir))
    words = create_renderer(loaded.tokenizer, codec="plain", model_dir=tiny_model_dir)
    with closing(create(recipe.engine, words, loaded.model)) as engine:
        sample = sample_all(engine, [SampleRequest((1, 5, 6), 8, 0)])[0]
    assert (folder / "messages.txt").read_text("utf-8") == words.decode(sample.ids) + "\n"


def test_vllm_servers(folder: Path):
    chosen = recipe_with("vLLM servers", folder).engine
    assert (chosen.kind, [server.url for server in chosen.servers]) == ("http", ["http://127.0.0.1:8000"])


def test_a_mistake_in_ones_own_part_stops_the_command_before_a_run_is_made(folder: Path):
    recipe_with("A reward term", folder)
    sys.modules.pop("mine")
    parts._imported.cache_clear()
    (folder / "mine.py").write_text("def changed_lines(rollout):\n    return 1\n")
    done = CliRunner().invoke(app, ["train", "recipe.toml"])
    assert done.exit_code == 2 and "takes (rollout), and it is called with (task, rollout)" in done.output
    assert not (folder / "runs").exists()
