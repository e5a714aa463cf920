"""Variants of an experiment: what each resolves to, runs of them on a tiny model, and the tables at the end."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from woodshed import settings
from woodshed.agent.prompt import EFFORT
from woodshed.cli import app
from woodshed.cli.train import run_recipe
from woodshed.evals import variants as tables
from woodshed.records import RecipeError, RewardTerms, Rollout, TokenDivergence, Verdict
from woodshed.runs.folder import RunDir
from woodshed.stages import variants
from woodshed.stages.recipe import Recipe
from woodshed.tokens.model_files import load_tokenizer
from woodshed.tokens.renderer import create_renderer

RECIPES = Path(__file__).parent.parent / "recipes"
EXPERIMENT = RECIPES / "targeted-feedback.toml"


def test_every_arm_of_the_experiment_differs_as_it_says():
    made = {name: variants.recipe_of(EXPERIMENT, name, ["seed=1"]) for name in variants.names(EXPERIMENT)}
    assert [recipe.name for recipe in made.values()] == [f"targeted-feedback-{name}-1" for name in made]
    main = [made[name] for name in ("rl", "kl-frozen", "kl-ema", "kl-live", "opsd", "penalty", "kl-alone")]
    for recipe in main:  # equal rollouts, equal optimizer steps, the same start and held-out tasks
        for part in ("rl", "rollout", "agent", "tasks", "policy", "optimizer", "evaluation", "engine"):
            assert getattr(recipe, part) == getattr(main[0], part), part
    assert [recipe.feedback.weight for recipe in main] == [0.0, 1.0, 1.0, 1.0, 1.0, 0.0, 1.0]
    assert [recipe.feedback.teacher for recipe in main[1:5]] == ["frozen", "ema", "live", "frozen"]
    form = made["opsd"].feedback.form
    assert (form.scope, form.pointwise_clip) == ("rollout", 0.05)
    assert made["kl-forward"].feedback.form.support == "teacher"
    assert made["kl-alone"].loss.weight == 0 and set(made["penalty"].rewards.terms.values()) == {-0.1}
    assert made["start-naive"].sft.reminder_share == 0 and made["start"].policy.adapter == ""
    assert made["start-natural"].sft.seeded_fault_share == 0 < made["start"].sft.seeded_fault_share
    for recipe in made.values():
        assert recipe.tasks.heldout != recipe.tasks.train


@pytest.mark.parametrize("path", sorted(RECIPES.glob("*.toml")), ids=lambda p: p.name)
def test_every_recipe_can_be_read_back_from_what_a_run_keeps(path: Path, tmp_path: Path):
    recipe = settings.read(Recipe, path)
    for chosen in [recipe, *(variants.recipe_of(path, name) for name in recipe.variants)]:
        (tmp_path / "kept.toml").write_text(chosen.to_toml())
        again = settings.read(Recipe, tmp_path / "kept.toml")
        assert (
            again.model_dump(exclude_none=True) == chosen.model_dump(exclude_none=True) and not again.variants
        )


def test_an_unknown_arm_is_refused_with_those_that_there_are(tmp_path: Path):
    with pytest.raises(RecipeError, match="no variant 'kl-forzen'; it has start, start-naive"):
        variants.recipe_of(EXPERIMENT, "kl-forzen")
    (tmp_path / "plain.toml").write_text('name = "plain"\n')
    with pytest.raises(RecipeError, match="names no variants; add a table"):
        variants.names(tmp_path / "plain.toml")
    found = CliRunner().invoke(app, ["variants", str(EXPERIMENT), "--only", "rl,nope", "--dry-run"])
    assert found.exit_code == 2 and "no variant 'nope'" in found.stderr


def test_a_dry_run_names_one_command_for_each_arm_and_seed():
    command = ["variants", str(EXPERIMENT), "--only", "rl,kl-live", "--seeds", "0,2", "--dry-run"]
    lines = CliRunner().invoke(app, command).stdout.splitlines()
    assert [line.split(": ")[0] for line in lines] == [
        f"runs/targeted-feedback-{name}-{seed}" for name in ("rl", "kl-live") for seed in (0, 2)
    ]
    assert lines[3].endswith("--variant kl-live seed=2")


TINY = """
name = "tiny"
seed = 3
[variants]
rl = ["feedback.weight=0"]
all = ["feedback.preset=opsd", "rewards.terms.invalid_calls=-0.125", "effort.weight=0.5",
       'effort.levels=["low", "high"]', "evaluation.effort=high"]
distill = ['stages=["distill"]', "distill.steps=2", "distill.tasks_per_step=1", "distill.preset=opsd"]
[policy]
lora_rank = 4
codec = "plain"
[agent]
max_turns = 3
turn_tokens = 16
rollout_tokens = 48
[rollout]
attempts = 2
[rl]
steps = 2
tasks_per_step = 1
[curriculum]
repeats = true
"""


@pytest.fixture(scope="module")
def finished(tiny_task, tiny_model_dir, tmp_path_factory) -> dict[str, RunDir]:
    """The variants of a tiny experiment, run here."""
    root = tmp_path_factory.mktemp("variants")
    (root / "tiny.toml").write_text(TINY)
    tasks = f'["{tiny_task.folder.parent}"]'
    given = [
        f"tasks.train={tasks}",
        f"tasks.heldout={tasks}",
        f"runs={root}",
        f"policy.model={tiny_model_dir}",
    ]
    made = {}
    for name in variants.names(root / "tiny.toml"):
        recipe = variants.recipe_of(root / "tiny.toml", name, given)
        made[name] = RunDir.create(root / recipe.name, recipe=recipe.to_toml(), manifest={})
        run_recipe(recipe, made[name], lambda *_: None)
        made[name].unlock()
    return made


def test_a_whole_episode_is_taught_turn_by_turn(finished):
    kept = finished["all"]
    turns = {made.id: made.turns for _, _, made in kept.read("rollouts", Rollout)}
    token_divergences = [taught for _, _, taught in kept.read("divergences", TokenDivergence)]
    attempts = [made for phase, _, made in kept.read("rollouts", Rollout) if phase == "train"]
    assert len(token_divergences) == sum(len(made.turns) for made in attempts) and len(attempts) == 4
    for taught in token_divergences:
        tokens = turns[taught.rollout_id][taught.turn].sampled_ids
        assert taught.detector == "solution" and len(taught.student) == len(taught.teacher) == len(tokens)
    metrics = [line for phase, _, line in kept.read("metrics") if phase == "train"]
    assert all(line["targets"] == 2 and line["kl_loss"] > 0 for line in metrics)
    assert not finished["rl"].read("divergences", TokenDivergence)


def test_attempts_at_practice_tasks_are_studied_with_their_solutions(finished):
    kept = finished["distill"]
    attempts = [made for phase, _, made in kept.read("rollouts", Rollout) if phase == "distill"]
    token_divergences = [taught for _, _, taught in kept.read("divergences", TokenDivergence)]
    assert len(attempts) == 2 and {taught.detector for taught in token_divergences} == {"solution"}
    assert len(token_divergences) == sum(len(made.turns) for made in attempts)
    assert not [verdict for phase, _, verdict in kept.read("verdicts", Verdict) if phase == "distill"]


def test_what_was_paid_is_kept_for_every_attempt_and_said_in_the_metrics(finished, tiny_model_dir):
    kept = finished["all"]
    reward_terms = {found.rollout_id: found for _, _, found in kept.read("reward_terms", RewardTerms)}
    attempts = {made.id: made for phase, _, made in kept.read("rollouts", Rollout) if phase == "train"}
    assert set(reward_terms) == set(attempts) and not finished["rl"].has("reward_terms")
    renderer = create_renderer(load_tokenizer(str(tiny_model_dir))[0], codec="plain")
    for name, made in attempts.items():
        faults = sum(turn.error_kind is not None for turn in made.turns)
        assert (
            reward_terms[name].terms["invalid_calls"] == -0.125 * faults
            and reward_terms[name].terms["effort"] < 0
        )
        level = reward_terms[name].effort
        assert EFFORT[level] in renderer.decode(made.turns[0].context_ids)
    assert {found.effort for found in reward_terms.values()} == {"low", "high"}  # one a step here
    for phase, step, line in kept.read("metrics"):
        if phase == "train":
            own = [found for name, found in reward_terms.items() if name.startswith(f"train-{step}-")]
            expected = sum(found.terms["effort"] for found in own) / len(own)
            assert line["reward_terms"]["effort"] == pytest.approx(expected)


def test_evaluations_ask_for_the_effort_of_the_recipe_and_say_how_it_follows_difficulty(finished):
    kept = finished["all"]
    assert kept.manifest["score"]["effort"] == "high" and finished["rl"].manifest["score"]["effort"] is None
    effort = [(step, line) for phase, step, line in kept.read("metrics") if phase == "effort"]
    assert [step for step, _ in effort] == [2]
    for side in ("before", "after"):
        assert sum(effort[0][1][side]["tasks"].values()) == len(kept.read("verdicts", Verdict)[:1])


def test_the_tables_show_both_arms_and_one_against_the_other(finished):
    table = tables.table({name: [run] for name, run in finished.items()})  # the study was evaluated once only
    assert [row[0] for row in table if row[0]] == ["variant", "rl", "all"]
    assert {"invalid-call rate", "mean reward", "characters outside calls"} <= {row[2] for row in table}
    against = tables.against({name: [run] for name, run in finished.items()})
    assert [row[0] for row in against] == ["against rl", "all"] and len(against[1]) == len(against[0])
    assert tables.against({"rl": [finished["rl"]]}) == []


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_every_arm_of_the_experiment_runs_and_is_not_run_twice(tiny_task, tiny_model_dir, tmp_path: Path):
    """The recipe as it is, but for a tiny model and short runs, through the command line."""
    text = EXPERIMENT.read_text()
    for old, new in (
        ("sft.steps=80", "sft.steps=2"),
        ("\nsteps = 16", "\nsteps = 2"),
        ("tasks_per_step=50", "tasks_per_step=1"),
        ("tasks_per_step = 8", "tasks_per_step = 1"),
        ("turn_tokens = 192", "turn_tokens = 16"),
        ("rollout_tokens = 768", "rollout_tokens = 32"),
        ("attempts = 8", "attempts = 2"),
        ("max_turns = 5", "max_turns = 4"),
    ):
        assert old in text
        text = text.replace(old, new)
    (tmp_path / "tiny.toml").write_text(text)
    for name in ("warmup", "practice", "heldout"):
        shutil.copytree(tiny_task.folder, tmp_path / "tasks" / "feedback" / name / tiny_task.name)
    command = [sys.executable, "-m", "woodshed", "variants", "tiny.toml", f"policy.model={tiny_model_dir}"]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    for expected in (0, len(variants.names(EXPERIMENT))):
        done = subprocess.run(
            [*command, "policy.dtype=float32", "rollout.tool_threads=2"],
            cwd=tmp_path,
            env=environment,
            capture_output=True,
            text=True,
            timeout=1700,
            check=False,
        )
        assert done.returncode == 0, done.stdout + done.stderr
        assert done.stdout.count("already finished") == expected
        table = done.stdout[done.stdout.rindex("\nvariant ") :]
        shown = [line.split()[0] for line in table.splitlines() if "invalid-call rate" in line]
        evaluated_twice = [n for n in variants.names(EXPERIMENT) if not n.startswith(("start", "gate"))]
        assert shown[: len(evaluated_twice)] == evaluated_twice  # behind them the head of the other table
