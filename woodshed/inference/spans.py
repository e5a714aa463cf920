"""What each token of a message is for: thought, call, template or the closing words.

Counted from the sampled ids themselves, so that effort is measured, and losses are masked, token by token.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Sequence
from typing import Literal

from woodshed.inference.renderer import Renderer
from woodshed.records import Turn

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
    ids = [i for i in turn.sampled_ids if i not in renderer.stop_ids]
    starts = iter(_starts(ids, renderer))
    fallback: Kind = kinds[-1] if kinds else "message"
    found: list[Kind] = []
    for token in turn.sampled_ids:
        if token in renderer.stop_ids:
            found.append("template")
        else:
            at = next(starts)
            found.append(kinds[at] if at < len(kinds) else fallback)
    return tuple(found)


def _starts(ids: Sequence[int], renderer: Renderer) -> list[int]:
    """Where each token's text begins, in characters."""
    pieces = [renderer.decode([token]) for token in ids]
    if "".join(pieces) == renderer.decode(ids):
        return [0, *itertools.accumulate(len(piece) for piece in pieces)][: len(ids)]
    # Some characters span tokens, or a tokenizer drops spaces: decode every beginning.
    return [len(renderer.decode(ids[:n]).rstrip("\ufffd")) for n in range(len(ids))]
