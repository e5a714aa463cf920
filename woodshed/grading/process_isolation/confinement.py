"""Walls between the two processes: a filter of system calls, no new privileges, memory that nobody reads.

Both run as one user, since a sandbox maps one and shuts user namespaces. So the tests' process is not dumpable, which
closes its /proc and ptrace, and the other one loses the calls that reach over to a process: it can neither trace, read
or copy from any process, nor signal or limit the tests'.
"""

from __future__ import annotations

import ctypes
import os
import struct
from collections.abc import Mapping
from pathlib import Path

DUMPABLE, NO_NEW_PRIVS, SECCOMP, FILTER = 4, 38, 22, 2
LOAD, EQUAL, ANSWER = 0x20, 0x15, 0x06
ALLOW, REFUSE = 0x7FFF0000, 0x00050001  # EPERM
NUMBER, MACHINE = 0, 4
# Name: its number on x86_64 and on aarch64.
REACHING = {
    "ptrace": (101, 117),
    "process_vm_readv": (310, 270),
    "process_vm_writev": (311, 271),
    "kcmp": (312, 272),
    "pidfd_open": (434, 434),
    "pidfd_getfd": (438, 438),
    "pidfd_send_signal": (424, 424),
    "process_madvise": (440, 440),
    "move_pages": (279, 239),
    "migrate_pages": (256, 238),
    "perf_event_open": (298, 241),
    "bpf": (321, 280),
    "userfaultfd": (323, 282),
    "io_uring_setup": (425, 425),
    "io_uring_enter": (426, 426),
    "io_uring_register": (427, 427),
    "tkill": (200, 130),
}
"""Calls that reach over to another process, whichever it is."""
AIMED = {
    "kill": (62, 129),
    "tgkill": (234, 131),
    "rt_sigqueueinfo": (129, 138),
    "rt_tgsigqueueinfo": (297, 240),
}
"""Calls whose first argument is a process, or a group of them."""
LIMITS = {"prlimit64": (302, 261)}
"""Calls that may be aimed at oneself only: 0."""
OWNERS = {"fcntl": (72, 25)}
SET_OWNER = (8, 15)  # F_SETOWN, F_SETOWN_EX: whom the kernel signals
MACHINES = {"x86_64": (0xC000003E, 0), "aarch64": (0xC00000B7, 1)}
X32 = 0x40000000


def close_memory() -> None:
    """Neither ptrace nor /proc reach this process from now on."""
    ctypes.CDLL(None).prctl(DUMPABLE, 0, 0, 0, 0)


def block(variables: Mapping[str, str]) -> bytes:
    """Variables as the kernel shows them in /proc/self/environ."""
    return b"".join(os.fsencode(f"{name}={value}") + b"\0" for name, value in variables.items())


def begin_with(variables: Mapping[str, str]) -> None:
    """Let /proc show other variables than this process began with, where there is just that much room for them.

    Whoever has looked up a variable of the old ones before must not use it any more.
    """
    fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
    first, last, wanted = int(fields[47]), int(fields[48]), block(variables)
    if len(wanted) == last - first:
        ctypes.memmove(first, wanted, len(wanted))


def confine(tests: int | None = None) -> None:
    """Take calls that reach other processes from this one and its children, where the machine is known.

    Args:
        tests: the process that may not be signalled either, nor its group, nor all at once.

    Raises:
        OSError: the kernel refuses the filter.
    """
    if os.uname().machine not in MACHINES:
        return
    lines = _program(*MACHINES[os.uname().machine], tests)
    code = b"".join(struct.pack("HBBI", *line) for line in lines)
    buffer = ctypes.create_string_buffer(code, len(code))
    header = struct.pack("HxxxxxxQ", len(lines), ctypes.addressof(buffer))
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(NO_NEW_PRIVS, 1, 0, 0, 0) or libc.prctl(SECCOMP, FILTER, header, 0, 0):
        raise OSError(ctypes.get_errno(), "no filter of system calls")


def _program(machine: int, column: int, tests: int | None) -> list[tuple[int, int, int, int]]:
    """Each block ends in a verdict or goes on to the next; jumps count the lines that they pass over."""
    lines = [(LOAD, 0, 0, MACHINE), (EQUAL, 1, 0, machine), (ANSWER, 0, 0, REFUSE), (LOAD, 0, 0, NUMBER)]
    lines += [(0x35, 0, 1, X32), (ANSWER, 0, 0, REFUSE)]  # at least
    for numbers in REACHING.values():
        lines += [(EQUAL, 0, 1, numbers[column]), (ANSWER, 0, 0, REFUSE)]
    if tests is None:
        return [*lines, (ANSWER, 0, 0, ALLOW)]
    aims = [value & 0xFFFFFFFF for value in (tests, -tests, -1, -os.getpgid(tests))]
    for numbers in AIMED.values():
        lines += _block(numbers[column], 16, aims, is_refused=True)
    for numbers in LIMITS.values():
        lines += _block(numbers[column], 16, [0], is_refused=False)
    for numbers in OWNERS.values():
        lines += _block(numbers[column], 24, list(SET_OWNER), is_refused=True)
    return [*lines, (ANSWER, 0, 0, ALLOW)]


def _block(
    number: int, argument: int, values: list[int], *, is_refused: bool
) -> list[tuple[int, int, int, int]]:
    """A verdict on one call by the lower half of an argument: these values are refused, or are all that is allowed."""
    listed, other = (REFUSE, ALLOW) if is_refused else (ALLOW, REFUSE)
    tests = [(EQUAL, len(values) - place, 0, value) for place, value in enumerate(values)]
    inner = [(LOAD, 0, 0, argument), *tests, (ANSWER, 0, 0, other), (ANSWER, 0, 0, listed)]
    return [(EQUAL, 0, len(inner), number), *inner]
