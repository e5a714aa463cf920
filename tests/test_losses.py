"""Losses against closed forms, finite differences and slow references, in float64."""

from __future__ import annotations

import itertools

import pytest
import torch

from woodshed.training import losses

V, N = 7, 5


def gradient(tensor: torch.Tensor) -> torch.Tensor:
    """What backward left on a leaf."""
    assert tensor.grad is not None
    return tensor.grad


@pytest.fixture
def logits():
    torch.manual_seed(0)
    return torch.randn(N, V, dtype=torch.float64, requires_grad=True), torch.randn(N, V, dtype=torch.float64)


def test_reverse_kl_gradient_is_probability_times_centred_log_ratio(logits):
    student, teacher = logits
    losses.divergence(student.log_softmax(-1), teacher.log_softmax(-1), "reverse").sum().backward()
    p, log_ratio = student.softmax(-1), student.log_softmax(-1) - teacher.log_softmax(-1)
    kl = (p * log_ratio).sum(-1, keepdim=True)
    assert torch.allclose(student.grad, (p * (log_ratio - kl)).detach(), atol=1e-12)


def test_forward_kl_gradient_is_student_minus_teacher(logits):
    student, teacher = logits
    losses.divergence(student.log_softmax(-1), teacher.log_softmax(-1), "forward").sum().backward()
    assert torch.allclose(student.grad, (student.softmax(-1) - teacher.softmax(-1)).detach(), atol=1e-12)


@pytest.mark.parametrize("kind", ["reverse", "forward", "jensen-shannon"])
def test_divergence_gradients_match_finite_differences(logits, kind):
    student, teacher = logits

    def loss(x):
        return losses.divergence(x.log_softmax(-1), teacher.log_softmax(-1), kind).sum()

    assert torch.autograd.gradcheck(loss, student, atol=1e-8)


@pytest.mark.parametrize("kind", ["reverse", "forward", "jensen-shannon"])
def test_equal_distributions_have_exactly_zero_divergence_and_gradient(logits, kind):
    student, _ = logits
    value = losses.divergence(student.log_softmax(-1), student.log_softmax(-1).detach(), kind)
    value.sum().backward()
    assert value.abs().max() < 1e-15 and student.grad.abs().max() < 1e-15


def test_jensen_shannon_is_symmetric_and_below_log_two(logits):
    a, b = (x.detach().log_softmax(-1) * 30 for x in logits)
    a, b = a.log_softmax(-1), b.log_softmax(-1)
    there, back = losses.divergence(a, b, "jensen-shannon"), losses.divergence(b, a, "jensen-shannon")
    assert torch.allclose(there, back, atol=1e-12) and (there <= torch.tensor(2.0).log() + 1e-12).all()


@pytest.mark.parametrize("kind", ["reverse", "forward", "jensen-shannon"])
def test_top_k_with_tail_grows_with_k_up_to_the_full_divergence(logits, kind):
    student, teacher = (x.detach() for x in logits)
    values = [losses.divergence(*losses.keep_top(student, teacher, k), kind) for k in range(1, V + 1)]
    for smaller, larger in itertools.pairwise(values):
        assert (smaller <= larger + 1e-12).all()
    full = losses.divergence(student.log_softmax(-1), teacher.log_softmax(-1), kind)
    assert torch.allclose(values[-1], full, atol=1e-12)


def test_the_kept_buckets_are_distributions(logits):
    student, teacher = logits
    for kept in losses.keep_top(student, teacher, 3):
        assert kept.shape == (N, 4)
        assert torch.allclose(kept.exp().sum(-1), torch.ones(N, dtype=torch.float64))


def test_the_teacher_takes_no_gradient(logits):
    student, teacher = logits
    teacher.requires_grad_(True)
    losses.divergence(*losses.keep_top(student, teacher, 3), "reverse").sum().backward()
    assert teacher.grad is None or not teacher.grad.any()


def test_policy_gradient_equals_a_loop_over_tokens():
    torch.manual_seed(1)
    logp, sampler = (
        torch.randn(3, 4, dtype=torch.float64).clamp(max=0),
        torch.randn(3, 4).double().clamp(max=0),
    )
    advantage, mask = (
        torch.randn(3, 4, dtype=torch.float64),
        torch.tensor([[1.0] * 4, [1, 1, 0, 0], [1, 0, 0, 0]]),
    )
    got = losses.policy_gradient(logp, sampler, advantage, mask, denominator=12.0, max_ratio=2.0)
    want = 0.0
    for b in range(3):
        for n in range(4):
            if mask[b, n]:
                ratio = min(2.0, float((logp[b, n] - sampler[b, n]).exp()))
                want -= ratio * float(advantage[b, n] * logp[b, n]) / 12.0
    assert float(got) == pytest.approx(want, abs=1e-12)


def test_policy_gradient_of_a_token_does_not_depend_on_its_sequence_length_or_the_micro_batch_split():
    logp = torch.full((2, 3), -1.0, dtype=torch.float64, requires_grad=True)
    mask = torch.tensor([[1.0, 1, 1], [1, 0, 0]])
    one = torch.ones(2, 3, dtype=torch.float64)
    losses.policy_gradient(logp, logp.detach(), one, mask, denominator=8.0, max_ratio=2.0).backward()
    assert torch.equal(gradient(logp), -mask.double() / 8)
    split = torch.full((2, 3), -1.0, dtype=torch.float64, requires_grad=True)
    for b in range(2):
        row = slice(b, b + 1)
        losses.policy_gradient(
            split[row], split[row].detach(), one[row], mask[row], denominator=8.0, max_ratio=2.0
        ).backward()
    assert torch.equal(gradient(split), gradient(logp))


def test_advantages_are_shift_invariant_and_not_scaled_by_the_deviation():
    rewards = torch.tensor([0.1, 0.1, 0.1, 0.7], dtype=torch.float64)
    assert torch.allclose(losses.group_advantages(rewards), losses.group_advantages(rewards + 3.0))
    tiny = torch.tensor([1.0, 1.0, 1.0, 1.0 - 1e-6], dtype=torch.float64)
    assert losses.group_advantages(tiny).abs().max() < 1e-6


def test_k1_inside_the_advantage_has_the_gradient_of_the_kl_and_k1_as_a_loss_has_none():
    """Enumerated exactly over a five-token vocabulary, no sampling."""
    torch.manual_seed(2)
    logits = torch.randn(1, 5, dtype=torch.float64, requires_grad=True)
    reference = torch.randn(1, 5, dtype=torch.float64).log_softmax(-1)
    (losses.divergence(logits.log_softmax(-1), reference, "reverse")).sum().backward()
    exact = gradient(logits).clone()

    logp = logits.log_softmax(-1)
    advantage = -losses.k1_penalty(logp, reference)
    weight = logp.exp().detach()  # every token once, as often as it would be sampled
    logits.grad = None
    losses.policy_gradient(logp, logp.detach(), advantage, weight, denominator=1.0, max_ratio=2.0).backward()
    assert torch.allclose(gradient(logits), exact, atol=1e-12)

    logits.grad = None
    (weight * (logits.log_softmax(-1) - reference)).sum().backward()
    assert gradient(logits).abs().max() < 1e-12


def test_targeted_kl_weighs_turns_alike_and_fades_below_its_floor():
    divergence = torch.tensor([[2.0, 2.0, 2.0, 2.0], [4.0, 9.0, 9.0, 9.0]])
    mask = torch.tensor([[1.0, 1, 1, 1], [1, 0, 0, 0]])
    assert float(losses.targeted_kl(divergence, mask, num_targets=2, floor=1)) == pytest.approx((2 + 4) / 2)
    assert float(losses.targeted_kl(divergence, mask, num_targets=2, floor=16)) == pytest.approx(6 / 16)
