"""Several engines as one: a message goes to the least busy engine, new weights go to all."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future
from threading import Lock
from typing import Literal

from woodshed.engines.engine import Engine, Sample, SampleRequest, WeightUpdate, check_fits
from woodshed.records import SamplerError


class Router:
    """Replicas of one model behind one `Engine`."""

    def __init__(self, engines: Sequence[Engine]) -> None:
        """Combine one or more engines.

        Raises:
            SamplerError: the engines receive new weights in different ways.
        """
        first = engines[0]
        self.engines = tuple(engines)
        self.renderer = first.renderer
        self.takes: Literal["shared", "folder"] = first.takes
        if any(engine.takes != self.takes for engine in engines):
            raise SamplerError("some engines share the trainer's weights and some read folders; use one kind")
        self.context_length = min(engine.context_length for engine in engines)
        self.description = first.description | {"replicas": str(len(engines))}
        self.in_flight = [0] * len(engines)
        """Number of unfinished messages of each engine."""
        self._lock = Lock()

    @property
    def policy_version(self) -> int:
        """The oldest version among the engines."""
        return min(engine.policy_version for engine in self.engines)

    def submit(self, request: SampleRequest) -> Future[Sample]:
        """See `Engine`."""
        with self._lock:
            index = min(range(len(self.engines)), key=self.in_flight.__getitem__)
            self.in_flight[index] += 1

        def done(_future: object = None) -> None:
            with self._lock:
                self.in_flight[index] -= 1

        try:
            future = self.engines[index].submit(request)
        except BaseException:
            done()
            raise
        future.add_done_callback(done)
        return future

    def submit_all(self, requests: Sequence[SampleRequest]) -> list[Future[Sample]]:
        """See `Engine`."""
        for request in requests:
            check_fits(request, self.context_length)
        return [self.submit(request) for request in requests]

    def update_weights(self, update: WeightUpdate, version: int) -> None:
        """See `Engine`. One engine after the other, so that the others keep sampling."""
        for engine in self.engines:
            engine.update_weights(update, version)

    def flush(self) -> None:
        """See `Engine`."""
        for engine in self.engines:
            engine.flush()

    def close(self) -> None:
        """See `Engine`."""
        for engine in self.engines:
            engine.close()
