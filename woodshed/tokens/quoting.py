"""Text of others, seen as it is and obeyed by nobody: for terminals, pages, and models that read what a policy wrote.

A frame that the framed text cannot close: hidden characters, among them every line end but the line feed, become
visible, and every line then begins with a mark. What does not begin with it was written by us.
"""

from __future__ import annotations

import re

MARK = "| "

HIDDEN = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\u00ad\u0600-\u0605\u061c\u06dd\u070f\u115f\u1160\u180e\u200b-\u200f\u2028-\u202e"
    "\u2060-\u206f\u3164\ud800-\udfff\ufeff\uffa0\ufff9-\ufffb\U0001d173-\U0001d17a\U000e0000-\U000e007f"
    "\U000e0100-\U000e01ef]"
)
"""Characters that move the cursor, end a line, change the direction or cannot be seen; not line feeds and tabs."""

SPECIAL = re.compile(
    r"<[|\uff5c][^|\uff5c>]{1,40}[|\uff5c]>|\[/?(?:INST|SYS|TOOL_CALLS|AVAILABLE_TOOLS)\]|<</?SYS>>"
    r"|</?(?:system|user|assistant|tool|think|start_of_turn|end_of_turn|bos|eos|s)(?:[^\w>][^>]{0,20})?>",
    re.IGNORECASE,
)
"""Markers that chat templates write around messages."""


def shown(text: str) -> str:
    """The text with its hidden characters spelt out."""
    return HIDDEN.sub(lambda hidden: f"\\u{ord(hidden[0]):04x}", text)


def quoted(text: str) -> str:
    """The text inside its frame: hidden characters visible, chat markers broken, every line marked."""
    broken = SPECIAL.sub(lambda m: m[0].translate({60: "\u2039", 62: "\u203a", 91: "("}), shown(text))
    return "\n".join(f"{MARK}{line}" for line in broken.split("\n"))
