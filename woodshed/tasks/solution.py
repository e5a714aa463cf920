"""The gold patch of a task of another format that keeps a script instead: what `solve.sh` writes in a sandbox."""

from __future__ import annotations

import dataclasses
import tempfile
from collections.abc import Mapping
from pathlib import Path

from woodshed.records import TaskError
from woodshed.sandbox import SandboxProvider, SandboxSpec
from woodshed.tasks import environment
from woodshed.tasks.foreign import ForeignTask
from woodshed.tasks.paths import is_protected

TIMEOUT_S = 600.0
PLACE = "/solution"


def solved(task: ForeignTask, sandboxes: SandboxProvider) -> ForeignTask:
    """The task with the files that its solution writes, None for one that it deletes, as its gold patch.

    An attempt may then change whatever stands or stood at the top of the workspace, but for protected files.

    Raises:
        TaskError: the solution fails, changes nothing, or leaves what is no file.
    """
    with tempfile.TemporaryDirectory(prefix="woodshed-") as scratch:
        lower, script = Path(scratch, "workspace"), Path(scratch, "solution")
        _lay(lower, task.workspace)
        _lay(script, task.solution)
        spec = SandboxSpec(
            (lower,),
            environment=environment.prepare(task.environment),
            binds={PLACE: script},
            env=environment.variables(task.environment),
        )
        with sandboxes.open(spec) as sandbox:
            done = sandbox.exec(f"bash {PLACE}/solve.sh", timeout_s=TIMEOUT_S)
            if done.outcome != "ok":
                said = (done.stdout + done.stderr).decode(errors="replace").strip()[-300:]
                raise TaskError(
                    f"{task.name}: solution/solve.sh ended as {done.outcome} in a sandbox: {said}"
                )
            changes = [c for c in sandbox.diff() if c.file_type != "dir" and "__pycache__" not in c.path]
            if odd := [c.path for c in changes if c.kind != "deleted" and c.file_type != "file"]:
                raise TaskError(f"{task.name}: solution/solve.sh leaves {odd[0]!r}, which is no file")
            gold = {c.path: None if c.kind == "deleted" else sandbox.read(c.path) for c in changes}
    if not gold:
        raise TaskError(f"{task.name}: solution/solve.sh changes nothing in /workspace")
    tops = {path.partition("/")[0] for path in (*task.workspace, *gold)}
    allowed = sorted(top for top in tops if not (is_protected(top) or is_protected(f"{top}/")))
    return dataclasses.replace(task, gold=gold, allowed_paths=task.allowed_paths or tuple(allowed))


def _lay(root: Path, files: Mapping[str, bytes]) -> None:
    root.mkdir()
    for path, data in files.items():
        (root / path).parent.mkdir(parents=True, exist_ok=True)
        (root / path).write_bytes(data)
