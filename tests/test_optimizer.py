"""Which update rule each weight gets, and what of it is one matrix."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers
from tiny_training import tiny_policy

from woodshed.learning.layout import LayoutSettings, parallel_layout, refuse_misfit
from woodshed.learning.optimizer import OptimizerSettings, make_optimizer, matrix_units
from woodshed.learning.policy import Policy
from woodshed.muon import Experts, Heads, ShardedMuon
from woodshed.records import RecipeError
from woodshed.settings import validate
from woodshed.stages import preflight
from woodshed.stages.recipe import Recipe

TINY: dict[str, Any] = {"vocab_size": 32, "hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 4}


def units_of(model: Any) -> dict[str, Any]:
    """Units by the last part of a weight's name, of the first layer."""
    found = matrix_units(model.config, dict(model.named_parameters()))
    return {name.removesuffix(".weight").rpartition(".")[2]: unit for name, unit in found.items()}


def on_meta(kind: str, config: Any) -> Any:
    with torch.device("meta"):
        return getattr(transformers, kind)(config)


def test_heads_and_experts_are_read_from_the_configuration():
    llama = transformers.LlamaConfig(**TINY, intermediate_size=48, num_key_value_heads=2)
    heads = {
        "q_proj": Heads(rows=8),
        "k_proj": Heads(rows=8),
        "v_proj": Heads(rows=8),
        "o_proj": Heads(cols=8),
    }
    assert units_of(on_meta("LlamaForCausalLM", llama)) == heads
    experts: dict[str, Any] = {"num_experts": 4, "moe_intermediate_size": 12, "head_dim": 16}
    moe = transformers.Qwen3MoeConfig(**TINY, **experts, num_key_value_heads=2)
    assert units_of(on_meta("Qwen3MoeForCausalLM", moe)) == {
        "q_proj": Heads(rows=16),
        "k_proj": Heads(rows=16),
        "v_proj": Heads(rows=16),
        "o_proj": Heads(cols=16),
        "gate_up_proj": Experts(rows=12),
    }
    latent = transformers.DeepseekV3Config(
        **TINY,
        q_lora_rank=16,
        kv_lora_rank=12,
        qk_nope_head_dim=8,
        qk_rope_head_dim=4,
        v_head_dim=6,
        first_k_dense_replace=1,
    )
    assert units_of(on_meta("DeepseekV3ForCausalLM", latent)) == {
        "q_b_proj": Heads(rows=12),
        "kv_b_proj": Heads(rows=14),
        "o_proj": Heads(cols=6),
    }
    fused = transformers.Phi3Config(**TINY, intermediate_size=48, num_key_value_heads=2, pad_token_id=0)
    assert units_of(on_meta("Phi3ForCausalLM", fused)) == {
        "qkv_proj": Heads(rows=8),
        "o_proj": Heads(cols=8),
        "gate_up_proj": Heads(rows=48),
    }


def full_policy() -> Policy:
    policy = tiny_policy(rank=0)
    policy.model.requires_grad_(True)
    policy.find_weights()
    return policy


def test_muon_takes_the_matrices_and_adamw_the_rest():
    optimizer = make_optimizer(full_policy(), OptimizerSettings(kind="muon"))
    assert isinstance(optimizer, ShardedMuon)
    groups = {group["algorithm"]: group for group in optimizer.param_groups}
    assert groups["muon"]["momentum"] == 0.95 and groups["adamw"]["betas"] == (0.9, 0.95)
    assert all("proj" in name for name in groups["muon"]["param_names"])
    assert all("norm" in name or "embed" in name for name in groups["adamw"]["param_names"])


@pytest.mark.parametrize(
    "sections", [{}, {"stages": ["sft"]}, {"stages": ["distill"], "distill": {"tasks_per_step": 1}}]
)
def test_muon_for_an_adapter_is_refused_before_anything_is_loaded(sections: dict[str, Any]):
    given = {"name": "x", "optimizer": {"kind": "muon"}, **sections}
    with pytest.raises(RecipeError, match=r"^optimizer.kind = 'muon'.*policy.lora_rank = 0"):
        preflight.refuse(validate(Recipe, given))
    preflight.refuse(validate(Recipe, {**given, "policy": {"lora_rank": 0}}))


@pytest.mark.parametrize(
    ("layout", "message"),
    [
        (
            {"fsdp": 2},
            r"fsdp x replicate x cp = 2 x 1 x 1 is for 2 ranks, and 1 rank started; .*layout.fsdp=1",
        ),
        ({"ep": 2}, r"layout.ep = 2 does not divide the 1 ranks"),
    ],
)
def test_a_layout_for_other_ranks_is_refused(layout: dict[str, int], message: str):
    with pytest.raises(RecipeError, match=message):
        refuse_misfit(LayoutSettings(**layout))


def test_experts_lie_over_all_ranks_and_are_stored_once():
    layout = parallel_layout(LayoutSettings(fsdp=4, replicate=2, ep=4))
    assert (layout.dense.shard, layout.dense.replicate) == (4, 2)
    assert (layout.expert.ep, layout.expert.shard, layout.expert.replicate) == (4, 2, 1)
