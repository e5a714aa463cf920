"""Element-wise work on many pieces of many tensors: momentum into send buffers, buffers into batches, updates home.

On a GPU with Triton each of the three is one launch for all pieces of a bucket and reads or writes every element once;
elsewhere it is a loop of torch operations. Arithmetic is float32 either way.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from woodshed.muon.newton_schulz import has_triton


@dataclass
class Places:
    """Positions of pieces inside a list of tensors. Index -1 stands for none: nothing is read or written."""

    tensors: list[int] = field(default_factory=list)
    offsets: list[int] = field(default_factory=list)
    """In elements from the tensor's start."""
    rows: list[int] = field(default_factory=list)
    cols: list[int] = field(default_factory=list)
    strides: list[int] = field(default_factory=list)
    """Elements between the starts of neighbouring rows."""
    uploaded: tuple[Tensor, Tensor, Tensor, Tensor] | None = None
    """What of this a GPU keeps: see `columns`."""
    grouped: bool | None = None
    """Whether rows and strides of this and its partner are multiples of `kernels.GROUP`: see `group`."""
    indexed: tuple[Tensor, Tensor] | None = None
    """Tensor and offset of every piece as int64."""

    def __len__(self) -> int:
        return len(self.tensors)

    def add(self, tensor: int, offset: int, rows: int, cols: int, stride: int) -> None:
        for column, value in zip(
            (self.tensors, self.offsets, self.rows, self.cols, self.strides),
            (tensor, offset, rows, cols, stride),
            strict=True,
        ):
            column.append(value)

    def some(self, chosen: list[int]) -> Places:
        """The chosen pieces only."""
        made = Places()
        for piece in chosen:
            made.add(
                self.tensors[piece],
                self.offsets[piece],
                self.rows[piece],
                self.cols[piece],
                self.strides[piece],
            )
        return made

    def view(self, piece: int, tensors: Sequence[Tensor | None]) -> Tensor | None:
        """None where there is no place or no tensor."""
        index = self.tensors[piece]
        tensor = tensors[index] if index >= 0 else None
        return None if tensor is None else self.cut(piece, tensor)

    def held(self, piece: int, tensors: Sequence[Tensor]) -> Tensor:
        """View of a piece that has a place."""
        return self.cut(piece, tensors[self.tensors[piece]])

    def cut(self, piece: int, tensor: Tensor) -> Tensor:
        shape, strides = (self.rows[piece], self.cols[piece]), (self.strides[piece], 1)
        return tensor.as_strided(shape, strides, tensor.storage_offset() + self.offsets[piece])

    def addresses(self, tensors: Sequence[Tensor | None]) -> Tensor:
        """Pointers as int64; 0 for no place."""
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
    at: Places,
    out_at: Places,
    mu: list[float],
    nesterov: bool,
) -> None:
    """M <- mu M + G, then out <- G + mu M (Nesterov) or M, cast to the wire's type. A missing gradient is zero."""
    if not len(at):
        return
    if fused(momenta[0]):
        launch_pack(grads, momenta, outs, at, out_at, mu, nesterov)
        return
    for piece, decay in enumerate(mu):
        stored = at.held(piece, momenta)
        grad = at.view(piece, grads)
        grad = torch.zeros_like(stored) if grad is None else grad
        momentum = stored.float().mul_(decay).add_(grad) if stored.dtype != torch.float32 else stored
        if momentum is stored:
            momentum.mul_(decay).add_(grad)
        else:
            stored.copy_(momentum)
        out = out_at.view(piece, outs)
        if out is not None:
            out.copy_(torch.add(grad, momentum, alpha=decay) if nesterov else momentum)


def copy(sources: list[Tensor], source_at: Places, targets: list[Tensor], target_at: Places) -> None:
    """Piece by piece from one list of tensors to another."""
    if not len(source_at):
        return
    if fused(sources[0]):
        launch_copy(sources, source_at, targets, target_at)
        return
    for piece in range(len(source_at)):
        target_at.held(piece, targets).copy_(source_at.held(piece, sources))


def apply(
    weights: list[Tensor],
    at: Places,
    updates: list[Tensor],
    update_at: Places,
    keeps: list[float],
    rates: list[float],
) -> None:
    """W <- keep W - rate O. Rounded once where weights are shorter than float32."""
    if not len(at):
        return
    if fused(weights[0]):
        launch_apply(weights, at, updates, update_at, keeps, rates)
        return
    for piece, (keep, rate) in enumerate(zip(keeps, rates, strict=True)):
        weight, update = at.held(piece, weights), update_at.held(piece, updates)
        if weight.dtype.itemsize < 4:
            weight.copy_(weight.float().mul_(keep).add_(update, alpha=-rate))
        else:
            weight.mul_(keep).add_(update, alpha=-rate)


# Triton -----------------------------------------------------------------------------------------------------------


def launch_pack(
    grads: list[Tensor | None],
    momenta: list[Tensor],
    outs: list[Tensor],
    at: Places,
    out_at: Places,
    mu: list[float],
    nesterov: bool,
) -> None:
    from woodshed.muon import kernels

    device, types = momenta[0].device, kernels.TL_TYPES
    grad_type = next((g.dtype for g in grads if g is not None), torch.float32)
    out_type = outs[0].dtype if outs else torch.float32
    numels, cols, strides, out_strides = columns(at, out_at, device)
    addresses = torch.stack([at.addresses(grads), at.addresses(momenta), out_at.addresses(outs)])
    kernels.launch(
        kernels.pack_kernel, grid(at, kernels.BLOCK),
        *upload(addresses, device), numels, cols, strides, strides, out_strides, upload(torch.tensor(mu), device),
        GRAD=types[grad_type], MOMENTUM=types[momenta[0].dtype], OUT=types[out_type], NESTEROV=nesterov,
        BLOCK=kernels.BLOCK, GROUP=group(at, out_at, addresses),
    )  # fmt: skip


def launch_copy(sources: list[Tensor], source_at: Places, targets: list[Tensor], target_at: Places) -> None:
    from woodshed.muon import kernels

    device = sources[0].device
    numels, cols, source_strides, target_strides = columns(source_at, target_at, device)
    addresses = torch.stack([source_at.addresses(sources), target_at.addresses(targets)])
    kernels.launch(
        kernels.copy_kernel, grid(source_at, kernels.BLOCK),
        *upload(addresses, device), numels, cols, source_strides, target_strides,
        TYPE=kernels.TL_TYPES[sources[0].dtype],
        BLOCK=kernels.BLOCK, GROUP=group(source_at, target_at, addresses),
    )  # fmt: skip


def launch_apply(
    weights: list[Tensor],
    at: Places,
    updates: list[Tensor],
    update_at: Places,
    keeps: list[float],
    rates: list[float],
) -> None:
    from woodshed.muon import kernels

    device = weights[0].device
    numels, cols, strides, update_strides = columns(at, update_at, device)
    addresses = torch.stack([at.addresses(weights), update_at.addresses(updates)])
    factors = upload(torch.tensor([keeps, rates]), device)
    kernels.launch(
        kernels.apply_kernel, grid(at, kernels.BLOCK),
        *upload(addresses, device), numels, cols, strides, update_strides, *factors,
        WEIGHT=kernels.TL_TYPES[weights[0].dtype], UPDATE=kernels.TL_TYPES[updates[0].dtype],
        BLOCK=kernels.BLOCK, GROUP=group(at, update_at, addresses),
    )  # fmt: skip


def grid(at: Places, block: int) -> tuple[int, int]:
    """Pieces times programs for the longest one; where a piece is shorter, they return at once."""
    longest = max(rows * cols for rows, cols in zip(at.rows, at.cols, strict=True))
    return len(at), -(-longest // block)


def group(at: Places, other: Places, addresses: Tensor) -> int:
    """Neighbours that a thread may move at once: all of `kernels.GROUP` where rows, strides and addresses allow it."""
    from woodshed.muon import kernels

    if at.grouped is None:
        lengths = [*at.cols, *at.strides, *other.strides]
        at.grouped = not any(length % kernels.GROUP for length in lengths)
    return kernels.GROUP if at.grouped and not bool((addresses % (2 * kernels.GROUP)).any()) else 1


def columns(at: Places, other: Places, device: torch.device) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Elements and row length of every piece (32-bit), and both strides (64-bit). Kept on the device from then on."""
    if at.uploaded is None or at.uploaded[0].device != device:
        sizes = [[r * c for r, c in zip(at.rows, at.cols, strict=True)], at.cols]
        numels, cols = upload(torch.tensor(sizes, dtype=torch.int32), device).unbind()
        strides, other_strides = upload(torch.tensor([at.strides, other.strides]), device).unbind()
        at.uploaded = numels, cols, strides, other_strides
    return at.uploaded


def upload(table: Tensor, device: torch.device) -> Tensor:
    """Copy to the device without waiting for it."""
    return table.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else table
