"""One optimizer step: policy gradient on whole rollouts plus a targeted divergence on hinted turns.

    loss = RL(rollouts) + weight x D(policy(turn) || teacher(turn after the hint))

The two gradients are computed apart, because the second may never outgrow the first: its norm is cut to `ratio`
times the running norm of the policy gradient (docs/decisions.md). Both have their own constant denominators.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor

from woodshed.records import Lesson, RecipeError
from woodshed.settings import Settings
from woodshed.training import losses, packing
from woodshed.training.losses import Divergence
from woodshed.training.packing import Batch
from woodshed.training.policy import Policy, token_logps


class OptimizerSettings(Settings):
    """AdamW (arXiv 1711.05101) and what surrounds it."""

    learning_rate: float = 2e-4
    """Peak learning rate; 2e-4 suits a rank-8 adapter, 3e-6 full weights."""
    warmup_steps: int = 2
    """Steps of linear rise to the peak; step s of them uses s/warmup_steps of it."""
    decay_share: float = 0.0
    """Last share of the steps over which the rate falls linearly to zero."""
    betas: tuple[float, float] = (0.9, 0.95)
    """Decay of first and second moment."""
    weight_decay: float = 0.0
    """Decoupled weight decay."""
    max_grad_norm: float = 1.0
    """The joint gradient is cut to this norm."""


class FeedbackSettings(Settings):
    """The targeted divergence on hinted turns."""

    weight: float = 1.0
    """Factor on the targeted divergence before its cap; 0 is RL alone."""
    ratio: float = 1.0
    """Its gradient norm is at most this times the running norm of the policy gradient."""
    divergence: Divergence = "reverse"
    """reverse: KL(student || teacher); forward; or jensen-shannon."""
    top_k: int = 64
    """Ids kept of the student's distribution; the rest is one bucket."""
    teacher: Literal["frozen", "live"] = "frozen"
    """Teacher weights: as they were at the start of RL, or the policy's own (no gradient through them)."""
    target_floor: int = 16
    """The divergence is averaged over at least this many targets, so that it fades as faults become rare."""
    max_targets: int = 96
    """Hinted turns used in one step at most; more are sampled down evenly."""
    detectors: tuple[str, ...] = ()
    """Detectors whose hints are trained on; empty means all. All are recorded either way."""
    placement: Literal["system", "user"] = "system"
    """Whose message the hint is."""


class ObjectiveSettings(Settings):
    """The policy-gradient part."""

    max_ratio: float = 2.0
    """Importance ratio trainer/sampler is cut here."""
    kl_coef: float = 0.0
    """Weight of the k1 divergence from the starting weights, inside the advantage."""
    micro_batch_tokens: int = 2048
    """Positions in one forward-backward, padding included."""


@dataclass
class GradientScale:
    """Running norm of the policy gradient, over steps that had one."""

    rl_norm: float = 0.0
    steps: int = 0

    def observe(self, norm: float) -> None:
        if norm > 0.0:
            self.steps += 1
            self.rl_norm += (norm - self.rl_norm) / min(self.steps, 4)

    def cap(self, ratio: float, otherwise: float) -> float:
        """Largest norm allowed to the targeted gradient; `otherwise` until the first policy gradient is seen."""
        return ratio * self.rl_norm if self.steps else otherwise


@dataclass
class Metrics:
    """Sums over micro-batches that become one metrics line, and what every targeted turn taught."""

    values: dict[str, float] = field(default_factory=dict)
    lessons: list[Lesson] = field(default_factory=list)

    def add(self, **values: float) -> None:
        for name, value in values.items():
            self.values[name] = self.values.get(name, 0.0) + value

    def peak(self, **values: float) -> None:
        for name, value in values.items():
            self.values[name] = max(self.values.get(name, 0.0), value)


def make_optimizer(policy: Policy, settings: OptimizerSettings) -> torch.optim.AdamW:
    return torch.optim.AdamW(
        policy.trainable.values(),
        lr=settings.learning_rate,
        betas=settings.betas,
        weight_decay=settings.weight_decay,
    )


def learning_rate(settings: OptimizerSettings, step: int, steps: int) -> float:
    """Rate of step `step` (from 0) out of `steps`: linear rise, plateau, linear fall over the last share."""
    rise = min(1.0, (step + 1) / max(settings.warmup_steps, 1))
    falling = settings.decay_share * steps
    fall = min(1.0, (steps - step) / falling) if falling else 1.0
    return settings.learning_rate * rise * fall


def update(
    policy: Policy,
    optimizer: torch.optim.Optimizer,
    batch: Batch,
    *,
    scale: GradientScale,
    start_weights: Mapping[str, Tensor],
    learning_rate: float,
    message_tokens: int,
    temperature: float,
    objective: ObjectiveSettings,
    feedback: FeedbackSettings,
    max_grad_norm: float,
) -> dict[str, Any]:
    """Take one optimizer step and say what it did: metrics, and under "lessons" a `Lesson` per targeted turn.

    Args:
        start_weights: trainable weights at the start of RL: the frozen teacher and the k1 reference.
        message_tokens: longest message a turn may have; with the number of attempts it makes the constant denominator.

    Raises:
        RecipeError: the gradient is not finite (the learning rate is too high); weights are left as they were.
    """
    metrics = Metrics()
    optimizer.zero_grad(set_to_none=True)
    denominator = float(max(batch.num_rollouts, 1) * message_tokens)
    for rows in packing.row_batches(batch.rows, objective.micro_batch_tokens):
        _policy_gradient_backward(policy, rows, denominator, temperature, objective, start_weights, metrics)
    rl_gradient = _take_gradient(policy)
    rl_norm = _norm(rl_gradient)
    scale.observe(rl_norm)

    targets = batch.targets if feedback.weight else ()
    teacher_weights = start_weights if feedback.teacher == "frozen" else None
    for chunk in packing.target_batches(targets, objective.micro_batch_tokens):
        _targeted_backward(policy, chunk, len(targets), temperature, feedback, teacher_weights, metrics)
    kl_gradient = _take_gradient(policy)
    kl_norm = feedback.weight * _norm(kl_gradient)
    cap = scale.cap(feedback.ratio, otherwise=max_grad_norm)
    kl_factor = feedback.weight * (min(1.0, cap / kl_norm) if kl_norm else 0.0)

    for name, parameter in policy.trainable.items():
        parameter.grad = rl_gradient[name] + kl_factor * kl_gradient[name]
    norm = float(torch.nn.utils.clip_grad_norm_(policy.trainable.values(), max_grad_norm))
    if not math.isfinite(norm):
        optimizer.zero_grad(set_to_none=True)
        raise RecipeError(
            f"the gradient is {norm} (policy gradient {rl_norm}, targeted {kl_norm}); no step was taken. "
            "Lower optimizer.learning_rate or look at the last rollouts for broken log-probs"
        )
    if batch.rows or targets:  # without any signal, momentum alone must not move the weights
        for group in optimizer.param_groups:
            group["lr"] = learning_rate
        optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    return {
        **_means(metrics.values),
        "rl_grad_norm": rl_norm,
        "kl_grad_norm": kl_norm,
        "kl_factor": kl_factor,
        "grad_norm": norm,
        "learning_rate": learning_rate,
        "trained_rollouts": len(batch.rows),
        "targets": len(targets),
        "teacher_tokens": sum(len(target.teacher.ids) for target in targets),
        "lessons": metrics.lessons,
    }


def _policy_gradient_backward(
    policy: Policy,
    rows: list[packing.Row],
    denominator: float,
    temperature: float,
    objective: ObjectiveSettings,
    start_weights: Mapping[str, Tensor],
    metrics: Metrics,
) -> None:
    padded = packing.pad(rows, policy.device)
    advantage_BN = padded.advantage_BN
    logits_BNV = policy.logits(padded)
    logp_BN = token_logps(logits_BNV, padded.tokens_BN, temperature)
    if objective.kl_coef:
        with torch.no_grad(), policy.using(start_weights):
            logp_start_BN = token_logps(policy.logits(padded), padded.tokens_BN, temperature)
        k1_BN = losses.k1_penalty(logp_BN, logp_start_BN)
        advantage_BN = advantage_BN - objective.kl_coef * k1_BN
        metrics.add(kl_to_start_sum=float((k1_BN * padded.mask_BN).sum()))
    loss = losses.policy_gradient(
        logp_BN,
        padded.logp_sampler_BN,
        advantage_BN,
        padded.mask_BN,
        denominator=denominator,
        max_ratio=objective.max_ratio,
    )
    loss.backward()
    metrics.add(rl_loss=float(loss.detach()), rl_tokens=float(padded.mask_BN.sum()))
    metrics.add(trained_positions=float(padded.positions))
    _observe_gap(metrics, logp_BN.detach(), padded)
    _observe_entropy(metrics, logits_BNV.detach() / temperature, padded.mask_BN)


def _targeted_backward(
    policy: Policy,
    chunk: list[packing.Target],
    num_targets: int,
    temperature: float,
    feedback: FeedbackSettings,
    teacher_weights: Mapping[str, Tensor] | None,
    metrics: Metrics,
) -> None:
    student = packing.pad([t.student for t in chunk], policy.device)
    teacher = packing.pad([t.teacher for t in chunk], policy.device)
    with torch.no_grad(), policy.using(teacher_weights):
        teacher_BNV = policy.logits(teacher) / temperature
    student_BNV = policy.logits(student) / temperature
    pair = losses.keep_top(student_BNV, teacher_BNV, feedback.top_k)
    divergence_BN = losses.divergence(*pair, feedback.divergence)
    loss = losses.targeted_kl(
        divergence_BN, student.mask_BN, num_targets=num_targets, floor=feedback.target_floor
    )
    loss.backward()
    with torch.no_grad():
        logp_BN = token_logps(student_BNV, student.tokens_BN, 1.0)
        hinted_BN = token_logps(teacher_BNV, student.tokens_BN, 1.0)
        gain_B = ((hinted_BN - logp_BN) * student.mask_BN).sum(-1)
    metrics.lessons += _lessons(chunk, logp_BN, hinted_BN, divergence_BN.detach())
    metrics.add(kl_loss=float(loss.detach()), hint_gain_sum=float(gain_B.sum()), targets=float(len(chunk)))
    metrics.add(trained_positions=float(student.positions + teacher.positions))
    _observe_gap(metrics, logp_BN, student)


def _lessons(
    chunk: list[packing.Target], student_BN: Tensor, teacher_BN: Tensor, divergence_BN: Tensor
) -> list[Lesson]:
    """What the turns of a micro-batch taught, in the five digits that people and colours can use."""

    def row(values_BN: Tensor, index: int) -> tuple[float, ...]:
        values = values_BN[index, : len(chunk[index].student.wanted)].tolist()
        return tuple(float(f"{value:.5g}") for value in values)

    return [
        Lesson(
            target.hint.rollout_id,
            target.hint.turn,
            target.hint.detector,
            *(row(values_BN, index) for values_BN in (student_BN, teacher_BN, divergence_BN)),
        )
        for index, target in enumerate(chunk)
    ]


def _observe_gap(metrics: Metrics, logp_BN: Tensor, padded: packing.Padded) -> None:
    """Sampler against trainer: the canary for stale weights, wrong masks and wrong temperatures."""
    gap_BN = (logp_BN - padded.logp_sampler_BN).abs() * padded.mask_BN
    metrics.add(gap_sum=float(gap_BN.sum()), gap_tokens=float(padded.mask_BN.sum()))
    metrics.peak(logp_gap_max=float(gap_BN.max()))


def _observe_entropy(metrics: Metrics, logits_BNV: Tensor, mask_BN: Tensor) -> None:
    logp_BNV = logits_BNV.log_softmax(-1)
    entropy_BN = -(logp_BNV.exp() * logp_BNV).sum(-1)
    metrics.add(entropy_sum=float((entropy_BN * mask_BN).sum()))


def _means(sums: dict[str, float]) -> dict[str, float]:
    means = {
        name: sums.get(name, 0.0) for name in ("rl_loss", "kl_loss", "logp_gap_max", "trained_positions")
    }
    for mean, total, count in (
        ("logp_gap_mean", "gap_sum", "gap_tokens"),
        ("entropy", "entropy_sum", "rl_tokens"),
        ("kl_to_start", "kl_to_start_sum", "rl_tokens"),
        ("hint_gain", "hint_gain_sum", "targets"),
    ):
        if total in sums:
            means[mean] = sums[total] / max(sums[count], 1.0)
    return means


def _take_gradient(policy: Policy) -> dict[str, Tensor]:
    """The gradient so far, and a clean slate."""
    taken = {}
    for name, parameter in policy.trainable.items():
        taken[name] = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
        parameter.grad = None
    return taken


def _norm(gradient: Mapping[str, Tensor]) -> float:
    return float(torch.linalg.vector_norm(torch.stack([g.norm() for g in gradient.values()])))
