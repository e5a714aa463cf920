"""Test files as a session of pytest imports them, made once per machine.

To parse a file, put the doubts and pytest's own rewriting into it and compile it is half of what a run of many suites
costs, and the same for every attempt at every task of a repository. So it is done apart, in a sandbox that holds no
code of the repository but the text of these files, and kept as bytes that only a session reads.
"""

from __future__ import annotations

import base64
import contextlib
import dataclasses
import hashlib
import json
import tempfile
from collections.abc import Iterable, Mapping
from pathlib import Path

from woodshed.records import Task
from woodshed.rundir import write_atomically
from woodshed.sandbox import SandboxSpec, open_sandbox
from woodshed.tasks import environment, folder

PROGRAM = "/run/woodshed/woodshed_doubt.py"
DOUBT = Path(__file__).with_name("doubt.py")
TIMEOUT_S = 120.0


def compiled_tests(task: Task, tests: Iterable[str]) -> dict[str, list[object]]:
    """For each file of some tests, and each conftest: its code (marshal, base64) and the names that it mentions.

    Files that do not compile are left out: the session says what is wrong with them.

    Raises:
        SandboxError: the sandbox could not be opened.
    """
    files = {test.partition("::")[0] for test in tests}
    texts = {
        path: data
        for path, data in folder.protected_files(task).items()
        if path.endswith(".py") and (path in files or Path(path).name == "conftest.py")
    }
    site = environment.prepare(task.environment)
    made_of = {path: hashlib.sha256(data).hexdigest() for path, data in sorted(texts.items())}
    asked = [str(site), hashlib.sha256(DOUBT.read_bytes()).hexdigest(), made_of]
    key = hashlib.sha256(json.dumps(asked).encode()).hexdigest()[:32]
    kept = environment.cache_dir() / "compiled" / f"{key}.json"
    with contextlib.suppress(OSError, ValueError):
        return json.loads(kept.read_text("utf-8"))
    found = _compile(site, texts)
    if found:
        kept.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(kept, json.dumps(found))
    return found


def _compile(site: Path, texts: Mapping[str, bytes]) -> dict[str, list[object]]:
    with tempfile.TemporaryDirectory(prefix="woodshed-") as empty:
        spec = SandboxSpec(lowers=(Path(empty),), environment=site, binds={PROGRAM: DOUBT})
        with open_sandbox(dataclasses.replace(spec, user="grader")) as sandbox:
            request = {path: base64.b64encode(data).decode() for path, data in texts.items()}
            result = sandbox.exec(
                ["/env/bin/python", "-P", "-s", "-B", PROGRAM, sandbox.workspace],
                stdin=json.dumps(request).encode(),
                timeout_s=TIMEOUT_S,
                channel=True,
            )
    return json.loads(result.channel) if result.outcome == "ok" else {}
