"""Task folders written, all or nothing."""

from __future__ import annotations

import dataclasses
import json
import shutil
import tempfile
from collections.abc import Mapping, Sequence
from importlib.resources import files as package_files
from pathlib import Path
from typing import Any

import tomli_w

from woodshed import documents
from woodshed.records import Environment, Task, TaskError, to_json
from woodshed.runs.files import write_atomically
from woodshed.tasks.contents import grading_files, is_allowed, original_api, shown_files
from woodshed.tasks.environment import as_argument, built_wheel, own_files, python_path
from woodshed.tasks.folder.reading import SCHEMA, content_id, load
from woodshed.tasks.paths import is_inside, is_protected, mode, tree

GRADER = (
    "records/__init__.py",
    "records/json_form.py",
    "boundary.py",
    "documents.py",
    "pysource/api_compat.py",
    "pysource/code.py",
    "pysource/syntax.py",
    "runs/links.py",
    "tasks/contents.py",
    "tasks/diff.py",
    "tasks/paths.py",
    "grading/decision.py",
    "grading/decoys.py",
    "grading/other_user.py",
    "grading/patches.py",
    "grading/results.py",
    "grading/shipped.py",
)
"""Modules of this package that tests/grader/ holds copies of: they decide, and need the standard library only."""
SESSION = (
    *("runner.py", "assert_hardening.py", "assert_hardening_values.py"),
    *(
        f"process_isolation/{name}.py"
        for name in (
            *(
                "__init__",
                "line",
                "values",
                "stand_ins",
                "peer",
                "lending",
                "imports",
                "confinement",
                "commitments",
            ),
            *("tests_side", "code_side"),
        )
    ),
)
"""Files of `grading` that run beside the code under test, as programs of their own."""
AGENT_TIMEOUT_S = 1800.0


def write(
    task: Task,
    folder: Path,
    *,
    workspace: Path,
    tests: Mapping[str, bytes],
    gold: Mapping[str, bytes | None],
    command_tests: Mapping[str, bytes] | None = None,
) -> Task:
    """The task written to a folder that does not exist yet, all or nothing, the same bytes for the same input.

    Args:
        task: its id, name and folder are filled in here.
        workspace: the repository as the agent shall see it.
        tests: original bytes of the test and configuration files that differ from the workspace or are absent from
            it, by workspace-relative path. Those that the workspace shows unchanged are added.
        gold: whole files of the gold patch, None for a file that it deletes.
        command_tests: files of tests/ for a task that a command grades, test.sh among them; without them, the
            grader's own.

    Raises:
        TaskError: the folder exists, or the task would not pass `load`.
    """
    if folder.exists():
        raise TaskError(f"{folder} exists already. Delete it, or write the task elsewhere.")
    folder.parent.mkdir(parents=True, exist_ok=True)
    scratch = Path(tempfile.mkdtemp(prefix=".write-", dir=folder.parent))
    try:
        staged = scratch / folder.name
        _fill_parts(staged, task, workspace, tests, gold)
        task = dataclasses.replace(task, name=folder.name, folder=staged, id="")
        own_tests = _own_tests(command_tests or {})
        written = _written_files(task) | own_tests
        _fill(staged, {path: data for path, data in written.items() if path.startswith("tests/")})
        task = dataclasses.replace(task, id=content_id(task, staged))
        _fill(staged, _written_files(task) | own_tests)
        load(staged)
        staged.rename(folder)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    return dataclasses.replace(task, folder=folder)


def keep_isolated_tests(task: Task, tests: Sequence[str], by: str) -> None:
    """Note in a task's folder the tests that can be isolated. They are no part of what its id is made from."""
    file = grading_files(task) / "expected.json"
    told = documents.read_json(file, TaskError) | {"isolated": {"by": by, "tests": list(tests)}}
    write_atomically(file, json.dumps(told, indent=1, ensure_ascii=True) + "\n")


def _fill_parts(
    staged: Path,
    task: Task,
    workspace: Path,
    tests: Mapping[str, bytes],
    gold: Mapping[str, bytes | None],
) -> None:
    """Write everything that is not made from the record."""
    _copy(dict(tree(workspace)), staged / "environment" / "workspace")
    shown = {p: f for p, f in tree(workspace) if is_protected(p) and not f.is_symlink()}
    _fill(staged / "tests" / "files", {p: f.read_bytes() for p, f in shown.items()} | dict(tests))
    _copy({p: f for p, f in tree(workspace) if is_allowed(task, p)}, shown_files(staged / "tests"))
    _fill(staged / "solution" / "files", {p: data for p, data in gold.items() if data is not None})
    if deletes := sorted(p for p, data in gold.items() if data is None):
        _fill(staged / "solution", {"deletes": "".join(f"{p}\n" for p in deletes).encode()})
    _fill(staged / "solution", {"solve.sh": SOLVE.encode()})


def _own_tests(command_tests: Mapping[str, bytes]) -> dict[str, bytes]:
    """Files of a command's tests, by path in the folder."""
    for path in command_tests:
        if path.partition("/")[0] in ("expected.json", "files", "shown", "grader"):
            raise TaskError(
                f"tests/{path} has the name of a file that a task folder keeps there; name it otherwise"
            )
    return {f"tests/{path}": data for path, data in command_tests.items()}


def _copy(files: Mapping[str, Path], target: Path) -> None:
    target.mkdir(parents=True)
    for path, file in files.items():
        copy = target / path
        copy.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(file, copy, follow_symlinks=False)
        if not copy.is_symlink():
            copy.chmod(mode(file))


def _fill(root: Path, contents: Mapping[str, bytes]) -> None:
    root.mkdir(parents=True, exist_ok=True)
    for path, data in sorted(contents.items()):
        if not is_inside(path):
            raise TaskError(f"{path!r} is not a relative path inside the workspace")
        target = root / path
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes(data)
        target.chmod(0o755 if data.startswith(b"#!") else 0o644)


def _written_files(task: Task) -> dict[str, bytes]:
    """Everything in the folder that is written from the record."""
    record = to_json(task)
    tests = ("fail_to_pass", "pass_to_pass", "stub_passes", "decoys")
    rest = {key: record[key] for key in record if key not in (*tests, "id", "name", "folder", "provenance")}
    expected = {key: record[key] for key in tests} | {"task": rest}
    expected |= {"api": to_json(original_api(task)), "isolated": None}
    texts = {
        "instruction.md": task.instruction,
        "task.toml": _toml(task, record),
        "environment/Dockerfile": _dockerfile(task.environment),
        "tests/test.sh": TEST,
        "tests/expected.json": json.dumps(expected, indent=1, ensure_ascii=True) + "\n",
    }
    own = {f"environment/own/{path}": text for path, text in own_files(task.environment).items()}
    return {path: text.encode() for path, text in {**texts, **own}.items()} | (
        _wheels(task.environment) | _grader()
    )


def _grader() -> dict[str, bytes]:
    """The grader's own code, by path in the folder."""
    package = package_files("woodshed")
    copies = {f"tests/grader/woodshed/{path}": package.joinpath(path).read_bytes() for path in GRADER}
    folders = {path.rpartition("/")[0] for path in copies}
    programs = {f"tests/woodshed_{n}": package.joinpath(f"grading/{n}").read_bytes() for n in SESSION}
    return {f"{folder}/__init__.py": b"" for folder in folders} | copies | programs


def _toml(task: Task, record: dict[str, Any]) -> str:
    ours = ["id", "operator", "level", "target_path", "target_symbol", "target_lines", "allowed_paths"]
    ours += ["test_command", "environment", "provenance"]
    is_command = task.verifier == "command"
    pairs = [entry.partition("=") for entry in task.environment.variables]
    variables = {name: value if given else f"${{{name}}}" for name, given, value in pairs}  # of Harbor's host
    ours += ["verifier"] if is_command else ["verify_timeout_s"]
    table = {
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
            # Two sessions of pytest, one of them twice as long, where the grader is ours; and room for the rest.
            "timeout_sec": task.verify_timeout_s * (1 if is_command else 4),
            **({"env": task.verifier_env} if task.verifier_env else {}),
            "environment_mode": "separate",
            "network_mode": "no-network",
        },
        "environment": {
            "workdir": "/workspace",
            "cpus": 1,
            "memory_mb": 2048,
            "network_mode": "no-network",
            **({"env": variables} if variables else {}),
        },
        "metadata": {"category": "feature", "woodshed": {key: record[key] for key in ours}},
    }
    try:
        return tomli_w.dumps(table)
    except TypeError as error:
        raise TaskError(
            f"{task.name}: provenance {task.provenance!r} cannot be written to TOML: {error}"
        ) from None


def _dockerfile(environment: Environment) -> str:
    own = "COPY own/ /usr/local/\n" if own_files(environment) else ""
    wheels = "COPY wheels/ /wheels/\n" if _wheels(environment) else ""
    arguments = (as_argument(pin, Path("/wheels")) for pin in environment.requirements)
    escaped = (text.replace("'", "'\\''") for text in arguments)
    pins = " \\\n    ".join(f"'{pin}'" for pin in escaped)
    return DOCKERFILE.format(
        python=environment.python, wheels=wheels, pins=pins, own=own, python_path=python_path(environment)
    )


def _wheels(environment: Environment) -> dict[str, bytes]:
    """Wheels that were built from paths and addresses, by their path in the folder: no index has them."""
    files = filter(None, map(built_wheel, environment.requirements))
    return {f"environment/wheels/{file.name}": file.read_bytes() for file in files}


DOCKERFILE = """\
FROM python:{python}-slim
RUN useradd --create-home agent
{wheels}RUN pip install --no-cache-dir --only-binary=:all: \\
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
export WOODSHED_PYTHONPATH="${PYTHONPATH-}" PYTHONPATH=/tests/grader
python -P -S -s -B -m woodshed.grading.shipped /tests /workspace /logs/verifier
status=$?
if [ "$status" -ne 0 ]; then  # what lies there is not the grader's
    chmod u+rwx /logs
    [ -d /logs/verifier ] && [ ! -L /logs/verifier ] || { rm -rf /logs/verifier; mkdir -p /logs/verifier; }
    chmod -R u+rwx /logs/verifier
    rm -rf /logs/verifier/reward.json /logs/verifier/reward.txt
fi
if [ "$status" -gt 128 ] || [ "$status" -eq 3 ]; then  # the code under test killed its grader, or stood in its way
    echo '{"reward": 0.0}' > /logs/verifier/reward.json
fi
exit "$status"
"""
SOLVE = """\
#!/bin/bash
set -euo pipefail
cp -R /solution/files/. /workspace/
if [ -f /solution/deletes ]; then
    while IFS= read -r path; do rm -f -- "/workspace/$path"; done < /solution/deletes
fi
"""
