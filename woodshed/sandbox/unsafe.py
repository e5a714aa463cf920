"""The same supervisor without any walls, for tests on machines without namespaces. Never for a policy's commands.

The workspace is a plain copy in a temporary folder, commands are ordinary processes of this user, and only time and
output are limited. `binds` are not available; "/workspace" means the copy in `cwd` and in paths given to `read` and
`write`, but not in a command's own text.
"""

from __future__ import annotations

import shutil
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from woodshed.records import SandboxError
from woodshed.sandbox import control, layers
from woodshed.sandbox.spec import ENVIRONMENT, WORKSPACE, Change, Result, SandboxSpec, Touch
from woodshed.sandbox.store import Store


class SubprocessSandbox:
    """See `spec.Sandbox`."""

    def __init__(self, spec: SandboxSpec, sources: Sequence[Path] | None = None):
        if spec.watch is not None:
            raise SandboxError("the subprocess backend cannot watch commands; use bubblewrap")
        if spec.binds or spec.scratch:
            raise SandboxError(
                "the subprocess backend cannot show files outside the workspace; use bubblewrap"
            )
        self._spec, self._closed = spec, False
        self._store = Store()
        self._tree = self._store.layer()
        for source in spec.lowers if sources is None else sources:
            shutil.copytree(source, self._tree, symlinks=True, dirs_exist_ok=True)
        python = spec.environment / "bin" / "python" if spec.environment else Path(sys.executable)
        log = self._store.path / "log"
        self._supervisor = control.launch(
            [str(python), "-I", "-S", str(control.SUPERVISOR)],
            workspace=self.workspace,
            limits=spec.limits,
            log=log,
        )
        if not control.handshake(self._supervisor):
            said = log.read_text(errors="replace").strip()
            self.close()
            raise SandboxError(f"{python} did not start: {said}")
        self._env = {
            **ENVIRONMENT,
            "HOME": str(self._store.layer()),
            "PATH": f"{python.parent}:/usr/bin:/bin",
        }

    @property
    def workspace(self) -> str:
        return str(self._tree)

    def exec(
        self,
        command: str | Sequence[str],
        *,
        cwd: str | None = None,
        env: Mapping[str, str] | None = None,
        **options: Any,
    ) -> Result:
        if self._closed:
            raise SandboxError("this sandbox is closed; open another one")
        variables = {**self._env, **self._spec.env, **(env or {})}
        options = {"stdin": b"", "timeout_s": 120.0, "max_output": 1 << 20, "channel": False, **options}
        return self._supervisor.exec(command, cwd=self._path(cwd or "."), env=variables, **options)

    def read(self, path: str, most: int | None = None) -> bytes:
        limit = self._spec.limits.file_mb << 20
        return self._supervisor.read(self._path(path), limit if most is None else min(most, limit))

    def write(self, path: str, data: bytes) -> None:
        self._supervisor.write(self._path(path), data)

    def diff(self) -> list[Change]:
        paths = {path for tree in (*self._spec.lowers, self._tree) for path in layers.entries(tree)}
        return layers.compare(self._spec.lowers, [self._tree], paths)

    def altered(self, paths: Iterable[str]) -> list[str]:
        """By what they hold alone."""
        return [change.path for change in layers.compare(self._spec.lowers, [self._tree], paths)]

    def touched(self) -> list[Touch]:
        return []

    def fork(self) -> SubprocessSandbox:
        return SubprocessSandbox(self._spec, [self._tree])

    def alive(self) -> bool:
        return not self._closed and self._supervisor.alive()

    def close(self) -> None:
        if not self._closed:
            self._closed = True
            self._supervisor.stop()
            self._store.release()

    def __enter__(self) -> SubprocessSandbox:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def _path(self, path: str) -> str:
        inside = Path(path).is_relative_to(WORKSPACE)
        return str(self._tree / Path(path).relative_to(WORKSPACE)) if inside else path
