"""An engine that returns scripted messages, for scripted experts and tests."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from threading import Lock
from typing import Literal

from woodshed.engines.engine import Sample, SampleRequest, WeightUpdate, check_fits
from woodshed.records import SamplerError
from woodshed.tokens.renderer import Renderer


class ScriptedEngine:
    """Engine whose messages are given texts.

    The script is a list of messages, taken in the order of requests, or a function of the request. A scripted message
    has probability one, so its log-probabilities are zero.
    """

    takes: Literal["shared", "folder"] = "shared"

    def __init__(
        self,
        renderer: Renderer,
        script: Iterable[str] | Callable[[SampleRequest], str],
        *,
        context_length: int = 1 << 30,
    ) -> None:
        self.renderer = renderer
        self.policy_version = 0
        self.context_length = context_length
        self.description = {"name": "script"}
        self._script = script if callable(script) else _in_order(script)
        self._lock = Lock()

    def submit(self, request: SampleRequest) -> Future[Sample]:
        return self.submit_all([request])[0]

    def submit_all(self, requests: Sequence[SampleRequest]) -> list[Future[Sample]]:
        for request in requests:
            check_fits(request, self.context_length)
        futures = []
        for request in requests:
            future: Future[Sample] = Future()
            try:
                future.set_result(self._sample(request))
            except SamplerError as error:
                future.set_exception(error)
            futures.append(future)
        return futures

    def update_weights(self, update: WeightUpdate, version: int) -> None:
        self.policy_version = version

    def flush(self) -> None:
        pass

    def close(self) -> None:
        pass

    def _sample(self, request: SampleRequest) -> Sample:
        with self._lock:
            whole = self.renderer.encode_message(self._script(request))
        ids = whole[: request.max_tokens]
        reason = "stop" if len(ids) == len(whole) else "length"
        return Sample(ids, (0.0,) * len(ids), reason, ((self.policy_version, len(ids)),))


def _in_order(texts: Iterable[str]) -> Callable[[SampleRequest], str]:
    remaining = iter(texts)
    count = 0

    def following(request: SampleRequest) -> str:
        nonlocal count
        for text in remaining:
            count += 1
            return text
        raise SamplerError(f"the script has {count} messages and one more was requested")

    return following
