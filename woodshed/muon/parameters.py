"""Parameters for Muon and for AdamW, in groups, with a check that each of them can be updated."""

from __future__ import annotations

import difflib
import fnmatch
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from woodshed.muon import layout
from woodshed.muon.errors import MuonError
from woodshed.muon.layout import local
from woodshed.muon.plan import Spec
from woodshed.muon.units import Units, default_units

ADAMW: dict[str, Any] = {
    "match": ("*embed*", "*lm_head*"),
    "lr": None,
    "betas": (0.9, 0.95),
    "eps": 1e-8,
    "weight_decay": None,
}
"""Defaults of AdamW; None takes Muon's value."""
GROUP_KEYS = ("params", "lr", "weight_decay", "momentum", "adamw")


@dataclass
class Parameter:
    """One parameter, its name, and the group that holds its settings."""

    name: str
    tensor: Tensor
    group: dict[str, Any]

    def gradient(self) -> Tensor | None:
        """This rank's shard of the gradient, laid out as the parameter's."""
        grad, tensor = self.tensor.grad, self.tensor
        if grad is None:
            return None
        if isinstance(grad, DTensor) != isinstance(tensor, DTensor) or (
            isinstance(grad, DTensor)
            and isinstance(tensor, DTensor)
            and (grad.device_mesh != tensor.device_mesh or grad.placements != tensor.placements)
        ):
            raise MuonError(
                f"{self.name}: its gradient is {layout.describe(grad)}, and the parameter {layout.describe(tensor)}. "
                "Reduce or redistribute the gradient to the parameter's layout before step()."
            )
        shard, like = local(grad), local(tensor)
        return shard if shard.stride() == like.stride() else torch.empty_like(like).copy_(shard)


def split_groups(
    named_parameters: Iterable[Any],
    defaults: dict[str, float],
    units: Mapping[str, Units],
    adamw: dict[str, Any],
) -> list[dict[str, Any]]:
    """Parameter groups of the optimizer: for every group that was passed, Muon's part and AdamW's part."""
    listed = list(named_parameters)
    passed: list[dict[str, Any]] = listed
    if not listed or not isinstance(listed[0], dict):
        passed = [{"params": listed}]
    check_keys(adamw, ADAMW, "adamw")
    groups = []
    for group in passed:
        check_keys(group, GROUP_KEYS, "a parameter group")
        check_keys(group.get("adamw", {}), ADAMW, "adamw")
        muon = {**defaults, **{key: group[key] for key in defaults if key in group}}
        adamw_settings = {**ADAMW, **adamw, **group.get("adamw", {})}
        adamw_settings["lr"] = muon["lr"] if adamw_settings["lr"] is None else adamw_settings["lr"]
        adamw_settings["weight_decay"] = (
            muon["weight_decay"] if adamw_settings["weight_decay"] is None else adamw_settings["weight_decay"]
        )
        named = [pair for pair in named_pairs(group["params"]) if pair[1].requires_grad]
        matches = adamw_settings.pop("match")
        to_adamw = [pair for pair in named if goes_to_adamw(*pair, matches, units)]
        to_muon = [pair for pair in named if not goes_to_adamw(*pair, matches, units)]
        groups += [{"algorithm": "muon", **muon, "params": to_muon}] if to_muon else []
        groups += [{"algorithm": "adamw", **adamw_settings, "params": to_adamw}] if to_adamw else []
    if not groups:
        raise MuonError(
            "no parameter needs a gradient; pass model.named_parameters() of a model that trains."
        )
    return groups


def check_keys(settings: Mapping[str, Any], known: Iterable[str], name: str) -> None:
    for key in settings:
        if key not in known:
            near = difflib.get_close_matches(key, list(known), 1)
            hint = f"did you mean {near[0]!r}?" if near else f"known are {', '.join(known)}."
            raise MuonError(f"{name} has no setting {key!r}; {hint}")


def named_pairs(parameters: Any) -> list[tuple[str, Tensor]]:
    pairs = list(parameters)
    for pair in pairs:
        if not (isinstance(pair, tuple) and len(pair) == 2 and isinstance(pair[0], str)):
            raise MuonError(
                "parameters come with their names: pass model.named_parameters(), not parameters()."
            )
    return pairs


def goes_to_adamw(name: str, tensor: Tensor, matches: Iterable[str], units: Mapping[str, Units]) -> bool:
    """True for a parameter named for AdamW, and for a vector that `units` does not name."""
    if any(fnmatch.fnmatchcase(name, pattern) for pattern in matches):
        return True
    return tensor.ndim < 2 and not any(fnmatch.fnmatchcase(name, pattern) for pattern in units)


def choose(name: str, tensor: Tensor, units: Mapping[str, Units]) -> Units:
    """The first pattern that matches; else the whole matrix, or every expert of a stack."""
    for pattern, kind in units.items():
        if fnmatch.fnmatchcase(name, pattern):
            return kind
    return default_units(name, tuple(tensor.shape))


def spec(name: str, tensor: Tensor, units: Units) -> Spec:
    """Description of one parameter for the plan.

    Raises `MuonError`, naming the parameter, if its shape does not divide into such units or its layout is unknown.
    """
    shape = tuple(tensor.shape)
    return Spec(name, shape, units.grid(name, shape), layout.read(name, tensor), str(tensor.dtype))


def check_layouts(parameters: list[Parameter]) -> None:
    """One mesh for each parameter, and no plain tensors between sharded ones."""
    by_name: dict[str, Parameter] = {}
    by_memory: dict[int, Parameter] = {}
    for each in parameters:
        shard = local(each.tensor)
        other = by_name.setdefault(each.name, each)
        if shard.numel() and other is each:
            other = by_memory.setdefault(shard.data_ptr(), each)
        if other is not each:
            raise MuonError(
                f"{each.name}: given as {layout.describe(each.tensor)} and, named {other.name}, as "
                f"{layout.describe(other.tensor)}. A parameter lies on one mesh: pass it once, as the model holds it."
            )
        if not each.tensor.dtype.is_floating_point or each.tensor.dtype == torch.float64:
            raise MuonError(f"{each.name}: {each.tensor.dtype} weights; use float32, bfloat16 or float16.")
        if shard.ndim and shard.numel() and shard.stride(-1) != 1:
            raise MuonError(f"{each.name}: stored with strides {shard.stride()}; pass it as .contiguous().")
    plain = [each for each in parameters if not isinstance(each.tensor, DTensor)]
    sharded = [each for each in parameters if isinstance(each.tensor, DTensor)]
    if plain and sharded and layout.world_size() > 1:
        raise MuonError(
            f"{plain[0].name} is a plain tensor, while {sharded[0].name} is {layout.describe(sharded[0].tensor)}. "
            "Wrap the module of the former with fully_shard too, or make it distribute_tensor(..., [Replicate()])."
        )


def check_saved(parameter: Parameter, key: str, value: Tensor) -> None:
    tensor = parameter.tensor
    alike = (
        isinstance(value, DTensor) == isinstance(tensor, DTensor)
        and local(value).shape == local(tensor).shape
    )
    if alike and isinstance(value, DTensor) and isinstance(tensor, DTensor):
        alike = value.placements == tensor.placements and value.device_mesh.shape == tensor.device_mesh.shape
    if not alike:
        raise MuonError(
            f"{parameter.name}: its saved {key} is {layout.describe(value)} with a shard of "
            f"{tuple(local(value).shape)}, and the parameter is {layout.describe(tensor)} with "
            f"{tuple(local(tensor).shape)}. To change the number of ranks or the layout, save and load with "
            "torch.distributed.checkpoint (get_optimizer_state_dict, set_optimizer_state_dict)."
        )
