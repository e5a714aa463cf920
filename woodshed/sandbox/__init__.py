"""Where untrusted code runs.

A sandbox shows a workspace (copy-on-write), a prepared Python environment and the host's /usr (read-only), and
nothing else of the machine. `open_sandbox` starts one; `spec.Sandbox` is what it can do.

Protected, by Linux namespaces and without being root:
- files: the host's are invisible but for those shown; lowers, environment and binds cannot be written;
- network: none, not even the host's loopback or abstract sockets; processes and IPC of the host: invisible;
- privileges: no capabilities, no setuid, no further user namespaces, a clean environment, an unprivileged user;
- the machine's time and memory: every command ends at its timeout with everything that it started, and at the
  limits of `Limits`; everything dies when its controller dies.

NOT protected:
- the kernel is the host's: an exploit of it gets out. For hostile code use a virtual machine around it all;
- whatever runs in one sandbox can see and change everything else in it: never judge an attempt where it ran;
- limits are watched 20 times a second, not enforced by the allocation; a burst in between goes through, and the
  CPU, disk bandwidth and page cache are shared with the host;
- side channels, and what /usr tells about the host (versions of installed programs), /proc and uname.
"""

from __future__ import annotations

from typing import Literal

from woodshed.records import SandboxError
from woodshed.sandbox.bubblewrap import open_bubblewrap
from woodshed.sandbox.probe import probe
from woodshed.sandbox.spec import Change, Check, Limits, Result, Sandbox, SandboxSpec
from woodshed.sandbox.unsafe import SubprocessSandbox

__all__ = ["Change", "Check", "Limits", "Result", "Sandbox", "SandboxSpec", "open_sandbox", "probe"]


def open_sandbox(
    spec: SandboxSpec, *, backend: Literal["bwrap", "subprocess"] = "bwrap", unsafe: bool = False
) -> Sandbox:
    """A running sandbox.

    Raises:
        SandboxError: it cannot be made on this machine (the message says what to do), or a path is missing.
    """
    if backend == "bwrap":
        return open_bubblewrap(spec)
    if not unsafe:
        raise SandboxError("backend 'subprocess' protects nothing: use 'bwrap', or say unsafe=True in a test")
    return SubprocessSandbox(spec)
