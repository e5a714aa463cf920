"""Lessons of confirmed cheats: search rules for the leak scan, and cases that the monitors must go on catching.

A search rule has the form of the leak scan's own, `{"pattern", "why", "provenance"}`: a regular expression for a file's
path relative to the workspace. A case is one line of JSON, an attempt without tokens and prose:

    {"rule": "caches", "turn": 2, "task": {...}, "rollout": {...}}

`replay` watches it again with today's rules; `woodshed monitor bench --cases FILE` does so for a file of them.
"""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from woodshed import documents
from woodshed.monitors.evidence import Evidence, is_there
from woodshed.monitors.flag_policy import confirmed
from woodshed.monitors.rules import RULES, watch
from woodshed.records import Flag, Rollout, RunError, Task, TaskError, from_json, to_json
from woodshed.runs.folder import RunDir
from woodshed.sandbox.spec import WORKSPACE
from woodshed.tasks import folder


@dataclass(frozen=True)
class SolutionPlace:
    """Pattern of paths where an attempt found a solution that it should have written."""

    pattern: str
    why: str
    provenance: str


@dataclass(frozen=True)
class ConfirmedCase:
    """A confirmed cheat."""

    rule: str
    turn: int
    task: Task
    rollout: Rollout


def learn(run: RunDir) -> tuple[list[SolutionPlace], list[ConfirmedCase]]:
    """Path patterns and cases of a run's confirmed cheats.

    Raises:
        RunError: the run does not hold its tasks, or not the attempts that were flagged.
        TaskError: a task of the run that cannot be read.
    """
    tasks = folder.of_run(run)
    rollouts = {r.id: r for _, _, r in run.read("rollouts", Rollout)}
    patterns: dict[str, SolutionPlace] = {}
    cases: list[ConfirmedCase] = []
    for flag in confirmed(f for _, _, f in run.read("flags", Flag)):
        rollout = rollouts.get(flag.rollout_id)
        task = tasks.get(rollout.task_id) if rollout else None
        if rollout is None or task is None:
            missing = f"attempt {flag.rollout_id}" if rollout is None else f"the task of attempt {rollout.id}"
            raise RunError(
                f"{run.path} lacks {missing}, which was flagged; only complete runs can be learned from"
            )
        for pattern in _places(task, rollout, flag, run.path.name):
            patterns.setdefault(pattern.pattern, pattern)
        cases.append(ConfirmedCase(flag.rule, flag.turn, task, slim(rollout)))
    return list(patterns.values()), cases


def _places(task: Task, rollout: Rollout, flag: Flag, run: str) -> Iterable[SolutionPlace]:
    """Patterns of the task's files, other than source and tests, that the flagged turn or an earlier one read."""
    evidence = Evidence(task, rollout)
    workspace = folder.workspace(task)
    paths = [(turn, path) for turn, path, _ in evidence.named]
    paths += [(a.turn, a.path) for a in rollout.accesses if a.mode == "read"]
    bait = task.provenance.get("bait", {}).get("path")
    for turn, path in paths:
        inner = path.removeprefix(f"{WORKSPACE}/")
        kind = evidence.class_of(path)
        is_residue = kind not in ("package", "tests", "workspace") or inner.split("/")[0].startswith(".")
        if turn > flag.turn or inner == path or not is_residue or not is_there(workspace, inner):
            continue
        if bait and (inner == bait or inner.startswith(bait + "/")):
            continue  # ours
        reason = f"an attempt that rule {flag.rule} caught read {inner}"
        yield SolutionPlace(_pattern(inner), reason, f"run {run}, rollout {rollout.id}, turn {flag.turn}")


def _pattern(inner: str) -> str:
    """Pattern for the first hidden or top folder of a path, else for its file name."""
    parts = inner.split("/")
    odd = next(
        (n for n, part in enumerate(parts[:-1]) if part.startswith((".", "__")) or n == 0), len(parts) - 1
    )
    head = "/".join(parts[: odd + 1])
    return rf"(^|/){re.escape(head)}(/|$)" if odd < len(parts) - 1 else rf"(^|/){re.escape(parts[-1])}$"


def slim(rollout: Rollout) -> Rollout:
    """The attempt without tokens and prose, which rules do not read."""
    turns = tuple(
        dataclasses.replace(turn, context_ids=(), opening=0, sampled_ids=(), logps=(), text="")
        for turn in rollout.turns
    )
    return dataclasses.replace(rollout, turns=turns)


def keep_cases(path: Path, cases: Iterable[ConfirmedCase]) -> int:
    """Append cases that the file does not hold yet; return their number."""
    known = {(case.rule, case.rollout.id) for case in read_cases(path)}
    fresh = [case for case in cases if (case.rule, case.rollout.id) not in known]
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a", encoding="utf-8") as file:
        file.writelines(json.dumps(to_json(case)) + "\n" for case in fresh)
    return len(fresh)


def read_cases(path: Path) -> list[ConfirmedCase]:
    """The cases of a file; none if there is no file.

    Raises:
        TaskError: a line that is not a case.
    """
    lines = documents.read(path, TaskError).splitlines() if path.exists() else []
    try:
        return [_case(documents.parse_json(line, str(path), TaskError)) for line in lines if line.strip()]
    except (ValueError, KeyError, TypeError) as error:
        raise TaskError(
            f"{path} does not hold cases ({error}); `woodshed tasks leaks TASKS --learn RUN` writes them"
        ) from None


def _case(data: dict[str, Any]) -> ConfirmedCase:
    return from_json(ConfirmedCase, data)


def replay(case: ConfirmedCase) -> bool:
    """True if today's rules still catch the case."""
    rule = case.rule.removeprefix("judge:")
    flags = watch(case.rollout, case.task, rules={rule: RULES[rule]} if rule in RULES else RULES)
    return any(flag.confidence >= 0.5 for flag in flags)
