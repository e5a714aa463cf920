"""Where untrusted code runs.

A sandbox shows a workspace (copy-on-write), a prepared Python environment and the host's /usr (read-only), and
nothing else of the machine. `open_sandbox` starts one; `spec.Sandbox` is what it can do; `probe` tells what a machine
lacks. Writes are kept in memory where /dev/shm is roomy, else in the temporary folder, or below WOODSHED_SCRATCH.

Protected, by Linux namespaces, for root as for anybody else:
- files: the host's are invisible but for those shown, and none of those can be changed;
- network: there is none, not even the host's loopback or abstract sockets; the host's processes are invisible;
- privileges: no capabilities, no setuid, no further user namespaces, a clean environment, no kernel settings;
- time and memory: every command ends by its timeout or at the limits of `Limits`, and so does all that it started;
  everything ends when the controller does, also by kill -9.

NOT protected:
- the kernel is the host's, and no system call is filtered: whoever can exploit it gets out. In a virtual machine,
  vsock sockets pass; the kernel's log and the session keyring can be read. Put a virtual machine around hostile code;
- what runs in a sandbox can see and change everything else in it, so never judge an attempt where it ran;
- limits are watched 20 times a second (disk: twice), with a hard wall behind them only where control groups can be
  made; CPU, disk bandwidth and page cache are shared with the host;
- what /usr, /proc and the table of mounts tell about the host: versions of programs, hardware, names of folders;
- devices, where root may not make its own (`rootfs`): a `chmod` inside then reaches the host's /dev/null.
"""

from __future__ import annotations

from typing import Literal

from woodshed.records import SandboxError
from woodshed.sandbox.bubblewrap import open_bubblewrap
from woodshed.sandbox.probe import probe
from woodshed.sandbox.spec import Change, Check, Limits, Result, Sandbox, SandboxSpec, Touch
from woodshed.sandbox.unsafe import SubprocessSandbox

__all__ = ["Change", "Check", "Limits", "Result", "Sandbox", "SandboxSpec", "Touch", "open_sandbox", "probe"]


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
