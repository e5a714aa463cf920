"""Expert parallelism: tokens are sent to the ranks that hold their experts, and back.

The router and the experts' own forward stay the model's: what is exchanged are rows of hidden states, ordered by the
expert that the router chose. Products are grouped over the experts of a rank by whatever the model is set to
(`experts_implementation`: torch's grouped_mm by default, a loop with "eager"). With ep = 1 nothing has to travel, and
none of this is used.

Letters: N tokens, K experts for each of them, E experts of which L lie on each rank, M rows that a rank receives.
"""

from __future__ import annotations

from types import MethodType
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed._functional_collectives import all_to_all_single_autograd
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from woodshed.records import LayoutError


def check(name: str, experts: nn.Module, num_ranks: int) -> None:
    """Raises `LayoutError` for experts that cannot be spread: by their number, or for weights that they share."""
    num_experts = num_experts_of(experts)
    if num_experts % num_ranks:
        raise LayoutError(
            f"{name}: ep={num_ranks} does not divide its {num_experts} experts; use a divisor of {num_experts}."
        )
    for key, parameter in experts.named_parameters():
        if "." in key or parameter.shape[0] != num_experts:
            raise LayoutError(
                f"{name}.{key} of shape {tuple(parameter.shape)} is not one of {num_experts} experts; use ep=1."
            )


def spread(experts: nn.Module, mesh: DeviceMesh) -> None:
    """Keep a rank's share of the experts, as DTensors cut along dimension 0, and send tokens where they belong."""
    for key, parameter in list(experts.named_parameters()):
        shard = distribute_tensor(parameter.detach(), mesh, [Shard(0)], src_data_rank=None)
        setattr(experts, key, nn.Parameter(shard, requires_grad=parameter.requires_grad))
    experts.forward = MethodType(forward, experts)


def num_experts_of(experts: nn.Module) -> int:
    return int(experts.num_experts)  # pyright: ignore[reportArgumentType]


class LocalExperts:
    """Experts of this rank with plain tensors as weights, for the model's own forward."""

    def __init__(self, experts: nn.Module, num_experts: int) -> None:
        self._experts, self.num_experts = experts, num_experts

    def __getattr__(self, name: str) -> Any:
        value = getattr(self._experts, name)
        return value.to_local() if isinstance(value, DTensor) else value


def forward(experts: nn.Module, hidden_ND: Tensor, index_NK: Tensor, weight_NK: Tensor) -> Tensor:
    """Weighted sum of every token's experts: (N, D)."""
    mesh = cast(DTensor, next(experts.parameters())).device_mesh
    group, num_ranks = mesh.get_group(), mesh.size()
    local = LocalExperts(experts, num_experts_of(experts) // num_ranks)
    order = index_NK.flatten().argsort(stable=True)
    sent_counts = torch.bincount(index_NK.flatten(), minlength=num_experts_of(experts))
    counts = torch.empty_like(sent_counts)
    dist.all_to_all_single(counts, sent_counts, group=group)
    sent, received = torch.stack([sent_counts, counts]).view(2, num_ranks, -1).sum(2).tolist()
    rows_MD = all_to_all_single_autograd(hidden_ND[order // index_NK.shape[1]], received, sent, group)
    numbers = torch.arange(local.num_experts, device=counts.device).repeat(num_ranks)
    expert_M = numbers.repeat_interleave(counts, output_size=sum(received))
    rows_MD = compute(local, type(experts).forward, rows_MD, expert_M)
    returned_NK = all_to_all_single_autograd(rows_MD, sent, received, group)
    chosen_NKD = torch.empty_like(returned_NK).index_copy(0, order, returned_NK).view(*index_NK.shape, -1)
    return (chosen_NKD * weight_NK[..., None]).sum(1).to(hidden_ND.dtype)


def compute(local: LocalExperts, own_forward: Any, rows_MD: Tensor, expert_M: Tensor) -> Tensor:
    """Each row through its expert: (M, D).

    A rank that received no rows computes one row of zeros and drops the result, so that its experts' gradients are
    zeros and not None: all ranks must reduce them together.
    """
    num_rows = rows_MD.shape[0]
    if not num_rows:
        rows_MD = torch.cat([rows_MD, rows_MD.new_zeros(1, rows_MD.shape[1])])
        expert_M = expert_M.new_zeros(1)
    unweighted = rows_MD.new_ones(rows_MD.shape[0], 1)
    return own_forward(local, rows_MD, expert_M[:, None], unweighted)[:num_rows]
