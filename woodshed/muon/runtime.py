"""One step of one exchange, bucket by bucket: send momentum, orthogonalise, send updates back, apply.

A bucket is a generator that yields whenever one of its transfers is under way. `run` keeps as many buckets started as
fit into the budget, and always has the next one's momentum and the last one's updates travelling while it multiplies.
The order depends on the plan alone, so ranks never disagree about which collective comes next. On a GPU the process
group's own stream carries the transfers: waiting for a handle makes the compute stream wait, not the host. Buffers
live until their handle was waited for, so no stream needs to be told about them.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from woodshed.muon import elementwise
from woodshed.muon.elementwise import Regions
from woodshed.muon.grid import Box, size
from woodshed.muon.newton_schulz import NewtonSchulz
from woodshed.muon.plan import Bucket, Exchange, Routes, UnitShard

NOWHERE = -1
OUTSIDE = 0
"""Index of the transfer buffer in a list of buffers; batches follow."""


@dataclass(frozen=True)
class Coefficients:
    """Coefficients for the update of one unit in this step."""

    momentum: float
    keep: float
    """Factor of the weight: 1 - lr x weight decay."""
    rate: float
    """Factor of the orthogonal update: lr x scale of the unit."""
    is_frozen: bool = False
    """Momentum stays as it is and nothing is sent: the unit starves or holds NaN or Inf."""


@dataclass(frozen=True)
class Inputs:
    """Inputs of a step; lists run over `Exchange.specs`."""

    weights: list[Tensor]
    """Local shards."""
    grads: list[Tensor | None]
    momenta: list[Tensor]
    coefficients: dict[int, Coefficients]
    """Of the units that this rank stores something of."""
    nesterov: bool


@dataclass(frozen=True)
class Batch:
    """Owned units of one shape."""

    rows: int
    cols: int
    slots: dict[int, int]
    """Unit to its place in the batch."""


class BucketTask:
    """The shards of one bucket on this rank, and the generator that moves them."""

    def __init__(self, runner: Runner, bucket: Bucket, routes: Routes) -> None:
        self.runner, self.bucket, self.routes = runner, bucket, routes
        self.batches = batches(runner.exchange, routes.owned)
        me, order = runner.me, runner.order
        outgoing = [shard for shard in routes.stored if shard.member != me]
        incoming = [shard for shard in routes.owned if shard.member != me]
        self.momentum_out = splits(outgoing, order, sent_only=True)
        self.momentum_in = splits(incoming, order, sent_only=True)
        self.update_out = splits(incoming, order)
        self.update_in = splits(outgoing, order)
        self.weight_regions, self.momentum_targets = self.storing(sent_only=True)
        self.apply_regions, self.update_sources = self.storing(sent_only=False)
        self.inbox_regions, self.inbox_targets = self.owning(incoming, sent_only=True)
        self.reply_regions, self.reply_sources = self.owning(incoming, sent_only=False)

    def storing(self, sent_only: bool) -> tuple[Regions, Regions]:
        """Positions of stored shards in the local shards, and in the transfer buffer or, if owned here, in a batch."""
        regions, targets, offset = Regions(), Regions(), 0
        for shard in self.routes.stored:
            start, rows, cols, stride = self.runner.local_region(shard)
            regions.add(self.runner.exchange.units[shard.unit].spec, start, rows, cols, stride)
            if shard.member == self.runner.me:
                targets.add(*self.batch_region(shard))
            elif shard.is_sent or not sent_only:
                targets.add(OUTSIDE, offset, rows, cols, cols)
                offset += rows * cols
            else:
                targets.add(NOWHERE, 0, rows, cols, cols)
        return regions, targets

    def owning(self, incoming: list[UnitShard], sent_only: bool) -> tuple[Regions, Regions]:
        """Positions of shards of owned units from other ranks in the transfer buffer, and in a batch."""
        regions, targets, offset = Regions(), Regions(), 0
        for shard in incoming:
            if shard.is_sent or not sent_only:
                index, start, rows, cols, stride = self.batch_region(shard)
                regions.add(OUTSIDE, offset, rows, cols, cols)
                targets.add(index, start, rows, cols, stride)
                offset += rows * cols
        return regions, targets

    def batch_region(self, shard: UnitShard) -> tuple[int, int, int, int, int]:
        unit = self.runner.exchange.units[shard.unit]
        for index, batch in enumerate(self.batches):
            if shard.unit in batch.slots:
                (top, bottom), (left, right) = shard.box[-2:]
                offset = batch.slots[shard.unit] * unit.rows * unit.cols
                offset += (top - unit.box[-2][0]) * unit.cols + left - unit.box[-1][0]
                return OUTSIDE + 1 + index, offset, bottom - top, right - left, unit.cols
        raise AssertionError(f"unit {shard.unit} is not in a batch")

    def phases(self, inputs: Inputs) -> Iterator[Any]:
        """Yield the handle of each transfer (None if the bucket has none)."""
        runner = self.runner
        batches = [runner.empty(len(b.slots), b.rows, b.cols) for b in self.batches]
        outbox, inbox = runner.empty(sum(self.momentum_out)), runner.empty(sum(self.momentum_in))
        self.send_momentum(inputs, [outbox, *batches])
        yield runner.transfer(self.bucket, inbox, outbox, self.momentum_in, self.momentum_out)
        elementwise.copy([inbox], self.inbox_regions, [outbox, *batches], self.inbox_targets)
        del inbox, outbox
        for batch in batches:
            runner.orthogonalise(batch)
        reply, answer = runner.empty(sum(self.update_out)), runner.empty(sum(self.update_in))
        elementwise.copy([reply, *batches], self.reply_sources, [reply], self.reply_regions)
        yield runner.transfer(self.bucket, answer, reply, self.update_in, self.update_out)
        del reply
        self.apply(inputs, [answer, *batches])

    def send_momentum(self, inputs: Inputs, buffers: list[Tensor]) -> None:
        factors = [inputs.coefficients[shard.unit] for shard in self.routes.stored]
        if any(each.is_frozen for each in factors):
            for index, each in enumerate(factors):
                if each.is_frozen and (view := self.momentum_targets.view(index, buffers)) is not None:
                    view.zero_()
            live = [index for index, each in enumerate(factors) if not each.is_frozen]
            regions, targets = self.weight_regions.subset(live), self.momentum_targets.subset(live)
            mu = [factors[index].momentum for index in live]
        else:
            regions, targets, mu = (
                self.weight_regions,
                self.momentum_targets,
                [each.momentum for each in factors],
            )
        elementwise.pack(inputs.grads, inputs.momenta, buffers, regions, targets, mu, inputs.nesterov)

    def apply(self, inputs: Inputs, buffers: list[Tensor]) -> None:
        factors = [inputs.coefficients[shard.unit] for shard in self.routes.stored]
        keeps, rates = [each.keep for each in factors], [each.rate for each in factors]
        elementwise.apply(inputs.weights, self.apply_regions, buffers, self.update_sources, keeps, rates)


def batches(exchange: Exchange, owned: tuple[UnitShard, ...]) -> list[Batch]:
    """Owned units by shape, whatever parameter or layer they come from."""
    by_shape: dict[tuple[int, int], Batch] = {}
    for index in sorted({shard.unit for shard in owned}):
        unit = exchange.units[index]
        slots = by_shape.setdefault((unit.rows, unit.cols), Batch(unit.rows, unit.cols, {})).slots
        slots[index] = len(slots)
    return list(by_shape.values())


def splits(moved: list[UnitShard], order: list[int], sent_only: bool = False) -> list[int]:
    """Elements for every rank of the process group, in its order."""
    elements = [0] * len(order)
    for shard in moved:
        if shard.is_sent or not sent_only:
            elements[order[shard.member]] += size(shard.box)
    return elements


class Runner:
    """Everything about one exchange that stays the same from step to step, on this rank."""

    def __init__(
        self,
        exchange: Exchange,
        rank: int,
        weights: list[Tensor],
        group: dist.ProcessGroup | None,
        newton_schulz: NewtonSchulz,
        wire_dtype: torch.dtype,
        max_inflight_bytes: int,
    ) -> None:
        self.exchange, self.rank, self.group = exchange, rank, group
        self.newton_schulz, self.wire_dtype = newton_schulz, wire_dtype
        self.max_inflight_bytes = max_inflight_bytes
        self.device = weights[0].device
        self.strides = [tuple(weight.stride()) for weight in weights]
        members = exchange.members(rank)
        self.me = members.index(rank)
        in_group = dist.get_process_group_ranks(group) if group is not None else list(members)
        self.order = [in_group.index(member) for member in members]
        _, position = exchange.specs[0].storage.find(rank)
        self.boxes = [spec.storage.grid.box(position) for spec in exchange.specs]
        routes = exchange.routes(rank, self.order)
        self.tasks = [BucketTask(self, b, r) for b, r in zip(exchange.buckets, routes, strict=True)]
        self.stored = [shard for task in self.tasks for shard in task.routes.stored]

    def local_region(self, shard: UnitShard) -> tuple[int, int, int, int]:
        """Offset, rows, columns and row stride of a stored shard inside the local shard."""
        spec = self.exchange.units[shard.unit].spec
        box: Box = self.boxes[spec]
        starts = [inner[0] - outer[0] for inner, outer in zip(shard.box, box, strict=True)]
        offset = sum(start * stride for start, stride in zip(starts, self.strides[spec], strict=True))
        (top, bottom), (left, right) = shard.box[-2:]
        return offset, bottom - top, right - left, self.strides[spec][-2]

    def empty(self, *shape: int) -> Tensor:
        return torch.empty(shape, dtype=self.wire_dtype, device=self.device)

    def transfer(
        self, bucket: Bucket, into: Tensor, out: Tensor, sizes_in: list[int], sizes_out: list[int]
    ) -> Any:
        if not bucket.moves:
            return None
        return dist.all_to_all_single(into, out, sizes_in, sizes_out, group=self.group, async_op=True)

    def orthogonalise(self, batch: Tensor) -> None:
        """Orthogonalise in place, as many matrices at once as fit in half of the budget."""
        each = self.newton_schulz.scratch_bytes(*batch.shape[-2:])
        at_once = max(1, self.max_inflight_bytes // 2 // each)
        for part in batch.split(at_once):
            self.newton_schulz(part, out=part)


def schedule(runners: list[Runner]) -> list[BucketTask]:
    """All buckets in the order in which they run. One without transfers goes in front and hides the first transfer;
    the other ones come last and hide the last one."""
    tasks = [task for runner in runners for task in runner.tasks]
    still = [task for task in tasks if not task.bucket.moves]
    return still[:1] + [task for task in tasks if task.bucket.moves] + still[1:]


def run(tasks: list[BucketTask], inputs: dict[Runner, Inputs], max_inflight_bytes: int) -> None:
    """Buckets start while the budget lasts (one always does) and are multiplied in order.

    After bucket k was multiplied, k-1 is applied and gives room for the next one to start: so the momentum of k+1 and
    the updates of k-1 travel while k multiplies.
    """
    queue = deque(tasks)
    started: deque[tuple[BucketTask, Iterator[Any], Any]] = deque()
    returning: tuple[BucketTask, Iterator[Any], Any] | None = None
    inflight_bytes = 0
    while queue or started or returning:
        while queue and (
            not (started or returning) or inflight_bytes + queue[0].bucket.scratch_bytes <= max_inflight_bytes
        ):
            task = queue.popleft()
            generator = task.phases(inputs[task.runner])
            started.append((task, generator, next(generator)))
            inflight_bytes += task.bucket.scratch_bytes
        multiplied = None
        if started:
            task, generator, handle = started.popleft()
            wait(handle)
            multiplied = (task, generator, next(generator))
        if returning:
            task, generator, handle = returning
            wait(handle)
            for _ in generator:
                raise AssertionError("a bucket has three phases")
            inflight_bytes -= task.bucket.scratch_bytes
        returning = multiplied


def wait(handle: Any) -> None:
    if handle is not None:
        handle.wait()
