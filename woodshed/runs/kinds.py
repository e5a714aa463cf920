"""Kinds of records in a run folder, each in a file of its own, and the processes that write them."""

from __future__ import annotations

from typing import Literal

Kind = Literal[
    "rollouts",
    "verdicts",
    "hints",
    "flags",
    "gate",
    "reward_terms",
    "oracle",
    "metrics",
    "divergences",
    "token_texts",
    "solutions",
    "draws",
    "collected",
    "published",
    "taken",
]
Writer = Literal["run", "trainer", "collector"]
"""Processes that write to a run: one for all of it, or two beside each other, each with its own files."""
OF_COLLECTOR: tuple[Kind, ...] = (
    "draws",
    "rollouts",
    "token_texts",
    "verdicts",
    "flags",
    "hints",
    "reward_terms",
    "collected",
)
"""Kinds that a collector writes; a trainer beside it writes the others."""
