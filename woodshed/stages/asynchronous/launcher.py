"""The launcher of asynchronous RL: starts trainer and collector as child processes, and keeps them alive.

A child that was killed, or whose engine or sandbox failed, is started again, a few times in a row without progress at
most; a child that says why it cannot go on ends the run. Whatever happens to the launcher, the kernel ends its children
with it, and `--resume` goes on.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from woodshed import documents
from woodshed.engines.create import start_settings, starts_servers
from woodshed.engines.servers import ServedModel, serving
from woodshed.records import RecipeError, RunError
from woodshed.runs import machine, processes
from woodshed.runs.folder import RunDir
from woodshed.runs.processes import Child
from woodshed.tokens import model_files

if TYPE_CHECKING:
    from woodshed.stages.recipe import Recipe

LOOK_S = 0.1
STARTS = 5
"""Starts of a process in a row without progress of its files."""
FAILED = 3
"""Exit code of a command whose engine or sandbox failed (`woodshed.cli`)."""
ENDING_S = 60.0
"""Time that the collector has to end once the trainer is done."""
PROGRESS = {
    "trainer": ("metrics.jsonl", "published.jsonl", "taken.jsonl"),
    "collector": ("rollouts.jsonl", "verdicts.jsonl", "draws.jsonl", "collected.jsonl"),
}
"""Files by whose size a process has come further."""


def served(recipe: Recipe) -> ServedModel:
    """The policy as servers of the launcher are to sample from it.

    Raises:
        ModelError, RecipeError: the model or its adapter cannot be found.
    """
    policy = recipe.policy
    rank = policy.lora_rank
    if policy.adapter:
        file = Path(policy.adapter) / "adapter_config.json"
        rank = int(documents.read_json(file, RecipeError, "Name another adapter")["r"])
    is_cuda = policy.resolved_device().startswith("cuda")
    return ServedModel(
        model_files.resolve(policy.model).directory,
        policy.dtype,
        lora_rank=rank,
        staleness=recipe.rl.staleness,
        trained_gpus=recipe.layout.world if is_cuda else 0,
    )


@contextmanager
def servers_of(recipe: Recipe, run: RunDir) -> Iterator[tuple[str, ...]]:
    """Addresses of the engine servers that a recipe has started for its run; () where they are others'.

    Raises:
        SamplerError: one does not start.
    """
    if not starts_servers(recipe.engine):
        yield ()
        return
    with serving(start_settings(recipe.engine), served(recipe), run.path / "engines") as endpoints:
        yield tuple(endpoint.url for endpoint in endpoints)


def commands(run: RunDir, ranks: int, servers: Sequence[str] = ()) -> dict[str, tuple[str, ...]]:
    """Command line of each process of a run.

    Args:
        ranks: of the trainer.
        servers: addresses of engine servers that the launcher has started.
    """
    path = str(run.path.resolve())
    addresses = [word for url in servers for word in ("--server", url)]
    return {
        "trainer": (*machine.program(ranks), "child", "trainer", path),
        "collector": (*machine.program(), "child", "collector", path, *addresses),
    }


def launch(run: RunDir, started: dict[str, tuple[str, ...]], tell: Callable[[str], None]) -> None:
    """Run the processes of a run until the trainer is done.

    Args:
        started: as `commands` gives them.
        tell: receives what they say, line by line.

    Raises:
        RunError: one of them cannot go on; the message has what it said. None is left running.
    """
    for name in processes.reap(run.path / "processes.json"):
        tell(f"the {name} of an earlier launcher was still running, and is ended")
    children = [Child(name, command, run.path / "logs" / f"{name}.log") for name, command in started.items()]
    try:
        _Supervision(run, children, tell).run()
    finally:
        for child in children:
            child.end()


class _Supervision:
    """One call of `launch`."""

    def __init__(self, run: RunDir, children: Sequence[Child], tell: Callable[[str], None]) -> None:
        self.folder, self.children, self.tell = run, children, tell
        self.heard = {child.name: _size(child.log) for child in children}
        self.sizes: dict[str, int] = {}
        self.idle_starts = dict.fromkeys(self.heard, 0)

    def run(self) -> None:
        for child in self.children:
            self._start(child)
        deadline = float("inf")
        while True:
            time.sleep(LOOK_S)
            self._relay()
            for child in self.children:
                assert child.process is not None
                code = child.process.poll()
                if code == 0 and child.name == "trainer":
                    deadline = min(deadline, time.monotonic() + ENDING_S)
                elif code is not None and code != 0:
                    self._again(child, code)
            if all(child.process is not None and child.process.poll() == 0 for child in self.children):
                self._relay()
                return
            if time.monotonic() > deadline:
                return

    def _start(self, child: Child) -> None:
        progress = sum(_size(self.folder.path / name) for name in PROGRESS[child.name])
        is_further = progress != self.sizes.get(child.name)
        self.sizes[child.name] = progress
        self.idle_starts[child.name] = 1 if is_further else self.idle_starts[child.name] + 1
        child.start()
        processes.write_table(self.folder.path / "processes.json", self.children)

    def _again(self, child: Child, code: int) -> None:
        """Start a child again that has ended, unless it has said why it cannot go on.

        Raises:
            RunError: it has, or it dies again and again.
        """
        child.end()  # what it has started, such as the other ranks
        self._relay()
        is_torchrun = "torch.distributed.run" in child.command  # 1, whatever its ranks ended with
        ended = f"signal {-code}" if code < 0 else f"exit code {code}"
        if code < 0 or code == FAILED or (is_torchrun and code == 1):
            if self.idle_starts[child.name] < STARTS:
                self.tell(f"the {child.name} ended ({ended}) and is started again")
                time.sleep(min(8.0, 0.25 * 2 ** self.idle_starts[child.name]))
                self._start(child)
                return
            ended += f", {STARTS} times in a row without any progress"
        lines = [line for line in child.said.splitlines() if line.strip()]
        said = " / ".join(lines[-3:]) or "it said nothing"
        raise RunError(
            f"the {child.name} of {self.folder.path} ended ({ended}): {said}. All that it said is in {child.log}. "
            f"What is complete is kept: go on with `{self.folder.resuming}`"
        )

    def _relay(self) -> None:
        """Tell the whole lines that processes have said since the last time."""
        for child in self.children:
            if not child.log.exists():
                continue
            with child.log.open("rb") as log:
                log.seek(self.heard[child.name])
                text = log.read()
            whole = text[: text.rfind(b"\n") + 1]
            self.heard[child.name] += len(whole)
            for line in whole.decode(errors="replace").splitlines():
                self.tell(f"{child.name}: {line}")


def _size(path: Path) -> int:
    return path.stat().st_size if path.exists() else 0
