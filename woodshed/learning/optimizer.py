"""Optimizers of every stage: AdamW, or Muon for matrices with AdamW for the rest.

Muon orthogonalises the update of one matrix at a time (Jordan et al. 2024). The matrix that matters is a head's or an
expert's, not the tensor in which a model stores many of them, so its size is read from the model's configuration.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar, Literal

import torch
from pydantic import Field
from torch import Tensor

from woodshed.learning.policy import Policy
from woodshed.muon import Experts, Heads, MuonSettings, NewtonSchulz, ShardedMuon
from woodshed.muon.units import Units
from woodshed.records import RecipeError
from woodshed.settings import Settings

BETAS = (0.9, 0.95)
"""AdamW's decay of first and second moment."""
MOMENTUM = 0.95
"""Muon's decay of its momentum."""


class OptimizerSettings(Settings):
    """Update rule of every stage, and the learning rate of rl and distill; sft has its own."""

    kind: Literal["adamw", "muon"] = "adamw"
    """adamw (arXiv 1711.05101); or muon for the matrices of full weights, scaled to AdamW's step size (arXiv
    2502.16982), with AdamW for embeddings, output layer and vectors."""
    learning_rate: float = Field(default=2e-4, ge=0)
    """Peak learning rate; 2e-4 suits a rank-8 adapter, 3e-6 full weights."""
    warmup_steps: int = Field(default=2, ge=0)
    """Steps of linear rise to the peak; step s of them uses s/warmup_steps of it."""
    decay_share: float = Field(default=0.0, ge=0, le=1)
    """Last share of the steps over which the rate falls linearly to zero."""
    weight_decay: ClassVar[float] = 0.0
    """Decoupled weight decay."""
    max_grad_norm: ClassVar[float] = 1.0
    """The joint gradient is cut to this norm."""


def refuse_adapter(settings: OptimizerSettings, *, is_adapter: bool) -> None:
    """Check that the optimizer suits the weights.

    Raises:
        RecipeError: Muon for an adapter, whose two thin factors are no matrix of their own.
    """
    if settings.kind == "muon" and is_adapter:
        raise RecipeError(
            "optimizer.kind = 'muon' is for full weights, and the policy trains an adapter; set policy.lora_rank = 0 "
            "(and no policy.adapter), or optimizer.kind = 'adamw'"
        )


def make_optimizer(policy: Policy, settings: OptimizerSettings) -> torch.optim.Optimizer:
    """A new optimizer over the policy's trainable weights, sharded as they are. Every rank calls it.

    Raises:
        RecipeError: Muon for an adapter.
    """
    refuse_adapter(settings, is_adapter=policy.is_adapter)
    if settings.kind == "adamw":
        # One kernel in place of a dozen passes over the weights; it takes weights of one mesh.
        meshes = {getattr(weight, "device_mesh", None) for weight in policy.trainable.values()}
        return torch.optim.AdamW(
            policy.trainable.values(),
            lr=settings.learning_rate,
            betas=BETAS,
            weight_decay=settings.weight_decay,
            fused=policy.device.type == "cuda" and len(meshes) == 1,
        )
    # bfloat16 is what the matrix units of a GPU are fast at; a CPU gains nothing from it.
    dtype = torch.float32 if policy.device.type == "cpu" else torch.bfloat16
    return ShardedMuon(
        policy.trainable.items(),
        lr=settings.learning_rate,
        weight_decay=settings.weight_decay,
        momentum=MOMENTUM,
        units=matrix_units(policy.model.config.get_text_config(), policy.trainable),
        adamw={"betas": BETAS},
        settings=MuonSettings(
            newton_schulz=NewtonSchulz(dtype=dtype),
            wire_dtype=dtype,
            nonfinite="unchecked",  # the trainer has looked at the norm of the whole gradient
        ),
    )


def learning_rate(settings: OptimizerSettings, step: int, steps: int) -> float:
    """Rate of step `step` (from 0) out of `steps`: linear rise, plateau, linear fall over the last share."""
    rise = min(1.0, (step + 1) / max(settings.warmup_steps, 1))
    falling = settings.decay_share * steps
    fall = min(1.0, (steps - step) / falling) if falling else 1.0
    return settings.learning_rate * rise * fall


MOMENTS = ("exp_avg", "exp_avg_sq", "momentum_buffer")
"""Parts of an optimizer's state that have the shape of a weight."""


def state_of(optimizer: torch.optim.Optimizer, weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The optimizer's state of each weight, under "weight/key". Rates and decays are the recipe's."""
    return {
        f"{name}/{key}": value
        for name, weight in weights.items()
        for key, value in optimizer.state.get(weight, {}).items()
    }


def restore(optimizer: torch.optim.Optimizer, weight: Tensor, key: str, value: Tensor) -> None:
    """Give the optimizer back what `state_of` took, where its kernels look for it."""
    is_fused = any(group.get("fused") for group in optimizer.param_groups)
    optimizer.state[weight][key] = value.to(weight.device) if is_fused and key == "step" else value


def matrix_units(config: Any, weights: Mapping[str, Tensor]) -> dict[str, Units]:
    """Names of the weights that hold several matrices, and how they divide into them.

    Heads are cut out of the projections of attention, and the gate and up halves out of fused ones, by the sizes in a
    Hugging Face configuration. A weight that is not named is one matrix, or one for each expert of a stack.
    """
    width = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    query, key_value, value = width, width, width
    if getattr(config, "kv_lora_rank", None):  # latent attention: DeepSeek-V2, arXiv 2405.04434, section 2.1
        value = config.v_head_dim
        query = config.qk_nope_head_dim + config.qk_rope_head_dim
        key_value = config.qk_nope_head_dim + value
    rows = {
        "q_proj": query,
        "q_b_proj": query,
        "k_proj": width,
        "v_proj": width,
        "kv_b_proj": key_value,
        "qkv_proj": width,
    }
    found: dict[str, Units] = {}
    for name, weight in weights.items():
        layer = name.removesuffix(".weight").rpartition(".")[2]
        if weight.ndim == 2 and layer in rows and weight.shape[0] % rows[layer] == 0:
            found[name] = Heads(rows=rows[layer])
        elif weight.ndim == 2 and layer == "o_proj" and weight.shape[1] % value == 0:
            found[name] = Heads(cols=value)
        elif weight.ndim == 2 and layer == "gate_up_proj":
            found[name] = Heads(rows=weight.shape[0] // 2)
        elif weight.ndim == 3 and layer == "gate_up_proj" and weight.shape[2] == config.hidden_size:
            found[name] = Experts(rows=weight.shape[1] // 2)  # (experts, gate and up, hidden)
    return found
