"""Samplers: who draws the next tokens of a batch of prompts.

Every sampler takes token ids and gives token ids with the log-probability of each under the exact distribution it was
drawn from, tagged with the version of the weights. Text never enters: what was sampled is what is trained on.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol

from pydantic import Field

from woodshed.records import SamplerError
from woodshed.settings import Settings
from woodshed.tokens.renderer import Renderer


class SamplerSettings(Settings):
    """How the local sampler draws. There is no top-p and no top-k: they would bias every log-probability."""

    temperature: float = Field(default=1.0, gt=0)
    """Divides the logits; log-probabilities are those of the tempered distribution."""
    max_rows: int = Field(default=32, ge=1)
    """Messages written at the same time; more are queued."""
    cache_mb: int = Field(default=2048, ge=0)
    """Bound on keys and values kept between calls, in MiB; the least recently used sequences go first."""


@dataclass(frozen=True)
class SampleRequest:
    """One message to be written."""

    prompt_ids: tuple[int, ...]
    max_tokens: int
    seed: int
    """Seed of this request's own random stream: what it draws does not depend on its neighbours in the batch."""


@dataclass(frozen=True)
class Sample:
    """One message as it was written."""

    ids: tuple[int, ...]
    """With the stop token at the end when `finish_reason` is "stop"."""
    logps: tuple[float, ...]
    """Natural-log probability of each id under the distribution it was drawn from."""
    finish_reason: Literal["stop", "length"]
    policy_version: int


class Sampler(Protocol):
    """Draws messages from a policy."""

    renderer: Renderer
    policy_version: int
    context_length: int
    """Most tokens that a prompt and its message may have together."""
    engine: dict[str, str]
    """What computes the tokens, for the run's manifest; "served" names a model behind an endpoint."""

    def sample(self, requests: Sequence[SampleRequest]) -> list[Sample]:
        """One sample per request, in order.

        Raises:
            SamplerError: the engine failed, or a prompt does not fit its context.
        """
        ...

    def load(self, policy: Any, version: int) -> None:
        """The weights changed: drop everything cached under the old ones, tag new samples with `version`.

        `policy` is the new model, or None where the sampler already shares it with the trainer.
        """
        ...

    def flush(self) -> None:
        """Forget what was computed here, so that what follows does not depend on it, to the last bit."""
        ...


class ScriptedSampler:
    """Texts in, exact tokens out: oracle attempts and tests.

    The script is a list of messages, taken in request order, or a function of the request. A scripted message has
    probability one, so its log-probabilities are zero.
    """

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
        self.engine = {"name": "script"}
        self._script = script if callable(script) else self._in_order(script)

    @staticmethod
    def _in_order(texts: Iterable[str]) -> Callable[[SampleRequest], str]:
        remaining = iter(texts)
        count = 0

        def following(request: SampleRequest) -> str:
            nonlocal count
            for text in remaining:
                count += 1
                return text
            raise SamplerError(f"the script has {count} messages and one more was asked for")

        return following

    def sample(self, requests: Sequence[SampleRequest]) -> list[Sample]:
        samples = []
        for request in requests:
            check_fits(request, self.context_length)
            whole = self.renderer.encode_message(self._script(request))
            ids = whole[: request.max_tokens]
            samples.append(
                Sample(
                    ids,
                    (0.0,) * len(ids),
                    "stop" if len(ids) == len(whole) else "length",
                    self.policy_version,
                )
            )
        return samples

    def load(self, policy: Any, version: int) -> None:
        self.policy_version = version

    def flush(self) -> None:
        pass


def check_fits(request: SampleRequest, context_length: int) -> None:
    """Refuse what an engine would silently truncate.

    Raises:
        SamplerError: an empty prompt, no room to write, or prompt and message longer than the context.
    """
    prompt, room = len(request.prompt_ids), request.max_tokens
    if not prompt or room < 1:
        raise SamplerError(f"a request needs a prompt and max_tokens >= 1, not {prompt} tokens and {room}")
    if prompt + room > context_length:
        raise SamplerError(
            f"prompt of {prompt} tokens + {room} to be written exceeds the context of {context_length}; "
            "lower the turn's token limit or end the attempt (context_full)"
        )
