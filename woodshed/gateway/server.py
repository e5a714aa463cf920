"""The gateway: an HTTP server before an engine, with a key for every attempt.

It speaks OpenAI's chat completions and responses and Anthropic's messages, whole or streamed, over a loopback port and
a unix socket. One thread with an event loop serves everybody: it renders, records and parses, so that the tokenizer
works on one thread only, and awaits the engine's futures. Temperature and the like are the engine's, whatever an agent
asks: log-probs are those of the distribution that training knows.
"""

from __future__ import annotations

import asyncio
import secrets
import socket
import tempfile
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import orjson
import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route

from woodshed.engines.engine import Engine, exact
from woodshed.gateway import anthropic, openai_chat, openai_responses
from woodshed.gateway.conversation import AgentRequest, RefusedError, Reply, event, table
from woodshed.gateway.recording import PendingCall, Recording
from woodshed.records import SamplerError, WoodshedError

PING_S = 10.0
"""Seconds after which a stream that waits for the policy says so, since clients give up on silent ones."""
MOST_BYTES = 64 << 20
"""Size of the largest request."""
START_S = 30.0
NEWCOMER_TURNS = 1000
"""Turns after which a client that nobody admitted is forgotten, so that memory is bounded; its next call is rendered
anew."""
MODEL = "policy"
"""Name of the model that is served."""


@dataclass(frozen=True)
class Protocol:
    """One of the protocols that agents speak."""

    read: Callable[[dict[str, Any]], AgentRequest]
    answer: Callable[[Reply, str], dict[str, Any]]
    events: Callable[[Reply, str], Iterator[str]]
    failure: Callable[[RefusedError], dict[str, Any]]
    ping: str


OPENAI = openai_chat.failure
PROTOCOLS = {
    openai_chat.PATH: Protocol(
        openai_chat.read, openai_chat.answer, openai_chat.events, OPENAI, ": waiting\n\n"
    ),
    openai_responses.PATH: Protocol(
        openai_responses.read, openai_responses.answer, openai_responses.events, OPENAI, ": waiting\n\n"
    ),
    anthropic.PATH: Protocol(
        anthropic.read,
        anthropic.answer,
        anthropic.events,
        anthropic.failure,
        'event: ping\ndata: {"type": "ping"}\n\n',
    ),
}


class Gateway:
    """A running gateway. Leaving it stops the server; calls under way are broken off."""

    def __init__(
        self,
        engine: Engine,
        *,
        host: str = "127.0.0.1",
        port: int = 0,
        newcomer: Callable[[str], Recording] | None = None,
    ) -> None:
        """Serve an engine.

        Args:
            port: 0 for any free one.
            newcomer: makes the recording of a key that nobody admitted; without it, only admitted keys are served.

        Raises:
            SamplerError: the port is taken.
        """
        self.engine = engine
        self.host = host
        self._newcomer = newcomer
        self._recordings: dict[str, Recording] = {}
        try:
            self._listener = socket.create_server((host, port))
        except OSError as error:
            raise SamplerError(
                f"the gateway cannot listen at {host}:{port}: {error.strerror}; take another port"
            ) from None
        # asyncio does this for sockets of IPPROTO_TCP only; a reply's head and body would come 40 ms apart
        self._listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.port = int(self._listener.getsockname()[1])
        self._folder = tempfile.TemporaryDirectory(prefix="woodshed-gateway-")
        self.socket = Path(self._folder.name, "gateway.sock")
        self._unix = socket.socket(socket.AF_UNIX)
        self._unix.bind(str(self.socket))
        self.socket.chmod(0o666)  # its folder is ours alone
        try:
            self._server = self._start()
        except BaseException:
            self._release()
            raise

    @property
    def url(self) -> str:
        """The address, without /v1."""
        return f"http://{self.host}:{self.port}"

    @property
    def folder(self) -> Path:
        """Folder of the unix socket, to be shown in sandboxes."""
        return self.socket.parent

    def admit(self, recording: Recording, key: str = "") -> str:
        """Let an attempt in: the key that its agent sends."""
        key = key or f"ws-{secrets.token_urlsafe(24)}"
        self._recordings[key] = recording
        return key

    def dismiss(self, key: str) -> None:
        """End an attempt; calls under its key are refused from now on."""
        self._recordings.pop(key, None)

    def close(self) -> None:
        """Stop the server."""
        self._server.should_exit = self._server.force_exit = True
        self._thread.join(START_S)
        self._release()

    def _release(self) -> None:
        """Close the sockets."""
        self._listener.close()
        self._unix.close()
        self._folder.cleanup()

    def __enter__(self) -> Gateway:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # --- the server's thread --------------------------------------------------------------------------------------

    def _start(self) -> Any:
        """Start the server, and wait until it listens."""
        routes = [Route(path, self._call, methods=["POST"]) for path in PROTOCOLS]
        routes.append(Route(anthropic.COUNT_PATH, self._count, methods=["POST"]))
        routes.append(Route("/v1/models", self._models))
        options: dict[str, Any] = {"log_config": None, "access_log": False, "lifespan": "off"}
        server = uvicorn.Server(
            uvicorn.Config(Starlette(routes=routes), timeout_graceful_shutdown=1, **options)
        )

        def serve() -> None:
            with asyncio.Runner() as runner:
                runner.run(server.serve(sockets=[self._listener, self._unix]))

        self._thread = threading.Thread(target=serve, name="gateway", daemon=True)
        self._thread.start()
        deadline = time.monotonic() + START_S
        while not server.started:
            if not self._thread.is_alive() or time.monotonic() > deadline:
                raise SamplerError("the gateway's server does not start")
            time.sleep(0.005)
        return server

    async def _call(self, request: Request) -> Response:
        """Answer a model call."""
        protocol = PROTOCOLS[request.url.path]
        try:
            recording, asked = self._recording(request), protocol.read(await _body(request))
            pending = recording.prepare(asked)
        except RefusedError as error:
            return _json(protocol.failure(error), error.status)
        except WoodshedError as error:  # a template that takes no such message
            return _json(protocol.failure(RefusedError(str(error))), 400)
        sampling = asyncio.ensure_future(self._sample(recording, pending))
        if asked.streams:
            stream = _stream(sampling, protocol, asked.model)
            return StreamingResponse(
                stream, media_type="text/event-stream", headers={"cache-control": "no-cache"}
            )
        gone = asyncio.ensure_future(_disconnected(request))
        await asyncio.wait((sampling, gone), return_when=asyncio.FIRST_COMPLETED)
        gone.cancel()
        if not sampling.done():
            sampling.cancel()
            return Response(status_code=499)
        try:
            return _json(protocol.answer(sampling.result(), asked.model))
        except WoodshedError as error:
            return _json(protocol.failure(_failed(error)), 500)

    async def _sample(self, recording: Recording, pending: PendingCall) -> Reply:
        """Sample and record a message. Raises WoodshedError, which the recording keeps."""
        engine = self.engine
        try:
            sample = await asyncio.wrap_future(engine.submit(pending.sample_request))
            source = engine.description.get("name", "the engine")
            exact(sample, pending.sample_request.max_tokens, engine.renderer.stop_ids, source)
            return recording.record(pending, sample)
        except WoodshedError as error:
            recording.failure = error
            raise
        finally:
            recording.release(pending)

    async def _count(self, request: Request) -> Response:
        """Count the tokens of a prompt (Anthropic's protocol)."""
        try:
            number = self._recording(request).count(anthropic.read(await _body(request)))
        except RefusedError as error:
            return _json(anthropic.failure(error), error.status)
        except WoodshedError as error:
            return _json(anthropic.failure(RefusedError(str(error))), 400)
        return _json({"input_tokens": number})

    async def _models(self, request: Request) -> Response:
        """The one model that is served, by whatever name agents call it."""
        model = {"id": MODEL, "object": "model", "created": 0, "owned_by": "woodshed"}
        return _json({"object": "list", "data": [model | {"max_model_len": self.engine.context_length}]})

    def _recording(self, request: Request) -> Recording:
        """The attempt that a request's key names. Raises RefusedError."""
        scheme, _, token = request.headers.get("authorization", "").partition(" ")
        key = token.strip() if scheme.lower() == "bearer" else request.headers.get("x-api-key", "")
        known = self._recordings.get(key)
        if self._newcomer is not None and (known is None or len(known.turns) >= NEWCOMER_TURNS):
            known = self._recordings[key] = self._newcomer(key)
        if known is None:
            raise RefusedError("no attempt has this key, or it has ended", status=401, code="invalid_api_key")
        return known


async def _body(request: Request) -> dict[str, Any]:
    """The JSON object of a request. Raises RefusedError."""
    data = bytearray()
    async for piece in request.stream():
        data += piece
        if len(data) > MOST_BYTES:
            raise RefusedError(f"the request has more than {MOST_BYTES >> 20} MB", status=413)
    try:
        return table(orjson.loads(data), "the request")
    except orjson.JSONDecodeError as error:
        raise RefusedError(f"the request is not JSON: {error}") from None


async def _disconnected(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


async def _stream(sampling: asyncio.Future[Reply], protocol: Protocol, model: str) -> AsyncIterator[str]:
    """The reply's events, after signs of life while it is sampled. An agent that goes away ends the sampling."""
    try:
        while not (await asyncio.wait((sampling,), timeout=PING_S))[0]:
            yield protocol.ping
        for text in protocol.events(sampling.result(), model):
            yield text
    except WoodshedError as error:
        yield event(protocol.failure(_failed(error)), "error")
    finally:
        sampling.cancel()


def _failed(error: WoodshedError) -> RefusedError:
    return RefusedError(f"the policy did not answer: {error}", status=500, code="api_error")


def _json(data: dict[str, Any], status: int = 200) -> Response:
    return Response(orjson.dumps(data), status, media_type="application/json")
