"""Real models of transformers over real processes: losses, gradient norms and weights of a single process."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from parallel_scenarios import Case
from worlds import launch

WIDE = {"replicate": 2, "shard": 2, "cp": 2}
NARROW = {"shard": 4, "cp": 2}
CASES = {
    "DeepSeek-V3, cp=2 with ep=8": Case("deepseek", WIDE, {"replicate": 1, "shard": 1, "ep": 8}),
    "DeepSeek-V3, SGD": Case("deepseek", WIDE, {"replicate": 1, "shard": 1, "ep": 8}, "sgd"),
    "Qwen3-MoE, packed": Case("qwen", NARROW, {"replicate": 2, "shard": 2, "ep": 2}, packed=True),
    "Llama, packed": Case("llama", {"replicate": 2, "cp": 4}, packed=True, checkpointing=True),
}
WINDOW = {"sliding_window": 5, "use_sliding_window": True, "max_window_layers": 0}
SLOW = {
    "DeepSeek-V3, AdamW": Case("deepseek", WIDE, {"replicate": 4, "ep": 2}, "adamw"),
    "experts in a loop": Case(
        "qwen", NARROW, {"ep": 8}, checkpointing=True, settings={"experts_implementation": "eager"}
    ),
    "rows of experts": Case("qwen", NARROW, {"shard": 8}, settings={"num_experts": 12}),
    "sliding window": Case("qwen", NARROW, {"replicate": 2, "ep": 4}, packed=True, settings=WINDOW),
    "experts as dense": Case("qwen", WIDE, optimizer="sgd"),
}


@pytest.fixture(scope="module")
def single() -> dict[str, Any]:
    return launch(1, "parallel_scenarios:run_cases", CASES, False)[0]


@pytest.fixture(scope="module")
def spread() -> list[dict[str, Any]]:
    return launch(8, "parallel_scenarios:run_cases", CASES, True)


def assert_equal_runs(one: dict[str, Any], other: dict[str, Any]) -> None:
    assert other["losses"] == pytest.approx(one["losses"], rel=0, abs=1e-5)
    assert other["norms"] == pytest.approx(one["norms"], rel=1e-5)
    assert other["weights"].keys() == one["weights"].keys()
    for name, weight in one["weights"].items():
        torch.testing.assert_close(other["weights"][name], weight, rtol=0, atol=1e-5, msg=name)


@pytest.mark.parametrize("name", CASES)
def test_eight_ranks_equal_one(single: dict[str, Any], spread: list[dict[str, Any]], name: str):
    """Five steps: dense and expert weights with different numbers of replicas, sequences in pieces, experts apart."""
    for rank in spread:
        assert_equal_runs(single[name], rank[name])
    assert len(set(single[name]["losses"])) == 5  # it learns something


@pytest.mark.slow
def test_more_ways_to_lie_on_eight_ranks():
    one, eight = (launch(n, "parallel_scenarios:run_cases", SLOW, n == 8)[0] for n in (1, 8))
    for name in SLOW:
        assert_equal_runs(one[name], eight[name])
    assert "Shard(dim=1)" in eight["rows of experts"]["placements"]["model.layers.1.mlp.experts.down_proj"]


def test_weights_lie_where_the_layout_says(spread: list[dict[str, Any]]):
    found = spread[0]["DeepSeek-V3, cp=2 with ep=8"]["placements"]
    assert found["model.layers.0.self_attn.q_a_proj.weight"] == "(Replicate(), Shard(dim=0)) on (2, 4)"
    assert found["model.layers.1.mlp.experts.down_proj"].endswith("on (1, 1, 8)")
    assert found.keys() == spread[0]["DeepSeek-V3, cp=2 with ep=8"]["weights"].keys()


def test_one_rank_is_a_world():
    """The same code with axes of size 1."""
    cases = {name: Case(CASES[name].family, {}) for name in ("DeepSeek-V3, SGD", "Llama, packed")}
    one, layout = (launch(1, "parallel_scenarios:run_cases", cases, is_laid)[0] for is_laid in (False, True))
    for name in cases:
        assert_equal_runs(one[name], layout[name])


@pytest.mark.parametrize(
    ("world", "case"),
    [
        pytest.param(2, Case("deepseek", {"shard": 2}, {"shard": 2}), id="2 ranks, no cp, no ep"),
        pytest.param(4, Case("deepseek", {"replicate": 4}, {"shard": 2, "ep": 2}), id="4 ranks, swapped"),
    ],
)
def test_a_checkpoint_loads_in_another_layout(
    saved: tuple[str, dict[str, torch.Tensor]], single: dict[str, Any], world: int, case: Case
):
    """Weights and momentum bitwise, and two more steps end where five in a single process do."""
    folder, contents = saved
    loaded, later = launch(world, "parallel_scenarios:load_and_go_on", case, folder, range(3, 5))[0]
    assert loaded.keys() == contents.keys()
    assert [key for key in contents if not torch.equal(loaded[key], contents[key])] == []
    for name, weight in single["DeepSeek-V3, cp=2 with ep=8"]["weights"].items():
        torch.testing.assert_close(later[name], weight, rtol=0, atol=1e-5, msg=name)


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, dict[str, torch.Tensor]]:
    """Three steps on 4 ranks."""
    folder = str(tmp_path_factory.mktemp("checkpoint") / "three")
    case = Case("deepseek", {"replicate": 2, "cp": 2}, {"ep": 4})
    return folder, launch(4, "parallel_scenarios:save_after", case, folder, 3)[0]


def test_computing_in_bfloat16_leaves_routers_and_stored_weights_exact():
    found = launch(2, "parallel_scenarios:low_precision")[0]
    exact, low = found["None"], found["torch.bfloat16"]
    assert low["loss"] == pytest.approx(exact["loss"], rel=0.02)
    assert low["loss"] != exact["loss"]
    assert low["stored"] == low["gradients"] == {"torch.float32"}
    assert low["gathered"] == {
        "q_a_proj": "torch.bfloat16",
        "experts": "torch.bfloat16",
        "gate": "torch.float32",
    }


def test_a_rank_without_tokens_has_gradients_of_zero():
    largest = [rank["largest"] for rank in launch(4, "parallel_scenarios:nothing_arrives")]
    assert min(largest[0]) > 0
    assert largest[1:] == [[0.0, 0.0]] * 3


def test_what_cannot_be_laid_out_is_refused():
    for said in launch(2, "parallel_scenarios:refusals"):
        assert "4 ranks and there is 2" in said["world"] and "torchrun" in said["world"]
        assert "Linear is not a transformers model" in said["no transformers model"]
        assert "ep=2" in said["no experts"] and "leave `expert` out" in said["no experts"]
        assert "ep=2 does not divide its 15 experts" in said["experts"]
        assert "adapter changes the experts' weights" in said["adapter of experts"]
        assert "output_router_logits = False" in said["balancing loss"]
        assert "linear_attention" in said["layers"] and "cp=1" in said["layers"]
        assert "dynamic" in said["rotary"] and "cp=1" in said["rotary"]
        assert "model.norm.weight and 0 other weights differ" in said["seeds"]
        assert "torch.manual_seed" in said["seeds"]
        assert "sharded already" in said["twice"]
        assert "14 tokens" in said["length"] and "to 16" in said["length"]
        assert "no sequence" in said["nothing to read"]
        assert "layout.split" in said["not split"]
        assert "without a mask" in said["mask"]
