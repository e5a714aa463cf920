"""Progress of a build by phases, with an estimate of all that is still to come."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from types import MappingProxyType

from woodshed.runs.pace import duration

Progress = Callable[[int, int, str], None]
"""progress(done, total, text), as in `woodshed.cli.terminal`."""

QUIET_S = 6.0
"""After so long the work is named again: nothing is silent for more than ten seconds, on a busy machine either."""


class Phases:
    """Progress of a build. Each phase that is not over has an expectation in seconds."""

    def __init__(self, progress: Progress) -> None:
        self._progress = progress
        self._left_s: dict[str, float] = {}
        self._bounds: set[str] = set()
        self._since = self._told = time.monotonic()
        self._current, self._last = "", (0, 0, "")

    @contextmanager
    def repeated(self) -> Iterator[None]:
        """Say what is worked on again and again meanwhile, for how long no progress came with it."""
        over = threading.Event()
        speaker = threading.Thread(target=self._repeat, args=(over,), daemon=True)
        speaker.start()
        try:
            yield
        finally:
            over.set()
            speaker.join()

    def _repeat(self, over: threading.Event) -> None:
        while not over.wait(1.0):
            self._beat()

    def _beat(self) -> None:
        """Say it again where nothing was said for QUIET_S seconds."""
        if time.monotonic() >= self._told + QUIET_S:
            self._count_down()
            self._tell(*self._last)

    def expect(self, phase: str, seconds: float) -> None:
        """Note how long a phase will take; 0 when it is over."""
        self._count_down()
        self._left_s[phase] = max(seconds, 0.0)
        self._bounds.discard(phase)

    def bound(self, phase: str, seconds: float) -> None:
        """Note the most that a phase may take, until it is known better."""
        self.expect(phase, seconds)
        self._bounds.add(phase)

    def _count_down(self) -> None:
        """Take the time that went by from the phase that is worked on."""
        now = time.monotonic()
        if self._current in self._left_s:
            self._left_s[self._current] = max(self._left_s[self._current] - (now - self._since), 0.0)
        self._since = now

    def named(self, phase: str, others: Mapping[str, float] = MappingProxyType({})) -> Progress:
        """Progress of one phase: from the share that is done follows how long the rest of it takes.

        Args:
            others: later phases, as multiples of this one's seconds.
        """
        began, before = time.monotonic(), -1

        def told(done: int, total: int, text: str) -> None:
            nonlocal began, before
            if before < 0 or done < before:  # what an earlier call did took none of this one's time
                began, before = time.monotonic(), done
            if total and done > before:
                each_s = (time.monotonic() - began) / (done - before)
                self.expect(phase, each_s * (total - done))
                for other, times in others.items():
                    self.expect(other, each_s * total * times)
            self._count_down()
            self._current, self._last = phase, (done, total, text)
            self._tell(done, total, text)

        return told

    def _tell(self, done: int, total: int, text: str) -> None:
        self._told = time.monotonic()
        self._progress(done, total, f"{text}, {self.estimate}")

    @property
    def estimate(self) -> str:
        """The estimate in words."""
        seconds = sum(self._left_s.values())
        goal = "for the whole build" if "tasks" in self._left_s else "to the first tasks"
        if seconds < 60 and self._left_s:
            return f"less than a minute {goal}"
        return f"{'at most' if self._bounds else 'about'} {duration(seconds)} {goal}"
