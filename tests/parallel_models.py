"""Toy models of the real classes, and one training loop for a single process and for any layout."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from woodshed.muon import Experts, MuonSettings, NewtonSchulz, ShardedMuon, clip_grad_norm_
from woodshed.parallel import ParallelLayout

VOCAB, ROWS, LENGTH = 64, 4, 16
EPS = 1e-3  # of AdamW: with a small one it divides rounding by rounding where gradients vanish
SHARED = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_attention_heads": 4,
    "initializer_range": 0.15,  # peaked distributions, so that attention and routing matter
    "pad_token_id": 0,
}
MOE = SHARED | {"moe_intermediate_size": 16, "num_experts_per_tok": 4, "num_hidden_layers": 2}


def build(family: str, **settings: Any) -> Any:
    """A model of a transformers class, the same in every process."""
    import transformers

    torch.manual_seed(0)
    if family == "deepseek":
        config = transformers.DeepseekV3Config(
            **MOE,
            n_routed_experts=16,
            n_shared_experts=1,
            n_group=4,
            topk_group=2,
            first_k_dense_replace=1,
            q_lora_rank=16,
            kv_lora_rank=16,
            qk_nope_head_dim=8,
            qk_rope_head_dim=8,
            v_head_dim=8,
            **settings,
        )
        return transformers.DeepseekV3ForCausalLM(config)
    if family == "qwen":
        config = transformers.Qwen3MoeConfig(
            **MOE,
            **{
                "num_experts": 16,
                "num_key_value_heads": 2,
                "head_dim": 8,
                "norm_topk_prob": True,
                **settings,
            },
        )
        return transformers.Qwen3MoeForCausalLM(config)
    if family == "mixtral":
        experts = {"num_local_experts": 4, "num_experts_per_tok": 2, "num_hidden_layers": 2}
        config = transformers.MixtralConfig(**SHARED, **experts, num_key_value_heads=2, **settings)
        return transformers.MixtralForCausalLM(config)
    config = transformers.LlamaConfig(
        **SHARED, num_key_value_heads=2, num_hidden_layers=2, tie_word_embeddings=True, **settings
    )
    return transformers.LlamaForCausalLM(config)


def read(step: int, packed: bool) -> dict[str, Tensor]:
    """A global batch whose rows have different numbers of labels; packed rows have documents of 5 and 11 tokens."""
    generator = torch.Generator().manual_seed(step)
    ids = torch.randint(VOCAB, (ROWS, LENGTH), generator=generator)
    labels = ids.clone()
    for row in range(ROWS):
        labels[row, : 3 * row] = -100
    positions = torch.arange(LENGTH).expand(ROWS, -1)
    if packed:
        positions = torch.cat([torch.arange(5), torch.arange(11)]).expand(ROWS, -1)
    return {"input_ids": ids, "labels": labels, "position_ids": positions}


def optimizer_of(kind: str, model: Any) -> torch.optim.Optimizer:
    if kind == "sgd":
        return torch.optim.SGD(model.parameters(), lr=0.3, momentum=0.9, foreach=False)
    if kind == "adamw":
        return torch.optim.AdamW(model.parameters(), lr=0.003, eps=EPS, foreach=False)
    return ShardedMuon(
        model.named_parameters(),
        lr=0.02,
        units={"*gate_up_proj": Experts(rows=16)},
        adamw={"eps": EPS},
        settings=MuonSettings(newton_schulz=NewtonSchulz(dtype=torch.float32), wire_dtype=torch.float32),
    )


def train(
    model: Any, optimizer: torch.optim.Optimizer, layout: ParallelLayout | None, steps: range, packed: bool
) -> dict[str, list[float]]:
    """Loss and gradient norm of every step."""
    losses, norms = [], []
    for step in steps:
        batch = read(step, packed)
        if layout is None:
            loss = model(**batch, use_cache=False).loss  # with a cache, packed rows are not noticed
        else:
            mine = {key: value[layout.reader :: layout.num_readers] for key, value in batch.items()}
            loss = model(**layout.split(mine["input_ids"], mine["labels"], mine["position_ids"])).loss
        loss.backward()
        norms.append(clip_grad_norm_(model.parameters(), 1.0).item())
        optimizer.step()
        optimizer.zero_grad()
        total = loss.detach()
        if layout is not None:
            dist.all_reduce(total)
        losses.append(total.item())
    return {"losses": losses, "norms": norms}


def whole(tensor: Tensor) -> Tensor:
    if isinstance(tensor, DTensor):
        tensor = tensor.full_tensor()
    return tensor.detach().clone()


def weights(model: Any) -> dict[str, Tensor]:
    return {name: whole(parameter) for name, parameter in model.named_parameters()}
