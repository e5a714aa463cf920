"""Rendering of messages to tokens, append-only.

A conversation is one growing list of token ids. `start` opens it, the policy samples a message, `extend` appends what
comes next (the end of a cut message, the observations, the opening of the next message). Nothing that was sampled is
ever rendered or tokenised again, so the prompt of turn t+1 has turn t's prompt and sampled ids as an exact prefix.

Two renderers: `PackageRenderer` for model families that the `renderers` package knows token by token, and
`TemplateRenderer` for every other model with a chat template. The latter renders a conversation with a sentinel in
place of each text, and tokenises only what stands after the assistant's sentinel.
"""

from __future__ import annotations

import json
import re
import sys
import threading
import time
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any, Literal, Protocol

import numpy as np

from woodshed import documents
from woodshed.records import Call, ErrorKind, ModelError, Observation, SamplerError
from woodshed.tokens.codec import CODEC, CODECS, Codec, ToolSpec, read_call, verdict
from woodshed.tokens.model_files import embedding_rows


@dataclass(frozen=True)
class ContextTokens:
    """Tokens that the harness adds before a turn."""

    ids: tuple[int, ...]
    opening: int
    """Number of the last ids that open the assistant's message; a hint goes right before them."""


class Renderer(Protocol):
    """Messages to tokens for one model."""

    codec: Codec
    stop_ids: frozenset[int]
    vocab_size: int
    system_hints: bool
    """True if a system message may stand in mid-conversation; else hints are user messages."""

    def start(self, system: str, user: str, tools: Sequence[ToolSpec]) -> ContextTokens:
        """The opening prompt, with the tools described as the codec or the chat template does it."""
        ...

    def extend(
        self,
        sampled_ids: Sequence[int],
        finish_reason: Literal["stop", "length"],
        observations: Sequence[Observation],
        calls: Sequence[Call],
    ) -> ContextTokens:
        """Tokens after a sampled message: its end if it was cut, the observations, the next opening."""
        ...

    def hint(self, text: str, *, placement: Literal["system", "user"] = "system") -> tuple[int, ...]:
        """One whole message, to be inserted right before the opening tokens of a turn."""
        ...

    def encode_message(self, text: str) -> tuple[int, ...]:
        """A message as the policy would sample it, with its stop token."""
        ...

    def decode(self, ids: Sequence[int]) -> str:
        """The text of a sampled message, without its stop token."""
        ...


def create_renderer(tokenizer: Any, *, codec: str = "auto", model_dir: Path | None = None) -> Renderer:
    """The renderer for a model's tokenizer.

    With codec "auto" the policy calls tools in the model's own format where that was trained, else in plain text.
    Trained means: the `renderers` package knows the model, or its template has tools in Hermes form; and, where the
    weights are at hand (`model_dir`), the rows of its tool tokens were measured to differ from unused rows.

    Raises:
        RecipeError: no such codec, or one of the user's own that cannot be used.
        ModelError: no chat template, or a template that the codec cannot work with.
    """
    named = CODEC.resolve(codec)
    package = _package_renderer(tokenizer)
    if codec in ("auto", "native"):
        trained = _tool_tokens_measured(tokenizer, model_dir)
        if package is not None and (codec == "native" or trained is not False):
            return PackageRenderer(tokenizer, package, NativeCodec(tokenizer, package))
        if codec == "native":
            raise ModelError(
                f"the renderers package does not know {tokenizer.name_or_path!r}; use codec auto"
            )
        named = CODECS["hermes" if trained and "<tool_call>" in str(tokenizer.chat_template) else "plain"]
    assert named is not None
    if package is not None:
        return PackageRenderer(tokenizer, package, named)
    return TemplateRenderer(tokenizer, named, model_dir)


# --- were the tool tokens trained? ------------------------------------------------------------------------------

_TOOL_TOKENS = ("<tool_call>", "</tool_call>")


def trained_tool_tokens(tool_rows: np.ndarray, padding_rows: np.ndarray) -> bool:
    """True if embedding rows (n, width) of tool tokens were trained.

    Rows that no gradient ever reached keep their common initial value: cosine > 0.999 with each other and with the
    padding rows behind the vocabulary. Trained rows have cosines far below.
    """
    rows = np.concatenate([tool_rows, padding_rows]).astype(np.float64)
    norms = np.linalg.norm(rows, axis=1, keepdims=True)
    if not norms[: len(tool_rows)].all():
        return False
    unit = rows / np.where(norms > 0, norms, 1.0)
    cosines = unit[: len(tool_rows)] @ unit.T
    np.fill_diagonal(cosines, 0.0)
    return bool(cosines.max() <= 0.999)


def _tool_tokens_measured(tokenizer: Any, model_dir: Path | None) -> bool | None:
    """True or False as measured, None where there is nothing to measure (no weights here, or no such tokens)."""
    vocabulary = tokenizer.get_vocab()
    if model_dir is None or not all(token in vocabulary for token in _TOOL_TOKENS):
        return None
    padding = range(max(vocabulary.values()) + 1, max(vocabulary.values()) + 9)
    ids = [vocabulary[token] for token in _TOOL_TOKENS]
    rows = embedding_rows(model_dir, [*ids, *padding])
    return None if rows is None else trained_tool_tokens(rows[:2], rows[2:])


# --- any model with a chat template -----------------------------------------------------------------------------

_MARK = re.compile("\ue000(.)\ue001")


def _mark(name: str) -> str:
    """A sentinel (private-use characters, which no template touches) that stands for one text."""
    return f"\ue000{name}\ue001"


TEMPLATE_S = 5.0
"""Limit of this thread's processor time for a template with a few short messages, which takes some milliseconds."""


@contextmanager
def _limited(seconds: float) -> Iterator[None]:
    """Untrusted Python code, such as a template, which a TimeoutError ends after `seconds` of processor time."""
    deadline = time.thread_time() + seconds

    def watch(frame: FrameType, event: str, argument: Any) -> Any:
        if time.thread_time() > deadline:
            raise TimeoutError(f"it takes more than {seconds:g} s")
        return watch

    before = sys.gettrace()
    sys.settrace(watch)
    try:
        yield
    finally:
        sys.settrace(before)


class TemplateRenderer:
    """Renders through the model's own chat template."""

    def __init__(self, tokenizer: Any, codec: Codec, model_dir: Path | None = None) -> None:
        name = tokenizer.name_or_path
        if not tokenizer.chat_template:
            raise ModelError(f"{name}: no chat template; use an instruction-tuned model")
        self.codec = codec
        self.vocab_size = len(tokenizer)
        self._tokenizer = tokenizer
        self._rendered: dict[Any, str] = {}
        self._encoding = (
            threading.Lock()
        )  # "literal" is a switch of the tokenizer's, which threads would throw for each other
        self._special = [token.content for token in tokenizer.added_tokens_decoder.values() if token.special]
        self._system_role = self._renders([("system", "s"), ("user", "u")])
        self._base = [("system", "s"), ("user", "u")] if self._system_role else [("user", "u")]
        if codec.name == "hermes" and not self._takes_tools():
            raise ModelError(f"{name}: codec hermes needs a chat template that lists tools")
        self._opening_text = self._after(self._render(self._base, opened=False), self._render(self._base))
        self._closing_text = self._tail(self._base, opened=False)
        self.stop_ids = self._stops(model_dir)
        closing = self._encode(self._closing_text)
        ends = [i for i, token in enumerate(closing) if token in self.stop_ids]
        self._end_length = ends[0] + 1 if ends else 0
        self._stop_id = closing[ends[0]] if ends else tokenizer.eos_token_id
        if self._stop_id is None:
            raise ModelError(f"{name}: neither the chat template nor the tokenizer ends a message")
        self._tool_role = codec.name == "hermes" and self._message("tool") is not None
        self.system_hints = self._message("system") is not None

    # what the conversation looks like

    def start(self, system: str, user: str, tools: Sequence[ToolSpec]) -> ContextTokens:
        system = "\n\n".join(text for text in (system, self.codec.describe(tools)) if text)
        schemas = [{"type": "function", "function": tool.schema} for tool in tools]
        text = self._render(self._base, tools=schemas if self.codec.name == "hermes" else None)
        texts = {"s": system, "u": user} if self._system_role else {"u": f"{system}\n\n{user}"}
        return self._context(text, texts)

    def extend(
        self,
        sampled_ids: Sequence[int],
        finish_reason: Literal["stop", "length"],
        observations: Sequence[Observation],
        calls: Sequence[Call],
    ) -> ContextTokens:
        if self._tool_role and calls:
            roles = [("tool", chr(0x100 + i)) for i in range(len(observations))]
            texts = {mark: item.text for (_, mark), item in zip(roles, observations, strict=True)}
        else:
            roles, texts = [("user", "o")], {"o": _joined(observations)}
        context = self._context(self._tail([*self._base, ("assistant", "a"), *roles]), texts)
        stopped = finish_reason == "stop" and sampled_ids and sampled_ids[-1] in self.stop_ids
        return ContextTokens(context.ids[self._end_length if stopped else 0 :], context.opening)

    def hint(self, text: str, *, placement: Literal["system", "user"] = "system") -> tuple[int, ...]:
        message = self._message(placement if self.system_hints else "user")
        if message is None:
            raise ModelError(
                f"{self._tokenizer.name_or_path}: the chat template places no message before a turn"
            )
        return self._fill(message, {"h": text})

    def encode_message(self, text: str) -> tuple[int, ...]:
        special = self.codec.name == "hermes"  # its tags are tokens of their own; elsewhere text is only text
        return (*self._encode(text, literal=not special), self._stop_id)

    def decode(self, ids: Sequence[int]) -> str:
        return _decode(self._tokenizer, self.stop_ids, ids)

    # sentinels to text to tokens

    def _render(self, messages: Sequence[tuple[str, str]], *, opened: bool = True, tools: Any = None) -> str:
        """The template's text for (role, sentinel) messages; cached, since few shapes ever occur."""
        key = (tuple(messages), opened, json.dumps(tools))
        if key not in self._rendered:
            try:
                with _limited(TEMPLATE_S):
                    self._rendered[key] = self._tokenizer.apply_chat_template(
                        [{"role": role, "content": _mark(name)} for role, name in messages],
                        tools=tools,
                        tokenize=False,
                        add_generation_prompt=opened,
                        date_string="26 Jul 2024",  # Llama's template would print today's date
                    )
            except Exception as error:  # a template refuses a role, or breaks, by raising what it likes
                raise ModelError(_broken(self._tokenizer.name_or_path, error)) from error
        return self._rendered[key]

    def _renders(self, messages: Sequence[tuple[str, str]]) -> bool:
        try:
            text = self._render(messages)
        except ModelError:
            return False
        return all(_mark(name) in text for _, name in messages)

    def _takes_tools(self) -> bool:
        tool = {"type": "function", "function": {"name": "f", "description": "", "parameters": {}}}
        try:
            return self._render(self._base, tools=[tool]) != self._render(self._base)
        except ModelError:
            return False

    def _tail(self, messages: Sequence[tuple[str, str]], *, opened: bool = True) -> str:
        """Text that the template puts after the assistant's text."""
        if ("assistant", "a") not in messages:
            messages = [*messages, ("assistant", "a")]
        _, found, tail = self._render(messages, opened=opened).partition(_mark("a"))
        if not found:
            raise ModelError(f"{self._tokenizer.name_or_path}: the chat template hides the assistant's text")
        return tail

    def _message(self, role: str) -> str | None:
        """Text of one whole message in mid-conversation, or None where the template refuses or moves it."""
        messages = [*self._base, ("assistant", "a"), (role, "h")]
        if not self._renders(messages):
            return None
        tail = self._tail(messages)
        fits = (
            tail.startswith(self._closing_text) and tail.endswith(self._opening_text) and _mark("h") in tail
        )
        return tail[len(self._closing_text) : len(tail) - len(self._opening_text)] if fits else None

    def _after(self, shorter: str, longer: str) -> str:
        if not longer.startswith(shorter) or shorter == longer:
            raise ModelError(f"{self._tokenizer.name_or_path}: the chat template has no generation prompt")
        return longer[len(shorter) :]

    def _context(self, text: str, texts: dict[str, str]) -> ContextTokens:
        opening = self._encode(self._opening_text)
        body = self._fill(text[: len(text) - len(self._opening_text)], texts)
        return ContextTokens((*body, *opening), len(opening))

    def _fill(self, text: str, texts: dict[str, str]) -> tuple[int, ...]:
        """Tokens of a rendered text with its sentinels replaced.

        Where a text spells a special token, it is tokenised apart, as text: a file that holds "<|im_end|>" must not
        end a message.
        """
        pieces = _MARK.split(text)  # template text at even places, sentinel names at odd ones
        if not any(token in value for value in texts.values() for token in self._special):
            return self._encode("".join(texts[p] if i % 2 else p for i, p in enumerate(pieces)))
        parts = [self._encode(texts[p] if i % 2 else p, literal=bool(i % 2)) for i, p in enumerate(pieces)]
        return tuple(token for part in parts for token in part)

    def _encode(self, text: str, *, literal: bool = False) -> tuple[int, ...]:
        with self._encoding:
            return tuple(self._tokenizer.encode(text, add_special_tokens=False, split_special_tokens=literal))

    def _stops(self, model_dir: Path | None) -> frozenset[int]:
        """End-of-message ids: from the generation config, the tokenizer, and the template's own closing token."""
        stops = {self._tokenizer.eos_token_id}
        path = model_dir / "generation_config.json" if model_dir else None
        if path is not None and path.is_file():
            settings = documents.read_json(path, ModelError)
            eos = settings.get("eos_token_id") if isinstance(settings, dict) else None
            stops |= set(eos) if isinstance(eos, list) else {eos}
        closing = self._encode(self._closing_text)
        if closing and closing[0] in self._tokenizer.added_tokens_decoder:
            stops.add(closing[0])
        return frozenset(stops - {None})


def _broken(folder: str, error: Exception) -> str:
    """Position and cause of a chat template's failure."""
    file = next(
        (f for f in ("chat_template.jinja", "tokenizer_config.json") if Path(folder, f).is_file()), ""
    )
    frames = [at.lineno for at in traceback.extract_tb(error.__traceback__) if at.filename == "<template>"]
    line = getattr(error, "lineno", None) or next(reversed(frames), None)
    where = f", line {line} of the chat template" if line else ", its chat template"
    return (
        f"{Path(folder, file)}{where}: {type(error).__name__}: {error}. Mend the template, or take it from the model "
        "that this one was made of"
    )


def _joined(observations: Sequence[Observation]) -> str:
    """Several results as one user message, numbered in call order."""
    if len(observations) == 1:
        return observations[0].text
    return "\n".join(f"[{i}] {observation.text}" for i, observation in enumerate(observations, 1))


def _decode(tokenizer: Any, stop_ids: frozenset[int], ids: Sequence[int]) -> str:
    ids = list(ids[:-1] if ids and ids[-1] in stop_ids else ids)
    return tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False)


# --- families that the renderers package knows ------------------------------------------------------------------


def _package_renderer(tokenizer: Any) -> Any | None:
    """The package's renderer for exactly this model id, or None."""
    from renderers import AutoRendererConfig, create_renderer
    from renderers.base import MODEL_RENDERER_MAP

    if getattr(tokenizer, "name_or_path", "") not in MODEL_RENDERER_MAP:
        return None  # asked first: the package would look an unknown model up on the hub
    try:
        # "all": earlier reasoning stays in the history, as the policy saw it when it wrote on
        return create_renderer(tokenizer, AutoRendererConfig(thinking_retention="all"))
    except ValueError:
        return create_renderer(tokenizer)


class PackageRenderer:
    """Renders through the `renderers` package, which extends a conversation without rendering it again."""

    def __init__(self, tokenizer: Any, package: Any, codec: Codec) -> None:
        self.codec = codec
        self._tokenizer, self._package = tokenizer, package
        self._native = codec.name in ("native", "hermes")
        self.vocab_size = len(tokenizer)
        stops = package.get_stop_token_ids()
        self.stop_ids = frozenset(stops)
        self._stop_id = stops[0]
        context = self.start("s", "u", ())
        self._prompt, self._opening = list(context.ids), context.opening
        self.system_hints = True
        try:
            self.hint("h")
        except SamplerError:
            self.system_hints = False

    def start(self, system: str, user: str, tools: Sequence[ToolSpec]) -> ContextTokens:
        described = "" if self._native else self.codec.describe(tools)
        system = "\n\n".join(text for text in (system, described) if text)
        messages = [{"role": "system", "content": system}, {"role": "user", "content": user}]
        schemas = [tool.schema for tool in tools] if self._native and tools else None
        ids = self._package.render_ids(messages, tools=schemas, add_generation_prompt=True)
        closed = self._package.render_ids(messages, tools=schemas)
        if ids[: len(closed)] != closed:
            raise ModelError(f"{self._tokenizer.name_or_path}: the generation prompt is not a suffix")
        return ContextTokens(tuple(ids), len(ids) - len(closed))

    def extend(
        self,
        sampled_ids: Sequence[int],
        finish_reason: Literal["stop", "length"],
        observations: Sequence[Observation],
        calls: Sequence[Call],
    ) -> ContextTokens:
        if self._native and calls:
            by_id = {call.id: call.tool for call in calls}
            messages = [
                {
                    "role": "tool",
                    "content": o.text,
                    "tool_call_id": o.call_id,
                    "name": by_id.get(o.call_id, ""),
                }
                for o in observations
            ]
        else:
            messages = [{"role": "user", "content": _joined(observations)}]
        return ContextTokens(self._bridge(list(sampled_ids), messages), self._opening)

    def hint(self, text: str, *, placement: Literal["system", "user"] = "system") -> tuple[int, ...]:
        role = placement if self.system_hints else "user"
        before = [{"role": "user", "content": "u"}]
        without = self._bridge([self._stop_id], before)[: -self._opening]
        whole = self._bridge([self._stop_id], [*before, {"role": role, "content": text}])[: -self._opening]
        if whole[: len(without)] != without:
            raise SamplerError(
                f"{self._tokenizer.name_or_path}: a {role} message changes what stands before it"
            )
        return whole[len(without) :]

    def encode_message(self, text: str) -> tuple[int, ...]:
        return (*self._tokenizer.encode(text, add_special_tokens=False), self._stop_id)

    def decode(self, ids: Sequence[int]) -> str:
        return _decode(self._tokenizer, self.stop_ids, ids)

    def _bridge(self, sampled: list[int], messages: list[dict[str, Any]]) -> tuple[int, ...]:
        """The tokens that follow `sampled` in a conversation; its prompt matters only by how it ends."""
        rendered = self._package.bridge_to_next_turn(self._prompt, sampled, messages)
        before = [*self._prompt, *sampled]
        if rendered is None or list(rendered.token_ids[: len(before)]) != before:
            roles = ", ".join(str(message["role"]) for message in messages)
            raise SamplerError(
                f"{self._tokenizer.name_or_path}: cannot append {roles} without rendering anew"
            )
        return tuple(rendered.token_ids[len(before) :])


class NativeCodec:
    """The model's own trained call format, read and written by the `renderers` package."""

    name = "native"

    def __init__(self, tokenizer: Any, package: Any) -> None:
        self._tokenizer, self._package = tokenizer, package

    def describe(self, tools: Sequence[ToolSpec]) -> str:
        return ""  # the package renders the tools itself

    def parse(
        self, text: str, tools: Sequence[ToolSpec], *, truncated: bool = False
    ) -> tuple[str, tuple[Call, ...], ErrorKind | None]:
        try:
            ids = self._tokenizer.encode(text, add_special_tokens=False)
            parsed = self._package.parse_response(ids, tools=[tool.schema for tool in tools])
        except Exception:  # a parser of theirs that fell over is a call that cannot be read
            return (
                "",
                (Call("call_0", "", {}, text, "unparseable"),),
                "truncated" if truncated else "unparseable",
            )
        calls = [self._read(i, item, tools, truncated) for i, item in enumerate(parsed.tool_calls)]
        return parsed.content.strip(), tuple(calls), verdict(calls, truncated)

    def _read(self, index: int, item: Any, tools: Sequence[ToolSpec], truncated: bool) -> Call:
        if item.status in ("ok", "unknown_tool") and isinstance(item.arguments or {}, dict):
            return read_call(index, item.raw, item.name or "", item.arguments or {}, tools)
        cut = truncated and item.status == "unclosed_block"
        return Call(f"call_{index}", item.name or "", {}, item.raw, "truncated" if cut else "unparseable")

    def format(self, name: str, arguments: Any, tools: Sequence[ToolSpec]) -> str:
        call = {"type": "function", "function": {"name": name, "arguments": dict(arguments)}}
        messages = [
            {"role": "user", "content": "x"},
            {"role": "assistant", "content": "", "tool_calls": [call]},
        ]
        rendered = self._package.render(messages, tools=[tool.schema for tool in tools])
        ids = [i for i, sampled in zip(rendered.token_ids, rendered.sampled_mask, strict=True) if sampled]
        return _decode(self._tokenizer, frozenset(self._package.get_stop_token_ids()), ids)
