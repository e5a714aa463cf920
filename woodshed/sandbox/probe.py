"""Checks of this machine's support for sandboxes, for `woodshed doctor`."""

from __future__ import annotations

import socket
import subprocess
import tempfile
from collections.abc import Callable
from pathlib import Path

from woodshed.records import SandboxError
from woodshed.sandbox import store
from woodshed.sandbox.bubblewrap import find_bwrap, open_bubblewrap, remedy
from woodshed.sandbox.spec import Change, Check, Limits, SandboxSpec


def probe() -> list[Check]:
    """Each check tries the thing itself; after the first failure the rest are not tried. About a second."""
    checks: list[Check] = []
    missing = ""
    for name, check in CHECKS.items():
        if missing:
            checks.append(Check(name, False, "not tried", f"needs: {missing}"))
            continue
        try:
            checks.append(Check(name, True, check()))
        except SandboxError as error:
            detail, _, advice = str(error).rpartition("; ")
            checks.append(Check(name, False, detail, advice))
            missing = name
    return checks


def _bubblewrap() -> str:
    path = find_bwrap()
    said = subprocess.run([path, "--version"], capture_output=True, text=True, check=False).stdout.strip()
    return f"{said} ({path})"


def _namespaces() -> str:
    command = ["--unshare-all", "--unshare-user", "--disable-userns", "--ro-bind", "/", "/", "true"]
    result = subprocess.run([find_bwrap(), *command], capture_output=True, text=True, check=False)
    if result.returncode != 0:
        raise SandboxError(f"{result.stderr.strip()}; {remedy(result.stderr)}")
    return "user, process, network and mount namespaces can be made"


def _overlay() -> str:
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "kept").write_text("as it was")
        with open_bubblewrap(SandboxSpec((Path(folder),))) as sandbox:
            sandbox.exec("rm kept")
            if sandbox.diff() != [Change("kept", "deleted", "file")] or not (Path(folder) / "kept").exists():
                raise SandboxError(f"writes are not kept apart; {store.REMEDY}")
    return f"copy-on-write in {store.scratch()}"


def _network() -> str:
    with socket.create_server(("127.0.0.1", 0)) as server, open_bubblewrap(SandboxSpec(())) as sandbox:
        result = sandbox.exec(f"exec 9<>/dev/tcp/127.0.0.1/{server.getsockname()[1]}", timeout_s=5)
    if result.outcome != "nonzero":
        raise SandboxError(f"the host can be reached from a sandbox ({result.outcome}); report this as a bug")
    return "none inside"


def _limits() -> str:
    with open_bubblewrap(SandboxSpec((), limits=Limits(memory_mb=64))) as sandbox:
        result = sandbox.exec(["/env/bin/python", "-c", "x = bytearray(1 << 28); input()"], timeout_s=10)
        with sandbox.running() as now:
            wall = f"control groups, version {now.group.version}" if now.group else "limits of each process"
    if result.outcome != "oom":
        raise SandboxError(
            f"256 MB under a limit of 64 MB ended with {result.outcome!r}; report this as a bug"
        )
    return f"watched from inside; behind that: {wall}"


def _watching() -> str:
    with open_bubblewrap(SandboxSpec((), watch=())) as sandbox:
        sandbox.exec("echo seen > kept")
        if "/workspace/kept" not in [touch.path for touch in sandbox.touched()]:
            raise SandboxError("a file was written and not seen; set rollout.watch = false, or report this")
    return "files that commands touch are seen"


CHECKS: dict[str, Callable[[], str]] = {
    "bubblewrap": _bubblewrap,
    "namespaces": _namespaces,
    "overlay": _overlay,
    "network off": _network,
    "limits": _limits,
    "access log": _watching,
}
