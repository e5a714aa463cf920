"""What the agent is asked: a few lines from a template, with every name that the hidden tests need.

Short, because a small model reads it at every turn. It names the file and line of the gap, the signature, the first
paragraph of the docstring, what else was taken away, and the command that runs the visible tests.
"""

from __future__ import annotations

import re

from woodshed.records import TaskError
from woodshed.synthesis.closure import Trace
from woodshed.synthesis.operators import Deletion


class TooLongError(TaskError):
    """What must be said does not fit."""


def write(deletion: Deletion, test_command: str, *, max_words: int = 90) -> str:
    """The instruction, in Markdown, at most `max_words` words; the docstring is cut first.

    Raises:
        TooLongError: it does not fit without any docstring either.
    """
    symbol, line = deletion.symbol, deletion.gap[0]
    kind = "method" if "." in symbol.name else "function"
    if deletion.operator == "stub":
        opening = f"Implement `{symbol.name}` in {symbol.path}: line {line} only raises NotImplementedError."
    else:
        opening = f"Add the missing {kind} `{symbol.name}` to {symbol.path}, before line {line}."
    parts = [opening, f"```python\n{symbol.header}\n```"]
    if deletion.traces:
        parts.append("Also restore:\n" + "\n".join(f"- {_also(trace)}" for trace in _merged(deletion.traces)))
    parts.append(f"Hidden tests decide. Run the visible ones: `{test_command}`")
    words = sum(len(part.split()) for part in parts)
    if words > max_words:
        raise TooLongError(f"{words} words without a docstring, {max_words} allowed")
    paragraph = re.split(r"\n\s*\n", symbol.docstring.strip())[0].split()
    room = max_words - words
    if len(paragraph) > room:
        paragraph = [*paragraph[: max(room - 1, 0)], "..."] if room > 3 else []
    if paragraph:
        parts.insert(2, " ".join(paragraph))
    return "\n\n".join(parts) + "\n"


def _merged(traces: tuple[Trace, ...]) -> list[Trace]:
    """Names that left the imports of the same file are said once."""
    names: dict[tuple[str, str], list[str]] = {}
    for trace in traces:
        names.setdefault((trace.path, trace.place), []).append(trace.what)
    return [
        Trace(path, what, place)
        for (path, place), found in sorted(names.items())
        for what in ([", ".join(found)] if place == "import" else found)
    ]


def _also(trace: Trace) -> str:
    what = " ".join(trace.what.split())
    if trace.place == "import":
        return f"the import of {what} in {trace.path}"
    if trace.place == "statement":
        return f"`{what}` in {trace.path}"
    return f"`{what}` in `{trace.place}` of {trace.path}"
