"""Frozen, averaged, live and mixed teachers against slow loops."""

from __future__ import annotations

import pytest
import torch
from tiny_training import four_attempts, hint_for, samples_of, step, tiny_policy, trainer_of

from woodshed.experience.compile import rollout_sample
from woodshed.learning import packing
from woodshed.learning.loss_settings import FeedbackSettings
from woodshed.learning.policy import Policy
from woodshed.learning.teacher import Teacher
from woodshed.records import ModelError, Rollout


@pytest.fixture(scope="module")
def rollouts(tmp_path_factory: pytest.TempPathFactory) -> list[Rollout]:
    return four_attempts(tmp_path_factory.mktemp("tasks"))


def move(policy: Policy, seed: int = 3) -> None:
    torch.manual_seed(seed)
    with torch.no_grad():
        for parameter in policy.trainable.values():
            parameter.add_(torch.randn_like(parameter) * 0.05)


def teacher(policy: Policy, kind: str, rate: float = 0.25) -> Teacher:
    settings = FeedbackSettings.model_validate({"teacher": kind, "teacher_rate": rate})
    return Teacher(policy, policy.snapshot(), settings)


def test_each_kind_answers_with_its_weights(rollouts):
    policy = tiny_policy()
    padded = packing.pad([rollout_sample(rollouts[0])])
    made = {kind: teacher(policy, kind) for kind in ("frozen", "ema", "live", "trust-region")}
    before = policy.logits(padded).detach()
    move(policy)
    after = policy.logits(padded).detach()
    answers = {kind: each.logits(policy, padded) for kind, each in made.items()}
    assert torch.equal(answers["frozen"], before) and torch.equal(answers["live"], after)
    assert torch.equal(answers["ema"], before)  # it has not followed yet
    mixed = (0.75 * before.log_softmax(-1) + 0.25 * after.log_softmax(-1)).log_softmax(-1)
    assert torch.allclose(answers["trust-region"].log_softmax(-1), mixed, atol=1e-5)
    assert not any(answer.requires_grad for answer in answers.values())
    assert torch.equal(policy.logits(padded), after)


def test_the_average_follows_as_a_loop_over_steps_does():
    policy = tiny_policy()
    averaged = teacher(policy, "ema", rate=0.1)
    want = {name: value.double() for name, value in policy.snapshot().items()}
    for seed in range(5):
        move(policy, seed)
        averaged.follow(policy)
        want = {name: 0.9 * value + 0.1 * policy.trainable[name].double() for name, value in want.items()}
    for name, value in want.items():
        assert torch.allclose(averaged.average[name].double(), value, atol=1e-6)
    frozen = teacher(policy, "frozen")
    move(policy)
    frozen.follow(policy)
    assert frozen.state() == {}


@pytest.mark.parametrize("rank", [0, 4])
def test_weights_that_lie_elsewhere_are_exchanged_without_a_trace(rollouts, rank):
    """Host memory and shards take this way: values are copied, no name changes hands, nothing is kept twice."""
    policy = tiny_policy(rank=rank)
    padded = packing.pad([rollout_sample(rollouts[0])])
    start = policy.snapshot()
    before = policy.logits(padded).detach()
    move(policy)
    storage = {name: parameter.data_ptr() for name, parameter in policy.trainable.items()}
    live = policy.logits(padded)  # its graph must outlive the exchange
    elsewhere = {name: torch.nn.Parameter(value, requires_grad=False) for name, value in start.items()}
    with policy.using(elsewhere):
        assert torch.equal(policy.logits(padded), before)
        assert {name: p.data_ptr() for name, p in policy.trainable.items()} == storage
    assert torch.equal(policy.logits(padded), live)
    live.sum().backward()
    assert all(torch.equal(elsewhere[name], value) for name, value in start.items())


def test_a_teacher_of_another_vocabulary_is_refused():
    policy = tiny_policy(rank=0)
    start = policy.snapshot()
    name = "model.embed_tokens.weight"
    start[name] = start[name][:-1]
    with pytest.raises(ModelError, match=r"embed_tokens.weight' is \(599, 48\) and the policy's \(600, 48\)"):
        Teacher(policy, start)


def test_a_checkpoint_of_another_kind_of_teacher_is_refused():
    policy = tiny_policy()
    averaged = teacher(policy, "ema")
    again = teacher(policy, "ema")
    move(policy)
    averaged.follow(policy)
    again.restore(averaged.state())
    assert all(torch.equal(again.average[name], value) for name, value in averaged.average.items())
    with pytest.raises(ModelError, match="no average"):
        again.restore({})


@pytest.mark.parametrize("kind", ["frozen", "ema", "live", "trust-region"])
def test_every_kind_trains(rollouts, kind):
    batch = samples_of(rollouts, [1.0, 0.0, 0.0, 0.0], [hint_for(rollouts[1], 0)])
    settings = FeedbackSettings.model_validate({"teacher": kind, "teacher_rate": 0.5})
    metrics = step(tiny_policy(), batch, feedback=settings, steps=3)
    assert metrics["kl_loss"] > 0 and metrics["kl_grad_norm"] > 0


def test_an_update_lets_the_average_follow(rollouts):
    policy = tiny_policy()
    trainer = trainer_of(policy, feedback=FeedbackSettings(teacher="ema", teacher_rate=0.25))
    before = {name: value.clone() for name, value in policy.snapshot().items()}
    batch = samples_of(rollouts, [1.0, 0.0, 0.0, 1.0], [hint_for(rollouts[1], 0)])
    assert trainer.teacher is not None
    trainer.step(batch)
    moved = [name for name, value in policy.trainable.items() if not torch.equal(value, before[name])]
    assert moved
    for name, value in policy.trainable.items():
        assert torch.allclose(trainer.teacher.average[name], 0.75 * before[name] + 0.25 * value, atol=1e-7)
