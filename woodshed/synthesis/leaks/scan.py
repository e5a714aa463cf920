"""The gate: is what a task took away still somewhere in the root file system that an attempt will see?

The search runs inside a sandbox opened as an attempt's is (`scanner`). The machine is searched once for all tasks, an
environment and what else attempts have in common once for all of its tasks, and of the tasks' workspaces every
different file once.

Verdict per finding, after the kinds of hits that leak scanners of benchmarks missed:
- "body": the code itself, verbatim, reformatted, renamed, or as bytecode. Always a leak.
- "name": leftovers (caches, histories, indexes) that mention hidden tests or removed functions. Always a leak.
- "signature": a name with its parameters. A leak from level 2 on, unless the instruction states it.
- "test": a hidden test that pytest collects in the workspace, or that can be read there (`shown`). Always a leak.
- "unread": a file in a known form that could not be opened. A leak if it is a leftover.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, replace
from typing import Any

from woodshed.records import SandboxError, Task
from woodshed.runs.machine import cores
from woodshed.sandbox import BUBBLEWRAP, SandboxProvider, SandboxSpec
from woodshed.synthesis.leaks import evidence, leftovers
from woodshed.synthesis.leaks.fingerprints import Body
from woodshed.synthesis.leaks.programs import LIBRARY, with_programs
from woodshed.synthesis.leaks.shown import shown_tests
from woodshed.tasks.environment import sandbox_spec

PROGRAMS = ("fingerprints.py", "readers.py", "scanner.py")
PYTHON = "/opt/python"
MACHINE = ("/usr", PYTHON, "/bin", "/sbin", "/lib", "/lib32", "/lib64", "/libx32", "/etc")
"""The same for every task whose Python is the same."""
DEPENDENCIES = "/env"
"""The same for every task of an environment."""
LIBRARIES = (PYTHON, DEPENDENCIES)
"""Folders that hold a copy of a package's code if it is installed."""
SHARED = (*MACHINE, DEPENDENCIES)
WORKSPACES = "/run/woodshed/workspaces"
"""Mount point of the workspaces of further tasks, if several are searched together."""
TOGETHER = 50
"""Most tasks that are searched in one sandbox."""
TIMEOUT_S = 1800.0
NOTHING = "(?!)"
"""Pattern that matches no leftover."""

Progress = Callable[[int, int, str], None]


@dataclass(frozen=True)
class LeakFinding:
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
class LeakReport:
    """Findings of the scan of one task."""

    task: str
    findings: tuple[LeakFinding, ...]
    files: int
    """Files read in the task's own part of the root file system."""

    @property
    def leaks(self) -> tuple[LeakFinding, ...]:
        return tuple(finding for finding in self.findings if finding.is_leak)


def scan(
    tasks: Sequence[Task],
    *,
    rules: Sequence[leftovers.LeftoverRule] = (),
    shared: Sequence[str] = SHARED,
    spec: Callable[[Task], SandboxSpec] = sandbox_spec,
    tests: bool = True,
    sandboxes: SandboxProvider = BUBBLEWRAP,
    progress: Progress = lambda done, total, text: None,
) -> list[LeakReport]:
    """A report per task, in their order.

    Args:
        rules: more places that count as leftovers.
        shared: parts of the machine and the dependencies that are searched too.
        spec: specification of an attempt's sandbox.
        tests: also search for hidden tests that the workspace shows.

    Raises:
        SandboxError: the search did not come to its end; names the file it was at.
    """
    known = {task.name: evidence.bodies(task) for task in tasks}
    search = _Search(known, leftovers.pattern(rules), sandboxes)
    machine = [place for place in shared if place != DEPENDENCIES]
    for python in sorted({task.environment.python for task in tasks} if machine else ()):
        progress(0, len(tasks), "searching the machine")
        same = [task for task in tasks if task.environment.python == python]
        search.search(same, spec(same[0]), machine, {})
    done = 0
    for group in _groups(tasks, spec):
        progress(done, len(tasks), f"searching {len(group)} tasks, {group[0].name}")
        workspaces = {task.name: f"{WORKSPACES}/{nth}" for nth, task in enumerate(group)}
        binds = {workspaces[task.name]: spec(task).lowers[0] for task in group[1:]}
        workspaces[group[0].name] = "/workspace"
        first = spec(group[0])
        first = replace(first, binds={**first.binds, **binds})
        search.search(group, first, [DEPENDENCIES] if DEPENDENCIES in shared else [], workspaces)
        done += len(group)
    progress(done, len(tasks), "searching tasks")
    with ThreadPoolExecutor(min(len(tasks), cores()) or 1) as pool:
        shown = list(pool.map(lambda task: _shown(task, sandboxes, spec), tasks if tests else ()))
    return [
        LeakReport(task.name, (*tests_shown, *search.found[task.name]), search.files[task.name])
        for task, tests_shown in zip(tasks, shown or [[]] * len(tasks), strict=True)
    ]


def _groups(tasks: Sequence[Task], spec: Callable[[Task], SandboxSpec]) -> Iterator[list[Task]]:
    """Groups of at most TOGETHER tasks that one sandbox can search."""
    alike: dict[str, list[Task]] = {}
    for task in tasks:
        alike.setdefault(_but_for_the_workspace(spec(task)), []).append(task)
    for group in alike.values():
        for start in range(0, len(group), TOGETHER):
            yield group[start : start + TOGETHER]


def _shown(task: Task, sandboxes: SandboxProvider, spec: Callable[[Task], SandboxSpec]) -> list[LeakFinding]:
    return [
        LeakFinding("test", shown.test, shown.where, shown.quote, True)
        for shown in shown_tests(task, sandboxes, spec)
    ]


def first_leak(task: Task, sandboxes: SandboxProvider = BUBBLEWRAP, *, tests: bool = True) -> str:
    """First leak in a task's own part of the root file system, learned rules included; "" if none."""
    rules = leftovers.read_rules(leftovers.rules_path())
    (report,) = scan([task], rules=rules, shared=(), tests=tests, sandboxes=sandboxes)
    return "".join(f"{leak.kind} of {leak.what} in {leak.where}" for leak in report.leaks[:1])


def first_copy(draft: Task, tests: Set[str], sandboxes: SandboxProvider) -> str:
    """First copy of the code that a candidate removes; "" if there is none.

    Test files do not count: they may not be visible in the end.
    """
    (report,) = scan([draft], shared=(), tests=False, sandboxes=sandboxes)
    copied = [
        leak for leak in report.leaks if leak.kind == "body" and leak.where.partition(" > ")[0] not in tests
    ]
    return "".join(f"{leak.what} also stands in {leak.where}" for leak in copied[:1])


def copies(
    files: Mapping[str, str], spec: SandboxSpec, sandboxes: SandboxProvider
) -> dict[tuple[str, str], str]:
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
    lines = _searched("", listed, {"": []}, NOTHING, spec, LIBRARIES, {}, sandboxes)
    return {listed[line["body"]].place: line["where"] for line in lines if line.get("kind") == "body"}


def _but_for_the_workspace(spec: SandboxSpec) -> str:
    """Key of tasks that one sandbox can search: its specification, without a workspace that is its only layer."""
    return repr(replace(spec, lowers=spec.lowers if len(spec.lowers) > 1 else ()))


class _Search:
    """State of a search: the secrets, and the leaks found so far."""

    def __init__(
        self, known: dict[str, list[Body]], leftover_pattern: str, sandboxes: SandboxProvider
    ) -> None:
        self.known, self.leftovers, self.sandboxes = known, leftover_pattern, sandboxes
        self.found: dict[str, list[LeakFinding]] = {name: [] for name in known}
        self.files: Counter[str] = Counter()

    def search(
        self, group: Sequence[Task], spec: SandboxSpec, shared: Sequence[str], workspaces: dict[str, str]
    ) -> None:
        """Adds what shared places of a sandbox tell, and the tasks' own ones where workspaces are given."""
        listed = [body for task in group for body in self.known[task.name]]
        names = {task.name: evidence.hidden_names(task, self.known[task.name]) for task in group}
        lines = _searched(
            group[0].name, listed, names, self.leftovers, spec, shared, workspaces, self.sandboxes
        )
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
    leftover_pattern: str,
    spec: SandboxSpec,
    shared: Sequence[str],
    workspaces: dict[str, str],
    sandboxes: SandboxProvider,
) -> list[dict[str, Any]]:
    """Output of the program in the sandbox, line by line."""
    request = {
        "bodies": [asdict(replace(b, marks=frozenset(), names=frozenset())) | _sets(b) for b in listed],
        "names": names,
        "leftovers": leftover_pattern,
        "shared": list(shared),
        "workspaces": workspaces,
        "skip": [*SHARED, "/workspace"],
    }
    with sandboxes.open(with_programs(spec, PROGRAMS)) as sandbox:
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


def _judge(line: dict[str, Any], body: Body | None, level: int) -> LeakFinding:
    kind, is_leak = line["kind"], line["kind"] in ("body", "name")
    if kind == "unread":
        is_leak = line["in_leftovers"]
    if kind == "signature" and body is not None:
        is_leak = level >= 2 and not body.stated
    return LeakFinding(kind, body.name if body else line["quote"], line["where"], line["quote"], is_leak)


def _sets(body: Body) -> dict[str, list[str]]:
    return {"marks": sorted(body.marks), "names": sorted(body.names)}
