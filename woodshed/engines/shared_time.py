"""An engine's busy seconds, shared among the requests that it worked on."""

from __future__ import annotations

import time
from collections.abc import Callable
from threading import Lock


class SharedTime:
    """Divides every moment evenly among the requests in flight; their shares add up to the time that any was."""

    def __init__(self, now: Callable[[], float] = time.perf_counter) -> None:
        self._now, self._lock = now, Lock()
        self._in_flight = 0
        self._last = 0.0
        self._per_request_s = 0.0
        """Integral of 1 / requests in flight."""

    def begin(self) -> Share:
        """A request starts."""
        return Share(self, self._advance(+1))

    def _advance(self, change: int) -> float:
        with self._lock:
            now = self._now()
            if self._in_flight:
                self._per_request_s += (now - self._last) / self._in_flight
            self._last = now
            self._in_flight += change
            return self._per_request_s


class Share:
    """One request's part."""

    def __init__(self, shared: SharedTime, begun: float) -> None:
        self._shared, self._begun = shared, begun
        self.share_s = 0.0
        """Seconds, once it has ended."""

    def end(self, _future: object = None) -> None:
        """The request is done; fits `Future.add_done_callback`."""
        self.share_s = self._shared._advance(-1) - self._begun
