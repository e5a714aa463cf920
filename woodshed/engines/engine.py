"""The engine protocol: token ids in, token ids out, with log-probs and the policy version of every token.

An engine completes requests in any order. It never sees text: the policy is trained on exactly the sampled tokens.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, Protocol

from pydantic import Field

from woodshed.records import RoutedExperts, SamplerError
from woodshed.settings import Settings
from woodshed.tokens.renderer import Renderer

Versions = tuple[tuple[int, int], ...]
"""Policy versions of a message's tokens, in order, as (version, number of tokens)."""


class SamplerSettings(Settings):
    """Settings of sampling. There is no top-p and no top-k: they would bias every log-probability."""

    temperature: float = Field(default=1.0, gt=0)
    """Divisor of the logits; log-probabilities are those of the tempered distribution."""
    max_rows: int = Field(default=32, ge=1)
    """Number of messages that the local engine samples at the same time; more are queued."""
    cache_mb: int = Field(default=2048, ge=0)
    """Limit in MiB for keys and values that the local engine keeps between requests; the least recently used sequences
    are dropped first."""


@dataclass(frozen=True)
class SampleRequest:
    """Request for one message."""

    prompt_ids: tuple[int, ...]
    max_tokens: int
    seed: int
    """Seed of this request's own random stream, so that its tokens do not depend on other rows of the batch."""
    group: str = ""
    """Requests of one group share the beginning of their prompts; "" for none."""


@dataclass(frozen=True)
class Sample:
    """One sampled message."""

    ids: tuple[int, ...]
    """With the stop token at the end when `finish_reason` is "stop"."""
    logps: tuple[float, ...]
    """Natural logarithm of the probability of each id, under the distribution that it was sampled from."""
    finish_reason: Literal["stop", "length"]
    versions: Versions
    """Versions of the weights that sampled it; the counts add up to len(ids)."""
    experts: RoutedExperts | None = None
    """The experts that were chosen for prompt and message, where the model has some and the engine tells them; the last
    token, which was not read, has none."""


@dataclass(frozen=True)
class WeightUpdate:
    """New weights of the policy for an engine."""

    kind: Literal["shared", "adapter", "full", "delta"]
    """"shared": the engine computes with the trainer's own module, which has changed; "adapter": a PEFT folder;
    "full": a Hugging Face folder; "delta": the difference to the version before, which `published.Receiver` turns into
    a Hugging Face folder."""
    folder: Path | None = None
    """Folder from which the engine reads them; None for "shared"."""


class Engine(Protocol):
    """A policy that samples messages."""

    renderer: Renderer
    context_length: int
    """Largest number of tokens of a prompt and its message together."""
    description: dict[str, str]
    """Name, version and device of the engine, for the run's manifest; "served" is the name of a served model."""
    takes: Literal["shared", "folder"]
    """Source of new weights: the trainer's own module, or a folder."""

    @property
    def policy_version(self) -> int:
        """Version of the weights that sample the next token."""
        ...

    def submit(self, request: SampleRequest) -> Future[Sample]:
        """Start a message. The future completes with this message, and may be cancelled until then.

        Raises:
            SamplerError: the request does not fit the context. Later errors are raised by the future.
        """
        ...

    def submit_all(self, requests: Sequence[SampleRequest]) -> list[Future[Sample]]:
        """Start messages together, in one batch if the numerics of the engine depend on the batch.

        Raises:
            SamplerError: as `submit`; none is started.
        """
        ...

    def update_weights(self, update: WeightUpdate, version: int) -> None:
        """Sample every later token with new weights. Caches of the old ones are cleared; unfinished messages continue.

        Raises:
            SamplerError, ModelError: the weights cannot be used.
        """
        ...

    def flush(self) -> None:
        """Clear all caches between requests, and free their memory."""
        ...

    def close(self) -> None:
        """Stop threads, close connections and cancel unfinished messages."""
        ...


def sample_all(engine: Engine, requests: Sequence[SampleRequest]) -> list[Sample]:
    """Messages in the order of their requests.

    Raises:
        SamplerError, ModelError: as the engine, or as `exact`.
    """
    futures = engine.submit_all(requests)
    source = engine.description.get("name", "the engine")
    try:
        return [
            exact(future.result(), request.max_tokens, engine.renderer.stop_ids, source)
            for request, future in zip(requests, futures, strict=True)
        ]
    finally:
        for future in futures:
            future.cancel()


ROUNDING = 1e-3
"""Largest log-probability that the rounding of an engine may give a sure token."""


def exact(sample: object, max_tokens: int, stop_ids: Collection[int], source: str) -> Sample:
    """The message, where it is token-exact: its ids and log-probs are those that were sampled.

    Args:
        source: the engine, for the message.

    Raises:
        SamplerError: no token ids, ids without log-probs or versions, or an end that is none.
    """
    if not isinstance(sample, Sample):
        raise SamplerError(f"{source} returned a {type(sample).__name__} in place of a Sample")
    ids, logps, reason = sample.ids, sample.logps, sample.finish_reason
    if not ids:
        raise SamplerError(
            f"{source} returned no token ids, and text cannot be trained on; a server must honour `return_token_ids` "
            "(vLLM 0.10.2 or newer does), or be evaluated as text with engine.kind = 'chat'"
        )
    if odd := [i for i in ids if type(i) is not int or i < 0]:
        raise SamplerError(f"{source} returned the token id {odd[0]!r}, which is no token id")
    if len(logps) != len(ids):
        raise SamplerError(f"{source} returned {len(ids)} tokens with {len(logps)} log-probabilities")
    if odd := [p for p in logps if type(p) not in (int, float) or not -math.inf < p <= ROUNDING]:
        raise SamplerError(f"{source} returned the log-probability {odd[0]} for a sampled token")
    if sum(count for _, count in sample.versions) != len(ids):
        raise SamplerError(f"{source} returned {len(ids)} tokens with versions {sample.versions!r}")
    if (
        reason not in ("stop", "length")
        or (reason == "stop") != (ids[-1] in stop_ids)
        or len(ids) > max_tokens
    ):
        raise SamplerError(
            f"{source} finished {len(ids)} of {max_tokens} tokens with {reason!r} and last token {ids[-1]}; a stopped "
            f"message must end with one of {sorted(stop_ids)}"
        )
    return sample


def check_fits(request: SampleRequest, context_length: int) -> None:
    """Refuse a request that an engine would silently truncate.

    Raises:
        SamplerError: an empty prompt, max_tokens below 1, or prompt and message longer than the context.
    """
    prompt, room = len(request.prompt_ids), request.max_tokens
    if not prompt or room < 1:
        raise SamplerError(f"a request needs a prompt and max_tokens >= 1, not {prompt} tokens and {room}")
    if prompt + room > context_length:
        raise SamplerError(
            f"prompt of {prompt} tokens + {room} to sample exceeds the context of {context_length}; "
            "lower the turn's token limit or end the attempt (context_full)"
        )
