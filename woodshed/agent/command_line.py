"""Command line of an agent of others, as a recipe gives it.

    [agent]
    harness = "/opt/mini/bin/mini --yolo -m openai/policy -t {instruction}"

Words may hold {instruction}, {base_url} (with /v1), {api_key} and {model}. Programs and files that a word names by its
absolute path are shown in the sandbox at the same path: a virtual environment or a folder node_modules whole, anything
else alone.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from woodshed.records import RecipeError

SHOWN = ("/usr", "/bin", "/lib", "/lib64", "/etc", "/env", "/workspace", "/proc", "/dev", "/sys", "/run")
"""Folders that every sandbox has."""


def words(harness: str) -> list[str]:
    """The words of a command line.

    Raises:
        ValueError: it cannot be split, or says nowhere what is to be done.
    """
    try:
        found = shlex.split(harness)
    except ValueError as error:
        raise ValueError(f"it cannot be split into words: {error}") from None
    if not any("{instruction}" in word for word in found):
        raise ValueError(
            "it has no {instruction}, where the agent is told the task; {base_url}, {api_key} and {model} can be in it"
        )
    return found


def filled(word: str, values: Mapping[str, str]) -> str:
    """A word with its fields filled in; other braces are left alone."""
    return re.sub(rf"\{{({'|'.join(values)})\}}", lambda match: values[match[1]], word)


def shown(command: Sequence[str]) -> dict[str, Path]:
    """Files and folders of the host that a command line needs, by their paths in the sandbox.

    Raises:
        RecipeError: a program that is not there.
    """
    return dict(_needed(command))


def _needed(command: Sequence[str]) -> Iterator[tuple[str, Path]]:
    for word in command:
        path = Path(word)
        if not path.is_absolute() or any(path.is_relative_to(folder) for folder in SHOWN):
            continue
        if not path.exists():
            raise RecipeError(f"agent.harness names {word}, which is not there")
        folder = installation(path)
        yield str(folder), folder


def installation(program: Path) -> Path:
    """All that belongs to a program: its virtual environment, the folder node_modules around it, or the file itself."""
    environment = program.parent.parent
    if program.parent.name == "bin" and (environment / "pyvenv.cfg").is_file():
        return environment
    return next((parent for parent in reversed(program.parents) if parent.name == "node_modules"), program)
