"""Word index over all transcripts, small enough for the page and quick enough to search while typing.

Word -> numbers of the rollouts that hold it, as differences between neighbours. Numbers are stored byte plane by byte
plane (all lowest bytes first), because the upper planes are nearly all zero and vanish under compression.
"""

from __future__ import annotations

import re

import numpy as np

WORD = re.compile(r"[a-z_][a-z0-9_]{2,39}")


def words(text: str) -> set[str]:
    """The words that a text can be found by: identifiers of 3 to 40 characters, in lower case."""
    return set(WORD.findall(text.lower()))


class WordIndex:
    """Index that is filled with rollouts in rising order of their numbers, then packed once."""

    def __init__(self) -> None:
        self._found: dict[str, list[int]] = {}

    def add(self, number: int, words_found: set[str]) -> None:
        for word in words_found:
            self._found.setdefault(word, []).append(number)

    def pack(self) -> tuple[bytes, bytes]:
        """The words, sorted, one a line; and their lists: a count per word, then all differences, both as planes."""
        ordered = sorted(self._found)
        counts = np.array([len(self._found[word]) for word in ordered], dtype="<u4")
        numbers = np.array([n for word in ordered for n in self._found[word]], dtype="<i8")
        gaps = np.diff(numbers, prepend=0)
        starts = np.cumsum(counts, dtype=np.int64) - counts
        gaps[starts] = numbers[starts]  # every list starts anew
        return "\n".join(ordered).encode(), planes(counts) + planes(gaps.astype("<u4"))


def planes(values: np.ndarray) -> bytes:
    """Unsigned 32-bit numbers as four planes of bytes, lowest first."""
    return values.view(np.uint8).reshape(-1, 4).T.tobytes()
