"""What ranks do in the tests of `test_parallel_distributed.py`; every function runs on all ranks of a world."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from parallel_models import build, optimizer_of, read, train, weights

from woodshed.parallel import ParallelLayout


@dataclass(frozen=True)
class Case:
    """A model, how it is laid over 8 ranks, and how it is trained."""

    family: str
    dense: dict[str, int]
    expert: dict[str, int] | None = None
    optimizer: str = "muon"
    packed: bool = False
    settings: dict[str, Any] = field(default_factory=dict)
    apply: dict[str, Any] = field(default_factory=dict)


def run_cases(cases: dict[str, Case], is_parallel: bool) -> dict[str, Any]:
    """Five steps of each case in this world, or in a single process."""
    found = {}
    for name, case in cases.items():
        model, layout = build(case.family, **case.settings), None
        if is_parallel:
            layout = ParallelLayout.build(torch.distributed.get_world_size(), case.dense, case.expert)
            layout.apply(model, **case.apply)
        curves = train(model, optimizer_of(case.optimizer, model), layout, range(5), case.packed)
        found[name] = {**curves, "weights": weights(model)}
    return found
