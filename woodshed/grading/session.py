"""One session of pytest in a sandbox."""

from __future__ import annotations

import compileall
import dataclasses
import functools
import secrets
import shutil
import signal
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

from woodshed.grading import results
from woodshed.grading.results import SessionRequest, TestRun
from woodshed.records import SandboxError
from woodshed.sandbox import Sandbox, SandboxSpec

USERS: dict[results.Kind, Literal["agent", "grader"]] = {
    "ordinary": "grader",
    "isolated": "agent",
    "again": "agent",
}
LOG_BYTES = 1 << 16

PYTHON = 'WOODSHED_PYTHONPATH="$PYTHONPATH" PYTHONPATH= exec /env/bin/python -P -s -B '
"""A script starts without PYTHONPATH: no file of the workspace may be imported before it has read its request."""


def start(request: SessionRequest) -> str:
    """The command that runs the runner."""
    names, flags = request.programs, " ".join(results.FLAGS[request.kind])
    program = f"{names.folder}/{names.runner}.py"
    return f'{names.python_path}="$PYTHONPATH" PYTHONPATH= exec /env/bin/python {flags} {program}'


def with_runner(spec: SandboxSpec, kind: results.Kind = "ordinary") -> SandboxSpec:
    """The same sandbox, in which a session can run, as another user than the agent if it is an ordinary one."""
    _compile()
    names = results.Programs()
    files = {f"{names.folder}/{name}": Path(__file__).with_name(file) for name, file in names.files().items()}
    return dataclasses.replace(spec, binds={**spec.binds, **files}, user=USERS[kind])


def with_copies(spec: SandboxSpec, request: SessionRequest, folder: Path) -> SandboxSpec:
    """As `with_runner`, with copies of the programs in a new folder: mounts, too, tell where something is from."""
    _compile()
    folder.mkdir()
    for name, file in request.programs.files().items():
        source = Path(__file__).with_name(file)
        (shutil.copytree if source.is_dir() else shutil.copyfile)(source, folder / name)
    binds = {**spec.binds, request.programs.folder: folder}
    return dataclasses.replace(spec, binds=binds, user=USERS[request.kind])


@functools.cache
def _compile() -> None:
    """Leave bytecode beside the programs, where that can be written: to compile them takes as long as some sessions."""
    compileall.compile_dir(Path(__file__).with_name("process_isolation"), maxlevels=0, quiet=2)


def run_tests(
    sandbox: Sandbox,
    *,
    ids: Sequence[str] | None,
    packages: Sequence[str],
    timeout_s: float,
    cpu_s: int | None = None,
    hash_seed: int = 0,
) -> TestRun:
    """Run the project's tests, or the ones asked for, as `run_session` does."""
    request = SessionRequest(ids, packages)
    return run_session(sandbox, request, timeout_s=timeout_s, cpu_s=cpu_s, hash_seed=hash_seed)


def run_session(
    sandbox: Sandbox,
    request: SessionRequest,
    *,
    timeout_s: float,
    cpu_s: int | None = None,
    hash_seed: int | None = None,
) -> TestRun:
    """Run one session of pytest and tell what can be believed about it.

    Args:
        sandbox: opened from `with_runner(spec)`; the roots of the source come from its PYTHONPATH.
        cpu_s: CPU seconds that the session may use; None: as many as it likes.
        hash_seed: None takes the one of the request's kind.

    Raises:
        SandboxError: the sandbox was lost.
    """
    nonce = secrets.token_hex(16)
    result = sandbox.exec(
        f"ulimit -S -t {cpu_s or 'unlimited'}; {start(request)}",
        env={
            **results.ENVIRONMENTS[request.kind],
            "PYTHONHASHSEED": str(results.HASH_SEEDS[request.kind] if hash_seed is None else hash_seed),
        },
        stdin=request.encoded(nonce, sandbox.workspace),
        timeout_s=timeout_s,
        max_output=LOG_BYTES,
        channel=True,
    )
    if result.outcome == "sandbox_lost":
        said = result.stderr[-500:].decode(errors="replace") or "it said nothing"
        raise SandboxError(f"the sandbox was lost while tests ran: {said}")
    return results.test_run(
        results.read(result.channel, nonce),
        request.ids,
        ended=result.outcome,
        seconds=result.seconds,
        log=(result.stdout + result.stderr).decode(errors="replace")[-LOG_BYTES:],
        out_of_cpu=cpu_s is not None and result.exit_code == 128 + signal.SIGXCPU,
    )
