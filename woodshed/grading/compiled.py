"""Test files as a session of pytest imports them, made once per machine.

To parse a file, put the doubts and pytest's own rewriting into it and compile it is a fifth to a half of what a run of
a suite costs, and the same for every attempt at every task of a repository. So it is done apart, in a sandbox that
holds no code of the repository but the text of these files, and kept as bytes that only a session reads.
"""

from __future__ import annotations

import base64
import contextlib
import hashlib
import json
from collections.abc import Iterable, Mapping
from pathlib import Path

from woodshed.records import Task
from woodshed.runs.files import write_atomically
from woodshed.sandbox import SandboxProvider, SandboxSpec, store
from woodshed.tasks import environment, folder

PROGRAM = "/run/woodshed/woodshed_assert_hardening.py"
DOUBT = Path(__file__).with_name("assert_hardening.py")
TIMEOUT_S = 120.0

Made = list[object]
"""Code and names of one file, as JSON has them."""


def compiled_tests(task: Task, tests: Iterable[str], sandboxes: SandboxProvider) -> dict[str, Made]:
    """For each file of some tests, and each conftest: its code (marshal, base64) and the names that it mentions.

    Files that do not compile are left out, and all of them where the sandbox fails: the session reads those.

    Raises:
        SandboxError: the sandbox could not be opened.
    """
    files = {test.partition("::")[0] for test in tests}
    site = environment.prepare(task.environment)
    made_by = f"{site} {hashlib.sha256(DOUBT.read_bytes()).hexdigest()}"
    found: dict[str, Made] = {}
    missing: dict[str, tuple[bytes, Path]] = {}
    for path, data in folder.protected_files(task).items():
        if path.endswith(".py") and (path in files or Path(path).name == "conftest.py"):
            key = hashlib.sha256(f"{made_by} {path} ".encode() + data).hexdigest()[:32]
            kept = environment.cache_dir() / "compiled" / f"{key}.json"
            try:
                found[path] = json.loads(kept.read_text("utf-8"))
            except (OSError, ValueError):
                missing[path] = data, kept
    for path, made in _compile(site, {path: data for path, (data, _) in missing.items()}, sandboxes).items():
        found[path] = made
        with contextlib.suppress(OSError):  # a full disk costs time, not the verdict
            missing[path][1].parent.mkdir(parents=True, exist_ok=True)
            write_atomically(missing[path][1], json.dumps(made))
    return found


def _compile(site: Path, texts: Mapping[str, bytes], sandboxes: SandboxProvider) -> dict[str, Made]:
    if not texts:
        return {}
    with store.folder() as empty:
        spec = SandboxSpec(lowers=(empty,), environment=site, binds={PROGRAM: DOUBT}, user="grader")
        with sandboxes.open(spec) as sandbox:
            request = {path: base64.b64encode(data).decode() for path, data in texts.items()}
            result = sandbox.exec(
                ["/env/bin/python", "-P", "-s", "-B", PROGRAM, sandbox.workspace],
                stdin=json.dumps(request).encode(),
                timeout_s=TIMEOUT_S,
                channel=True,
            )
    try:
        return json.loads(result.channel) if result.outcome == "ok" else {}
    except ValueError:
        return {}
