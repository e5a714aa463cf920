"""An engine behind HTTP: OpenAI-compatible completions, token ids in and token ids out.

Any server will do that takes a list of token ids as `prompt` and answers with `token_ids` (vLLM's `return_token_ids`)
and one log-probability per token. A server that answers with text only is refused: text tokenised again is not what
was sampled.
"""

from __future__ import annotations

import hashlib
import os
import re
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from itertools import count
from typing import Annotated, Any, Literal, TypeVar, cast

import httpx
from pydantic import AfterValidator, Field

from woodshed.engines import expert_log
from woodshed.engines.engine import Sample, SampleRequest, Versions, WeightUpdate, check_fits, exact
from woodshed.engines.published import Receiver
from woodshed.engines.server_weights import Sampling, ServerWeights
from woodshed.records import RoutedExperts, SamplerError
from woodshed.settings import Settings
from woodshed.tokens.renderer import Renderer


def address(url: str) -> str:
    """The address in front of /v1, where everybody else writes it with /v1 or with a slash.

    Raises:
        ValueError: no machine can have this address.
    """
    if not re.match(r"https?://[^\s/]", url):
        raise ValueError("give an address with http:// or https:// in front, such as http://127.0.0.1:8000")
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

    url: Annotated[str, AfterValidator(address)] = "http://127.0.0.1:8000"
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


T = TypeVar("T")


class PassingError(Exception):
    """A failure of a server after which it is asked again."""

    def __init__(self, text: str, wait_s: float = 0.0) -> None:
        super().__init__(text)
        self.wait_s = wait_s
        """Wait that the server asks for; 0 where it does not say."""


class HttpEngine:
    """Messages from a server, whose weights change through LoRA adapters or whole checkpoints that it loads."""

    takes: Literal["shared", "folder"] = "folder"

    def __init__(
        self,
        settings: EndpointSettings,
        renderer: Renderer,
        *,
        temperature: float = 1.0,
        receiver: Receiver | None = None,
        patience_s: float = 0.0,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        """Ask the server what it serves.

        Args:
            receiver: of whole weights, where several servers load the same; by default one of its own.
            patience_s: time in which a server that died comes back, where somebody starts it again.

        Raises:
            SamplerError: the server does not answer, or does not serve the model.
        """
        self.settings = settings
        self.renderer = renderer
        self.temperature = temperature
        self._receiver = receiver or receiver_for([settings])
        self._patience_s = patience_s
        self._sleep = sleep
        self._pool = ThreadPoolExecutor(CONCURRENCY, thread_name_prefix="requests")
        self._client = httpx.Client(
            base_url=settings.url,
            headers=authorization(settings),
            follow_redirects=False,  # whoever is redirected to was not named
            timeout=httpx.Timeout(TIMEOUT_S, connect=10.0),
            limits=httpx.Limits(max_connections=CONCURRENCY + 8),
        )
        try:
            served, self.context_length = self._served()
        except SamplerError:
            self._client.close()
            raise
        self.weights = ServerWeights(settings.url, served, self._send, self._score, self._receiver)
        self.description = {"name": "http", "url": settings.url, "served": served, "version": self._version()}

    @property
    def model(self) -> str:
        """Name of the weights that the next message is asked of."""
        return self.weights.now.model

    @property
    def policy_version(self) -> int:
        return self.weights.now.version

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
        """See `Engine`. A message in the middle keeps its adapter; by whole weights it is cut, and goes on with the new
        ones.

        Raises:
            SamplerError: the published weights are damaged, the server refuses them or computes with others, or it
                shares no memory with the trainer (kind "shared").
        """
        if update.kind == "shared" or update.folder is None:
            raise SamplerError(
                f"{self.settings.url} computes with weights of its own; it needs a folder, not {update.kind!r}"
            )
        self.weights.update(update.folder, version)

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
        self.weights.close()
        self._receiver.close()
        self._pool.shutdown(wait=False, cancel_futures=True)
        self._client.close()

    def _one(self, request: SampleRequest) -> Sample:
        """A message, in as many pieces as it was cut into by new weights."""
        ids: tuple[int, ...] = ()
        logps: tuple[float, ...] = ()
        versions: Versions = ()
        experts: RoutedExperts | None = None
        while True:
            piece, is_cut = self._persist("/v1/completions", partial(self._piece, request, ids))
            ids, logps = ids + piece.ids, logps + piece.logps
            versions = _joined(versions, piece.versions)
            experts = expert_log.joined(experts, piece.experts)
            if not is_cut or len(ids) == request.max_tokens:
                return Sample(ids, logps, piece.finish_reason, versions, experts)

    def _piece(self, request: SampleRequest, written: tuple[int, ...]) -> tuple[Sample, bool]:
        """The message from these tokens on, and True if it was cut. Raises PassingError, SamplerError."""
        rest = replace(
            request,
            prompt_ids=request.prompt_ids + written,
            max_tokens=request.max_tokens - len(written),
            seed=later_seed(request.seed, len(written)) if written else request.seed,
        )
        while True:
            with self.weights.sampling() as now:
                answer = self._json(self._attempt("POST", "/v1/completions", self._body(rest, now)))
                if self.weights.belongs(now):
                    break
        try:
            choice = answer["choices"][0]
        except (KeyError, IndexError, TypeError):
            raise SamplerError(
                f"{self.settings.url} answered without a choice: {str(answer)[:200]}"
            ) from None
        self._check_usage(answer.get("usage"), choice, rest)
        return self._exact(choice, rest, now.version)

    def _body(self, request: SampleRequest, now: Sampling) -> dict[str, Any]:
        return {
            "model": now.model,
            "prompt": list(request.prompt_ids),
            "max_tokens": request.max_tokens,
            "seed": request.seed % 2**63,
            "stop_token_ids": sorted(self.renderer.stop_ids),
            "logprobs": 1,
            "return_token_ids": True,
            "skip_special_tokens": False,
            "temperature": self.temperature,
            "cache_salt": now.salt,  # keys and values of older weights are never reused
            **_WHOLE_DISTRIBUTION,
        }

    def _score(self, model: str, ids: tuple[int, ...]) -> tuple[float, ...]:
        """Log-probs of a prompt's tokens but the first, which a server computes without its cache."""
        body = {"model": model, "prompt": list(ids), "max_tokens": 1, "prompt_logprobs": 0}
        body |= {"temperature": self.temperature, "seed": 0}
        answer = self._ask("POST", "/v1/completions", body)
        try:
            told = answer["choices"][0]["prompt_logprobs"]
            return tuple(
                float(each[str(token)]["logprob"]) for each, token in zip(told[1:], ids[1:], strict=True)
            )
        except (KeyError, IndexError, TypeError, ValueError):
            raise SamplerError(
                f"{self.settings.url} does not say the log-probs of a prompt (`prompt_logprobs`, as vLLM does), so "
                f"nobody can see that new weights have arrived: {str(answer)[:200]}"
            ) from None

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

    def _exact(self, choice: dict[str, Any], request: SampleRequest, version: int) -> tuple[Sample, bool]:
        """Sample from the server's answer, and True if it was cut. Raises SamplerError where it is not token-exact,
        PassingError where it has no token yet."""
        ids = tuple(choice.get("token_ids") or ())
        logps = (choice.get("logprobs") or {}).get("token_logprobs") or ()
        reason = choice.get("finish_reason")
        is_cut = reason == "abort"
        if is_cut and not ids:
            raise PassingError("the message was cut before its first token")
        sample = Sample(
            ids, tuple(logps), cast("Any", "length" if is_cut else reason), ((version, len(ids)),)
        )
        most = len(ids) if is_cut else request.max_tokens
        sample = exact(sample, most, self.renderer.stop_ids, self.settings.url)
        experts = expert_log.of_npy(choice.get("routed_experts"))
        return replace(sample, logps=tuple(min(0.0, float(logp)) for logp in logps), experts=experts), is_cut

    def _ask(self, method: str, path: str, body: dict[str, Any] | None = None) -> dict[str, Any]:
        """The server's JSON answer."""
        return self._json(self._send(method, path, body))

    def _send(self, method: str, path: str, body: dict[str, Any] | None = None) -> httpx.Response:
        """The server's answer in whatever form."""
        return self._persist(path, lambda: self._attempt(method, path, body))

    def _persist(self, path: str, act: Callable[[], T]) -> T:
        """The result of a call, after `RETRIES` more tries, and as many as the patience lasts."""
        waited_s = 0.0
        for attempt in count():
            try:
                return act()
            except PassingError as failure:
                if attempt >= RETRIES and waited_s >= self._patience_s:
                    raise SamplerError(
                        f"{self.settings.url}{path} failed {attempt + 1} times, last with {failure}; is it running?"
                    ) from None
                wait_s = failure.wait_s or min(0.5 * 2 ** min(attempt, 4), 8.0)
                self._sleep(wait_s)
                waited_s += wait_s
        raise AssertionError("unreachable")

    def _attempt(self, method: str, path: str, body: dict[str, Any] | None = None) -> httpx.Response:
        """The server's answer. Raises PassingError, SamplerError where it refuses the request."""
        try:
            response = self._client.request(method, path, json=body)
        except httpx.RequestError as error:
            raise PassingError(f"{type(error).__name__}: {error}") from None
        if response.is_success:
            return response
        failure = f"status {response.status_code}: {response.text[:300]}"
        if response.status_code != 429 and response.status_code < 500:
            failure += without_key(self.settings, response.status_code)
            failure += _SWITCHES.get(path.partition("?")[0], "")
            raise SamplerError(f"{self.settings.url}{path} refused the request, {failure}")
        after = response.headers.get("retry-after", "")
        raise PassingError(failure, min(float(after), 30.0) if after.isdecimal() else 0.0)

    def _json(self, response: httpx.Response) -> dict[str, Any]:
        try:
            answer = response.json()
        except ValueError:
            answer = None
        if not isinstance(answer, dict):
            raise SamplerError(f"{response.url} did not answer with a JSON object: {response.text[:200]!r}")
        return answer


def receiver_for(servers: Sequence[EndpointSettings]) -> Receiver:
    """A receiver of weights for servers, in memory where all of them are on this machine."""
    return Receiver(
        in_memory=all(httpx.URL(each.url).host in ("127.0.0.1", "localhost", "::1") for each in servers)
    )


def later_seed(seed: int, written: int) -> int:
    """Seed of a message that goes on after so many tokens: with the first one it would draw the same numbers again."""
    return int.from_bytes(hashlib.blake2b(f"{seed} {written}".encode(), digest_size=8).digest(), "big") >> 1


def _joined(versions: Versions, more: Versions) -> Versions:
    if versions and more and versions[-1][0] == more[0][0]:
        version, tokens = versions[-1]
        return (*versions[:-1], (version, tokens + more[0][1]), *more[1:])
    return versions + more


def chat_server(settings: EndpointSettings) -> HttpEngine:
    """A server that is asked for messages only (`chat`), which takes no renderer."""
    return HttpEngine(settings, cast("Renderer", None))
