"""Checkpoints: the trainer and the state of the run, complete or absent.

Resuming equals never having stopped: with the same threads on a CPU, bit for bit. Attempts in flight are not here
but in the run folder, where every finished wave of them is kept and never made again.
"""

from __future__ import annotations

import json
import shutil
import threading
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, cast

import torch.distributed as dist
from torch import Tensor

from woodshed import documents
from woodshed.learning import ranks, tensor_folder
from woodshed.learning.policy import Policy
from woodshed.learning.ranks import EXCHANGE
from woodshed.learning.stability import Watch
from woodshed.learning.tensor_folder import ANEW, EARLIER, read_saved
from woodshed.learning.trainer import Trainer
from woodshed.records import RunError, from_json
from woodshed.runs.files import staged, way_out
from woodshed.runs.folder import RunDir

KEPT = 2  # newest checkpoints of a stage; older ones are removed


@dataclass
class TrainState:
    """State of a run: `step` is the next one to take."""

    stage: str
    """Label of the stage, as the recipe's list gives it."""
    step: int = 0
    steps_before: int = 0
    """Steps of earlier stages since the run's first evaluation, 0 for stages before it."""
    curriculum: dict[str, Any] = field(default_factory=dict)
    growth: dict[str, Any] = field(default_factory=dict)
    watch: Watch = field(default_factory=Watch)
    disabled_hints: dict[str, str] = field(default_factory=dict)
    """Classes of hints that did not pass the gate, with the reason."""
    stopped: str = ""
    """The reason for which the run stopped by itself, at weights that were well; "" where it did not."""

    @property
    def version(self) -> int:
        """Version of the policy's weights: optimizer steps since the run's first evaluation."""
        return self.steps_before + self.step


class CheckpointWriter:
    """The checkpoints of a run, each written by a thread beside what comes after it.

    A step waits for copies in host memory, and for the checkpoint before it. The newest complete checkpoint is on disk
    until the next one is, so that a kill in between costs a step, which is then taken again from the same records.
    Every rank makes one, calls what is called, and writes its shards; any number of ranks can read them.
    """

    def __init__(self, run: RunDir) -> None:
        self.run = run
        group = dist.new_group(timeout=EXCHANGE, backend="gloo") if ranks.count() > 1 else None
        self._group = cast("dist.ProcessGroup | None", group)
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None

    def begin(self, trainer: Trainer, state: TrainState, *, kept: int = KEPT) -> None:
        """Begin to write a checkpoint after a step, once the one before it is complete.

        Args:
            kept: newest checkpoints of the stage that stay.

        Raises:
            RunError: as `finish`.
        """
        self.finish()
        contents, position = trainer.contents(), json.dumps(asdict(state), indent=2) + "\n"

        def fill(folder: Path) -> None:
            contents.write(folder, self._group)
            if ranks.index() == 0:
                (folder / "position.json").write_text(position)

        def write() -> None:
            try:
                _written_by_all(self.run, f"{state.stage}-{state.step:06d}", fill, self._group)
                for old in self.run.checkpoints(f"{state.stage}-")[:-kept] if ranks.index() == 0 else ():
                    shutil.rmtree(old)
            except BaseException as error:  # told where the run waits for it
                self._error = error

        self._thread = threading.Thread(target=write, name="checkpoint", daemon=True)
        self._thread.start()

    def finish(self, most_s: float | None = None) -> None:
        """Wait until the checkpoint is complete, or for so many seconds.

        Raises:
            RunError: it could not be written; the message names the way out.
        """
        if self._thread is not None:
            self._thread.join(most_s)
        error, self._error = self._error, None
        if error is not None:
            raise error


def latest(run: RunDir, stages: Sequence[str]) -> Path | None:
    """The newest complete checkpoint of the furthest of these stages, which stand in their order."""
    for stage in reversed(stages):
        if found := run.checkpoints(f"{stage}-"):
            return found[-1]
    return None


def read_position(folder: Path) -> TrainState:
    """Read the state of the run when the checkpoint was written.

    Raises:
        RunError: the file is missing or of another version.
    """
    try:
        data = documents.read_json(
            folder / "position.json", RunError, f"Delete the folder {folder} to resume before it"
        )
        if missing := {"stage", "step", "watch"} - set(data):
            raise ValueError(f"no {min(missing)!r} in position.json")
        if type(data["step"]) is not int or folder.name != f"{data['stage']}-{data['step']:06d}":
            raise ValueError(f"it says stage {data['stage']!r}, step {data['step']!r}")
        return from_json(TrainState, data)
    except (OSError, ValueError, TypeError) as error:
        raise RunError(
            f"checkpoint {folder} cannot be read ({error}); delete that folder to resume before it"
        ) from None


def _written_by_all(
    run: RunDir, name: str, fill: Callable[[Path], object], group: dist.ProcessGroup | None = None
) -> None:
    """A checkpoint into whose temporary folder every rank writes; rank 0 makes it, and puts it in its place. Nobody
    goes on before it is complete."""
    if ranks.index() == 0:
        run.save_checkpoint(name, lambda folder: fill(ranks.agreed(folder, group)))
    else:
        fill(ranks.agreed(run.path, group))
    ranks.agreed(name, group)


def version_weights(run: RunDir, version: int, policy: Policy) -> dict[str, Tensor]:
    """The policy's weights after so many steps of RL, sharded as they are now; 0 is the start.

    Raises:
        RunError: that checkpoint is not kept any more.
    """
    name = f"rl-{version:06d}" if version else "before-rl"
    folder = run.path / "checkpoints" / name / "policy"
    if not folder.is_dir():
        raise RunError(f"no checkpoint {name} in {run.path / 'checkpoints'}")
    return read_saved(folder, EARLIER if version else ANEW, policy.trainable)


def start_weights(run: RunDir, policy: Policy, name: str) -> dict[str, Tensor]:
    """The trainable weights as they were when a stage began, sharded as they are: kept under this name once, read
    back by every resume."""
    folder = run.path / "checkpoints" / name / "policy"
    if not ranks.agreed(folder.is_dir()):
        _written_by_all(run, name, lambda partial: tensor_folder.save(partial / "policy", policy.trainable))
    return read_saved(folder, ANEW, policy.trainable)


def export(run: RunDir, policy: Policy) -> Path:
    """The final weights where others can load them: a PEFT adapter or a Hugging Face model directory. Every rank calls
    it, and rank 0 writes."""
    target = run.path / "policy"
    if ranks.index():
        policy.export(target)
        return target
    try:
        with staged(target) as partial:
            policy.export(partial)
    except Exception as error:  # the libraries' writers raise their own kinds when the disk is full
        raise RunError(
            f"cannot write {target}: {error}. Training is complete and kept: {way_out(error)}, then `{run.resuming}`."
        ) from error
    return target
