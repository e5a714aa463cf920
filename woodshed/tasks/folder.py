"""A task on disk: a Harbor task directory (schema 1.4), read, checked and written.

    instruction.md            what the agent is asked to do
    task.toml                 Harbor's keys; everything else of a Task under [metadata.woodshed]
    environment/Dockerfile    the same pins that `tasks.environment` installs
    environment/own/          metadata and scripts that stand for the installed distribution
    environment/workspace/    the repository as the agent sees it, with the gap in it
    tests/files/              original tests and configuration, byte for byte: laid over the workspace for grading
    tests/expected.json       which tests must pass, and which of them pass with a stub
    tests/test.sh             grades in a fresh box under Harbor, with the same runner that `grading` uses
    solution/files/           the gold patch, whole files; solution/deletes lists files that it removes

What makes a task (the record, workspace/, tests/files/, solution/) is hashed into its id. The other files are written
from those and may change with the version of Woodshed.
"""

from __future__ import annotations

import dataclasses
import fcntl
import functools
import hashlib
import json
import os
import re
import shutil
import stat
import tempfile
import tomllib
import unicodedata
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from importlib.resources import files as package_files
from pathlib import Path, PurePosixPath
from typing import Any

import tomli_w
from pydantic import TypeAdapter, ValidationError

from woodshed.pysource import syntax
from woodshed.records import Environment, Patch, RunError, Task, TaskError, to_json
from woodshed.runs.folder import RunDir, made
from woodshed.runs.links import stays_inside
from woodshed.tasks.diff import unified
from woodshed.tasks.environment import own_files, python_path

SCHEMA = "1.4"
COPIES = {
    "woodshed_grade.py": "results.py",
    "woodshed_runner.py": "runner.py",
    "woodshed_assert_hardening.py": "assert_hardening.py",
}
"""Files in tests/ that are copies of files of the grading room."""
AGENT_TIMEOUT_S = 1800.0
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
NEVER_CROSS = re.compile(
    r"(^|/)(tests?|__pycache__|[^/]+\.(dist|egg)-info)/"  # test folders, installed metadata
    r"|(^|/)(conftest|sitecustomize|usercustomize|test_[^/]*|[^/]*_tests?)\.py$"
    r"|\.(ini|toml|cfg|pth|pyc)$"
)
"""Paths of tests, of what configures or hooks the test runner, and of what Python runs at start."""


def is_protected(path: str) -> bool:
    """Whether a workspace-relative path is restored for grading and never taken from an agent's patch."""
    return NEVER_CROSS.search(path) is not None


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
        actual = _content_id(task, folder)
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


def task_folders(path: Path) -> list[Path]:
    """A task folder, or every task folder in a folder of them, by name; also those that `load` refuses.

    Raises:
        TaskError: nothing there.
    """
    if not path.is_dir():
        raise TaskError(
            f"no task set at {path}. Make one with `woodshed tasks make SOURCE --out {path}`, or, where a recipe names "
            "it, as the first lines of the recipe say."
        )
    if any((path / name).exists() for name in REQUIRED[:2]):
        return [path]
    inner = sorted(child for child in path.iterdir() if child.is_dir() and not child.name.startswith("."))
    folders = [child for child in inner if any((child / name).exists() for name in REQUIRED[:4])]
    if not folders:
        raise TaskError(
            f"{path} holds no task: expected folders with a task.toml. "
            f"Make some with `woodshed tasks make SOURCE --out {path}`."
        )
    return folders


@contextmanager
def claimed(out: Path) -> Iterator[None]:
    """A folder of tasks that no other process adds to meanwhile.

    It is made where it is not there, and not left behind empty; what a killed process left unfinished in it goes.

    Raises:
        TaskError: another process is adding to it.
    """
    with made(out):
        descriptor = os.open(out, os.O_RDONLY | os.O_DIRECTORY)
        try:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise TaskError(
                    f"another process is making tasks in {out}; wait for it, or name another --out"
                ) from None
            for leftover in [*out.glob(".make-*"), *out.glob(".harden-*")]:
                shutil.rmtree(leftover, ignore_errors=True)
            yield
        finally:
            os.close(descriptor)


def load_set(*paths: Path) -> list[Task]:
    """Every task in these task folders, or folders of them, in the order of the paths, then by name.

    Raises:
        TaskError: nothing there, any task that `load` refuses, two tasks of one name, or one task twice.
    """
    tasks: dict[str, Task] = {}
    for folder in (folder for path in paths for folder in task_folders(path)):
        task = load(folder)
        if task.name in tasks:
            raise TaskError(
                f"two tasks are named {task.name!r}: {tasks[task.name].folder} and {folder}. Names tell attempts "
                "apart in a run, so rename one of the folders."
            )
        if twin := next((known for known in tasks.values() if known.id == task.id), None):
            raise TaskError(
                f"{twin.folder} and {folder} are the same task (id {task.id}): its attempts would count twice. "
                "Delete one of the folders."
            )
        tasks[task.name] = task
    return list(tasks.values())


def of_run(run: RunDir) -> dict[str, Task]:
    """The tasks that a run kept, by id.

    Raises:
        RunError: it holds none.
        TaskError: one that `load` refuses.
    """
    found = sorted(path.parent for path in (run.path / "tasks").glob("*/*/task.toml"))
    if not found:
        raise RunError(f"{run.path} does not hold its tasks (in {run.path / 'tasks'}); restore them")
    return {task.id: task for task in map(load, found)}


def write(
    task: Task,
    folder: Path,
    *,
    workspace: Path,
    tests: Mapping[str, bytes],
    gold: Mapping[str, bytes | None],
) -> Task:
    """The task written to a folder that does not exist yet, all or nothing, the same bytes for the same input.

    Args:
        task: its id, name and folder are filled in here.
        workspace: the repository as the agent shall see it.
        tests: original bytes of the test and configuration files that differ from the workspace or are absent from
            it, by workspace-relative path. Those that the workspace shows unchanged are added.
        gold: whole files of the gold patch, None for a file that it deletes.

    Raises:
        TaskError: the folder exists, or the task would not pass `load`.
    """
    if folder.exists():
        raise TaskError(f"{folder} exists already. Delete it, or write the task elsewhere.")
    folder.parent.mkdir(parents=True, exist_ok=True)
    scratch = Path(tempfile.mkdtemp(prefix=".write-", dir=folder.parent))
    try:
        staged = scratch / folder.name
        _copy(workspace, staged / "environment" / "workspace")
        shown = {p: f for p, f in _tree(workspace) if is_protected(p) and not f.is_symlink()}
        _fill(staged / "tests" / "files", {p: f.read_bytes() for p, f in shown.items()} | dict(tests))
        _fill(staged / "solution" / "files", {p: data for p, data in gold.items() if data is not None})
        if deletes := sorted(p for p, data in gold.items() if data is None):
            _fill(staged / "solution", {"deletes": "".join(f"{p}\n" for p in deletes).encode()})
        _fill(staged / "solution", {"solve.sh": SOLVE.encode()})
        task = dataclasses.replace(task, name=folder.name, folder=staged, id="")
        task = dataclasses.replace(task, id=_content_id(task, staged))
        _fill(staged, _written_files(task))
        load(staged)
        staged.rename(folder)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    return dataclasses.replace(task, folder=folder)


def gold_files(task: Task) -> dict[str, Path | None]:
    """Where the whole files of the gold patch are, by workspace-relative path; None for one that it deletes."""
    deletes = task.folder / "solution" / "deletes"
    gone = dict.fromkeys(_text(deletes).splitlines() if deletes.exists() else ())
    return {**dict(_tree(task.folder / "solution" / "files")), **gone}


def gold_patch(task: Task) -> Patch:
    """The patch that solves the task.

    Raises:
        TaskError: a gold file that is no text.
    """
    new = {path: None if file is None else _source(path, file) for path, file in gold_files(task).items()}
    diff = []
    for path, text in sorted(new.items()):
        before = task.folder / "environment" / "workspace" / path
        diff.append(unified(path, _source(path, before) if before.exists() else None, text))
    return Patch(files=new, diff="".join(diff))


def protected_files(task: Task) -> dict[str, bytes]:
    """Original tests and configuration, by workspace-relative path."""
    return {path: file.read_bytes() for path, file in _tree(protected_folder(task))}


def protected_folder(task: Task) -> Path:
    """Where those files are: a layer to lay over the workspace."""
    return task.folder / "tests" / "files"


def _record(folder: Path) -> Task:
    """The Task that the folder's texts spell, types checked, contents not yet."""
    for name in ("task.toml", "tests/expected.json", "instruction.md"):
        if not stays_inside(folder / name, folder):
            raise TaskError(f"{folder}: {name} is a link that leaves the task; replace it by the file itself")
    try:
        toml = tomllib.loads(_text(folder / "task.toml"))
        expected = json.loads(_text(folder / "tests" / "expected.json"))
    except ValueError as error:
        raise TaskError(f"{folder}: task.toml or tests/expected.json cannot be read: {error}") from None
    if toml.get("schema_version") != SCHEMA:
        raise TaskError(
            f"{folder}: task.toml has schema_version = {toml.get('schema_version')!r}; Woodshed reads {SCHEMA!r}."
        )
    ours = toml.get("metadata", {}).get("woodshed")
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
        **ours,
        "fail_to_pass": expected.get("fail_to_pass"),
        "pass_to_pass": expected.get("pass_to_pass"),
        "stub_passes": expected.get("stub_passes", {}),
        "name": folder.name,
        "folder": str(folder),
        "instruction": _text(folder / "instruction.md"),
        "verify_timeout_s": _dig(toml, "verifier.timeout_sec"),
    }
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
        raise TaskError(f"{folder}: {where} = {first['input']!r}: {first['msg'].lower()}") from None


@functools.cache
def _reader() -> TypeAdapter[Task]:
    return TypeAdapter(Task)


def _lint(task: Task, folder: Path) -> None:
    """What types cannot say."""
    for _ in _tree(folder):  # raises where a link leaves the folder
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
    if not task.fail_to_pass:
        raise TaskError(f"{folder}: no test fails before the gold patch, so there is nothing to learn")
    if twice := sorted(set(task.fail_to_pass) & set(task.pass_to_pass)):
        raise TaskError(f"{folder}: test {twice[0]!r} is both fail-to-pass and pass-to-pass")
    for kind, passing in task.stub_passes.items():
        if strange := sorted(set(passing) - set(task.fail_to_pass)):
            raise TaskError(
                f"{folder}: stub_passes.{kind} names {strange[0]!r}, which is no fail-to-pass test"
            )
    if not task.behaviour_tests:
        raise TaskError(f"{folder}: every fail-to-pass test passes with a stub, so there is nothing to learn")
    if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]*", task.name) or ".." in task.name:
        raise TaskError(f"{folder}: a task's folder name holds letters, digits, '.', '_' and '-' only")
    tests = dict(_tree(folder / "tests" / "files"))
    for test in (*task.fail_to_pass, *task.pass_to_pass):
        if test.partition("::")[0] not in tests:
            raise TaskError(f"{folder}: test {test!r} is expected, but its file is not in tests/files")


def _content_id(task: Task, folder: Path) -> str:
    record = {k: v for k, v in to_json(task).items() if k not in ("id", "name", "folder")}
    if not task.stub_passes:  # tasks made before this was known keep their ids
        del record["stub_passes"]
    digest = hashlib.sha256(json.dumps(record, sort_keys=True, ensure_ascii=True).encode())
    for part in HASHED:
        for path, file in _tree(folder / part):
            if part == "solution" and path == "solve.sh":
                continue
            data = os.fsencode(file.readlink()) if file.is_symlink() else file.read_bytes()
            entry = [part, path, _mode(file), hashlib.sha256(data).hexdigest()]
            digest.update(json.dumps(entry).encode())
    return digest.hexdigest()[:16]


def _tree(root: Path) -> Iterator[tuple[str, Path]]:
    """Every file below a folder, sorted by path.

    Raises:
        TaskError: a device, socket or pipe, a name that is not UTF-8, or a symlink that leaves the folder.
    """
    for here, folders, names in os.walk(root):
        folders.sort()
        links = [name for name in folders if Path(here, name).is_symlink()]
        for name in sorted(names + links):
            file = Path(here, name)
            path = file.relative_to(root).as_posix()
            try:
                path.encode()
            except UnicodeEncodeError:
                raise TaskError(f"{root}: file name {path!r} is not UTF-8") from None
            mode = file.lstat().st_mode
            if stat.S_ISLNK(mode):
                if file.readlink().is_absolute() or not stays_inside(file, root):
                    raise TaskError(
                        f"{file}: symlink to {str(file.readlink())!r} leaves {root}. Replace it by the file itself."
                    )
            elif not stat.S_ISREG(mode):
                raise TaskError(f"{file} is neither a file nor a folder; a task holds nothing else.")
            yield path, file


def _copy(source: Path, target: Path) -> None:
    target.mkdir(parents=True)
    for path, file in _tree(source):
        copy = target / path
        copy.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(file, copy, follow_symlinks=False)
        if not copy.is_symlink():
            copy.chmod(_mode(file))


def _fill(root: Path, contents: Mapping[str, bytes]) -> None:
    root.mkdir(parents=True, exist_ok=True)
    for path, data in sorted(contents.items()):
        if not is_inside(path):
            raise TaskError(f"{path!r} is not a relative path inside the workspace")
        target = root / path
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes(data)
        target.chmod(0o755 if data.startswith(b"#!") else 0o644)


def is_inside(path: str) -> bool:
    """Whether a path is relative, normal, UTF-8, not too long, and stays below its root, whatever its characters."""
    pure = PurePosixPath(path)
    normal = str(pure) == path and path != "." and not pure.is_absolute() and ".." not in pure.parts
    try:
        sizes = [len(part.encode()) for part in (path, *pure.parts)]
    except UnicodeEncodeError:
        return False
    return normal and "\0" not in path and sizes[0] < 1024 and all(size < 256 for size in sizes[1:])


def is_clean(path: str) -> bool:
    """Whether a path is inside, and printable: spaces of every width may be in it, line ends and controls may not."""
    return is_inside(path) and all(c.isprintable() or unicodedata.category(c) == "Zs" for c in path)


def _mode(file: Path) -> int:
    mode = file.lstat().st_mode
    return 0o777 if stat.S_ISLNK(mode) else 0o755 if mode & 0o100 else 0o644


def _source(path: str, file: Path) -> str:
    try:
        return syntax.read(path, file.read_bytes())
    except syntax.UnreadableError as error:
        raise TaskError(f"{file}: {error}") from None


def _text(file: Path) -> str:
    try:
        return file.read_bytes().decode("utf-8")
    except UnicodeDecodeError as error:
        raise TaskError(f"{file} is not UTF-8: {error.reason} at byte {error.start}") from None


def _dig(tree: Any, dotted: str) -> Any:
    for key in dotted.split("."):
        tree = tree.get(key) if isinstance(tree, dict) else None
    return tree


def _written_files(task: Task) -> dict[str, bytes]:
    """Everything in the folder that is written from the record."""
    record = to_json(task)
    expected = {
        "fail_to_pass": record["fail_to_pass"],
        "pass_to_pass": record["pass_to_pass"],
        "stub_passes": record["stub_passes"],
        "packages": record["environment"]["packages"],
        "timeout_s": task.verify_timeout_s,
    }
    grading = package_files("woodshed").joinpath("grading")
    copies = {f"tests/{name}": grading.joinpath(source).read_bytes() for name, source in COPIES.items()}
    texts = {
        "instruction.md": task.instruction,
        "task.toml": _toml(task, record),
        "environment/Dockerfile": _dockerfile(task.environment),
        "tests/test.sh": TEST,
        "tests/expected.json": json.dumps(expected, indent=1, ensure_ascii=True) + "\n",
    }
    own = {f"environment/own/{path}": text for path, text in own_files(task.environment).items()}
    return {path: text.encode() for path, text in {**texts, **own}.items()} | copies


def _toml(task: Task, record: dict[str, Any]) -> str:
    ours = ["id", "operator", "level", "target_path", "target_symbol", "target_lines", "allowed_paths"]
    ours += ["test_command", "environment", "provenance"]
    tree = {
        "schema_version": SCHEMA,
        # Harbor copies these, and nothing else, from the agent's box to the verifier's.
        "artifacts": [
            {"source": f"/workspace/{path}", "exclude": ["__pycache__", "*.pyc", "conftest.py"]}
            for path in task.allowed_paths
        ],
        "task": {
            "name": f"woodshed/{task.name}",
            "description": task.instruction.strip().partition("\n")[0].lstrip("# "),
            "keywords": ["python", task.operator],
        },
        "agent": {"timeout_sec": AGENT_TIMEOUT_S, "user": "agent", "network_mode": "no-network"},
        "verifier": {
            "timeout_sec": task.verify_timeout_s,
            "environment_mode": "separate",
            "network_mode": "no-network",
        },
        "environment": {"workdir": "/workspace", "cpus": 1, "memory_mb": 2048, "network_mode": "no-network"},
        "metadata": {"category": "feature", "woodshed": {key: record[key] for key in ours}},
    }
    try:
        return tomli_w.dumps(tree)
    except TypeError as error:
        raise TaskError(
            f"{task.name}: provenance {task.provenance!r} cannot be written to TOML: {error}"
        ) from None


def _dockerfile(environment: Environment) -> str:
    own = "COPY own/ /usr/local/\n" if own_files(environment) else ""
    escaped = (pin.replace("'", "'\\''") for pin in environment.requirements)
    pins = " \\\n    ".join(f"'{pin}'" for pin in escaped)
    return DOCKERFILE.format(
        python=environment.python, pins=pins, own=own, python_path=python_path(environment)
    )


DOCKERFILE = """\
FROM python:{python}-slim
RUN useradd --create-home agent
RUN pip install --no-cache-dir --only-binary=:all: \\
    {pins}
{own}ENV PYTHONPATH={python_path} PYTHONHASHSEED=0 PYTHONDONTWRITEBYTECODE=1 TZ=UTC LANG=C.UTF-8 CI=1
COPY --chown=agent workspace/ /workspace/
WORKDIR /workspace
"""
TEST = """\
#!/bin/bash
# A fresh box: the agent's allowed paths were copied into /workspace, nothing else of the agent is here.
set -u
mkdir -p /logs/verifier
exec python -P -s -B /tests/woodshed_grade.py /tests /workspace /logs/verifier
"""
SOLVE = """\
#!/bin/bash
set -euo pipefail
cp -R /solution/files/. /workspace/
if [ -f /solution/deletes ]; then
    while IFS= read -r path; do rm -f -- "/workspace/$path"; done < /solution/deletes
fi
"""
