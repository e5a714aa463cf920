"""Rendering of messages to tokens, append-only.

A conversation is one growing list of token ids. `start` opens it, the policy samples a message, `extend` appends what
comes next (the end of a cut message, the observations, the opening of the next message). Nothing that was sampled is
ever rendered or tokenised again, so the prompt of turn t+1 has turn t's prompt and sampled ids as an exact prefix.

`TemplateRenderer` renders through the model's own chat template: a conversation with a sentinel in place of each text,
of which only what stands behind the assistant's message is tokenised.
"""

from __future__ import annotations

import bisect
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Protocol

import numpy as np

from woodshed import documents
from woodshed.records import Call, ModelError, Observation
from woodshed.tokens import family, past_thoughts
from woodshed.tokens.chat_template import ChatTemplate, Message, Treatment, filled, mark, said
from woodshed.tokens.codec import CODEC, CODECS, thoughts
from woodshed.tokens.codec.families import FamilyCodec
from woodshed.tokens.codec.reading import Codec
from woodshed.tokens.model_files import embedding_rows
from woodshed.tokens.schema import ToolSpec


@dataclass(frozen=True)
class ContextTokens:
    """Tokens that the harness adds before a turn."""

    ids: tuple[int, ...]
    opening: int
    """Number of the last ids that open the assistant's message; a hint goes right before them."""


@dataclass(frozen=True)
class AnsweredMessage:
    """A message of the policy, and its answer."""

    sampled_ids: tuple[int, ...]
    calls: tuple[Call, ...]
    answer: ContextTokens
    """The tokens that `Renderer.extend` put behind it."""


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

    def without_thoughts(
        self, opening: ContextTokens, exchanges: Sequence[AnsweredMessage]
    ) -> ContextTokens | None:
        """The prompt behind an opening prompt and some exchanges without those thoughts that the chat template drops;
        None where it drops none of them."""
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

    def spoken(self, text: str) -> str:
        """The text of a message without its thought and what opens its prose."""
        ...


def create_renderer(tokenizer: Any, *, codec: str = "auto", model_dir: Path | None = None) -> Renderer:
    """The renderer for a model's tokenizer, the same for weights that are loaded here and for a server of them.

    With codec "auto" the policy calls tools in the form that its chat template writes (`family.find`), and in plain
    text where the template lists no tools, or where the weights are at hand (`model_dir`) and the rows of its tool
    tokens do not differ from unused ones. With "native" the rows are not looked at.

    Args:
        model_dir: folder of the configuration and perhaps of the weights.

    Raises:
        RecipeError: no such codec, or one of the user's own that cannot be used.
        ModelError: no chat template, or a template that the codec cannot work with.
    """
    chosen = CODEC.resolve(codec)
    template = ChatTemplate(tokenizer)
    if codec in ("auto", "native"):
        chosen = family.find(template, model_dir)
        if codec == "native" and chosen is None:
            raise ModelError(f"{template.name}: the chat template writes no calls; take codec plain or json")
        if chosen is None or (codec == "auto" and _trained(chosen, tokenizer, model_dir) is False):
            chosen = CODECS["plain"]
    elif isinstance(chosen, FamilyCodec):
        chosen = family.named(template, chosen)
    assert chosen is not None
    return TemplateRenderer(tokenizer, template, chosen, model_dir)


# --- were the tool tokens trained? ------------------------------------------------------------------------------


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


def _trained(codec: FamilyCodec, tokenizer: Any, model_dir: Path | None) -> bool | None:
    """True or False as measured, None where there is nothing to measure (no weights here, or no such tokens)."""
    form = codec.format(family.PROBE.name, family.PROBE.example, [family.PROBE])
    added = tokenizer.added_tokens_decoder
    ids = [i for i in dict.fromkeys(tokenizer.encode(form, add_special_tokens=False)) if i in added]
    if model_dir is None or not ids:
        return None
    behind = max(tokenizer.get_vocab().values()) + 1
    rows = embedding_rows(model_dir, [*ids, *range(behind, behind + 8)])
    return None if rows is None else trained_tool_tokens(rows[: len(ids)], rows[len(ids) :])


# --- any model with a chat template -----------------------------------------------------------------------------


@dataclass(frozen=True)
class Tail:
    """Text that the template puts behind a message of the policy, up to the opening of its next one."""

    text: str
    opening: str
    """End of the text that opens the next message."""


class TemplateRenderer:
    """Renders through the model's own chat template."""

    def __init__(
        self, tokenizer: Any, template: ChatTemplate, codec: Codec, model_dir: Path | None = None
    ) -> None:
        self.vocab_size = len(tokenizer)
        self._tokenizer, self._template, self._base = tokenizer, template, template.base
        self._family = codec if isinstance(codec, FamilyCodec) else None
        # "literal" is a switch of the tokenizer's, which threads would throw for each other
        self._encoding = threading.Lock()
        self._special = [token.content for token in tokenizer.added_tokens_decoder.values() if token.special]
        self._opening = template.opening(self._base)
        self._opens_thought = self._opening.rstrip().endswith(thoughts.OPENING)
        thinks = thoughts.CLOSING in template.source
        self.codec: Codec = thoughts.ThoughtfulCodec(codec, self._opens_thought) if thinks else codec
        self._closing = self._behind([said("assistant", "a")], mark("a"), opened=False)
        if not self._opening and not self._closing:
            raise ModelError(f"{template.name}: the chat template has no generation prompt")
        self._tails = self._common_tails()
        self._leads = self._both_leads()
        self._rules = self._thought_rules()
        self._treatments = self._all_treatments()
        self.stop_ids = self._stops(model_dir)
        self._ends = frozenset(map(self._first_added, [self._closing, *self._tail_texts()]))
        closing = self._encode(self._closing)
        self._closes = any(token in self.stop_ids for token in closing)
        self._stop_ids = [self._stop_of(self._closing or self._tails[0].text)]
        self._stop_ids += [self._stop_of(self._tails[1].text)] if 1 in self._tails else self._stop_ids
        self.system_hints = self._message("system") is not None

    # what the conversation looks like

    def start(self, system: str, user: str, tools: Sequence[ToolSpec]) -> ContextTokens:
        described = self.codec.describe(tools)
        is_listed = self._family is not None and not described
        text = self._template.text(self._base, tools=family.schemas(tools) if is_listed else None)
        first = mark("s") if self._template.system_role else mark("u")
        if self._family is None:
            system = "\n\n".join(each for each in (system, described) if each)
        elif described:  # its tags are tokens
            text = text.replace(first, f"{described}\n\n{first}", 1)
        if self._template.system_role:
            texts = {first: self._treatments["system"](system), mark("u"): self._treatments["user"](user)}
        else:
            texts = {first: self._treatments["user"](f"{system}\n\n{user}")}
        return self._context(Tail(text, self._opening), texts)

    def extend(
        self,
        sampled_ids: Sequence[int],
        finish_reason: Literal["stop", "length"],
        observations: Sequence[Observation],
        calls: Sequence[Call],
    ) -> ContextTokens:
        if self._kind(calls) == "called":
            tail = self._tails.get(len(observations))
            if tail is None and (len(observations) < 2 or 2 in self._tails):
                tail = self._results(len(observations))
            if tail is None:  # the template takes one call and one result
                observations, calls = [Observation(calls[0].id, joined(observations))], calls[:1]
                tail = self._tails[1]
            texts: dict[str, str] = {}
            for index, (observation, call) in enumerate(zip(observations, calls, strict=True)):
                name, call_id, content = self._marks(index)
                texts |= {
                    name: call.tool,
                    call_id: call.id,
                    content: self._treatments["tool"](observation.text),
                }
        else:
            tail, texts = self._tails[0], {mark("o"): self._treatments["user"](joined(observations))}
        context = self._context(tail, texts)
        if finish_reason == "stop" and sampled_ids and sampled_ids[-1] in self.stop_ids:
            end = next((n for n, token in enumerate(context.ids) if token in self._ends), -1)
            if self._closes or context.ids[end] == sampled_ids[-1]:
                return ContextTokens(context.ids[end + 1 :], context.opening)
        return context

    def without_thoughts(
        self, opening: ContextTokens, exchanges: Sequence[AnsweredMessage]
    ) -> ContextTokens | None:
        kinds: list[past_thoughts.Kind] = [self._kind(exchange.calls) for exchange in exchanges]
        last = kinds[-1]
        if not (last in self._rules.own or any((last, kind) in self._rules.earlier for kind in kinds)):
            return None
        ids, before = [], opening
        for exchange, kind, is_dropped in zip(exchanges, kinds, self._rules.dropped(kinds), strict=True):
            message = self._past(exchange, kind) if is_dropped else None
            body = before.ids[: len(before.ids) - before.opening]
            ids += body + message if message is not None else before.ids + exchange.sampled_ids
            before = exchange.answer
        return ContextTokens((*ids, *before.ids), before.opening)

    def _past(self, exchange: AnsweredMessage, kind: past_thoughts.Kind) -> tuple[int, ...] | None:
        """A message without its thought, from its opening to its end; None where nothing changes. What is left of it is
        not tokenised again where a token begins with it."""
        sampled = exchange.sampled_ids
        is_closed = bool(sampled) and sampled[-1] in self.stop_ids
        sampled = sampled[: len(sampled) - is_closed]
        text, head = self.decode(sampled), self._rules.heads[kind]
        begin = self._behind_thought(text, exchange.calls, kind)
        if head + text[begin:] == self._opening + text:
            return None
        first = bisect.bisect_left(range(len(sampled)), begin, key=lambda n: len(self.decode(sampled[:n])))
        if self.decode(sampled[first:]) == text[begin:]:
            rest = sampled[first:]
        else:
            rest = self._encode(text[begin:], literal=self._family is None)
        return (*self._encode(head), *rest, *self._closing_of(kind) * is_closed)

    def hint(self, text: str, *, placement: Literal["system", "user"] = "system") -> tuple[int, ...]:
        role = placement if self.system_hints else "user"
        message = self._message(role)
        if message is None:
            raise ModelError(f"{self._template.name}: the chat template places no message before a turn")
        treatment = self._template.treatment([*self._base, said("assistant", "a"), said(role, "h")], -1)
        return self._fill(message, {mark("h"): treatment(text)})

    def encode_message(self, text: str) -> tuple[int, ...]:
        call = self._family.begins.search(text) if self._family else None
        if self._family and self._family.preamble and call and call.start():
            before = self._family.preamble.partition("PROSE")[0]
            if not text.startswith(before):
                prose, text = text[: call.start()].strip(), text[call.start() :]
                text = self._family.preamble.replace("PROSE", prose) + text
        else:
            lead = self._leads[bool(call and not call.start())]
            text = text if text.startswith(lead) else lead + text
        # tags of a family are tokens of their own; elsewhere text is only text
        return (*self._encode(text, literal=self._family is None), self._stop_ids[bool(call)])

    def decode(self, ids: Sequence[int]) -> str:
        ids = list(ids[:-1] if ids and ids[-1] in self.stop_ids else ids)
        return self._tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False)

    def _behind_thought(self, text: str, calls: Sequence[Call], kind: past_thoughts.Kind) -> int:
        """Position in a message where its prose or its call begins."""
        begin = thoughts.length(text, opened=self._opens_thought, calls=calls)
        begin += len(text[begin:]) - len(text[begin:].lstrip("\n"))
        lead = self._leads[0] if kind == "said" else ""
        return begin + len(lead) * text.startswith(lead, begin)

    def spoken(self, text: str) -> str:
        return text[self._behind_thought(text, (), "said") :].strip()

    # what the template writes around messages

    def _kind(self, calls: Sequence[Call]) -> past_thoughts.Kind:
        """The form of the answer to a message."""
        return "called" if 1 in self._tails and calls and all(call.tool for call in calls) else "said"

    def _closing_of(self, kind: past_thoughts.Kind) -> tuple[int, ...]:
        """The token that ends a message which another one follows."""
        end = self._first_added(self._tails[kind == "called"].text)
        return (end,) if end >= 0 else ()

    def _thought_rules(self) -> past_thoughts.ThoughtRules:
        family = self._family

        def called(number: int) -> list[Message]:
            return self._called([number])[len(self._base) :]

        def first_call(text: str) -> str:
            assert family is not None
            return next((call.raw for call in family.parse(text, [])[1]), "")

        is_called = family is not None and 1 in self._tails
        is_regular = {tail.opening for tail in self._tails.values()} == {self._opening}
        return past_thoughts.find_rules(
            self._template, called if is_called else None, first_call, is_regular=is_regular
        )

    def _behind(self, messages: Sequence[Message], last: str, *, opened: bool = True) -> str:
        """Text that the template puts behind a text of messages that follow the base."""
        _, found, tail = self._template.text([*self._base, *messages], opened=opened).rpartition(last)
        if not found:
            raise ModelError(f"{self._template.name}: the chat template hides the assistant's text")
        return tail

    def _common_tails(self) -> dict[int, Tail]:
        """By the number of calls in a message, what stands behind it."""
        answer = [said("assistant", "a"), said("user", "o")]
        tails = {0: Tail(self._behind(answer, mark("a")), self._template.opening([*self._base, *answer]))}
        for number in (1, 2) if self._family else ():
            if (tail := self._results(number)) is not None:
                tails[number] = tail
        return tails

    def _marks(self, index: int) -> tuple[str, str, str]:
        """Sentinels of the name, the id and the result of one of several calls."""
        assert self._family is not None
        name = f"zqn{index}zq"
        return name, self._family.call_id.format(name=name, index=index), mark(chr(0x100 + index))

    def _called(self, indices: Sequence[int]) -> list[Message]:
        """A conversation in which the policy calls several tools at once and reads their results."""
        marks = [self._marks(index) for index in indices]
        called = self._template.calls([(name, call_id, {"path": "x"}) for name, call_id, _ in marks])
        results = [
            {"role": "tool", "name": name, "tool_call_id": call_id, "content": content}
            for name, call_id, content in marks
        ]
        return [*self._base, called, *results]

    def _results(self, number: int) -> Tail | None:
        """Text behind a message with calls, or None where the template refuses so many, or their results."""
        assert self._family is not None
        marks = [self._marks(index) for index in range(number)]
        messages = self._called(range(number))
        if not self._template.renders(messages[-number:], after=messages[:-number]):
            return None
        text = self._template.text(messages)
        head = text[: text.index(marks[0][2])]
        _, calls, _ = self._family.parse(head, [])
        if [call.tool for call in calls[-number:]] != [name for name, _, _ in marks]:
            return None
        end = head.rindex(calls[-1].raw) + len(calls[-1].raw)
        return Tail(text[end:], self._template.opening(messages))

    def _both_leads(self) -> tuple[str, str]:
        """Text between the opening and a message without a thought: one of prose, and one that begins with a call."""
        opened = self._template.text(self._base)
        answer = [*self._base, said("assistant", "a"), said("user", "o")]
        starts = [self._template.text(answer).partition(mark("a"))[0]]
        if self._family and 1 in self._tails:
            text = self._template.text(self._called([0]))
            call = self._family.parse(text, [])[1][-1]
            starts.append(text[: text.rindex(call.raw)])
        line = "\n" * self._opening.endswith("\n")
        missing = f"{line}{thoughts.CLOSING}{line * 2}" if self._opens_thought else ""
        leads = [text[len(opened) :] if text.startswith(opened) else missing for text in starts]
        return leads[0], leads[-1]

    def _all_treatments(self) -> dict[str, Treatment]:
        """Treatment of the texts of each role."""
        base = self._base
        treatments = {str(m["role"]): self._template.treatment(base, n) for n, m in enumerate(base)}
        if 1 in self._tails:
            treatments["tool"] = self._template.treatment(self._called([0]), -1)
        return treatments

    def _message(self, role: str) -> str | None:
        """Text of one whole message in mid-conversation, or None where the template refuses or moves it."""
        messages = [*self._base, said("assistant", "a"), said(role, "h")]
        if not self._template.renders(messages):
            return None
        tail = self._behind(messages[len(self._base) :], mark("a"))
        fits = tail.startswith(self._closing) and tail.endswith(self._opening) and mark("h") in tail
        return tail[len(self._closing) : len(tail) - len(self._opening)] if fits else None

    # text to tokens

    def _context(self, tail: Tail, texts: dict[str, str]) -> ContextTokens:
        opening = self._encode(tail.opening)
        body = self._fill(tail.text[: len(tail.text) - len(tail.opening)], texts)
        return ContextTokens((*body, *opening), len(opening))

    def _fill(self, text: str, texts: dict[str, str]) -> tuple[int, ...]:
        """Tokens of a rendered text with its sentinels replaced.

        Where a text spells a special token, it is tokenised apart, as text: a file that holds "<|im_end|>" must not
        end a message.
        """
        pieces = list(filled(text, texts))
        if not any(token in value for value in texts.values() for token in self._special):
            return self._encode("".join(piece for piece, _ in pieces))
        parts = [self._encode(piece, literal=is_text) for piece, is_text in pieces]
        return tuple(token for part in parts for token in part)

    def _encode(self, text: str, *, literal: bool = False) -> tuple[int, ...]:
        with self._encoding:
            return tuple(self._tokenizer.encode(text, add_special_tokens=False, split_special_tokens=literal))

    def _tail_texts(self) -> list[str]:
        """Texts behind a message without calls, with one, and with two."""
        return [tail.text for _, tail in sorted(self._tails.items())]

    def _first_added(self, text: str) -> int:
        """The first token of a text that is no part of words; -1 if there is none."""
        added = self._tokenizer.added_tokens_decoder
        return next((token for token in self._encode(text) if token in added), -1)

    def _stops(self, model_dir: Path | None) -> frozenset[int]:
        """End-of-message ids: from the generation config, the tokenizer, and the template's own closing tokens."""
        stops = {self._tokenizer.eos_token_id}
        path = model_dir / "generation_config.json" if model_dir else None
        if path is not None and path.is_file():
            settings = documents.read_json(path, ModelError)
            eos = settings.get("eos_token_id") if isinstance(settings, dict) else None
            stops |= set(eos) if isinstance(eos, list) else {eos}
        # without an end of its own, a message ends where the next one begins
        for text in [self._closing, *self._tail_texts()[1:]] if self._closing else self._tail_texts():
            if ids := self._encode(text):
                stops.add(ids[0] if ids[0] in self._tokenizer.added_tokens_decoder else None)
        return frozenset(stops - {None})

    def _stop_of(self, text: str) -> int:
        """The token that ends a message, behind which the template writes this text."""
        stop = next(
            (token for token in self._encode(text) if token in self.stop_ids), self._tokenizer.eos_token_id
        )
        if stop is None:
            raise ModelError(
                f"{self._template.name}: neither the chat template nor the tokenizer ends a message"
            )
        return stop


def joined(observations: Sequence[Observation]) -> str:
    """Several results as one user message, numbered in call order."""
    if len(observations) == 1:
        return observations[0].text
    return "\n".join(f"[{i}] {observation.text}" for i, observation in enumerate(observations, 1))
