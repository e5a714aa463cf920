"""Hostile text made harmless for a person's eyes: seen as it is, never obeyed by a terminal, a browser or the eye."""

from __future__ import annotations

import html
import re

HIDDEN = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200b-\u200f\u202a-\u202e\u2066-\u2069\ufeff\ud800-\udfff]"
)


def visible(text: object) -> str:
    """Text whose escape sequences, control and direction-changing characters can be seen instead of obeyed."""
    return HIDDEN.sub(lambda hidden: _symbol(hidden[0]), str(text))


def label(text: object) -> str:
    """Visible text for Plotly, which reads a few tags: no part of it is one."""
    return html.escape(visible(text), quote=False)


def _symbol(character: str) -> str:
    code = ord(character)
    if code < 0x20:
        return chr(0x2400 + code)
    return "\u2421" if code == 0x7F else f"\\u{code:04x}"
