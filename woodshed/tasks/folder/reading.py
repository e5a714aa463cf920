"""Task folders read and checked."""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import json
import math
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter, ValidationError

from woodshed import documents
from woodshed.records import Environment, Task, TaskError, to_json
from woodshed.runs.links import stays_inside
from woodshed.tasks.contents import gold_files, hidden_tests
from woodshed.tasks.environment import own_files
from woodshed.tasks.paths import REMEDY, is_clean, is_protected, mode, text_of, tree

SCHEMA = "1.4"
HASHED = ("environment/workspace", "tests/files", "solution")
REQUIRED = (
    "instruction.md",
    "task.toml",
    "environment/Dockerfile",
    "environment/workspace",
    "tests/test.sh",
    "tests/expected.json",
    "tests/files",
    "solution/solve.sh",
    "solution/files",
)
FIXED = {
    "verifier.environment_mode": "separate",
    "verifier.network_mode": "no-network",
    "agent.network_mode": "no-network",
    "environment.network_mode": "no-network",
}
"""Harbor keys that a trustworthy task may not have otherwise."""
VERIFIER_TIMEOUT_S = 600.0
"""Harbor's own, where a task says nothing."""
NOT_HONOURED = {
    "user": "the command runs without privileges, as a user of its own",
    "allowed_hosts": "a sandbox has no network",
    "environment": "the command runs in the task's own environment",
    "collect": "nothing but the allowed paths is collected from an attempt",
}
"""Keys of Harbor's [verifier] that no verifier here can honour, with the reason."""
VERIFIER_KEYS = ("timeout_sec", "env", "environment_mode", "network_mode")


def load(folder: Path) -> Task:
    """The task in a folder, checked.

    Raises:
        TaskError: a missing file, another schema, a value of the wrong type, a symlink that leaves the task, text
            that is not UTF-8, or contents that disagree with the recorded id.
    """
    for name in REQUIRED:
        if not (folder / name).exists():
            found = "which is not there" if not folder.exists() else f"which lacks {name}"
            raise TaskError(
                f"{folder}: expected a task folder, {found}. Restore it, or make it with `woodshed tasks make`."
            )
    with _readable(folder):
        task = _record(folder)
        _lint(task, folder)
        actual = content_id(task, folder)
    if actual != task.id:
        raise TaskError(
            f"{folder}: the contents hash to {actual}, task.toml says id = {task.id!r}: a file was changed after the "
            "task was made. Undo the change, or make the task again with `woodshed tasks make`."
        )
    return task


def peek(folder: Path) -> Task:
    """The task that a folder's texts spell, for showing it: what the folder holds besides is not looked at.

    Raises:
        TaskError: texts that are missing or cannot be read.
    """
    with _readable(folder):
        return _record(folder)


@contextmanager
def _readable(folder: Path) -> Iterator[None]:
    """A file that cannot be read (a folder of its name, no permission) is a damaged task."""
    try:
        yield
    except OSError as error:
        raise TaskError(f"{folder}: {error.filename} cannot be read: {error.strerror}") from None


def _record(folder: Path) -> Task:
    """The Task that the folder's texts spell, types checked, contents not yet."""
    for name in ("task.toml", "tests/expected.json", "instruction.md"):
        if not stays_inside(folder / name, folder):
            raise TaskError(f"{folder}: {name} is a link that leaves the task; replace it by the file itself")
    toml = documents.read_toml(folder / "task.toml", TaskError, REMEDY)
    expected = documents.read_json(folder / "tests" / "expected.json", TaskError, REMEDY)
    if toml.get("schema_version") != SCHEMA:
        raise TaskError(
            f"{folder}: task.toml has schema_version = {toml.get('schema_version')!r}; Woodshed reads {SCHEMA!r}."
        )
    ours = _dig(toml, "metadata.woodshed")
    if not isinstance(ours, dict) or not isinstance(expected, dict):
        raise TaskError(
            f"{folder}: task.toml has no [metadata.woodshed], so this task was not made by Woodshed."
        )
    for key, value in FIXED.items():
        if (seen := _dig(toml, key)) != value:
            raise TaskError(
                f"{folder}: task.toml has {key} = {seen!r}; a task that is trained on needs {value!r}."
            )
    fields = {
        **_verifier(folder, toml["verifier"], ours.get("verifier", "pytest")),
        **ours,
        "fail_to_pass": expected.get("fail_to_pass"),
        "pass_to_pass": expected.get("pass_to_pass"),
        "stub_passes": expected.get("stub_passes", {}),
        "decoys": expected.get("decoys", []),
        "name": folder.name,
        "folder": str(folder),
        "instruction": text_of(folder / "instruction.md"),
    }
    return _checked(folder, fields)


def _verifier(folder: Path, table: dict[str, Any], kind: object) -> dict[str, Any]:
    """The fields of a Task that Harbor's [verifier] says.

    Raises:
        TaskError: a key that is unknown, or that the task's verifier does not honour.
    """
    for key, value in table.items():
        if key in NOT_HONOURED and value:
            raise TaskError(
                f"{folder}: task.toml has verifier.{key} = {value!r}, which is not honoured: {NOT_HONOURED[key]}. "
                "Take it out, if the task holds without it"
            )
        if key not in (*VERIFIER_KEYS, *NOT_HONOURED):
            known = ", ".join(VERIFIER_KEYS)
            raise TaskError(f"{folder}: task.toml has an unknown key verifier.{key}; known: {known}")
    limit_s, variables = table.get("timeout_sec", VERIFIER_TIMEOUT_S), table.get("env", {})
    is_number = isinstance(limit_s, int | float) and not isinstance(limit_s, bool)
    if not is_number or not 0 < limit_s < math.inf:
        raise TaskError(
            f"{folder}: task.toml has verifier.timeout_sec = {limit_s!r}; expected seconds above 0"
        )
    if variables and kind != "command":
        raise TaskError(
            f"{folder}: task.toml has verifier.env, which only verifier = 'command' honours; take it out"
        )
    for name, value in variables.items() if isinstance(variables, dict) else ((variables, None),):
        if not isinstance(value, str) or "${" in value:
            raise TaskError(
                f"{folder}: task.toml has verifier.env.{name} = {value!r}; expected a text, and none of the host's "
                "variables, which a sandbox is never given"
            )
    return {"verify_timeout_s": float(limit_s), "verifier_env": variables}


def _checked(folder: Path, fields: dict[str, Any]) -> Task:
    """The record of these fields, each of a known name and of its type."""
    for kind, table in ((Task, fields), (Environment, fields.get("environment"))):
        known = [f.name for f in dataclasses.fields(kind)]
        if isinstance(table, dict) and (unknown := sorted(table.keys() - set(known))):
            raise TaskError(
                f"{folder}: task.toml has an unknown key {unknown[0]!r}; known: {', '.join(known)}"
            )
    try:
        return _reader().validate_json(json.dumps(fields, default=str), strict=True)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"]))
        raise TaskError(f"{folder}: {where} = {repr(first['input'])[:120]}: {first['msg'].lower()}") from None


@functools.cache
def _reader() -> TypeAdapter[Task]:
    return TypeAdapter(Task)


def _lint(task: Task, folder: Path) -> None:
    """Check the values that types leave open."""
    for _ in tree(folder):  # raises where a link leaves the folder
        pass
    for path in (*task.allowed_paths, task.target_path, *task.environment.source_roots):
        if not is_clean(path) and path not in (".", ""):
            raise TaskError(f"{folder}: {path!r} is not a relative path inside the workspace")
    for path in gold_files(task):
        if not is_clean(path):
            raise TaskError(f"{folder}: its solution names {path!r}, which is no path inside the workspace")
    own_files(task.environment)
    for path in task.allowed_paths:
        if path in (".", "") or is_protected(path) or is_protected(path + "/"):
            raise TaskError(
                f"{folder}: allowed path {path!r} would let tests or configuration cross into grading. "
                "Name the package's folders or files."
            )
    if not task.fail_to_pass and task.verifier != "command":
        raise TaskError(f"{folder}: no test fails before the gold patch, so there is nothing to learn")
    if twice := sorted(set(task.fail_to_pass) & set(task.pass_to_pass)):
        raise TaskError(f"{folder}: test {twice[0]!r} is both fail-to-pass and pass-to-pass")
    for kind, passing in task.stub_passes.items():
        if strange := sorted(set(passing) - set(task.fail_to_pass)):
            raise TaskError(
                f"{folder}: stub_passes.{kind} names {strange[0]!r}, which is no fail-to-pass test"
            )
    for decoy in task.decoys:
        if not any(test == decoy.test or test.startswith(f"{decoy.test}[") for test in task.fail_to_pass):
            raise TaskError(f"{folder}: a decoy copies {decoy.test!r}, which is no fail-to-pass test")
    if task.fail_to_pass and not task.behaviour_tests:
        raise TaskError(f"{folder}: every fail-to-pass test passes with a stub, so there is nothing to learn")
    if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]*", task.name) or ".." in task.name:
        raise TaskError(f"{folder}: a task's folder name holds letters, digits, '.', '_' and '-' only")
    tests = dict(tree(hidden_tests(task)))
    for test in (*task.fail_to_pass, *task.pass_to_pass):
        if test.partition("::")[0] not in tests:
            raise TaskError(f"{folder}: test {test!r} is expected, but its file is not in tests/files")


def content_id(task: Task, folder: Path) -> str:
    record = {k: v for k, v in to_json(task).items() if k not in ("id", "name", "folder")}
    if not task.stub_passes:  # tasks made before this was known keep their ids
        del record["stub_passes"]
    if not task.decoys:
        del record["decoys"]
    if task.verifier == "pytest":
        del record["verifier"]
    if not task.verifier_env:
        del record["verifier_env"]
    for name in ("variables", "pytest_options"):
        if not record["environment"][name]:
            del record["environment"][name]
    digest = hashlib.sha256(json.dumps(record, sort_keys=True, ensure_ascii=True).encode())
    own_tests = ("tests",) if task.verifier == "command" else ()  # what grades is then the folder's own
    for part in (*HASHED, *own_tests):
        for path, file in tree(folder / part):
            if part == "solution" and path == "solve.sh":
                continue
            data = os.fsencode(file.readlink()) if file.is_symlink() else file.read_bytes()
            entry = [part, path, mode(file), hashlib.sha256(data).hexdigest()]
            digest.update(json.dumps(entry).encode())
    return digest.hexdigest()[:16]


def _dig(table: Any, dotted: str) -> Any:
    for key in dotted.split("."):
        table = table.get(key) if isinstance(table, dict) else None
    return table
