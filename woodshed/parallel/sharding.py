"""FSDP2 of every module on the mesh it belongs to.

Every rank computes its tokens' share of one loss over all tokens, so gradients are sums over all ranks, for experts as
for dense weights, whatever mesh reduces them: no group's size divides them.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Shard
from transformers.modeling_layers import GradientCheckpointingLayer

from woodshed.engines.local.routing import find_experts
from woodshed.parallel.experts import spread
from woodshed.records import LayoutError


@torch.no_grad()
def check_same(model: nn.Module, device: str) -> None:
    """Raises `LayoutError` on all ranks if the first numbers of some weight differ between them."""
    weights = {name: each for name, each in model.named_parameters() if not each.is_meta}
    if not weights:
        return
    sums = torch.stack([each.flatten()[:64].double().sum().to(device) for each in weights.values()])
    bounds = torch.stack([sums, -sums])
    dist.all_reduce(bounds, dist.ReduceOp.MAX)
    differ = [name for name, high, low in zip(weights, *bounds.tolist(), strict=True) if high != -low]
    if differ:
        raise LayoutError(
            f"{differ[0]} and {len(differ) - 1} other weights differ between ranks; load the same checkpoint on all of "
            "them, or call torch.manual_seed with one seed before the model is made."
        )


def shard(
    model: Any,
    dense_mesh: DeviceMesh,
    expert_mesh: DeviceMesh,
    compute_dtype: torch.dtype | None,
    whole: set[nn.Parameter],
) -> None:
    """Experts on (replicate, shard) of the expert mesh below its ep; layers and the rest on the dense mesh.

    whole: parameters that stay as they are, the same on every rank (an adapter's).
    """
    experts = find_experts(model)
    cut_experts = functools.partial(cut, num_ranks=expert_mesh["shard"].size())
    if expert_mesh["ep"].size() > 1:
        for module in experts.values():
            spread(module, expert_mesh["ep"])
    layers = MixedPrecisionPolicy(compute_dtype, torch.float32)
    weights = MixedPrecisionPolicy(compute_dtype, torch.float32, cast_forward_inputs=False)
    exact = MixedPrecisionPolicy(None, torch.float32, cast_forward_inputs=False)
    for name, module in reversed(list(model.named_modules())):  # inner modules first
        if name in experts:
            mesh = expert_mesh["replicate", "shard"]
            wrap(module, mesh, weights, shard_placement_fn=cut_experts, ignored_params=whole)
        elif is_apart(model, name, module, compute_dtype, whole):
            wrap(module, dense_mesh, exact, ignored_params=whole)
        elif isinstance(module, GradientCheckpointingLayer) or module is model:
            wrap(module, dense_mesh, layers, ignored_params=whole)


def wrap(module: nn.Module, mesh: DeviceMesh, precision: MixedPrecisionPolicy, **settings: Any) -> None:
    """`fully_shard` whose gradients are plain sums."""
    sharded = fully_shard(module, mesh=mesh, mp_policy=precision, **settings)
    sharded.set_gradient_divide_factor(1.0)
    sharded.set_force_sum_reduction_for_comms(True)  # gloo has no other sum, NCCL no faster one


def cut(parameter: nn.Parameter, num_ranks: int) -> Shard:
    """Whole experts for each rank where they can be divided evenly, else rows of each expert."""
    local = parameter.to_local() if isinstance(parameter, DTensor) else parameter
    fits = local.ndim > 1 and local.shape[0] % num_ranks and local.shape[1] % num_ranks == 0
    return Shard(1 if fits else 0)


def is_apart(
    model: Any,
    name: str,
    module: nn.Module,
    compute_dtype: torch.dtype | None,
    whole: set[nn.Parameter],
) -> bool:
    """True if it holds weights of another precision than the rest: FSDP gathers one precision at a time.

    Where a model computes in less, those that transformers keeps in float32 (routers) are among them.
    """
    exact = {*(model._keep_in_fp32_modules or ()), *(model._keep_in_fp32_modules_strict or ())}
    for key, parameter in module.named_parameters(recurse=False):
        if parameter in whole:
            continue
        if parameter.dtype != model.dtype:
            return True
        if compute_dtype is not None and any(f".{part}." in f".{name}.{key}." for part in exact):
            return True
    return False
