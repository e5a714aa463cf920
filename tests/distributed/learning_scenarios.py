"""The work of each rank in `test_learning_distributed.py`, and of the process that ranks are compared with."""

from __future__ import annotations

import math
import os
import signal
import warnings
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from parallel_models import EPS, VOCAB, build, whole
from peft import LoraConfig, get_peft_model
from torch import Tensor
from worlds import device

from woodshed.engines import expert_log
from woodshed.experience.samples import HintBranch, TrainingSample
from woodshed.learning import checkpoint, optimizer, packing, ranks, tensor_folder
from woodshed.learning.checkpoint import CheckpointWriter, TrainState
from woodshed.learning.layout import LayoutSettings, shard
from woodshed.learning.loss_settings import FeedbackSettings, LossSettings
from woodshed.learning.optimizer import OptimizerSettings
from woodshed.learning.policy import Policy, PolicySettings, add_adapter
from woodshed.learning.trainer import Trainer
from woodshed.learning.weight_files import WeightFiles
from woodshed.learning.worker import Worker
from woodshed.records import Hint
from woodshed.runs.folder import RunDir

SAVED = ("LoRA", "AdamW", "Muon", "experts")
"""Trainings of the tests with checkpoints."""


@dataclass(frozen=True)
class Training:
    """A training, and the way in which ranks share it."""

    family: str = "llama"
    rank: int = 0
    """Of a LoRA adapter; 0 trains all weights."""
    optimizer: str = "adamw"
    teacher: str = "ema"
    steps: int = 2
    rollouts: int = 7
    hinted: int = 3
    imitated: int = 0
    """Rollouts that are imitated as well."""
    dtype: str = "float32"
    activation_checkpointing: bool = False
    forward: str = "packed"
    routed: bool = False
    """The engine tells experts, some of which its router cannot have chosen."""
    is_lost: bool = False
    """The first step's gradient is NaN, on one rank only."""
    layout: dict[str, int] = field(default_factory=dict)
    """Axes in which a world differs from fsdp over all of it."""
    loss: dict[str, Any] = field(default_factory=dict)


def policy_of(training: Training) -> Policy:
    model = build(training.family).to(device(), getattr(torch, training.dtype))
    if training.rank and training.family == "qwen":  # an adapter of experts' weights cannot be sharded
        attention = ["q_proj", "k_proj", "v_proj", "o_proj"]
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)  # peft calls names that transformers has renamed
            model = get_peft_model(model, LoraConfig(r=training.rank, target_modules=attention))
    else:
        model = add_adapter(model, training.rank) if training.rank else model.requires_grad_(True)
    model.to(device())  # a new adapter as well
    policy = Policy(
        model, is_adapter=bool(training.rank), activation_checkpointing=training.activation_checkpointing
    )
    world = ranks.count()
    layout = {axis: size for axis, size in training.layout.items() if world % size == 0 and world > 1}
    fsdp = world // layout.get("replicate", 1) // layout.get("cp", 1)
    shard(policy, LayoutSettings(fsdp=fsdp, **layout))
    return policy


class Decaying(OptimizerSettings):
    weight_decay = 0.1
    max_grad_norm = 0.5


class Measuring(FeedbackSettings):
    """Both norms in every other step, and one backward pass in the others."""

    measure_every = 2


def trainer_of(training: Training, run: RunDir | None = None) -> Trainer:
    """A trainer; its starting weights are kept in the run, where there is one."""
    policy, kind = policy_of(training), training.optimizer
    assert kind in ("adamw", "muon")
    start = checkpoint.start_weights(run, policy, "start") if run else policy.snapshot()
    trainer = Trainer(
        policy,
        Decaying(kind=kind, learning_rate=3e-3, warmup_steps=0),
        LossSettings(micro_batch_tokens=64, **training.loss),
        Measuring.model_validate(
            {"teacher": training.teacher, "teacher_rate": 0.3, "target_floor": 2, "forward": training.forward}
        ),
        start=start,
        message_tokens=8,
    )
    for group in trainer.optimizer.param_groups:
        group["eps"] = EPS
    return trainer


def samples_of(training: Training) -> list[TrainingSample]:
    """Rollouts of unequal length in two groups, hints on turns of some of them, and others that are imitated."""
    rng = torch.Generator().manual_seed(1)

    def tokens(count: int) -> tuple[int, ...]:
        return tuple(torch.randint(VOCAB, (count,), generator=rng).tolist())

    samples = []
    for number in range(max(training.rollouts, training.hinted, training.imitated)):
        ids, predicted = tokens(12 + 5 * number), tuple(range(6, 10 + 4 * number))
        logps = tuple((-torch.rand(len(predicted), generator=rng) - 3.5).tolist())
        sample = TrainingSample(ids, predicted, logps, rollout_id=f"r{number}", group=number % 2)
        ones = (1.0,) * len(predicted)
        if number < training.hinted:
            hint = Hint(f"r{number}", 0, "untested", "x")
            behind = (*tokens(3), *ids[5:10])
            branch = HintBranch(hint, 5, behind, (6, 7, 8, 9), (1.0,) * 4, ((0, 4),))
            sample = replace(sample, branches=(branch,))
        if number < training.rollouts:
            advantages = (0.5 - number % 2,) * len(predicted)
            sample = replace(sample, rl_weights=ones, advantages=advantages)
        if number < training.imitated:
            sample = replace(sample, ce_weights=ones)
        if training.routed:
            chosen = torch.randint(16, (len(ids) - 1, 2, 4), generator=rng).numpy()
            sample = replace(sample, experts=(expert_log.write(0, chosen),))
        samples.append(sample)
    return samples


def steps_of(training: Training, trainer: Trainer, steps: int) -> list[dict[str, Any]]:
    samples = samples_of(training)
    metrics = [trainer.step(samples) for _ in range(steps)]
    for each in metrics:
        each["divergences"] = sorted((d.rollout_id, d.divergence) for d in each["divergences"])
    return metrics


def run(
    trainings: dict[str, Training], folder: str, writers: int, kept: Sequence[str] = SAVED
) -> dict[str, Any]:
    """Metrics of every step, and the weights at the end; the checkpoints of `folder` loaded, or written by so many
    ranks.

    Args:
        kept: trainings with checkpoints.
    """
    results: dict[str, Any] = {name: train(training) for name, training in trainings.items()}
    saved = {name: trainings[name] for name in kept}
    results["checkpoints"] = (
        save_after_two(saved, folder) if ranks.count() == writers else load(saved, folder)
    )
    return results


def train(training: Training) -> dict[str, Any]:
    trainer, metrics = trainer_of(training), []
    if training.is_lost:
        weight = next(iter(trainer.policy.trainable.values()))
        factor = math.nan if ranks.index() == 1 % ranks.count() else 1.0
        breaks = weight.register_hook(lambda gradient: gradient * factor)
        metrics = steps_of(training, trainer, 1)
        breaks.remove()
    metrics += steps_of(training, trainer, training.steps)
    return {"metrics": metrics, "weights": weights(trainer.policy)}


def weights(policy: Policy) -> dict[str, Tensor]:
    return {name: whole(parameter).cpu() for name, parameter in policy.trainable.items()}


# Checkpoints ------------------------------------------------------------------------------------------------------


def contents(trainer: Trainer) -> dict[str, Tensor]:
    """Weights at the start and now, the teacher's and the optimizer's state, unsharded, by name."""
    assert trainer.teacher is not None
    state = optimizer.state_of(trainer.optimizer, trainer.policy.trainable)
    parts = {
        "policy": trainer.policy.trainable,
        "start": trainer.teacher.start,
        "teacher": trainer.teacher.state(),
        "optimizer": state,
    }
    return {
        f"{part} {name}": whole(value).cpu() for part, held in parts.items() for name, value in held.items()
    }


def save_after_two(trainings: dict[str, Training], folder: str) -> dict[str, Any]:
    """Checkpoints after two steps, and their contents."""
    return {name: save(training, RunDir(Path(folder) / name)) for name, training in trainings.items()}


def save(training: Training, run: RunDir) -> dict[str, Tensor]:
    trainer = trainer_of(training, run)
    steps_of(training, trainer, 2)
    writer = CheckpointWriter(run)
    writer.begin(trainer, TrainState("rl", 2))
    writer.finish()
    return contents(trainer)


def load(trainings: dict[str, Training], folder: str) -> dict[str, Any]:
    """Contents of the checkpoints, and the weights after a step from them."""
    results = {}
    for name, training in trainings.items():
        run = RunDir(Path(folder) / name)
        newest = checkpoint.latest(run, ("rl",))
        assert newest is not None and checkpoint.read_position(newest).step == 2
        trainer = trainer_of(training, run)
        trainer.load(newest)
        assert trainer.taken == 2
        results[name] = contents(trainer)
        steps_of(training, trainer, 1)
        results[f"{name}, a step later"] = weights(trainer.policy)
    return results


def die_while_saving(training: Training, folder: str) -> None:
    """A checkpoint, and a second one in the middle of which the last rank is killed."""
    run = RunDir(Path(folder))
    kept = save(training, run)
    if ranks.index() == 0:
        torch.save(kept, Path(folder) / "kept.pt")
    trainer, write = trainer_of(training, run), tensor_folder.save

    def write_or_die(target: Path, tensors: dict[str, Tensor], group: Any) -> None:
        if target.name == "optimizer" and ranks.index() == ranks.count() - 1:
            os.kill(os.getpid(), signal.SIGKILL)
        write(target, tensors, group)

    tensor_folder.save = write_or_die
    writer = CheckpointWriter(run)
    writer.begin(trainer, TrainState("rl", 9))
    writer.finish()


def loaded(folders: dict[str, str]) -> dict[str, dict[str, Tensor]]:
    """Weights of policies of which ranks load their shards, whole."""
    found = {}
    for name, folder in folders.items():
        settings = PolicySettings(model=folder, lora_rank=4 if name == "LoRA" else 0, device="cpu")
        policy, _ = Policy.load(settings, seed=0, is_whole=False)
        shard(policy, LayoutSettings(fsdp=ranks.count(), ep=2 if name == "experts" else 1))
        found[name] = {key: whole(value).cpu() for key, value in policy.model.state_dict().items()}
        found[f"{name}, log-probs"] = {
            "": policy.logps(packing.pad(samples_of(Training())[:1], policy.device), 1.0).cpu()
        }
    return found


def exported(trainings: dict[str, Training], folder: str) -> dict[str, Any]:
    """Folders for people and for servers, a copy for an engine, and the weights that all of them must hold; digests of
    what differences between two publications lead to."""
    found = {}
    WeightFiles.has_differences = True  # type: ignore[assignment]  # of float32, too
    for name, training in trainings.items():
        policy, copied, run = policy_of(training), None, RunDir(Path(folder) / name)
        files = WeightFiles(policy)
        for kind in ("before", "difference", "served"):
            (run.path / kind).mkdir(exist_ok=True, parents=True)
        if not training.rank:
            files.write(run.path / "before", "full")
        with torch.no_grad():
            for weight in policy.trainable.values():
                weight.mul_(1.5)
        changed = {} if training.rank else files.write(run.path / "difference", "delta")
        if ranks.index() == 0:
            copied = build(training.family)
            copied = add_adapter(copied, training.rank) if training.rank else copied
        worker = Worker(policy, run, copied=copied)
        worker.refresh()
        worker.export()
        worker.write_for_servers(run.path / "served", "adapter" if training.rank else "full")
        held = copied.state_dict() if copied is not None else {}
        held = {key: value for key, value in held.items() if key in policy.trainable}
        found[name] = weights(policy), held, {key: tensor.digest for key, tensor in changed.items()}
    return found
