"""Paths in the words of commands: recognised and made absolute."""

from __future__ import annotations

import posixpath
import re

from woodshed.sandbox.spec import HOME, WORKSPACE

CONFIG = re.compile(r"(^|/)(conftest\.py|\.?pytest\.(ini|toml)|tox\.ini|setup\.cfg|pyproject\.toml)$")
"""Files that configure or hook the test runner."""
METADATA = re.compile(r"/task\.toml$|^/(workspace/)?(instruction\.md|expected\.json)$|^/tasks?(/|$)")
"""The task's own description, and the folders of other tasks."""
SYSTEM_HOOKS = re.compile(r"^/etc/(profile|bash\.bashrc|ld\.so\.preload|environment)|-packages/[^/]+\.pth$")
"""Files outside of the workspace and the home folder that Python or a shell runs at start."""


def absolute(path: str, folder: str = WORKSPACE) -> str:
    """The path as the sandbox sees it, without `.` and `..`; ~ is the home folder."""
    path = path.replace("${HOME}", "~").replace("$HOME", "~").replace("$PWD", WORKSPACE)
    if path.startswith("~"):
        path = HOME + path[1:]
    return posixpath.normpath(posixpath.join(folder, path))


def looks_like_path(word: str) -> bool:
    """True if an argument of a command could name a file."""
    named = "/" in word or "." in word or "~" in word or word in ("tags", "TAGS")
    return named and len(word) < 512 and word[0] != "-"
