"""Learning from demonstrations: a tiny real model takes over what it was shown, and what it forgets is measured."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
import torch
from tiny_model import write_tiny_model
from tiny_training import feedback_of
from transformers import AutoModelForCausalLM, AutoTokenizer

from woodshed import report, settings
from woodshed.cli.train import run_recipe
from woodshed.engines.local import LocalEngine
from woodshed.experience.compile import rollout_sample
from woodshed.experience.samples import TrainingSample
from woodshed.feedback import demonstrations
from woodshed.learning import packing
from woodshed.learning.logprobs import token_logps
from woodshed.learning.loss_settings import FeedbackSettings
from woodshed.learning.optimizer import OptimizerSettings
from woodshed.learning.policy import Policy
from woodshed.learning.trainer import Trainer
from woodshed.records import Patch, RecipeError, Rollout, TokenDivergence
from woodshed.runs.folder import RunDir
from woodshed.stages import distill, preflight
from woodshed.stages.distill import SYSTEM, Demonstration
from woodshed.stages.recipe import DistillSettings, Recipe
from woodshed.tokens.renderer import Renderer, create_renderer

KNOWN = [Demonstration(f"Call number {n}?", word) for n, word in enumerate(("top", "cut", "sum"))]
EARLIER = [Demonstration(f"Colour {n}?", word) for n, word in enumerate(("red", "blue", "grey"))]
OLD = "no"
STEPS = 24


def rows(renderer: Renderer, asked: Demonstration, text: str, *, shown: bool = False) -> TrainingSample:
    """The answer `text` to a question, or the same after the demonstration was read."""
    context = renderer.start(SYSTEM, asked.prompt, ())
    asking = Rollout("", "", "", 0, 0, (), Patch({}), "finished", 0.0)
    hint = demonstrations.example(asking, asked.demonstration)
    cut = len(context.ids) - context.opening
    extra = renderer.hint(hint.text) if shown else ()
    before = (*context.ids[:cut], *extra, *context.ids[cut:])
    ids = (*before, *renderer.encode_message(text))
    return TrainingSample(ids, tuple(range(len(before), len(ids))))


@pytest.fixture(scope="module")
def reader(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model that answers "no", follows a demonstration that it is shown, and knows colours."""
    torch.set_num_threads(1)
    folder = write_tiny_model(tmp_path_factory.mktemp("distill") / "model")
    model = AutoModelForCausalLM.from_pretrained(folder)
    renderer = create_renderer(AutoTokenizer.from_pretrained(folder), codec="plain")
    taught = [rows(renderer, each, OLD) for each in KNOWN]
    taught += [rows(renderer, each, each.demonstration, shown=True) for each in KNOWN]
    taught += [rows(renderer, each, each.demonstration) for each in EARLIER]
    policy, padded = Policy(model.requires_grad_(True), is_adapter=False), packing.pad(taught)
    optimizer = torch.optim.AdamW(policy.trainable.values(), lr=3e-3)
    for _ in range(80):
        optimizer.zero_grad()
        logp_BN = token_logps(policy.logits(padded), padded.tokens_BN, 1.0)
        (-(logp_BN * padded.mask_BN).sum() / padded.mask_BN.sum()).backward()
        optimizer.step()
    model.save_pretrained(folder)
    return folder


@pytest.fixture(autouse=True)
def short_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(distill, "ANSWER_TOKENS", 8)


class Unguarded(DistillSettings):
    """Without two guards of the papers: SDFT skips more tokens than an answer has here, and OPSD's clip
    leaves no gradient where teacher and student disagree wholly."""

    @property
    def feedback(self) -> FeedbackSettings:
        return feedback_of({"skip_first": 0, "pointwise_clip": None}, preset=self.preset)


def write(path: Path, several: list[Demonstration]) -> Path:
    lines = [json.dumps({"prompt": d.prompt, "demonstration": d.demonstration}) for d in several]
    path.write_text("\n".join(lines) + "\n")
    return path


def recipe_for(model: Path, folder: Path, *overrides: str, steps: int = STEPS) -> Recipe:
    write(folder / "known.jsonl", KNOWN)
    write(folder / "earlier.jsonl", EARLIER)
    given = {
        "name": "distill",
        "runs": str(folder / "runs"),
        "policy.model": str(model),
        "policy.lora_rank": 0,
        "policy.codec": "plain",
        "stages": ["distill"],
        "distill.steps": steps,
        "distill.demonstrations": [str(folder / "known.jsonl")],
        "distill.earlier": [str(folder / "earlier.jsonl")],
        "distill.answers_per_step": 12,
        "checkpoint_every": 8,
        "optimizer.learning_rate": 2e-3,
    }
    recipe = settings.read(Recipe, None, [*(f"{k}={json.dumps(v)}" for k, v in given.items()), *overrides])
    return recipe.model_copy(update={"distill": Unguarded(**recipe.distill.model_dump())})


def run(recipe: Recipe) -> RunDir:
    made = RunDir.create(recipe.runs / recipe.name, recipe=recipe.to_toml(), manifest={})
    run_recipe(recipe, made, lambda *_: None)
    made.unlock()
    return made


@pytest.mark.parametrize("preset", ["sdft", "opsd"])
def test_it_learns_what_was_demonstrated_and_says_what_it_forgot(reader, tmp_path, preset):
    kept = run(recipe_for(reader, tmp_path, f"distill.preset={preset}"))
    lines = [line for phase, _, line in kept.read("metrics") if phase == "distill"]
    before, after = lines[0]["before"], lines[-1]
    assert len(lines) == STEPS and before["demonstrated_logp"] < -4.0
    assert after["demonstrated_logp"] > before["demonstrated_logp"] + 4.0  # without seeing the demonstration
    assert before["earlier_kl"] == pytest.approx(0.0, abs=1e-3)
    forgotten = before["earlier_logp"] - after["earlier_logp"]
    assert forgotten < (after["demonstrated_logp"] - before["demonstrated_logp"]) / 4
    # its earlier answers were the right ones, so both measures of forgetting agree
    assert after["earlier_kl"] == pytest.approx(forgotten, abs=0.15)
    answers = [made for phase, _, made in kept.read("rollouts", Rollout) if phase == "distill"]
    wanted = {each.id: each.demonstration for each in KNOWN}
    begins = [made.turns[0].text[:1] == wanted[made.task_id][0] for made in answers]
    assert sum(begins[:12]) == 0 and sum(begins[-24:]) >= 12  # its own words at first, then what it was shown
    assert len(kept.read("divergences", TokenDivergence)) == STEPS * 12
    assert report.write(kept).is_file()


def test_a_study_that_was_stopped_goes_on_as_if_it_had_not(reader, tmp_path):
    whole = run(recipe_for(reader, tmp_path, "name=whole", "checkpoint_every=2", steps=4))
    cut = recipe_for(reader, tmp_path, "name=cut", "checkpoint_every=2", steps=4)
    kept = RunDir.create(cut.runs / cut.name, recipe=cut.to_toml(), manifest={})

    def stop(done: int, _total: int, text: str) -> None:
        if done == 3 and text.startswith("distill"):
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run_recipe(cut, kept, stop)
    for name in ("known", "earlier"):  # the run has copies of its own
        (tmp_path / f"{name}.jsonl").unlink()
    run_recipe(cut, kept, lambda *_: None)
    assert distill.read_demonstrations([kept.path / "demonstrations" / "distill.jsonl"]) == KNOWN
    assert distill.read_demonstrations([kept.path / "demonstrations" / "earlier.jsonl"]) == EARLIER

    def figures(found: RunDir) -> list[dict]:
        lines = [line for phase, _, line in found.read("metrics") if phase == "distill"]
        return [{k: v for k, v in line.items() if k != "seconds"} for line in lines]

    assert figures(kept) == figures(whole)
    kept.unlock()


def test_forgetting_is_the_divergence_that_enumeration_gives(reader, monkeypatch):
    """Answers of one token: KL(before || now) over the whole vocabulary is the oracle of the estimate."""
    model = AutoModelForCausalLM.from_pretrained(reader)
    renderer = create_renderer(AutoTokenizer.from_pretrained(reader), codec="plain")
    policy = Policy(model.requires_grad_(True), is_adapter=False)
    monkeypatch.setattr(distill, "ANSWER_TOKENS", 1)
    asked = Demonstration("Which one?", "x")
    answers = distill.answer([asked] * 1500, LocalEngine(model, renderer), name="a", seed=0)
    padded = packing.pad([rollout_sample(answers[0])])
    with torch.no_grad():
        old_V = policy.logits(padded)[0, 0].log_softmax(-1)
        rng = torch.Generator().manual_seed(1)
        for parameter in policy.trainable.values():
            parameter.add_(0.05 * torch.randn(parameter.shape, generator=rng))
        new_V = policy.logits(padded)[0, 0].log_softmax(-1)
    exact = float((old_V.exp() * (old_V - new_V)).sum())
    spread = float((old_V.exp() * (old_V - new_V - exact) ** 2).sum().sqrt()) / math.sqrt(len(answers))
    found = distill.measure(
        Trainer(policy, OptimizerSettings()).logps,
        renderer,
        [],
        [],
        list(map(rollout_sample, answers)),
        SYSTEM,
    )
    assert exact > 0.05 and found["earlier_kl"] == pytest.approx(exact, abs=4 * spread)


def test_a_study_without_anything_in_its_files_says_so(reader, tmp_path):
    recipe = recipe_for(reader, tmp_path)
    (tmp_path / "known.jsonl").write_text("")
    with pytest.raises(
        RecipeError, match=r"distill\.demonstrations hold nothing and there are no practice tasks"
    ):
        run(recipe)


def test_copies_hold_what_all_the_files_held(tmp_path):
    """A last line without its end, and characters at which Python, but not JSON, ends a line."""
    odd = Demonstration("Which one? \u2028", "é \x85")
    files = [write(tmp_path / "a.jsonl", KNOWN), tmp_path / "b.jsonl", write(tmp_path / "c.jsonl", EARLIER)]
    files[1].write_text(
        json.dumps({"prompt": odd.prompt, "demonstration": odd.demonstration}, ensure_ascii=False)
    )
    run = RunDir.create(tmp_path / "run", recipe="", manifest={})
    found = distill.keep(run, DistillSettings(demonstrations=tuple(files)))
    assert found == (distill.read_demonstrations(files), []) == ([*KNOWN, odd, *EARLIER], [])
    files[0].write_text("{")
    assert distill.keep(run, DistillSettings(demonstrations=tuple(files))) == found
    run.forget()
    assert not run.path.exists()


def test_every_demonstration_comes_once_before_any_comes_twice():
    drawn = [each.id for step in range(3) for each in distill.draw(KNOWN, 2, step, 0)]
    assert sorted(drawn[:3]) == sorted(drawn[3:]) == sorted(each.id for each in KNOWN)
    assert distill.draw([], 2, 0, 0) == []


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", "line 1 is not of the form"),
        ('{"prompt": "x"}', "line 1 is not"),
        ('{"prompt": "", "demonstration": "y"}', "line 1"),
    ],
)
def test_a_line_that_is_no_demonstration_is_named(tmp_path, line, message):
    (tmp_path / "bad.jsonl").write_text(line)
    with pytest.raises(RecipeError, match=message):
        distill.read_demonstrations([tmp_path / "bad.jsonl"])
    with pytest.raises(RecipeError, match=r"none\.jsonl cannot be read"):
        distill.read_demonstrations([tmp_path / "none.jsonl"])


def test_a_study_of_nothing_is_refused():
    with pytest.raises(RecipeError, match=r"needs distill\.demonstrations"):
        preflight.refuse(settings.read(Recipe, None, ["name=x", 'stages=["distill"]']))
