"""Asynchronous RL beside synchronous RL: the same recipe and tasks on the same cards, one staleness after the other.

    python benchmarks/async_training.py TASKS --model DIR --adapter DIR --runs local:0,vllm:0,vllm:2      one card
    python benchmarks/async_training.py TASKS --model DIR --adapter DIR --gpus 1 --runs vllm:0,vllm:2     two cards
    python benchmarks/async_training.py TASKS --toy --runs process:0,process:1                            any machine

A run is an engine and a staleness. With staleness 0 attempts are made between two updates; above it, a collector makes
them all the time. Each run is a process of `woodshed train`; runs with the same engine share its server. A step ends
when its metrics are written; the first `--warmup` steps, which compile and capture, and as many more as the staleness,
which were begun before there was a clock, are not counted.
Beside the time of a step: the share of it in which the trainer waited, what each card did, how old tokens were, the
distance between engine and trainer, and the size of every version of the weights that was published. Each row is
written as it is measured, and not twice.

Bars: on one card with 16 cores staleness 2 takes steps 1.25 times as fast as the faster way of staleness 0; on two
cards 1.6 times; no token older than the staleness.

Expected, written before the first run: one card 1.27 to 1.34 times at staleness 2 and 1.16 to 1.26 at 1, by the
simulator, which was low by 3 to 16 % at 16 cores; two cards with 32 cores 1.87 times. The trainer then waits for half
of a step on one card. Adapters of rank 16 are 74 MB a version, and loading one holds up nothing.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import re
import shutil
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import httpx
from kept_rows import Rows, spread

from woodshed.engines.engine import SamplerSettings
from woodshed.engines.http import EndpointSettings
from woodshed.engines.servers import ServedModel, StartSettings, serving
from woodshed.runs.folder import RunDir
from woodshed.settings import validate
from woodshed.stages.recipe import Recipe

LOOK_S = 0.1
PAUSE_S = 0.01
TRAINED = re.compile(r'^\{"phase": ?"train", ?"step": ?(\d+), ?"part": ?\d+, ?"record"', re.M)
"""Start of a line of metrics.jsonl with a step's figures."""
GRADED = re.compile(r'"reward": ?\{"value": ?[\d.-]')
"""A reward among them: some attempt was graded."""
VOID = "no attempt of the first steps could be graded, so nothing is trained: the run's verdicts say why"
ROWS = 128
BAR = {1: 1.25, 2: 1.6}
"""Times the speed of staleness 0, by the number of cards."""


def main() -> None:
    options = _options()
    settings = {name: getattr(options, name) for name in ("tasks_per_step", "attempts", "steps", "lora_rank")}
    rows = Rows(options.out, settings, key=("engine", "staleness", "gpus"), commit=options.commit)
    named = [each.split(":") for each in options.runs.split(",")]
    for engine, runs in itertools.groupby(named, key=lambda each: each[0]):
        levels = [int(staleness) for _, staleness in runs]
        missing = [n for n in levels if not rows.has(engine=engine, staleness=n, gpus=options.gpus)]
        if not missing:
            continue
        with tempfile.TemporaryDirectory() as scratch, served(options, engine, Path(scratch)) as servers:
            for staleness in missing:
                about = {"engine": engine, "staleness": staleness, "gpus": options.gpus}
                rows.add(about | measure(options, engine, staleness, servers, Path(scratch)))
                if rows.rows[-1].get("error") == VOID:
                    sys.exit(VOID)
    show(rows.rows)


@contextmanager
def served(
    options: argparse.Namespace, engine: str, scratch: Path
) -> Iterator[tuple[EndpointSettings, ...] | None]:
    """One server for all runs with this engine, or None for the trainer's own."""
    if engine == "local":
        yield None
        return
    gpus = tuple(int(gpu) for gpu in options.gpus.split(",") if gpu)
    arguments = tuple(each for each in options.arguments.split(",") if each)
    settings = StartSettings(engine, SamplerSettings(max_rows=ROWS), gpus, arguments)
    dtype = "float32" if options.toy else "bfloat16"
    model = ServedModel(Path(options.model), dtype, options.lora_rank, staleness=4, trained_gpus=1)
    began = time.monotonic()
    try:
        with serving(settings, model, scratch / "engines") as endpoints:
            print(f"{engine}: ready after {time.monotonic() - began:.0f} s", flush=True)
            yield endpoints
    finally:
        keep_logs(options, f"{engine}-server", [scratch / "engines" / "s0.log"])


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("tasks", type=Path)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--adapter", default="", help="where training begins; a new adapter without it")
    parser.add_argument("--lora-rank", type=int, default=16, help="0 trains all weights")
    parser.add_argument("--rate", type=float, default=1e-5, help="learning rate")
    parser.add_argument("--runs", default="local:0,vllm:0,vllm:1,vllm:2", help="engine:staleness, ...")
    parser.add_argument("--gpus", default="", help="cards of vllm, as engine.gpus; the trainer's without it")
    parser.add_argument("--arguments", default="", help="more arguments of the engine's command, with commas")
    parser.add_argument("--tasks-per-step", type=int, default=8)
    parser.add_argument("--attempts", type=int, default=8)
    parser.add_argument("--steps", type=int, default=9)
    parser.add_argument("--warmup", type=int, default=1, help="steps that are not counted")
    parser.add_argument("--limit", type=float, default=1e6, help="seconds of one run")
    parser.add_argument("--toy", action="store_true", help="short messages, in float32")
    parser.add_argument("--logs", type=Path, help="folder for what the runs printed and measured")
    parser.add_argument("--commit", default="", help="of this code, where it is no checkout")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results" / "async_training.json")
    return parser.parse_args()


def recipe_of(
    options: argparse.Namespace,
    name: str,
    staleness: int,
    servers: tuple[EndpointSettings, ...] | None,
    runs: Path,
) -> Recipe:
    """The recipe of a run: that of the experiment, with rewards alone."""
    sizes = (3, 48, 128) if options.toy else (5, 192, 768)
    cores = os.cpu_count() or 1
    policy = {"model": options.model, "lora_rank": options.lora_rank, "adapter": options.adapter}
    remote = {"kind": "http", "servers": [each.model_dump() for each in servers or ()]}
    return validate(
        Recipe,
        {
            "name": name,
            "runs": str(runs),
            "tasks": {"train": [str(options.tasks.resolve())], "heldout": []},
            "policy": policy | {"dtype": "float32" if options.toy else "bfloat16", "codec": "plain"},
            "engine": {"max_rows": ROWS} | (remote if servers else {"kind": "local"}),
            "agent": dict(zip(("max_turns", "turn_tokens", "rollout_tokens"), sizes, strict=True)),
            "rollout": {
                "attempts": options.attempts,
                "max_in_flight": options.tasks_per_step * options.attempts * (1 + bool(staleness)),
                "repeatable": False,
                "tool_threads": cores,
            },
            "grading": {"shaped": True, "jobs": cores, "timeout_s": 20},
            "rl": {
                "steps": options.steps,
                "tasks_per_step": options.tasks_per_step,
                "staleness": staleness,
            },
            "curriculum": {"repeats": True},
            "loss": {"micro_batch_tokens": 16_384},
            "feedback": {"weight": 0},
            "optimizer": {"learning_rate": options.rate},
        },
    )


def measure(
    options: argparse.Namespace,
    engine: str,
    staleness: int,
    servers: tuple[EndpointSettings, ...] | None,
    scratch: Path,
) -> dict[str, Any]:
    """Figures of one run; where it failed, the end of what it printed."""
    recipe = recipe_of(options, f"{engine}-{staleness}", staleness, servers, scratch / "runs")
    written, log, cards = (scratch / f"{recipe.name}.{end}" for end in ("toml", "log", "cards"))
    written.write_text(recipe.to_toml())
    run, began = recipe.runs / recipe.name, time.monotonic()
    url = (
        servers[0].url if servers and not options.lora_rank else ""
    )  # an adapter is loaded beside the others
    with log.open("wb") as out, cards_watched(cards), Pauses(url) as pauses:
        process = subprocess.Popen(
            [sys.executable, "-m", "woodshed", "train", str(written)], stdout=out, stderr=subprocess.STDOUT
        )
        seen = Watched(run, process, began + options.limit)
        seen.until_end()
    keep_logs(
        options, recipe.name, [log, *(run / "logs" / f"{each}.log" for each in ("collector", "trainer"))]
    )
    if seen.is_void:
        return {"error": VOID}
    warmup = options.warmup + staleness  # so many steps are in the making when the first one ends
    if len(seen.steps) <= warmup + 1:
        return {"error": log.read_text(errors="replace")[-1500:], "exit_code": process.returncode}
    found = figures(RunDir(run), seen, warmup, busy(cards, seen, warmup))
    return found | ({"paused_s": spread(pauses.seconds)} if pauses.seconds else {})


class Pauses:
    """Times for which a server stood still for new weights, seen by asking it all the time."""

    def __init__(self, url: str) -> None:
        self.url, self.seconds, self._is_over = url, list[float](), threading.Event()
        self._thread = threading.Thread(target=self._ask)

    def __enter__(self) -> Pauses:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._is_over.set()
        self._thread.join()

    def _ask(self) -> None:
        began = 0.0
        with httpx.Client(timeout=30) as client:
            while self.url and not self._is_over.wait(PAUSE_S):
                with suppress(httpx.HTTPError, ValueError, KeyError):
                    is_paused = bool(client.get(f"{self.url}/is_paused").json()["is_paused"])
                    if is_paused and not began:
                        began = time.monotonic()
                    elif began and not is_paused:
                        self.seconds.append(time.monotonic() - began)
                        began = 0.0


class Watched:
    """What appears in a run folder while the run goes on: times of steps, sizes of published weights."""

    def __init__(self, run: Path, process: subprocess.Popen[bytes], ends: float) -> None:
        self.run, self.process, self.ends = run, process, ends
        self.begun, self.steps = time.monotonic(), list[float]()
        """When each step's metrics were there."""
        self.is_void = False
        """No attempt counts, so nothing will be trained."""
        self.versions: dict[str, tuple[str, int]] = {}
        """Folder of published weights to kind and bytes."""

    def until_end(self) -> None:
        while self.process.poll() is None:
            self._look()
            if time.monotonic() > self.ends:
                self.process.terminate()
                with suppress(subprocess.TimeoutExpired):
                    self.process.wait(30)
                self.process.kill()
            time.sleep(LOOK_S)
        self._look()

    def _look(self) -> None:
        metrics = self.run / "metrics.jsonl"
        if metrics.exists():
            written = len(set(TRAINED.findall(metrics.read_text())))
            self.steps += [time.monotonic()] * (written - len(self.steps))
            if self.steps and not GRADED.search(metrics.read_text()):
                self.is_void = True
                self.process.terminate()
        for record in self.run.glob("weights/*/published.json"):
            if record.parent.name not in self.versions:
                with suppress(OSError, ValueError):  # swept away meanwhile
                    found = json.loads(record.read_text())
                    self.versions[record.parent.name] = found["kind"], found["size_bytes"]


@contextmanager
def cards_watched(log: Path) -> Iterator[None]:
    """The share of each half second in which a card worked, and its memory, in a file."""
    if shutil.which("nvidia-smi") is None:
        yield
        return
    query = "nvidia-smi --query-gpu=index,utilization.gpu,memory.used --format=csv,noheader,nounits -lms 500"
    with log.open("wb") as out:
        process = subprocess.Popen(query.split(), stdout=subprocess.PIPE, text=True)

        def copy() -> None:
            for line in process.stdout or ():
                out.write(f"{time.monotonic()},{line}".encode())

        thread = threading.Thread(target=copy)
        thread.start()
        try:
            yield
        finally:
            process.kill()
            thread.join()


def busy(log: Path, seen: Watched, warmup: int) -> dict[str, Any]:
    """Mean share of the time that each card worked in the counted steps, in percent, and its most memory in MiB."""
    if not log.exists() or not seen.steps:
        return {}
    shares: dict[str, list[float]] = {}
    memory: dict[str, float] = {}
    for line in log.read_text().splitlines():
        at, card, share, used = line.split(",")
        memory[card.strip()] = max(memory.get(card.strip(), 0.0), float(used))
        if seen.steps[warmup - 1] <= float(at) <= seen.steps[-1]:
            shares.setdefault(card.strip(), []).append(float(share))
    return {
        "busy_percent": {card: round(statistics.mean(each), 1) for card, each in shares.items()},
        "memory_mib": memory,
    }


def figures(run: RunDir, seen: Watched, warmup: int, cards: dict[str, Any]) -> dict[str, Any]:
    lines = [line for phase, _, line in run.read("metrics") if phase == "train"]
    seconds = [after - before for before, after in zip(seen.steps, seen.steps[1:], strict=False)][
        warmup - 1 :
    ]
    counted = lines[warmup : len(seconds) + warmup]
    whole_s = sum(seconds)
    tokens = sum(line["tokens"]["part"] for line in counted)
    waited = sum(
        line.get("waits", {}).get("trainer_s", line["seconds"].get("attempts", 0.0)) for line in counted
    )
    sizes = [size for kind, size in seen.versions.values() if kind != "full"] or [0]
    gaps = [line["logp_gap_mean"] for line in lines if "logp_gap_mean" in line] or [0.0]
    return {
        "step_s": spread(seconds),
        "mean_step_s": round(whole_s / len(seconds), 2),
        "tokens_per_s": round(tokens / whole_s, 1),
        "attempts_per_s": round(sum(line["num_attempts"] for line in counted) / whole_s, 2),
        "trainer_waits": round(waited / whole_s, 3),
        "first_step_s": round(seen.steps[0] - seen.begun, 1),
        "logp_gap_mean": spread(gaps),
        "drift_mean": spread([line.get("drift_mean", 0.0) for line in counted]),
        "staleness_mean": statistics.mean(line.get("staleness_mean", 0.0) for line in counted),
        "updates": sum(line["trained_rollouts"] > 0 for line in lines),
        "staleness_max": max(line.get("staleness_max", 0) for line in lines),
        "reward": [line["reward"]["value"] for line in lines],
        "turns": round(statistics.mean(line["turns"]["value"] or 0.0 for line in counted), 2),
        "update_bytes": spread([float(size) for size in sizes]),
        "versions": {name: list(found) for name, found in sorted(seen.versions.items())},
        "seconds": [line["seconds"] for line in lines],
        **cards,
    }


def keep_logs(options: argparse.Namespace, name: str, logs: list[Path]) -> None:
    """The ends of what a run and its processes printed, in one file."""
    if options.logs is None:
        return
    options.logs.mkdir(parents=True, exist_ok=True)
    parts = [f"--- {log.name}\n{log.read_text(errors='replace')[-20_000:]}" for log in logs if log.exists()]
    (options.logs / f"{name}.log").write_text("\n".join(parts))


def show(rows: list[dict[str, Any]]) -> None:
    """A line for each run, and its speed beside the faster way of staleness 0 on the same cards."""
    for row in rows:
        head = f"{row['engine']}, staleness {row['staleness']}, cards {row['gpus'] or 'one'}"
        if "error" in row:
            print(f"{head}: {row['error'][-300:]}")
            continue
        alone = [
            each["mean_step_s"]
            for each in rows
            if each["gpus"] == row["gpus"] and not each["staleness"] and "error" not in each
        ]
        bar = BAR[2 if row["gpus"] else 1]
        times = f"{min(alone) / row['mean_step_s']:.2f} times (bar {bar} at staleness 2)" if alone else ""
        print(
            f"{head}: step {row['mean_step_s']} s {times}, {row['tokens_per_s']} tokens/s, trainer waits "
            f"{row['trainer_waits']:.0%}, cards {row.get('busy_percent')}, gap {row['logp_gap_mean'][1]:.4f}"
        )


if __name__ == "__main__":
    main()
