"""Making of plans: owners of units, replicas that share the work, and buckets of units that travel together.

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
    """Limit of a bucket on the fullest rank; a single unit may be larger."""
    wire_itemsize: int = 2
    steps: int = 5


@dataclass(frozen=True)
class ExchangeDraft:
    """Units of one exchange before they have owners; lists run over units."""

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
    drafts = [load(tuple(group), rules) for group in groups.values()]
    rank_loads = {rank: 0.0 for draft in drafts for replica in draft.ranks for rank in replica}
    exchanges: dict[int, Exchange] = {}
    for index in sorted(range(len(drafts)), key=lambda each: -max(drafts[each].costs, default=0.0)):
        exchanges[index] = exchange(drafts[index], rules, rank_loads)
    return Plan(tuple(exchanges[index] for index in range(len(drafts))))


def load(specs: tuple[Spec, ...], rules: Rules) -> ExchangeDraft:
    units = tuple(
        Unit(index, box, box[-2][1] - box[-2][0], box[-1][1] - box[-1][0])
        for index, spec in enumerate(specs)
        for box in map(spec.units.box, range(len(spec.units)))
    )
    holders = storing(specs, units)
    return ExchangeDraft(
        specs[0].storage.ranks,
        specs,
        units,
        [cost(unit.rows, unit.cols, rules.steps) for unit in units],
        [unit.rows * unit.cols * rules.wire_itemsize for unit in units],
        holders,
        [positions[0] if len(positions) == 1 else None for positions in holders],
    )


def storing(specs: tuple[Spec, ...], units: tuple[Unit, ...]) -> list[list[int]]:
    """Positions that store something of each unit. Lists are shared where only dimensions that nobody cuts differ."""
    known: dict[object, list[int]] = {}
    positions = []
    for unit in units:
        grid = specs[unit.spec].storage.grid
        key = tuple((cut, part) for cut, part in zip(grid.cuts, unit.box, strict=True) if len(cut) > 1)
        if key not in known:
            known[key] = [position for position, _ in grid.overlaps(unit.box)]
        positions.append(known[key])
    return positions


def exchange(draft: ExchangeDraft, rules: Rules, rank_loads: dict[int, float]) -> Exchange:
    """Owners and buckets of one exchange; `rank_loads` has the earlier ones, and gets this one's added."""
    is_local = rules.placement == "local"
    if is_local and None in draft.homes:
        spec = draft.specs[draft.units[draft.homes.index(None)].spec]
        raise MuonError(
            f'{spec.name}: placement="local" moves nothing, but its units are cut over {draft.num_positions} ranks. '
            'Shard it along its experts (Shard(0), fully_shard with shard_placement_fn), or pass placement="auto".'
        )
    is_split = split(draft, rules)
    groups = [tuple(rank for replica in draft.ranks for rank in replica)] if is_split else draft.ranks
    start = [max(rank_loads[rank] for rank in same) for same in zip(*groups, strict=True)]
    homes = draft.homes if rules.placement != "all_to_all" else [None] * len(draft.units)
    owners = assign(draft.costs, homes, start, draft.num_positions, is_local)
    for unit, owner in enumerate(owners):
        for group in groups:
            rank_loads[group[owner]] += draft.costs[unit]
    moves = [
        home is None or owner % draft.num_positions != home or is_split
        for home, owner in zip(draft.homes, owners, strict=True)
    ]
    buckets = cut_buckets(draft, owners, moves, len(start) // draft.num_positions, rules.bucket_bytes)
    return Exchange(
        draft.ranks,
        is_split,
        draft.specs,
        draft.units,
        tuple(owners),
        buckets,
        rules.wire_itemsize,
        rules.steps,
    )


def split(draft: ExchangeDraft, rules: Rules) -> bool:
    """True if replicas share the work. "auto" does so if the products saved take longer than the bytes added."""
    storage, mode = draft.specs[0].storage, rules.replica_mode
    num_replicas, num_positions = len(draft.ranks), draft.num_positions
    may_move = not storage.is_plain and rules.placement != "local"
    if mode == "split" and not may_move:
        reason = "is a plain tensor" if storage.is_plain else 'has placement="local", which moves nothing'
        raise MuonError(
            f'{draft.specs[0].name}: replica_mode="split" needs DTensors and transfers, and it {reason}. Use '
            'distribute_tensor(..., [Replicate()]) and placement="auto", or replica_mode="redundant".'
        )
    if mode != "auto" or num_replicas == 1 or not may_move:
        return mode == "split" and num_replicas > 1
    saved = sum(draft.costs) / num_positions * (1 - 1 / num_replicas)
    everything = sum(draft.sizes)
    moving = sum(size for size, home in zip(draft.sizes, draft.homes, strict=True) if home is None)
    outward = moving * (num_positions - 1) / num_positions
    inward = everything * (1 - 1 / (num_replicas * num_positions))
    added = (outward / num_replicas + inward - 2 * outward) / num_positions
    machine = Machine()
    return saved / machine.product_flops > added / machine.network_bytes_per_s


def assign(
    unit_costs: list[float], homes: Sequence[int | None], start: list[float], num_positions: int, stay: bool
) -> list[int]:
    """Owner of every unit: the rank that holds it, up to a limit, else longest first to the least loaded (Graham 1969).

    The limit is the load of the busiest rank if every unit could move freely. Ties go to the lower member, so all
    ranks agree. `start` is the load that members have already.
    """
    longest_first = sorted(range(len(unit_costs)), key=lambda unit: -unit_costs[unit])
    owners = [-1] * len(unit_costs)
    loads = list(start)
    limit = math.inf if stay else SLACK * makespan(unit_costs, longest_first, start)
    for unit in longest_first:
        home = homes[unit]
        if home is not None:
            member = min(range(home, len(loads), num_positions), key=lambda each: loads[each])
            if loads[member] + unit_costs[unit] <= limit:
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


def cut_buckets(
    draft: ExchangeDraft, owners: list[int], moves: list[bool], num_replicas: int, bucket_bytes: int
) -> tuple[Bucket, ...]:
    """Cut every owner's units into the same number of buckets, same shapes side by side so that they share a product.

    Buckets that move come first. `num_replicas` is 1 unless they share the work.
    """
    buckets: list[Bucket] = []
    for moving in (True, False):
        family = sorted(
            (unit for unit in range(len(owners)) if moves[unit] == moving),
            key=lambda unit: (-draft.sizes[unit], draft.units[unit].rows, unit),
        )
        owned = [0] * (draft.num_positions * num_replicas)
        for unit in family:
            owned[owners[unit]] += 1
        count, most = 1, max(owned)
        while True:
            filled = [each for each in fill(family, draft.sizes, owners, len(owned), count) if each]
            scratch = [scratch_bytes(draft, each, owners, moving, num_replicas) for each in filled]
            fullest = max(scratch, default=0)
            if fullest <= bucket_bytes or count >= most:
                break
            count = min(most, max(count + 1, int(count * fullest / bucket_bytes)))
        buckets += [Bucket(tuple(sorted(f)), moving, s) for f, s in zip(filled, scratch, strict=True)]
    return tuple(buckets)


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


def scratch_bytes(
    draft: ExchangeDraft, bucket: list[int], owners: list[int], moving: bool, num_replicas: int
) -> int:
    """Bytes of the fullest member: the batches, and where units move, what it sends and what it gets."""
    num_positions = draft.num_positions
    member_bytes = [0.0] * (num_positions * num_replicas)
    everywhere = 0.0
    for unit in bucket:
        member_bytes[owners[unit]] += draft.sizes[unit] * (1 + num_replicas if moving else 1)
        share = draft.sizes[unit] / len(draft.holders[unit]) if moving else 0.0
        if len(draft.holders[unit]) == num_positions:
            everywhere += share
        else:
            for position in draft.holders[unit]:
                for member in range(position, len(member_bytes), num_positions):
                    member_bytes[member] += share
    return math.ceil(max(member_bytes) + everywhere)
