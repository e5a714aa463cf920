"""Hostile text made harmless to show: control and direction-changing characters become visible."""

from __future__ import annotations

import html

from woodshed.tokens.quoting import HIDDEN


def visible(text: object) -> str:
    """Text with escape sequences, control and direction-changing characters as visible symbols."""
    return HIDDEN.sub(lambda match: _symbol(match[0]), str(text))


def label(text: object) -> str:
    """Visible text for Plotly, which reads a few tags: no part of it is one."""
    return html.escape(visible(text), quote=False)


def _symbol(character: str) -> str:
    code = ord(character)
    if code < 0x20:
        return chr(0x2400 + code)
    return "\u2421" if code == 0x7F else f"\\u{code:04x}"
