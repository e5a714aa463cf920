"""`woodshed init`: what it sees of a repository and a model, the recipe that it writes, and what that will cost."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
from tiny_model import tiny_tokenizer, write_tiny_model
from typer.testing import CliRunner

from woodshed import settings
from woodshed.cli import app
from woodshed.cli.init import making, spoken
from woodshed.records import ModelError, RunError, TaskError
from woodshed.stages import cost_estimate as estimate
from woodshed.stages import first_recipe as recipe
from woodshed.stages import preflight
from woodshed.stages.recipe import Recipe
from woodshed.synthesis import repository_facts as repository
from woodshed.tokens import model_facts as model

RESULTS = Path(__file__).parent.parent / "benchmarks" / "results"
LAPTOP = recipe.Hardware(cores=2, memory_gb=25.3)
CARD = recipe.Hardware(cores=16, memory_gb=139.8, gpu="NVIDIA H200")
SMOLLM = model.ModelFacts("smollm2-135m", "llama", 135_000_000, 30, 576, 49152, 8192, "plain", 1.0, "small")
QWEN = model.ModelFacts("q", "qwen2", 494_000_000, 24, 896, 151936, 32768, "plain", 1.0, "small")
LARGE = model.ModelFacts("l", "qwen3", 8_200_000_000, 36, 4096, 151936, 32768, "hermes", 1.0, "")


def shop(folder: Path) -> Path:
    """A repository with a slow marker, a variable that its tests need, and a module of its own in src."""
    files = {
        "pyproject.toml": '[project]\nname = "shop"\nversion = "1"\ndependencies = ["acme-money>=1"]\n'
        "[tool.pytest.ini_options]\naddopts = \"-m 'not slow'\"\nmarkers = ['slow: takes long']\n",
        "src/shop/__init__.py": "",
        "src/shop/prices.py": "def net(price):\n    'Without tax.'\n    return price / 1.2\n\ndef _cut(x): ...\n",
        "tests/conftest.py": "import os\nfrom shop.prices import net\nREGION = os.environ['SHOP_REGION']\n",
        "tests/test_prices.py": "import os\ndef test_net(): assert 1\nclass TestTax:\n    def test_of(self): ...\n"
        "OFF = os.environ.get('SHOP_OFF')\n",
        "setup_helper.py": "print('no package')\n",
    }
    for name, text in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    return folder


def test_a_repository_is_described_by_its_files(tmp_path: Path):
    found = repository.look(str(shop(tmp_path / "shop")))
    assert (found.name, found.packages, found.bodies) == ("shop", ("shop",), (1,))
    assert (found.num_tests, found.test_files, found.options) == (2, 1, "-m 'not slow'")
    assert (found.needed, found.requirements) == (("SHOP_REGION",), ("acme-money>=1",))
    assert found.longest(10, is_small=True) == 1
    command = making(found, Path("tasks/shop"), 10, 1)
    assert command == f"woodshed tasks make {found.source} --out tasks/shop --limit 10 --env SHOP_REGION"
    many = replace(found, bodies=tuple(range(1, 90)), needed=())
    assert (many.longest(4, is_small=True), many.longest(5, is_small=True)) == (8, 60)
    assert many.longest(4, is_small=False) == 60
    assert "--operators stub max_body_lines=8" in making(many, Path("tasks/shop"), 4, 8)


def test_a_repository_without_tests_or_a_package_is_refused(tmp_path: Path):
    with pytest.raises(TaskError, match="no folder"):
        repository.look(str(tmp_path / "none"))
    folder = shop(tmp_path / "shop")
    (folder / "tests" / "test_prices.py").unlink()
    with pytest.raises(TaskError, match="holds no test"):
        repository.look(str(folder))
    shutil.rmtree(folder / "src")
    with pytest.raises(TaskError, match="no Python package"):
        repository.look(str(folder))


def test_a_model_is_described_by_its_files(tiny_model_dir: Path, tmp_path: Path):
    found = model.look(str(tiny_model_dir))
    from transformers import AutoModelForCausalLM

    loaded = AutoModelForCausalLM.from_pretrained(tiny_model_dir)
    assert (found.kind, found.layers, found.width, found.context) == ("llama", 2, 64, 4096)
    assert found.num_weights == sum(weight.numel() for weight in loaded.parameters())
    assert found.call_format == "plain" and "lists no tools" in found.why_warm_up and found.is_tiny
    assert found.wordiness > 1, "a vocabulary of bytes needs more tokens"
    without = tmp_path / "hub"  # of a hub model only the configuration is at hand
    shutil.copytree(tiny_model_dir, without, ignore=shutil.ignore_patterns("*.safetensors"))
    assert model.look(str(without)).num_weights == pytest.approx(found.num_weights, rel=0.02)
    run = tmp_path / "run"
    shutil.copytree(tiny_model_dir, run / "policy")
    (run / "recipe.toml").write_text("")
    trained = model.look(str(run / "policy"))
    assert (trained.why_warm_up, trained.called) == ("", "run") and "no warm-up" in spoken(trained)[-1]
    (without / "config.json").write_text(json.dumps({"model_type": "llama", "hidden_size": "many"}))
    with pytest.raises(ModelError):
        model.look(str(without))


def test_a_model_without_a_chat_template_is_refused(tmp_path: Path):
    folder = write_tiny_model(tmp_path / "bare", tokenizer=tiny_tokenizer(template=""))
    with pytest.raises(ModelError, match="no chat template; use an instruction-tuned model"):
        model.look(str(folder))


@pytest.mark.parametrize("machine", [LAPTOP, CARD], ids=str)
@pytest.mark.parametrize("facts", [SMOLLM, QWEN, LARGE], ids=lambda facts: facts.kind)
@pytest.mark.parametrize("count", [5, 10, 200])
def test_every_recipe_can_be_started(facts: model.ModelFacts, machine: recipe.Hardware, count: int):
    """It trains something, says why for each setting, and reads back; nobody else's adapter or note is in it."""
    from woodshed.cli import reference

    chosen = recipe.choose("mine", Path("tasks/mine"), facts, machine, count, 60)
    assert chosen.agent.turn_tokens >= 60 * 14 and chosen.agent.rollout_tokens > 2 * chosen.agent.turn_tokens
    preflight.refuse(chosen)
    assert preflight.warnings(chosen) == []
    assert not chosen.policy.adapter and not chosen.note and chosen.policy.model == facts.spec
    assert ("sft" in chosen.stages) == bool(facts.why_warm_up) and not chosen.sft.seeded_fault_share
    practice = (1 - chosen.tasks.heldout_share) * count
    assert 2 * chosen.rl.tasks_per_step <= practice, "also where some tasks are in no set"
    notes = recipe.reasons(chosen, facts, machine)
    text = reference.commented(chosen, notes, ("policy.model",))
    path = [name for name, _ in settings.leaves(Recipe)]
    assert {name for name in notes if name not in path} == {"agent", "sft"}
    import tomllib

    assert settings.validate(Recipe, tomllib.loads(text)) == chosen


def test_the_warm_up_alone_is_measured_afterwards():
    for machine in (LAPTOP, CARD):
        chosen = recipe.only_warm_up("warm", (Path("a"), Path("b")), SMOLLM, machine, 40, 8)
        preflight.refuse(chosen)
        assert preflight.warnings(chosen) == [] and chosen.stages == ("sft", "evaluate")
        assert chosen.tasks.train == (Path("a"), Path("b")) and not chosen.sft.seeded_fault_share
        assert settings.changed(chosen, ["sft.steps=7"]).sft.steps == 7


def measured(name: str):  # type: ignore[no-untyped-def]
    return json.loads((RESULTS / f"{name}.json").read_text("utf-8"))


def test_estimates_agree_with_what_was_measured():
    """Within a factor of two, which is what the command says."""
    quick = settings.read(Recipe, RESULTS.parents[1] / "recipes" / "quickstart.toml")
    cost = estimate.estimate(quick, SMOLLM, num_tasks=37, is_gpu=False, cores=2)
    found = measured("quickstart")
    minutes = [run["minutes"] for run in found["runs"] if not run["minutes_with_tasks"] and run["minutes"]]
    assert minutes and all(0.5 < (cost.practice_min + cost.evaluation_min) / m < 2 for m in minutes)
    assert all(0.5 < cost.memory_gb / gb < 2 for gb in found["times"]["peak_gb_training_f29feb6"])
    experiment = settings.read(Recipe, RESULTS.parents[1] / "recipes" / "targeted-feedback.toml")
    cost = estimate.estimate(experiment, QWEN, num_tasks=0, is_gpu=True, cores=16)
    whole = [run for run in measured("targeted_feedback")["runs"] if len(run["steps"]) == 16]
    took = [sum(step["seconds"] for step in run["steps"]) / 60 for run in whole]
    assert len(took) > 10 and all(0.5 < cost.practice_min / m < 2 for m in took)
    factory = measured("task_factory")["cpu_s_per_task"]
    assert factory == estimate.TASK_CPU_S


@pytest.mark.parametrize(("file", "rank"), [("grpo_side_by_side", 16), ("full_weights_h200", 0)])
def test_memory_agrees_with_what_was_measured(file: str, rank: int):
    for row in measured(file)["rows"]:
        if row["side"] == "woodshed":
            chosen = Recipe.model_validate(
                {
                    "name": "x",
                    "policy": {"dtype": "bfloat16", "lora_rank": rank},
                    "loss": {"micro_batch_tokens": row["micro_rows"] * 768},
                    "engine": {"cache_mb": 0},
                }
            )
            found = estimate.memory(chosen, QWEN, is_gpu=True) / 2**30
            assert 0.67 < found / row["peak_gib"] < 1.5, (found, row["peak_gib"])


def test_init_writes_a_recipe_and_says_what_comes_next(
    tiny_model_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    shop(tmp_path / "shop")
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("SHOP_REGION", raising=False)
    said = CliRunner().invoke(app, ["init", "shop", "--model", str(tiny_model_dir)])
    assert said.exit_code == 0, said.output
    assert "environment variables that its tests need: SHOP_REGION" in said.stdout
    assert "export SHOP_REGION=... first" in said.stderr and "recipe: shop.toml" in said.stdout
    commands = [line.removeprefix("next: ") for line in said.stderr.splitlines() if line.startswith("next: ")]
    assert commands == [
        "woodshed tasks make shop --out tasks/shop --limit 10 --env SHOP_REGION",
        "woodshed train shop.toml",
        "woodshed report runs/shop --open",
    ]
    text = Path("shop.toml").read_text()
    assert all(f"#   {command}" in text for command in commands) and "benchmarks/results" in text
    checked = CliRunner().invoke(app, ["train", "shop.toml", "--dry-run"])
    assert checked.exit_code == 0 and "warning" not in checked.stderr
    again = CliRunner().invoke(app, ["init", "shop", "--model", str(tiny_model_dir)])
    assert again.exit_code == 2 and f"{RunError.__name__}: shop.toml exists" in again.stderr
