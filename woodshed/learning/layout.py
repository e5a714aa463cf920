"""Recipe's layout of a policy over ranks: which of them store and compute what (`parallel`)."""

from __future__ import annotations

from pydantic import Field
from torch.distributed.fsdp import FSDPModule

from woodshed.learning import ranks
from woodshed.learning.policy import Policy
from woodshed.parallel import ParallelLayout
from woodshed.records import RecipeError
from woodshed.settings import Settings


class LayoutSettings(Settings):
    """Ranks that store the weights together; fsdp x replicate x cp of them, started by torchrun."""

    fsdp: int = Field(default=1, ge=1)
    """Ranks over which each weight is cut (FSDP2)."""
    replicate: int = Field(default=1, ge=1)
    """Copies of every weight (HSDP)."""
    ep: int = Field(default=1, ge=1)
    """Ranks over which the experts of a layer are dealt out, a divisor of all ranks. Experts are stored once."""
    cp: int = Field(default=1, ge=1)
    """Ranks that share a sequence; above 1 only where no log-probs of single tokens are needed, which sft, distill
    and rl need."""

    @property
    def world(self) -> int:
        return self.fsdp * self.replicate * self.cp


def refuse_misfit(settings: LayoutSettings) -> None:
    """Check the layout against the ranks that were started, before anything is loaded.

    Raises:
        RecipeError: names the sizes, and the command or setting that would fit.
    """
    sizes = f"layout.fsdp x replicate x cp = {settings.fsdp} x {settings.replicate} x {settings.cp}"
    if settings.cp > 1:
        raise RecipeError(
            f"layout.cp = {settings.cp} cuts sequences, and the losses of sft, distill and rl need the log-probs of "
            "whole ones; use layout.cp = 1 and a larger layout.fsdp"
        )
    if settings.world != ranks.count():
        raise RecipeError(
            f"{sizes} is for {settings.world} ranks, and there are {ranks.count()}; start with `torchrun "
            f"--nproc-per-node {settings.world} -m woodshed train ...`, or set layout.fsdp = {ranks.count()}"
        )
    if settings.world % settings.ep:
        raise RecipeError(
            f"layout.ep = {settings.ep} does not divide the {settings.world} ranks of {sizes}; use a divisor"
        )


def parallel_layout(settings: LayoutSettings) -> ParallelLayout:
    """Dense weights cut over `fsdp` ranks, `replicate` times; experts over all ranks, stored once, where ep > 1."""
    dense = {"replicate": settings.replicate, "shard": settings.fsdp, "cp": settings.cp}
    expert = {"ep": settings.ep, "shard": settings.world // settings.ep} if settings.ep > 1 else None
    return ParallelLayout.build(settings.world, dense, expert)


def shard(policy: Policy, settings: LayoutSettings) -> None:
    """Cut the policy's weights over the ranks, in place. Every rank calls it, with the same weights.

    An adapter stays whole on every rank, and its gradients are summed: it is a hundredth of the weights.

    Raises:
        RecipeError: the layout is not for this number of ranks.
        LayoutError: a model that it cannot hold. Nothing is changed.
    """
    refuse_misfit(settings)
    if ranks.count() > 1:
        parallel_layout(settings).apply(policy.model)
        policy.find_weights()
        policy.units = [module for module in policy.model.modules() if isinstance(module, FSDPModule)]
