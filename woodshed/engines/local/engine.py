"""An engine in this process, which may share the model with the trainer.

One thread uses the model. It admits requests between any two tokens and ends when there is none left.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from threading import Lock
from typing import Any, Literal

import torch
import transformers

from woodshed.engines.engine import Sample, SampleRequest, SamplerSettings, WeightUpdate, check_fits
from woodshed.engines.local.scheduler import BatchRow, Scheduler
from woodshed.records import ModelError
from woodshed.tokens.renderer import Renderer


class LocalEngine:
    """Engine that samples from a transformers model in this process."""

    takes: Literal["shared", "folder"] = "shared"

    def __init__(
        self,
        model: Any,
        renderer: Renderer,
        settings: SamplerSettings | None = None,
        *,
        tells_experts: bool = False,
    ) -> None:
        """Use a loaded model.

        Args:
            tells_experts: let samples of a mixture of experts say which experts their tokens went to.

        Raises:
            ModelError: the model caches other states than keys and values.
        """
        config = model.config.get_text_config()
        kinds = set(getattr(config, "layer_types", None) or ())
        if unsupported := sorted(kinds - {"full_attention", "sliding_attention"}):
            raise ModelError(
                f"the local engine keeps keys and values only, and {config.model_type} has {', '.join(unsupported)} "
                "layers; "
                "serve it with vLLM and sample through its endpoint"
            )
        self.settings = settings or SamplerSettings()
        self.renderer = renderer
        self.scheduler = Scheduler(model, renderer, self.settings, tells_experts=tells_experts)
        self.context_length = self.scheduler.context_length
        self.description = {
            "name": "transformers",
            "version": transformers.__version__,
            "torch": torch.__version__,
            "device": self.scheduler.device.type,
            "dtype": str(model.dtype).removeprefix("torch."),
        }
        self._arrived: deque[list[BatchRow] | Callable[[], None]] = deque()
        self._lock = Lock()
        self._is_working = False
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="engine")

    @property
    def model(self) -> Any:
        return self.scheduler.model

    @property
    def policy_version(self) -> int:
        return self.scheduler.version

    def submit(self, request: SampleRequest) -> Future[Sample]:
        """See `Engine`."""
        return self.submit_all([request])[0]

    def submit_all(self, requests: Sequence[SampleRequest]) -> list[Future[Sample]]:
        """See `Engine`. The requests are in one batch if they fit into it."""
        for request in requests:
            check_fits(request, self.context_length)
        stop_ids = frozenset(self.renderer.stop_ids)
        rows = [BatchRow(request, stop_ids) for request in requests]
        if rows:
            self._hand_over(rows)
        return [row.future for row in rows]

    def update_weights(self, update: WeightUpdate, version: int) -> None:
        """See `Engine`. Only updates of kind "shared" are possible, since the engine uses the trainer's model.

        Raises:
            ModelError: weights in a folder.
        """
        if update.kind != "shared":
            raise ModelError(
                f"the local engine computes with the trainer's own model and cannot read {update.kind} weights from "
                f"{update.folder}; serve them with vLLM (engine.kind = 'http')"
            )
        self._between_tokens(lambda: self.scheduler.restart(self.model, version))

    def flush(self) -> None:
        """See `Engine`."""
        self._between_tokens(self.scheduler.flush)

    def close(self) -> None:
        """See `Engine`."""
        self._between_tokens(lambda: _cancel(self.scheduler.abandon()))
        self._thread.shutdown()

    def _between_tokens(self, act: Callable[[], None]) -> None:
        """Call a function on the engine's thread, between two tokens, and wait for it."""
        done: Future[None] = Future()

        def run() -> None:
            try:
                act()
                done.set_result(None)
            except BaseException as error:
                done.set_exception(error)

        self._hand_over(run)
        done.result()

    def _hand_over(self, arrival: list[BatchRow] | Callable[[], None]) -> None:
        with self._lock:
            self._arrived.append(arrival)
            if not self._is_working:
                self._is_working = True
                self._thread.submit(self._work)

    def _work(self) -> None:
        """Sample until no request is left."""
        while True:
            with self._lock:
                if not self._arrived and self.scheduler.is_idle:
                    self._is_working = False
                    return
                calls = []
                while self._arrived and callable(self._arrived[0]):
                    calls.append(self._arrived.popleft())
            for call in calls:
                call()
            try:
                with self.scheduler.stepping():
                    while self._admits():
                        for row in self.scheduler.step():
                            if row.future.set_running_or_notify_cancel():
                                row.future.set_result(row.sample())
            except BaseException as error:
                for row in self.scheduler.abandon():
                    if row.future.set_running_or_notify_cancel():
                        row.future.set_exception(error)

    def _admits(self) -> bool:
        """Queue new requests; False if there is nothing to sample, or a call comes first."""
        with self._lock:
            while self._arrived:
                arrival = self._arrived[0]
                if callable(arrival):
                    return False
                self.scheduler.add(arrival)
                self._arrived.popleft()
            return not self.scheduler.is_idle


def _cancel(rows: Sequence[BatchRow]) -> None:
    for row in rows:
        row.future.cancel()
