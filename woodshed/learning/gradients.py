"""The two gradients of a step: of the samples' own tokens (policy gradient, cross-entropy), and of hinted turns.

`separate` gives student and teacher a forward each; `branching` lets hinted turns branch off their sample
(`prefix_tree`), shares the sample's forward between all losses, and gives the same numbers. They are returned apart,
because one is capped by the other; `branching_joint` is one backward pass for both, with a factor that is known before.

Shapes: B samples, N tokens that the policy wrote (padded), V vocabulary, G hint branches.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from woodshed.experience.samples import TrainingSample, student_view, teacher_view
from woodshed.learning import divergences, losses, packing, prefix_tree, ranks
from woodshed.learning.estimators import WrittenTokens, loss_of
from woodshed.learning.logprobs import Predictions, token_logps
from woodshed.learning.packing import Padded, PaddedBranches
from woodshed.learning.policy import Policy
from woodshed.learning.prefix_tree import Hinted
from woodshed.learning.step_inputs import StepInputs

Gradient = dict[str, Tensor]

STUCK = (math.log(0.99), math.log(0.01))
"""A token is stuck that the student gives at least the first log-prob, and the hinted teacher less than the second:
the reverse divergence is large there, and its gradient next to nothing."""


def separate(work: StepInputs) -> tuple[Gradient, Gradient]:
    """(gradient of the samples' own tokens, targeted gradient), a forward each for samples, students and teachers. The
    second is empty where no turn is hinted."""
    policy = work.policy
    start = _start_logps(work)
    for chunk, counts in ranks.deal(work.own, [len(sample.ids) for sample in work.own], work.micro_batches):
        padded = work.pad(chunk)
        if not counts:
            _nothing(policy.logps(padded, 1.0)).backward()
            continue
        _own_loss(work, policy.forward(padded), padded, chunk, start).backward()
        work.metrics.add(trained_positions=float(padded.positions))
    own_gradient = _take(policy)
    if not work.hinted:
        return own_gradient, {}
    lengths = [branch.position + len(branch.ids) for _, branch in work.hinted]
    for chunk, counts in ranks.deal(work.hinted, lengths, work.micro_batches):
        student = work.pad([student_view(*each) for each in chunk])
        teacher = work.pad([teacher_view(*each) for each in chunk])
        teacher_GNV = work.teacher.logits(policy, teacher)
        if not counts:
            _nothing(policy.logits(student)).backward()
            continue
        branches = packing.pad_branches(chunk, policy.device)
        loss = targeted(work, chunk, policy.logits(student), teacher_GNV, branches)
        loss.backward()
        work.metrics.add(trained_positions=float(student.positions + teacher.positions))
    return own_gradient, _take(policy)


def _nothing(values: Tensor) -> Tensor:
    """A loss of zero over these values: its backward pass takes part in what ranks exchange."""
    return (values * 0.0).sum()


def branching(work: StepInputs) -> tuple[Gradient, Gradient]:
    """The same numbers with one forward of each sample: its hinted turns branch off it."""
    own_gradient, kl_gradient = _take(work.policy), _take(work.policy)

    def backward(own_loss: Tensor | None, kl_loss: Tensor | None) -> None:
        for loss, total in ((own_loss, own_gradient), (kl_loss, kl_gradient)):
            if loss is not None:
                loss.backward(retain_graph=loss is own_loss and kl_loss is not None)
                for name, gradient in _take(work.policy).items():
                    total[name] += gradient

    _over_trees(work, backward)
    return own_gradient, kl_gradient


def branching_joint(work: StepInputs, kl_factor: float) -> Gradient:
    """Gradient of the samples' own tokens + factor x targeted gradient, in one backward pass."""

    def backward(own_loss: Tensor | None, kl_loss: Tensor | None) -> None:
        parts = [own_loss, None if kl_loss is None else kl_factor * kl_loss]
        torch.stack([loss for loss in parts if loss is not None]).sum().backward()

    _over_trees(work, backward)
    return _take(work.policy)


def _over_trees(work: StepInputs, backward: Callable[[Tensor | None, Tensor | None], None]) -> None:
    """Both losses of every micro-batch of samples with their branches."""
    trunks, start = [prefix_tree.trunk(sample) for sample in work.samples], _start_logps(work)
    lengths = [prefix_tree.length(sample) for sample in trunks]
    for chunk in packing.first_fit(trunks, lengths, work.loss.micro_batch_tokens):
        hinted = prefix_tree.hinted_turns(chunk)
        is_live = bool(hinted) and work.teacher.kind == "live"
        teacher_GNV = _other_teacher(work, chunk) if hinted and not is_live else None
        trees = prefix_tree.pad(chunk, work.policy.device, with_branches=is_live)
        predictions = work.policy.forward(trees.padded)
        if is_live:
            with torch.no_grad():
                teacher_GNV = predictions.logits(trees.teacher_GN)
        own_loss = kl_loss = None
        if any(sample.rl_weights or sample.ce_weights for sample in chunk):
            own_loss = _own_loss(work, predictions, trees.padded, chunk, start)
        if trees.branches is not None and teacher_GNV is not None:
            student_GNV = predictions.logits(trees.student_GN)
            kl_loss = targeted(work, hinted, student_GNV, teacher_GNV, trees.branches)
        backward(own_loss, kl_loss)
        work.metrics.add(trained_positions=float(trees.padded.positions))


def _other_teacher(work: StepInputs, chunk: Sequence[TrainingSample]) -> Tensor:
    """The logits (G, N, V) of a teacher with weights of its own: each trunk is read up to its last hint."""
    hinted = [sample for sample in chunk if sample.branches]
    cut = prefix_tree.pad(prefix_tree.prefixes(hinted), work.policy.device)
    work.metrics.add(trained_positions=float(cut.padded.positions))
    return work.teacher.logits(work.policy, cut.padded, cut.teacher_GN)


def _take(policy: Policy) -> Gradient:
    """The gradient so far, zeros where there is none, summed over ranks; and a clean slate."""
    gradient = {}
    for name, parameter in policy.trainable.items():
        gradient[name] = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
        parameter.grad = None
    ranks.sum_replicated(gradient)
    return gradient


# Losses of one micro-batch -------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class StartLogps:
    """The starting weights' view of the samples: what the divergence inside the advantage is measured from."""

    logps: Mapping[str, Tensor]
    """Rollout id to the log-prob of each of its sampled tokens."""
    k1: Mapping[str, tuple[Tensor, int]]
    """... to (sum of k1 over the rest of its group, by the log-probs it was sampled with; attempts in the group)."""

    def penalty(
        self, logp_BN: Tensor, mask_BN: Tensor, samples: Sequence[TrainingSample]
    ) -> tuple[Tensor, Tensor]:
        """(how far each sample's k1 lies above its group's mean (B,), k1 of every token (B, N))."""
        start_BN, nothing = torch.zeros_like(logp_BN), (logp_BN.new_zeros(()), 1)
        for start_N, sample in zip(start_BN, samples, strict=True):
            if sample.rollout_id in self.logps:
                start_N[: len(sample.predicted)] = self.logps[sample.rollout_id]
        rest = [self.k1.get(sample.rollout_id, nothing) for sample in samples]
        others_B = torch.stack([others for others, _ in rest])
        size_B = packing.pad_2d([[size for _, size in rest]], len(samples), logp_BN.device)[0]
        above_B = losses.sequence_k1(logp_BN, start_BN, mask_BN, others_B, size_B)
        return above_B, (logp_BN.detach() - start_BN) * mask_BN


@torch.no_grad()
def _start_logps(work: StepInputs) -> StartLogps | None:
    """A forward of every sample in the policy gradient by the starting weights, where the divergence from them counts.
    It comes before any gradient, as a rollout's baseline is made of its whole group."""
    if not (work.loss.kl_coef and work.rl):
        return None
    device = work.policy.device
    logps = {sample.rollout_id: torch.zeros(len(sample.predicted), device=device) for sample in work.rl}
    k1 = {sample.rollout_id: torch.zeros((), device=device) for sample in work.rl}
    lengths = [len(sample.ids) for sample in work.rl]
    for chunk, counts in ranks.deal(work.rl, lengths, work.micro_batches):
        padded = work.pad(chunk)
        with work.policy.using(work.teacher.start):
            start_BN = work.policy.logps(padded, work.temperature)
        if not counts:
            continue
        k1_B = ((padded.logp_sampler_BN - start_BN) * padded.rl_BN).sum(-1)
        work.metrics.add(trained_positions=float(padded.positions))
        for sample, start_N, own in zip(chunk, start_BN, k1_B, strict=True):
            logps[sample.rollout_id] = start_N[: len(sample.predicted)].contiguous()
            k1[sample.rollout_id] = own
    ranks.sum_replicated(logps)  # every rank knows its own samples only
    ranks.sum_replicated(k1)
    groups: dict[int, list[Tensor]] = {}
    for sample in work.rl:
        groups.setdefault(sample.group, []).append(k1[sample.rollout_id])
    sums = {number: torch.stack(members).sum() for number, members in groups.items()}
    rest = {s.rollout_id: (sums[s.group] - k1[s.rollout_id], len(groups[s.group])) for s in work.rl}
    return StartLogps(logps, rest)


def _own_loss(
    work: StepInputs,
    predictions: Predictions,
    padded: Padded,
    samples: Sequence[TrainingSample],
    start: StartLogps | None,
) -> Tensor:
    """The losses on the samples' own tokens: policy gradient, cross-entropy, or both."""
    parts = []
    if any(sample.rl_weights for sample in samples):
        parts.append(_policy_gradient(work, predictions, padded, samples, start))
    if any(sample.ce_weights for sample in samples):
        logp_BN, _ = predictions.score(padded.tokens_BN, 1.0)
        parts.append(-(logp_BN * padded.ce_BN).sum() / work.ce_tokens)
        work.metrics.add(ce_loss=parts[-1])
    return parts[0] if len(parts) == 1 else torch.stack(parts).sum()


def _policy_gradient(
    work: StepInputs,
    predictions: Predictions,
    padded: Padded,
    samples: Sequence[TrainingSample],
    start: StartLogps | None,
) -> Tensor:
    """The policy-gradient loss, and what its tokens show."""
    settings, mask_BN, advantage_BN = work.loss, (padded.rl_BN > 0).float(), padded.advantage_BN
    logp_BN, entropy_BN = predictions.score(padded.tokens_BN, work.temperature)
    if start is not None:
        above_B, k1_BN = start.penalty(logp_BN, mask_BN, samples)
        advantage_BN = advantage_BN - settings.kl_coef * above_B.unsqueeze(-1)
        work.metrics.add(kl_to_start_sum=k1_BN.sum())
    tokens = WrittenTokens(
        logp_BN,
        padded.logp_sampler_BN,
        advantage_BN * padded.rl_BN,
        mask_BN,
        max(work.num_rollouts, 1),
        work.message_tokens,
    )
    loss = settings.weight * loss_of(tokens, settings)
    work.metrics.add(rl_loss=loss, rl_tokens=mask_BN.sum())
    _observe_logps(work, logp_BN.detach(), padded.logp_sampler_BN, mask_BN)
    work.metrics.add(entropy_sum=(entropy_BN * mask_BN).sum())
    return loss


def targeted(
    work: StepInputs,
    turns: Sequence[Hinted],
    student_GNV: Tensor,
    teacher_GNV: Tensor,
    branches: PaddedBranches,
) -> Tensor:
    """The targeted loss; the logits are those that predict the branches' tokens."""
    form = work.feedback.form
    student_GNV, teacher_GNV = (each.float() / work.temperature for each in (student_GNV, teacher_GNV))
    with torch.no_grad():  # only looked at
        logp_GN = token_logps(student_GNV, branches.tokens_GN, 1.0)
    hinted_GN = token_logps(teacher_GNV, branches.tokens_GN, 1.0)
    pair = divergences.truncate_support(student_GNV, teacher_GNV, form.support, form.top_k)
    divergence_GN = divergences.divergence(*pair, form.divergence, beta=form.beta, clip=form.pointwise_clip)
    if form.max_ratio is not None:
        ratio_GN = (logp_GN - branches.logp_sampler_GN).exp().clamp(max=form.max_ratio)
        divergence_GN = divergence_GN * ratio_GN
    loss = divergences.targeted_mean(
        divergence_GN,
        branches.weight_GN,
        reduction=form.reduction,
        num_targets=len(work.hinted),
        num_tokens=work.kl_tokens,
        floor=work.feedback.target_floor,
    )
    _observe_branches(work, branches, logp_GN, hinted_GN)
    work.metrics.add(kl_loss=loss)
    work.metrics.compare([branch for _, branch in turns], logp_GN, hinted_GN, divergence_GN)
    return loss


def _observe_branches(work: StepInputs, branches: PaddedBranches, logp_GN: Tensor, hinted_GN: Tensor) -> None:
    gain_G = ((hinted_GN - logp_GN) * branches.mask_GN).sum(-1)
    is_stuck_GN = (logp_GN > STUCK[0]) & (hinted_GN < STUCK[1])
    work.metrics.add(
        hint_gain_sum=gain_G.sum(),
        targets=float(len(gain_G)),
        stuck_tokens=(is_stuck_GN * branches.weight_GN).sum(),
    )
    _observe_logps(work, logp_GN, branches.logp_sampler_GN, branches.mask_GN)


def _observe_logps(work: StepInputs, logp_BN: Tensor, logp_sampler_BN: Tensor, mask_BN: Tensor) -> None:
    """Engine against trainer: the canary for stale weights, wrong masks and wrong temperatures."""
    gap_BN = (logp_BN - logp_sampler_BN).abs() * mask_BN
    work.metrics.add(gap_sum=gap_BN.sum(), gap_tokens=mask_BN.sum(), logp_gap_max=gap_BN.max())
