"""Files of published weights that each rank writes (`engines.published`)."""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Literal

import torch
from safetensors.torch import save_file
from torch import Tensor

from woodshed.engines import published
from woodshed.engines.published import Bytes, DeltaWriter, PublishedTensor
from woodshed.learning import ranks
from woodshed.learning.policy import Policy


class WeightFiles:
    """A rank's share of the published weights, and their bytes in the version before.

    Every tensor belongs to one rank, which compares, compresses and writes it; all of them gather it.
    """

    def __init__(self, policy: Policy) -> None:
        self.policy = policy
        self._before: dict[str, Bytes] = {}
        """By the first name of a tensor; empty where no differences are written."""

    @property
    def has_differences(self) -> bool:
        """True for weights of 16 bits. A step changes few of them, and nearly all of those of 32 bits."""
        return not self.policy.is_adapter and self.policy.model.dtype.itemsize == 2

    def write(self, folder: Path, kind: Literal["full", "delta", "adapter"]) -> dict[str, PublishedTensor]:
        """Write this rank's files, and on rank 0 the configuration; the tensors of all ranks, by name."""
        if kind == "adapter":
            self.policy.export(folder, self.policy.model.dtype)  # what it computes with
            entries = _described(folder) if ranks.index() == 0 else {}
        elif kind == "delta":
            entries = self._write_differences(folder / f"delta-{ranks.index():05d}.zst")
        else:
            entries = self._write_whole(
                folder / f"model-{ranks.index() + 1:05d}-of-{ranks.count():05d}.safetensors"
            )
        found = dict(ranks.gather(list(entries.items())))
        if kind == "full" and ranks.index() == 0:
            _write_configuration(folder, self.policy, found)
        return found

    def _share(self) -> Iterator[tuple[list[str], Tensor]]:
        """Names and value, in host memory, of each tensor of this rank."""
        loads = [0] * ranks.count()
        for names, value in self.policy.whole_weights():
            owner = loads.index(min(loads))
            loads[owner] += value.nbytes
            if owner == ranks.index():
                yield names, value.to("cpu", copy=True).contiguous()

    def _write_whole(self, file: Path) -> dict[str, PublishedTensor]:
        """Write tensors, also under their second names: a server may keep a tied output layer as it was."""
        entries: dict[str, PublishedTensor] = {}
        weights: dict[str, Tensor] = {}
        self._before = {}
        for names, value in self._share():
            data = _bytes(value)
            if self.has_differences:
                self._before[names[0]] = data
            entry = PublishedTensor(tuple(value.shape), _dtype(value), published.digest_of(data), file.name)
            entries |= dict.fromkeys(names, entry)
            weights |= {name: value if name == names[0] else value.clone() for name in names}
        save_file(weights, file, metadata={"format": "pt"})
        return entries

    def _write_differences(self, file: Path) -> dict[str, PublishedTensor]:
        """Write what changed since the version before, once for all names of a tensor."""
        entries: dict[str, PublishedTensor] = {}
        writer = DeltaWriter(file)
        for names, value in self._share():
            data = _bytes(value)
            entry = writer.add(self._before[names[0]], data, value.shape, _dtype(value))
            self._before[names[0]] = data
            entries |= dict.fromkeys(names, entry)
        writer.close()
        return entries


def _bytes(value: Tensor) -> Bytes:
    return value.reshape(-1).view(torch.uint8).numpy()


def _dtype(value: Tensor) -> str:
    return str(value.dtype).removeprefix("torch.")


def _described(folder: Path) -> dict[str, PublishedTensor]:
    """Digests of an adapter."""
    return {
        name: PublishedTensor((len(data),), "uint8", published.digest_of(data), "adapter_model.safetensors")
        for name, data in published.tensors_of(folder)
    }


def _write_configuration(folder: Path, policy: Policy, entries: dict[str, PublishedTensor]) -> None:
    """Write the model's configuration, untied, its tokenizer, and which file holds which tensor."""
    if policy.tokenizer is not None:
        policy.tokenizer.save_pretrained(folder)
    config = copy.deepcopy(policy.model.config)
    config.tie_word_embeddings = False
    config.save_pretrained(folder)
    size = sum(path.stat().st_size for path in folder.glob("*.safetensors"))
    index = {
        "metadata": {"total_size": size},
        "weight_map": {name: each.file for name, each in entries.items()},
    }
    (folder / "model.safetensors.index.json").write_text(json.dumps(index) + "\n")
