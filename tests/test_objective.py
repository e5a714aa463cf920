"""The losses of a whole step, by the settings of papers and of recipes, against loops over tokens in float64."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from tiny_training import compiled, feedback_of, four_attempts, hint_for, samples_of, tiny_policy
from torch import Tensor

from woodshed.experience.samples import TrainingSample, student_view, teacher_view
from woodshed.learning import packing, trainer
from woodshed.learning.grad_norms import GradNorms
from woodshed.learning.loss_settings import FeedbackSettings, LossSettings, TargetForm
from woodshed.learning.policy import Policy
from woodshed.learning.step_inputs import StepInputs
from woodshed.learning.teacher import Teacher
from woodshed.records import Rollout

TEMPERATURE = 0.7
MESSAGE_TOKENS = 160


@pytest.fixture(scope="module")
def rollouts(tmp_path_factory: pytest.TempPathFactory) -> list[Rollout]:
    return four_attempts(tmp_path_factory.mktemp("tasks"))


def moved(policy: Policy, by: float, seed: int) -> dict[str, Tensor]:
    torch.manual_seed(seed)
    return {name: value + by * torch.randn_like(value) for name, value in policy.snapshot().items()}


def work_of(
    samples: Sequence[TrainingSample], loss: LossSettings, feedback: FeedbackSettings
) -> tuple[StepInputs, Policy]:
    """A policy, its start and what sampled the attempts are three different things."""
    policy = tiny_policy()
    teacher = Teacher(policy, moved(policy, 0.15, seed=1), feedback)
    policy.load_weights(moved(policy, 0.1, seed=2))
    return StepInputs(policy, teacher, samples, loss, feedback, TEMPERATURE, MESSAGE_TOKENS), policy


def log_probs(policy: Policy, row: TrainingSample) -> Tensor:
    """(N, V) at a sample's predicted tokens, alone in its forward."""
    return (policy.logits(packing.pad([row]))[0].double() / TEMPERATURE).log_softmax(-1)


def at(logps_NV: Tensor, row: TrainingSample) -> Tensor:
    return torch.stack([logps_NV[n, row.ids[i]] for n, i in enumerate(row.predicted)])


def terms_of(form: TargetForm, student_V: Tensor, teacher_V: Tensor) -> Tensor:
    """The divergence at one token, from the definitions."""
    p, q = student_V.exp(), teacher_V.exp()
    if form.support != "full":
        ids = (p if form.support == "student" else q).topk(form.top_k).indices
        p, q = p[ids], q[ids]
        p, q = torch.cat([p, 1 - p.sum(0, True)]), torch.cat([q, 1 - q.sum(0, True)])
    if form.divergence == "reverse":
        terms = p * (p / q).log()
    elif form.divergence == "forward":
        terms = q * (q / p).log()
    else:
        mixed = form.beta * q + (1 - form.beta) * p
        terms = form.beta * q * (q / mixed).log() + (1 - form.beta) * p * (p / mixed).log()
    return terms.clamp(max=form.pointwise_clip or math.inf).sum()


def targeted_by_loops(work: StepInputs, policy: Policy) -> Tensor:
    form, turns, tokens = work.feedback.form, [], []
    for sample, branch in work.hinted:
        student = student_view(sample, branch)
        student_NV = log_probs(policy, student)
        with torch.no_grad(), policy.using(work.teacher.start):
            teacher_NV = log_probs(policy, teacher_view(sample, branch))
        logps = at(student_NV, student)
        found = []
        for n in range(len(student.predicted)):
            term = terms_of(form, student_NV[n], teacher_NV[n])
            if form.max_ratio is not None:
                ratio = (logps[n].detach() - student.logps[n]).exp()
                term = term * min(float(ratio), form.max_ratio)
            found += [term] if branch.weights[n] else []
        turns.append(torch.stack(found).mean())
        tokens += found
    if form.reduction == "token":
        return torch.stack(tokens).mean()
    return torch.stack(turns).sum() / max(len(turns), work.feedback.target_floor)


def policy_by_loops(work: StepInputs, policy: Policy, samples: Sequence[TrainingSample]) -> Tensor:
    settings, total = work.loss, torch.zeros((), dtype=torch.float64)
    scored = [at(log_probs(policy, row), row) for row in samples]
    with torch.no_grad(), policy.using(work.teacher.start):
        before = [float(at(log_probs(policy, row), row).sum()) for row in samples]
    sampled = [sum(row.logps) - start for row, start in zip(samples, before, strict=True)]
    for i, (row, logps) in enumerate(zip(samples, scored, strict=True)):
        k1 = float(logps.detach().sum()) - before[i]
        mean = (k1 + sum(sampled[:i] + sampled[i + 1 :])) / len(scored)
        advantage = row.advantages[0] - settings.kl_coef * (k1 - mean)
        for n in range(len(row.predicted)):
            ratio = math.exp(float(logps[n].detach()) - row.logps[n])
            weight = ratio if 0.5 <= ratio <= 5 or settings.estimator == "reinforce" else 0.0
            weight = min(weight, 2.0) if settings.estimator == "reinforce" else weight
            total = total - weight * advantage * logps[n]
    return settings.weight * total / (work.num_rollouts * MESSAGE_TOKENS)


def gradient_of(loss: Tensor, policy: Policy) -> dict[str, Tensor]:
    found = torch.autograd.grad(loss, list(policy.trainable.values()))
    return dict(zip(policy.trainable, found, strict=True))


def same_gradients(ours: dict[str, Tensor], loops: dict[str, Tensor]) -> None:
    largest = max(float(value.abs().max()) for value in loops.values())
    for name, value in loops.items():
        assert torch.allclose(ours[name], value, rtol=1e-3, atol=1e-4 * largest), name


@pytest.mark.parametrize("forward", [trainer.separate, trainer.branching])
@pytest.mark.parametrize(
    "given",
    [
        *(
            {"preset": name, "teacher": "frozen"}
            for name in ("composer", "sdpo", "sdpo-rich", "sdft", "opsd")
        ),
        {"teacher": "frozen", "target_floor": 1},
        {"teacher": "frozen", "divergence": "forward", "form": {"top_k": 5, "skip_first": 2}},
        {"teacher": "frozen", "divergence": "jensen-shannon", "form": {"beta": 0.2, "max_ratio": 1.1}},
    ],
)
def test_the_targeted_loss_and_its_gradient_are_those_of_loops(rollouts, given: dict[str, Any], forward):
    settings = feedback_of(**given)
    hints = [hint_for(rollouts[1], 0), hint_for(rollouts[3], 1), hint_for(rollouts[2], 0)]
    samples = samples_of(rollouts, [1.0, 0.0, 0.0, 1.0], hints, skip_first=settings.form.skip_first)
    branches = [branch for sample in samples for branch in sample.branches]
    assert len(branches) == 3 and len({len(branch.predicted) for branch in branches}) > 1
    work, policy = work_of(samples, LossSettings(weight=0.0, micro_batch_tokens=900), settings)
    _, gradient = forward(work)
    want = targeted_by_loops(work, policy)
    assert work.metrics.means()["kl_loss"] == pytest.approx(float(want.detach()), rel=1e-3, abs=1e-7)
    same_gradients(gradient, gradient_of(want, policy))


@pytest.mark.parametrize(
    "given",
    [
        {},
        {"kl_coef": 0.3},
        {"estimator": "icepop", "weight": 0.5},
        {"weight": 0.0},
    ],
)
def test_the_policy_gradient_is_that_of_loops(rollouts, given: dict[str, Any]):
    samples = samples_of(rollouts, [1.0, 0.0, 0.25, 0.5])
    loss = LossSettings.model_validate({"micro_batch_tokens": 900, **given})
    work, policy = work_of(samples, loss, FeedbackSettings(teacher="frozen"))
    gradient, _ = trainer.separate(work)
    want = policy_by_loops(work, policy, samples)
    assert work.metrics.means()["rl_loss"] == pytest.approx(float(want.detach()), rel=1e-3, abs=1e-7)
    same_gradients(gradient, gradient_of(want, policy))


def test_the_cap_follows_the_running_norm_of_the_policy_gradient():
    scale, settings = GradNorms(), feedback_of(weight=2.0, ratio=0.5)
    assert scale.factor(settings, otherwise=1.0) == 0.0  # nothing was measured
    norms, mean = [4.0, 1.0, 1.0, 8.0, 2.0, 1.0], 0.0
    for step, norm in enumerate(norms, 1):
        scale.observe(norm, 10.0)
        mean += (norm - mean) / min(step, 4)
        assert scale.factor(settings, otherwise=1.0) == pytest.approx(2.0 * min(1.0, 0.5 * mean / 20.0))
    assert mean != pytest.approx(norms[-1])
    scale.observe(0.0, 10.0)  # a step without a policy gradient says nothing about its size
    assert scale.factor(settings, otherwise=1.0) == pytest.approx(2.0 * 0.5 * mean / 20.0)


def test_an_attempt_without_a_sampled_token_is_not_trained_on(rollouts):
    silent = replace(rollouts[1], turns=(replace(rollouts[1].turns[0], sampled_ids=(), logps=()),))
    found = compiled([rollouts[0], silent, rollouts[3]], [1.0, 0.0, 0.0], [hint_for(silent, 0)])
    assert [sample.rollout_id for sample in found.samples] == [rollouts[0].id, rollouts[3].id]
    assert found.skipped_hints == {"attempt not trainable": 1}
    half = replace(rollouts[1], turns=(silent.turns[0], *rollouts[1].turns[1:]))
    found = compiled([rollouts[0], half], [1.0, 0.0], [hint_for(half, 0)])
    assert not any(sample.branches for sample in found.samples)
    assert found.skipped_hints == {"no token was sampled": 1}
