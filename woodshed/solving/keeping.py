"""Solutions kept in a run folder, as attempts with verdicts: what `sft.imitate` and `rl` read."""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Any

from woodshed.agent.attempt import AgentSettings
from woodshed.agent.deployment import DeploymentSettings
from woodshed.agent.tools import ToolSettings
from woodshed.experience import token_texts
from woodshed.records import Environment, Rollout, RunError, Task, Verdict
from woodshed.runs.folder import RunDir
from woodshed.settings import FolderName, FolderPath
from woodshed.solving.decisions import Solution
from woodshed.tokens.renderer import Renderer

PHASE = "solve"
SAME = ("model", "adapter", "codec")
"""Settings that one folder of solutions has once: attempts of other weights or another format are no experience of
these."""
LOCK_S = 30.0
"""Seconds to wait for another command that is writing its solution."""


class SolveSettings(DeploymentSettings):
    """A policy that works for a person."""

    name: FolderName = "solve"
    """Name of the folder of solutions below `runs`."""
    runs: FolderPath = Path("runs")
    """Parent folder of run folders."""
    agent: AgentSettings = AgentSettings(
        max_turns=50,
        turn_tokens=2048,
        rollout_tokens=32768,
        tools=ToolSettings(command_timeout_s=120.0, output_chars=8000),
    )


def solutions_folder(chosen: SolveSettings, manifest: dict[str, Any]) -> RunDir:
    """The folder of this policy's solutions, made if it is not there.

    Raises:
        RunError: a folder of something else, of another policy, or one that cannot be written.
    """
    path = chosen.runs / chosen.name
    if not (path / "recipe.toml").exists():
        run = RunDir.create(path, recipe=chosen.to_toml(), manifest=manifest)
        run.unlock()
        return run
    run = RunDir.open(path)
    known, mine = run.recipe(), chosen.model_dump(mode="json")
    if "stages" in known or "tasks" in known:
        raise RunError(
            f"{path} is a run of something else than solutions; choose another name with `name=OTHER`"
        )
    if differing := [key for key in SAME if known.get(key) != mine[key]]:
        key = differing[0]
        raise RunError(
            f"{path} holds solutions of {key} = {known.get(key)!r}, and this is {mine[key]!r}; choose another name "
            "with `name=OTHER`"
        )
    return run


def as_task(
    task_id: str, text: str = "", folder: Path = Path(), source_roots: tuple[str, ...] = (".",)
) -> Task:
    """A request as a task, which has no tests."""
    version = f"{sys.version_info.major}.{sys.version_info.minor}"
    return Task(
        id=task_id,
        name=task_id,
        folder=folder,
        instruction=text,
        environment=Environment(version, (), (), source_roots),
        allowed_paths=(),
        fail_to_pass=(),
        pass_to_pass=(),
        operator="request",
        level=0,
        target_path="",
        target_symbol="",
        target_lines=(0, 0),
        test_command="the tests",
    )


def holds_solutions(path: Path) -> bool:
    """True for a folder of solutions."""
    return (path / "solutions.jsonl").is_file() and (path / "recipe.toml").is_file()


def keep(
    run: RunDir, rollout: Rollout, renderer: Renderer, solution: Solution, verdict: Verdict | None
) -> None:
    """Append one attempt and what the person said about it.

    Raises:
        RunError: the folder cannot be written, or another command writes to it for longer than `LOCK_S`.
    """
    _lock(run)
    try:
        step = 1 + max((step for _, step, _ in run.batches("rollouts")), default=-1)
        run.append("rollouts", [rollout], PHASE, step)
        run.append("token_texts", [token_texts([rollout], renderer)], PHASE, step)
        run.append("solutions", [solution], PHASE, step)
        if verdict is not None:
            run.append("verdicts", [verdict], PHASE, step)
    finally:
        run.unlock()


def _lock(run: RunDir) -> None:
    deadline = time.monotonic() + LOCK_S
    while True:
        try:
            return run.lock()
        except RunError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.1)
