"""One session of pytest in a sandbox."""

from __future__ import annotations

import compileall
import dataclasses
import functools
import importlib.util
import secrets
import signal
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

from woodshed.grading import results
from woodshed.grading.results import SessionRequest, TestRun
from woodshed.records import SandboxError
from woodshed.sandbox import Sandbox, SandboxSpec

INSIDE = {
    "runner.py": "/run/woodshed/woodshed_runner.py",
    "assert_hardening.py": "/run/woodshed/woodshed_assert_hardening.py",
    "process_isolation": "/run/woodshed/woodshed_process_isolation",
}
"""Files of this package and where a sandbox shows them."""
LOG_BYTES = 1 << 16

PYTHON = 'WOODSHED_PYTHONPATH="$PYTHONPATH" PYTHONPATH= exec /env/bin/python -P -s -B '
"""A script starts without PYTHONPATH: no file of the workspace may be imported before it has read its request."""

IMPORT = 'import gc, sys; gc.disable(); sys.path.insert(0, "/run/woodshed"); import woodshed_runner; sys.path.pop(0)'
START = f"{PYTHON}-c '{IMPORT}; woodshed_runner.main()'"
"""Imported, for its bytecode: a program that is run is compiled each time. Garbage is collected from when tests run."""


def with_runner(spec: SandboxSpec, kind: results.Kind = "ordinary") -> SandboxSpec:
    """The same sandbox, in which `run_tests` can run, as another user than the agent if the session is an ordinary
    one."""
    user: Literal["agent", "grader"] = "grader" if kind == "ordinary" else "agent"
    return dataclasses.replace(spec, binds={**spec.binds, **_programs()}, user=user)


@functools.cache
def _programs() -> dict[str, Path]:
    """The programs and their bytecode, by place: to compile them takes as long as some sessions.

    The bytecode is beside them, where that can be written; a Python of another version passes it over.
    """
    found: dict[str, Path] = {}
    for name, place in INSIDE.items():
        program = found[place] = Path(__file__).with_name(name)
        if program.is_dir():
            compileall.compile_dir(program, maxlevels=0, quiet=2)
        elif compileall.compile_file(program, quiet=2):
            inside, bytecode = Path(place), Path(importlib.util.cache_from_source(program))
            version = bytecode.name.removeprefix(program.stem)
            found[f"{inside.parent}/__pycache__/{inside.stem}{version}"] = bytecode
    return found


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
        f"ulimit -S -t {cpu_s or 'unlimited'}; {START}",
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
