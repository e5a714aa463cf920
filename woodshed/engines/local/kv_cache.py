"""Keys and values of finished sequences, stored compactly, and of the rows of the running batch.

Shapes: B rows, T columns, L layers, H key/value heads, D head width.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers.cache_utils import Cache, CacheLayerMixin

from woodshed.engines.local import invariant


@dataclass(frozen=True)
class Prefix:
    """A sequence with its keys and its values, each (L, H, T, D)."""

    ids: np.ndarray
    tensors: tuple[Tensor, Tensor]
    experts: np.ndarray | None = None
    """Experts of its tokens, (T, layers with experts, experts of each token), where the engine tells them."""

    @property
    def size_bytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.tensors)


class Prefixes:
    """Cached sequences of the current weights, least recently used first."""

    def __init__(self, limit_bytes: int) -> None:
        self.limit_bytes = limit_bytes
        self.kept: list[Prefix] = []

    def find(self, ids: np.ndarray) -> tuple[Prefix | None, int]:
        """The cached sequence with the longest common beginning with `ids`, and the length of that beginning."""
        best, length = None, 0
        for prefix in reversed(self.kept):  # recent ones match most often
            is_longer = length < min(len(prefix.ids), len(ids)) and prefix.ids[length] == ids[length]
            if is_longer and (shared := common_length(prefix.ids, ids)) > length:
                best, length = prefix, shared
        if best is not None:
            self.kept.sort(key=lambda prefix: prefix is best)  # stable: only moves it to the end
        return best, length

    def add(self, new: Prefix) -> None:
        """Cache a sequence in place of its own beginnings, and drop old ones above the limit."""
        self.kept = [p for p in self.kept if not _begins(p.ids, new.ids)]
        self.kept.append(new)
        while sum(p.size_bytes for p in self.kept) > self.limit_bytes:
            self.kept.pop(0)


def _begins(beginning: np.ndarray, whole: np.ndarray) -> bool:
    last = len(beginning) - 1
    is_likely = last < 0 or (last < len(whole) and beginning[last] == whole[last])
    return is_likely and common_length(beginning, whole) > last


def common_length(a: np.ndarray, b: np.ndarray) -> int:
    """Length of the common beginning of two sequences."""
    length = min(len(a), len(b))
    differs = a[:length] != b[:length]
    return int(differs.argmax()) if differs.any() else length


class _Layer(CacheLayerMixin):
    """One layer of a `RunningBatch`, with the interface of transformers."""

    is_sliding = False  # all columns are kept; the mask of the model limits the window

    def __init__(self, batch: RunningBatch, index: int) -> None:
        super().__init__()
        self.batch, self.index = batch, index
        self.is_initialized = True

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        pass

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        return self.batch.write(self.index, key_states, value_states)

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.get_seq_length() + query_length, 0

    def get_seq_length(self) -> int:
        return self.batch.end - self.batch.start

    def get_max_length(self) -> int:
        return -1


class RunningBatch(Cache):
    """Keys and values of the rows of a batch, each (L, B, H, T, D), written in place.

    All rows end at column `end`, so a step writes one column, and begin `length` columns before it. The first
    `len(lengths)` rows are live; `start` is the first column of the longest one. Memory is reused and initialised with
    zeros, since a masked column still takes part in sums, with weight zero.
    """

    COLUMN_STEP = 256

    def __init__(self, num_layers: int) -> None:
        super().__init__(layers=[_Layer(self, index) for index in range(num_layers)])
        self.tensors: list[Tensor] = []
        self.room: tuple[int, int] = (0, 0)  # rows and columns that the current call needs
        self.lengths: list[int] = []
        self.start = self.end = 0
        self._fixed: tuple[int, Tensor] | None = None

    @contextmanager
    def fixed(self, rows: int, column: Tensor) -> Iterator[None]:
        """Let forwards write one column (1,) of the first `rows` rows and read all columns.

        Such a forward does not depend on the state of the batch, so it can be captured once and replayed.
        """
        self._fixed = (rows, column)
        try:
            yield
        finally:
            self._fixed = None

    def open(self, end: int, least_columns: int) -> None:
        """Remove all rows; the first free column is `end`."""
        self.room = (self.room[0], max(self.room[1], least_columns))
        self.lengths = []
        self.start = self.end = end

    def insert(self, prefix: Prefix | None, length: int) -> None:
        """Add a row that begins with the first `length` positions of a cached sequence."""
        if prefix is not None:
            slot, columns = len(self.lengths), slice(self.end - length, self.end)
            for all_rows, kept in zip(self._memory(prefix.tensors), prefix.tensors, strict=True):
                all_rows[:, slot, :, columns] = kept[:, :, :length]
        self.lengths.append(length)
        self.start = self.end - max(self.lengths)

    def write(self, layer: int, *new: Tensor) -> tuple[Tensor, Tensor]:
        """Store new keys and values (B, H, T, D) of one layer; returns all columns of its live rows."""
        if self._fixed is not None:
            rows, column = self._fixed
            keys, values = (tensor[layer, :rows] for tensor in self.tensors)
            keys.index_copy_(2, column, new[0])
            values.index_copy_(2, column, new[1])
            return keys, values
        rows, end = len(self.lengths), self.end + new[0].shape[2]
        keys, values = (tensor[layer, :rows] for tensor in self._memory(new))
        keys[:, :, self.end : end], values[:, :, self.end : end] = new
        return keys[:, :, self.start : end], values[:, :, self.start : end]

    def _memory(self, like: Sequence[Tensor]) -> list[Tensor]:
        """The tensors of keys and values, reallocated with the shapes of `like` if they are too small; live rows are
        copied."""
        rows, columns = self.room
        had_rows, had_columns = self.tensors[0].shape[1:4:2] if self.tensors else (0, 0)
        if had_rows < rows or had_columns < columns:
            live = self.tensors if self.lengths else []
            self.tensors = []  # frees unused memory before the allocation
            rows = max(rows, min(had_rows, 2 * rows))  # a call with half as many rows does not shrink it
            if 0 < had_columns < columns:  # prompts grow with every turn, and reallocation discards graphs
                columns = max(columns, had_columns * 3 // 2)
            columns = max(columns, had_columns if live else 0)
            columns = -(-columns // self.COLUMN_STEP) * self.COLUMN_STEP
            self.tensors = [
                part.new_zeros((len(self.layers), rows, part.shape[-3], columns, part.shape[-1]))
                for part in like
            ]
            slots, used = min(len(self.lengths), had_rows), slice(self.start, self.end)
            for new, old in zip(self.tensors, live, strict=bool(live)):
                new[:, :slots, :, used] = old[:, :slots, :, used]
        return self.tensors

    def positions(self, device: torch.device, added: int) -> Tensor:
        """(B, added) positions of the next tokens of each row in its sequence."""
        return torch.tensor(self.lengths, device=device)[:, None] + torch.arange(added, device=device)

    def spans(self, device: torch.device) -> Tensor:
        """Columns that the next tokens of each row attend to, in the form of `invariant.spans`."""
        past = torch.tensor(self.end - self.start, device=device)
        return invariant.spans(past - torch.tensor(self.lengths, device=device), past)

    def mask(self, device: torch.device, new: Sequence[int], width: int) -> Tensor:
        """Attention mask (B, T) for a forward of `width` tokens, of which each row has `new`, padded at the right."""
        past = self.end - self.start
        columns = torch.arange(past + width, device=device)
        lengths = torch.tensor(self.lengths, device=device)[:, None]
        wanted = torch.tensor(new, device=device)[:, None]
        return (columns >= past - lengths) & (columns < past + wanted)

    def advance(self) -> None:
        """Count one more column in every row."""
        self.end += 1
        self.lengths = [length + 1 for length in self.lengths]

    def extract(self, slot: int, ids: np.ndarray, begin: int) -> Prefix:
        """A compact copy of one row, whose first column is `begin`."""
        keys, values = (tensor[:, slot, :, begin : begin + len(ids)].clone() for tensor in self.tensors)
        return Prefix(ids, (keys, values))

    def remove(self, slot: int) -> None:
        """Remove a row; the last one moves into its place."""
        last, length = len(self.lengths) - 1, self.lengths.pop()
        if slot != last:
            for tensor in self.tensors:
                tensor[:, slot, :, self.end - length : self.end] = tensor[
                    :, last, :, self.end - length : self.end
                ]
            self.lengths[slot] = length
        self.start = self.end - max(self.lengths, default=0)

    def make_room_for(self, length: int) -> None:
        """Make sure that a row of this length and one more column fit, by moving the live rows if needed."""
        if not self.lengths:
            self.open(length, length + 1)
            return
        has_column = self.end < self.tensors[0].shape[3]
        if has_column and length <= self.end:
            return
        self._move(max(length, *self.lengths))

    def _move(self, end: int) -> None:
        """Move the live rows so that they end at a column."""
        begin = end - (self.end - self.start)
        self.room = (self.room[0], max(self.room[1], end + 1))
        self._memory(self.tensors)
        for tensor in self.tensors:
            for slot in range(len(self.lengths)):  # one by one: the ranges may overlap, and a copy is made
                tensor[:, slot, :, begin:end] = tensor[:, slot, :, self.start : self.end].clone()
        self.start, self.end = begin, end
