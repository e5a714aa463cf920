"""Makes plans: who owns which unit, whether replicas share the work, and which units travel together.

Exchanges share the ranks, so their loads are balanced together: the one with the largest units first, since the small
units of the others fill what it leaves.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

from woodshed.muon.cost import Machine
from woodshed.muon.errors import MuonError
from woodshed.muon.plan import Bucket, Exchange, Plan, Spec, Unit
from woodshed.muon.units import cost

Placement = Literal["auto", "local", "all_to_all"]
ReplicaMode = Literal["auto", "redundant", "split"]
SLACK = 1.01
"""A unit that is whole on its rank moves only if the busiest rank would else have 1% more than balance needs."""


@dataclass(frozen=True)
class Rules:
    """Rules by which a plan is made; `ShardedMuon` explains each."""

    placement: Placement = "auto"
    replica_mode: ReplicaMode = "auto"
    bucket_bytes: int = 1 << 28
    """What one bucket may hold on the fullest rank; a single unit may be larger."""
    wire_itemsize: int = 2
    steps: int = 5


@dataclass(frozen=True)
class Cargo:
    """The units of one exchange as the planner sees them; lists run over units."""

    ranks: tuple[tuple[int, ...], ...]
    specs: tuple[Spec, ...]
    units: tuple[Unit, ...]
    costs: list[float]
    sizes: list[int]
    """Bytes on the wire."""
    holders: list[list[int]]
    """Positions that store something of it."""
    homes: list[int | None]
    """The position that stores all of it, if one does."""

    @property
    def num_positions(self) -> int:
        return len(self.ranks[0])


def build(specs: Iterable[Spec], rules: Rules | None = None) -> Plan:
    """Plan of these parameters.

    Raises `MuonError` if `placement="local"` and a unit does not lie whole on one rank, or if replicas are to be split
    although they are plain tensors or although nothing may move.
    """
    rules = rules or Rules()
    groups: dict[tuple[object, ...], list[Spec]] = {}
    for spec in specs:
        groups.setdefault((spec.storage.ranks, spec.storage.is_plain, spec.dtype), []).append(spec)
    cargos = [load(tuple(group), rules) for group in groups.values()]
    rank_loads = {rank: 0.0 for cargo in cargos for replica in cargo.ranks for rank in replica}
    exchanges: dict[int, Exchange] = {}
    for index in sorted(range(len(cargos)), key=lambda each: -max(cargos[each].costs, default=0.0)):
        exchanges[index] = exchange(cargos[index], rules, rank_loads)
    return Plan(tuple(exchanges[index] for index in range(len(cargos))))


def load(specs: tuple[Spec, ...], rules: Rules) -> Cargo:
    units = tuple(
        Unit(index, box, box[-2][1] - box[-2][0], box[-1][1] - box[-1][0])
        for index, spec in enumerate(specs)
        for box in map(spec.units.box, range(len(spec.units)))
    )
    holders = storing(specs, units)
    return Cargo(
        specs[0].storage.ranks,
        specs,
        units,
        [cost(unit.rows, unit.cols, rules.steps) for unit in units],
        [unit.rows * unit.cols * rules.wire_itemsize for unit in units],
        holders,
        [held[0] if len(held) == 1 else None for held in holders],
    )


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


def exchange(cargo: Cargo, rules: Rules, rank_loads: dict[int, float]) -> Exchange:
    """Owners and buckets of one exchange; `rank_loads` has the earlier ones, and gets this one's added."""
    is_local = rules.placement == "local"
    if is_local and None in cargo.homes:
        spec = cargo.specs[cargo.units[cargo.homes.index(None)].spec]
        raise MuonError(
            f'{spec.name}: placement="local" moves nothing, but its units are cut over {cargo.num_positions} ranks. '
            'Shard it along its experts (Shard(0), fully_shard with shard_placement_fn), or pass placement="auto".'
        )
    is_split = split(cargo, rules)
    groups = [tuple(rank for replica in cargo.ranks for rank in replica)] if is_split else cargo.ranks
    start = [max(rank_loads[rank] for rank in same) for same in zip(*groups, strict=True)]
    kept = cargo.homes if rules.placement != "all_to_all" else [None] * len(cargo.units)
    owners = assign(cargo.costs, kept, start, cargo.num_positions, is_local)
    for unit, owner in enumerate(owners):
        for group in groups:
            rank_loads[group[owner]] += cargo.costs[unit]
    moves = [
        home is None or owner % cargo.num_positions != home or is_split
        for home, owner in zip(cargo.homes, owners, strict=True)
    ]
    buckets = pour(cargo, owners, moves, len(start) // cargo.num_positions, rules.bucket_bytes)
    return Exchange(
        cargo.ranks,
        is_split,
        cargo.specs,
        cargo.units,
        tuple(owners),
        buckets,
        rules.wire_itemsize,
        rules.steps,
    )


def split(cargo: Cargo, rules: Rules) -> bool:
    """True if replicas share the work. "auto" does so if the products saved take longer than the bytes added."""
    storage, mode = cargo.specs[0].storage, rules.replica_mode
    num_replicas, num_positions = len(cargo.ranks), cargo.num_positions
    may_move = not storage.is_plain and rules.placement != "local"
    if mode == "split" and not may_move:
        why = "is a plain tensor" if storage.is_plain else 'has placement="local", which moves nothing'
        raise MuonError(
            f'{cargo.specs[0].name}: replica_mode="split" needs DTensors and transfers, and it {why}. Use '
            'distribute_tensor(..., [Replicate()]) and placement="auto", or replica_mode="redundant".'
        )
    if mode != "auto" or num_replicas == 1 or not may_move:
        return mode == "split" and num_replicas > 1
    saved = sum(cargo.costs) / num_positions * (1 - 1 / num_replicas)
    everything = sum(cargo.sizes)
    moving = sum(size for size, home in zip(cargo.sizes, cargo.homes, strict=True) if home is None)
    one_way = moving * (num_positions - 1) / num_positions
    back = everything * (1 - 1 / (num_replicas * num_positions))
    added = (one_way / num_replicas + back - 2 * one_way) / num_positions
    machine = Machine()
    return saved / machine.product_flops > added / machine.network_bytes_per_s


def assign(
    unit_costs: list[float], homes: Sequence[int | None], start: list[float], num_positions: int, stay: bool
) -> list[int]:
    """Owner of every unit: at home while that rank has room, else longest first to the least loaded (Graham 1969).

    Room is what the busiest rank needs if everything moves freely. Ties go to the lower member, so all ranks agree.
    `start` is what members have to do already.
    """
    longest_first = sorted(range(len(unit_costs)), key=lambda unit: -unit_costs[unit])
    owners = [-1] * len(unit_costs)
    loads = list(start)
    room = math.inf if stay else SLACK * makespan(unit_costs, longest_first, start)
    for unit in longest_first:
        home = homes[unit]
        if home is not None:
            member = min(range(home, len(loads), num_positions), key=lambda each: loads[each])
            if loads[member] + unit_costs[unit] <= room:
                owners[unit] = member
                loads[member] += unit_costs[unit]
    queue = [(load, member) for member, load in enumerate(loads)]
    heapq.heapify(queue)
    for unit in longest_first:
        if owners[unit] < 0:
            load, member = queue[0]
            owners[unit] = member
            heapq.heapreplace(queue, (load + unit_costs[unit], member))
    return owners


def makespan(unit_costs: list[float], longest_first: list[int], start: list[float]) -> float:
    """Load of the busiest member if every unit may go anywhere."""
    queue = sorted(start)
    for unit in longest_first:
        heapq.heapreplace(queue, queue[0] + unit_costs[unit])
    return max(queue)


# Buckets ----------------------------------------------------------------------------------------------------------


def pour(
    cargo: Cargo, owners: list[int], moves: list[bool], num_replicas: int, bucket_bytes: int
) -> tuple[Bucket, ...]:
    """Cut every owner's units into the same number of buckets, same shapes side by side so that they share a product.

    Buckets that move come first. `num_replicas` is 1 unless they share the work.
    """
    poured: list[Bucket] = []
    for moving in (True, False):
        family = sorted(
            (unit for unit in range(len(owners)) if moves[unit] == moving),
            key=lambda unit: (-cargo.sizes[unit], cargo.units[unit].rows, unit),
        )
        owned = [0] * (cargo.num_positions * num_replicas)
        for unit in family:
            owned[owners[unit]] += 1
        count, most = 1, max(owned)
        while True:
            filled = [each for each in fill(family, cargo.sizes, owners, len(owned), count) if each]
            scratch = [scratch_bytes(cargo, each, owners, moving, num_replicas) for each in filled]
            fullest = max(scratch, default=0)
            if fullest <= bucket_bytes or count >= most:
                break
            count = min(most, max(count + 1, int(count * fullest / bucket_bytes)))
        poured += [Bucket(tuple(sorted(f)), moving, s) for f, s in zip(filled, scratch, strict=True)]
    return tuple(poured)


def fill(
    family: list[int], sizes: list[int], owners: list[int], num_members: int, count: int
) -> list[list[int]]:
    """`count` lists: a unit goes to where its middle lies in the bytes of its owner."""
    totals, passed = [0] * num_members, [0] * num_members
    for unit in family:
        totals[owners[unit]] += sizes[unit]
    filled: list[list[int]] = [[] for _ in range(count)]
    for unit in family:
        owner = owners[unit]
        middle = (passed[owner] + sizes[unit] / 2) / totals[owner]
        filled[int(middle * count)].append(unit)
        passed[owner] += sizes[unit]
    return filled


def scratch_bytes(cargo: Cargo, bucket: list[int], owners: list[int], moving: bool, num_replicas: int) -> int:
    """Bytes of the fullest member: the batches, and where units move, what it sends and what it gets."""
    num_positions = cargo.num_positions
    held = [0.0] * (num_positions * num_replicas)
    everywhere = 0.0
    for unit in bucket:
        held[owners[unit]] += cargo.sizes[unit] * (1 + num_replicas if moving else 1)
        share = cargo.sizes[unit] / len(cargo.holders[unit]) if moving else 0.0
        if len(cargo.holders[unit]) == num_positions:
            everywhere += share
        else:
            for position in cargo.holders[unit]:
                for member in range(position, len(held), num_positions):
                    held[member] += share
    return math.ceil(max(held) + everywhere)
