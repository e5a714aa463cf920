"""Purpose of each token of a message: thought, call, template or the closing words.

Counted from the sampled ids themselves, so that effort is measured, and losses are masked, token by token.
"""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Iterable, Sequence
from typing import Literal

from woodshed.records import Turn
from woodshed.tokens.renderer import Renderer

Kind = Literal["thinking", "call", "template", "message"]

_OPENING, _CLOSING = re.compile(r"<[^<>\s]+>"), re.compile(r"</[^<>\s]+>\s*$")


def token_kinds(turn: Turn, renderer: Renderer) -> tuple[Kind, ...]:
    """One kind per sampled id.

    template: stop tokens, and the tags around a call. call: what stands between them. thinking: everything outside
    of calls in a message that has one. message: everything in a message without a call, which is all it says.
    """
    kinds: list[Kind] = ["thinking" if turn.calls else "message"] * len(turn.text)
    end = 0
    for call in turn.calls:
        start = turn.text.find(call.raw, end)
        if not call.raw or start < 0:
            continue
        end = start + len(call.raw)
        opening, closing = _OPENING.match(call.raw), _CLOSING.search(call.raw)
        inner = (start + (opening.end() if opening else 0), start + closing.start() if closing else end)
        for at in range(start, end):
            kinds[at] = "call" if inner[0] <= at < inner[1] else "template"
    fallback: Kind = kinds[-1] if kinds else "message"
    return tuple(
        "template" if at is None else kinds[at] if at < len(kinds) else fallback
        for at in _starts(turn, renderer)
    )


def text_positions(turn: Turn, texts: Iterable[str], renderer: Renderer) -> frozenset[int]:
    """Positions of the sampled ids that write any of these texts, as lines of their own or as JSON; the indent that a
    text begins with, and blank lines around it, are not of them."""
    spans: list[range] = []
    for text in texts:
        for form in (f"\n{text}\n", json.dumps(text), json.dumps(text, ensure_ascii=False)):
            start = turn.text.rfind(form)
            if text.strip() and start >= 0:
                inner = form[1:-1]
                first = start + 1 + len(inner) - len(inner.lstrip())
                spans.append(range(first, first + len(inner.strip())))
                break
    starts = [len(turn.text) if at is None else at for at in _starts(turn, renderer)]
    tokens = enumerate(itertools.pairwise([*starts, len(turn.text)]))
    return frozenset(
        n for n, (at, end) in tokens if any(at in span or at < span.start < end for span in spans)
    )


def _starts(turn: Turn, renderer: Renderer) -> list[int | None]:
    """Start of each sampled id's text, in characters; None for a stop token."""
    starts = iter(_beginnings([i for i in turn.sampled_ids if i not in renderer.stop_ids], renderer))
    return [None if token in renderer.stop_ids else next(starts) for token in turn.sampled_ids]


def _beginnings(ids: Sequence[int], renderer: Renderer) -> list[int]:
    """Start of each token's text, in characters."""
    pieces = [renderer.decode([token]) for token in ids]
    if "".join(pieces) == renderer.decode(ids):
        return [0, *itertools.accumulate(len(piece) for piece in pieces)][: len(ids)]
    # Some characters span tokens, or a tokenizer drops spaces: decode every beginning.
    return [len(renderer.decode(ids[:n]).rstrip("\ufffd")) for n in range(len(ids))]
