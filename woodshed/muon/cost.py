"""Predicted duration of a step: the larger of products and transfers, then the passes over memory.

    T = max(C / F, B / L) + E / H + fill

C FLOPs of the busiest rank, F what batched products reach; B bytes that a rank sends, L what its links carry; E bytes
that element-wise passes read and write, H memory bandwidth; fill is the first bucket's way there and the last one's way
back, which nothing hides.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, fields
from pathlib import Path

ELEMENTWISE_BYTES = 24
"""Per parameter element: read gradient (4), read and write momentum (8), write and read the wire in bfloat16 (4),
read and write the weight (8)."""

FORM_FACTORS = {"standard": 1.0, "symmetric": 0.87, "gram": 0.52}
"""Time of the products of a Newton-Schulz form over that of the standard one, 2048 x 7168: what steps of 131.1, 118.4
and 83.6 ms on two H200 leave. FLOPs alone say 0.72 and 0.44."""


@dataclass(frozen=True)
class Machine:
    """Ceilings of one card and its links. `benchmarks/muon/step.py` measures them and writes them as JSON."""

    name: str = "H100"
    product_flops: float = 650e12
    """Batched bfloat16 products at the shapes of the model."""
    memory_bytes_per_s: float = 2.8e12
    link_bytes_per_s: float = 350e9
    """Rate at which one card sends in an all-to-all inside its node."""
    network_bytes_per_s: float = 45e9
    """Rate at which one card sends to other nodes (400 Gb/s per card)."""
    gpus_per_node: int = 8
    form_factor: float = 1.0
    """Of the Newton-Schulz form: see `FORM_FACTORS`."""
    error: float = 0.3
    """Relative error of the prediction; from calibration, or assumed while there is none. Steps on one and on two H200
    took 1.26 and 1.23 times what this formula makes of ceilings measured there."""
    is_measured: bool = False

    @classmethod
    def load(cls, path: Path) -> Machine:
        """The `machine` of a benchmark's JSON; keys that it lacks keep their assumed values."""
        values = json.loads(path.read_text("utf-8"))["machine"]
        return cls(**{field.name: values[field.name] for field in fields(cls) if field.name in values})


@dataclass(frozen=True)
class Work:
    """Data that one exchange moves in one step."""

    sent_bytes: float
    """Per rank, to others, there and back."""
    elements: float
    """Parameter elements that one rank stores."""
    num_ranks: int
    num_buckets: int = 1


@dataclass(frozen=True)
class Prediction:
    """Seconds of one step."""

    products_s: float
    transfer_s: float
    elementwise_s: float
    fill_s: float
    error: float

    @property
    def total_s(self) -> float:
        return max(self.products_s, self.transfer_s) + self.elementwise_s + self.fill_s

    @property
    def range_s(self) -> tuple[float, float]:
        return self.total_s * (1 - self.error), self.total_s * (1 + self.error)


def predict(busiest_flops: float, work: list[Work], machine: Machine) -> Prediction:
    """Exchanges share the cards, so what they move adds up; `busiest_flops` is the busiest card's, over all of them."""
    products = busiest_flops * machine.form_factor / machine.product_flops
    transfers = [transfer_s(each, machine) for each in work]
    passes = sum(each.elements for each in work) * ELEMENTWISE_BYTES / machine.memory_bytes_per_s
    fill = sum(t / each.num_buckets for t, each in zip(transfers, work, strict=True))
    return Prediction(products, sum(transfers), passes, fill, machine.error)


def transfer_s(work: Work, machine: Machine) -> float:
    """Duration of a transfer: peers in the node and outside it are reached at the same time, over different wires."""
    inside = min(machine.gpus_per_node - 1, work.num_ranks - 1) / max(work.num_ranks - 1, 1)
    return max(
        work.sent_bytes * inside / machine.link_bytes_per_s,
        work.sent_bytes * (1 - inside) / machine.network_bytes_per_s,
    )
