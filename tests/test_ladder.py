"""The architecture, as a test: imports point down the ladder, nothing cycles, and torch stays upstairs."""

from __future__ import annotations

import ast
import graphlib
import os
import re
import resource
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import woodshed

PACKAGE = Path(woodshed.__file__).parent
TORCH_ROOMS = ("stages", "learning", "parallel", "muon")
TORCH_ROOMS_WITHIN = ("engines/local",)
TORCH_LIBRARIES = {"torch", "accelerate", "peft"}


def ladder() -> dict[str, int]:
    """Top-level module to its line on the ladder, 0 at the top."""
    _, _, listing = (woodshed.__doc__ or "").partition("The ladder.")
    lines = [line.split() for line in listing.splitlines() if line.startswith("    ")]
    return {name: rung for rung, names in enumerate(lines) for name in names}


def modules() -> dict[str, Path]:
    """Dotted name to file, for every module but the package's own `__init__`."""
    files = {}
    for path in sorted(PACKAGE.rglob("*.py")):
        parts = path.relative_to(PACKAGE).with_suffix("").parts
        if name := ".".join(part for part in parts if part != "__init__"):
            files[name] = path
    return files


def imports(name: str, source: str, known: set[str], is_package: bool = False) -> Iterator[str]:
    """Dotted names below `woodshed` that a module imports anywhere, also inside functions."""
    parents = name.split(".") if is_package else name.split(".")[:-1]
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            targets = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            up = ["woodshed", *parents][: len(parents) + 2 - node.level] if node.level else []
            origin = ".".join([*up, *filter(None, [node.module])])
            targets = [f"{origin}.{alias.name}" for alias in node.names]
        else:
            continue
        for target in targets:
            inner = target.removeprefix("woodshed.")
            if inner != target:
                yield inner if inner in known else inner.rpartition(".")[0] or inner


def arrows() -> list[tuple[str, str]]:
    files = modules()
    return [
        (name, target)
        for name, path in files.items()
        for target in imports(name, path.read_text("utf-8"), set(files), path.name == "__init__.py")
        if target in files
    ]


def wrong_arrows(found: list[tuple[str, str]]) -> list[str]:
    rungs = ladder()
    pairs = {(a.split(".")[0], b.split(".")[0]) for a, b in found}
    return [f"{a} -> {b}" for a, b in sorted(pairs) if a != b and rungs[a] >= rungs[b]]


def cycle(found: list[tuple[str, str]]) -> list[str]:
    """One import cycle among files of the same folder, or nothing."""
    graph: dict[str, set[str]] = {}
    for a, b in found:
        if a != b and a.split(".")[0] == b.split(".")[0]:
            graph.setdefault(a, set()).add(b)
    try:
        graphlib.TopologicalSorter(graph).prepare()
    except graphlib.CycleError as error:
        return list(error.args[1])
    return []


def test_every_module_is_on_the_ladder():
    assert {name.split(".")[0] for name in modules()} <= set(ladder())


def test_imports_point_down():
    assert wrong_arrows(arrows()) == []


def test_no_cycles_inside_a_folder():
    assert cycle(arrows()) == []


def test_planted_arrows_are_found():
    known = {"sandbox", "grading", "grading.verifier", "agent", "agent.loop", "agent.tools", "tasks"}
    hidden = "def f():\n    from woodshed.grading import verifier\n"
    assert list(imports("sandbox", hidden, known)) == ["grading.verifier"]
    assert list(imports("agent.loop", "from .tools import run\nfrom ..tasks import load", known)) == [
        "agent.tools",
        "tasks",
    ]
    assert list(imports("agent", "from .loop import Attempt", known, is_package=True)) == ["agent.loop"]
    assert list(imports("agent.loop", "import woodshed\nfrom woodshed import __version__", known)) == [
        "__version__"
    ]
    assert wrong_arrows([("sandbox", "grading.verifier"), ("agent.loop", "tasks")]) == ["sandbox -> grading"]
    assert cycle([("agent.loop", "agent.tools"), ("agent.tools", "agent.loop")])


def may_use_torch(path: Path) -> bool:
    inner = path.relative_to(PACKAGE).as_posix()
    return inner.startswith(tuple(f"{room}/" for room in (*TORCH_ROOMS, *TORCH_ROOMS_WITHIN)))


@pytest.mark.parametrize("name", [name for name, path in modules().items() if not may_use_torch(path)])
def test_torch_is_not_named_downstairs(name: str):
    tree = ast.parse(modules()[name].read_text("utf-8"))
    named = {alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names}
    named |= {node.module or "" for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
    assert not {module.split(".")[0] for module in named} & TORCH_LIBRARIES


def test_torch_is_not_loaded_downstairs():
    """Nor by a library of ours: whoever makes tasks or evaluates an endpoint may have no torch installed."""
    names = [
        f"woodshed.{name}" for name, path in modules().items() if not may_use_torch(path) and name != "train"
    ]  # `train` names no torch and runs the stages, which load it
    code = """
import importlib, sys
for name in sys.argv[1:]:
    importlib.import_module(name)
    assert "torch" not in sys.modules, f"{name} loads torch"
"""
    done = subprocess.run([sys.executable, "-c", code, *names], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr


def test_help_takes_half_a_second_of_processor_time():
    """Least of three, process start included. Seconds on the wall depend on what else the machine does."""
    seconds = []
    for _ in range(3):
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        subprocess.run(
            [sys.executable, "-m", "woodshed", "--help"],
            check=True,
            capture_output=True,
            timeout=30,
            env={**os.environ, "PYTHONWARNINGS": "ignore"},
        )
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        seconds.append(after.ru_utime - before.ru_utime + after.ru_stime - before.ru_stime)
    assert min(seconds) < 0.5, seconds


JOINS = (
    r"\.folder\s*/\s",  # into the folder of a task
    r"/\s*[\"'](environment|solution|tests)[\"'/]",
    r"[\"'](environment/(workspace|own)|solution/files|tests/files)\b",
)
OTHER_FOLDERS = {
    "synthesis/task_generator.py": "self.folder / ",  # where ordered tasks arrive
    "synthesis/siblings.py": "self.folder / place",  # of a repository
    "synthesis/proof.py": "gold patch is absent",  # a sentence
}


def joins(source: str) -> list[str]:
    """Lines that join a path into a task folder."""
    return [line.strip() for line in source.splitlines() if any(re.search(join, line) for join in JOINS)]


def test_only_the_package_of_tasks_joins_a_path_into_a_task_folder() -> None:
    """The rest asks `woodshed.tasks` for what it wants, so that a task of another format may lie otherwise."""
    assert joins('root = task.folder / "environment" / "workspace"')
    assert joins('file = home / "solution/files" / path')
    found = {
        name: [line for line in joins(path.read_text("utf-8")) if OTHER_FOLDERS.get(name, "\n") not in line]
        for path in PACKAGE.rglob("*.py")
        if not (name := path.relative_to(PACKAGE).as_posix()).startswith("tasks/")
    }
    assert {name: lines for name, lines in found.items() if lines} == {}
