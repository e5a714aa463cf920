"""The stage `solutions`: a policy learns from what persons said about its work."""

from __future__ import annotations

import subprocess
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest
from tiny_model import write_tiny_model

from woodshed import settings
from woodshed.cli.app import open_engine
from woodshed.cli.train import run_recipe
from woodshed.records import Patch, RecipeError, Rollout, Verdict
from woodshed.runs.folder import RunDir
from woodshed.sandbox import BUBBLEWRAP
from woodshed.solving import working_tree
from woodshed.solving.decisions import Decision, Solution, verdict
from woodshed.solving.keeping import SolveSettings, keep, solutions_folder
from woodshed.solving.request import open_request
from woodshed.stages import solutions
from woodshed.stages.recipe import Recipe

SHORT = {"max_turns": 2, "turn_tokens": 12, "rollout_tokens": 40}


def decided(run: RunDir, *rewards: float) -> None:
    """Solutions with these rewards, of no token."""
    for number, reward in enumerate(rewards):
        rollout = Rollout(f"solve-{number}", "t", "t", 0, 0, (), Patch({}), "finished", 1.0)
        run.append("rollouts", [rollout], "solve", number)
        run.append("solutions", [Solution(rollout.id, "x", "/r", "", "edited", None)], "solve", number)
        run.append("verdicts", [Verdict(rollout.id, "t", "graded", reward, False, {})], "solve", number)


@pytest.mark.parametrize(
    ("rewards", "changes", "message"),
    [
        ((), {}, "tasks.train names no folder with decided ones"),
        ((0.0, 0.0), {}, "the 2 decided solutions all have reward 0"),
        ((0.0, 1.0), {"model": "other"}, "solutions of model = 'smollm2-135m', and the policy has 'other'"),
        ((0.0, 1.0), {"adapter": "a"}, r"set policy\.adapter = ''"),
    ],
)
def test_solutions_that_teach_nothing_are_refused(
    rewards: tuple[float, ...], changes: dict[str, str], message: str, tmp_path: Path
):
    run = solutions_folder(SolveSettings(runs=tmp_path), {})
    decided(run, *rewards)
    tree = {
        "name": "x",
        "stages": ["solutions"],
        "tasks": {"train": [str(run.path)]},
        "policy": {"model": "smollm2-135m", **changes},
    }
    with pytest.raises(RecipeError, match=message):
        solutions.read(settings.validate(Recipe, tree))


def test_a_policy_learns_from_accepted_and_rejected_work_in_one_step(tmp_path: Path):
    model = write_tiny_model(tmp_path / "model")
    repository = tmp_path / "repository"
    repository.mkdir()
    (repository / "a.py").write_text("x = 1\n")
    subprocess.run(["git", "init", "-q", str(repository)], check=True)
    chosen = settings.validate(
        SolveSettings, {"model": str(model), "codec": "plain", "runs": str(tmp_path), "agent": SHORT}
    )
    run = solutions_folder(chosen, {})
    decisions: tuple[Decision, ...] = ("accepted", "rejected", "unchanged")
    tree = working_tree.read_tree(repository)
    with closing(open_engine(chosen)) as engine, open_request(tree, "Do it.", None, BUBBLEWRAP) as request:
        for number, decision in enumerate(decisions):
            rollout = request.attempt(engine, chosen, f"solve-{number}", number=number)
            solution = Solution(rollout.id, "Do it.", str(repository), "", decision, None)
            keep(run, rollout, engine.renderer, solution, verdict(rollout, decision))
        left = replace(rollout, id="solve-undecided")
        keep(run, left, engine.renderer, Solution(left.id, "Do it.", "", "", None, None), None)
    tree = {
        "name": "learned",
        "runs": str(tmp_path / "runs"),
        "stages": ["solutions"],
        "tasks": {"train": [str(run.path)]},
        "policy": {"model": str(model), "codec": "plain", "lora_rank": 4},
        "agent": SHORT,
    }
    recipe = settings.validate(Recipe, tree)
    learned = RunDir.create(recipe.runs / recipe.name, recipe=recipe.to_toml(), manifest={})
    run_recipe(recipe, learned, lambda done, total, text: None)
    [(phase, step, metrics)] = learned.read("metrics")
    assert (phase, step, metrics["solutions"], metrics["trained_rollouts"]) == ("solutions", 0, 3, 3)
    assert metrics["reward"] == pytest.approx(1 / 3) and metrics["grad_norm"] > 0
    assert metrics["logp_gap_mean"] < 1e-3
    assert (learned.path / "policy" / "adapter_config.json").is_file()
