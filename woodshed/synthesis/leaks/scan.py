"""The gate: is what a task took away still somewhere in the root file system that an attempt will see?

The search runs inside a sandbox opened as an attempt's is (`scanner`). The machine is searched once for all tasks, an
environment and what else attempts have in common once for all of its tasks, and of the tasks' workspaces every
different file once.

Verdict per finding, after the kinds of hits that leak scanners of benchmarks missed:
- "body": the code itself, verbatim, reformatted, renamed, or as bytecode. Always a leak.
- "name": residue (caches, histories, indexes) that mentions hidden tests or removed functions. Always a leak.
- "signature": a name with its parameters. A leak from level 2 on, unless the instruction states it.
- "test": a hidden test that stands in its own file for the agent to read. Always a leak.
- "unread": a file in a known form that could not be opened. A leak where it is residue.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from woodshed.pysource import syntax
from woodshed.records import SandboxError, Task
from woodshed.sandbox import Limits, SandboxSpec, open_sandbox
from woodshed.synthesis.leaks import evidence, leftovers
from woodshed.synthesis.leaks.fingerprints import Body
from woodshed.synthesis.leaks.shown import shown_tests
from woodshed.tasks.environment import sandbox_spec

LIBRARY = "/run/woodshed/lib"
PROGRAMS = ("fingerprints.py", "readers.py", "scanner.py")
PYTHON = "/opt/python"
MACHINE = ("/usr", PYTHON, "/bin", "/sbin", "/lib", "/lib32", "/lib64", "/libx32", "/etc")
"""The same for every task whose Python is the same."""
DEPENDENCIES = "/env"
"""The same for every task of an environment."""
LIBRARIES = (PYTHON, DEPENDENCIES)
"""Where a copy of a package's code would be without anybody's doing."""
SHARED = (*MACHINE, DEPENDENCIES)
WORKSPACES = "/run/woodshed/workspaces"
"""Where the workspaces of further tasks are shown, while several are searched together."""
TOGETHER = 50
"""Most tasks that are searched in one sandbox."""
TIMEOUT_S = 1800.0
NOTHING = "(?!)"
"""A pattern for residue where none is looked for."""

Progress = Callable[[int, int, str], None]


@dataclass(frozen=True)
class Finding:
    """One place that tells something, with the evidence."""

    kind: str
    """"body", "name", "signature", "test" or "unread"."""
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
    rules: Sequence[leftovers.Rule] = (),
    shared: Sequence[str] = SHARED,
    spec: Callable[[Task], SandboxSpec] = sandbox_spec,
    tests: bool = True,
    progress: Progress = lambda done, total, text: None,
) -> list[Report]:
    """A report per task, in their order.

    Args:
        rules: more places that count as residue.
        shared: what of the machine and the dependencies is searched as well.
        spec: how an attempt's sandbox is opened.
        tests: hidden tests that the workspace shows are looked for as well.

    Raises:
        SandboxError: the search did not come to its end; names the file it was at.
    """
    looking = _Looking({task.name: evidence.bodies(task) for task in tasks}, leftovers.pattern(rules))
    machine = [place for place in shared if place != DEPENDENCIES]
    for python in sorted({task.environment.python for task in tasks} if machine else ()):
        progress(0, len(tasks), "searching the machine")
        same = [task for task in tasks if task.environment.python == python]
        looking.search(same, spec(same[0]), machine, {})
    groups: dict[str, list[Task]] = {}
    for task in tasks:
        groups.setdefault(_but_for_the_workspace(spec(task)), []).append(task)
    done = 0
    for group in groups.values():
        for start in range(0, len(group), TOGETHER):
            some = group[start : start + TOGETHER]
            progress(done, len(tasks), f"searching {len(some)} tasks, {some[0].name}")
            opened = spec(some[0])
            places = {task.name: f"{WORKSPACES}/{nth}" for nth, task in enumerate(some)}
            others = {places[task.name]: spec(task).lowers[0] for task in some[1:]}
            places[some[0].name] = "/workspace"
            opened = replace(opened, binds={**opened.binds, **others})
            looking.search(some, opened, [DEPENDENCIES] if DEPENDENCIES in shared else [], places)
            done += len(some)
    progress(done, len(tasks), "searching tasks")
    return [
        Report(
            task.name,
            (*(_shown(task, spec) if tests else ()), *looking.found[task.name]),
            looking.files[task.name],
        )
        for task in tasks
    ]


def _shown(task: Task, spec: Callable[[Task], SandboxSpec]) -> list[Finding]:
    return [
        Finding(
            "test", test, f"/workspace/{test.partition('::')[0]}", "it can be read, and fails there", True
        )
        for test in shown_tests(task, spec)
    ]


def first_leak(task: Task, shared: Sequence[str] = ()) -> str:
    """What a task's own part of the root file system gives away, with the learned rules, or what else is searched;
    "" where that is nothing."""
    (report,) = scan([task], rules=leftovers.read_rules(leftovers.rules_path()), shared=shared)
    return "".join(f"{leak.kind} of {leak.what} in {leak.where}" for leak in report.leaks[:1])


def first_copy(draft: Task, tests: Set[str]) -> str:
    """Where code that a draft takes away stands all the same, but for test files, which may not be visible in the end;
    "" where it does not."""
    (report,) = scan([draft], shared=(), tests=False)
    copied = [
        leak for leak in report.leaks if leak.kind == "body" and leak.where.partition(" > ")[0] not in tests
    ]
    return "".join(f"{leak.what} also stands in {leak.where}" for leak in copied[:1])


def copies(files: Mapping[str, str], spec: SandboxSpec) -> dict[tuple[str, str], str]:
    """Functions of a package that also stand in Python's library or in a dependency: no task can take them away.

    Args:
        files: path to text, of the package's files.
        spec: how a sandbox of the repository is opened.

    Returns:
        Path and dotted name of each, to a file that has a copy, as a sandbox names it.

    Raises:
        SandboxError: the search did not come to its end.
    """
    listed = [body for path, text in files.items() for body in evidence.functions(path, text)]
    lines = _searched("", listed, {"": []}, NOTHING, spec, LIBRARIES, {})
    return {listed[line["body"]].place: line["where"] for line in lines if line.get("kind") == "body"}


def _but_for_the_workspace(spec: SandboxSpec) -> str:
    """What tasks must have in common to be searched in one sandbox; layers over a workspace keep it alone."""
    return repr(replace(spec, lowers=spec.lowers if len(spec.lowers) > 1 else ()))


def with_programs(spec: SandboxSpec, names: Sequence[str] = PROGRAMS) -> SandboxSpec:
    """The same sandbox, in which programs of this folder can be started as modules."""
    here = Path(__file__).parent
    inner = f"{LIBRARY}/woodshed/synthesis/leaks"
    binds = {f"{inner}/{name}": here / name for name in names}
    binds[f"{LIBRARY}/woodshed/pysource/syntax.py"] = Path(syntax.__file__)
    return replace(spec, binds={**spec.binds, **binds}, limits=Limits(memory_mb=3072))


class _Looking:
    """What is looked for, and what was found so far."""

    def __init__(self, known: dict[str, list[Body]], residue: str) -> None:
        self.known, self.residue = known, residue
        self.found: dict[str, list[Finding]] = {name: [] for name in known}
        self.files: Counter[str] = Counter()

    def search(
        self, group: Sequence[Task], spec: SandboxSpec, shared: Sequence[str], workspaces: dict[str, str]
    ) -> None:
        """Adds what shared places of a sandbox tell, and the tasks' own ones where workspaces are given."""
        listed = [body for task in group for body in self.known[task.name]]
        names = {task.name: evidence.hidden_names(task, self.known[task.name]) for task in group}
        lines = _searched(group[0].name, listed, names, self.residue, spec, shared, workspaces)
        self.files.update(lines[-1]["done"])
        levels = {task.name: task.level for task in group}
        for line in lines:
            if "kind" in line:
                body = listed[line["body"]] if line["body"] >= 0 else None
                for name in [body.task] if body else line["tasks"]:
                    self.found[name].append(_judge(line, body, levels[name]))


def _searched(
    name: str,
    listed: Sequence[Body],
    names: dict[str, list[str]],
    residue: str,
    spec: SandboxSpec,
    shared: Sequence[str],
    workspaces: dict[str, str],
) -> list[dict[str, Any]]:
    """What the program in the sandbox wrote, line by line."""
    request = {
        "bodies": [asdict(replace(b, marks=frozenset(), names=frozenset())) | _sets(b) for b in listed],
        "names": names,
        "residue": residue,
        "shared": list(shared),
        "workspaces": workspaces,
        "skip": [*SHARED, "/workspace"],
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
        raise SandboxError(f"{name}: the leak scan ended at {at}: {why[0]}")
    return lines


def _judge(line: dict[str, Any], body: Body | None, level: int) -> Finding:
    kind, is_leak = line["kind"], line["kind"] in ("body", "name")
    if kind == "unread":
        is_leak = line["in_residue"]
    if kind == "signature" and body is not None:
        is_leak = level >= 2 and not body.stated
    return Finding(kind, body.name if body else line["quote"], line["where"], line["quote"], is_leak)


def _sets(body: Body) -> dict[str, list[str]]:
    return {"marks": sorted(body.marks), "names": sorted(body.names)}
