"""Bytecode of a repository's files as they are, for the many sandboxes in which a few of them differ.

Sandboxes write none, so every session of pytest compiles the package and rewrites the assertions of the tests anew;
that is half of a session's time. One session that only collects writes it all down, and a read-only layer shows it
again. Python takes bytecode only for a source of the size and the time that it was made from.
"""

from __future__ import annotations

import io
import tarfile
import time
from pathlib import Path

from woodshed.sandbox import SandboxProvider, SandboxSpec

COLLECT = """python -m pytest -q --collect-only -o addopts= -p no:cacheprovider >/dev/null 2>&1
find . -path '*/__pycache__/*.pyc' -type f | tar -cf - -T - >&3"""
MAX_BYTES = 64 << 20


def kept(spec: SandboxSpec, tree: Path, folder: Path, timeout_s: float, sandboxes: SandboxProvider) -> Path:
    """A layer of bytecode for sandboxes of the tree, written to `folder`; empty where nothing can be collected."""
    newest = max((path.stat().st_mtime for path in tree.rglob("*.py")), default=0.0)
    if (
        abs(time.time() - newest) < 2
    ):  # bytecode knows its source by the second: what is edited must be younger
        time.sleep(2)
    folder.mkdir(parents=True)
    with sandboxes.open(spec) as sandbox:
        done = sandbox.exec(COLLECT, env={"PYTHONDONTWRITEBYTECODE": ""}, timeout_s=timeout_s, channel=True)
    left = MAX_BYTES
    try:
        with tarfile.open(fileobj=io.BytesIO(done.channel), mode="r:") as archive:
            for member in archive:
                left -= member.size
                if left > 0 and member.isreg() and member.name.endswith(".pyc"):
                    archive.extract(member, folder, filter="data")
    except tarfile.TarError:
        pass
    return folder
