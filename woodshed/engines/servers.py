"""Inference servers that a run starts, each under a guard, and that end with it.

    with serving(settings, model, run.path / "engines") as endpoints:

The folder has the log and the state of each server: s0.log, s0.json (`guard.ServerRecord`).
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

from woodshed.engines import guard, vllm
from woodshed.engines.engine import SamplerSettings
from woodshed.engines.guard import Orders
from woodshed.engines.http import EndpointSettings
from woodshed.engines.vllm import ServedModel
from woodshed.records import RecipeError, SamplerError
from woodshed.runs import machine

START_S = 600.0
"""Longest time that a server may take to start, and to come back."""
END_S = 20.0
LOG_TAIL = 2000
LOCAL = ("temperature", "max_rows", "cache_mb")
"""Settings of the sampler that the local engine needs when it starts."""


@dataclass(frozen=True)
class StartSettings:
    """Settings of servers that a run starts."""

    kind: str
    """"vllm", or "process" for the local engine."""
    sampler: SamplerSettings
    gpus: tuple[int, ...] = ()
    """One server each; () for one server, on the first card where there is one."""
    arguments: tuple[str, ...] = ()
    """More arguments of the server's command, which win over ours."""


@contextmanager
def serving(
    settings: StartSettings, model: ServedModel, folder: Path
) -> Iterator[tuple[EndpointSettings, ...]]:
    """Addresses of ready servers, which end when this is left, and when this process dies.

    Raises:
        RecipeError: the settings name a GPU that is not here.
        SamplerError: there is no vLLM to start, or a server does not start; the message has the end of its log.
    """
    refuse_gpus(settings.gpus)
    folder.mkdir(parents=True, exist_ok=True)
    make = _vllm if settings.kind == "vllm" else _process
    with ExitStack() as stack:
        servers = [
            stack.enter_context(
                _guarded(folder.resolve() / f"s{i}.json", *make(settings, model, folder, gpu))
            )
            for i, gpu in enumerate(settings.gpus or ((0,) if machine.gpus() else (None,)))
        ]
        for server in servers:
            server.wait_until_ready()
        yield tuple(EndpointSettings(url=server.orders.url, model="policy") for server in servers)


def _process(
    settings: StartSettings, model: ServedModel, folder: Path, gpu: int | None
) -> tuple[list[str], dict[str, str]]:
    """Command line, without the port, and environment of a local engine in a process of its own."""
    command = [*machine.PROGRAM, "serve", "--engine", "local", str(model.folder.resolve())]
    command += [f"{name}={value}" for name, value in settings.sampler.model_dump(include=set(LOCAL)).items()]
    command += [f"dtype={model.dtype}", f"adapter={model.adapter or ''}", *settings.arguments]
    return command, {**os.environ, **_visible(gpu)}


def _vllm(
    settings: StartSettings, model: ServedModel, folder: Path, gpu: int | None
) -> tuple[list[str], dict[str, str]]:
    program = vllm.find()
    is_shared = gpu is not None and gpu < model.trained_gpus
    command, more = vllm.command(program, model, folder, is_shared=is_shared)
    own = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    return [*command, *settings.arguments], {**own, **_visible(gpu), **more}


def refuse_gpus(gpus: tuple[int, ...]) -> None:
    """Check that this machine has the GPUs on which servers are to be started.

    Raises:
        RecipeError: names the one that it lacks.
    """
    count = len(_seen()) or len(machine.gpus())
    if missing := [gpu for gpu in gpus if gpu >= count]:
        known = f"0 to {count - 1}" if count > 1 else "0 alone" if count else "none"
        raise RecipeError(
            f"engine.gpus = {list(gpus)}: there is no GPU {missing[0]} here ({known}); name others, or leave it out "
            "for one server, on the first GPU where there is one"
        )


def _seen() -> list[str]:
    """Cards to which CUDA_VISIBLE_DEVICES limits this process; [] without a limit."""
    return [card for card in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if card]


def _visible(gpu: int | None) -> dict[str, str]:
    """The variable that shows a server one card only, of those that this process sees."""
    if gpu is None:
        return {}
    seen = _seen()
    return {"CUDA_VISIBLE_DEVICES": seen[gpu] if gpu < len(seen) else str(gpu)}


@contextmanager
def _guarded(record: Path, command: list[str], environment: dict[str, str]) -> Iterator[GuardedServer]:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    url, command = f"http://127.0.0.1:{port}", [*command, "--port", str(port)]
    orders = Orders(str(record), url, command, environment, START_S)
    server = GuardedServer(orders)
    try:
        yield server
    finally:
        server.end()


class GuardedServer:
    """A server whose guard is started again, too."""

    def __init__(self, orders: Orders) -> None:
        self.orders = orders
        self._ended = threading.Event()
        self._guard = self._start()
        self._watch = threading.Thread(target=self._keep, name="guard", daemon=True)
        self._watch.start()

    def wait_until_ready(self) -> None:
        """Wait for the server's first answer.

        Raises:
            SamplerError: it does not start.
        """
        path = Path(self.orders.record)
        deadline = time.monotonic() + START_S * guard.MOST_STARTS
        while time.monotonic() < deadline:
            record = json.loads(path.read_text()) if path.exists() else {}
            state = record.get("state", "") if record.get("guard") == self._guard.pid else ""
            if state == "ready":
                return
            if state == "failed":
                break
            time.sleep(0.1)
        log = path.with_suffix(".log")
        tail = log.read_text(errors="replace")[-LOG_TAIL:].strip() if log.exists() else ""
        raise SamplerError(
            f"a server does not start: {' '.join(self.orders.command[:4])} ...; its log, {log}:\n{tail}"
        )

    def end(self) -> None:
        """End the server and all of its processes."""
        self._ended.set()
        assert self._guard.stdin is not None
        self._guard.stdin.close()
        try:
            self._guard.wait(END_S)
        except subprocess.TimeoutExpired:
            self._guard.kill()
            self._guard.wait()
        self._watch.join()
        guard.reap(self.orders.record)

    def _start(self) -> subprocess.Popen[bytes]:
        started = subprocess.Popen(
            [sys.executable, "-m", "woodshed.engines.guard"], stdin=subprocess.PIPE, start_new_session=True
        )
        assert started.stdin is not None
        started.stdin.write(json.dumps(asdict(self.orders)).encode() + b"\n")
        started.stdin.flush()
        return started

    def _keep(self) -> None:
        """Start the guard again where it was killed; one that gave up has said so in its record."""
        while not self._ended.wait(0.5):
            if self._guard.poll() is not None and self._guard.returncode < 0:
                assert self._guard.stdin is not None
                self._guard.stdin.close()
                self._guard = self._start()
