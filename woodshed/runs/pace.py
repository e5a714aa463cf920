"""Durations in words, and the time that work needs at the pace of what was done so far."""

from __future__ import annotations

import time

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
