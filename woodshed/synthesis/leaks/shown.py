"""Hidden tests that the workspace shows: looked for from inside, by what pytest collects there and what can be read.

No parser knows what a project's configuration collects: text files by a conftest, methods of a base class in another
file, functions that are assigned. So pytest collects (`collected`) the hidden tests where all of the solution stands,
which tells their texts, and then whatever the shown workspace holds. A hidden test may be there under its own name only
if it passes: where a removed name kept a whole file from being collected, its other tests are fail-to-pass as well, and
the shown file does without the name. Its text may be there only where it is a visible test that passes.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import dataclass, replace
from typing import Any

from woodshed.grading.session import run_tests, with_runner
from woodshed.pysource import syntax
from woodshed.records import Outcome, SandboxError, Task
from woodshed.sandbox import SandboxProvider, SandboxSpec
from woodshed.synthesis.leaks import fingerprints, readers
from woodshed.synthesis.leaks.programs import LIBRARY, with_programs
from woodshed.tasks import folder, original, sandbox_spec

PROGRAMS = ("fingerprints.py", "readers.py", "collected.py")
TIMEOUT_S = 600.0


@dataclass(frozen=True)
class ShownTest:
    """A hidden test that an attempt can read or run."""

    test: str
    """Its id; that of its twin where pytest collects it under another one."""
    where: str
    """Absolute path in the sandbox; " > " leads into archives."""
    quote: str
    """In what way it is shown."""


def shown_tests(
    task: Task, sandboxes: SandboxProvider, spec: Callable[[Task], SandboxSpec] = sandbox_spec
) -> list[ShownTest]:
    """Fail-to-pass tests that the workspace shows, where the task was made to hide them.

    Raises:
        SandboxError: the sandbox was lost, or pytest could not collect.
    """
    if task.provenance.get("visibility") not in ("hidden", "none"):
        return []
    hidden = _hidden(task, sandboxes, spec)
    lines = _looked(task, spec(task), None, list(hidden.values()), sandboxes)
    collected = [line for line in lines if "id" in line]
    texts = {_key(test["text"]) for test in hidden.values() if test["text"]}
    twins = [
        line["id"] for line in collected if line["id"] in task.fail_to_pass or _key(line["text"]) in texts
    ]
    suspects = list(dict.fromkeys([*twins, *_written(task)]))
    outcomes = _outcomes(task, suspects, sandboxes, spec)
    failing = [
        test
        for test, outcome in outcomes.items()
        if outcome in ("failed", "error") or (test in task.fail_to_pass and outcome != "passed")
    ]
    found = [ShownTest(test, f"/workspace/{_file(test)}", "it is there, and fails there") for test in failing]
    passing = outcomes.keys() - set(failing)
    allowed = {(_file(line["id"]), _key(line["text"])) for line in collected if line["id"] in passing}
    ids = list(hidden)
    readable = [
        ShownTest(ids[line["shown"]], line["where"], "its text can be read there")
        for line in lines
        if "shown" in line and not _is_allowed(ids[line["shown"]], hidden, line["where"], passing, allowed)
    ]
    told = {(shown.test, shown.where) for shown in found}
    return found + [shown for shown in readable if (shown.test, shown.where) not in told]


def _is_allowed(
    test: str, hidden: Mapping[str, Any], where: str, passing: Set[str], allowed: Set[tuple[str, str]]
) -> bool:
    """True if a text is that of a visible test that passes: the hidden test itself, or a twin in another file."""
    return test in passing or (where.removeprefix("/workspace/"), _key(hidden[test]["text"])) in allowed


def _file(test: str) -> str:
    return test.partition("::")[0]


def _key(text: str) -> str:
    return " ".join(fingerprints.words(text))


def _hidden(
    task: Task, sandboxes: SandboxProvider, spec: Callable[[Task], SandboxSpec]
) -> dict[str, dict[str, Any]]:
    """The fail-to-pass tests by id, as pytest collects them over the original code."""
    shown = spec(task)
    solved = replace(shown, lowers=(*shown.lowers, folder.gold_folder(task), folder.hidden_tests(task)))
    gone = [path for path, file in folder.gold_files(task).items() if file is None]
    lines = _looked(task, solved, task.fail_to_pass, [], sandboxes, gone=gone)
    wanted = set(task.fail_to_pass)
    by_text: dict[str, str] = {}
    for line in lines:  # one of all parameters is enough
        if line.get("id") in wanted:
            by_text.setdefault(line["text"] or line["id"], line["id"])
    kept = set(by_text.values())
    return {line["id"]: line for line in lines if line.get("id") in kept}


def _looked(
    task: Task,
    spec: SandboxSpec,
    ids: Sequence[str] | None,
    hidden: Sequence[Mapping[str, Any]],
    sandboxes: SandboxProvider,
    *,
    gone: Sequence[str] = (),
) -> list[dict[str, Any]]:
    """Output of the program in the sandbox, line by line."""
    ready = with_runner(spec)
    ready = replace(with_programs(ready, PROGRAMS), user=spec.user)
    options = [o for o in task.environment.pytest_options if not o.startswith(("--ignore", "--deselect"))]
    request = {"ids": ids and list(ids), "hidden": list(hidden), "options": options}
    with sandboxes.open(ready) as sandbox:
        if gone:
            sandbox.exec(["rm", "-f", "--", *gone])
        result = sandbox.exec(
            ["/env/bin/python", "-P", "-s", "-B", "-m", "woodshed.synthesis.leaks.collected"],
            env={"PYTHONPATH": ":".join(filter(None, [LIBRARY, spec.env.get("PYTHONPATH", "")]))},
            stdin=json.dumps(request).encode(),
            timeout_s=TIMEOUT_S,
            channel=True,
        )
    lines = [json.loads(line) for line in result.channel.decode("utf-8", errors="replace").splitlines()]
    if not lines or "done" not in lines[-1]:
        said = (result.stderr or result.stdout).decode(errors="replace").strip().splitlines()[-1:]
        raise SandboxError(f"tests could not be collected: {said[0] if said else result.outcome}")
    return lines


def _outcomes(
    task: Task, tests: Sequence[str], sandboxes: SandboxProvider, spec: Callable[[Task], SandboxSpec]
) -> dict[str, Outcome]:
    if not tests:
        return {}
    with sandboxes.open(with_runner(spec(task))) as sandbox:
        return run_tests(
            sandbox,
            ids=tests,
            packages=(),
            timeout_s=task.verify_timeout_s,
            options=task.environment.pytest_options,
        ).outcomes


def _written(task: Task) -> list[str]:
    """Fail-to-pass tests whose definition stands in their file, whether pytest can collect it or not."""
    known, found = dict[str, frozenset[str]](), list[str]()
    for test in task.fail_to_pass:
        path, _, inner = test.partition("::")
        if path not in known:
            file = original(task, path)
            known[path] = _definitions(file.read_bytes()) if file.is_file() else frozenset()
        name = inner.partition("[")[0].replace("::", ".")
        if {name, f"def {name.rpartition('.')[2]}"} & known[path]:
            found.append(test)
    return found


def _definitions(data: bytes) -> frozenset[str]:
    """Dotted names of a file's functions; "def name" for each that can be read where Python reads none."""
    text = syntax.legible(data)
    try:
        return frozenset(name for name, _ in fingerprints.functions(syntax.parse(text)))
    except (SyntaxError, ValueError, RecursionError):
        texts = (text, readers.decode(data) or "")
        return frozenset(f"def {name}" for each in texts for name in re.findall(r"\bdef\s+(\w+)", each))
