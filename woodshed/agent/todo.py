"""A to-do list that the policy keeps: one item a line, `[ ] open` or `[x] done`, written anew with every call."""

from __future__ import annotations

import re
from collections.abc import Iterable

from woodshed.agent.workspace_files import Outcome, RefusedCallError
from woodshed.records import Turn

NAME = "todo"
_ITEM = re.compile(r"\s*(?:[-*]\s*)?\[([ xX])\]\s+\S.*")


def write_list(items: str) -> Outcome:
    """Counts of the items.

    Raises:
        RefusedCallError: a line that is no item.
    """
    lines = [line for line in items.splitlines() if line.strip()]
    if odd := [line for line in lines if not _ITEM.fullmatch(line)]:
        raise RefusedCallError(
            "bad_arguments", f"{odd[0].strip()[:60]!r} is no item; write [ ] or [x] before its text"
        )
    return f"{len(lines)} items, {count_open(items)} open", None


def count_open(items: str) -> int:
    """Items that are not done."""
    found = (_ITEM.fullmatch(line) for line in items.splitlines())
    return sum(match is not None and match[1] == " " for match in found)


def current(turns: Iterable[Turn]) -> str:
    """The list as these turns left it; "" where they wrote none."""
    lists = [
        str(call.arguments["items"])
        for turn in turns
        for call, observation in zip(turn.calls, turn.observations, strict=False)
        if call.tool == NAME and call.error_kind is None and observation.error_kind is None
    ]
    return lists[-1] if lists else ""
