"""Recipe's layout of a policy over ranks: which of them store and compute what (`parallel`)."""

from __future__ import annotations

import math

import torch
from pydantic import Field
from torch.distributed.fsdp import FSDPModule

from woodshed.learning import ranks, sharded_loading
from woodshed.learning.policy import Policy
from woodshed.parallel import ParallelLayout
from woodshed.records import RecipeError
from woodshed.runs import machine
from woodshed.settings import Settings


class LayoutSettings(Settings):
    """Ranks that store the weights together: fsdp x replicate x cp of them, started by torchrun."""

    fsdp: int = Field(default=1, ge=1)
    """Ranks over which each weight is cut (FSDP2)."""
    replicate: int = Field(default=1, ge=1)
    """Copies of every weight (HSDP)."""
    cp: int = Field(default=1, ge=1)
    """Ranks that share each rollout, for those that are too long for one (context parallelism). Weights are cut over
    fsdp x cp ranks."""
    ep: int = Field(default=1, ge=1)
    """Ranks over which the experts of a layer are dealt out, a divisor of all ranks. Experts are stored once."""

    @property
    def world(self) -> int:
        """Ranks in all."""
        return self.fsdp * self.replicate * self.cp


def refuse_misfit(settings: LayoutSettings, device: str = "cpu") -> None:
    """Check the layout against the ranks that were started and the GPUs that they have, before anything is loaded.

    Raises:
        RecipeError: names the sizes, and the command or setting that would fit.
    """
    started = ranks.started()
    sizes = f"layout.fsdp x replicate x cp = {settings.fsdp} x {settings.replicate} x {settings.cp}"
    if settings.world % settings.ep:
        raise RecipeError(
            f"layout.ep = {settings.ep} does not divide the {settings.world} ranks of {sizes}; use a divisor"
        )
    if settings.world != started:
        sharers = settings.cp if started % settings.cp == 0 else 1
        copies = settings.replicate if started // sharers % settings.replicate == 0 else 1
        fitting = {
            "fsdp": started // copies // sharers,
            "replicate": copies,
            "cp": sharers,
            "ep": math.gcd(settings.ep, started),
        }
        changes = [
            f"layout.{name}={size}" for name, size in fitting.items() if getattr(settings, name) != size
        ]
        raise RecipeError(
            f"{sizes} is for {_ranks(settings.world)}, and {_ranks(started)} started; start with "
            f"`{machine.command(settings.world)} train ...`, or set {' '.join(changes)}"
        )
    if started > 1 and device.startswith("cuda"):
        _refuse_gpus(device)


def _refuse_gpus(device: str) -> None:
    """Check that every rank of this machine has a GPU of its own."""
    here, gpus = ranks.started_here(), torch.cuda.device_count()
    if device != "cuda":
        raise RecipeError(
            f"policy.device = {device!r} names one GPU, and each of the {_ranks(ranks.started())} takes the one of its "
            "number; set policy.device=cuda"
        )
    if here > gpus:
        raise RecipeError(
            f"{_ranks(here)} started on this machine, and each needs a GPU of its own, of which there are {gpus}; "
            f"start no more than {max(gpus, 1)} here, with a layout for as many, or set policy.device=cpu"
        )


def _ranks(count: int) -> str:
    return f"{count} rank" + ("" if count == 1 else "s")


def parallel_layout(settings: LayoutSettings) -> ParallelLayout:
    """Dense weights cut over fsdp x cp ranks, `replicate` times; experts over all ranks, stored once, where ep > 1."""
    dense = {"replicate": settings.replicate, "shard": settings.fsdp, "cp": settings.cp}
    expert = {"ep": settings.ep, "shard": settings.world // settings.ep} if settings.ep > 1 else None
    return ParallelLayout.build(settings.world, dense, expert)


def shard(policy: Policy, settings: LayoutSettings) -> None:
    """Cut the policy's weights over the ranks, in place. Every rank calls it, with the same weights, or with none yet.

    An adapter stays whole on every rank, and its gradients are summed: it is a hundredth of the weights.

    Raises:
        RecipeError: the layout is not for this number of ranks.
        LayoutError: a model that it cannot hold. Nothing is changed.
    """
    refuse_misfit(settings)
    if ranks.count() > 1:
        layout = parallel_layout(settings)
        layout.apply(policy.model)
        if policy.unread is not None:
            sharded_loading.fill(policy.model, *policy.unread)
            policy.unread = None
        policy.find_weights()
        policy.sharers = layout.data_mesh["cp"].get_group() if settings.cp > 1 else None
        policy.units = [module for module in policy.model.modules() if isinstance(module, FSDPModule)]
