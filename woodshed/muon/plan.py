"""Who orthogonalises what, and which piece of which shard goes where: pure arithmetic, the same on every rank.

Parameters whose shards lie on the same ranks form an *exchange*. Its units get owners (balanced by cost), its owners'
units are cut into *buckets* (what is in flight together), and `routes` lists the pieces that one rank sends and gets
back. Nothing is padded. A unit that lies whole on one rank stays there unless that rank is over-full: then just the
surplus moves, so whole experts on every rank cost no bytes, and experts that do not divide evenly cost few.

Letters: R replicas, W positions (shards) of a replica. Members of an exchange are the W positions of one replica
("redundant": every replica does the same work), or all R x W ranks ("split": every unit is orthogonalised once, and its
owner sends the update to every replica).
"""

from __future__ import annotations

import functools
import hashlib
import heapq
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from woodshed.muon import cost as costs
from woodshed.muon.errors import MuonError
from woodshed.muon.grid import Box, Grid, size
from woodshed.muon.layout import Storage
from woodshed.muon.units import cost, flops

Placement = Literal["auto", "local", "all_to_all"]
ReplicaMode = Literal["auto", "redundant", "split"]
SLACK = 1.01
"""A unit that is whole on its rank moves only if the busiest rank would else have 1% more than balance needs."""


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
class Piece:
    """What one rank stores of one unit."""

    unit: int
    member: int
    """The other side: the owner in a list of stored pieces, the storing member in a list of owned ones."""
    box: Box
    is_sent: bool
    """Whether momentum travels from here to the owner: from the owner's own replica only. Updates always travel."""


@dataclass(frozen=True)
class Routes:
    """The pieces of one bucket on one rank, in the order of the wire."""

    stored: tuple[Piece, ...]
    owned: tuple[Piece, ...]


@dataclass(frozen=True)
class Bucket:
    """Units that are in flight together."""

    units: tuple[int, ...]
    moves: bool
    """Whether anything travels; else the bucket has no collective."""
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

    @property
    def imbalance(self) -> float:
        """Busiest member over the mean, less one."""
        return max(self.loads) * len(self.loads) / max(sum(self.loads), 1e-30) - 1

    def pieces(self, rank: int) -> Iterator[Piece]:
        """What `rank` stores, unit by unit."""
        replica = next(r for r, ranks in enumerate(self.ranks) if rank in ranks)
        num_positions = len(self.ranks[0])
        for spec, first in zip(self.specs, self.first_unit, strict=True):
            _, position = spec.storage.find(rank)
            for cell, box in spec.units.overlaps(spec.storage.grid.box(position)):
                owner = self.owners[first + cell]
                is_sent = not self.is_split or owner // num_positions == replica
                yield Piece(first + cell, owner, box, is_sent)

    def owned_pieces(self, rank: int) -> Iterator[Piece]:
        """Every piece of the units that `rank` owns, wherever it is stored."""
        members, num_positions = self.members(rank), len(self.ranks[0])
        me = members.index(rank)
        replicas = range(len(self.ranks)) if self.is_split else [0]
        for index in self.owned_by[me]:
            unit = self.units[index]
            for position, box in self.specs[unit.spec].storage.grid.overlaps(unit.box):
                for replica in replicas:
                    is_sent = not self.is_split or replica == me // num_positions
                    yield Piece(index, replica * num_positions + position, box, is_sent)

    def routes(self, rank: int, order: Sequence[int] | None = None) -> list[Routes]:
        """Pieces of every bucket on one rank, sorted by the peer's place in the process group, then by unit."""
        place = order or range(self.num_members)
        stored: list[list[Piece]] = [[] for _ in self.buckets]
        owned: list[list[Piece]] = [[] for _ in self.buckets]
        for piece in self.pieces(rank):
            stored[self.bucket_of[piece.unit]].append(piece)
        for piece in self.owned_pieces(rank):
            owned[self.bucket_of[piece.unit]].append(piece)

        def wire(pieces: list[Piece]) -> tuple[Piece, ...]:
            return tuple(sorted(pieces, key=lambda piece: (place[piece.member], piece.unit)))

        return [Routes(wire(s), wire(o)) for s, o in zip(stored, owned, strict=True)]

    def sent_bytes(self, rank: int) -> int:
        """Bytes that `rank` sends to others in one step: momentum to owners, updates back."""
        me = self.members(rank).index(rank)
        there = sum(size(p.box) for p in self.pieces(rank) if p.is_sent and p.member != me)
        back = sum(size(p.box) for p in self.owned_pieces(rank) if p.member != me)
        return (there + back) * self.wire_itemsize

    @property
    def num_collectives(self) -> int:
        """All-to-alls in one step."""
        return 2 * sum(bucket.moves for bucket in self.buckets)

    def work(self) -> costs.Work:
        """For the cost model; bytes are those of a typical rank."""
        loads = [
            sum(flops(self.units[u].rows, self.units[u].cols, self.steps) for u in o) for o in self.owned_by
        ]
        elements = sum(math.prod(spec.shape) for spec in self.specs) / len(self.ranks[0])
        probes = sorted({*self.ranks[0][:: max(1, len(self.ranks[0]) // 8)], self.ranks[0][-1]})
        sent = sum(self.sent_bytes(rank) for rank in probes) / len(probes)
        moving = max(1, sum(bucket.moves for bucket in self.buckets))
        return costs.Work(max(loads), sent, elements, self.num_members, moving)


@dataclass(frozen=True)
class Plan:
    """All exchanges of a model."""

    exchanges: tuple[Exchange, ...]

    @functools.cached_property
    def digest(self) -> str:
        """Equal on all ranks exactly if they agree on everything."""
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

    def predict(self, machine: costs.Machine | None = None) -> costs.Prediction:
        return costs.predict([each.work() for each in self.exchanges], machine or costs.Machine())

    def describe(self, machine: costs.Machine | None = None) -> str:
        """One line per exchange, one per shape, then the predicted time."""
        lines = []
        for number, each in enumerate(self.exchanges):
            num_replicas, num_positions = len(each.ranks), len(each.ranks[0])
            mode = "split" if each.is_split else "redundant" if num_replicas > 1 else "single"
            sent = each.work().sent_bytes
            lines.append(
                f"exchange {number}: {len(each.specs)} parameters, {len(each.units)} units over {num_positions} shards "
                f"x {num_replicas} replicas ({mode}), imbalance {each.imbalance:.1%}, {len(each.buckets)} buckets, "
                f"{sum(b.moves for b in each.buckets)} of them move, {sent / 1e6:.2f} MB sent per rank"
            )
            lines += [f"  {line}" for line in shapes(each)]
        foreseen, machine = self.predict(machine), machine or costs.Machine()
        low, high = foreseen.range_s
        rates = "measured" if machine.is_measured else "assumed"
        lines.append(
            f"prediction ({machine.name}, {rates} rates): {1e3 * foreseen.total_s:.2f} ms, {1e3 * low:.2f} to "
            f"{1e3 * high:.2f}; products {1e3 * foreseen.products_s:.2f}, transfers {1e3 * foreseen.transfer_s:.2f}, "
            f"element-wise {1e3 * foreseen.elementwise_s:.2f}; plan {self.digest}"
        )
        return "\n".join(lines)


def shapes(exchange: Exchange) -> Iterator[str]:
    """Units of each shape, and the fewest and most that a member owns."""
    counts: dict[tuple[int, int], list[int]] = {}
    for unit, owner in zip(exchange.units, exchange.owners, strict=True):
        counts.setdefault((unit.rows, unit.cols), [0] * exchange.num_members)[owner] += 1
    for (rows, cols), owned in counts.items():
        yield f"{sum(owned)} of {rows} x {cols}: {min(owned)} to {max(owned)} on a rank"


def build(
    specs: Iterable[Spec],
    *,
    placement: Placement = "auto",
    replica_mode: ReplicaMode = "auto",
    bucket_bytes: int = 1 << 28,
    wire_itemsize: int = 2,
    steps: int = 5,
) -> Plan:
    """Plan of these parameters.

    Raises `MuonError` if `placement="local"` and a unit does not lie whole on one rank, or if replicas are to be split
    although they are plain tensors or although nothing may move.
    """
    groups: dict[tuple[object, ...], list[Spec]] = {}
    for spec in specs:
        groups.setdefault((spec.storage.ranks, spec.storage.is_plain, spec.dtype), []).append(spec)
    return Plan(
        tuple(
            exchange(tuple(group), placement, replica_mode, bucket_bytes, wire_itemsize, steps)
            for group in groups.values()
        )
    )


def exchange(
    specs: tuple[Spec, ...],
    placement: Placement,
    replica_mode: ReplicaMode,
    bucket_bytes: int,
    wire_itemsize: int,
    steps: int,
) -> Exchange:
    ranks = specs[0].storage.ranks
    units = tuple(
        Unit(index, box, box[-2][1] - box[-2][0], box[-1][1] - box[-1][0])
        for index, spec in enumerate(specs)
        for box in map(spec.units.box, range(len(spec.units)))
    )
    holders = storing(specs, units)
    homes = [held[0] if len(held) == 1 else None for held in holders]
    is_split = split(specs, units, homes, placement, replica_mode, wire_itemsize, steps)
    num_replicas = len(ranks) if is_split else 1
    num_positions = len(ranks[0])
    if placement == "local" and None in homes:
        spec = specs[units[homes.index(None)].spec]
        raise MuonError(
            f'{spec.name}: placement="local" moves nothing, but its units are cut over {num_positions} ranks. Shard '
            'it along its experts (Shard(0), fully_shard with shard_placement_fn), or pass placement="auto".'
        )
    unit_costs = [cost(unit.rows, unit.cols, steps) for unit in units]
    kept = homes if placement != "all_to_all" else [None] * len(units)
    owners = assign(unit_costs, kept, num_positions, num_replicas, placement == "local")
    moves = [
        home is None or owner % num_positions != home or (is_split and num_replicas > 1)
        for home, owner in zip(homes, owners, strict=True)
    ]
    sizes = [unit.rows * unit.cols * wire_itemsize for unit in units]
    members = (num_positions, num_replicas)
    buckets = pour(units, sizes, holders, owners, moves, members, bucket_bytes)
    return Exchange(ranks, is_split, specs, units, tuple(owners), buckets, wire_itemsize, steps)


def split(
    specs: tuple[Spec, ...],
    units: tuple[Unit, ...],
    homes: list[int | None],
    placement: Placement,
    mode: ReplicaMode,
    wire_itemsize: int,
    steps: int,
) -> bool:
    """Whether replicas share the work. "auto" splits where the products saved cost more than the bytes added."""
    storage = specs[0].storage
    num_replicas, num_positions = len(storage.ranks), len(storage.ranks[0])
    if mode == "split" and (storage.is_plain or placement == "local"):
        why = "is a plain tensor" if storage.is_plain else 'has placement="local", which moves nothing'
        raise MuonError(
            f'{specs[0].name}: replica_mode="split" needs DTensors and transfers, and it {why}. Use '
            'distribute_tensor(..., [Replicate()]) and placement="auto", or replica_mode="redundant".'
        )
    if mode != "auto" or num_replicas == 1 or storage.is_plain or placement == "local":
        return mode == "split" and num_replicas > 1
    saved = sum(flops(u.rows, u.cols, steps) for u in units) / num_positions * (1 - 1 / num_replicas)
    home_size = sum(u.rows * u.cols for u, home in zip(units, homes, strict=True) if home is not None)
    all_size = sum(u.rows * u.cols for u in units)
    before = 2 * (all_size - home_size) * (num_positions - 1) / num_positions
    there = (all_size - home_size) * (num_positions - 1) / num_positions / num_replicas
    back = all_size * (1 - 1 / (num_replicas * num_positions))
    added = (there + back - before) * wire_itemsize / num_positions
    machine = costs.Machine()
    return saved / machine.product_flops > added / machine.network_bytes_per_s


def assign(
    unit_costs: list[float],
    homes: list[int | None],
    num_positions: int,
    num_replicas: int,
    stay: bool,
) -> list[int]:
    """Owner of every unit: at home while that rank has room, else longest first to the least loaded (Graham 1969).

    Room is what the busiest rank needs if everything moves freely. Ties go to the lower member, so all ranks agree.
    """
    num_members = num_positions * num_replicas
    longest_first = sorted(range(len(unit_costs)), key=lambda unit: -unit_costs[unit])
    owners = [-1] * len(unit_costs)
    loads = [0.0] * num_members
    room = math.inf if stay else SLACK * makespan(unit_costs, longest_first, num_members)
    for unit in longest_first:
        home = homes[unit]
        if home is not None:
            member = min(range(home, num_members, num_positions), key=lambda each: loads[each])
            if loads[member] + unit_costs[unit] <= room:
                owners[unit] = member
                loads[member] += unit_costs[unit]
    queue = [(load, member) for member, load in enumerate(loads)]
    heapq.heapify(queue)
    for unit in longest_first:
        if owners[unit] < 0:
            load, member = heapq.heappop(queue)
            owners[unit] = member
            heapq.heappush(queue, (load + unit_costs[unit], member))
    return owners


def makespan(unit_costs: list[float], longest_first: list[int], num_members: int) -> float:
    queue = [0.0] * num_members
    for unit in longest_first:
        heapq.heapreplace(queue, queue[0] + unit_costs[unit])
    return max(queue)


def storing(specs: tuple[Spec, ...], units: tuple[Unit, ...]) -> list[list[int]]:
    """Positions that store something of each unit. Lists are shared where only dimensions that nobody cuts differ."""
    known: dict[object, list[int]] = {}
    found = []
    for unit in units:
        grid = specs[unit.spec].storage.grid
        key = tuple((cut, part) for cut, part in zip(grid.cuts, unit.box, strict=True) if len(cut) > 1)
        if key not in known:
            known[key] = [position for position, _ in grid.overlaps(unit.box)]
        found.append(known[key])
    return found


def pour(
    units: tuple[Unit, ...],
    sizes: list[int],
    holders: list[list[int]],
    owners: list[int],
    moves: list[bool],
    members: tuple[int, int],
    bucket_bytes: int,
) -> tuple[Bucket, ...]:
    """Cut every owner's units into the same number of buckets, same shapes side by side so that they share a product.

    Buckets that move come first. `members` is positions and sharing replicas.
    """
    poured: list[Bucket] = []
    for moving in (True, False):
        family = sorted(
            (unit for unit in range(len(units)) if moves[unit] == moving),
            key=lambda unit: (-sizes[unit], units[unit].rows, unit),
        )
        owned = [0] * math.prod(members)
        for unit in family:
            owned[owners[unit]] += 1
        count, most = 1, max(owned)
        while True:
            buckets = fill(family, sizes, holders, owners, moving, members, count)
            fullest = max((bucket.scratch_bytes for bucket in buckets), default=0)
            if fullest <= bucket_bytes or count >= most:
                break
            count = min(most, max(count + 1, int(count * fullest / bucket_bytes)))
        poured += buckets
    return tuple(poured)


def fill(
    family: list[int],
    sizes: list[int],
    holders: list[list[int]],
    owners: list[int],
    moving: bool,
    members: tuple[int, int],
    count: int,
) -> list[Bucket]:
    """`count` buckets: a unit's bucket is where its middle lies in the bytes of its owner."""
    totals, passed = [0] * math.prod(members), [0] * math.prod(members)
    for unit in family:
        totals[owners[unit]] += sizes[unit]
    poured: list[list[int]] = [[] for _ in range(count)]
    for unit in family:
        owner = owners[unit]
        middle = (passed[owner] + sizes[unit] / 2) / totals[owner]
        poured[int(middle * count)].append(unit)
        passed[owner] += sizes[unit]
    return [
        Bucket(tuple(sorted(each)), moving, scratch(each, sizes, holders, owners, moving, members))
        for each in poured
        if each
    ]


def scratch(
    bucket: list[int],
    sizes: list[int],
    holders: list[list[int]],
    owners: list[int],
    moving: bool,
    members: tuple[int, int],
) -> int:
    """Bytes of the fullest member: the batches, and where units move, what it sends and what it gets."""
    num_positions, num_replicas = members
    held = [0.0] * (num_positions * num_replicas)
    everywhere = 0.0
    for unit in bucket:
        held[owners[unit]] += sizes[unit] * (1 + num_replicas if moving else 1)
        share = sizes[unit] / len(holders[unit]) if moving else 0.0
        if len(holders[unit]) == num_positions:
            everywhere += share
        else:
            for position in holders[unit]:
                for member in range(position, len(held), num_positions):
                    held[member] += share
    return math.ceil(max(held) + everywhere)
