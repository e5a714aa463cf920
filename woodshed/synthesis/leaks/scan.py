"""The gate: is what a task took away still somewhere in the root file system that an attempt will see?

The search runs inside a sandbox opened as an attempt's is (`scanner`). What belongs to the machine and to the
dependencies is searched once for all tasks that share an environment, the rest once per task.

Verdict per finding, after the kinds of hits that leak scanners of benchmarks missed:
- "body": the code itself, verbatim, reformatted, renamed, or as bytecode. Always a leak.
- "name": residue (caches, histories, indexes) that mentions hidden tests or removed functions. Always a leak.
- "signature": a name with its parameters. A leak from level 2 on, unless the instruction states it.
- "unread": a file in a known form that could not be opened. A leak where it is residue.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from woodshed.records import SandboxError, Task
from woodshed.sandbox import Limits, SandboxSpec, open_sandbox
from woodshed.synthesis.leaks import evidence, residue
from woodshed.synthesis.leaks.prints import Body
from woodshed.tasks.environment import prepare, sandbox_spec

LIBRARY = "/run/woodshed/lib"
PROGRAMS = ("prints.py", "readers.py", "scanner.py")
SHARED = ("/usr", "/env", "/opt/python", "/bin", "/sbin", "/lib", "/lib32", "/lib64", "/libx32", "/etc")
"""The same for every task of an environment."""
TIMEOUT_S = 1800.0

Progress = Callable[[int, int, str], None]


@dataclass(frozen=True)
class Finding:
    """One place that tells something, with the evidence."""

    kind: str
    """"body", "name", "signature" or "unread"."""
    what: str
    """The function or hidden test that it is about, "" where that is not known."""
    where: str
    """Absolute path in the sandbox; " > " leads into archives."""
    quote: str
    is_leak: bool


@dataclass(frozen=True)
class Report:
    """What the scan of one task found."""

    task: str
    findings: tuple[Finding, ...]
    files: int
    """Files read in the task's own part of the root file system."""

    @property
    def leaks(self) -> tuple[Finding, ...]:
        return tuple(finding for finding in self.findings if finding.is_leak)


def scan(
    tasks: Sequence[Task],
    *,
    rules: Sequence[residue.Rule] = (),
    shared: Sequence[str] = SHARED,
    spec: Callable[[Task], SandboxSpec] = sandbox_spec,
    progress: Progress = lambda done, total, text: None,
) -> list[Report]:
    """A report per task, in their order.

    Args:
        rules: more places that count as residue.
        shared: what of the machine and the dependencies is searched as well.
        spec: how an attempt's sandbox is opened.

    Raises:
        SandboxError: the search did not come to its end; names the file it was at.
    """
    known = {task.name: evidence.bodies(task) for task in tasks}
    found: dict[str, list[Finding]] = {task.name: [] for task in tasks}
    files: dict[str, int] = {}
    groups: dict[str, list[Task]] = {}
    for task in tasks:
        groups.setdefault(repr(task.environment), []).append(task)
    for group in groups.values() if shared else ():
        progress(0, 0, f"searching the environment of {len(group)} tasks")
        prepare(group[0].environment)
        _search(group, known, shared, ("/workspace",), rules, spec(group[0]), found)
    for done, task in enumerate(tasks):
        progress(done, len(tasks), f"searching tasks, {task.name}")
        files[task.name] = _search([task], known, ("/", "/dev/shm"), SHARED, rules, spec(task), found)
    progress(len(tasks), len(tasks), "searching tasks")
    return [Report(task.name, tuple(found[task.name]), files[task.name]) for task in tasks]


def with_programs(spec: SandboxSpec, names: Sequence[str] = PROGRAMS) -> SandboxSpec:
    """The same sandbox, in which programs of this folder can be started as modules."""
    here = Path(__file__).parent
    inner = f"{LIBRARY}/woodshed/synthesis/leaks"
    binds = {f"{inner}/{name}": here / name for name in names}
    return replace(spec, binds={**spec.binds, **binds}, limits=Limits(memory_mb=3072))


def _search(
    group: Sequence[Task],
    known: dict[str, list[Body]],
    roots: Sequence[str],
    skip: Sequence[str],
    rules: Sequence[residue.Rule],
    spec: SandboxSpec,
    found: dict[str, list[Finding]],
) -> int:
    """Adds to `found`; the number of files that were read."""
    kinds = ("gold", "test") if "/" in roots else ("gold",)  # the machine has no copies of hidden tests
    listed = [body for task in group for body in known[task.name] if body.kind in kinds]
    request = {
        "bodies": [asdict(replace(b, marks=frozenset(), names=frozenset())) | _sets(b) for b in listed],
        "names": {task.name: evidence.hidden_names(task, known[task.name]) for task in group},
        "residue": residue.pattern(rules),
        "roots": list(roots),
        "skip": list(skip),
    }
    with open_sandbox(with_programs(spec)) as sandbox:
        result = sandbox.exec(
            ["/env/bin/python", "-P", "-s", "-B", "-m", "woodshed.synthesis.leaks.scanner"],
            env={"PYTHONPATH": LIBRARY},
            stdin=json.dumps(request).encode(),
            timeout_s=TIMEOUT_S,
            channel=True,
        )
    lines = [json.loads(line) for line in result.channel.decode("utf-8", errors="replace").splitlines()]
    if not lines or "done" not in lines[-1]:
        at = next((line["at"] for line in reversed(lines) if "at" in line), "its start")
        why = result.stderr.decode(errors="replace").strip().splitlines()[-1:] or [result.outcome]
        raise SandboxError(f"{group[0].name}: the leak scan ended at {at}: {why[0]}")
    levels = {task.name: task.level for task in group}
    is_residue = re.compile(residue.pattern(rules))
    for line in lines:
        if "kind" in line:
            body = listed[line["body"]] if line["body"] >= 0 else None
            for task in [body.task] if body else [line["task"]] if "task" in line else list(levels):
                if finding := _judge(line, body, levels[task], is_residue):
                    found[task].append(finding)
    return lines[-1]["done"]


def _judge(
    line: dict[str, Any], body: Body | None, level: int, is_residue: re.Pattern[str]
) -> Finding | None:
    kind, where = line["kind"], line["where"]
    path = where.partition(" > ")[0]
    in_residue = is_residue.search(path.removeprefix("/workspace/")) is not None
    if body is not None and body.kind == "test" and path.startswith("/workspace/") and not in_residue:
        return None  # tests are often each other's copies
    is_leak = kind in ("body", "name") or (kind == "unread" and in_residue)
    if kind == "signature" and body is not None:
        is_leak = level >= 2 and not body.stated
    return Finding(kind, body.name if body else line["quote"], where, line["quote"], is_leak)


def _sets(body: Body) -> dict[str, list[str]]:
    return {"marks": sorted(body.marks), "names": sorted(body.names)}
