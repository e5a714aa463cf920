"""Stand-in for an engine with which another process speaks."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future
from typing import Literal, NoReturn

from woodshed.engines.engine import Sample, SampleRequest, WeightUpdate
from woodshed.records import SamplerError
from woodshed.tokens.renderer import Renderer


class EngineElsewhere:
    """A trainer's stand-in for an engine while a collector samples: it renders, and samples nothing."""

    takes: Literal["shared", "folder"] = "folder"

    def __init__(self, renderer: Renderer, context_length: int) -> None:
        self.renderer = renderer
        self.policy_version = 0
        self.context_length = context_length
        self.description = {"name": "elsewhere"}

    def submit(self, request: SampleRequest) -> Future[Sample]:
        """See `Engine`.

        Raises:
            SamplerError: always.
        """
        self._refuse()

    def submit_all(self, requests: Sequence[SampleRequest]) -> list[Future[Sample]]:
        """See `submit`."""
        self._refuse()

    def update_weights(self, update: WeightUpdate, version: int) -> None:
        """See `submit`."""
        self._refuse()

    def flush(self) -> None:
        """See `Engine`."""

    def close(self) -> None:
        """See `Engine`."""

    def _refuse(self) -> NoReturn:
        raise SamplerError(
            "the collector speaks with the engine where rl.staleness is above 0; this stage needs one at hand: set "
            "rl.staleness=0, or leave the stage out"
        )
