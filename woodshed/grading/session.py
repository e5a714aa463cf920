"""One session of pytest in a sandbox."""

from __future__ import annotations

import compileall
import dataclasses
import functools
import importlib.util
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
    """The command that runs the runner.

    Where the code under test is elsewhere it is imported, for its bytecode: a program that is run is compiled each
    time. Where that code may look, the command line is another than in its own process.
    """
    names, flags = request.programs, " ".join(results.FLAGS[request.kind])
    program = f"{names.folder}/{names.runner}.py"
    if request.kind == "isolated":
        steps = f'sys.path.insert(0, "{names.folder}"); import {names.runner} as program; del sys.path[0]'
        program = f"-c 'import gc, sys; gc.disable(); {steps}; program.main()'"
    unset = "".join(f"unset {name}; " for name in results.UNSET[request.kind])
    return f'{unset}{names.python_path}="$PYTHONPATH" PYTHONPATH= exec /env/bin/python {flags} {program}'


def with_runner(spec: SandboxSpec, kind: results.Kind = "ordinary") -> SandboxSpec:
    """The same sandbox, in which a session can run, as another user than the agent if it is an ordinary one."""
    names = results.Programs()
    files = {f"{names.folder}/{name}": source for name, source in _programs(names).items()}
    return dataclasses.replace(spec, binds={**spec.binds, **files}, user=USERS[kind])


def with_copies(spec: SandboxSpec, request: SessionRequest, folder: Path) -> SandboxSpec:
    """As `with_runner`, with copies of the programs in a new folder: mounts, too, tell where something is from."""
    for name, source in _programs(request.programs).items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (shutil.copytree if source.is_dir() else shutil.copy2)(source, folder / name)
    binds = {**spec.binds, request.programs.folder: folder}
    return dataclasses.replace(spec, binds=binds, user=USERS[request.kind])


def _programs(names: results.Programs) -> dict[str, Path]:
    """The programs and their bytecode, by path in their folder. A Python of another version passes the latter over."""
    found: dict[str, Path] = {}
    for name, file in names.files().items():
        source = found[name] = Path(__file__).with_name(file)
        bytecode = compiled(source)
        if bytecode.is_file():
            version = bytecode.name.removeprefix(source.stem)
            found[f"__pycache__/{name.removesuffix('.py')}{version}"] = bytecode
    return found


@functools.cache
def compiled(source: Path) -> Path:
    """The bytecode of a program, if that can be written: to compile it takes as long as some sessions."""
    if source.is_dir():
        compileall.compile_dir(source, maxlevels=0, quiet=2)
        return source
    compileall.compile_file(source, quiet=2)
    return Path(importlib.util.cache_from_source(source))


def run_tests(
    sandbox: Sandbox,
    *,
    ids: Sequence[str] | None,
    packages: Sequence[str],
    timeout_s: float,
    cpu_s: int | None = None,
    hash_seed: int = 0,
    options: Sequence[str] = (),
) -> TestRun:
    """Run the project's tests, or the ones asked for, as `run_session` does."""
    request = SessionRequest(ids, packages, options=options)
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
