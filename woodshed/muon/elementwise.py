"""Element-wise work on many regions of many tensors: momentum into send buffers, buffers into batches, updates back.

On a GPU with Triton each of the three is one launch for all regions of a bucket and reads or writes every element once;
elsewhere it is a loop of torch operations. Arithmetic is float32 either way.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from woodshed.muon.newton_schulz import has_triton


@dataclass
class Regions:
    """Strided matrices inside a list of tensors. Tensor -1 stands for none: nothing is read or written."""

    tensors: list[int] = field(default_factory=list)
    offsets: list[int] = field(default_factory=list)
    """In elements from the tensor's start."""
    rows: list[int] = field(default_factory=list)
    cols: list[int] = field(default_factory=list)
    strides: list[int] = field(default_factory=list)
    """Elements between the starts of neighbouring rows."""
    uploaded: tuple[Tensor, Tensor, Tensor, Tensor] | None = None
    """Copies of these columns on a GPU: see `columns`."""
    grouped: bool | None = None
    """True if columns and strides of this and its partner are multiples of `kernels.GROUP`: see `group`."""
    indexed: tuple[Tensor, Tensor] | None = None
    """Tensor and offset of every region as int64."""

    def __len__(self) -> int:
        return len(self.tensors)

    def add(self, tensor: int, offset: int, rows: int, cols: int, stride: int) -> None:
        for column, value in zip(
            (self.tensors, self.offsets, self.rows, self.cols, self.strides),
            (tensor, offset, rows, cols, stride),
            strict=True,
        ):
            column.append(value)

    def subset(self, chosen: list[int]) -> Regions:
        """The chosen regions only."""
        subset = Regions()
        for index in chosen:
            subset.add(
                self.tensors[index],
                self.offsets[index],
                self.rows[index],
                self.cols[index],
                self.strides[index],
            )
        return subset

    def view(self, index: int, tensors: Sequence[Tensor | None]) -> Tensor | None:
        """View of a region, or None where it has no tensor."""
        number = self.tensors[index]
        tensor = tensors[number] if number >= 0 else None
        return None if tensor is None else self.cut(index, tensor)

    def existing_view(self, index: int, tensors: Sequence[Tensor]) -> Tensor:
        """View of a region that has a tensor."""
        return self.cut(index, tensors[self.tensors[index]])

    def cut(self, index: int, tensor: Tensor) -> Tensor:
        shape, strides = (self.rows[index], self.cols[index]), (self.strides[index], 1)
        return tensor.as_strided(shape, strides, tensor.storage_offset() + self.offsets[index])

    def addresses(self, tensors: Sequence[Tensor | None]) -> Tensor:
        """Pointers as int64; 0 for none."""
        starts = torch.tensor([0 if t is None else t.data_ptr() for t in tensors] + [0], dtype=torch.int64)
        itemsize = next((t.element_size() for t in tensors if t is not None), 1)
        if self.indexed is None:
            self.indexed = torch.tensor(self.tensors), torch.tensor(self.offsets)
        index, offset = self.indexed
        start = starts[index]
        return torch.where(start == 0, 0, start + offset * itemsize)


def fused(tensor: Tensor) -> bool:
    return tensor.is_cuda and has_triton()


def pack(
    grads: list[Tensor | None],
    momenta: list[Tensor],
    outs: list[Tensor],
    regions: Regions,
    out_regions: Regions,
    mu: list[float],
    nesterov: bool,
) -> None:
    """M <- mu M + G, then out <- G + mu M (Nesterov) or M, cast to the wire's type. A missing gradient is zero."""
    if not len(regions):
        return
    if fused(momenta[0]):
        launch_pack(grads, momenta, outs, regions, out_regions, mu, nesterov)
        return
    for index, decay in enumerate(mu):
        stored = regions.existing_view(index, momenta)
        grad = regions.view(index, grads)
        grad = torch.zeros_like(stored) if grad is None else grad
        momentum = stored.float().mul_(decay).add_(grad) if stored.dtype != torch.float32 else stored
        if momentum is stored:
            momentum.mul_(decay).add_(grad)
        else:
            stored.copy_(momentum)
        out = out_regions.view(index, outs)
        if out is not None:
            out.copy_(torch.add(grad, momentum, alpha=decay) if nesterov else momentum)


def copy(
    sources: list[Tensor], source_regions: Regions, targets: list[Tensor], target_regions: Regions
) -> None:
    """Copy regions of one list of tensors to those of another."""
    if not len(source_regions):
        return
    if fused(sources[0]):
        launch_copy(sources, source_regions, targets, target_regions)
        return
    for index in range(len(source_regions)):
        target_regions.existing_view(index, targets).copy_(source_regions.existing_view(index, sources))


def apply(
    weights: list[Tensor],
    regions: Regions,
    updates: list[Tensor],
    update_regions: Regions,
    keeps: list[float],
    rates: list[float],
) -> None:
    """W <- keep W - rate O. Rounded once where weights are shorter than float32."""
    if not len(regions):
        return
    if fused(weights[0]):
        launch_apply(weights, regions, updates, update_regions, keeps, rates)
        return
    for index, (keep, rate) in enumerate(zip(keeps, rates, strict=True)):
        weight, update = regions.existing_view(index, weights), update_regions.existing_view(index, updates)
        if weight.dtype.itemsize < 4:
            weight.copy_(weight.float().mul_(keep).add_(update, alpha=-rate))
        else:
            weight.mul_(keep).add_(update, alpha=-rate)


# Triton -----------------------------------------------------------------------------------------------------------


def launch_pack(
    grads: list[Tensor | None],
    momenta: list[Tensor],
    outs: list[Tensor],
    regions: Regions,
    out_regions: Regions,
    mu: list[float],
    nesterov: bool,
) -> None:
    from woodshed.muon import kernels

    device, types = momenta[0].device, kernels.TL_TYPES
    grad_type = next((g.dtype for g in grads if g is not None), torch.float32)
    out_type = outs[0].dtype if outs else torch.float32
    numels, cols, strides, out_strides = columns(regions, out_regions, device)
    addresses = torch.stack(
        [regions.addresses(grads), regions.addresses(momenta), out_regions.addresses(outs)]
    )
    kernels.launch(
        kernels.pack_kernel, grid(regions, kernels.BLOCK),
        *upload(addresses, device), numels, cols, strides, strides, out_strides, upload(torch.tensor(mu), device),
        GRAD=types[grad_type], MOMENTUM=types[momenta[0].dtype], OUT=types[out_type], NESTEROV=nesterov,
        BLOCK=kernels.BLOCK, GROUP=group(regions, out_regions, addresses),
    )  # fmt: skip


def launch_copy(
    sources: list[Tensor], source_regions: Regions, targets: list[Tensor], target_regions: Regions
) -> None:
    from woodshed.muon import kernels

    device = sources[0].device
    numels, cols, source_strides, target_strides = columns(source_regions, target_regions, device)
    addresses = torch.stack([source_regions.addresses(sources), target_regions.addresses(targets)])
    kernels.launch(
        kernels.copy_kernel, grid(source_regions, kernels.BLOCK),
        *upload(addresses, device), numels, cols, source_strides, target_strides,
        TYPE=kernels.TL_TYPES[sources[0].dtype],
        BLOCK=kernels.BLOCK, GROUP=group(source_regions, target_regions, addresses),
    )  # fmt: skip


def launch_apply(
    weights: list[Tensor],
    regions: Regions,
    updates: list[Tensor],
    update_regions: Regions,
    keeps: list[float],
    rates: list[float],
) -> None:
    from woodshed.muon import kernels

    device = weights[0].device
    numels, cols, strides, update_strides = columns(regions, update_regions, device)
    addresses = torch.stack([regions.addresses(weights), update_regions.addresses(updates)])
    factors = upload(torch.tensor([keeps, rates]), device)
    kernels.launch(
        kernels.apply_kernel, grid(regions, kernels.BLOCK),
        *upload(addresses, device), numels, cols, strides, update_strides, *factors,
        WEIGHT=kernels.TL_TYPES[weights[0].dtype], UPDATE=kernels.TL_TYPES[updates[0].dtype],
        BLOCK=kernels.BLOCK, GROUP=group(regions, update_regions, addresses),
    )  # fmt: skip


def grid(regions: Regions, block: int) -> tuple[int, int]:
    """Regions times programs for the longest one; where a region is shorter, they return at once."""
    longest = max(rows * cols for rows, cols in zip(regions.rows, regions.cols, strict=True))
    return len(regions), -(-longest // block)


def group(regions: Regions, other: Regions, addresses: Tensor) -> int:
    """Neighbours that a thread may move at once: all of `kernels.GROUP` where rows, strides and addresses allow it."""
    from woodshed.muon import kernels

    if regions.grouped is None:
        lengths = [*regions.cols, *regions.strides, *other.strides]
        regions.grouped = not any(length % kernels.GROUP for length in lengths)
    return kernels.GROUP if regions.grouped and not bool((addresses % (2 * kernels.GROUP)).any()) else 1


def columns(regions: Regions, other: Regions, device: torch.device) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Elements and row length of every region (32-bit), and both strides (64-bit). Kept on the device from then on."""
    if regions.uploaded is None or regions.uploaded[0].device != device:
        sizes = [[r * c for r, c in zip(regions.rows, regions.cols, strict=True)], regions.cols]
        numels, cols = upload(torch.tensor(sizes, dtype=torch.int32), device).unbind()
        strides, other_strides = upload(torch.tensor([regions.strides, other.strides]), device).unbind()
        regions.uploaded = numels, cols, strides, other_strides
    return regions.uploaded


def upload(table: Tensor, device: torch.device) -> Tensor:
    """Copy to the device without waiting for it."""
    return table.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else table
