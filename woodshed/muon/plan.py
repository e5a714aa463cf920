"""Plan of the exchange: the owner of every unit and the route of every shard. Pure arithmetic, equal on all ranks.

Parameters whose shards lie on the same ranks form an *exchange*. Its units get owners (balanced by cost), its owners'
units are cut into *buckets* (what is in flight together), and `routes` lists the shards that one rank sends and gets
back. Nothing is padded. A unit that lies whole on one rank stays there unless that rank is over-full: then just the
surplus moves, so whole experts on every rank cost no bytes, and experts that do not divide evenly cost few. `planner`
makes plans.

Letters: R replicas, W positions (shards) of a replica. Members of an exchange are the W positions of one replica
("redundant": every replica does the same work), or all R x W ranks ("split": every unit is orthogonalised once, and its
owner sends the update to every replica).
"""

from __future__ import annotations

import functools
import hashlib
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from woodshed.muon import cost as costs
from woodshed.muon.grid import Box, Grid, size
from woodshed.muon.layout import Storage
from woodshed.muon.units import cost


@dataclass(frozen=True)
class Spec:
    """One parameter to orthogonalise."""

    name: str
    shape: tuple[int, ...]
    units: Grid
    storage: Storage
    dtype: str = "float32"


@dataclass(frozen=True, slots=True)
class Unit:
    """One matrix."""

    spec: int
    """Index of its parameter in `Exchange.specs`."""
    box: Box
    rows: int
    cols: int


@dataclass(frozen=True, slots=True)
class UnitShard:
    """The part of one unit that one rank stores."""

    unit: int
    member: int
    """The other side: the owner in a list of stored shards, the storing member in a list of owned ones."""
    box: Box
    is_sent: bool
    """True if momentum travels from here to the owner: from the owner's own replica only. Updates always travel."""


@dataclass(frozen=True)
class Routes:
    """The shards of one bucket on one rank, in the order of the wire."""

    stored: tuple[UnitShard, ...]
    owned: tuple[UnitShard, ...]


@dataclass(frozen=True)
class Bucket:
    """Units that are in flight together."""

    units: tuple[int, ...]
    moves: bool
    """False if nothing travels; the bucket has no collective then."""
    scratch_bytes: int
    """Buffers of the fullest rank while the bucket is in flight."""


@dataclass(frozen=True)
class Exchange:
    """Parameters that are stored on the same ranks in the same order, and who updates them."""

    ranks: tuple[tuple[int, ...], ...]
    """Global rank of (replica, position)."""
    is_split: bool
    specs: tuple[Spec, ...]
    units: tuple[Unit, ...]
    owners: tuple[int, ...]
    """Member that orthogonalises each unit."""
    buckets: tuple[Bucket, ...]
    """Those that move first, largest units first."""
    wire_itemsize: int
    steps: int

    def members(self, rank: int) -> tuple[int, ...]:
        """Global ranks that exchange with `rank`, itself included; the index is the member number."""
        if self.is_split:
            return tuple(each for replica in self.ranks for each in replica)
        return next(replica for replica in self.ranks if rank in replica)

    @property
    def num_members(self) -> int:
        return len(self.ranks[0]) * (len(self.ranks) if self.is_split else 1)

    @functools.cached_property
    def first_unit(self) -> tuple[int, ...]:
        """Index of each parameter's first unit."""
        firsts, total = [], 0
        for spec in self.specs:
            firsts.append(total)
            total += len(spec.units)
        return tuple(firsts)

    @functools.cached_property
    def bucket_of(self) -> dict[int, int]:
        return {unit: index for index, bucket in enumerate(self.buckets) for unit in bucket.units}

    @functools.cached_property
    def owned_by(self) -> tuple[tuple[int, ...], ...]:
        owned: list[list[int]] = [[] for _ in range(self.num_members)]
        for unit, owner in enumerate(self.owners):
            owned[owner].append(unit)
        return tuple(map(tuple, owned))

    @functools.cached_property
    def loads(self) -> tuple[float, ...]:
        """Cost of every member."""
        return tuple(
            sum(cost(self.units[u].rows, self.units[u].cols, self.steps) for u in owned)
            for owned in self.owned_by
        )

    def shards(self, rank: int) -> Iterator[UnitShard]:
        """Shards that `rank` stores, unit by unit."""
        replica, position = self.specs[0].storage.find(rank)
        num_positions = len(self.ranks[0])
        for spec, first in zip(self.specs, self.first_unit, strict=True):
            for cell, box in spec.units.overlaps(spec.storage.grid.box(position)):
                owner = self.owners[first + cell]
                is_sent = not self.is_split or owner // num_positions == replica
                yield UnitShard(first + cell, owner, box, is_sent)

    def owned_shards(self, rank: int) -> Iterator[UnitShard]:
        """Every shard of the units that `rank` owns, wherever it is stored."""
        members, num_positions = self.members(rank), len(self.ranks[0])
        me = members.index(rank)
        replicas = range(len(self.ranks)) if self.is_split else [0]
        for index in self.owned_by[me]:
            unit = self.units[index]
            for position, box in self.specs[unit.spec].storage.grid.overlaps(unit.box):
                for replica in replicas:
                    is_sent = not self.is_split or replica == me // num_positions
                    yield UnitShard(index, replica * num_positions + position, box, is_sent)

    def routes(self, rank: int, order: Sequence[int] | None = None) -> list[Routes]:
        """Pieces of every bucket on one rank, sorted by the peer's position in the process group, then by unit."""
        position_in_group = order or range(self.num_members)
        stored: list[list[UnitShard]] = [[] for _ in self.buckets]
        owned: list[list[UnitShard]] = [[] for _ in self.buckets]
        for shard in self.shards(rank):
            stored[self.bucket_of[shard.unit]].append(shard)
        for shard in self.owned_shards(rank):
            owned[self.bucket_of[shard.unit]].append(shard)

        def wire(shards: list[UnitShard]) -> tuple[UnitShard, ...]:
            return tuple(sorted(shards, key=lambda shard: (position_in_group[shard.member], shard.unit)))

        return [Routes(wire(s), wire(o)) for s, o in zip(stored, owned, strict=True)]

    def sent_bytes(self, rank: int) -> int:
        """Bytes that `rank` sends to others in one step: momentum to owners, updates back."""
        me = self.members(rank).index(rank)
        momentum = sum(size(p.box) for p in self.shards(rank) if p.is_sent and p.member != me)
        updates = sum(size(p.box) for p in self.owned_shards(rank) if p.member != me)
        return (momentum + updates) * self.wire_itemsize

    @property
    def num_collectives(self) -> int:
        """All-to-alls in one step."""
        return 2 * sum(bucket.moves for bucket in self.buckets)

    def work(self) -> costs.Work:
        """Data moved and products computed, for the cost model; bytes are those of a typical rank."""
        elements = sum(math.prod(spec.shape) for spec in self.specs) / len(self.ranks[0])
        probes = sorted({*self.ranks[0][:: max(1, len(self.ranks[0]) // 8)], self.ranks[0][-1]})
        sent = sum(self.sent_bytes(rank) for rank in probes) / len(probes)
        moving = max(1, sum(bucket.moves for bucket in self.buckets))
        return costs.Work(sent, elements, self.num_members, moving)


@dataclass(frozen=True)
class Plan:
    """All exchanges of a model."""

    exchanges: tuple[Exchange, ...]

    @functools.cached_property
    def digest(self) -> str:
        """Hash of the whole plan, to compare ranks by."""
        text = "\n".join(repr(each) for each in self.exchanges)
        return hashlib.sha256(text.encode()).hexdigest()[:16]

    def sent_bytes(self, rank: int) -> int:
        return sum(e.sent_bytes(rank) for e in self.exchanges if any(rank in r for r in e.ranks))

    @property
    def num_collectives(self) -> int:
        return sum(each.num_collectives for each in self.exchanges)

    @property
    def scratch_bytes(self) -> int:
        """The largest bucket; the runtime keeps several in flight, up to its budget."""
        return max((b.scratch_bytes for e in self.exchanges for b in e.buckets), default=0)

    @functools.cached_property
    def loads(self) -> dict[int, float]:
        """Cost of every global rank, over all exchanges."""
        loads: dict[int, float] = {}
        for each in self.exchanges:
            for rank in (rank for replica in each.ranks for rank in replica):
                member = each.members(rank).index(rank)
                loads[rank] = loads.get(rank, 0.0) + each.loads[member]
        return loads

    @property
    def imbalance(self) -> float:
        """Busiest rank over the mean, less one."""
        return max(self.loads.values()) * len(self.loads) / max(sum(self.loads.values()), 1e-30) - 1

    def predict(self, machine: costs.Machine | None = None) -> costs.Prediction:
        busiest = max(self.loads.values(), default=0.0)
        return costs.predict(busiest, [each.work() for each in self.exchanges], machine or costs.Machine())

    def describe(self, machine: costs.Machine | None = None) -> str:
        """One line per exchange, one per shape, then the predicted time."""
        lines = []
        for number, each in enumerate(self.exchanges):
            num_replicas, num_positions = len(each.ranks), len(each.ranks[0])
            mode = "split" if each.is_split else "redundant" if num_replicas > 1 else "single"
            sent = each.work().sent_bytes
            lines.append(
                f"exchange {number}: {len(each.specs)} parameters, {len(each.units)} units over {num_positions} shards "
                f"x {num_replicas} replicas ({mode}), {len(each.buckets)} buckets, "
                f"{sum(b.moves for b in each.buckets)} of them move, {sent / 1e6:.2f} MB sent per rank"
            )
            lines += [f"  {line}" for line in shapes(each)]
        lines.append(f"busiest rank {self.imbalance:.1%} above the mean; plan {self.digest}")
        predicted, machine = self.predict(machine), machine or costs.Machine()
        low, high = predicted.range_s
        rates = "measured" if machine.is_measured else "assumed"
        lines.append(
            f"prediction ({machine.name}, {rates} rates): {1e3 * predicted.total_s:.2f} ms, {1e3 * low:.2f} to "
            f"{1e3 * high:.2f}; products {1e3 * predicted.products_s:.2f}, transfers {1e3 * predicted.transfer_s:.2f}, "
            f"element-wise {1e3 * predicted.elementwise_s:.2f}"
        )
        return "\n".join(lines)


def shapes(exchange: Exchange) -> Iterator[str]:
    """Units of each shape, and the fewest and most that a member owns."""
    counts: dict[tuple[int, int], list[int]] = {}
    for unit, owner in zip(exchange.units, exchange.owners, strict=True):
        counts.setdefault((unit.rows, unit.cols), [0] * exchange.num_members)[owner] += 1
    for (rows, cols), owned in counts.items():
        yield f"{sum(owned)} of {rows} x {cols}: {min(owned)} to {max(owned)} on a rank"
