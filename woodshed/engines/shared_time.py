"""Busy time of an engine, divided among its requests."""

from __future__ import annotations

import time
from collections.abc import Callable
from threading import Lock


class SharedTime:
    """Divides time evenly among the requests in flight; the shares add up to the time with at least one request."""

    def __init__(self, now: Callable[[], float] = time.perf_counter) -> None:
        self._now, self._lock = now, Lock()
        self._in_flight = 0
        self._last = 0.0
        self._per_request_s = 0.0
        """Integral of 1 / requests in flight."""

    def begin(self) -> Share:
        """Start the share of a request."""
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
    """Share of one request."""

    def __init__(self, shared: SharedTime, begun: float) -> None:
        self._shared, self._begun = shared, begun
        self.share_s = 0.0
        """Seconds; set by `end`."""

    def end(self, _future: object = None) -> None:
        """End the share; can be passed to `Future.add_done_callback`."""
        self.share_s = self._shared._advance(-1) - self._begun
