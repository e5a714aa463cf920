"""Folders of named tensors: safetensors, each rank's shards in a file of its own (torch.distributed.checkpoint).

What some ranks wrote, any other number of them reads: every rank takes the parts that its shards need. Nothing is
pickled, so a folder of others is data and no code.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader, HuggingFaceStorageWriter
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.state_dict_loader import load as dcp_load
from torch.distributed.checkpoint.state_dict_saver import (
    _save_state_dict as dcp_save,  # pyright: ignore[reportPrivateUsage]
)

from woodshed.learning import ranks
from woodshed.records import RunError

EARLIER = "delete that folder to resume before it"
ANEW = "what a run began with cannot be made again: copy its recipe.toml and start under another name"
"""Ways out of a damaged checkpoint: of a step, and of the start of a stage."""


def save(folder: Path, tensors: Mapping[str, Tensor], group: dist.ProcessGroup | None = None) -> None:
    """Write tensors, sharded ones or copies of the same on every rank. All ranks call it, with the same names.

    Args:
        group: see `ranks.agreed`.

    Raises:
        OSError: the disk is full, or the folder cannot be written.
    """
    plain = {name: value.detach().contiguous() for name, value in tensors.items()}
    with _single_errors():
        writer = HuggingFaceStorageWriter(str(folder), save_distributed=True)
        # `save` itself warns of a single process, and a thread must not touch the filters of warnings.
        dcp_save(plain, writer, process_group=group, no_dist=ranks.count() == 1)


def copied(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Copies in host memory, sharded alike."""
    return {name: value.detach().to("cpu", copy=True) for name, value in tensors.items()}


def read(folder: Path, like: Mapping[str, Tensor] | None = None) -> dict[str, Tensor]:
    """All tensors of a folder: sharded as those of the same name in `like`, else whole in host memory.

    Raises:
        OSError, ValueError: the folder is absent or damaged.
    """
    with _single_errors(), warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*assuming the intent is to load in a single process")
        saved = HuggingFaceStorageReader(str(folder)).read_metadata().state_dict_metadata
        if not saved:
            raise ValueError("it holds no tensors")
        found = {
            name: _empty(entry, (like or {}).get(name))
            for name, entry in saved.items()
            if isinstance(entry, TensorStorageMetadata)
        }
        dcp_load(found, storage_reader=HuggingFaceStorageReader(str(folder)), no_dist=ranks.count() == 1)
    return found


def read_saved(folder: Path, way_out: str, like: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Read a folder of a checkpoint.

    Raises:
        RunError: it is absent or damaged; the message ends with the way out.
    """
    try:
        return read(folder, like)
    except (OSError, ValueError) as error:
        raise RunError(f"checkpoint {folder.parent} is damaged ({folder.name}: {error}); {way_out}") from None


def _empty(entry: TensorStorageMetadata, like: Tensor | None) -> Tensor:
    if like is not None and like.shape == entry.size:
        return torch.zeros_like(like.detach(), dtype=entry.properties.dtype)
    return torch.zeros(entry.size, dtype=entry.properties.dtype)


@contextmanager
def _single_errors() -> Iterator[None]:
    """The library's own collection of errors, which is no `Exception`, becomes the first error in it."""
    try:
        yield
    except CheckpointException as several:
        first = next(iter(several.failures.values()))[0]
        is_damage = isinstance(first, Exception) and not isinstance(first, OSError)  # Ctrl-C is neither
        raise ValueError(str(first)) if is_damage else first from None
    except OSError:
        raise
    except Exception as error:  # safetensors raises its own, undocumented kinds
        raise ValueError(str(error)) from None
