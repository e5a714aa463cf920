"""A repository's configuration files, read as data: odd contents are ignored, or an error that names them."""

from __future__ import annotations

import ast
import configparser
import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from woodshed import documents
from woodshed.pysource import syntax
from woodshed.records import TaskError

IMPORT = re.compile(rb"^[ \t]*(?:from|import)[ \t]+([A-Za-z_]\w*)", re.MULTILINE)
"""The module that a line imports, its first name."""


def read_text(path: Path) -> str:
    """The text of a file as pip reads it: by its byte order mark, else as UTF-8. "" where there is no file."""
    try:
        with documents.open_file(path, TaskError) as file:
            data = file.read(documents.MOST_BYTES)
    except (OSError, TaskError):
        return ""
    if data.startswith((b"\xff\xfe", b"\xfe\xff")):
        return data.decode("utf-16", errors="replace")
    return data.decode("utf-8-sig", errors="replace")


def read_toml(path: Path) -> dict[str, Any]:
    """A TOML file; {} where there is none.

    Raises:
        TaskError: it cannot be read.
    """
    try:
        return documents.parse_toml(documents.read(path, TaskError), path.name, TaskError)
    except FileNotFoundError:
        return {}


def table(value: Any, *keys: str) -> dict[str, Any]:
    """The table below the keys; {} where something on the way is no table."""
    for key in keys:
        value = value.get(key) if isinstance(value, dict) else None
    return value if isinstance(value, dict) else {}


def read_ini(path: Path) -> configparser.RawConfigParser:
    """An INI file, percent signs taken as they are; empty where it is missing or broken."""
    return documents.parse_ini(read_text(path)) or configparser.RawConfigParser()


def words(value: Any) -> list[str]:
    """A setting that holds words: a list of them, or one text."""
    if isinstance(value, list):
        return [str(each) for each in value]
    text = value if isinstance(value, str) else ""
    try:
        return shlex.split(text, comments=True)
    except ValueError:  # a quotation mark without its other half
        return text.split()


def pytest_settings(tree: Path) -> dict[str, Any]:
    """The settings of pytest, from the one file that it would choose.

    Raises:
        TaskError: a file cannot be read.
    """
    for name in ("pytest.toml", ".pytest.toml"):
        if (tree / name).is_file():
            return table(read_toml(tree / name), "pytest")
    for name in ("pytest.ini", ".pytest.ini"):
        if (tree / name).is_file():
            return _section(tree / name, "pytest")
    settings = table(read_toml(tree / "pyproject.toml"), "tool", "pytest")
    settings = table(settings, "ini_options") or {
        key: settings[key] for key in settings.keys() - {"ini_options"}
    }
    return settings or _section(tree / "tox.ini", "pytest") or _section(tree / "setup.cfg", "tool:pytest")


def inherit_from_root(tree: Path, root: Path) -> None:
    """Give a project without settings of pytest those of its repository's root, which pytest would find above it: but
    for those that name places there. Then the conftest file of the root is one of the project's, too.

    Raises:
        TaskError: a file cannot be read.
    """
    places = ("testpaths", "pythonpath", "norecursedirs", "confcutdir", "cache_dir")
    settings = {} if pytest_settings(tree) else pytest_settings(root)
    lines = [f"{key} = {_ini_value(key, value)}" for key, value in settings.items() if key not in places]
    if not lines or (tree / "pytest.ini").exists():
        return
    (tree / "pytest.ini").write_text("\n".join(["[pytest]", *lines, ""]), encoding="utf-8")
    conftest = root / "conftest.py"
    if conftest.is_file() and not conftest.is_symlink() and not (tree / "conftest.py").exists():
        imported = {name.decode() for name in IMPORT.findall(conftest.read_bytes())}
        if not any((root / name).is_dir() or (root / f"{name}.py").is_file() for name in imported):
            (tree / "conftest.py").write_bytes(conftest.read_bytes())


def _ini_value(key: str, value: Any) -> str:
    if isinstance(value, list):
        return shlex.join(map(str, value)) if key == "addopts" else "".join(f"\n    {each}" for each in value)
    return str(value).lower() if isinstance(value, bool) else str(value).replace("\n", "\n    ")


def refuse_what_pytest_refuses(tree: Path) -> None:
    """Raise TaskError if pytest would end with a traceback about its settings in pyproject.toml."""
    if any((tree / name).is_file() for name in ("pytest.toml", ".pytest.toml", "pytest.ini", ".pytest.ini")):
        return  # pytest does not read pyproject.toml then
    whole: Any = read_toml(tree / "pyproject.toml")
    for key in ("tool", "pytest", "ini_options"):
        whole = whole.get(key, {})
        if not isinstance(whole, dict):
            raise TaskError(f"pyproject.toml: pytest refuses {key} = {str(whole)[:80]}; make that a table")


def _section(path: Path, name: str) -> dict[str, Any]:
    """A section; `optionxform` has put its keys in lower case."""
    file = read_ini(path)
    return dict(file[name]) if file.has_section(name) else {}


def conftest_plugins(tree: Path) -> Iterator[str]:
    """Modules that conftest files name in `pytest_plugins`, as far as they are written out."""
    for path in sorted(tree.rglob("conftest.py")):
        try:
            body = syntax.parse(path.read_bytes()).body
        except (SyntaxError, ValueError, RecursionError, OSError):
            continue
        for statement in body:
            targets = statement.targets if isinstance(statement, ast.Assign) else []
            targets = [statement.target] if isinstance(statement, ast.AnnAssign) else targets
            if any(isinstance(target, ast.Name) and target.id == "pytest_plugins" for target in targets):
                yield from (
                    node.value
                    for node in ast.walk(statement)
                    if isinstance(node, ast.Constant) and isinstance(node.value, str)
                )
