"""Several engines as one: a message goes to the least busy engine, new weights go to all."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from threading import Lock
from typing import Literal

from woodshed.engines.engine import Engine, Sample, SampleRequest, WeightUpdate, check_fits
from woodshed.records import SamplerError

MOST_AHEAD = 8
"""Messages that the engine of a group may have more than the least busy one, before the group moves."""
MOST_HOMES = 4096


class Router:
    """Replicas of one model behind one `Engine`.

    Args:
        close: called after the engines were closed, such as to end their servers.
    """

    def __init__(self, engines: Sequence[Engine], close: Callable[[], None] = lambda: None) -> None:
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
        self._close = close
        self._lock = Lock()
        self._behind: set[int] = set()
        """Engines that did not take the newest weights, and get no messages."""
        self._homes: dict[str, int] = {}
        """Engine whose cache has the beginning of a group's prompts."""

    @property
    def policy_version(self) -> int:
        """The oldest version among the engines that get messages."""
        return min(engine.policy_version for i, engine in enumerate(self.engines) if i not in self._behind)

    def submit(self, request: SampleRequest) -> Future[Sample]:
        """See `Engine`."""
        with self._lock:
            index = self._choose(request.group)
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
        """See `Engine`. An engine that does not take them gets no messages until it takes later ones.

        Raises:
            SamplerError: none takes them.
        """

        def load(engine: Engine) -> SamplerError | None:
            try:
                engine.update_weights(update, version)
            except SamplerError as error:
                return error
            return None

        with ThreadPoolExecutor(len(self.engines)) as pool:
            errors = list(pool.map(load, self.engines))
        if all(errors):
            raise next(error for error in errors if error)
        with self._lock:
            self._behind = {i for i, error in enumerate(errors) if error}

    def flush(self) -> None:
        """See `Engine`."""
        for engine in self.engines:
            engine.flush()

    def close(self) -> None:
        """See `Engine`."""
        with ExitStack() as stack:
            stack.callback(self._close)
            for engine in self.engines:
                stack.callback(engine.close)

    def _choose(self, group: str) -> int:
        """The engine that a group's messages went to, unless it is much busier than others; else the least busy."""
        serving = [i for i in range(len(self.engines)) if i not in self._behind]
        least = min(serving, key=self.in_flight.__getitem__)
        home = self._homes.get(group, least)
        if home not in serving or self.in_flight[home] > self.in_flight[least] + MOST_AHEAD:
            home = least
        if group:
            self._homes[group] = home
            if len(self._homes) > MOST_HOMES:
                del self._homes[next(iter(self._homes))]
        return home
