"""Speech of a server, token ids or text only, found out before any work: text only is for evaluations.

One token is sampled for it.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import httpx

from woodshed.engines.http import EndpointSettings, authorization, without_key
from woodshed.records import SamplerError

TIMEOUT_S = 60.0
"""Longest wait for one token: a server may have to load its model first."""


@dataclass(frozen=True)
class Speech:
    """Models that a server lists, and the form of its messages."""

    served: tuple[str, ...]
    takes_token_ids: bool
    """It takes and returns token ids with log-probabilities: fit for training and evaluation."""
    takes_text: bool
    """It answers chat messages: fit for evaluation with engine.kind = "chat"."""
    refusal: str
    """The answer to token ids; "" where it took them."""


def listen(settings: EndpointSettings) -> Speech:
    """Ask a server for its models and for one token, in token ids or else in chat messages.

    Raises:
        SamplerError: it does not answer, lists no models, or wants a key.
    """
    headers = authorization(settings)
    with httpx.Client(base_url=settings.url, headers=headers, timeout=TIMEOUT_S) as client:
        served = _models(client, settings)
        model = settings.model or next(iter(served), "")
        exact = {"prompt": [1, 2], "max_tokens": 1, "logprobs": 1, "return_token_ids": True}
        choice, refusal = _first_choice(client, "/v1/completions", {"model": model, **exact})
        if choice.get("token_ids") and (choice.get("logprobs") or {}).get("token_logprobs"):
            return Speech(served, takes_token_ids=True, takes_text=True, refusal="")
        refusal = refusal or "it answered without token ids or without log-probabilities"
        chat = {"model": model, "messages": [{"role": "user", "content": "Say yes."}]}
        takes_text = any(
            "message" in _first_choice(client, "/v1/chat/completions", {**chat, limit: 16})[0]
            for limit in ("max_tokens", "max_completion_tokens")  # OpenAI's newer models know the second only
        )
    return Speech(served, takes_token_ids=False, takes_text=takes_text, refusal=refusal)


def refuse_text_only(servers: Iterable[EndpointSettings]) -> None:
    """Check that servers take and return token ids, before any work.

    Raises:
        SamplerError: one that does not. The message says what it lacks and how it can be evaluated.
    """
    for server in servers:
        speech = listen(server)
        if speech.takes_token_ids:
            continue
        if not speech.takes_text:
            raise SamplerError(f"{server.url} answers no message: {speech.refusal}")
        raise SamplerError(
            f"{server.url} speaks text only: it lacks token ids with log-probabilities ({speech.refusal}). Add "
            "engine.kind=chat to evaluate it, with --model naming a model that it serves "
            f"({', '.join(speech.served[:5]) or 'it lists none'}); to train, serve the weights with vLLM"
        )


def _models(client: httpx.Client, settings: EndpointSettings) -> tuple[str, ...]:
    try:
        response = client.get("/v1/models", timeout=10.0)
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        message = str(error).partition("\n")[0] or type(error).__name__
        raise SamplerError(f"{settings.url} does not answer: {message}") from None
    if not response.is_success:
        failure = f"status {response.status_code}{without_key(settings, response.status_code)}"
        raise SamplerError(f"{settings.url}/v1/models refused the request, {failure}")
    try:
        return tuple(str(model["id"]) for model in response.json()["data"])
    except (ValueError, KeyError, TypeError):
        raise SamplerError(f"{settings.url}/v1/models does not list models: {response.text[:200]}") from None


def _first_choice(client: httpx.Client, path: str, body: dict[str, Any]) -> tuple[dict[str, Any], str]:
    """The first choice of an answer, {} where there is none; and what the server said instead."""
    try:
        response = client.post(path, json=body)
    except httpx.HTTPError as error:
        return {}, f"{path}: {type(error).__name__} {error}".strip()
    try:
        choice = response.json()["choices"][0] if response.is_success else None
    except (ValueError, KeyError, IndexError, TypeError):
        choice = None
    said = f"{path} answered with status {response.status_code}: {response.text[:200]}"
    return (choice, "") if isinstance(choice, dict) else ({}, said)
