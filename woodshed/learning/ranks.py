"""Agreement between the ranks of a training run; with one process, every function gives back what it got.

All ranks hold the same batch, as it is made of records, so counts and denominators need no exchange. Each computes its
share of the micro-batches, and as many of them as any other: a sharded forward is an exchange in which all take part.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from operator import attrgetter
from typing import Any, Generic, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

EXCHANGE = timedelta(minutes=30)
"""Longest time that an exchange between ranks may take: a rank that hangs ends the run after it."""

T = TypeVar("T")
K = TypeVar("K")


def count() -> int:
    """Ranks of this run; 1 without a process group."""
    return dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1


def index() -> int:
    """Number of this rank, from 0; rank 0 writes."""
    return dist.get_rank() if count() > 1 else 0


def started() -> int:
    """Ranks of this run as torchrun started them, also before they have met; 1 without it."""
    return count() if count() > 1 else int(os.environ.get("WORLD_SIZE", "1"))


def started_here() -> int:
    """Ranks of this run on this machine."""
    return int(os.environ.get("LOCAL_WORLD_SIZE", started()))


@dataclass(frozen=True)
class DealtBatch(Generic[T]):
    """A micro-batch of this rank."""

    items: list[T]
    counts: bool
    """False where it only takes part in what the ranks exchange."""
    meanwhile: list[T]
    """Items that any rank computes at the same time, its own included."""


def deal(
    items: Sequence[T],
    lengths: Sequence[int],
    split: Callable[[Sequence[int], Sequence[int]], list[list[int]]],
    sharers: int = 1,
) -> list[DealtBatch[T]]:
    """This rank's micro-batches, as many as any other rank's.

    Items go to the rank with the fewest positions so far, longest first. A rank with fewer micro-batches than another
    gets the shortest item again, which takes part in the exchange and must count nothing.

    Args:
        split: makes micro-batches of items, given by their indices, and their lengths.
        sharers: ranks, neighbours, that have the same micro-batches and share each row.
    """
    readers = count() // sharers
    shares: list[list[int]] = [[] for _ in range(readers)]
    loads = [0] * readers
    for i in sorted(range(len(items)), key=lambda i: -lengths[i]):
        reader = loads.index(min(loads))
        shares[reader].append(i)
        loads[reader] += lengths[i]
    dealt = [split(sorted(share), [lengths[i] for i in sorted(share)]) for share in shares]
    shortest = sorted(range(len(items)), key=lambda i: lengths[i])[:1]
    mine, batches = dealt[index() // sharers], []
    for n in range(max(map(len, dealt))):
        chosen = mine[n] if n < len(mine) else shortest
        meanwhile = [i for parts in dealt for part in parts[n : n + 1] for i in part]
        batches.append(DealtBatch([items[i] for i in chosen], n < len(mine), [items[i] for i in meanwhile]))
    return batches


def total(values: Tensor) -> Tensor:
    """Sum over ranks, in place."""
    if count() > 1:
        dist.all_reduce(values)
    return values


def gather(values: Sequence[T]) -> list[T]:
    """The values of all ranks, in order of rank."""
    if count() == 1:
        return list(values)
    found: list[list[T]] = [[] for _ in range(count())]
    dist.all_gather_object(found, list(values))
    return [value for part in found for value in part]


def agreed(value: T, group: dist.ProcessGroup | None = None) -> T:
    """Rank 0's value, so that all ranks decide alike.

    Args:
        group: of all ranks, for a thread beside the main one; None takes that of the main thread.
    """
    if count() == 1:
        return value
    held = [value]
    dist.broadcast_object_list(held, src=0, group=group)
    return held[0]


class RankCalls:
    """Rank 0's calls of methods that touch sharded weights, which every other rank makes as well.

    Args:
        group: the process group in which rank 0 tells them; None where it is alone, and nothing is told to anybody.
    """

    def __init__(self, group: dist.ProcessGroup | None = None) -> None:
        self._group = group

    def tell(self, method: str, *args: Any, **kwargs: Any) -> None:
        """Let the other ranks call a method of their object, given by its dotted name; a no-op on them."""
        self._broadcast((method, args, kwargs))

    def release(self) -> None:
        """Let the other ranks end."""
        self._broadcast(None)

    def _broadcast(self, command: tuple[str, tuple[Any, ...], dict[str, Any]] | None) -> None:
        if self._group is not None and dist.get_rank() == 0:
            dist.broadcast_object_list([command], src=0, group=self._group)

    def follow(self, followed: object) -> None:
        """Call the methods of an object that rank 0 tells, until it lets this rank end."""
        while True:
            told: list[Any] = [None]
            dist.broadcast_object_list(told, src=0, group=self._group)
            if told[0] is None:
                return
            method, args, kwargs = told[0]
            attrgetter(method)(followed)(*args, **kwargs)


def sum_replicated(gradients: dict[K, Tensor]) -> dict[K, Tensor]:
    """Sum the gradients of weights that every rank holds whole, in place and in one exchange for each precision, and
    return all of them.

    FSDP has summed those of the weights that it shards.
    """
    if count() == 1:
        return gradients
    whole = [each for each in gradients.values() if not isinstance(each, DTensor)]
    for dtype in dict.fromkeys(each.dtype for each in whole):
        alike = [each for each in whole if each.dtype == dtype]
        flat = total(torch.cat([each.flatten() for each in alike]))
        for each, part in zip(alike, flat.split([each.numel() for each in alike]), strict=True):
            each.copy_(part.view_as(each))
    return gradients
