"""An engine behind HTTP: OpenAI-compatible completions, token ids in and token ids out.

Any server will do that takes a list of token ids as `prompt` and answers with `token_ids` (vLLM's `return_token_ids`)
and one log-probability per token. A server that answers with text only is refused: text tokenised again is not what
was sampled.
"""

from __future__ import annotations

import os
import secrets
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from typing import Annotated, Any, Literal, cast

import httpx
from pydantic import AfterValidator, Field

from woodshed.engines.engine import Sample, SampleRequest, WeightUpdate, check_fits, exact
from woodshed.records import SamplerError
from woodshed.settings import Settings
from woodshed.tokens.renderer import Renderer


def address(url: str) -> str:
    """The address in front of /v1, where everybody else writes it with /v1 or with a slash.

    Raises:
        ValueError: no machine can have this address.
    """
    try:
        parsed = httpx.URL(url)
        parsed.host.encode("idna")
    except (httpx.InvalidURL, UnicodeError) as error:
        raise ValueError(f"no machine can have this address: {error}") from None
    if not 0 < (parsed.port or 80) < 1 << 16:
        raise ValueError(f"there is no port {parsed.port}")
    if parsed.userinfo:
        raise ValueError(
            "a name or password does not belong into an address; put the key into WOODSHED_API_KEY"
        )
    return url.rstrip("/").removesuffix("/v1").rstrip("/")


class EndpointSettings(Settings):
    """Address and limits of an inference server."""

    url: Annotated[str, AfterValidator(address)] = Field(
        default="http://127.0.0.1:8000", pattern=r"^https?://[^\s/]+"
    )
    """Address in front of /v1/completions, with http:// or https://; a /v1 at its end is left out."""
    model: str = ""
    """Name of the served model; empty takes the first that the server lists."""
    api_key_variable: str = Field(default="WOODSHED_API_KEY", pattern=r"^[A-Z][A-Z0-9_]*_API_KEY$")
    """Environment variable that holds the key, where the server wants one: NAME_API_KEY. Where WOODSHED_API_KEY is not
    set, OPENAI_API_KEY is taken. A key is sent to no other server than those that you name, with --endpoint or in
    WOODSHED_KEY_SERVERS: a recipe may be somebody else's."""


CONCURRENCY = 256
"""Requests in flight at the same time at one server. The recipe's `rollout.max_in_flight` asks for no more attempts."""
TIMEOUT_S = 600.0
"""Longest wait for one message."""
RETRIES = 5
"""More tries after a dropped connection, a 429 or a 5xx, with waits of 0.5, 1, 2, ... at most 8 seconds."""
OWN_KEY, USUAL_KEY = "WOODSHED_API_KEY", "OPENAI_API_KEY"
"""Environment variables of the key: ours, and the one that other programs read, which serves where ours is not set."""
KEY_SERVERS = "WOODSHED_KEY_SERVERS"
"""Environment variable that lists the servers, as HOST or HOST:PORT with commas, that a key may be sent to."""


def trust(url: str) -> None:
    """Let this process and those that it starts send a key to a server that the person named."""
    named = [name for name in os.environ.get(KEY_SERVERS, "").split(",") if name]
    os.environ[KEY_SERVERS] = ",".join(dict.fromkeys([*named, _server(url)]))


def _server(url: str) -> str:
    parsed = httpx.URL(url)
    return f"{parsed.host}:{parsed.port or {'http': 80, 'https': 443}.get(parsed.scheme, 0)}"


def key_variable(settings: EndpointSettings) -> str:
    """The environment variable that holds the server's key; the one that should, where none does."""
    variable = settings.api_key_variable
    is_unset = variable == OWN_KEY and not os.environ.get(OWN_KEY, "").strip()
    return USUAL_KEY if is_unset and os.environ.get(USUAL_KEY, "").strip() else variable


def authorization(settings: EndpointSettings) -> dict[str, str]:
    """The header with the key, for a server that the person named; nothing for others.

    Raises:
        SamplerError: the key is no text that a header can hold. The message does not show it.
    """
    variable = key_variable(settings)
    key, server = os.environ.get(variable, "").strip(), _server(settings.url)
    named = {name.strip().casefold() for name in os.environ.get(KEY_SERVERS, "").split(",")}
    if not key or not {server, server.rpartition(":")[0]} & named:
        return {}
    if not (key.isascii() and key.isprintable() and " " not in key):
        raise SamplerError(f"the key in {variable} holds a character that no key has; set it again")
    return {"Authorization": f"Bearer {key}"}


def without_key(settings: EndpointSettings, status: int) -> str:
    """Remedy for a server that wants a key, as the end of a sentence; "" for another status, or if it got one."""
    variable = key_variable(settings)
    if status not in (401, 403) or authorization(settings):
        return ""
    if not os.environ.get(variable, "").strip():
        other = f" or {USUAL_KEY}" if variable == OWN_KEY else ""
        return f". It wants a key: put it into the environment variable {variable}{other}"
    return (
        f". The key in {variable} was not sent, since only the recipe names this server: if you trust it, "
        f"`export {KEY_SERVERS}={_server(settings.url)}`"
    )


_WHOLE_DISTRIBUTION = {"top_p": 1.0, "top_k": -1, "min_p": 0.0, "repetition_penalty": 1.0}
"""Sent with every request: a server's own defaults (generation_config.json) may cut the distribution."""


_SWITCHES = {
    "/v1/load_lora_adapter": ". vLLM loads adapters with --enable-lora and VLLM_ALLOW_RUNTIME_LORA_UPDATING=1",
    "/pause": ". vLLM loads whole weights with VLLM_SERVER_DEV_MODE=1; else train an adapter (policy.lora_rank)",
}
"""Path to how a server is started that answers there."""


class HttpEngine:
    """Messages from a server, whose weights change through LoRA adapters or whole checkpoints that it loads."""

    takes: Literal["shared", "folder"] = "folder"

    def __init__(
        self,
        settings: EndpointSettings,
        renderer: Renderer,
        *,
        temperature: float = 1.0,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        """Ask the server what it serves.

        Raises:
            SamplerError: the server does not answer, or does not serve the model.
        """
        self.settings = settings
        self.renderer = renderer
        self.temperature = temperature
        self.policy_version = 0
        self._adapter = ""
        self._weights = (
            f"{secrets.token_hex(4)}-0"  # a server outlives runs, which count their versions alike
        )
        self._sleep = sleep
        self._pool = ThreadPoolExecutor(CONCURRENCY, thread_name_prefix="requests")
        self._client = httpx.Client(
            base_url=settings.url,
            headers=authorization(settings),
            follow_redirects=False,  # whoever is redirected to was not named
            timeout=httpx.Timeout(TIMEOUT_S, connect=10.0),
            limits=httpx.Limits(max_connections=CONCURRENCY),
        )
        try:
            self.model, self.context_length = self._served()
        except SamplerError:
            self.close()
            raise
        self.description = {
            "name": "http",
            "url": settings.url,
            "served": self.model,
            "version": self._version(),
        }

    def _version(self) -> str:
        """Version that the server reports (vLLM and SGLang do), or ""."""
        try:
            return str(self._client.get("/version").json()["version"])
        except (httpx.HTTPError, ValueError, KeyError, TypeError):
            return ""

    def _served(self) -> tuple[str, int]:
        """Name and context length of the model that was asked for."""
        answer = self._ask("GET", "/v1/models")
        try:
            served = {str(item["id"]): item for item in answer["data"]}
        except (KeyError, TypeError):
            raise SamplerError(
                f"{self.settings.url}/v1/models does not list models: {str(answer)[:200]}"
            ) from None
        model = self.settings.model or next(iter(served), "")
        if model not in served:
            raise SamplerError(f"{self.settings.url} serves {', '.join(served) or 'nothing'}, not {model!r}")
        return model, int(served[model].get("max_model_len") or 1 << 30)

    def submit(self, request: SampleRequest) -> Future[Sample]:
        """See `Engine`. The future raises SamplerError where the server fails for good or its answer is not
        token-exact."""
        return self.submit_all([request])[0]

    def submit_all(self, requests: Sequence[SampleRequest]) -> list[Future[Sample]]:
        """See `Engine`."""
        for request in requests:
            check_fits(request, self.context_length)
        return [self._pool.submit(self._one, request) for request in requests]

    def flush(self) -> None:
        """Nothing is kept on this side; the server's cache is the server's."""

    def update_weights(self, update: WeightUpdate, version: int) -> None:
        """See `Engine`. Every adapter has a name of its own, so that a message in the middle keeps its weights; the one
        before is unloaded when the next has taken its place. For whole weights the server is paused until the messages
        in the middle are done.

        Raises:
            SamplerError: the server refuses them, or shares no memory with the trainer (kind "shared").
        """
        if update.kind == "shared" or update.folder is None:
            raise SamplerError(
                f"{self.settings.url} computes with weights of its own; it needs a folder, not {update.kind!r}"
            )
        folder = str(update.folder.resolve())
        token, _, count = self._weights.partition("-")
        self._weights = f"{token}-{int(count) + 1}"
        if update.kind == "adapter":
            before, name = self._adapter, f"woodshed-{self._weights}"
            self._send("POST", "/v1/load_lora_adapter", {"lora_name": name, "lora_path": folder})
            self.model = self._adapter = name
            if before and before != name:
                self._send("POST", "/v1/unload_lora_adapter", {"lora_name": before})
        else:
            body = {"method": "reload_weights", "kwargs": {"weights_path": folder}}
            self._send("POST", "/pause?mode=wait&clear_cache=true")
            self._send("POST", "/collective_rpc", body)
            self._send("POST", "/resume")
        self.policy_version = version

    def chat(self, messages: Sequence[dict[str, Any]], tools: Sequence[dict[str, Any]]) -> dict[str, Any]:
        """The assistant's next message, greedily: its `content` and its `tool_calls`. For models that read.

        Raises:
            SamplerError: the server failed for good, or answered without a message.
        """
        body = {"model": self.model, "messages": list(messages), "tools": list(tools), "temperature": 0.0}
        answer = self._ask("POST", "/v1/chat/completions", body)
        try:
            message = answer["choices"][0]["message"]
            return {"content": message.get("content") or "", "tool_calls": message.get("tool_calls") or []}
        except (KeyError, IndexError, TypeError, AttributeError):
            raise SamplerError(
                f"{self.settings.url} answered without a message: {str(answer)[:200]}"
            ) from None

    def close(self) -> None:
        """See `Engine`."""
        self._pool.shutdown(wait=False, cancel_futures=True)
        self._client.close()

    def _one(self, request: SampleRequest) -> Sample:
        version = self.policy_version
        body = {
            "model": self.model,
            "prompt": list(request.prompt_ids),
            "max_tokens": request.max_tokens,
            "seed": request.seed % 2**63,
            "stop_token_ids": sorted(self.renderer.stop_ids),
            "logprobs": 1,
            "return_token_ids": True,
            "skip_special_tokens": False,
            "temperature": self.temperature,
            "cache_salt": self._weights,  # keys and values of older weights are never reused
            **_WHOLE_DISTRIBUTION,
        }
        answer = self._ask("POST", "/v1/completions", body)
        try:
            choice = answer["choices"][0]
        except (KeyError, IndexError, TypeError):
            raise SamplerError(
                f"{self.settings.url} answered without a choice: {str(answer)[:200]}"
            ) from None
        self._check_usage(answer.get("usage"), choice, request)
        return self._exact(choice, request, version)

    def _check_usage(self, usage: Any, choice: Any, request: SampleRequest) -> None:
        """Refuse a server whose own counts disagree with the tokens: it changed the prompt, or cut the answer."""
        counts = usage if isinstance(usage, dict) else {}
        ids = choice.get("token_ids") if isinstance(choice, dict) else None
        truth = {"prompt_tokens": len(request.prompt_ids), "completion_tokens": len(ids or ())}
        for name, number in truth.items():
            said = counts.get(name)
            if said is not None and said != number and ids:
                raise SamplerError(
                    f"{self.settings.url} counts {said} {name} where there are {number}. It adds or drops tokens (a "
                    "start token, a truncated prompt), so its log-probabilities belong to another text; serve the "
                    "model without that, or through an engine that takes token ids as they are"
                )

    def _exact(self, choice: dict[str, Any], request: SampleRequest, version: int) -> Sample:
        """Sample from the server's answer, or SamplerError where it is not token-exact."""
        ids = tuple(choice.get("token_ids") or ())
        logps = (choice.get("logprobs") or {}).get("token_logprobs") or ()
        sample = Sample(ids, tuple(logps), cast("Any", choice.get("finish_reason")), ((version, len(ids)),))
        sample = exact(sample, request.max_tokens, self.renderer.stop_ids, self.settings.url)
        return replace(sample, logps=tuple(min(0.0, float(logp)) for logp in logps))

    def _ask(self, method: str, path: str, body: dict[str, Any] | None = None) -> dict[str, Any]:
        """The server's JSON answer."""
        return self._json(self._send(method, path, body))

    def _send(self, method: str, path: str, body: dict[str, Any] | None = None) -> httpx.Response:
        """The server's answer in whatever form, after `RETRIES` more tries."""
        for attempt in range(RETRIES + 1):
            wait = min(0.5 * 2**attempt, 8.0)
            try:
                response = self._client.request(method, path, json=body)
            except httpx.RequestError as error:
                failure = f"{type(error).__name__}: {error}"
            else:
                if response.is_success:
                    return response
                failure = f"status {response.status_code}: {response.text[:300]}"
                if response.status_code != 429 and response.status_code < 500:
                    failure += without_key(self.settings, response.status_code)
                    failure += _SWITCHES.get(path.partition("?")[0], "")
                    raise SamplerError(f"{self.settings.url}{path} refused the request, {failure}")
                after = response.headers.get("retry-after", "")
                wait = min(float(after), 30.0) if after.isdecimal() else wait
            if attempt < RETRIES:
                self._sleep(wait)
        raise SamplerError(
            f"{self.settings.url}{path} failed {RETRIES + 1} times, last with {failure}; is it running?"
        )

    def _json(self, response: httpx.Response) -> dict[str, Any]:
        try:
            answer = response.json()
        except ValueError:
            answer = None
        if not isinstance(answer, dict):
            raise SamplerError(f"{response.url} did not answer with a JSON object: {response.text[:200]!r}")
        return answer


def chat_server(settings: EndpointSettings) -> HttpEngine:
    """A server that is asked for messages only (`chat`), which takes no renderer."""
    return HttpEngine(settings, cast("Renderer", None))
