"""The policy gradient against loops, closed forms and an enumerable toy, in float64."""

from __future__ import annotations

import math
import random

import pytest
import torch
from torch import Tensor

from woodshed.experience.compile import group_advantages
from woodshed.learning import losses


def gradient(tensor: Tensor) -> Tensor:
    """What backward left on a leaf."""
    assert tensor.grad is not None
    return tensor.grad


def reinforce(logp: Tensor, sampler: Tensor, advantage: Tensor, mask: Tensor, denominator: float, **options):
    weight = losses.importance_weights(logp, sampler, mask, form=losses.Importance(**options))
    return losses.policy_gradient(logp, weight, advantage, mask, denominator=denominator)


@pytest.fixture
def batch() -> dict[str, Tensor]:
    torch.manual_seed(1)
    return {
        "logp": torch.randn(3, 4, dtype=torch.float64).clamp(max=0).requires_grad_(True),
        "sampler": torch.randn(3, 4, dtype=torch.float64).clamp(max=0),
        "advantage": torch.randn(3, 4, dtype=torch.float64),
        "mask": torch.tensor([[1.0] * 4, [1, 1, 0, 0], [1, 0, 0, 0]], dtype=torch.float64),
    }


def expected(batch: dict[str, Tensor], weight) -> Tensor:
    """d loss / d logp, token by token: -weight(b, n) x advantage / 12 where the mask is 1."""
    want = torch.zeros(3, 4, dtype=torch.float64)
    for b in range(3):
        for n in range(4):
            if batch["mask"][b, n]:
                want[b, n] = -weight(b, n) * float(batch["advantage"][b, n]) / 12.0
    return want


def ratio(batch: dict[str, Tensor], b: int, n: int) -> float:
    return math.exp(float(batch["logp"].detach()[b, n] - batch["sampler"][b, n]))


def sequence_ratio(batch: dict[str, Tensor], b: int, _n: int) -> float:
    product = 1.0
    for n in range(4):
        product *= ratio(batch, b, n) if batch["mask"][b, n] else 1.0
    return product


def between(low: float, value: float, high: float) -> float:
    return min(high, max(low, value))


@pytest.mark.parametrize(
    ("options", "weight"),
    [
        ({}, lambda x, b, n: min(2.0, ratio(x, b, n))),  # truncated importance sampling
        (
            {"min_ratio": 0.8, "max_ratio": 1.28},  # CISPO, equation 4 of arXiv 2506.13585
            lambda x, b, n: between(0.8, ratio(x, b, n), 1.28),
        ),
        (
            {"outside": "mask", "min_ratio": 0.5, "max_ratio": 5.0},  # IcePop
            lambda x, b, n: ratio(x, b, n) if 0.5 <= ratio(x, b, n) <= 5.0 else 0.0,
        ),
        ({"level": "sequence"}, lambda x, b, n: min(2.0, sequence_ratio(x, b, n))),
        (
            {"level": "sequence", "outside": "mask", "min_ratio": 0.5},
            lambda x, b, n: sequence_ratio(x, b, n) if 0.5 <= sequence_ratio(x, b, n) <= 2.0 else 0.0,
        ),
    ],
    ids=["tis", "cispo", "icepop", "sequence-tis", "sequence-mis"],
)
def test_importance_weights_give_the_gradient_of_a_loop_over_tokens(batch, options, weight):
    reinforce(batch["logp"], batch["sampler"], batch["advantage"], batch["mask"], 12.0, **options).backward()
    want = expected(batch, lambda b, n: weight(batch, b, n))
    assert torch.allclose(gradient(batch["logp"]), want, atol=1e-12)


def test_a_missing_log_prob_is_never_masked_away(batch):
    """Engines return NaN at times (trl#6266); comparing with NaN is false, so a careless mask would hide it."""
    batch["sampler"][0, 0] = float("nan")
    for options in ({}, {"outside": "mask"}, {"level": "sequence", "outside": "mask"}):
        loss = reinforce(batch["logp"], batch["sampler"], batch["advantage"], batch["mask"], 12.0, **options)
        assert loss.isnan()


def gspo_by_hand(batch: dict[str, Tensor], clip: tuple[float, float]) -> Tensor:
    """Equation 5 of arXiv 2507.18071, with one advantage a sequence."""
    total = torch.zeros((), dtype=torch.float64)
    for b in range(3):
        length = int(batch["mask"][b].sum())
        s = ((batch["logp"][b, :length] - batch["sampler"][b, :length]).sum() / length).exp()
        a = batch["advantage"][b, 0]
        total = total - torch.minimum(s * a, s.clamp(1 - clip[0], 1 + clip[1]) * a)
    return total / 3


@pytest.mark.parametrize("clip", [(0.2, 0.3), (3e-4, 4e-4), (10.0, 10.0)])
def test_gspo_equals_its_sequence_formula(batch, clip):
    batch["advantage"] = batch["advantage"][:, :1].expand(3, 4)
    loss = losses.gspo(
        batch["logp"], batch["sampler"], batch["advantage"], batch["mask"], num_sequences=3.0, clip=clip
    )
    loss.backward()
    got = gradient(batch["logp"]).clone()
    batch["logp"].grad = None
    want = gspo_by_hand(batch, clip)
    want.backward()
    assert torch.allclose(loss, want, atol=1e-12)
    assert torch.allclose(got, gradient(batch["logp"]), atol=1e-12)


def test_policy_gradient_of_a_token_does_not_depend_on_its_sequence_length_or_the_micro_batch_split():
    logp = torch.full((2, 3), -1.0, dtype=torch.float64, requires_grad=True)
    mask = torch.tensor([[1.0, 1, 1], [1, 0, 0]])
    one = torch.ones(2, 3, dtype=torch.float64)
    reinforce(logp, logp.detach(), one, mask, 8.0).backward()
    assert torch.equal(gradient(logp), -mask.double() / 8)
    split = torch.full((2, 3), -1.0, dtype=torch.float64, requires_grad=True)
    for b in range(2):
        row = slice(b, b + 1)
        reinforce(split[row], split[row].detach(), one[row], mask[row], 8.0).backward()
    assert torch.equal(gradient(split), gradient(logp))


def test_advantages_are_shift_invariant_and_not_scaled_by_the_deviation():
    rewards = [0.1, 0.1, 0.1, 0.7]
    shifted = group_advantages([reward + 3.0 for reward in rewards])
    assert group_advantages(rewards) == pytest.approx(shifted)
    assert shifted == pytest.approx([-0.15, -0.15, -0.15, 0.45])
    assert max(map(abs, group_advantages([1.0, 1.0, 1.0, 1.0 - 1e-6]))) < 1e-6


def test_advantages_of_rewards_that_binary_fractions_cannot_hold_stay_small():
    """A deviation computed from rounding residue once gave advantages of 7000 (NVIDIA-NeMo/RL#4161)."""
    for reward in (0.1, 1 / 3, 0.7):
        assert group_advantages([reward] * 7) == [0.0] * 7
    rng = random.Random(0)
    for size in range(1, 40):
        rewards = [rng.random() for _ in range(size)]
        by_torch = torch.tensor(rewards, dtype=torch.float64)
        want = (by_torch - by_torch.mean()).tolist()
        assert group_advantages(rewards) == pytest.approx(want, abs=1e-15)


def test_k1_as_a_loss_has_no_gradient_in_expectation():
    """Enumerated exactly over a five-token vocabulary, no sampling."""
    torch.manual_seed(2)
    logits = torch.randn(1, 5, dtype=torch.float64, requires_grad=True)
    reference = torch.randn(1, 5, dtype=torch.float64).log_softmax(-1)
    weight = logits.detach().softmax(-1)  # every token once, as often as it would be sampled
    (weight * (logits.log_softmax(-1) - reference)).sum().backward()
    assert gradient(logits).abs().max() < 1e-12


def test_k1_of_a_sequence_is_taken_from_its_counted_tokens_and_less_the_mean_of_its_group():
    logp = torch.tensor([[-1.0, -2, -9], [-3, -1, -1]], requires_grad=True)
    start = torch.tensor([[-2.0, -2.5, 0], [-1, -1, -4]])
    mask = torch.tensor([[1.0, 1, 0], [1, 0, 1]])
    above = losses.sequence_k1(logp, start, mask, torch.tensor([1.0, 0.0]), torch.tensor([2, 1]))
    assert above.tolist() == [1.5 - (1.5 + 1.0) / 2, 0.0] and not above.requires_grad
