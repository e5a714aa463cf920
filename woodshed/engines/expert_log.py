"""Experts that an engine chose for tokens, as records: from what servers send, and cut to what is new.

Letters: T tokens, L layers, K experts of each token.
"""

from __future__ import annotations

import base64
import io
from collections.abc import Sequence
from typing import Any

import numpy as np

from woodshed.records import RoutedExperts, Turn


def write(start: int, chosen_TLK: np.ndarray) -> RoutedExperts:
    """Make a record of the choices for T tokens, the first of which is at an index."""
    data = base64.b64encode(np.ascontiguousarray(chosen_TLK, "<u2").tobytes()).decode()
    tokens, layers, each = chosen_TLK.shape
    return RoutedExperts(start, (tokens, layers, each), data)


def read(part: RoutedExperts) -> np.ndarray:
    """Choices (T, L, K) of a record; for no token where its data is not of its shape."""
    data = np.frombuffer(base64.b64decode(part.data), "<u2")
    tokens, layers, each = part.shape
    if data.size != tokens * layers * each:
        return np.empty((0, layers, each), "<u2")
    return data.reshape(part.shape)


def of_npy(text: Any) -> RoutedExperts | None:
    """Take what vLLM sends for a prompt and its message with --enable-return-routed-experts: a .npy file in base64.
    None where it is absent or something else; the trainer's routers then choose themselves."""
    try:
        chosen = np.load(io.BytesIO(base64.b64decode(text)), allow_pickle=False)
    except (TypeError, ValueError, EOFError, OSError):
        return None
    return write(0, chosen) if chosen.ndim == 3 and chosen.dtype.kind in "ui" else None


def joined(first: RoutedExperts | None, later: RoutedExperts | None) -> RoutedExperts | None:
    """Choices for a message in two pieces: those for a token are of the first piece that read it."""
    if first is None or later is None or first.shape[1:] != later.shape[1:]:
        return first or later
    return write(0, np.concatenate([read(first), read(later)[first.shape[0] :]]))


def untold(part: RoutedExperts | None, earlier: Sequence[Turn]) -> RoutedExperts | None:
    """The choices for tokens that no earlier turn of the segment has told."""
    if part is None or not earlier or any(turn.experts is None for turn in earlier):
        return part
    told = sum(len(turn.context_ids) + len(turn.sampled_ids) for turn in earlier) - 1
    return write(told, read(part)[told - part.start :])
