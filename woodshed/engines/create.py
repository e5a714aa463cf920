"""Engine of a recipe: weights in this process, servers, or a kind of the user's own."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Annotated, Any

from pydantic import NonNegativeInt, model_validator

from woodshed.engines.chat import ChatEngine
from woodshed.engines.engine import Engine, SamplerSettings
from woodshed.engines.http import EndpointSettings, HttpEngine, receiver_for
from woodshed.engines.router import Router
from woodshed.engines.servers import START_S, ServedModel, StartSettings, serving
from woodshed.parts import Part, misfit
from woodshed.records import RecipeError
from woodshed.tokens.renderer import Renderer


def _local(settings: EngineSettings, renderer: Renderer, model: Any) -> Engine:
    from woodshed.engines.local import LocalEngine

    return LocalEngine(model, renderer, settings)


def _http(settings: EngineSettings, renderer: Renderer, model: Any = None) -> Engine:
    return connect(settings.servers, renderer, settings)


def _started(settings: EngineSettings, renderer: Renderer, model: Any = None) -> Engine:
    raise RecipeError(
        f"engine.kind = {settings.kind!r} starts servers for a run or an evaluation, and this is neither"
    )


KIND = Part("engine", {"local": _local, "process": _started, "vllm": _started, "http": _http, "chat": _http})
"""Kinds of engines that a recipe may name, each a function of settings, renderer and model that opens one."""


class EngineSettings(SamplerSettings):
    """Settings of the engine that samples the policy's messages."""

    kind: Annotated[str, KIND] = "local"
    """local: the weights of the trainer or the evaluation, in this process; process: the same engine in a process of
    its own; vllm: vLLM servers that are started here (`woodshed doctor` says if they can be); http: the `servers`,
    which take and return token ids; chat: `servers` that speak text only, for evaluations; or package.module:name of
    your own: a function (settings, renderer, model) that opens an `Engine`; with a default for `model`, an evaluation
    loads no weights for it."""
    gpus: tuple[NonNegativeInt, ...] = ()
    """GPUs of vllm and process, a server on each; empty: one server, on the first GPU where there is one."""
    arguments: tuple[str, ...] = ()
    """More arguments of the command that starts a server, such as "--max-model-len=16384" for vllm."""
    servers: tuple[EndpointSettings, ...] = ()
    """Inference servers of the policy's model, as [[engine.servers]]; a message goes to the least busy one."""

    @model_validator(mode="after")
    def _has_servers(self) -> EngineSettings:
        if self.kind in ("http", "chat") and not self.servers:
            raise ValueError(f"kind = {self.kind!r} needs servers; add [[engine.servers]] with a url")
        if self.kind in ("local", "process", "vllm") and self.servers:
            raise ValueError(
                f"kind = {self.kind!r} uses no servers of others; set kind = 'http' or leave them out"
            )
        if self.kind not in ("process", "vllm") and (self.gpus or self.arguments):
            raise ValueError(
                f"kind = {self.kind!r} starts no servers; gpus and arguments are for vllm and process"
            )
        if len(set(self.gpus)) < len(self.gpus):
            raise ValueError(f"gpus = {list(self.gpus)} names a GPU twice; a server takes one of its own")
        return self


def starts_servers(settings: EngineSettings) -> bool:
    """True if the engine consists of servers that are started for it (`servers.serving`)."""
    return KIND.resolve(settings.kind) is _started


def start_settings(settings: EngineSettings) -> StartSettings:
    return StartSettings(settings.kind, settings, settings.gpus, settings.arguments)


def create(
    settings: EngineSettings,
    renderer: Renderer,
    model: Any = None,
    served: ServedModel | None = None,
    folder: Path | None = None,
) -> Engine:
    """Open the engine of the settings.

    Args:
        model: the transformers model in memory; None only if `needs_model` is False.
        served, folder: what servers serve that are started here, and where their logs and states go.

    Raises:
        RecipeError: a kind of the user's own that cannot be used.
        SamplerError: a server does not start or answer, or does not serve the model.
    """
    if starts_servers(settings) and served is not None and folder is not None:
        with ExitStack() as stack:
            endpoints = stack.enter_context(serving(start_settings(settings), served, folder))
            return connect(endpoints, renderer, settings, START_S, stack.pop_all().close)
    engine = KIND.resolve(settings.kind)(settings, renderer, model)
    if fault := misfit(engine, Engine):
        raise RecipeError(f"engine.kind = {settings.kind!r} opened a {type(engine).__name__}, which {fault}")
    return engine


def connect(
    servers: Sequence[EndpointSettings],
    renderer: Renderer,
    settings: EngineSettings,
    patience_s: float = 0.0,
    close: Callable[[], None] | None = None,
) -> Engine:
    """Connect to servers that are running.

    Args:
        patience_s: time in which a server that died comes back, where somebody starts it again.
        close: called after the engine was closed.

    Raises:
        SamplerError: one does not answer, or does not serve the model.
    """
    with ExitStack() as stack:
        if close is not None:
            stack.callback(close)
        receiver = receiver_for(servers)
        options: dict[str, Any] = {"temperature": settings.temperature}
        if settings.kind != "chat":
            options |= {"receiver": receiver, "patience_s": patience_s}
        kind = ChatEngine if settings.kind == "chat" else HttpEngine
        engines = [stack.enter_context(closing(kind(each, renderer, **options))) for each in servers]
        stack.pop_all()
    return engines[0] if len(engines) == 1 and close is None else Router(engines, close or (lambda: None))


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
