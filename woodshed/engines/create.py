"""Engine of a recipe: weights in this process, servers, or a kind of the user's own."""

from __future__ import annotations

import inspect
from contextlib import ExitStack, closing
from typing import Annotated, Any

from pydantic import model_validator

from woodshed.engines.chat import ChatEngine
from woodshed.engines.engine import Engine, SamplerSettings
from woodshed.engines.http import EndpointSettings, HttpEngine
from woodshed.engines.router import Router
from woodshed.parts import Part, misfit
from woodshed.records import RecipeError
from woodshed.tokens.renderer import Renderer


def _local(settings: EngineSettings, renderer: Renderer, model: Any) -> Engine:
    from woodshed.engines.local import LocalEngine

    return LocalEngine(model, renderer, settings)


def _http(settings: EngineSettings, renderer: Renderer, model: Any = None) -> Engine:
    kind = ChatEngine if settings.kind == "chat" else HttpEngine
    with ExitStack() as stack:
        engines = [
            stack.enter_context(closing(kind(server, renderer, temperature=settings.temperature)))
            for server in settings.servers
        ]
        stack.pop_all()
    return engines[0] if len(engines) == 1 else Router(engines)


KIND = Part("engine", {"local": _local, "http": _http, "chat": _http})
"""Kinds of engines that a recipe may name, each a function of settings, renderer and model that opens one."""


class EngineSettings(SamplerSettings):
    """Settings of the engine that samples the policy's messages."""

    kind: Annotated[str, KIND] = "local"
    """local: the weights of the trainer or the evaluation, in this process; http: the `servers`, which take and return
    token ids; chat: `servers` that speak text only, for evaluations; or package.module:name of your own: a function
    (settings, renderer, model) that opens an `Engine`; with a default for `model`, an evaluation loads no weights for
    it."""
    servers: tuple[EndpointSettings, ...] = ()
    """Inference servers of the policy's model, as [[engine.servers]]; a message goes to the least busy one."""

    @model_validator(mode="after")
    def _has_servers(self) -> EngineSettings:
        if self.kind in ("http", "chat") and not self.servers:
            raise ValueError(f"kind = {self.kind!r} needs servers; add [[engine.servers]] with a url")
        if self.kind == "local" and self.servers:
            raise ValueError("kind = 'local' uses no servers; set kind = 'http' or leave them out")
        return self


def create(settings: EngineSettings, renderer: Renderer, model: Any = None) -> Engine:
    """Open the engine of the settings.

    Args:
        model: the transformers model in memory; None only if `needs_model` is False.

    Raises:
        RecipeError: a kind of the user's own that cannot be used.
        SamplerError: a server does not answer, or does not serve the model.
    """
    engine = KIND.resolve(settings.kind)(settings, renderer, model)
    if fault := misfit(engine, Engine):
        raise RecipeError(f"engine.kind = {settings.kind!r} opened a {type(engine).__name__}, which {fault}")
    return engine


def needs_model(settings: EngineSettings) -> bool:
    """True if the engine computes with weights of this process: its function cannot be called without a model.

    Raises:
        RecipeError: a kind of the user's own that cannot be used.
    """
    try:
        inspect.signature(KIND.resolve(settings.kind)).bind(settings, None)
    except TypeError:
        return True
    return False
