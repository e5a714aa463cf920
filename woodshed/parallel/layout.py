"""Two views of one world: the mesh of the dense weights and the mesh of the experts.

Dense weights are stored cut over shard x cp ranks, `replicate` times; a sequence is cut over the cp ranks. Experts are
spread over ep ranks, each rank's share cut over `shard` ranks, `replicate` times. Both meshes have all ranks, and along
their last axis neighbours, so cp=2 and ep=8 fit on 8 GPUs, and experts need not have as many replicas as dense weights.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel

from woodshed.engines.local.routing import find_experts
from woodshed.parallel import context, experts, sharding
from woodshed.records import LayoutError


@dataclass(frozen=True)
class DenseAxes:
    """Axes of the dense mesh, outermost first."""

    replicate: int = 1
    """Copies of every weight."""
    shard: int = 1
    """Ranks with different sequences that store a copy together, with the cp ranks of each."""
    cp: int = 1
    """Ranks that share a sequence."""


@dataclass(frozen=True)
class ExpertAxes:
    """Axes of the expert mesh, outermost first."""

    replicate: int = 1
    """Copies of every expert."""
    shard: int = 1
    """Ranks that store the same experts together."""
    ep: int = 1
    """Ranks with different experts, which exchange tokens."""


@dataclass(frozen=True)
class ParallelLayout:
    """Placement of weights and tokens: a value that can be made, compared and printed without a process group.

    Raises `LayoutError` for a size below 1 and for axes whose product is not `world`.
    """

    world: int
    dense: DenseAxes
    expert: ExpertAxes

    def __post_init__(self) -> None:
        for mesh, axes in (("dense", self.dense), ("expert", self.expert)):
            sizes = dataclasses.asdict(axes)
            for key, size in sizes.items():
                if not isinstance(size, int) or size < 1:
                    raise LayoutError(f"{mesh}: {key}={size!r}; sizes are whole numbers from 1.")
            if math.prod(sizes.values()) != self.world:
                raise LayoutError(
                    f"{mesh}: {' x '.join(f'{key} {size}' for key, size in sizes.items())} is for "
                    f"{math.prod(sizes.values())} ranks, and world={self.world}; the product must be {self.world}."
                )

    @classmethod
    def build(
        cls, world: int, dense: Mapping[str, int], expert: Mapping[str, int] | None = None
    ) -> ParallelLayout:
        """Axes by name, 1 where left out. Without `expert`, experts lie as the dense weights do.

        Raises `LayoutError` for an unknown axis as well.
        """
        dense_axes = _named(DenseAxes, "dense", dense)
        if expert is None:
            return cls(world, dense_axes, ExpertAxes(dense_axes.replicate, dense_axes.shard * dense_axes.cp))
        return cls(world, dense_axes, _named(ExpertAxes, "expert", expert))

    @property
    def num_readers(self) -> int:
        """Groups of cp ranks; each reads sequences of its own."""
        return self.world // self.dense.cp

    @property
    def reader(self) -> int:
        """Index of this rank among the readers; of a global batch it could take the rows `reader::num_readers`."""
        return dist.get_rank() // self.dense.cp

    def describe(self) -> str:
        """Sizes and ranks of both meshes, for people."""
        dense, expert = self.dense, self.expert
        size = self.world // dense.replicate
        return "\n".join(
            [
                f"{self.world} ranks",
                f"dense    replicate {dense.replicate} x shard {dense.shard} x cp {dense.cp}",
                f"  copies x shards of a weight: {dense.replicate} x {size}, on {_runs(self.world, size)}",
                f"  ranks that share a sequence: {dense.cp}, on {_runs(self.world, dense.cp)}",
                f"experts  replicate {expert.replicate} x shard {expert.shard} x ep {expert.ep}",
                f"  copies x shards of an expert: {expert.replicate} x {expert.shard}",
                f"  ranks that exchange tokens: {expert.ep}, on {_runs(self.world, expert.ep)}",
            ]
        )

    @functools.cached_property
    def dense_mesh(self) -> DeviceMesh:
        """(replicate, shard): a weight is cut over shard x cp ranks."""
        dense = self.dense
        return self._mesh((dense.replicate, dense.shard * dense.cp), ("replicate", "shard"))

    @functools.cached_property
    def data_mesh(self) -> DeviceMesh:
        """(reader, cp): ranks along `cp` share a sequence."""
        return self._mesh((self.num_readers, self.dense.cp), ("reader", "cp"))

    @functools.cached_property
    def expert_mesh(self) -> DeviceMesh:
        """(replicate, shard, ep)."""
        return self._mesh(dataclasses.astuple(self.expert), ("replicate", "shard", "ep"))

    def _mesh(self, shape: tuple[int, ...], names: tuple[str, ...]) -> DeviceMesh:
        if not dist.is_initialized() or dist.get_world_size() != self.world:
            present = dist.get_world_size() if dist.is_initialized() else "no process group"
            raise LayoutError(
                f"this layout is for {self.world} ranks and there is {present}; start with `torchrun "
                f"--nproc-per-node=...` on {self.world} ranks in all, or build(world=...) for what there is."
            )
        device = "cuda" if "cuda:nccl" in dist.get_backend_config() else "cpu"
        return init_device_mesh(device, shape, mesh_dim_names=names)

    def apply(self, model: Any, *, compute_dtype: torch.dtype | None = None) -> None:
        """Shard a transformers model in place, or the one under a PEFT adapter, which itself stays whole. Every rank of
        the world calls it, with the same weights, or with none yet: on the meta device, to be loaded by
        torch.distributed.checkpoint (which has no rotary frequencies).

        compute_dtype: weights are gathered in this precision and stored as they are; routers that transformers keeps
            in float32 stay exact.

        Activation checkpointing is transformers' own, `model.activation_checkpointing_enable()`. Raises `LayoutError`,
        with nothing changed, for a model that this layout cannot hold and for weights that differ between ranks.
        """
        dense_mesh, expert_mesh = self.dense_mesh, self.expert_mesh
        adapter = {each for each in model.parameters() if each.requires_grad} if is_adapted(model) else set()
        model = model.get_base_model() if is_adapted(model) else model
        self._check(model)
        sharding.check_same(model, dense_mesh.device_type)
        if self.dense.cp > 1:
            model.set_attn_implementation(context.ATTENTION)
        sharding.shard(model, dense_mesh, expert_mesh, compute_dtype, adapter)

    def split(
        self, input_ids_BT: Tensor, labels_BT: Tensor, position_ids_BT: Tensor | None = None
    ) -> dict[str, Any]:
        """This rank's chunks of its reader's sequences, as keyword arguments of the model.

        input_ids_BT, labels_BT: whole sequences, the same on the cp ranks of a reader; labels as transformers takes
            them (not shifted, -100 for tokens that are not learned).
        position_ids_BT: for packed rows, starting again with each document.

        The model's loss is this rank's share of the mean over all ranks' tokens: their sum over ranks is the loss,
        and gradients are right as they are. Every rank calls it (one number is summed). Over several micro-batches,
        give each of them the sum of their `num_items_in_batch`.

        Raises `LayoutError` for no sequences, and for a length that cannot be cut.
        """
        if not input_ids_BT.numel():
            raise LayoutError(
                f"reader {self.reader} has no sequence; each of the {self.num_readers} readers needs one in every step."
            )
        if position_ids_BT is None:
            position_ids_BT = torch.arange(input_ids_BT.shape[1], device=input_ids_BT.device).expand_as(
                input_ids_BT
            )
        targets_BT = torch.nn.functional.pad(labels_BT[:, 1:], (0, 1), value=-100)
        cp, rank = self.dense.cp, dist.get_rank() % self.dense.cp
        batch: dict[str, Any] = {
            "input_ids": context.cp_chunks(input_ids_BT, rank, cp),
            "position_ids": context.cp_chunks(position_ids_BT, rank, cp),
            "shift_labels": context.cp_chunks(targets_BT, rank, cp),
        }
        num_items = (batch["shift_labels"] != -100).sum()
        dist.all_reduce(num_items)
        batch |= {
            "labels": batch["shift_labels"],
            "num_items_in_batch": num_items.clamp(min=1),
            "use_cache": False,
        }
        if cp > 1:
            documents_BT = context.number_documents(position_ids_BT)
            batch["context"] = context.Context(self.data_mesh["cp"].get_group(), documents_BT)
        return batch

    def _check(self, model: Any) -> None:
        name = type(model).__name__
        if not isinstance(model, PreTrainedModel):
            raise LayoutError(f"{name} is not a transformers model; pass a PreTrainedModel.")
        if any(isinstance(parameter, DTensor) for parameter in model.parameters()):
            raise LayoutError(f"{name} is sharded already; apply one layout, once, to a model that is whole.")
        if wrapped := [key for key, module in model.named_modules() if hasattr(module, "parameter_name")]:
            raise LayoutError(
                f"{wrapped[0]}: this adapter changes the experts' weights before they are gathered; train all weights, "
                "or an adapter of layers without experts."
            )
        stacks = find_experts(model) if self.expert.ep > 1 else {}
        if self.expert.ep > 1 and not stacks:
            raise LayoutError(
                f"ep={self.expert.ep}, and {name} has no stack of experts in transformers' form; leave `expert` out."
            )
        if getattr(model.config.get_text_config(), "output_router_logits", False):
            raise LayoutError(
                f"{name} adds a balancing loss, which is not a sum over tokens and would differ on every rank; "
                "set config.output_router_logits = False."
            )
        for key, module in stacks.items():
            experts.check(key, module, self.expert.ep)
        if self.dense.cp > 1:
            context.check(model)


def is_adapted(model: Any) -> bool:
    """True if a PEFT adapter is wrapped around the model."""
    return not isinstance(model, PreTrainedModel) and hasattr(model, "get_base_model")


def _named(kind: type, mesh: str, sizes: Mapping[str, int]) -> Any:
    """Axes of one mesh by their names."""
    names = [field.name for field in dataclasses.fields(kind)]
    if unknown := sorted(set(sizes) - set(names)):
        raise LayoutError(f"{mesh}={dict(sizes)}: no axis {unknown[0]!r}; the axes are {', '.join(names)}.")
    return kind(**sizes)


def _runs(world: int, size: int) -> str:
    """Neighbouring ranks in groups: "0-3 4-7"."""
    groups = [f"{first}-{first + size - 1}" if size > 1 else f"{first}" for first in range(0, world, size)]
    return " ".join(groups if len(groups) <= 8 else [*groups[:3], "...", groups[-1]])
