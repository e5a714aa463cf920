"""An engine behind a chat endpoint: text in and text out (OpenAI's protocol, which Anthropic and Ollama speak, too).

For evaluations only. Such a server returns neither token ids nor their log-probs, and text that is tokenised again is
not what was sampled.
"""

from __future__ import annotations

from typing import cast

from woodshed.engines.engine import Sample, SampleRequest, WeightUpdate
from woodshed.engines.http import EndpointSettings, HttpEngine
from woodshed.records import SamplerError
from woodshed.tokens.renderer import Renderer
from woodshed.tokens.text_renderer import TextRenderer

UNTRAINABLE = (
    "engine.kind = 'chat' returns text: no token ids and no log-probabilities, and text that is tokenised again is not "
    "what was sampled. Evaluate with it; to train, serve the weights with kind 'http' (vLLM), or use 'local'"
)


class ChatEngine(HttpEngine):
    """Messages from a chat endpoint."""

    def __init__(self, settings: EndpointSettings, renderer: Renderer, *, temperature: float = 1.0) -> None:
        """Ask the server what it serves.

        Raises:
            SamplerError: as `HttpEngine`; or a renderer of token ids.
        """
        if not isinstance(renderer, TextRenderer):
            raise SamplerError(UNTRAINABLE)
        super().__init__(settings, cast("Renderer", renderer), temperature=temperature)
        self._text = renderer
        self._limit = "max_tokens"
        self.description["name"] = "chat"

    def update_weights(self, update: WeightUpdate, version: int) -> None:
        raise SamplerError(UNTRAINABLE)

    def _one(self, request: SampleRequest) -> Sample:
        body = {
            "model": self.model,
            "messages": self._text.messages(request.prompt_ids),
            self._limit: max(1, request.max_tokens * 3 // 4),  # a token is about four bytes, and an id three
            **({} if self.temperature == 1.0 else {"temperature": self.temperature}),
        }
        try:
            answer = self._ask("POST", "/v1/chat/completions", body)
        except SamplerError as error:
            if self._limit == "max_completion_tokens" or "max_completion_tokens" not in str(error):
                raise
            self._limit = "max_completion_tokens"  # OpenAI's newer name
            return self._one(request)
        try:
            choice = answer["choices"][0]
            text, reason = choice["message"].get("content") or "", choice.get("finish_reason")
        except (KeyError, IndexError, TypeError, AttributeError):
            raise SamplerError(
                f"{self.settings.url} answered without a message: {str(answer)[:200]}"
            ) from None
        whole = self._text.encode_message(text)
        is_cut = reason == "length" or len(whole) > request.max_tokens
        ids = (whole[:-1][: request.max_tokens] or whole[:1]) if is_cut else whole
        stopped = ids[-1] in self._text.stop_ids
        return Sample(ids, (0.0,) * len(ids), "stop" if stopped else "length", ((0, len(ids)),))
