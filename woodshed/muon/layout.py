"""Storage of a parameter over ranks, read from its DTensor, so that meshes are never passed in.

Letters: R replicas, W positions of one replica. A position is one shard; the same position of another replica holds
the same numbers.
"""

from __future__ import annotations

import difflib
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.placement_types import _StridedShard

from woodshed.muon.errors import MuonError
from woodshed.muon.grid import Grid, Interval, chunk


@dataclass(frozen=True)
class Storage:
    """The ranks of one parameter, and the box that each of them stores."""

    ranks: tuple[tuple[int, ...], ...]
    """Global rank of (replica, position): R x W."""
    grid: Grid
    """Box of each position."""
    is_plain: bool = False
    """A plain tensor: what other ranks hold under this name is unknown."""

    def find(self, rank: int) -> tuple[int, int]:
        """Replica and position of a global rank."""
        for replica, ranks in enumerate(self.ranks):
            if rank in ranks:
                return replica, ranks.index(rank)
        raise MuonError(f"rank {rank} stores no shard of a parameter that lies on ranks {self.ranks}")


def my_rank() -> int:
    return dist.get_rank() if dist.is_available() and dist.is_initialized() else 0


def world_size() -> int:
    return dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1


def local(tensor: torch.Tensor) -> torch.Tensor:
    """The box that this rank stores."""
    return tensor._local_tensor if isinstance(tensor, DTensor) else tensor


def read(name: str, tensor: torch.Tensor) -> Storage:
    """Layout of a parameter. A plain tensor is taken as a whole copy on every rank (one process, or DDP)."""
    if not isinstance(tensor, DTensor):
        everything = Grid(tuple(((0, length),) for length in tensor.shape))
        return Storage(tuple((rank,) for rank in range(world_size())), everything, is_plain=True)
    mesh, placements = tensor.device_mesh, tensor.placements
    storage = arrange(name, tuple(tensor.shape), mesh.mesh, placements)
    _, position = storage.find(my_rank())
    expected = tuple(stop - start for start, stop in storage.grid.box(position))
    if tuple(tensor._local_tensor.shape) != expected:
        raise MuonError(
            f"{name}: placements {placements} on mesh {tuple(mesh.shape)} give this rank a shard of {expected}, and "
            f"it holds {tuple(tensor._local_tensor.shape)}. Build the DTensor with fully_shard or distribute_tensor."
        )
    return storage


def arrange(name: str, shape: tuple[int, ...], mesh_ranks: torch.Tensor, placements: Any) -> Storage:
    """`Storage` of a tensor of this shape with these placements on a mesh of these ranks (same ndim as the mesh)."""
    sharding = {dim: order(name, dim, mesh_ranks.shape, placements) for dim in range(len(shape))}
    replicated = [axis for axis, placement in enumerate(placements) if isinstance(placement, Replicate)]
    axes = [axis for dim in range(len(shape)) for axis in sharding[dim]]
    if sorted(replicated + axes) != list(range(len(placements))):
        raise MuonError(
            f"{name}: placements {tuple(placements)} are not supported. Use Shard, Replicate, or what fully_shard "
            "makes of an expert-parallel DTensor; reduce Partial ones first."
        )
    cuts = []
    for dim, length in enumerate(shape):
        cut: list[Interval] = [(0, length)]
        for axis in sharding[dim]:
            cut = [part for interval in cut for part in chunk(interval, mesh_ranks.shape[axis])]
        cuts.append(tuple(cut))
    replicas = math.prod(mesh_ranks.shape[axis] for axis in replicated)
    arranged = mesh_ranks.permute(*replicated, *axes).reshape(replicas, -1)
    return Storage(tuple(tuple(row) for row in arranged.tolist()), Grid(tuple(cuts)))


def order(name: str, dim: int, mesh_shape: Any, placements: Any) -> list[int]:
    """Mesh axes that shard a dimension, in the order in which they cut it.

    FSDP over expert parallelism cuts the expert-parallel shard again although its axis comes first in the mesh. It
    writes that as `_StridedShard(dim, split_factor=size of the later axes)`.
    """
    axes = [axis for axis, placement in enumerate(placements) if getattr(placement, "dim", None) == dim]
    strided = [axis for axis in axes if isinstance(placements[axis], _StridedShard)]
    if not strided:
        return [axis for axis in axes if isinstance(placements[axis], Shard)]
    later = [axis for axis in axes if axis > strided[0]]
    factor = placements[strided[0]].split_factor
    if len(strided) > 1 or factor != math.prod(mesh_shape[axis] for axis in later):
        raise MuonError(
            f"{name}: placements {tuple(placements)} on a mesh of {tuple(mesh_shape)} interleave dimension {dim}. "
            "Shard it with fully_shard, over at most one other sharded axis of the same dimension."
        )
    return [axis for axis in axes if axis < strided[0]] + later + strided


def describe(tensor: torch.Tensor) -> str:
    """Placement for error messages: "(Shard(0),) on mesh (8,)"."""
    if isinstance(tensor, DTensor):
        mesh: DeviceMesh = tensor.device_mesh
        return (
            f"{tuple(tensor.placements)} on mesh {tuple(mesh.shape)} of ranks {mesh.mesh.flatten().tolist()}"
        )
    return "a plain tensor"


def process_group(members: tuple[int, ...], tensor: torch.Tensor) -> dist.ProcessGroup | None:
    """A process group of exactly these ranks: the mesh's own where it has one. None for a single rank."""
    if len(members) == 1:
        return None
    if isinstance(tensor, DTensor):
        mesh = tensor.device_mesh
        for axis in range(mesh.ndim):
            group = mesh.get_group(axis)
            if set(dist.get_process_group_ranks(group)) == set(members):
                return group
    if len(members) == world_size():
        return dist.group.WORLD
    group = dist.new_group(sorted(members), use_local_synchronization=True)
    assert isinstance(group, dist.ProcessGroup)  # this rank is a member
    return group


def agree(digest: str, describe: Callable[[], str]) -> None:
    """Raise on all ranks of the default group unless each of them made the same plan."""
    if world_size() == 1:
        return
    digests: list[Any] = [None] * world_size()
    dist.all_gather_object(digests, digest)
    if len(set(digests)) == 1:
        return
    texts: list[Any] = [None] * world_size()
    dist.all_gather_object(texts, describe())
    other = next(rank for rank, each in enumerate(digests) if each != digests[0])
    lines = difflib.unified_diff(
        texts[0].splitlines(), texts[other].splitlines(), "rank 0", f"rank {other}", "", "", 0, ""
    )
    raise MuonError(
        "ranks made different plans; pass the same parameters, in the same order and with the same settings, on every "
        "rank.\n" + "\n".join(lines)
    )
