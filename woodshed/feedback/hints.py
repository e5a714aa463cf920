"""Hints: short reminders, each placed right before a faulty turn.

A reminder contains only what was known before the turn: tools, forms, rules. It contains nothing that was observed
    later
and nothing about the state of a file, which an earlier edit may have changed: a hint about a line that no longer exists
makes the turn worse.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from woodshed import parts
from woodshed.agent.tools import form
from woodshed.feedback.detectors import OwnDetector
from woodshed.tokens.codec import Codec, ToolSpec

PLACEBOS: tuple[str, ...] = (
    "Reminder: the repository is under an open licence.",
    "Reminder: other people use this code too.",
    "Reminder: the maintainers live in several time zones.",
    "Reminder: this project has been around for some years.",
    "Reminder: a release is planned for next month.",
    "Reminder: the documentation is written in English.",
)
"""Sentences without relation to any fault: the control for "any reminder helps"."""


def hint_text(
    detector: str,
    *,
    tools: Sequence[ToolSpec],
    codec: Codec,
    tool: str | None = None,
    test_command: str = "the tests",
) -> str:
    """The reminder for a class of faults.

    Args:
        detector: a name in `detectors.DETECTORS` or `behaviours.BEHAVIOURS`, or the import path of one's own.
        tool: the tool that the turn called or should call; some reminders show its form.

    Raises:
        RecipeError: no text is known for this detector.
    """
    if detector in _TEXTS:
        return f"Reminder: {_TEXTS[detector](_Subject(tools, codec, tool, test_command))}"
    own: OwnDetector = parts.resolve("detector", detector, {}, OwnDetector)
    return f"Reminder: {own.hint}"


class _Subject:
    """Names that a reminder may mention."""

    def __init__(self, tools: Sequence[ToolSpec], codec: Codec, tool: str | None, test_command: str) -> None:
        known = {spec.name for spec in tools}
        self.names = ", ".join(spec.name for spec in tools)
        self.tool = tool if tool in known else tools[0].name
        self.form = form(self.tool, codec, tools)
        self.test_command = test_command


_TEXTS: dict[str, Callable[[_Subject], str]] = {
    "truncated": lambda s: "keep the message short: one call and no explanation.",
    "repeated": lambda s: "a call that has just failed will fail again. Do something else.",
    "no_call": lambda s: f"answer with a call, such as {s.form}",
    "unparseable": lambda s: f"write the call exactly in this form:\n{s.form}",
    "unknown_tool": lambda s: f"the only tools are {s.names}.",
    "bad_arguments": lambda s: f"{s.tool} takes exactly these arguments:\n{s.form}",
    "bad_path": lambda s: (
        "use a path that exists, relative to the repository root, as the task or a search gives it."
    ),
    "old_missing": lambda s: (
        "copy the old text exactly from the file as it is now. Read the file again if unsure."
    ),
    "old_ambiguous": lambda s: "the old text must occur once in the file. Include the lines around it.",
    "too_many_calls": lambda s: "write fewer calls in one message and read their results first.",
    "syntax_error": lambda s: "before finishing, make sure that every file you changed is valid Python.",
    "untested": lambda s: f"before finishing, run {s.test_command} on your last change.",
    "unfinished": lambda s: "before finishing, do what is still marked as to be done in what you wrote.",
    "comment_reasoning": lambda s: "write code, not your reasoning, into files; few comments.",
    "terminal_only": lambda s: "read and change files with the tools made for it, not through the shell.",
    "long_message": lambda s: "be brief: a sentence or two, and the call.",
    "out_of_bounds": lambda s: "change only the files that the task is about.",
}

CLASSES = tuple(_TEXTS)
"""All classes of faults that have a reminder."""
