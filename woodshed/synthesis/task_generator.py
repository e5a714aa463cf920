"""A pool that grows while the run goes on: another process makes harder or easier tasks, at the lowest priority.

The loop asks once per step and never waits. What has been made by then joins the pool; what arrived is kept in the
checkpoint and its folder in the run, so that a resumed run has the same pool. Which step a task arrives at depends on
the speed of its making: a run that grows is resumable, not bit for bit repeatable.
"""

from __future__ import annotations

import atexit
import json
import os
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from woodshed.curriculum import Bandit, Curriculum
from woodshed.records import RunError, Task, TaskError, Verdict
from woodshed.runs.folder import RunDir
from woodshed.runs.machine import PROGRAM
from woodshed.runs.processes import bound_to_parent
from woodshed.sandbox import SandboxSettings
from woodshed.synthesis import harden
from woodshed.tasks import folder

CHILDREN = 4
"""Most tasks of one order."""
OPERATORS = tuple(f"harder/{name}" for name in harden.HARDER if name != "H11") + tuple(
    f"easier/{n}" for n in harden.EASIER
)
"""H11 needs a failed attempt and is for `woodshed tasks harden --run`."""


class TaskGenerator:
    """Orders tasks from a process in the background; close it when the run ends."""

    def __init__(self, run: RunDir, *, seed: int, sandbox: SandboxSettings) -> None:
        self._run, self._provider = run, sandbox.provider
        self._bandit = Bandit(OPERATORS, seed=seed)
        self._orders = 0
        self._chosen = ""
        self._process: subprocess.Popen[bytes] | None = None
        self._arrived: list[str] = []
        atexit.register(self.close)

    @property
    def folder(self) -> Path:
        return self._run.path / "tasks" / "grown"

    def restore(self, state: dict[str, Any], curriculum: Curriculum) -> None:
        """The pool as the checkpoint knew it; call before the curriculum's own state is restored."""
        if state:
            self._bandit.restore(state["bandit"])
            self._orders, self._arrived = int(state["orders"]), [str(name) for name in state["arrived"]]
            if odd := [name for name in self._arrived if Path(name).name != name]:
                raise RunError(
                    f"{self._run.path}: a task of a grown pool is named {odd[0]!r}, which is no name"
                )
            curriculum.admit(folder.load(self.folder / name) for name in self._arrived)

    def state(self) -> dict[str, Any]:
        return {"bandit": self._bandit.state(), "orders": self._orders, "arrived": list(self._arrived)}

    def poll(self, curriculum: Curriculum, verdicts: Sequence[Verdict]) -> list[Task]:
        """Take finished tasks, note how verdicts spread, and order more where the pool is too easy or too hard. Nothing
        is waited for."""
        self._learn(curriculum, verdicts)
        arrived: list[Task] = []
        if self._process is not None and self._process.poll() is not None:
            arrived = self._take()
            curriculum.admit(arrived)
            self._process = None
        need = curriculum.need()
        parents = (
            curriculum.solved() if need == "harder" else curriculum.unsolved() if need == "easier" else []
        )
        if self._process is None and parents:
            self._order(need, parents)
        return arrived

    def close(self) -> None:
        """End the process; finished tasks stay in the run folder."""
        if self._process is not None and self._process.poll() is None:
            self._process.terminate()
            self._process.wait()
        self._process = None

    def _order(self, kind: str, parents: Sequence[Task]) -> None:
        self._chosen = self._bandit.choose(kind)
        self._orders += 1
        command = [
            *PROGRAM,
            "tasks",
            "harden",
            *(str(p.folder) for p in parents[:8]),
        ]
        command += ["--out", str(self._place), "--operators", self._chosen.partition("/")[2]]
        command += ["--limit", str(CHILDREN), "--seed", str(self._orders), "--sandbox", self._provider]
        bind = bound_to_parent()

        def begin() -> None:
            bind()
            os.nice(19)

        self._process = subprocess.Popen(
            command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, preexec_fn=begin
        )

    @property
    def _place(self) -> Path:
        return self.folder.with_name("ordered") / f"{self._orders:04}"

    def _take(self) -> list[Task]:
        """Finished tasks of the order, moved to where the run keeps them."""
        report = self._place / "harden.json"
        counts = json.loads(report.read_text()).values() if report.exists() else ()
        valid, tried = sum(made for made, _ in counts), max(1, sum(tries for _, tries in counts))
        self._bandit.record(self._chosen, valid=valid, tried=tried, seconds=float(tried))
        taken: list[Task] = []
        try:
            paths = folder.task_folders(self._place) if self._place.is_dir() else []
        except TaskError:
            paths = []
        self.folder.mkdir(parents=True, exist_ok=True)
        for path in paths:
            home = self.folder / f"{path.name}-{self._orders}"
            path.rename(home)
            self._arrived.append(home.name)
            taken.append(folder.load(home))
        return taken

    def _learn(self, curriculum: Curriculum, verdicts: Sequence[Verdict]) -> None:
        ends: dict[str, set[bool]] = {}
        for verdict in verdicts:
            if verdict.status == "graded":
                ends.setdefault(verdict.task_id, set()).add(verdict.solved)
        for task_id, outcomes in ends.items():
            if operator := curriculum.task(task_id).provenance.get("hardened_by"):
                kind = "easier" if operator in harden.EASIER else "harder"
                self._bandit.observe(f"{kind}/{operator}", len(outcomes) == 2)
