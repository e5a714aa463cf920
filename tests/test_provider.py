"""Providers of sandboxes: one way in, whoever needs one; and mistakes in a provider of the user's own."""

from __future__ import annotations

import json
import re
from collections import Counter
from pathlib import Path

import counting_provider
import pytest
from counting_provider import NAME, nobody_else
from typer.testing import CliRunner

import woodshed
from woodshed import cli, grading, settings, synthesis, tasks
from woodshed.records import RecipeError, SandboxError, Task
from woodshed.sandbox import BUBBLEWRAP, Revocable, Sandbox, SandboxSettings, SandboxSpec
from woodshed.sandbox.bubblewrap import open_bubblewrap
from woodshed.stages import preflight
from woodshed.stages.recipe import Recipe
from woodshed.synthesis import SynthesisSettings, impossible, leaks


def test_proving_checking_and_grading_go_through_the_provider(tiny_task: Task, tmp_path: Path):
    """Making does in test_making.py, hardening in test_harden.py, the exploit in test_leaks.py."""
    sandboxes = SandboxSettings(provider=NAME).create()

    def since(opened: Counter[str]) -> tuple[int, int]:
        counts = opened["agent"], opened["grader"]
        opened.clear()
        return counts

    with nobody_else() as opened:
        assert grading.grade(tiny_task, tasks.gold_patch(tiny_task), sandboxes).reward == 1.0
        assert since(opened)[1] >= 1
        (reason,) = synthesis.check(tiny_task, sandboxes)
        assert "the visible tests do not pass" in reason
        agent, grader = since(opened)
        assert (
            grader >= 2 and agent == 2
        )  # two verdicts; their isolated run, which is an agent's, and the visible tests
        assert leaks.first_leak(tiny_task, sandboxes) == ""
        assert since(opened) == (1, 0)
        impossible.contradict(tiny_task, tmp_path / "twin", sandboxes)
        assert since(opened)[1] >= 1


@pytest.mark.parametrize(
    "command",
    [
        ["make", "{repository}", "--out", "out"],
        ["check", "{task}"],
        ["leaks", "{task}", "--own"],
        ["harden", "{task}", "--out", "out", "--operators", "H6"],
    ],
)
def test_a_command_asks_the_provider_that_it_is_given(
    tiny_task: Task,
    tiny_repository: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    command: list[str],
):
    monkeypatch.chdir(tmp_path)
    words = [word.format(task=tiny_task.folder, repository=tiny_repository) for word in command]
    with nobody_else():
        result = CliRunner().invoke(cli.app, ["tasks", *words, "--sandbox", "counting_provider:raises"])
    assert result.exit_code == 2, result.output
    assert "sandbox provider 'counting_provider:raises' raised ValueError" in result.output


def test_nobody_but_the_package_of_sandboxes_opens_one_by_name():
    package = Path(woodshed.__file__).parent
    direct = re.compile(r"\b(open_sandbox|open_bubblewrap|BUBBLEWRAP\.open|SubprocessSandbox)\(")
    modules = [path for path in package.rglob("*.py") if package / "sandbox" not in path.parents]
    assert [path for path in modules if direct.search(path.read_text("utf-8"))] == []


def test_the_provider_is_no_part_of_a_task():
    assert (
        SynthesisSettings(sandbox=counting_provider.SETTINGS).fingerprint == SynthesisSettings().fingerprint
    )


@pytest.mark.parametrize(
    ("given", "error", "said"),
    [
        ("bubblewrop", RecipeError, "no sandbox provider 'bubblewrop'; did you mean 'bubblewrap'?"),
        ("nowhere:provider", RecipeError, "there is no module 'nowhere'"),
        ("counting_provider:countin", RecipeError, "it has counting"),
        ("counting_provider:unfit", RecipeError, "has no 'watches', which SandboxProvider asks for"),
        ("counting_provider:Counting", RecipeError, "is a class; name an object of it"),
        ("counting_provider:raises", RecipeError, "raised ValueError in open: no machines; a sandbox that"),
        ("counting_provider:nothing", RecipeError, "opened a NoneType, which has no 'workspace'"),
        ("counting_provider:half", RecipeError, "opened a Half, which has no 'workspace'"),
        ("counting_provider:is_full", SandboxError, "all machines are taken"),
    ],
)
def test_a_mistake_in_a_provider_is_found_before_the_work(given: str, error: type[Exception], said: str):
    with pytest.raises(error) as raised:
        preflight.refuse(settings.read(Recipe, None, [f"sandbox.provider={json.dumps(given)}", 'name="x"']))
    assert said in str(raised.value) and "\n" not in str(raised.value)


@pytest.mark.parametrize(
    ("recipe", "said"),
    [
        ('[sandbx]\nprovider = "bubblewrap"\n', "sandbox"),
        ('[sandbox]\nprovidr = "bubblewrap"\n', "provider"),
        ("[sandbox]\nprovider = 3\n", "sandbox.provider"),
    ],
)
def test_a_misspelt_section_is_named(tmp_path: Path, recipe: str, said: str):
    (tmp_path / "recipe.toml").write_text(f'name = "x"\n{recipe}')
    with pytest.raises(RecipeError, match=said):
        settings.read(Recipe, tmp_path / "recipe.toml")


def test_without_a_section_it_is_bubblewrap():
    assert settings.read(Recipe, None, ['name="x"']).sandbox.create() is BUBBLEWRAP


def test_a_broken_provider_is_no_verdict_and_a_full_one_no_reward(tiny_task: Task):
    """A mistake of the person's stops the work; a machine that is full says nothing about the patch."""
    gold = tasks.gold_patch(tiny_task)
    with pytest.raises(RecipeError, match="raised ValueError"):
        grading.grade(tiny_task, gold, SandboxSettings(provider="counting_provider:raises").create())
    lost = grading.grade(tiny_task, gold, SandboxSettings(provider="counting_provider:is_full").create())
    assert (lost.status, lost.reward) == ("invalid", 0.0) and "all machines are taken" in lost.detail


def test_what_is_revoked_is_closed_and_opens_no_more():
    sandboxes = Revocable(BUBBLEWRAP)
    one, other = sandboxes.open(SandboxSpec(())), sandboxes.open(SandboxSpec(()))
    other.close()
    sandboxes.close()
    assert not one.alive() and not other.alive()
    with pytest.raises(SandboxError, match="broken off"):
        sandboxes.open(SandboxSpec(()))
    sandboxes.close()
    assert sandboxes.watches is BUBBLEWRAP.watches


def test_what_opens_while_it_is_revoked_is_closed():
    opened: list[Sandbox] = []

    class Slow:
        watches = False

        def open(self, spec: SandboxSpec) -> Sandbox:
            opened.append(open_bubblewrap(spec))
            sandboxes.close()  # somebody else revokes before it is handed out
            return opened[0]

    sandboxes = Revocable(Slow())
    with pytest.raises(SandboxError, match="broken off"):
        sandboxes.open(SandboxSpec(()))
    assert not opened[0].alive()
