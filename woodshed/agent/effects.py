"""Effects of calls, by whatever tool: what reads a file, changes one, or runs a command."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from woodshed.records import Call

SHELLS = ("shell", "bash", "execute_bash", "run_shell_command", "run_terminal_cmd", "terminal")
"""Names of the tool that runs a `command`: ours, and those of agents of others."""
READERS = ("read_file", "search")
EDITOR = "str_replace_editor"


@dataclass(frozen=True)
class Effect:
    """The effect that a call asks for."""

    kind: Literal["read", "write", "command", ""]
    """"": none of these, as where a tool of the user's own is called."""
    path: str = ""
    """File that is read or changed."""
    command: str = ""
    old: str = ""
    """Text that a change replaces."""
    new: str = ""
    """Text that a change writes."""
    is_whole: bool = False
    """The change writes a whole file."""


def effect(call: Call) -> Effect:
    """The effect of a call, from its name and arguments; nothing is looked up."""
    given = {name: str(value) for name, value in call.arguments.items()}
    path = given.get("path", "")
    if call.tool in SHELLS:
        return Effect("command", command=given.get("command", ""))
    if call.tool in READERS or (call.tool == EDITOR and given.get("command") == "view"):
        return Effect("read", path)
    if call.tool == "edit_file":
        return Effect("write", path, old=given.get("old", ""), new=given.get("new", ""))
    if call.tool == "write_file":
        return Effect("write", path, new=given.get("content", ""), is_whole=True)
    if call.tool == EDITOR:
        is_whole = given.get("command") == "create"
        new = given.get("file_text" if is_whole else "new_str", given.get("new_str", ""))
        return Effect("write", path, old=given.get("old_str", ""), new=new, is_whole=is_whole)
    return Effect("")
