"""Tools as the policy sees them: six of ours, and others that models were trained on or that agents have."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from woodshed.agent.effects import EDITOR
from woodshed.agent.todo import NAME as TODO
from woodshed.tokens.codec import ToolSpec


def _schema(required: Sequence[str] = (), **properties: str) -> dict[str, Any]:
    kinds = {name: {"type": kind} for name, kind in properties.items()}
    return {"type": "object", "properties": kinds, "required": list(required), "additionalProperties": False}


TOOLS: tuple[ToolSpec, ...] = (
    ToolSpec(
        name="read_file",
        description="Show lines of a file.",
        parameters=_schema(["path"], path="string", start="integer", count="integer"),
        inline=("path", "start", "count"),
        example={"path": "package/module.py", "start": 1, "count": 40},
    ),
    ToolSpec(
        name="edit_file",
        description="Replace text that occurs exactly once in a file.",
        parameters=_schema(["path", "old", "new"], path="string", old="string", new="string"),
        inline=("path",),
        blocks=("old", "new"),
        example={"path": "package/module.py", "old": "old text", "new": "new text"},
    ),
    ToolSpec(
        name="write_file",
        description="Write a whole file.",
        parameters=_schema(["path", "content"], path="string", content="string"),
        inline=("path",),
        blocks=("content",),
        example={"path": "package/module.py", "content": "new text"},
    ),
    ToolSpec(
        name="search",
        description="Find lines that match a Python regex, below a path.",
        parameters=_schema(["pattern"], pattern="string", path="string"),
        inline=("pattern", "path"),
        example={"pattern": "name", "path": "package"},
    ),
    ToolSpec(
        name="shell",
        description="Run a shell command.",
        parameters=_schema(["command"], command="string"),
        rest="command",
        example={"command": "python -m pytest -q"},
    ),
    ToolSpec(
        name="finish",
        description="End the work.",
        parameters=_schema(),
    ),
)

SIX = tuple(spec.name for spec in TOOLS)

OTHERS: tuple[ToolSpec, ...] = (
    ToolSpec(
        name="bash",
        description="Run a bash command.",
        parameters=_schema(["command"], command="string"),
        rest="command",
        example={"command": "python -m pytest -q"},
    ),
    ToolSpec(
        name=EDITOR,
        description="View a file or folder (view), write a file (create), replace text that occurs once (str_replace), "
        "or insert new_str behind a line (insert).",
        parameters={
            "type": "object",
            "properties": {
                "command": {"type": "string", "enum": ["view", "create", "str_replace", "insert"]},
                "path": {"type": "string"},
                "insert_line": {"type": "integer", "minimum": 0},
                "file_text": {"type": "string"},
                "old_str": {"type": "string"},
                "new_str": {"type": "string"},
                "view_range": {"type": "array", "items": {"type": "integer"}},
            },
            "required": ["command", "path"],
            "additionalProperties": False,
        },
        inline=("command", "path", "insert_line"),
        blocks=("old_str", "new_str"),
        example={
            "command": "str_replace",
            "path": "package/module.py",
            "old_str": "old text",
            "new_str": "new text",
        },
    ),
    ToolSpec(
        name=TODO,
        description="Write your to-do list anew: a line [ ] or [x] for each item.",
        parameters=_schema(["items"], items="string"),
        blocks=("items",),
        example={"items": "[x] read the test\n[ ] mend the function"},
    ),
)
"""Tools that a recipe may offer beside the six or in their place."""
