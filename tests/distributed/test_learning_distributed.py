"""A step of training over several ranks is the step of one: losses, gradient norms, divergences and weights."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from learning_scenarios import Training
from worlds import launch

KINDS = {
    "LoRA": {"rank": 4},
    "AdamW": {},
    "Muon": {"optimizer": "muon"},
}
TRAININGS = {
    **{
        f"{kind}, {teacher}": Training(**settings, teacher=teacher)
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
)


@pytest.fixture(scope="module")
def alone() -> dict[str, Any]:
    return launch(1, "learning_scenarios:run", TRAININGS)[0]


@pytest.fixture(scope="module", params=[2, 4])
def together(request: pytest.FixtureRequest) -> list[dict[str, Any]]:
    return launch(request.param, "learning_scenarios:run", TRAININGS)


@pytest.mark.parametrize("name", TRAININGS)
def test_ranks_equal_one(alone: dict[str, Any], together: list[dict[str, Any]], name: str):
    one = alone[name]
    for found in (rank[name] for rank in together):
        for before, after in zip(one["metrics"], found["metrics"], strict=True):
            for key in COMPARED:
                assert after.get(key) == pytest.approx(before.get(key), rel=1e-4, abs=1e-5), key
            for one_turn, same_turn in zip(before["divergences"], after["divergences"], strict=True):
                assert same_turn[0] == one_turn[0]
                assert same_turn[1] == pytest.approx(one_turn[1], rel=1e-3, abs=1e-4)
        assert found["weights"].keys() == one["weights"].keys()
        for key, weight in one["weights"].items():
            torch.testing.assert_close(found["weights"][key], weight, rtol=0, atol=1e-5, msg=key)
