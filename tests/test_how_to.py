"""The examples of docs/how-to.md, taken from the page and run from a folder outside of the package."""

from __future__ import annotations

import json
import re
import sys
import tomllib
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import tomli_w
import torch
from scripted import EDIT, FINISH, READ, calc_task, play, renderer
from typer.testing import CliRunner

from woodshed import feedback, parts, report, settings, synthesis
from woodshed.cli import app
from woodshed.engines import local
from woodshed.engines.create import create
from woodshed.engines.engine import SampleRequest, sample_all
from woodshed.evals import atif
from woodshed.feedback import rewards
from woodshed.grading import grade
from woodshed.learning import divergences
from woodshed.learning.estimators import WrittenTokens, loss_of
from woodshed.records import Group, Task
from woodshed.runs.folder import RunDir
from woodshed.stages.recipe import Recipe
from woodshed.tasks import gold_files, gold_patch, hidden_tests, load_set, workspace
from woodshed.tasks.paths import tree
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
    for name in ("mine", "others"):
        sys.modules.pop(name, None)


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


def test_a_tool(folder: Path):
    recipe = recipe_with("A tool", folder)
    task = calc_task(folder / "calc")
    first, *_ = play(task, "<call>outline calc.py</call>", settings=recipe.agent).turns
    assert first.error_kind is None and first.observations[0].text == "1: def double(x):\n5: def halve(x):"
    prompt = renderer().decode(first.context_ids)
    assert (
        "<call>outline path</call>  List what a Python file defines." in prompt and "write_file" not in prompt
    )


def test_a_sandbox(folder: Path, tiny_task: Task):
    recipe = recipe_with("A sandbox", folder)
    verdict = grade(tiny_task, gold_patch(tiny_task), recipe.sandbox.create())
    assert verdict.solved and sys.modules["mine"].COUNTED.opened > 0


def test_a_task_format(folder: Path, tiny_task: Task):
    """A task written as a line of JSON comes back the same, by the command on the page."""
    blocks = section("A task format")
    assert len(blocks["python"].splitlines()) <= 30
    (folder / "mine.py").write_text(blocks["python"])
    environment = tiny_task.environment
    parts_of = {
        "workspace": dict(tree(workspace(tiny_task))),
        "tests": dict(tree(hidden_tests(tiny_task))),
        "gold": gold_files(tiny_task),
    }
    line = {
        "name": "counting",
        "instruction": tiny_task.instruction,
        "python": environment.python,
        "pins": environment.requirements,
        "packages": environment.packages,
        "fail_to_pass": tiny_task.fail_to_pass,
        "pass_to_pass": tiny_task.pass_to_pass,
        **{
            name: {p: f.read_text("utf-8") for p, f in files.items() if f} for name, files in parts_of.items()
        },
    }
    (folder / "tasks.jsonl").write_text(json.dumps(line) + "\n", "utf-8")
    program, *command = blocks["text"].split()
    assert program == "woodshed"
    done = CliRunner().invoke(app, command)
    assert done.exit_code == 0, done.output
    (task,) = load_set(folder / "tasks" / "mine")
    assert (task.name, task.instruction, task.fail_to_pass) == (
        "counting",
        tiny_task.instruction,
        tiny_task.fail_to_pass,
    )
    reasons = synthesis.check(task)  # fails before and passes after, in real sandboxes
    assert reasons == ["counting: the visible tests do not pass: `python -m pytest -q` ended as nonzero"]


def test_a_loss(folder: Path):
    recipe = recipe_with("A loss", folder)
    torch.manual_seed(0)
    logp_BN = torch.randn(2, 3, requires_grad=True)
    mask_BN = torch.tensor([[1.0, 1.0, 1.0], [1.0, 0.0, 0.0]])
    advantage_BN = torch.tensor([[1.0], [-1.0]]).expand(2, 3)
    tokens = WrittenTokens(logp_BN, logp_BN.detach(), advantage_BN, mask_BN, 2, 16)
    (gradient_BN,) = torch.autograd.grad(loss_of(tokens, recipe.loss), logp_BN)
    assert torch.allclose(gradient_BN, -torch.tensor([[1 / 3, 1 / 3, 1 / 3], [-1.0, 0.0, 0.0]]) / 2)
    student, teacher = torch.randn(2, 4, 5).log_softmax(-1)
    distance = divergences.divergence(student, teacher, recipe.feedback.divergence)
    assert torch.allclose(distance, 1 - (0.5 * (student + teacher)).exp().sum(-1), atol=1e-6)


OTHERS = """
from woodshed.curriculum import Curriculum
from woodshed.grading import grade as by_the_task
from woodshed.tokens.codec import JsonCodec


def last_first(tasks, settings, *, seed, attempts, revalidate):
    return Curriculum(tasks, settings, seed=seed, attempts=attempts)


class ByTheTask:
    def grade(self, task, patch, sandboxes):
        return by_the_task(task, patch, sandboxes)


def stage(session, state):
    assert session.renderer.codec is BRACKETS
    print("stage", state.stage, session.policy is not None)


BRACKETS, VERIFIER = JsonCodec("brackets", "[[", "]]"), ByTheTask()
"""


def merge(tree: dict[str, Any], more: dict[str, Any]) -> None:
    """Put the tables of one example into those of others."""
    for name, value in more.items():
        if isinstance(value, dict):
            merge(tree.setdefault(name, {}), value)
        else:
            tree[name] = value


def test_a_run_of_ones_own_parts(folder: Path, tiny_task: Task, tiny_model_dir: Path):
    """`woodshed train` from a folder outside of the package, with a part of every kind that a recipe names."""
    titles = ("A detector with its hint", "A reward term", "A loss", "A tool", "A sandbox", "An engine")
    (folder / "mine.py").write_text("\n\n".join(section(title)["python"] for title in titles))
    (folder / "others.py").write_text(OTHERS)
    given: dict[str, Any] = {
        "name": "own",
        "stages": ["others:stage", "rl"],
        "tasks": {"train": [str(tiny_task.folder.parent)]},
        "policy": {"model": str(tiny_model_dir), "lora_rank": 4, "codec": "others:BRACKETS"},
        "rl": {"steps": 1, "tasks_per_step": 1},
        "rollout": {"attempts": 2},
        "agent": {"max_turns": 2, "turn_tokens": 16},
        "rewards": {"terms": {"message_words": -0.01}},
        "curriculum": {"kind": "others:last_first"},
        "grading": {"verifier": "others:VERIFIER"},
    }
    for title in titles:
        merge(given, tomllib.loads(section(title)["toml"]))
    given["feedback"]["detectors"] += ["no_call", "truncated"]  # what a random model does
    (folder / "recipe.toml").write_text(tomli_w.dumps(given))
    done = CliRunner().invoke(app, ["train", "recipe.toml"])
    assert done.exit_code == 0, done.output
    assert "imports mine:OUTLINE, from" in done.output and "stage others True" in done.output
    run = RunDir.open(folder / "runs" / "own")
    (line,) = [line for phase, _, line in run.read("metrics") if phase == "train"]
    assert line["trained_rollouts"] == 2 and line["targets"] > 0 < line["rl_grad_norm"]
    assert line["reward_terms"].keys() == {"message_words", "mine:changed_lines"}
    assert (folder / "messages.txt").exists() and sys.modules["mine"].COUNTED.opened >= 4
    del sys.modules["mine"], sys.modules["others"]
    report.write(run)
    atif.export(run, folder / "atif", problems=[])
    (first, *_) = (json.loads(path.read_text()) for path in (folder / "atif").iterdir())
    offered = {each["function"]["name"]: each["function"] for each in first["agent"]["tool_definitions"]}
    assert set(offered["outline"]["parameters"]["properties"]) == {"path"} and "finish" in offered
    assert not {"mine", "others"} & sys.modules.keys(), (
        "reports and exports import nothing that the recipe names"
    )


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
