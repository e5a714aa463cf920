"""Asynchronous training under random kills: what is lost, what is counted twice, what is left running.

    python benchmarks/chaos.py --kills 60 --out benchmarks/results/chaos.json

A tiny model is trained by `woodshed train` with engine.kind = "process" and staleness 1. At random moments a random
process of the run is killed by SIGKILL: the launcher (then the run is resumed), the trainer, the collector, the engine
server or its guard. After the last kill the run goes on to its end. The row says

    lost        attempts that were complete in rollouts.jsonl and later were not, or were others
    twice       groups in two `taken` records, and steps of the optimizer beyond those of the run
    staleness   largest age of a token in the step that learned from it
    changed     versions of the weights that were published again and were not the same
    left        processes of the run that lived, or mounts that stayed, 15 seconds after a launcher's death or the end
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from woodshed.records import Rollout
from woodshed.runs import machine
from woodshed.runs.folder import RunDir
from woodshed.stages.asynchronous.messages import Collected, Taken

MARK = "WOODSHED_CHAOS"
KINDS = ("launcher", "trainer", "collector", "server", "guard")
STALENESS, TASKS, ATTEMPTS = 1, 2, 2
LEFT_S = 15.0
HASTE = 0.3
"""Share of the kills that do not wait for what the run does next, and may meet it as it starts."""
SETTLE_S = 4.0
"""Longest time from then to a kill."""
PROGRESS_S = 120.0
"""Longest wait for what the run does next."""
RARE = {"launcher": 1}
"""Weight of a kind among the kills; 2 for the others. A launcher takes all others with it."""
MOST_S = 3600.0
RECIPE = """
name = "run"
runs = "{runs}"
seed = 5
tasks = {{ train = ["{tasks}"], heldout = ["{tasks}"] }}
policy = {{ model = "{model}", lora_rank = 4, codec = "plain" }}
engine = {{ kind = "process" }}
agent = {{ max_turns = 3, turn_tokens = 16, rollout_tokens = 48 }}
rollout = {{ attempts = {attempts} }}
rl = {{ steps = {steps}, tasks_per_step = {tasks_per_step}, staleness = {staleness} }}
evaluation = {{ every = 5 }}
curriculum = {{ repeats = true }}
monitors = {{ honeypots = 0.0 }}
"""


@dataclass
class Chaos:
    """A run under kills, and what was seen of it."""

    root: Path
    rng: random.Random
    mark: str
    steps: int
    process: subprocess.Popen[bytes] | None = None
    kills: Counter[str] = field(default_factory=Counter)
    launches: int = 0
    finished: dict[tuple[str, int, int], str] = field(default_factory=dict)
    """Complete attempts to a digest of their record."""
    lost: set[tuple[str, int, int]] = field(default_factory=set)
    weights: dict[str, str] = field(default_factory=dict)
    """Published folders to a digest of their record."""
    changed: set[str] = field(default_factory=set)
    left: list[str] = field(default_factory=list)

    @property
    def path(self) -> Path:
        return self.root / "runs" / "run"

    def launch(self) -> None:
        """Start the run, or go on with it."""
        is_new = not (self.path / "recipe.toml").exists()
        arguments = [str(self.root / "recipe.toml")] if is_new else ["--resume", str(self.path)]
        arguments += [] if is_new else [f"rl.steps={self.steps}"]
        environment = {**os.environ, MARK: self.mark, "OMP_NUM_THREADS": "1"}
        with (self.root / "said.log").open("ab") as log:
            self.process = subprocess.Popen(
                [*machine.PROGRAM, "train", *arguments],
                stdout=log,
                stderr=log,
                env=environment,
                start_new_session=True,
            )
        self.launches += 1

    def pids(self) -> dict[str, int]:
        """The processes of the run that can be killed now."""
        found: dict[str, int] = {}
        with suppress(OSError, ValueError):
            table = json.loads((self.path / "processes.json").read_text())
            found |= {name: about["pid"] for name, about in table.items()}
        with suppress(OSError, ValueError):
            record = json.loads((self.path / "engines" / "s0.json").read_text())
            found |= {"server": record["pid"], "guard": record["guard"]}
        marked = set(self.marked())
        return {name: pid for name, pid in found.items() if name in KINDS and pid in marked}

    def marked(self) -> Iterator[int]:
        """Processes that this run has started, whatever became of those between."""
        for folder in Path("/proc").glob("[0-9]*"):
            with suppress(OSError):
                if f"{MARK}={self.mark}".encode() in (folder / "environ").read_bytes().split(b"\0"):
                    yield int(folder.name)

    def look(self) -> None:
        """Compare what the run folder holds with what it held."""
        if not (self.path / "recipe.toml").exists():
            return
        run = RunDir(self.path)
        there = set(run.batches("rollouts"))
        self.lost |= self.finished.keys() - there
        for batch in there:
            digest = digest_of(run.find("rollouts", Rollout, *batch[:2], part=batch[2]))
            if self.finished.setdefault(batch, digest) != digest:
                self.lost.add(batch)
        for record in self.path.glob("weights/v*/published.json"):
            with suppress(OSError, ValueError):
                digest = digest_of(json.loads(record.read_text())["tensors"])
                if self.weights.setdefault(record.parent.name, digest) != digest:
                    self.changed.add(record.parent.name)

    def wait_until_nothing_is_left(self) -> None:
        deadline = time.monotonic() + LEFT_S
        while (alive := [*self.marked()]) and time.monotonic() < deadline:
            time.sleep(0.1)
        for pid in alive:
            with suppress(OSError):
                self.left.append(
                    Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode()[:200]
                )
                os.kill(pid, signal.SIGKILL)
        mounts = Path("/proc/self/mounts").read_text().splitlines()
        self.left += [line for line in mounts if str(self.root) in line]

    def wait_for_progress(self) -> None:
        """Wait, mostly, until the run has done something since this was called."""
        if self.rng.random() < HASTE:
            return
        files = [self.path / f"{name}.jsonl" for name in ("rollouts", "verdicts", "published", "taken")]
        assert self.process is not None

        def size() -> int:
            return sum(file.stat().st_size for file in files if file.exists())

        before, deadline = size(), time.monotonic() + PROGRESS_S
        while size() == before and time.monotonic() < deadline and self.process.poll() is None:
            time.sleep(0.1)

    def kill(self) -> None:
        """Kill one process of the run, and resume it where that was the launcher."""
        pids = self.pids()
        if "trainer" not in pids and "collector" not in pids:
            return  # it has hardly begun
        names = sorted(pids)
        name = self.rng.choices(names, [RARE.get(each, 2) for each in names])[0]
        with suppress(ProcessLookupError):
            os.kill(pids[name], signal.SIGKILL)
            self.kills[name] += 1
        if name == "launcher":
            assert self.process is not None
            self.process.wait()
            self.wait_until_nothing_is_left()
            self.look()
            self.launch()

    def run(self, kills: int) -> None:
        """Kill so many times, and let the run end."""
        self.launch()
        began = time.monotonic()
        while time.monotonic() - began < MOST_S:
            assert self.process is not None
            is_killing = self.kills.total() < kills
            if is_killing:
                self.wait_for_progress()
            time.sleep(self.rng.uniform(0.0, SETTLE_S) if is_killing else 1.0)
            self.look()
            code = self.process.poll()
            if code == 0 and not is_killing:
                break
            if code is not None:  # done before the last kill, or given up
                self.wait_until_nothing_is_left()
                self.steps += 10 if code == 0 else 0
                self.launch()
            elif is_killing:
                self.kill()
        else:
            raise TimeoutError(f"the run did not end: {(self.root / 'said.log').read_text()[-3000:]}")
        self.wait_until_nothing_is_left()
        self.look()


def digest_of(value: Any) -> str:
    return hashlib.sha256(repr(value).encode()).hexdigest()


def report(chaos: Chaos) -> dict[str, Any]:
    """The row of a run that has ended."""
    run = RunDir(chaos.path)
    ages = [
        step - version
        for phase, step, made in run.read("rollouts", Rollout)
        if phase == "train"
        for turn in made.turns
        for version, _ in turn.versions
    ]
    groups = [group for _, _, taken in run.read("taken", Taken) for group in taken.groups]
    newest = run.checkpoints("rl-")[-1]
    steps = json.loads((newest / "trainer.json").read_text())["taken"]
    collected = [record for _, _, record in run.read("collected", Collected)]
    return {
        "kills": chaos.kills.total(),
        "by_kind": dict(sorted(chaos.kills.items())),
        "launches": chaos.launches,
        "steps": steps,
        "finished": len(chaos.finished),
        "lost": len(chaos.lost),
        "groups": len(groups),
        "twice": len(groups) - len(set(groups)) + abs(steps - chaos.steps),
        "missing": len(set(range(chaos.steps * TASKS)) - set(groups)),
        "staleness": max(ages),
        "youngest": min(ages),
        "bound": STALENESS,
        "versions": len(chaos.weights),
        "changed": len(chaos.changed),
        "left": len(chaos.left),
        "left_over": chaos.left,
        "replayed": sum(record.replayed for record in collected),
        "restarted": sum(record.restarted for record in collected),
        "evaluations": sum(phase == "eval" for phase, _, _ in run.read("metrics")),
    }


def measure(root: Path, tasks: Path, model: Path, *, kills: int, seed: int, steps: int) -> dict[str, Any]:
    """Train under kills in a new folder, and give the row."""
    values = {"runs": root / "runs", "tasks": tasks, "model": model, "steps": steps}
    values |= {"attempts": ATTEMPTS, "tasks_per_step": TASKS, "staleness": STALENESS}
    (root / "recipe.toml").write_text(RECIPE.format(**values))
    chaos = Chaos(root, random.Random(seed), f"{os.getpid()}-{seed}", steps)
    try:
        chaos.run(kills)
    finally:
        for pid in chaos.marked():
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
    return report(chaos)


def main() -> None:
    """Print the row, and write it as JSON."""
    parser = argparse.ArgumentParser(description="Train under random kills.")
    parser.add_argument("--kills", type=int, default=60)
    parser.add_argument(
        "--steps", type=int, default=10, help="at least; more where the kills are not done by then"
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    sys.path.append(str(Path(__file__).parent.parent / "tests"))
    from plain_task import write_plain_task  # pyright: ignore[reportMissingImports]
    from tiny_model import write_tiny_model  # pyright: ignore[reportMissingImports]

    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="woodshed-chaos-") as folder:
        root = Path(folder)
        (root / "tasks").mkdir()
        for number in range(TASKS):
            written = root / "written" / str(number)
            written.mkdir(parents=True)
            write_plain_task(written, f"Area of square {number}.").folder.rename(
                root / "tasks" / f"shapes-{number}"
            )
        model = write_tiny_model(root / "model")
        row = measure(
            root, root / "tasks", model, kills=options.kills, seed=options.seed, steps=options.steps
        )
    report = {
        "what": "asynchronous training under random SIGKILLs, a tiny model on a CPU",
        "row": row,
        "seconds": round(time.monotonic() - began),
        "machine": machine.describe(),
    }
    print(json.dumps(row, indent=1))
    if options.out:
        options.out.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
