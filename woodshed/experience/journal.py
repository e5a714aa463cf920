"""Turns of attempts in the middle, so that a killed process loses at most the messages that were being written.

    turns/ROLLOUT.jsonl     one line for each turn, on disk before the next message is asked for

An attempt is made again from its journal: its messages are read and its calls executed as if they had just been
sampled, in a new sandbox, and what they return is compared with the journal. The file goes once the rollout is kept.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

from woodshed.records import Turn, from_json, to_json


class Journal:
    """Journals of the attempts of a run."""

    def __init__(self, place: Path) -> None:
        self.place = place
        place.mkdir(parents=True, exist_ok=True)

    def append(self, rollout_id: str, turn: Turn) -> None:
        """Write a turn of an attempt to disk."""
        with self._path(rollout_id).open("a", encoding="utf-8", errors="surrogatepass") as file:
            file.write(json.dumps(to_json(turn), ensure_ascii=False) + "\n")
            file.flush()
            os.fsync(file.fileno())

    def turns(self, rollout_id: str) -> list[Turn]:
        """The turns of an attempt. A line that a kill cut is removed."""
        path = self._path(rollout_id)
        if not path.exists():
            return []
        found: list[Turn] = []
        whole = 0
        for line in path.read_bytes().splitlines(keepends=True):
            try:
                found.append(from_json(Turn, json.loads(line.decode("utf-8", errors="surrogatepass"))))
            except (ValueError, KeyError, TypeError):
                break
            if not line.endswith(b"\n"):
                found.pop()
                break
            whole += len(line)
        os.truncate(path, whole)
        return found

    def remove(self, rollout_id: str) -> None:
        """Forget an attempt: it is kept whole, or is made again from its start."""
        self._path(rollout_id).unlink(missing_ok=True)

    def keep_only(self, rollout_ids: Iterable[str]) -> None:
        """Forget all other attempts."""
        names = {self._path(rollout_id).name for rollout_id in rollout_ids}
        for path in self.place.glob("*.jsonl"):
            if path.name not in names:
                path.unlink()

    def _path(self, rollout_id: str) -> Path:
        return self.place / f"{rollout_id}.jsonl"


def equal(made: Turn, kept: Turn) -> bool:
    """True where a turn that was made again is the one of the journal, but for its seconds."""
    return _timeless(made) == _timeless(kept)


def _timeless(turn: Turn) -> Turn:
    observations = tuple(replace(seen, seconds=0.0) for seen in turn.observations)
    return replace(turn, sample_s=0.0, tools_s=0.0, observations=observations)
