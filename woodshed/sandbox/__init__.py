"""Isolation of untrusted code.

A sandbox shows a workspace (copy-on-write), a prepared Python environment and the host's /usr (read-only), and
nothing else of the machine. A `SandboxProvider` opens one; `Sandbox` is what it can do; `probe` tells what a machine
lacks. Writes are kept in memory where /dev/shm is roomy, else in the temporary folder, or below WOODSHED_SCRATCH.

Protected, by Linux namespaces, for root as for anybody else:
- files: the host's are invisible but for those shown, and none of those can be changed;
- network: there is none, not even the host's loopback or abstract sockets; the host's processes are invisible;
- privileges: no capabilities, no setuid, no further user namespaces, a clean environment, no kernel settings, none of
  the system calls that hoard memory outside of processes and folders (`watcher.HOARDS`), none of 32-bit programs;
- time and memory: every command ends by its timeout or at the limits of `Limits`, and so does all that it started;
  everything ends when the controller does, also by kill -9.

NOT protected:
- the kernel is the host's, and few system calls are filtered: whoever can exploit it gets out. In a virtual machine,
  vsock sockets pass; the kernel's log and the session keyring can be read. Put a virtual machine around hostile code;
- what runs in a sandbox can see and change everything else in it, so never judge an attempt where it ran;
- limits are watched 20 times a second (disk: twice), with a hard wall behind them only where control groups can be
  made: without, nobody sees pages that a process shared and unmapped, and full sockets; CPU, disk bandwidth and page
  cache are shared with the host;
- what /usr, /proc and the table of mounts tell about the host: versions of programs, hardware, names of folders;
- devices, where root may not make its own (`rootfs`): a `chmod` inside then reaches the host's /dev/null.
"""

from __future__ import annotations

from woodshed.sandbox.probe import probe
from woodshed.sandbox.provider import (
    BUBBLEWRAP,
    Revocable,
    SandboxProvider,
    SandboxSettings,
    Unprotected,
)
from woodshed.sandbox.spec import Change, Check, Limits, Result, Sandbox, SandboxSpec, Touch

__all__ = [
    "BUBBLEWRAP",
    "Change",
    "Check",
    "Limits",
    "Result",
    "Revocable",
    "Sandbox",
    "SandboxProvider",
    "SandboxSettings",
    "SandboxSpec",
    "Touch",
    "Unprotected",
    "open_sandbox",
    "probe",
]


def open_sandbox(spec: SandboxSpec) -> Sandbox:
    """Open a sandbox of the default provider, for a caller who was handed none.

    Raises:
        SandboxError: it cannot be made on this machine (the message says what to do), or a path is missing.
    """
    return BUBBLEWRAP.open(spec)
