"""A tensor cut along each of its dimensions: the one geometry of shards (who stores) and units (what is updated)."""

from __future__ import annotations

import bisect
import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

Interval = tuple[int, int]
"""Start and stop along one dimension."""
Box = tuple[Interval, ...]
"""One interval per dimension."""


def size(box: Box) -> int:
    return math.prod(stop - start for start, stop in box)


def blocks(sizes: Sequence[int]) -> tuple[Interval, ...]:
    """Neighbouring intervals of these sizes, from 0."""
    stops = list(itertools.accumulate(sizes))
    return tuple(zip([0, *stops[:-1]], stops, strict=True))


def chunk(interval: Interval, parts: int) -> list[Interval]:
    """`torch.chunk`: equal parts, rounded up; the last ones are shorter or empty."""
    start, stop = interval
    step = -(-(stop - start) // parts)
    return [(min(start + i * step, stop), min(start + (i + 1) * step, stop)) for i in range(parts)]


@dataclass(frozen=True)
class Grid:
    """Cells are numbered with the last dimension running fastest. Empty intervals are legal (ranks without a shard)."""

    cuts: tuple[tuple[Interval, ...], ...]

    def __len__(self) -> int:
        return math.prod(len(cut) for cut in self.cuts)

    def box(self, cell: int) -> Box:
        indices = []
        for cut in reversed(self.cuts):
            cell, index = divmod(cell, len(cut))
            indices.append(cut[index])
        return tuple(reversed(indices))

    def overlaps(self, box: Box) -> Iterator[tuple[int, Box]]:
        """Cells that meet `box`, with the part that they share; never an empty one."""
        cells: list[tuple[int, Box]] = [(0, ())]
        for cut, interval in zip(self.cuts, box, strict=True):
            shared = meeting(cut, interval)
            cells = [(c * len(cut) + i, (*b, part)) for c, b in cells for i, part in shared]
        yield from cells


def meeting(cut: tuple[Interval, ...], interval: Interval) -> list[tuple[int, Interval]]:
    """Indices of the intervals that share something with `interval`, and what they share."""
    start, stop = interval
    shared = []
    for index in range(bisect.bisect_right(cut, start, key=lambda each: each[1]), len(cut)):
        a, b = max(cut[index][0], start), min(cut[index][1], stop)
        if cut[index][0] >= stop:
            break
        if a < b:
            shared.append((index, (a, b)))
    return shared
