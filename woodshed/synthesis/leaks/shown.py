"""Hidden tests that the workspace shows: found by what a test file defines, decided by running it as it is shown.

Where a removed name kept a whole file from being collected, its other tests are fail-to-pass as well; the shown file
does without the name, and they may stand there because they pass. Every other fail-to-pass test must be gone.
"""

from __future__ import annotations

import re
from collections.abc import Callable

from woodshed.grading.session import run_tests, with_runner
from woodshed.pysource import syntax
from woodshed.records import Task
from woodshed.sandbox import SandboxProvider, SandboxSpec
from woodshed.synthesis.leaks import fingerprints, readers
from woodshed.tasks import original, sandbox_spec


def shown_tests(
    task: Task, sandboxes: SandboxProvider, spec: Callable[[Task], SandboxSpec] = sandbox_spec
) -> list[str]:
    """Fail-to-pass tests that the workspace shows and that fail there, where the task was made to hide them.

    Raises:
        SandboxError: the sandbox was lost.
    """
    if task.provenance.get("visibility") not in ("hidden", "none"):
        return []
    written = _written(task)
    if not written:
        return []
    with sandboxes.open(with_runner(spec(task))) as sandbox:
        run = run_tests(sandbox, ids=written, packages=(), timeout_s=task.verify_timeout_s)
    return [test for test in written if run.outcomes[test] != "passed"]


def _written(task: Task) -> list[str]:
    """Fail-to-pass tests whose definition stands in the workspace, whatever the encoding of the file."""
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
