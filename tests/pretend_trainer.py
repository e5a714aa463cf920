"""A trainer without a model: it takes steps from a run folder and publishes versions, as a real one does."""

from __future__ import annotations

import threading
import time
from pathlib import Path

from woodshed.runs.folder import RunDir
from woodshed.stages.asynchronous.messages import Collected, Publication, Taken


class PretendTrainer(threading.Thread):
    """Publishes version 0, and after each step the next one; keeps the versions that it took and when."""

    def __init__(
        self, path: Path, steps: int, *, every_s: float = 0.0, measured: frozenset[int] = frozenset()
    ) -> None:
        super().__init__(name="trainer", daemon=True)
        self.run_folder, self.steps, self.every_s, self.measured = RunDir.open(path), steps, every_s, measured
        self.stop_at = steps
        self.is_killed = False

    def run(self) -> None:
        run = self.run_folder
        run._writer = "trainer"  # whose lock a thread of the same process cannot have
        for step in range(self.steps + 1):
            known = run.find("published", Publication, "train", step)
            if known is None:
                offer = Publication(step, "weights", "adapter", step in self.measured, step == self.stop_at)
                run.append("published", [offer], "train", step)
            if step == self.stop_at:
                return
            while run.find("collected", Collected, "train", step) is None:
                if self.is_killed:
                    return
                time.sleep(0.01)
            time.sleep(self.every_s)
            if run.find("taken", Taken, "train", step) is None:
                run.append("taken", [Taken((step,), (0, step))], "train", step)
