"""Bandit over task generators, drawn by Thompson sampling.

The value of an arm is the share of its candidates that are valid, times the share of its tasks' groups with different
rewards, per second of making a candidate.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any


@dataclass
class GeneratorRecord:
    """Record of one generator; starts as one success and one failure of each kind."""

    valid: float = 1.0
    invalid: float = 1.0
    informative: float = 1.0
    """Number of groups of its tasks whose attempts got different rewards, plus one."""
    uniform: float = 1.0
    seconds: float = 0.0

    def value(self, rng: random.Random) -> float:
        """One sample of the value of a second of this generator."""
        num_tried = self.valid + self.invalid - 2
        cost = self.seconds / num_tried if num_tried else 1.0
        worth = rng.betavariate(self.valid, self.invalid) * rng.betavariate(self.informative, self.uniform)
        return worth / max(cost, 1e-3)


class Bandit:
    """Generators by name, such as "harden/H3" or "stub/1/toolz"."""

    def __init__(self, names: Sequence[str], *, seed: int) -> None:
        self.arms = {name: GeneratorRecord() for name in names}
        self._seed, self._draws = seed, 0

    def choose(self, kind: str = "") -> str:
        """The arm to pull now, among those whose names start with `kind`; the same for the same seed and past."""
        rng = random.Random(f"{self._seed}/{self._draws}")
        self._draws += 1
        values = {name: arm.value(rng) for name, arm in sorted(self.arms.items()) if name.startswith(kind)}
        return max(values, key=lambda name: values[name])

    def record(self, name: str, *, valid: int, tried: int, seconds: float) -> None:
        """Record the tasks that a generator made."""
        arm = self.arms.setdefault(name, GeneratorRecord())
        arm.valid += valid
        arm.invalid += tried - valid
        arm.seconds += seconds

    def observe(self, name: str, is_informative: bool) -> None:
        """Record if a group of attempts at one of its tasks had different rewards."""
        arm = self.arms.setdefault(name, GeneratorRecord())
        arm.informative += is_informative
        arm.uniform += not is_informative

    def state(self) -> dict[str, Any]:
        return {"draws": self._draws, "arms": {name: asdict(arm) for name, arm in self.arms.items()}}

    def restore(self, state: dict[str, Any]) -> None:
        self._draws = state["draws"]
        self.arms = {name: GeneratorRecord(**values) for name, values in state["arms"].items()}
