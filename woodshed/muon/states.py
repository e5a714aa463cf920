"""Momentum of other optimizers, read into a `ShardedMuon`.

torch.optim.Muon keeps an average, M <- mu M + (1 - mu) G; dion and this one keep a sum, M <- mu M + G. The directions
are the same, the buffers differ by the factor 1 - mu: without conversion the first gradients would count twenty
times too much or too little.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

import torch
from torch import Tensor

from woodshed.muon.errors import MuonError
from woodshed.muon.layout import local
from woodshed.muon.optimizer import ShardedMuon
from woodshed.muon.parameters import Parameter, check_saved

Source = Literal["torch.optim.Muon", "torch.optim.AdamW", "dion"]
MOMENTUM = {"torch.optim.Muon": "momentum_buffer", "dion": "momentum"}
FIRST_MOMENT = {"torch.optim.AdamW": "exp_avg", "dion": "momentum"}
SECOND_MOMENT = {"torch.optim.AdamW": "exp_avg_sq", "dion": "variance"}


@torch.no_grad()
def import_state(
    optimizer: ShardedMuon, states: Mapping[str, Mapping[str, Any]], source: Source
) -> list[str]:
    """Take over what `states` (parameter name to the state that `source` kept for it) has; returns the names it had.

    dion counts AdamW's steps in its parameter group: add them to each state as "step".
    States are laid out as the parameters are; reshard them with torch.distributed.checkpoint first where they are not.
    Raises `MuonError`, with nothing changed, for an unknown source, unknown names, missing entries or other layouts.
    """
    if source not in {*MOMENTUM, *FIRST_MOMENT}:
        raise MuonError(f"source={source!r}: use one of {', '.join(sorted({*MOMENTUM, *FIRST_MOMENT}))}.")
    ours = {each.name: each for each in optimizer.parameters()}
    if unknown := sorted(set(states) - set(ours)):
        raise MuonError(
            f"{unknown[0]}: no such parameter here; pass states by the names that ShardedMuon was given."
        )
    imported = {name: entries(ours[name], state, source) for name, state in states.items()}
    for name, values in imported.items():
        state = optimizer.state[ours[name].tensor]
        for key, value in values.items():
            if key == "step":
                state[key] = torch.tensor(float(value))
            else:
                local(state[key]).copy_(local(value))
    return sorted(imported)


def entries(parameter: Parameter, state: Mapping[str, Any], source: Source) -> dict[str, Any]:
    """State of one parameter under the keys of `ShardedMuon`."""
    is_muon = parameter.group["algorithm"] == "muon"
    names = [MOMENTUM.get(source)] if is_muon else [FIRST_MOMENT.get(source), SECOND_MOMENT.get(source)]
    needed = names if is_muon else [*names, "step"]
    missing = [name for name in needed if name is None or name not in state]
    if missing:
        algorithm = "Muon" if is_muon else "AdamW"
        raise MuonError(
            f"{parameter.name}: {algorithm} updates it here, and {source} kept {sorted(state)} for it. Import the "
            "states of each optimizer by itself, with the parameters that it updated."
        )
    values: list[Tensor] = [state[name] for name in names if name is not None]
    for name, value in zip(names, values, strict=True):
        check_saved(parameter, str(name), value)
    if is_muon:
        mu = parameter.group["momentum"]
        return {"momentum_buffer": values[0] / (1 - mu) if source == "torch.optim.Muon" else values[0]}
    return {"step": state["step"], "exp_avg": values[0], "exp_avg_sq": values[1]}
