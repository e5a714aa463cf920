"""One step for reinforcement learning, SFT and distillation, on a tiny real model; and what a trainer keeps."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from tiny_training import four_attempts, hint_for, samples_of, step, tiny_policy, trainer_of

from woodshed.experience.compile import rollout_sample, sft_sample
from woodshed.experience.samples import TrainingSample
from woodshed.learning.loss_settings import FeedbackSettings
from woodshed.learning.optimizer import OptimizerSettings
from woodshed.learning.policy import Policy
from woodshed.learning.trainer import Trainer
from woodshed.records import RecipeError, Rollout, RunError, from_json, to_json


@pytest.fixture(scope="module")
def rollouts(tmp_path_factory: pytest.TempPathFactory) -> list[Rollout]:
    return four_attempts(tmp_path_factory.mktemp("tasks"))


@pytest.fixture(scope="module")
def samples(rollouts) -> tuple[TrainingSample, ...]:
    return samples_of(rollouts, [1.0, 0.0, 0.0, 0.5], [hint_for(rollouts[1], 0), hint_for(rollouts[3], 1)])


def test_samples_travel_as_json(samples):
    for sample in samples:
        assert from_json(TrainingSample, json.loads(json.dumps(to_json(sample)))) == sample


def test_every_sampled_token_knows_its_version(rollouts):
    turns = [
        replace(turn, versions=((n // 2, len(turn.sampled_ids)),)) for n, turn in enumerate(rollouts[0].turns)
    ]
    sample = rollout_sample(replace(rollouts[0], turns=tuple(turns)))
    lengths = [len(turn.sampled_ids) for turn in turns]
    assert sample.versions == ((0, lengths[0] + lengths[1]), (1, sum(lengths[2:])))


def test_a_stream_of_another_length_is_refused_by_name():
    with pytest.raises(RunError, match=r"'r1' has 1 ce_weights for 2 predicted tokens"):
        TrainingSample((1, 2, 3), (1, 2), ce_weights=(1.0,), rollout_id="r1")
    with pytest.raises(RunError, match=r"predicts tokens 0 to 2 of 3"):
        TrainingSample((1, 2, 3), (0, 2))


def test_hint_branches_without_a_teacher_are_refused(samples):
    trainer = Trainer(tiny_policy(), OptimizerSettings())
    with pytest.raises(RecipeError, match="give it `start`"):
        trainer.step(samples)


def sft_gradient(policy: Policy, imitated: list[TrainingSample]) -> dict[str, torch.Tensor]:
    """Of the mean negative log-prob of every imitated token, by loops."""
    logps = []
    for sample in imitated:
        all_logps = policy.model(torch.tensor([sample.ids])).logits[0].log_softmax(-1)
        logps += [all_logps[i - 1, sample.ids[i]] for i in sample.predicted]
    loss = -torch.stack(logps).mean()
    found = torch.autograd.grad(loss, list(policy.trainable.values()))
    return {"loss": loss.detach(), **dict(zip(policy.trainable, found, strict=True))}


def test_sft_is_the_mean_over_imitated_tokens_and_adds_to_the_other_terms(rollouts, samples):
    """Each term keeps its own denominator: losses of a joint step are those of steps of their own."""
    imitated = [sft_sample(rollout_sample(made)) for made in rollouts[:2]]
    want = sft_gradient(tiny_policy(), imitated)
    alone = step(tiny_policy(), imitated, rate=0.0)
    assert alone["ce_loss"] == pytest.approx(float(want["loss"]), rel=1e-5)
    assert alone["ce_tokens"] == sum(len(sample.predicted) for sample in imitated)
    norm = torch.stack([want[name].norm() for name in tiny_policy().trainable]).norm()
    assert alone["grad_norm"] == pytest.approx(float(norm), rel=1e-4)
    without = step(tiny_policy(), samples, rate=0.0)
    joint = step(tiny_policy(), [*samples, *imitated], rate=0.0)
    assert without["ce_loss"] == alone["rl_loss"] == 0.0
    for name, source in (("ce_loss", alone), ("rl_loss", without), ("kl_loss", without)):
        assert joint[name] == pytest.approx(source[name], rel=1e-5), name


def test_a_loaded_trainer_goes_on_bit_for_bit(samples, tmp_path: Path):
    feedback = FeedbackSettings(teacher="ema")
    policy = tiny_policy()
    start = policy.snapshot()
    whole = trainer_of(policy, feedback=feedback, start=start, rate=1e-3)
    whole.step(samples)
    whole.save(tmp_path)
    again = trainer_of(tiny_policy(seed=0), feedback=feedback, start=start, rate=1e-3)
    again.load(tmp_path)
    assert whole.step(samples) == again.step(samples) and again.taken == 2
    for name, parameter in whole.policy.trainable.items():
        assert torch.equal(parameter, again.policy.trainable[name])


def test_log_probs_come_in_the_order_of_the_samples_and_by_the_weights_asked_for(rollouts):
    policy = tiny_policy()
    trainer, start = trainer_of(policy), policy.snapshot()
    asked = [rollout_sample(made) for made in rollouts]
    with torch.no_grad():
        for parameter in policy.trainable.values():
            parameter.add_(0.05)
    for sample, then, now in zip(asked, trainer.logps(asked, start), trainer.logps(asked), strict=True):
        assert then == pytest.approx(sample.logps, abs=1e-4) and now != pytest.approx(then, abs=1e-3)
