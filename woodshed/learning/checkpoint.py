"""How training stops and goes on: weights, optimizer, random state and position, complete or absent.

Resuming equals never having stopped: with the same threads on a CPU, bit for bit. Attempts in flight are not here
but in the run folder, where every finished wave of them is kept and never made again.
"""

from __future__ import annotations

import io
import json
import shutil
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal, get_args

import torch
from safetensors.torch import load_file
from safetensors.torch import save as serialize
from torch import Tensor

from woodshed.learning.policy import Policy
from woodshed.learning.stability import Watch
from woodshed.learning.update import GradNorms
from woodshed.records import RunError, from_json
from woodshed.runs.files import staged, way_out
from woodshed.runs.folder import RunDir

Phase = Literal["sft", "distill", "rl"]

KEPT = 2  # newest checkpoints of a phase; older ones are removed


@dataclass
class TrainState:
    """Where a run stands: `step` is the next one to take."""

    phase: Phase = "sft"
    step: int = 0
    scale: GradNorms = field(default_factory=GradNorms)
    curriculum: dict[str, Any] = field(default_factory=dict)
    growth: dict[str, Any] = field(default_factory=dict)
    watch: Watch = field(default_factory=Watch)
    off: dict[str, str] = field(default_factory=dict)
    """Classes of hints that did not pass the gate, with the reason."""
    stopped: str = ""
    """Why the run stopped by itself, at weights that were well; "" where it did not."""


def save(
    run: RunDir,
    policy: Policy,
    optimizer: torch.optim.Optimizer,
    position: TrainState,
    teacher: Mapping[str, Tensor] | None = None,
    *,
    kept: int = KEPT,
) -> Path:
    """Write a checkpoint after a step.

    Args:
        teacher: the teacher's weights, where they move.
        kept: newest checkpoints of the phase that stay.
    """

    def fill(folder: Path) -> None:
        (folder / "policy.safetensors").write_bytes(_serialized(policy.snapshot()))
        if teacher:
            (folder / "teacher.safetensors").write_bytes(_serialized(teacher))
        rest = (
            io.BytesIO()
        )  # written by Python, whose errors name a full disk; torch's and safetensors' do not
        torch.save({"optimizer": optimizer.state_dict(), "rng": torch.get_rng_state()}, rest)
        (folder / "optimizer.pt").write_bytes(rest.getbuffer())
        (folder / "position.json").write_text(json.dumps(asdict(position), indent=2) + "\n")

    saved = run.save_checkpoint(f"{position.phase}-{position.step:06d}", fill)
    for old in run.checkpoints(f"{position.phase}-")[:-kept]:
        shutil.rmtree(old)
    return saved


def latest(run: RunDir) -> Path | None:
    """The newest complete checkpoint of the furthest phase."""
    found = run.checkpoints("rl-") or run.checkpoints("distill-") or run.checkpoints("sft-")
    return found[-1] if found else None


def read_position(folder: Path) -> TrainState:
    """Where the run stood when the checkpoint was written.

    Raises:
        RunError: the file is missing or of another version.
    """
    try:
        data = json.loads((folder / "position.json").read_text())
        if missing := {"phase", "step", "scale", "watch"} - set(data):
            raise ValueError(f"no {min(missing)!r} in position.json")
        if data["phase"] not in get_args(Phase) or type(data["step"]) is not int or data["step"] < 0:
            raise ValueError(f"phase {data['phase']!r}, step {data['step']!r}")
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
    try:
        weights = load_file(folder / "policy.safetensors")
        rest = torch.load(folder / "optimizer.pt", weights_only=True) if optimizer is not None else None
    except Exception as error:  # safetensors and pickle raise their own, undocumented kinds
        raise RunError(
            f"checkpoint {folder} is damaged ({error}); delete that folder to resume before it"
        ) from None
    policy.load_weights({name: value.to(policy.device) for name, value in weights.items()})
    if optimizer is not None and rest is not None:
        optimizer.load_state_dict(rest["optimizer"])
        torch.set_rng_state(rest["rng"])


def teacher_weights(folder: Path) -> dict[str, Tensor]:
    """The teacher's weights in a checkpoint; nothing where they do not move."""
    file = folder / "teacher.safetensors"
    return _read(file, EARLIER) if file.is_file() else {}


def version_weights(run: RunDir, version: int) -> dict[str, Tensor]:
    """The policy's weights after so many steps of RL; 0 is the start.

    Raises:
        RunError: that checkpoint is not kept any more.
    """
    name = f"rl-{version:06d}" if version else "start"
    file = run.path / "checkpoints" / name / "policy.safetensors"
    if not file.is_file():
        raise RunError(f"no checkpoint {name} in {run.path / 'checkpoints'}")
    return _read(file, EARLIER if version else ANEW)


def start_weights(run: RunDir, policy: Policy, name: str) -> dict[str, Tensor]:
    """The trainable weights as they were when a phase began, in host memory: kept under this name once,
    read back by every resume."""
    file = run.path / "checkpoints" / name / "policy.safetensors"
    if not file.is_file():
        run.save_checkpoint(
            name, lambda folder: (folder / file.name).write_bytes(_serialized(policy.snapshot()))
        )
    return _read(file, ANEW)


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


def _read(file: Path, way_out: str) -> dict[str, Tensor]:
    try:
        return load_file(file)
    except Exception as error:  # safetensors raises its own, undocumented kinds
        raise RunError(f"checkpoint {file.parent} is damaged ({file.name}: {error}); {way_out}") from None


def _serialized(weights: Mapping[str, Tensor]) -> bytes:
    return serialize({name: value.contiguous().cpu() for name, value in weights.items()})
