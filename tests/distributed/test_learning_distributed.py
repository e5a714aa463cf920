"""A step of training over several ranks is the step of one: losses, gradient norms, divergences and weights."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from learning_scenarios import Training
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM
from worlds import launch

from woodshed.runs.folder import RunDir

KINDS = {
    "LoRA": {"rank": 4},
    "AdamW": {},
    "Muon": {"optimizer": "muon"},
}
TRAININGS = {
    **{
        f"{kind}, {teacher}": Training(**settings, teacher=teacher, steps=5)
        for kind, settings in KINDS.items()
        for teacher in ("live", "frozen", "ema")
    },
    "trust region": Training(teacher="trust-region"),
    "experts": Training("qwen", layout={"ep": 2}),
    "experts, Muon": Training("qwen", optimizer="muon", layout={"ep": 2}),
    "replicas": Training(layout={"replicate": 2}),
    "a rank without rows": Training(rows=2, targets=2, layout={"replicate": 2}),
    "a rank without targets": Training(targets=1),
    "no rows": Training(rows=0, targets=1),
    "no targets": Training(targets=0),
    "divergence in the reward": Training(rank=4, loss={"kl_coef": 0.05}),
    "divergence in the reward, full": Training(loss={"kl_coef": 0.05}),
}
COMPARED = (
    "rl_loss",
    "kl_loss",
    "grad_norm",
    "rl_grad_norm",
    "kl_grad_norm",
    "kl_factor",
    "entropy",
    "logp_gap_max",
    "logp_gap_mean",
    "kl_to_start",
    "hint_gain",
    "targets",
    "trained_rollouts",
    "sft_loss",
)


@pytest.fixture(scope="module")
def alone() -> dict[str, Any]:
    return launch(1, "learning_scenarios:run", TRAININGS)[0]


@pytest.fixture(scope="module", params=[2, 4])
def together(request: pytest.FixtureRequest) -> list[dict[str, Any]]:
    return launch(request.param, "learning_scenarios:run", TRAININGS)


@pytest.mark.parametrize("name", [*TRAININGS, "sft"])
def test_ranks_equal_one(alone: dict[str, Any], together: list[dict[str, Any]], name: str):
    one = alone[name]
    for found in (rank[name] for rank in together):
        for before, after in zip(one["metrics"], found["metrics"], strict=True):
            assert after.keys() == before.keys()
            for key in set(COMPARED) & set(before):
                assert after[key] == pytest.approx(before[key], rel=1e-4, abs=1e-5), key
            turns = zip(before.get("divergences", ()), after.get("divergences", ()), strict=True)
            for one_turn, same_turn in turns:
                assert same_turn[0] == one_turn[0]
                assert same_turn[1] == pytest.approx(one_turn[1], rel=1e-3, abs=1e-4)
        assert found["weights"].keys() == one["weights"].keys()
        for key, weight in one["weights"].items():
            torch.testing.assert_close(found["weights"][key], weight, rtol=0, atol=1e-5, msg=key)


SAVED = {name: TRAININGS[name] for name in ("LoRA, ema", "AdamW, ema", "Muon, ema", "experts")}


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, dict[str, Any]]:
    """Two steps on 4 ranks."""
    folder = str(tmp_path_factory.mktemp("checkpoints"))
    return folder, launch(4, "learning_scenarios:save_after", SAVED, folder, 2)[0]


@pytest.mark.parametrize("world", [2, 1])
def test_a_checkpoint_of_four_ranks_loads_on_fewer(saved: tuple[str, dict[str, Any]], world: int):
    folder, kept = saved
    loaded = launch(world, "learning_scenarios:load_saved", SAVED, folder)[0]
    for name, contents in kept.items():
        assert loaded[name].keys() == contents.keys()
        assert [key for key in contents if not torch.equal(loaded[name][key], contents[key])] == [], name


def test_a_rank_killed_while_saving_leaves_the_checkpoint_before(tmp_path: Path):
    training = {"AdamW": TRAININGS["AdamW, ema"]}
    kept = launch(2, "learning_scenarios:save_after", training, str(tmp_path), 1)[0]
    with pytest.raises(AssertionError, match="rank"):
        launch(2, "learning_scenarios:die_while_saving", training["AdamW"], str(tmp_path / "0"))
    RunDir(tmp_path / "0").lock()  # as a resume does: what is unfinished goes
    names = sorted(path.name for path in (tmp_path / "0" / "checkpoints").iterdir())
    assert names == ["rl-000001", "start"]
    loaded = launch(1, "learning_scenarios:load_saved", training, str(tmp_path))[0]["AdamW"]
    assert all(torch.equal(loaded[key], value) for key, value in kept["AdamW"].items())


def test_what_ranks_export_is_whole(tmp_path: Path):
    """An adapter, a model whose ends share a weight, and experts of two ranks, for people, servers and engines."""
    trainings = {name: TRAININGS[name] for name in ("LoRA, ema", "AdamW, ema", "experts")}
    exported = launch(2, "learning_scenarios:exported", trainings, str(tmp_path))[0]
    for number, (name, (weights, copied)) in enumerate(exported.items()):
        kept, served = (tmp_path / str(number) / kind for kind in ("policy", "served"))
        if name.startswith("LoRA"):
            file = "adapter_model.safetensors"
            expected = [{key.replace(".default", ""): value for key, value in weights.items()}] * 2
            held = [load_file(kept / file), load_file(served / file)]
        else:
            untied = (
                {"lm_head.weight": weights["model.embed_tokens.weight"]} if name.startswith("AdamW") else {}
            )
            expected = [weights | untied] * 2
            held = [
                AutoModelForCausalLM.from_pretrained(kept).state_dict(),
                load_file(served / "model.safetensors"),
            ]
        for found, wanted in zip((copied, *held), (weights, *expected), strict=True):
            assert found.keys() == wanted.keys()
            assert [key for key in wanted if not torch.equal(found[key], wanted[key])] == []
