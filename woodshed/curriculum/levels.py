"""Shares of difficulty levels, which move to harder levels when a level is solved and to easier ones when it is not.

Per repository and level, success is counted over windows of 64 attempts. Two windows in a row above 0.7 move a tenth
of the level's share to the next harder one, two below 0.25 to the next easier one. Thresholds as in reasoning-gym's
published curricula; two windows, so that noise does not move it back and forth.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

WINDOW = 64
HIGH, LOW = 0.70, 0.25
MOVED = 0.1
MOST = 0.4
"""Largest share of one level, if there are three levels or more."""


class Levels:
    """Multipliers of task weights by (repository, level)."""

    def __init__(self, cells: Iterable[tuple[str, int]]) -> None:
        self._cells = sorted(set(cells))
        self._share = dict.fromkeys(self._cells, 1.0)
        self._window: dict[tuple[str, int], list[int]] = {cell: [0, 0, 0] for cell in self._cells}
        """Attempts and solves in the current window, and the number of windows in a row with a high (+) or low (-)
        rate."""

    def share(self, cell: tuple[str, int]) -> float:
        return self._share.get(cell, 1.0)

    def observe(self, cell: tuple[str, int], attempts: int, solved: int) -> None:
        if cell not in self._share:
            self._cells = sorted([*self._cells, cell])
            self._share[cell], self._window[cell] = 1.0, [0, 0, 0]
        window = self._window[cell]
        window[0] += attempts
        window[1] += solved
        if window[0] < WINDOW:
            return
        rate, streak = window[1] / window[0], window[2]
        streak = max(streak, 0) + 1 if rate > HIGH else min(streak, 0) - 1 if rate < LOW else 0
        if abs(streak) == 2:
            self._move(cell, 1 if streak > 0 else -1)
            streak = 0
        self._window[cell] = [0, 0, streak]

    def capped(self, mass: Mapping[int, float]) -> dict[int, float]:
        """Factors that reduce the weight of every level to at most MOST of the total."""
        total = sum(mass.values())
        factors = dict.fromkeys(mass, 1.0)
        for level, own in mass.items():
            if len(mass) > 2 and own > MOST * total:
                factors[level] = MOST / (1 - MOST) * (total - own) / own
        return factors

    def state(self) -> list[Any]:
        return [[*cell, self._share[cell], *self._window[cell]] for cell in self._cells]

    def restore(self, state: list[Any]) -> None:
        for repository, level, share, *window in state:
            cell = (repository, level)
            self._share[cell], self._window[cell] = share, list(window)
        self._cells = sorted(self._share)

    def _move(self, cell: tuple[str, int], direction: int) -> None:
        candidates = [c for c in self._cells if c[0] == cell[0] and (c[1] - cell[1]) * direction > 0]
        if candidates:
            nearest = min(candidates, key=lambda c: abs(c[1] - cell[1]))
            moved = MOVED * self._share[cell]
            self._share[cell] -= moved
            self._share[nearest] += moved
