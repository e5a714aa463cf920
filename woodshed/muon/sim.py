"""Simulated duration of a step of a 1T model, and the number of H100s for 0.2 s: predictions from plans and ceilings.

    python -m woodshed.muon.sim                                              # H100s at assumed rates
    python -m woodshed.muon.sim --machine benchmarks/results/muon_step.json --form standard --target 0.5

Model: Kimi K2.5's text model (the DeepSeek-V3 family's configuration: 61 layers, 384 routed experts, 7168 wide). Expert
weights lie on all cards without replicas, dense weights under HSDP. `cost` has the formula; only one card of the plan
is looked at, so all links and clocks are taken as equal. Every figure is a prediction with an error bar: from
calibration where `--machine` has one, else an assumption, as the printed line says. No such step was ever timed.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch.distributed.tensor import Replicate, Shard

from woodshed.muon import planner
from woodshed.muon.cost import FORM_FACTORS, Machine, Prediction
from woodshed.muon.layout import arrange
from woodshed.muon.plan import Plan, Spec
from woodshed.muon.units import Experts, Heads, Units, Whole

GPUS = [64, 128, 192, 256, 320, 384, 512, 768, 1024]


@dataclass(frozen=True)
class Family:
    """The sizes that decide the matrices of a DeepSeek-V3-style model. Defaults: Kimi K2.5."""

    hidden: int = 7168
    layers: int = 61
    dense_layers: int = 1
    dense_width: int = 18432
    experts: int = 384
    shared_experts: int = 1
    expert_width: int = 2048
    heads: int = 64
    q_rank: int = 1536
    kv_rank: int = 512
    nope: int = 128
    """Rows per head of query and key without rotary position."""
    rope: int = 64
    value: int = 128


def parameters(family: Family) -> dict[str, tuple[tuple[int, ...], Units]]:
    """Name to shape and units of everything that Muon updates; embeddings and norms are AdamW's."""
    f, shapes = family, {}
    query = f.nope + f.rope
    for layer in range(f.layers):
        attention = f"layers.{layer}.self_attn"
        shapes[f"{attention}.q_a_proj"] = ((f.q_rank, f.hidden), Whole())
        shapes[f"{attention}.q_b_proj"] = ((f.heads * query, f.q_rank), Heads(rows=query))
        shapes[f"{attention}.kv_a_proj_with_mqa"] = ((f.kv_rank + f.rope, f.hidden), Whole())
        shapes[f"{attention}.kv_b_proj"] = (
            (f.heads * (f.nope + f.value), f.kv_rank),
            Heads(rows=f.nope + f.value),
        )
        shapes[f"{attention}.o_proj"] = ((f.hidden, f.heads * f.value), Whole())
        mlp = f"layers.{layer}.mlp"
        if layer < f.dense_layers:
            shapes |= gated(mlp, f.hidden, f.dense_width)
            continue
        shapes[f"{mlp}.gate"] = ((f.experts, f.hidden), Whole())
        shapes |= gated(f"{mlp}.shared_experts", f.hidden, f.shared_experts * f.expert_width)
        for name in ("gate_proj", "up_proj"):
            shapes[f"{mlp}.experts.{name}"] = ((f.experts, f.expert_width, f.hidden), Experts())
        shapes[f"{mlp}.experts.down_proj"] = ((f.experts, f.hidden, f.expert_width), Experts())
    return shapes


def gated(name: str, hidden: int, width: int) -> dict[str, tuple[tuple[int, ...], Units]]:
    return {
        f"{name}.gate_proj": ((width, hidden), Whole()),
        f"{name}.up_proj": ((width, hidden), Whole()),
        f"{name}.down_proj": ((hidden, width), Whole()),
    }


def specs(family: Family, gpus: int, dense_shards: int = 64, expert_dim: int = 0) -> list[Spec]:
    """Experts over all cards along `expert_dim`; dense weights in replicas of `dense_shards` cards."""
    wide = torch.arange(gpus)
    pairs = wide.view(-1, min(dense_shards, gpus))
    return [
        Spec(
            name,
            shape,
            units.grid(name, shape),
            arrange(name, shape, wide, [Shard(expert_dim)])
            if len(shape) == 3
            else arrange(name, shape, pairs, [Replicate(), Shard(0)]),
            "torch.bfloat16",
        )
        for name, (shape, units) in parameters(family).items()
    ]


def predict(gpus: int, machine: Machine, family: Family, expert_dim: int = 0) -> tuple[Plan, Prediction]:
    plan = planner.build(specs(family, gpus, expert_dim=expert_dim), planner.Rules(bucket_bytes=1 << 29))
    return plan, plan.predict(machine)


def fewest(target_s: float, predictions: dict[int, Prediction]) -> str:
    """The fewest of these numbers of cards that reach the target, and what the error bar makes of that."""

    def first(seconds: Callable[[Prediction], float]) -> str:
        enough = [gpus for gpus, prediction in sorted(predictions.items()) if seconds(prediction) <= target_s]
        return str(enough[0]) if enough else f"more than {max(predictions)}"

    return (
        f"{target_s} s a step: {first(lambda p: p.total_s)} cards ({first(lambda p: p.range_s[0])} if the low end of "
        f"the error bar holds, {first(lambda p: p.range_s[1])} if the high end does)"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description="Predicted step times of Kimi K2.5 under sharded Muon.")
    parser.add_argument("--gpus", type=int, nargs="+", default=GPUS, help="multiples of 64")
    parser.add_argument(
        "--machine", type=Path, help="JSON of benchmarks/muon/step.py; assumed H100 rates without it"
    )
    parser.add_argument(
        "--form", choices=FORM_FACTORS, default="gram", help="form of the Newton-Schulz products"
    )
    parser.add_argument(
        "--expert-dim",
        type=int,
        default=0,
        help="0: every card stores whole experts; 1: every expert is sharded",
    )
    parser.add_argument("--target", type=float, default=0.2, help="seconds per step to reach")
    options = parser.parse_args()
    machine = Machine.load(options.machine) if options.machine else Machine()
    machine = replace(machine, form_factor=FORM_FACTORS[options.form])
    rates = "measured" if machine.is_measured else "assumed"
    print(f"PREDICTION, not a measurement: Kimi K2.5 on {machine.name} cards, {rates} rates, error bar "
          f"{machine.error:.0%}, {options.form} form ({machine.form_factor:.2f} of standard products)")  # fmt: skip
    print(f"{'cards':>6}{'step s':>9}{'low':>8}{'high':>8}{'products':>10}{'transfers':>11}{'passes':>9}"
          f"{'imbalance':>11}{'GB sent':>9}")  # fmt: skip
    predictions = {}
    for gpus in options.gpus:
        plan, prediction = predict(gpus, machine, Family(), options.expert_dim)
        predictions[gpus] = prediction
        sent = sum(each.work().sent_bytes for each in plan.exchanges) / 1e9
        low, high = prediction.range_s
        print(f"{gpus:>6}{prediction.total_s:>9.3f}{low:>8.3f}{high:>8.3f}{prediction.products_s:>10.3f}{prediction.transfer_s:>11.3f}"
              f"{prediction.elementwise_s:>9.3f}{plan.imbalance:>11.1%}{sent:>9.2f}", flush=True)  # fmt: skip
    print(fewest(options.target, predictions))


if __name__ == "__main__":
    main()
