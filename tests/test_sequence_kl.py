"""The divergence from the starting weights inside the advantage: a step's gradient, summed over every sequence that a
tiny model can write, is that of the divergence of whole sequences.

Sequences are of three sampled tokens out of three, after one prompt token. "agent" has a message of the environment
before their last token that depends on what was said; "stops" ends them at the first token 0.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import replace

import pytest
import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from woodshed.experience.compile import group_advantages
from woodshed.experience.samples import TrainingSample
from woodshed.learning import trainer
from woodshed.learning.loss_settings import FeedbackSettings, LossSettings
from woodshed.learning.policy import Policy
from woodshed.learning.step_inputs import StepInputs
from woodshed.learning.teacher import Teacher

VOCABULARY, PROMPT, COEF = 3, 2, 0.25
STOP = 0


def policies() -> tuple[Policy, dict[str, Tensor]]:
    """A policy that has moved away from its start, and the start."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=16,
        intermediate_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        initializer_range=0.6,
    )
    policy = Policy(LlamaForCausalLM(config), is_adapter=False)
    start = policy.snapshot()
    with torch.no_grad():
        for parameter in policy.trainable.values():
            parameter.add_(0.3 * torch.randn_like(parameter))
    return policy, start


def sequences(kind: str, length: int = 3) -> list[TrainingSample]:
    """Each as a row without log-probs."""
    made: dict[tuple[int, ...], TrainingSample] = {}
    for tokens in itertools.product(range(VOCABULARY), repeat=length):
        said = tokens[: tokens.index(STOP) + 1] if kind == "stops" and STOP in tokens else tokens
        ids, wanted = [PROMPT], []
        for n, token in enumerate(said):
            if kind == "agent" and n == 2:
                ids += [(said[0] + said[1]) % VOCABULARY, 1, said[0]]
            wanted.append(len(ids))
            ids.append(token)
        made[said] = TrainingSample(tuple(ids), tuple(wanted), rl_weights=(1.0,) * len(wanted))
    return list(made.values())


def log_probs(policy: Policy, rows: list[TrainingSample]) -> list[Tensor]:
    """Of each row's sampled tokens, by the model itself."""
    found = []
    for row in rows:
        logps = policy.model(torch.tensor([row.ids])).logits[0].double().log_softmax(-1)
        found.append(torch.stack([logps[i - 1, row.ids[i]] for i in row.predicted]))
    return found


def exact_gradient(policy: Policy, start: dict[str, Tensor], rows: list[TrainingSample]) -> dict[str, Tensor]:
    """Of KL(policy || start) over sequences, by autograd through the sum over all of them."""
    with torch.no_grad(), policy.using(start):
        before = torch.stack([logps.sum() for logps in log_probs(policy, rows)])
    now = torch.stack([logps.sum() for logps in log_probs(policy, rows)])
    assert float(now.exp().sum().detach()) == pytest.approx(1.0, abs=1e-5)  # nothing is missing
    kl = (now.exp() * (now - before)).sum()
    return dict(
        zip(
            policy.trainable,
            torch.autograd.grad(kl, list(policy.trainable.values()), allow_unused=True),
            strict=True,
        )
    )


def step_gradient(
    policy: Policy, start: dict[str, Tensor], rows: list[TrainingSample], forward, *, tokens: int = 1 << 20
) -> dict[str, Tensor]:
    """The product's: nothing but the divergence, as every attempt had the same reward."""
    feedback = FeedbackSettings(teacher="frozen")
    objective = LossSettings(kl_coef=COEF, estimator="mis", micro_batch_tokens=tokens)
    samples = [replace(row, rollout_id=str(n)) for n, row in enumerate(rows)]
    return forward(
        StepInputs(policy, Teacher(policy, start, feedback), samples, objective, feedback, 1.0, 1)
    )[0]


def relative_error(found: dict[str, Tensor], wanted: dict[str, Tensor], factor: float) -> float:
    gaps = [(found[n] / factor - g).norm() for n, g in wanted.items() if g is not None]
    sizes = [g.norm() for g in wanted.values() if g is not None]
    return float(torch.stack(gaps).norm() / torch.stack(sizes).norm())


@pytest.mark.parametrize("forward", [trainer.separate, trainer.branching])
@pytest.mark.parametrize("kind", ["plain", "agent", "stops"])
def test_every_pair_of_sequences_together_gives_the_gradient_of_the_sequences_divergence(kind, forward):
    """A sampler that gives each sequence the weight 1 makes the policy's probability its importance weight; so the sum
    over all pairs, a group each, is the expectation over groups of two whose first attempt is the policy's."""
    policy, start = policies()
    rows = [replace(row, logps=(0.0,) * len(row.predicted)) for row in sequences(kind)]
    assert len(rows) == {"plain": 27, "agent": 27, "stops": 15}[kind]
    pairs = [
        replace(row, group=number)
        for number, pair in enumerate(itertools.product(rows, repeat=2))
        for row in pair
    ]
    found = step_gradient(policy, start, pairs, forward)
    factor = (
        COEF * 0.5 / len(rows)
    )  # half, as each attempt is a part of its own baseline; a mean over attempts
    assert relative_error(found, exact_gradient(policy, start, rows), factor) < 1e-4


@pytest.mark.parametrize(("kind", "size"), [("plain", 2), ("stops", 3)])
def test_groups_as_often_as_the_policy_samples_them_give_it_too(kind, size):
    policy, start = policies()
    rows = sequences(kind, length=2)
    logps = [each.detach() for each in log_probs(policy, rows)]
    rows = [replace(row, logps=tuple(each.tolist())) for row, each in zip(rows, logps, strict=True)]
    chances = [float(each.sum().exp()) for each in logps]
    expected = {name: torch.zeros_like(value) for name, value in policy.trainable.items()}
    for group in itertools.product(range(len(rows)), repeat=size):
        found = step_gradient(policy, start, [rows[i] for i in group], trainer.separate, tokens=9)
        for name, value in found.items():
            expected[name] += math.prod(chances[i] for i in group) * value
    exact = exact_gradient(policy, start, rows)
    assert relative_error(expected, exact, COEF * (size - 1) / size) < 1e-4


def test_a_groups_divergence_is_no_other_groups_baseline():
    """Two groups in a step move the weights as each does alone."""
    policy, start = policies()
    rows = [replace(row, logps=(-1.0,) * len(row.predicted)) for row in sequences("stops")[::2]]
    half = len(rows) // 2
    whole = [replace(row, group=int(n >= half)) for n, row in enumerate(rows)]
    both = step_gradient(policy, start, whole, trainer.separate)
    alone = [step_gradient(policy, start, part, trainer.branching) for part in (rows[:half], rows[half:])]
    sizes = (half, len(rows) - half)
    for name, value in both.items():
        parts = [size * each[name] for size, each in zip(sizes, alone, strict=True)]
        want = torch.stack(parts).sum(0) / len(rows)
        assert torch.allclose(value, want, atol=1e-6)


def test_the_reward_less_the_divergence_is_one_number_less_its_groups_mean():
    """On attempts that the policy itself sampled: as if the environment had taken the divergence off the reward."""
    policy, start = policies()
    rows = sequences("agent")[::4]
    logps = [each.detach() for each in log_probs(policy, rows)]
    with torch.no_grad(), policy.using(start):
        before = torch.stack([each.sum() for each in log_probs(policy, rows)])
    rewards = torch.rand(len(rows), dtype=torch.float64)
    paid = rewards - COEF * (torch.stack([each.sum() for each in logps]) - before)

    def gradient(advantages: list[float], coef: float) -> dict[str, Tensor]:
        samples = [
            replace(row, logps=tuple(each.tolist()), advantages=(float(a),) * len(each), rollout_id=str(n))
            for n, (row, each, a) in enumerate(zip(rows, logps, advantages, strict=True))
        ]
        feedback = FeedbackSettings(teacher="frozen")
        objective = LossSettings(kl_coef=coef)
        return trainer.separate(
            StepInputs(policy, Teacher(policy, start, feedback), samples, objective, feedback, 1.0, 1)
        )[0]

    inside = gradient(group_advantages(rewards.tolist()), COEF)
    outside = gradient(group_advantages(paid.tolist()), 0.0)
    for name, value in outside.items():
        assert torch.allclose(inside[name], value, atol=1e-6)
