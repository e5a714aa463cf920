"""What one turn costs beside the policy and its tools while 200 attempts are under way.

By our own loop: from a sampled message to the request for the next one, without the seconds of the tools. Through the
gateway: from an agent's request to the reply that it has read, without the time of sampling; agents are another
process, and send their whole history with every call, as agents do. A message takes 4 to 12 seconds to sample, by its
seed, as of a server with so many requests at once. CPU time is that of the whole process, the scripted policy
included: it hardly depends on the machine's load.

    python benchmarks/concurrent_overhead.py [--attempts 200] [--turns 4] [--out FILE]

Bars: at most 5 ms a turn by our loop and 10 ms through the gateway (medians over all turns).
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path
from typing import Any

from harness_overhead import practice_task

from woodshed.agent import AgentSettings, turn_seed
from woodshed.engines.engine import Sample, SampleRequest
from woodshed.engines.scripted import ScriptedEngine
from woodshed.experience import Collector, RolloutSettings
from woodshed.gateway.recording import Quota, Recording
from woodshed.gateway.server import Gateway
from woodshed.records import Task
from woodshed.runs import machine
from woodshed.sandbox import BUBBLEWRAP, Sandbox, SandboxSpec
from woodshed.tasks import workspace
from woodshed.tasks.environment import resolve
from woodshed.tokens import model_files
from woodshed.tokens.renderer import Renderer, create_renderer

SAMPLING_S = 8.0
BARS_MS = {"loop": 5.0, "gateway": 10.0}
CALL = "I read on. <call>read_file package/module_7.py 200 40</call>"


class SlowEngine(ScriptedEngine):
    """A policy that writes the same call after some seconds, and notes when it was asked and answered."""

    def __init__(self, renderer: Renderer) -> None:
        super().__init__(renderer, lambda request: CALL)
        self.asked: dict[int, float] = {}
        self.answered: dict[int, float] = {}
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()

    def submit_all(self, requests: Any) -> list[Future[Sample]]:
        futures = []
        for request, ready in zip(requests, super().submit_all(requests), strict=True):
            future: Future[Sample] = Future()
            self.asked.setdefault(request.seed, time.perf_counter())
            self._loop.call_soon_threadsafe(
                self._loop.call_later, sampling_s(request), self._answer, request, future, ready.result()
            )
            futures.append(future)
        return futures

    def _answer(self, request: SampleRequest, future: Future[Sample], sample: Sample) -> None:
        self.answered[request.seed] = time.perf_counter()
        if future.set_running_or_notify_cancel():
            future.set_result(sample)

    def close(self) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()


def sampling_s(request: SampleRequest) -> float:
    """Seconds that a message takes."""
    return SAMPLING_S * (0.5 + request.seed % 1000 / 1000)


class OneSandbox:
    """A provider that opens one sandbox for all attempts: 200 would measure the machine's memory."""

    watches = False

    def __init__(self, task: Task) -> None:
        self.sandbox = BUBBLEWRAP.open(SandboxSpec((workspace(task),)))

    def open(self, spec: SandboxSpec) -> Sandbox:
        return Kept(self.sandbox)  # type: ignore[return-value]


class Kept:
    """A sandbox that stays open when an attempt closes it."""

    def __init__(self, sandbox: Sandbox) -> None:
        self._sandbox = sandbox

    def __getattr__(self, name: str) -> Any:
        return getattr(self._sandbox, name)

    def close(self) -> None:
        pass


Measured = tuple[list[float], float]
"""Milliseconds of every turn, and CPU milliseconds of one."""


def by_loop(renderer: Renderer, task: Task, attempts: int, turns: int) -> Measured:
    """Every turn but the last, by our own loop."""
    began = time.process_time()
    engine, provider = SlowEngine(renderer), OneSandbox(task)
    limits = AgentSettings(max_turns=turns, rollout_tokens=10**6)
    shape = RolloutSettings(attempts=attempts, max_in_flight=attempts, repeatable=False, watch=False)
    try:
        [group] = Collector(engine, shape, limits, sandboxes=provider).collect([task])
    finally:
        provider.sandbox.close()
        engine.close()
    found = []
    for rollout in group.rollouts:
        for number, turn in enumerate(rollout.turns[:-1]):
            this, following = (turn_seed(0, rollout.id, n) for n in (number, number + 1))
            found.append(1000 * (engine.asked[following] - engine.answered[this] - turn.tools_s))
    return found, 1000 * (time.process_time() - began) / (attempts * turns)


def by_gateway(renderer: Renderer, attempts: int, turns: int) -> Measured:
    """Every turn through the gateway."""
    began, engine = time.process_time(), SlowEngine(renderer)
    quota = Quota(turns + 1, 256, 10**9, 1e6)
    with Gateway(engine) as gateway:
        keys = [gateway.admit(Recording(str(number), renderer, 1 << 30, quota)) for number in range(attempts)]
        arguments = {"port": gateway.port, "keys": keys, "turns": turns}
        command = [sys.executable, __file__, "--agents"]
        done = subprocess.run(
            command, input=json.dumps(arguments), capture_output=True, text=True, check=True
        )
    engine.close()
    found = []
    for number, elapsed in enumerate(json.loads(done.stdout)):
        seeds = (turn_seed(0, str(number), turn) for turn in range(turns))
        sampled = (engine.answered[seed] - engine.asked[seed] for seed in seeds)
        found += [1000 * (whole - part) for whole, part in zip(elapsed, sampled, strict=True)]
    return found, 1000 * (time.process_time() - began) / (attempts * turns)


async def agent(port: int, key: str, turns: int, delay: float) -> list[float]:
    """One agent over one connection: seconds of each call."""
    await asyncio.sleep(delay)
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    parameters = {"type": "object", "properties": {"path": {"type": "string"}}, "required": ["path"]}
    tools = [{"type": "function", "function": {"name": "read_file", "parameters": parameters}}]
    messages: list[Any] = [{"role": "system", "content": "Be good."}, {"role": "user", "content": "Mend it."}]
    spent = []
    for _ in range(turns):
        started = time.perf_counter()
        body = json.dumps({"model": "m", "messages": messages, "tools": tools}).encode()
        head = f"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\nauthorization: Bearer {key}\r\n"
        writer.write(f"{head}content-length: {len(body)}\r\n\r\n".encode() + body)
        status, *lines = (await reader.readuntil(b"\r\n\r\n")).decode().split("\r\n")
        length = next(line.split(":")[1] for line in lines if line.lower().startswith("content-length"))
        answer = json.loads(await reader.readexactly(int(length)))
        spent.append(time.perf_counter() - started)
        assert " 200 " in status, answer
        message = answer["choices"][0]["message"]
        messages.append(message)
        for call in message["tool_calls"]:
            text = "".join(f"{n:4} value_{n} = {n}\n" for n in range(200, 240))
            messages.append({"role": "tool", "tool_call_id": call["id"], "content": text})
    writer.close()
    return spent


async def agents(port: int, keys: list[str], turns: int) -> list[list[float]]:
    """All agents, their beginnings spread over the time of one message: seconds of every call of each."""
    delays = [SAMPLING_S * number / len(keys) for number in range(len(keys))]
    return await asyncio.gather(*(agent(port, key, turns, d) for key, d in zip(keys, delays, strict=True)))


def summary(measured: Measured, bar: float) -> dict[str, float]:
    """Figures in milliseconds."""
    found, cpu = measured
    ordered = sorted(found)
    p90, p99 = (ordered[int(share * (len(ordered) - 1))] for share in (0.9, 0.99))
    return {
        "turns": len(found),
        "p50": statistics.median(found),
        "p90": p90,
        "p99": p99,
        "bar_p50": bar,
        "cpu": cpu,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--attempts", type=int, default=200)
    parser.add_argument("--turns", type=int, default=4)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/concurrent_overhead.json"))
    parser.add_argument("--agents", action="store_true", help=argparse.SUPPRESS)
    chosen = parser.parse_args()
    if chosen.agents:
        print(json.dumps(asyncio.run(agents(**json.load(sys.stdin)))))
        return
    tokenizer, folder = model_files.load_tokenizer(chosen.model)
    renderer = create_renderer(tokenizer, codec="plain", model_dir=folder)
    load = os.getloadavg()[0]
    with tempfile.TemporaryDirectory() as scratch:
        task = practice_task(Path(scratch, "task"))
        task = replace(task, environment=replace(task.environment, requirements=resolve([])))
        found = {"loop": by_loop(renderer, task, chosen.attempts, chosen.turns)}
    found["gateway"] = by_gateway(renderer, chosen.attempts, chosen.turns)
    figures = {name: summary(each, BARS_MS[name]) for name, each in found.items()}
    for name, each in figures.items():
        print(f"{name:8} {each['turns']} turns: p50 {each['p50']:.1f} ms (bar {each['bar_p50']:g}), ", end="")
        print(f"p90 {each['p90']:.1f}, p99 {each['p99']:.1f}; {each['cpu']:.1f} ms of CPU a turn")
    result = {
        "machine": machine.describe(),
        "load_before": round(load, 1),
        "attempts": chosen.attempts,
        "sampling_s": SAMPLING_S,
        "milliseconds": figures,
    }
    chosen.out.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
