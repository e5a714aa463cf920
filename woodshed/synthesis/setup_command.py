"""Setup that the build of a repository does not do, such as generated code: a command, run once in a sandbox.

It has no network. What it writes is part of every task.
"""

from __future__ import annotations

from pathlib import Path

from woodshed.records import Environment, TaskError
from woodshed.sandbox import SandboxProvider, SandboxSpec
from woodshed.synthesis.leaks.leftovers import BUILD_FOLDERS, is_leftover
from woodshed.synthesis.sources import Repository
from woodshed.tasks.environment import prepare, variables
from woodshed.tasks.folder import is_clean

TIMEOUT_S = 600.0
MOST_FILES, MOST_BYTES = 5_000, 256 << 20


def run(repository: Repository, environment: Environment, sandboxes: SandboxProvider) -> tuple[str, ...]:
    """Run the setup command in the environment and copy what it wrote into the tree; the paths.

    Raises:
        TaskError: it fails or does not end, or writes too much; with its last lines.
    """
    if not repository.setup:
        return ()
    spec = SandboxSpec((repository.tree,), prepare(environment), env=variables(environment))
    with sandboxes.open(spec) as sandbox:
        result = sandbox.exec(repository.setup, timeout_s=TIMEOUT_S, max_output=1 << 16)
        if result.outcome != "ok":
            lines = (result.stdout + result.stderr).decode(errors="replace").strip().splitlines()[-8:]
            printed = "".join(f"\n    {line}" for line in lines) or " nothing"
            ended = f"{result.outcome} after {result.seconds:.0f} s"
            raise TaskError(
                f"{repository.name}: setup={repository.setup!r} failed ({ended}). It has no network, and nobody "
                f"answers it. It last printed:{printed}"
            )
        written = [
            c for c in sandbox.diff() if c.kind != "deleted" and c.file_type == "file" and _is_kept(c.path)
        ]
        size = sum(change.size for change in written)
        if len(written) > MOST_FILES or size > MOST_BYTES:
            raise TaskError(
                f"{repository.name}: setup={repository.setup!r} wrote {len(written)} files of {size >> 20} MB; at most "
                f"{MOST_FILES} files of {MOST_BYTES >> 20} MB can be part of every task"
            )
        for change in written:
            place = repository.tree / change.path
            place.parent.mkdir(parents=True, exist_ok=True)
            if place.parent.resolve().is_relative_to(repository.tree.resolve()):
                data = sandbox.read(f"{sandbox.workspace}/{change.path}")
                place.unlink(missing_ok=True)
                place.write_bytes(data)
    return tuple(change.path for change in written)


def _is_kept(path: str) -> bool:
    parts = Path(path).parts
    return (
        is_clean(path)
        and parts[0] not in BUILD_FOLDERS
        and not any(is_leftover(Path(part)) for part in parts)
    )
