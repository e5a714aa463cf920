"""Loading of a policy over ranks: each reads its own shards from the files, and none holds the whole model.

The model is built without memory, with a new adapter as it would be on one rank. Its base is cut over the ranks, and
then filled, box by box, from safetensors. Files that name their weights in another way are read by rank 0, which tells
the others one weight after another.
"""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors import safe_open
from torch import Tensor, nn

from woodshed.engines import local
from woodshed.learning import ranks
from woodshed.muon import layout
from woodshed.muon.grid import Box
from woodshed.records import ModelError

STACKED = {"gate_up_proj": ("gate_proj", "up_proj"), "down_proj": ("down_proj",)}
"""Stack of all experts' matrices to the matrices of one expert, as the files of most families name them."""


class ShardFiles:
    """The safetensors of a model's folder, of which boxes are read."""

    def __init__(self, folder: Path, stack: ExitStack) -> None:
        self._files: dict[str, Any] = {}
        for path in sorted(folder.glob("*.safetensors")):
            file = stack.enter_context(safe_open(path, "pt"))
            self._files |= dict.fromkeys(file.keys(), file)

    def holds(self, name: str) -> bool:
        """True if there is a weight of this name, or an expert of the stack."""
        return name in self._files or all(part in self._files for part in _expert(name, 0))

    def read(self, name: str, box: Box) -> Tensor:
        """Part of a weight, in the precision of the file."""
        if name in self._files:
            stored = self._files[name].get_slice(name)
            return stored[tuple(slice(*ends) for ends in box)] if box else self._files[name].get_tensor(name)
        experts, rows, columns = box
        parts = [self._rows(_expert(name, number), rows, columns) for number in range(*experts)]
        return torch.stack(parts) if parts else torch.empty([end - start for start, end in box])

    def _rows(self, names: tuple[str, ...], rows: tuple[int, int], columns: tuple[int, int]) -> Tensor:
        """Rows of matrices that stand above each other."""
        found, above = [], 0
        for name in names:
            stored = self._files[name].get_slice(name)
            height = stored.get_shape()[0]
            start, end = (min(max(edge - above, 0), height) for edge in rows)
            found.append(stored[start:end, slice(*columns)])
            above += height
        return torch.cat(found)


def _expert(name: str, number: int) -> tuple[str, ...]:
    """Names in the files of what one expert has in a stack."""
    prefix, _, stack = name.rpartition(".")
    return tuple(f"{prefix}.{number}.{part}.weight" for part in STACKED.get(stack, ("",)))


def without_memory(model: Any, device: torch.device) -> None:
    """Put the weights of a model that it was built without on the meta device, and those of an adapter on theirs."""
    for module in model.modules():
        for key, weight in module.named_parameters(recurse=False):
            if weight.numel() > 1 and not any(weight.stride()):
                empty = nn.Parameter(weight.detach().to("meta"), requires_grad=weight.requires_grad)
                setattr(module, key, empty)
            else:
                weight.data = weight.data.to(device)
    _tie(model)


@torch.no_grad()
def fill(model: Any, folder: Path, device: torch.device) -> None:
    """Give the weights that lie on the meta device memory, and what the files hold. Every rank calls it.

    Raises:
        ModelError: a weight is missing, or holds NaN or infinite values.
    """
    model._apply(lambda each: torch.empty_like(each, device=device) if each.is_meta else each.to(device))
    _tie(model)
    base = model.get_base_model() if hasattr(model, "get_base_model") else model
    wanted = {
        name.replace(".base_layer.", "."): value
        for name, value in base.state_dict(keep_vars=True).items()
        if "lora_" not in name
    }
    with ExitStack() as stack:
        files = ShardFiles(folder, stack)
        known: dict[Tensor, str] = {}
        for name, value in wanted.items():
            if value not in known or files.holds(name):
                known[value] = name
        is_readable = ranks.agreed(all(map(files.holds, known.values())))
        whole = {} if is_readable or ranks.index() else local.load(str(folder)).model.state_dict()
        for value, name in known.items():
            shard = layout.local(value)
            box = tuple((0, length) for length in value.shape)
            if value is not shard:
                storage = layout.read(name, value)
                box = storage.grid.box(storage.find(dist.get_rank())[1])
            part = files.read(name, box) if is_readable else _told(whole, name, value, box)
            if part.numel() and not all(map(torch.isfinite, part.aminmax())):
                raise ModelError(f"weight {name} holds NaN or infinite values; fetch or train it again")
            shard.copy_(part)


def _told(whole: dict[str, Tensor], name: str, like: Tensor, box: Box) -> Tensor:
    """Part of a weight that rank 0 has whole."""
    value = torch.empty(like.shape, dtype=like.dtype, device=layout.local(like).device)
    if ranks.index() == 0:
        value.copy_(whole[name])
    dist.broadcast(value, 0)
    return value[tuple(slice(*ends) for ends in box)]


def _tie(model: Any) -> None:
    """Let layers share the weights that they shared before each got its own."""
    (model.get_base_model() if hasattr(model, "get_base_model") else model).tie_weights()
