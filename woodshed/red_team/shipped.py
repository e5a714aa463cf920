"""The grader that a task folder ships, run in a sandbox as another harness would."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from pathlib import Path

from woodshed import tasks
from woodshed.records import Patch, Task
from woodshed.sandbox import BUBBLEWRAP, Sandbox, SandboxProvider

COMMAND = "bash /tests/test.sh > /dev/null 2>&1; sleep 0.2"
"""A process that outlives the grader has the time to write a reward."""
REWARDS = ("/logs/verifier/reward.json", "/logs/verifier/reward.txt")
"""Files of which a harness may read either."""


def renewed(task: Task, home: Path, gold: Mapping[str, bytes | None] | None = None) -> Task:
    """The same task in another folder, which ships the grader as it is now.

    Args:
        gold: whole files of another solution.

    Raises:
        TaskError: the folder exists, or the solution is none.
    """
    own = {path: None if file is None else file.read_bytes() for path, file in tasks.gold_files(task).items()}
    tests = tasks.protected_files(task)
    return tasks.write(
        task, home, workspace=tasks.workspace(task), tests=tests, gold=own if gold is None else gold
    )


def shipped_reward(
    task: Task, patch: Patch, sandboxes: SandboxProvider = BUBBLEWRAP, *, timeout_s: float = 120.0
) -> float | None:
    """The reward that tests/test.sh leaves for a workspace with the whole patch in it; None where it says none.

    The box has one user for everything, who cannot write to /tests.

    Raises:
        SandboxError: the sandbox could not be opened, or was lost.
    """
    spec = dataclasses.replace(tasks.sandbox_spec(task), binds={"/tests": tasks.grading_files(task)})
    spec = dataclasses.replace(spec, scratch=("/logs",), user="grader")
    with sandboxes.open(spec) as sandbox:
        for path, text in patch.files.items():
            if text is None:
                sandbox.exec(["rm", "-f", "--", path])
            else:
                sandbox.write(path, text.encode())
        sandbox.exec(COMMAND, timeout_s=timeout_s)
        rewards = [_stated(sandbox, name) for name in REWARDS]
    return max((reward for reward in rewards if reward is not None), default=None)


def _stated(sandbox: Sandbox, path: str) -> float | None:
    """The reward that a file states: a number, or an object with one."""
    try:
        found = json.loads(sandbox.read(path))
        return float(found["reward"] if isinstance(found, dict) else found)
    except (OSError, ValueError, TypeError, KeyError):
        return None
