"""Files and commands of a sandbox as tools reach them: what cannot be done is a refusal that the policy reads."""

from __future__ import annotations

import errno
import posixpath
from collections.abc import Sequence
from typing import Any

from woodshed.agent.nearest import nearest
from woodshed.agent.output import short
from woodshed.records import ErrorKind, SandboxError
from woodshed.sandbox import Result, Sandbox

Outcome = tuple[str, ErrorKind | None]
"""The text that the policy reads, and the error kind or None."""

MOST_BYTES = 4 << 20
"""Size of the largest file that is read or edited; a shell command shows parts of larger ones."""


class RefusedCallError(Exception):
    """A call that cannot be executed as written."""

    def __init__(self, error_kind: ErrorKind, text: str) -> None:
        super().__init__(text)
        self.error_kind: ErrorKind = error_kind


def inside(path: str, sandbox: Sandbox) -> str:
    """The path relative to the workspace."""
    refuse_odd_text(path, "bad_path")
    whole = posixpath.normpath(posixpath.join(sandbox.workspace, path))
    if not path.strip() or posixpath.commonpath([whole, sandbox.workspace]) != sandbox.workspace:
        raise RefusedCallError("bad_path", f"{short(path)!r} is not a path inside {sandbox.workspace}")
    return posixpath.relpath(whole, sandbox.workspace)


def load(path: str, sandbox: Sandbox) -> bytes:
    try:
        return sandbox.read(path, MOST_BYTES)
    except IsADirectoryError:
        raise RefusedCallError("bad_path", f"{short(path)} is a folder") from None
    except FileNotFoundError:
        raise RefusedCallError("bad_path", missing(path, sandbox)) from None
    except OSError as error:
        why = f"cannot be read: {error.strerror}"
        if error.errno == errno.EFBIG:
            why = f"is larger than {MOST_BYTES >> 20} MB; use shell commands on it"
        raise RefusedCallError("bad_path", f"{short(path)} {why}") from None


def store(path: str, data: bytes, sandbox: Sandbox) -> None:
    try:
        sandbox.write(path, data)
    except IsADirectoryError:
        raise RefusedCallError("bad_path", f"{short(path)} is a folder") from None
    except OSError as error:
        raise RefusedCallError("bad_path", f"{short(path)} cannot be written: {error.strerror}") from None


def exists(path: str, sandbox: Sandbox) -> bool:
    return (
        execute(["test", "-e", posixpath.join(sandbox.workspace, path)], sandbox, timeout_s=10).outcome
        == "ok"
    )


def missing(path: str, sandbox: Sandbox) -> str:
    """Error text for a file that does not exist, with the nearest name."""
    listing = execute(
        ["find", ".", "-name", ".git", "-prune", "-o", "-type", "f", "-print"], sandbox, timeout_s=10
    )
    names = sorted(name.removeprefix("./") for name in listing.stdout.decode("utf-8", "replace").splitlines())
    same = [name for name in names if posixpath.basename(name) == posixpath.basename(path)]
    near = same[0] if same else nearest(path, names, 0.7)
    return f"no file {short(path)}" + (f"; there is {short(near)}" if near else "")


def execute(argv: Sequence[str], sandbox: Sandbox, **options: Any) -> Result:
    result = sandbox.exec(argv, **options)
    if result.outcome == "sandbox_lost":
        raise SandboxError(f"the sandbox was lost while it ran {argv[0]}")
    return result


def encode(text: str, error_kind: ErrorKind = "bad_arguments") -> bytes:
    try:
        return text.encode("utf-8")
    except UnicodeEncodeError:  # a lone surrogate, which JSON can spell
        raise RefusedCallError(error_kind, "the text holds a character that UTF-8 cannot write") from None


def refuse_odd_text(text: str, error_kind: ErrorKind = "bad_arguments") -> None:
    """Refuse what cannot be an argument of a process."""
    if "\0" in text or len(encode(text, error_kind)) > 100_000:
        raise RefusedCallError(error_kind, "the text holds a null character or is too long")
