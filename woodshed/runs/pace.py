"""Durations in words, and the time that work needs at the pace of what was done so far."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

WORTH_TELLING_S = 2.0
"""Shorter work needs no line of its own and no estimate."""


def duration(seconds: float) -> str:
    """A duration as people say it: "36 s", "13 min", "2 h 5 min"."""
    if seconds < 90:
        return f"{seconds:.0f} s"
    minutes = round(seconds / 60)
    return f"{minutes} min" if minutes < 60 else f"{minutes // 60} h {minutes % 60} min"


class Pace:
    """Wall seconds of some work, waiting for other work included, and what is left of it by what was measured."""

    def __init__(self, done: int = 0) -> None:
        """Begin where `done` parts of the work were finished by somebody else, such as a run that is resumed."""
        self.began, self.first = time.monotonic(), done

    def seconds(self) -> float:
        return time.monotonic() - self.began

    def left(self, done: int, total: int) -> str:
        """The rest in words, "about 3 min left"; "" where nothing was finished yet, or nothing is left."""
        seconds, finished = self.seconds(), done - self.first
        if finished <= 0 or done >= total or seconds <= WORTH_TELLING_S:
            return ""
        return f"about {duration(seconds / finished * (total - done))} left"


class Laps:
    """Wall seconds of things that a run does again and again, and of those that are still to come."""

    def __init__(self) -> None:
        self._laps: dict[str, list[float]] = {}

    @contextmanager
    def timing(self, kind: str) -> Iterator[None]:
        """Time the work inside, if it is not ended by an error."""
        pace = Pace()
        yield
        self._laps.setdefault(kind, []).append(pace.seconds())

    def left(self, to_come: dict[str, int]) -> str:
        """The rest in words, "about 6 min left"; "" before each kind was done once.

        Args:
            to_come: kind to how often it is still to be done.
        """
        if not all(kind in self._laps for kind, number in to_come.items() if number):
            return ""
        means = {kind: sum(laps) / len(laps) for kind, laps in self._laps.items()}
        seconds = sum(number * means[kind] for kind, number in to_come.items() if number)
        return f"about {duration(seconds)} left" if seconds > WORTH_TELLING_S else ""
