"""Divergences against closed forms, slow references and each paper's formula, in float64."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from torch import Tensor

from woodshed.learning import divergences
from woodshed.learning.loss_settings import PRESETS, FeedbackSettings
from woodshed.records import RecipeError
from woodshed.settings import validate

V, N = 7, 5
KINDS = ["reverse", "forward", "jensen-shannon"]


def gradient(tensor: Tensor) -> Tensor:
    assert tensor.grad is not None
    return tensor.grad


@pytest.fixture
def logits() -> tuple[Tensor, Tensor]:
    torch.manual_seed(0)
    return torch.randn(N, V, dtype=torch.float64, requires_grad=True), torch.randn(N, V, dtype=torch.float64)


def centred(p: Tensor, score: Tensor) -> Tensor:
    """d/dlogits of a sum over v of f(p_v) with f' = score: p x (score - its mean under p)."""
    return p * (score - (p * score).sum(-1, keepdim=True))


def closed_form(student: Tensor, teacher: Tensor, kind: str, beta: float) -> Tensor:
    """The gradient with respect to the student's logits."""
    p, q = student.softmax(-1).detach(), teacher.softmax(-1)
    if kind == "reverse":
        return centred(p, p.log() - q.log())
    if kind == "forward":
        return p - q
    mixture = beta * q + (1 - beta) * p
    return (1 - beta) * centred(p, p.log() - mixture.log())  # what the mixture adds cancels


@pytest.mark.parametrize(("kind", "beta"), [*[(k, 0.5) for k in KINDS], ("jensen-shannon", 0.1)])
def test_gradients_equal_their_closed_form(logits, kind, beta):
    student, teacher = logits
    value = divergences.divergence(student.log_softmax(-1), teacher.log_softmax(-1), kind, beta=beta)
    value.sum().backward()
    assert (gradient(student) - closed_form(student, teacher, kind, beta)).abs().max() < 1e-10


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("support", ["student", "teacher"])
def test_gradients_through_kept_ids_match_finite_differences(logits, kind, support):
    student, teacher = logits

    def loss(x):
        pair = divergences.truncate_support(x, teacher, support, 3)
        return divergences.divergence(*pair, kind, beta=0.3, clip=None).sum()

    assert torch.autograd.gradcheck(loss, student, atol=1e-8)


def test_only_the_forward_divergence_moves_a_student_that_is_sure(doubt=1e-6):
    """Two ids, p = (1 - doubt, doubt) and q the other way around: gradients in the first logit."""
    p = torch.tensor([1 - doubt, doubt], dtype=torch.float64)
    student, teacher = p.log().requires_grad_(), p.flip(0).log()
    gradients = {}
    for kind in ("reverse", "forward", "jensen-shannon"):
        loss = divergences.divergence(student.log_softmax(-1), teacher, kind)
        gradients[kind] = float(torch.autograd.grad(loss, student)[0][0])
    assert gradients["forward"] == pytest.approx(1 - 2 * doubt, rel=1e-9)
    reverse = 2 * math.log((1 - doubt) / doubt) * doubt * (1 - doubt)
    assert gradients["reverse"] == pytest.approx(reverse, rel=1e-6) and reverse < 1e-4
    assert abs(gradients["jensen-shannon"]) < 1e-4


@pytest.mark.parametrize("kind", KINDS)
def test_equal_distributions_have_no_divergence_and_no_gradient(logits, kind):
    student, _ = logits
    value = divergences.divergence(student.log_softmax(-1), student.log_softmax(-1).detach(), kind)
    value.sum().backward()
    assert value.abs().max() < 1e-15 and gradient(student).abs().max() < 1e-15


def test_jensen_shannon_is_symmetric_below_log_two_and_tends_to_both_kls(logits):
    a, b = ((x.detach() * 3).log_softmax(-1) for x in logits)

    def jsd(x: Tensor, y: Tensor, beta: float = 0.5) -> Tensor:
        return divergences.divergence(x, y, "jensen-shannon", beta=beta)

    assert torch.allclose(jsd(a, b), jsd(b, a), atol=1e-12) and (jsd(a, b) <= math.log(2)).all()
    ends: list[tuple[str, float]] = [("forward", 1e-6), ("reverse", 1 - 1e-6)]
    for kind, beta in ends:
        scale = beta * (1 - beta)
        assert torch.allclose(jsd(a, b, beta) / scale, divergences.divergence(a, b, kind), rtol=1e-3)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("support", ["student", "teacher"])
def test_top_k_with_tail_grows_with_k_up_to_the_full_divergence(logits, kind, support):
    student, teacher = (x.detach() for x in logits)
    values = [
        divergences.divergence(*divergences.truncate_support(student, teacher, support, k), kind)
        for k in range(1, V + 1)
    ]
    for smaller, larger in itertools.pairwise(values):
        assert (smaller <= larger + 1e-12).all()
    full = divergences.divergence(*divergences.truncate_support(student, teacher, "full", 1), kind)
    assert torch.allclose(values[-1], full, atol=1e-12)


def test_the_kept_ids_are_distributions_over_the_same_ids(logits):
    student, teacher = (x.detach() for x in logits)
    supports: list[divergences.Support] = ["student", "teacher"]
    for support in supports:
        for kept in divergences.truncate_support(student, teacher, support, 3):
            assert kept.shape == (N, 4)
            assert torch.allclose(kept.exp().sum(-1), torch.ones(N, dtype=torch.float64))
    of_teacher = divergences.truncate_support(student, teacher, "teacher", 3)[1][:, :3]
    assert torch.equal(of_teacher, teacher.log_softmax(-1).topk(3).values)


def test_the_teacher_takes_no_gradient(logits):
    student, teacher = logits
    teacher.requires_grad_(True)
    supports: list[divergences.Support] = ["student", "teacher", "full"]
    for support in supports:
        divergences.divergence(
            *divergences.truncate_support(student, teacher, support, 3), "jensen-shannon"
        ).sum().backward()
    assert teacher.grad is None or not teacher.grad.any()


def test_targeted_mean_weighs_turns_alike_and_fades_below_its_floor():
    divergence = torch.tensor([[2.0, 2.0, 2.0, 2.0], [4.0, 9.0, 9.0, 9.0]])
    mask = torch.tensor([[1.0, 1, 1, 1], [1, 0, 0, 0]])

    def mean(reduction, floor=1):
        return float(
            divergences.targeted_mean(
                divergence, mask, reduction=reduction, num_targets=2, num_tokens=5, floor=floor
            )
        )

    assert mean("turn") == pytest.approx((2 + 4) / 2)
    assert mean("turn", floor=16) == pytest.approx(6 / 16)
    assert mean("token", floor=16) == pytest.approx((8 + 4) / 5)


# --- presets ------------------------------------------------------------------------------------------------------


def kl(p: list[float], q: list[float]) -> list[float]:
    return [a * math.log(a / b) for a, b in zip(p, q, strict=True)]


def top(student: list[float], teacher: list[float], k: int) -> tuple[list[float], list[float]]:
    """The student's k likeliest ids and one bucket for the rest."""
    ids = sorted(range(len(student)), key=lambda i: -student[i])[:k]
    return tuple([p[i] for i in ids] + [1.0 - sum(p[i] for i in ids)] for p in (student, teacher))  # type: ignore


def formula(name: str, student: list[float], teacher: list[float]) -> float:
    """One token's loss before importance weights, as each paper or its code writes it down."""
    if name == "composer":
        return sum(kl(*top(student, teacher, 64)))
    if name == "sdpo":
        p, q = top(student, teacher, 100)
        m = [(a + b) / 2 for a, b in zip(p, q, strict=True)]
        return 0.5 * sum(kl(q, m)) + 0.5 * sum(kl(p, m))
    if name == "sdpo-rich":
        return sum(kl(*top(student, teacher, 20)))
    if name == "sdft":
        return sum(kl(teacher, student))
    return sum(min(term, 0.05) for term in kl(teacher, student))  # opsd


@pytest.mark.parametrize("name", PRESETS)
def test_a_preset_reproduces_its_reference_formula(name):
    torch.manual_seed(4)
    student, teacher = (torch.randn(6, 130, dtype=torch.float64) * 2 for _ in range(2))
    form = FeedbackSettings(preset=name).form
    pair = divergences.truncate_support(student, teacher, form.support, form.top_k)
    got = divergences.divergence(*pair, form.divergence, beta=form.beta, clip=form.pointwise_clip)
    want = [
        formula(name, p, q)
        for p, q in zip(student.softmax(-1).tolist(), teacher.softmax(-1).tolist(), strict=True)
    ]
    assert got.tolist() == pytest.approx(want, abs=1e-10)


def test_presets_set_what_was_published():
    def values(name: str, *fields: str) -> list[object]:
        return [getattr(FeedbackSettings.model_validate({"preset": name}).form, field) for field in fields]

    guards = ("teacher", "teacher_rate", "max_ratio", "skip_first", "pointwise_clip", "reduction", "scope")
    assert values("composer", *guards) == ["ema", 0.05, None, 0, None, "turn", "turn"]
    assert values("sdpo", *guards) == ["ema", 0.05, 2.0, 0, None, "token", "turn"]
    assert values("sdpo-rich", *guards) == ["ema", 0.01, 2.0, 0, None, "token", "turn"]
    assert values("sdft", *guards) == ["ema", 0.01, None, 3, None, "token", "rollout"]
    assert values("opsd", *guards) == ["frozen", 0.05, None, 0, 0.05, "token", "rollout"]


def test_the_default_preset_is_the_defaults_and_a_given_field_wins():
    assert FeedbackSettings() == FeedbackSettings(preset="composer")
    chosen = FeedbackSettings(preset="sdpo", teacher_rate=0.5)
    assert (chosen.form.teacher_rate, chosen.form.top_k, chosen.divergence) == (0.5, 100, "jensen-shannon")
    supports = [FeedbackSettings(preset=name, divergence="forward").form.support for name in PRESETS]
    assert supports == ["teacher", "teacher", "teacher", "full", "full"]
    again = validate(FeedbackSettings, chosen.model_dump(mode="json", exclude_none=True))
    assert again == chosen
    with pytest.raises(RecipeError, match="preset"):
        validate(FeedbackSettings, {"preset": "sdop"})
