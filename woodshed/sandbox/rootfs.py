"""Root file system of a sandbox, as arguments of bubblewrap.

The host's /usr, without Python packages and without applications that bring some, a minimal /etc, the Python that the
environment was made with (at /opt/python) and the environment (at /env), all read-only, and the workspace,
copy-on-write. The environment is shown with a `bin/python` and a `pyvenv.cfg` that point to /opt/python, so that paths
inside are the same on every machine.
"""

from __future__ import annotations

import contextlib
import functools
import os
import py_compile
import re
import shutil
import stat
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from woodshed.records import SandboxError
from woodshed.sandbox.control import SUPERVISOR, WATCHER
from woodshed.sandbox.spec import HOME, WORKSPACE, SandboxSpec

PYTHON = "/opt/python"
USERS = {"agent": 1000, "grader": 1001}
NOBODY = 65534
PACKAGE_FOLDERS = {"site-packages", "dist-packages", "third_party", "_vendor"}
DEVICES = Path("/dev/woodshed")
MB = 1 << 20

ETC = {
    "passwd": "root:x:0:0:root:/root:/bin/sh\n"
    + "".join(f"{name}:x:{uid}:{uid}:{name}:{HOME}:/bin/bash\n" for name, uid in USERS.items()),
    "group": "root:x:0:\n" + "".join(f"{name}:x:{uid}:\n" for name, uid in USERS.items()),
    "hosts": "127.0.0.1 localhost sandbox\n::1 localhost\n",
    "nsswitch.conf": "passwd: files\ngroup: files\nhosts: files\n",
}


def arguments(spec: SandboxSpec, store: Path, frozen: Sequence[Path], upper: Path, work: Path) -> list[str]:
    """bubblewrap's options for a sandbox.

    Args:
        store: a folder for small files that are shown read-only; may hold those of an earlier call.
        frozen: layers between the lowers and the upper one, bottom first.
        upper, work: empty folders on one file system.
    """
    python = interpreter(spec.environment)
    if not (store / "etc").exists():
        _furnish(store, python)
    line = _system(spec, store, python)
    line += ["--overlay-src", str(spec.environment or store / "empty")]
    line += ["--overlay-src", f"{store}/env", "--ro-overlay", "/env"]
    for lower in (*(spec.lowers or [store / "empty"]), *frozen):
        line += ["--overlay-src", str(lower)]
    line += ["--overlay", str(upper), str(work), WORKSPACE]
    for folder in ("/tmp", "/dev/shm", HOME, *spec.scratch):
        line += ["--size", str(spec.limits.tmp_mb * MB), "--tmpfs", folder]
    for path, source in spec.binds.items():
        line += ["--ro-bind", str(source), path]
    for program in store.glob("*.py*"):
        line += ["--ro-bind", str(program), f"/run/{program.name}"]
    program = next(store.glob("supervisor.*"))
    for mount in ("/proc", "/dev", "/"):  # /proc: without capabilities, root may still write to /proc/sys
        line += ["--remount-ro", mount]
    return [*line, "--", "/env/bin/python", "-I", "-S", f"/run/{program.name}"]


def _system(spec: SandboxSpec, store: Path, python: Interpreter) -> list[str]:
    """Namespaces, devices, the host's system folders without their Python packages, and /etc."""
    words = "--unshare-user --unshare-pid --unshare-net --unshare-ipc --unshare-uts --unshare-cgroup-try"
    words += " --disable-userns --cap-drop ALL --die-with-parent --new-session --as-pid-1 --clearenv"
    uid = USERS[spec.user]
    words += f" --uid {uid} --gid {uid} --hostname sandbox --ro-bind /usr /usr --proc /proc --dev /dev"
    line = [*words.split(), *_devices()]
    for top in ("/bin", "/sbin", "/lib", "/lib32", "/lib64", "/libx32"):
        if Path(top).is_symlink():
            line += ["--symlink", str(Path(top).readlink()), top]
        elif Path(top).exists():
            line += ["--ro-bind", top, top]
    if python.inside == PYTHON:
        for folder in ("bin", "lib", "lib64", "include"):  # not pkgs or envs of a conda prefix
            line += ["--ro-bind-try", f"{python.prefix}/{folder}", f"{PYTHON}/{folder}"]
        for alias in python.aliases:
            line += ["--symlink", PYTHON, alias]
    for hidden in (*_site_packages(python), *applications("/usr")):
        line += ["--ro-bind", f"{store}/empty", hidden]
    line += ["--ro-bind", f"{store}/etc", "/etc"]
    for entry in ("alternatives", "ssl/certs"):
        line += ["--ro-bind-try", f"/etc/{entry}", f"/etc/{entry}"]
    return line


@dataclass(frozen=True)
class Interpreter:
    """Python that an environment was made with."""

    prefix: Path
    """On the host."""
    name: str
    """Of its executable: "python3.11"."""

    @property
    def inside(self) -> str:
        """Its prefix in a sandbox."""
        return str(self.prefix) if self.prefix.is_relative_to("/usr") else PYTHON

    @functools.cached_property
    def aliases(self) -> list[str]:
        """Prefixes written into the executable, where it looks for its shared library."""
        built = re.findall(rb"(?<=\0)(/[^\0:]+)/lib\0", (self.prefix / "bin" / self.name).read_bytes())
        paths = {os.fsdecode(path) for path in built}
        return sorted(path for path in paths if Path(path).resolve() == self.prefix and path != self.inside)


@functools.cache
def interpreter(environment: Path | None) -> Interpreter:
    """The base Python of an environment, or our own.

    Raises:
        SandboxError: not a virtual environment of a Python on this machine.
    """
    home, version = Path(sys.base_prefix) / "bin", f"{sys.version_info.major}.{sys.version_info.minor}"
    if environment is not None:
        config = environment / "pyvenv.cfg"
        try:
            pairs = (line.partition("=") for line in config.read_text(encoding="utf-8").splitlines())
            settings = {key.strip().lower(): value.strip() for key, _, value in pairs}
            home = Path(settings["home"])
        except (OSError, KeyError):
            raise SandboxError(f"{environment} is not a virtual environment: no `home` in {config}") from None
        version = settings.get("version") or settings.get("version_info") or version
    names = [f"python{'.'.join(version.split('.')[:2])}", "python3"]
    for name in names:
        if (home / name).exists():
            return Interpreter(home.resolve().parent, name)
    maker = environment or sys.executable
    raise SandboxError(f"{maker} was made with a Python that no longer exists: no {home / names[0]}")


@functools.cache
def _site_packages(python: Interpreter) -> list[str]:
    """Paths inside at which packages of the host would show: installed ones, and the wheels that ensurepip brings."""
    prefixes = {Path("/usr"): "/usr", Path("/usr/local"): "/usr/local", python.prefix: python.inside}
    return [
        inside + str(path).removeprefix(str(root))
        for root, inside in prefixes.items()
        for folder in ("site-packages", "dist-packages", "ensurepip/_bundled")
        for path in sorted(root.glob(f"lib*/python3*/{folder}"))
        if path.resolve() == root.resolve() / path.relative_to(root)
    ]


@functools.cache
def applications(usr: str) -> list[str]:
    """Folders of applications that bring Python packages of their own, perhaps copies of code that a task removed."""
    parents = [Path(usr, name) for name in ("lib", "share", "libexec", "local", "local/lib", "local/share")]
    return [
        str(folder)
        for parent in parents
        for folder in (sorted(parent.iterdir()) if parent.is_dir() else ())
        if folder not in parents and not folder.name.startswith("python3") and _brings_packages(folder, 3)
    ]


def _brings_packages(folder: Path, depth: int) -> bool:
    try:
        inside = [entry for entry in os.scandir(folder) if entry.is_dir(follow_symlinks=False)]
    except OSError:  # not a folder, or not ours to read
        return False
    if any(entry.name in PACKAGE_FOLDERS for entry in inside):
        return True
    return depth > 1 and any(_brings_packages(Path(entry), depth - 1) for entry in inside)


@functools.cache
def _devices() -> list[str]:
    """Devices that belong to nobody, where root runs us: even without capabilities, root owns the host's /dev/null.

    A `chmod -R` inside would change the mode of the host's device. Read-only mounts do not help: bubblewrap's cannot
    hold devices. Where we may not make or open devices the host's are shown.
    """
    line = []
    for name in ("null", "zero", "full", "random", "urandom", "tty") if os.getuid() == 0 else ():
        device, fresh = DEVICES / name, DEVICES / f"{name}.{os.getpid()}"
        try:
            if not device.exists():
                DEVICES.mkdir(exist_ok=True)
                fresh.unlink(missing_ok=True)
                os.mknod(fresh, stat.S_IFCHR, Path("/dev", name).stat().st_rdev)
                fresh.chmod(0o666)
                os.chown(fresh, NOBODY, NOBODY)
                fresh.rename(device)
            if name == "null":
                os.close(
                    os.open(device, os.O_RDWR)
                )  # on a mount without devices it can be made and not opened
        except OSError:
            return []
        line += ["--dev-bind", str(device), f"/dev/{name}"]
    return line


def _furnish(store: Path, python: Interpreter) -> None:
    """Small files that a sandbox shows read-only."""
    for folder in ("empty", "etc/alternatives", "etc/ssl/certs", "env/bin"):
        (store / folder).mkdir(parents=True)
    with contextlib.suppress(FileNotFoundError):
        shutil.copyfile("/etc/ld.so.cache", store / "etc/ld.so.cache")
    for file, text in ETC.items():
        (store / "etc" / file).write_text(text)
    for link in {"python", "python3", python.name}:
        (store / "env/bin" / link).symlink_to(f"{python.inside}/bin/{python.name}")
    (store / "env/pyvenv.cfg").write_text(
        f"home = {python.inside}/bin\ninclude-system-site-packages = false\n"
    )
    ours = python.name == f"python3.{sys.version_info.minor}"
    for source in (SUPERVISOR, WATCHER):
        data = _compiled(source) if ours else source.read_bytes()
        (store / f"{source.stem}.py{'c' * ours}").write_bytes(data)


@functools.cache
def _compiled(source: Path) -> bytes:
    """Bytecode of a program that runs inside, for a Python of our own version: compiling takes longer than starting."""
    with tempfile.TemporaryDirectory() as folder:
        py_compile.compile(str(source), f"{folder}/pyc", dfile=source.name, doraise=True)
        return Path(folder, "pyc").read_bytes()
