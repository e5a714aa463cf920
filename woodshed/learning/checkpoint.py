"""How training stops and goes on: weights, optimizer, random state and position, complete or absent.

Resuming equals never having stopped: with the same threads on a CPU, bit for bit. Attempts in flight are not here
but in the run folder, where every finished wave of them is kept and never made again.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from woodshed.learning import ranks, tensor_folder
from woodshed.learning.policy import Policy
from woodshed.learning.stability import Watch
from woodshed.learning.update import GradNorms
from woodshed.records import RunError, from_json
from woodshed.runs.files import staged, way_out
from woodshed.runs.folder import RunDir

KEPT = 2  # newest checkpoints of a stage; older ones are removed


@dataclass
class TrainState:
    """Where a run stands: `step` is the next one to take."""

    stage: str
    """Label of the stage, as the recipe's list gives it."""
    step: int = 0
    steps_before: int = 0
    """Steps of earlier stages since the run's first evaluation, 0 for stages before it."""
    scale: GradNorms = field(default_factory=GradNorms)
    curriculum: dict[str, Any] = field(default_factory=dict)
    growth: dict[str, Any] = field(default_factory=dict)
    watch: Watch = field(default_factory=Watch)
    disabled_hints: dict[str, str] = field(default_factory=dict)
    """Classes of hints that did not pass the gate, with the reason."""
    stopped: str = ""
    """Why the run stopped by itself, at weights that were well; "" where it did not."""

    @property
    def version(self) -> int:
        """Version of the policy's weights: optimizer steps since the run's first evaluation."""
        return self.steps_before + self.step


def save(
    run: RunDir,
    policy: Policy,
    optimizer: torch.optim.Optimizer,
    position: TrainState,
    teacher: Mapping[str, Tensor] | None = None,
    *,
    kept: int = KEPT,
) -> Path:
    """Write a checkpoint after a step. Every rank calls it and writes its shards; any number of ranks can read them.

    Args:
        teacher: the teacher's weights, where they move.
        kept: newest checkpoints of the stage that stay.
    """

    def fill(folder: Path) -> None:
        tensor_folder.save(folder / "policy", policy.trainable)
        if teacher:
            tensor_folder.save(folder / "teacher", teacher)
        state = optimizer_state(policy, optimizer)
        tensor_folder.save(folder / "optimizer", state | {"rng": torch.get_rng_state()})
        if ranks.index() == 0:
            (folder / "position.json").write_text(json.dumps(asdict(position), indent=2) + "\n")

    saved = _written_by_all(run, f"{position.stage}-{position.step:06d}", fill)
    if ranks.index():
        return saved
    for old in run.checkpoints(f"{position.stage}-")[:-kept]:
        shutil.rmtree(old)
    return saved


def latest(run: RunDir, stages: Sequence[str]) -> Path | None:
    """The newest complete checkpoint of the furthest of these stages, which stand in their order."""
    for stage in reversed(stages):
        if found := run.checkpoints(f"{stage}-"):
            return found[-1]
    return None


def read_position(folder: Path) -> TrainState:
    """Where the run stood when the checkpoint was written.

    Raises:
        RunError: the file is missing or of another version.
    """
    try:
        data = json.loads((folder / "position.json").read_text())
        if missing := {"stage", "step", "scale", "watch"} - set(data):
            raise ValueError(f"no {min(missing)!r} in position.json")
        if type(data["step"]) is not int or folder.name != f"{data['stage']}-{data['step']:06d}":
            raise ValueError(f"it says stage {data['stage']!r}, step {data['step']!r}")
        return from_json(TrainState, data)
    except (OSError, ValueError, TypeError) as error:
        raise RunError(
            f"checkpoint {folder} cannot be read ({error}); delete that folder to resume before it"
        ) from None


def restore(folder: Path, policy: Policy, optimizer: torch.optim.Optimizer | None) -> None:
    """Load weights and, unless it is None, the optimizer and random state.

    Raises:
        RunError: a file is damaged.
    """
    policy.load_weights(_read(folder / "policy", EARLIER, policy.trainable))
    if optimizer is None:
        return
    shapes = {f"{name}/{key}": weight for name, weight in policy.trainable.items() for key in MOMENTS}
    for name, value in _read(folder / "optimizer", EARLIER, shapes).items():
        weight, _, key = name.rpartition("/")
        if name == "rng":
            torch.set_rng_state(value)
        elif weight not in policy.trainable:
            raise RunError(f"checkpoint {folder} is of other weights ({weight!r}); {EARLIER}")
        else:
            optimizer.state[policy.trainable[weight]][key] = value


MOMENTS = ("exp_avg", "exp_avg_sq", "momentum_buffer")
"""What optimizers keep in the shape of a weight."""


def optimizer_state(policy: Policy, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """What the optimizer keeps of each weight, under "weight/key". Rates and decays are the recipe's."""
    return {
        f"{name}/{key}": value
        for name, weight in policy.trainable.items()
        for key, value in optimizer.state.get(weight, {}).items()
    }


def _written_by_all(run: RunDir, name: str, fill: Callable[[Path], object]) -> Path:
    """A checkpoint into whose temporary folder every rank writes; rank 0 makes it, and puts it in its place."""
    if ranks.index() == 0:
        run.save_checkpoint(name, lambda folder: fill(ranks.agreed(folder)))
    else:
        fill(ranks.agreed(run.path))
    return ranks.agreed(run.path / "checkpoints" / name)  # nobody goes on before it is complete


def teacher_weights(folder: Path, policy: Policy) -> dict[str, Tensor]:
    """The teacher's weights in a checkpoint, sharded as the policy's; nothing where they do not move."""
    there = folder / "teacher"
    return _read(there, EARLIER, policy.trainable) if there.is_dir() else {}


def version_weights(run: RunDir, version: int, policy: Policy) -> dict[str, Tensor]:
    """The policy's weights after so many steps of RL, sharded as they are now; 0 is the start.

    Raises:
        RunError: that checkpoint is not kept any more.
    """
    name = f"rl-{version:06d}" if version else "before-rl"
    folder = run.path / "checkpoints" / name / "policy"
    if not folder.is_dir():
        raise RunError(f"no checkpoint {name} in {run.path / 'checkpoints'}")
    return _read(folder, EARLIER if version else ANEW, policy.trainable)


def start_weights(run: RunDir, policy: Policy, name: str) -> dict[str, Tensor]:
    """The trainable weights as they were when a stage began, sharded as they are: kept under this name once, read
    back by every resume."""
    folder = run.path / "checkpoints" / name / "policy"
    if not ranks.agreed(folder.is_dir()):
        _written_by_all(run, name, lambda partial: tensor_folder.save(partial / "policy", policy.trainable))
    return _read(folder, ANEW, policy.trainable)


def export(run: RunDir, policy: Policy, *, dtype: str) -> Path:
    """The final weights where others can load them: a PEFT adapter or a Hugging Face model directory."""
    target = run.path / "policy"
    try:
        with staged(target) as partial:
            policy.export(partial, dtype=dtype)
    except Exception as error:  # the libraries' writers raise their own kinds when the disk is full
        raise RunError(
            f"cannot write {target}: {error}. Training is complete and kept: {way_out(error)}, then `{run.resuming}`."
        ) from error
    return target


EARLIER = "delete that folder to resume before it"
ANEW = "what a run began with cannot be made again: copy its recipe.toml and start under another name"


def _read(folder: Path, way_out: str, like: Mapping[str, Tensor]) -> dict[str, Tensor]:
    try:
        return tensor_folder.read(folder, like)
    except (OSError, ValueError) as error:
        raise RunError(f"checkpoint {folder.parent} is damaged ({folder.name}: {error}); {way_out}") from None
