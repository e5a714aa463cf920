"""A rank's part in training, and how the other ranks do what rank 0 asks of its own.

Rank 0 runs the stages. Whatever touches sharded weights is an exchange between all ranks, so it is the trainer's step
or a method of `Worker`, and all of them call it; with one process, nothing is told to anybody.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypeVar, cast

import torch
from torch import Tensor

from woodshed.engines.published import Published, PublishedTensor
from woodshed.experience.samples import TrainingSample
from woodshed.learning import checkpoint, packing, ranks
from woodshed.learning.checkpoint import CheckpointWriter, TrainState
from woodshed.learning.loss_settings import FeedbackSettings, LossSettings
from woodshed.learning.optimizer import OptimizerSettings
from woodshed.learning.policy import Policy
from woodshed.learning.ranks import RankCalls
from woodshed.learning.tensor_folder import EARLIER, read_saved
from woodshed.learning.trainer import Trainer
from woodshed.learning.weight_files import WeightFiles
from woodshed.runs.folder import RunDir

F = TypeVar("F", bound=Callable[..., Any])


def everywhere(method: F) -> F:
    """A method of `Worker` of which rank 0 tells the workers of the other ranks before it runs."""

    @functools.wraps(method)
    def told(worker: Worker, *args: Any, **kwargs: Any) -> Any:
        worker.commands.tell(method.__name__, *args, **kwargs)
        return method(worker, *args, **kwargs)

    return cast("F", told)


@dataclass(frozen=True)
class StageSettings:
    """Settings of a stage's trainer, as `Trainer` takes them."""

    optimizer: OptimizerSettings
    loss: LossSettings
    feedback: FeedbackSettings | None
    """None for a stage without a teacher."""
    steps: int
    temperature: float
    message_tokens: int


class Worker:
    """A rank's shard of the policy, and the trainer of the stage at hand.

    Args:
        commands: rank 0's to the others; None where it is alone.
        copied: a whole copy of a sharded model for an engine of this process; None where the engine computes with the
            policy itself, or in another process.
    """

    def __init__(
        self,
        policy: Policy,
        run: RunDir,
        commands: RankCalls | None = None,
        copied: Any = None,
    ) -> None:
        self.policy, self.run, self.copied = policy, run, copied
        self.commands = commands or RankCalls()
        self.checkpoints = CheckpointWriter(run)
        self._trainer: Trainer | None = None
        self._without_noise: dict[str, Tensor] = {}
        self._weight_files = WeightFiles(policy)
        self.has_differences = self._weight_files.has_differences
        """Weights can be published as differences to the version before."""
        self.newest: tuple[Path, Published] | None = None
        """The version that was published last, on rank 0,"""
        self.since_full = 0
        """and the number of those since the last whole one."""

    @property
    def trainer(self) -> Trainer:
        """The trainer of the stage at hand, whose steps all ranks take."""
        assert self._trainer is not None, "no stage has begun"
        return self._trainer

    @everywhere
    def begin(self, label: str, settings: StageSettings, newest: Path | None, *, resumes: bool) -> None:
        """Make the trainer of a stage: new on the weights of the newest checkpoint, or as it was in the stage's middle.

        The weights at the beginning of a stage with a teacher are kept as the checkpoint `before-LABEL`.
        """
        policy = self.policy
        self.checkpoints.finish()
        if newest is not None and not resumes:
            policy.load_weights(read_saved(newest / "policy", EARLIER, policy.trainable))
        start = checkpoint.start_weights(self.run, policy, f"before-{label}") if settings.feedback else None
        self._trainer = Trainer(
            policy,
            settings.optimizer,
            settings.loss,
            settings.feedback,
            start=start,
            steps=settings.steps,
            temperature=settings.temperature,
            message_tokens=settings.message_tokens,
        )
        self.trainer.commands = self.commands
        if newest is not None and resumes:
            self.trainer.load(newest)

    @everywhere
    def logps(
        self,
        samples: Sequence[TrainingSample],
        *,
        from_start: bool = False,
        temperature: float | None = None,
    ) -> list[tuple[float, ...]]:
        """Log-prob of every predicted token of each sample, in nats.

        Args:
            from_start: by the weights at the beginning of the stage, which has a teacher.
            temperature: None takes the sampler's.
        """
        weights = None
        if from_start:
            assert self.trainer.teacher is not None, (
                "the weights at the beginning are kept for the teacher only"
            )
            weights = self.trainer.teacher.start
        return self.trainer.logps(samples, weights, temperature=temperature)

    @everywhere
    def save(self, state: TrainState, *, kept: int = checkpoint.KEPT) -> None:
        """Begin to write a checkpoint; see `CheckpointWriter`."""
        self.checkpoints.begin(self.trainer, state, kept=kept)

    @everywhere
    def settle(self) -> None:
        """Wait until the newest checkpoint is complete."""
        self.checkpoints.finish()

    @everywhere
    def go_back(self, version: int) -> None:
        """Give the policy the weights of an earlier version back."""
        self.checkpoints.finish()
        self.policy.load_weights(checkpoint.version_weights(self.run, version, self.policy))

    @everywhere
    @torch.no_grad()
    def score(self, sample: TrainingSample, temperature: float) -> list[float]:
        """Log-prob of every predicted token of one sample, in nats; also before a stage has begun."""
        return self.policy.logps(packing.pad([sample], self.policy.device), temperature)[0].tolist()

    @everywhere
    def add_noise(self) -> None:
        """Change every trainable weight by about a fifth, the same way on all ranks, until `remove_noise`."""
        weights = self.policy.snapshot()
        self._without_noise = {name: value.to("cpu", copy=True) for name, value in weights.items()}
        self.policy.load_weights(
            {
                name: value + 0.3 * value.abs().mean() * torch.cos(1e4 * value)
                for name, value in weights.items()
            }
        )

    @everywhere
    def remove_noise(self) -> None:
        """Give the weights back that they had before `add_noise`."""
        self.policy.load_weights(self._without_noise)
        self._without_noise = {}

    @everywhere
    def refresh(self) -> None:
        """Give the engine's copy, where there is one, the policy's weights."""
        if ranks.count() == 1:
            return
        weights = self.copied.state_dict() if self.copied is not None else {}
        for names, value in self.policy.whole_weights():
            if weights:
                weights[names[0]].copy_(value)

    @everywhere
    def write_for_servers(
        self, folder: Path, kind: Literal["full", "delta", "adapter"]
    ) -> dict[str, PublishedTensor]:
        """Write the weights into a folder that exists; see `WeightFiles.write`."""
        return self._weight_files.write(folder, kind)

    @everywhere
    def export(self) -> None:
        """Write the final weights; see `checkpoint.export`."""
        self.checkpoints.finish()
        checkpoint.export(self.run, self.policy)
