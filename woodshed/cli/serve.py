"""`woodshed serve`: a policy for editors and command lines, by the protocols that they speak."""

from __future__ import annotations

import json
import socket
import time
import uuid
from contextlib import closing
from typing import TYPE_CHECKING, Annotated

import typer

from woodshed import settings
from woodshed.cli.app import app, open_engine
from woodshed.cli.solve import Endpoint, Policy, settings_of
from woodshed.cli.terminal import say, tell
from woodshed.records import RecipeError, SamplerError

if TYPE_CHECKING:
    from woodshed.engines.engine import Engine
    from woodshed.gateway.recording import Recording

FOREVER_S = 1e9


@app.command()
def serve(
    overrides: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[MODEL] KEY=VALUE",
            help="--policy, and settings to change, such as engine.temperature=0.2.",
        ),
    ] = None,
    policy: Policy = "smollm2-135m",
    endpoint: Endpoint = "",
    engine: Annotated[
        str,
        typer.Option(metavar="local", help="Serve token ids to a training run instead, by vLLM's protocol."),
    ] = "",
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port; 0 takes a free one.")] = 4141,
) -> None:
    """Serve a policy to editors and agents on this machine.

    It answers OpenAI's chat completions and responses and Anthropic's messages, whole or streamed, in the language that
    the policy was trained in. Any key will do; nothing is kept. Ctrl-C ends it.

    With --engine local it serves a training run in another process, as a vLLM server does: token ids with log-probs,
    and weights that the run replaces. Its settings are temperature, max_rows, cache_mb, dtype and device.
    """
    named = [text for text in overrides or [] if "=" not in text]
    changed = [text for text in overrides or [] if "=" in text]
    policy = named[-1] if named else policy
    if engine:
        _serve_training(engine, policy, changed, port)
    else:
        _serve_agents(policy, endpoint, changed, port)


def _serve_training(engine: str, model: str, overrides: list[str], port: int) -> None:
    """Serve token ids until this process is told to end. Raises RecipeError for another engine than ours."""
    if engine != "local":
        raise RecipeError(f"--engine {engine}: only `local` is served; recipes start vLLM (engine.kind=vllm)")
    from woodshed.engines.local.server import LocalServer, ServerSettings

    chosen = settings.read(ServerSettings, None, [f"model={json.dumps(model)}", *overrides])
    try:
        listener = socket.create_server(("127.0.0.1", port))
    except OSError as error:
        raise SamplerError(f"port {port} cannot be used: {error.strerror}; take another one") from None
    with listener:
        server = LocalServer.load(chosen)
        say(f"http://127.0.0.1:{listener.getsockname()[1]}")
        server.run(listener)


def _serve_agents(policy: str, endpoint: str, overrides: list[str], port: int) -> None:
    """Serve messages until Ctrl-C."""
    from woodshed.gateway.server import MODEL, Gateway

    chosen = settings_of(policy, endpoint, overrides)
    try:
        with (
            closing(open_engine(chosen)) as engine,
            Gateway(engine, port=port, newcomer=lambda key: unlimited(engine, chosen.seed)) as gateway,
        ):
            say(f"OpenAI:    OPENAI_BASE_URL={gateway.url}/v1 OPENAI_API_KEY=any")
            say(f"Anthropic: ANTHROPIC_BASE_URL={gateway.url} ANTHROPIC_API_KEY=any")
            tell(f"the model is {MODEL!r}, {engine.context_length} tokens of context; Ctrl-C ends it")
            while True:
                time.sleep(3600)
    except KeyboardInterrupt:
        tell("\nended")


def unlimited(engine: Engine, seed: int) -> Recording:
    """The recording of a client without a quota."""
    from woodshed.gateway.recording import Quota, Recording

    most = engine.context_length
    quota = Quota(turns=1 << 60, turn_tokens=most, sampled_tokens=1 << 60, seconds=FOREVER_S)
    return Recording(uuid.uuid4().hex, engine.renderer, most, quota, seed=seed)
