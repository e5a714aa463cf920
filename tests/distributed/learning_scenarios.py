"""What ranks do in the tests of `test_learning_distributed.py`; every function runs on all ranks of a world."""

from __future__ import annotations

import os
import signal
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from parallel_models import EPS, VOCAB, build, whole
from torch import Tensor

from woodshed.learning import checkpoint, publish, ranks, tensor_folder
from woodshed.learning.checkpoint import TrainState
from woodshed.learning.layout import LayoutSettings, shard
from woodshed.learning.loss_settings import FeedbackSettings, LossSettings
from woodshed.learning.optimizer import OptimizerSettings, make_optimizer
from woodshed.learning.packing import Batch, Row, Target
from woodshed.learning.policy import Policy, add_adapter
from woodshed.learning.teacher import Teacher
from woodshed.learning.update import GradNorms, update
from woodshed.records import Hint
from woodshed.runs.folder import RunDir
from woodshed.stages.sft import SFTSettings, imitate

FEEDBACK = {"offload_teacher": False, "measure_every": 1, "target_floor": 2}


@dataclass(frozen=True)
class Training:
    """What is trained, on what, and how the ranks share it."""

    family: str = "llama"
    rank: int = 0
    """Of a LoRA adapter; 0 trains all weights."""
    optimizer: str = "adamw"
    teacher: str = "ema"
    steps: int = 2
    rows: int = 7
    targets: int = 3
    layout: dict[str, int] = field(default_factory=dict)
    """Axes in which a world differs from fsdp over all of it."""
    loss: dict[str, Any] = field(default_factory=dict)


def policy_of(training: Training) -> Policy:
    model = build(training.family)
    model = add_adapter(model, training.rank) if training.rank else model.requires_grad_(True)
    policy = Policy(model, is_adapter=bool(training.rank))
    world = dist.get_world_size()
    layout = {axis: size for axis, size in training.layout.items() if world % size == 0 and world > 1}
    shard(policy, LayoutSettings(**{"fsdp": world // layout.get("replicate", 1), **layout}))
    return policy


def optimizer_of(policy: Policy, training: Training) -> torch.optim.Optimizer:
    kind = training.optimizer
    assert kind in ("adamw", "muon")
    made = make_optimizer(policy, OptimizerSettings(kind=kind, learning_rate=3e-3, weight_decay=0.1))
    for group in made.param_groups:
        group["eps"] = EPS
    return made


def batch_of(training: Training) -> Batch:
    """Rows of unequal length in two groups, and hinted turns of some of them."""
    rng = torch.Generator().manual_seed(1)

    def tokens(count: int) -> tuple[int, ...]:
        return tuple(torch.randint(VOCAB, (count,), generator=rng).tolist())

    rows, targets = [], []
    for number in range(max(training.rows, training.targets)):
        ids, wanted = tokens(12 + 5 * number), tuple(range(6, 10 + 4 * number))
        logps = tuple((-torch.rand(len(wanted), generator=rng) - 3.5).tolist())
        rows.append(Row(ids, wanted, logps, 0.5 - number % 2, rollout_id=f"r{number}", group=number % 2))
        if number < training.targets:
            student = Row(ids[:10], tuple(range(6, 10)), logps[:4])
            teacher = Row((*ids[:5], *tokens(3), *ids[5:10]), tuple(range(9, 13)), logps[:4])
            targets.append(Target(Hint(f"r{number}", 0, "untested", "x"), student, teacher, 5, ((0, 4),)))
    return Batch(tuple(rows[: training.rows]), tuple(targets), max(training.rows, 1))


def run(trainings: dict[str, Training]) -> dict[str, Any]:
    """Metrics of every step, and the weights at the end."""
    return {name: train(training) for name, training in trainings.items()} | {"sft": imitated()}


def imitated() -> dict[str, Any]:
    """Two steps of supervised imitation of seven rows."""
    training = Training()
    policy, rows = policy_of(training), batch_of(training).rows
    optimizer, settings = optimizer_of(policy, training), SFTSettings(steps=2, micro_batch_tokens=64)
    metrics = [imitate(policy, optimizer, rows, step, settings) for step in range(2)]
    return {"metrics": metrics, "weights": weights(policy)}


def train(training: Training) -> dict[str, Any]:
    policy = policy_of(training)
    optimizer = optimizer_of(policy, training)
    metrics, _ = steps_of(training, policy, optimizer, training.steps)
    return {"metrics": metrics, "weights": weights(policy)}


def steps_of(
    training: Training, policy: Policy, optimizer: torch.optim.Optimizer, steps: int
) -> tuple[list[dict[str, Any]], Teacher]:
    batch = batch_of(training)
    feedback = FeedbackSettings(**FEEDBACK, teacher=training.teacher, teacher_rate=0.3)  # type: ignore[arg-type]
    teacher, scale = Teacher(policy, policy.snapshot(), feedback), GradNorms()
    metrics = [
        update(
            policy,
            optimizer,
            batch,
            scale=scale,
            teacher=teacher,
            learning_rate=3e-3,
            message_tokens=8,
            temperature=1.0,
            objective=LossSettings(micro_batch_tokens=64, **training.loss),
            feedback=feedback,
            max_grad_norm=0.5,
        )
        for _ in range(steps)
    ]
    for each in metrics:
        each["divergences"] = sorted((d.rollout_id, d.divergence) for d in each["divergences"])
    return metrics, teacher


def weights(policy: Policy) -> dict[str, Tensor]:
    return {name: whole(parameter) for name, parameter in policy.trainable.items()}


# Checkpoints ------------------------------------------------------------------------------------------------------


def contents(
    policy: Policy, optimizer: torch.optim.Optimizer, teacher: dict[str, Tensor]
) -> dict[str, Tensor]:
    """Weights, the teacher's and the optimizer's state, unsharded, by name."""
    state = checkpoint.optimizer_state(policy, optimizer)
    return {
        **{f"policy {name}": value for name, value in weights(policy).items()},
        **{f"teacher {name}": whole(value) for name, value in teacher.items()},
        **{f"optimizer {name}": whole(value) for name, value in state.items()},
    }


def save_after(trainings: dict[str, Training], folder: str, steps: int) -> dict[str, Any]:
    """Checkpoints of several trainings, and what is in them."""
    found = {}
    for number, (name, training) in enumerate(trainings.items()):
        run = RunDir(Path(folder) / str(number))
        policy = policy_of(training)
        start = checkpoint.start_weights(run, policy, "start")
        optimizer = optimizer_of(policy, training)
        _, teacher = steps_of(training, policy, optimizer, steps)
        checkpoint.save(run, policy, optimizer, TrainState("rl", steps), teacher.state())
        found[name] = contents(policy, optimizer, dict(teacher.state()))
        found[name] |= {f"start {name}": whole(value) for name, value in start.items()}
    return found


def load_saved(trainings: dict[str, Training], folder: str) -> dict[str, Any]:
    found = {}
    for number, (name, training) in enumerate(trainings.items()):
        run = RunDir(Path(folder) / str(number))
        newest = checkpoint.latest(run, ("rl",))
        assert newest is not None and checkpoint.read_position(newest).step
        policy = policy_of(training)
        start = checkpoint.start_weights(run, policy, "start")
        optimizer = optimizer_of(policy, training)
        checkpoint.restore(newest, policy, optimizer)
        found[name] = contents(policy, optimizer, checkpoint.teacher_weights(newest, policy))
        found[name] |= {f"start {name}": whole(value) for name, value in start.items()}
        steps_of(training, policy, optimizer, 1)  # and it goes on
    return found


def die_while_saving(training: Training, folder: str) -> None:
    """A second checkpoint, in the middle of which the last rank is killed."""
    policy = policy_of(training)
    optimizer, run = optimizer_of(policy, training), RunDir(Path(folder))
    _, teacher = steps_of(training, policy, optimizer, 1)
    write = tensor_folder.save

    def save(place: Path, tensors: dict[str, Tensor]) -> None:
        if place.name == "optimizer" and dist.get_rank() == dist.get_world_size() - 1:
            os.kill(os.getpid(), signal.SIGKILL)
        write(place, tensors)

    tensor_folder.save = save
    checkpoint.save(run, policy, optimizer, TrainState("rl", 9), teacher.state())


def exported(trainings: dict[str, Training], folder: str) -> dict[str, Any]:
    """Folders for people and for servers, a copy for an engine, and the weights that all of them must hold."""
    found = {}
    for number, (name, training) in enumerate(trainings.items()):
        policy, copied = policy_of(training), None
        with torch.no_grad():
            for weight in policy.trainable.values():
                weight.mul_(1.5)
        policy.export(Path(folder, str(number), "policy"))
        publish.write_for_servers(policy, Path(folder, str(number), "served"))
        if ranks.index() == 0:
            model = build(training.family)
            copied = Policy(add_adapter(model, training.rank) if training.rank else model, is_adapter=True)
        publish.refresh(copied, policy)
        found[name] = (
            weights(policy),
            copied
            and {key: value for key, value in copied.model.state_dict().items() if key in policy.trainable},
        )
    return found
