"""The two gradients of a step: of the samples' own tokens (policy gradient, cross-entropy), and of hinted turns.

`separate` gives student and teacher a forward each; `branching` lets hinted turns branch off their sample
(`prefix_tree`), shares the sample's forward between all losses, and gives the same numbers. They are returned apart,
because one is capped by the other; `branching_joint` is one backward pass for both, with a factor that is known before.

Shapes: B samples, N tokens that the policy wrote (padded), V vocabulary, G hint branches.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from woodshed.experience.samples import TrainingSample, student_view, teacher_view
from woodshed.learning import packing, prefix_tree, ranks, token_losses
from woodshed.learning.policy import Policy
from woodshed.learning.step_inputs import StepInputs

Gradient = dict[str, Tensor]


def separate(work: StepInputs) -> tuple[Gradient, Gradient]:
    """(gradient of the samples' own tokens, targeted gradient), a forward each for samples, students and teachers. The
    second is empty where no turn is hinted."""
    policy, budget = work.policy, work.loss.micro_batch_tokens
    start = token_losses.start_logps(work)
    for chunk, counts in ranks.deal(work.own, [len(sample.ids) for sample in work.own], budget):
        padded = packing.pad(chunk, policy.device)
        if not counts:
            _nothing(policy.logps(padded, 1.0)).backward()
            continue
        token_losses.own_loss(work, policy.forward(padded), padded, chunk, start).backward()
        work.metrics.add(trained_positions=float(padded.positions))
    own_gradient = _take(policy)
    if not work.hinted:
        return own_gradient, {}
    lengths = [branch.position + len(branch.ids) for _, branch in work.hinted]
    for chunk, counts in ranks.deal(work.hinted, lengths, budget):
        student = packing.pad([student_view(*each) for each in chunk], policy.device)
        teacher = packing.pad([teacher_view(*each) for each in chunk], policy.device)
        teacher_GNV = work.teacher.logits(policy, teacher)
        if not counts:
            _nothing(policy.logits(student)).backward()
            continue
        branches = packing.pad_branches(chunk, policy.device)
        loss = token_losses.targeted(work, chunk, policy.logits(student), teacher_GNV, branches)
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
    trunks, start = [prefix_tree.trunk(sample) for sample in work.samples], token_losses.start_logps(work)
    lengths = [prefix_tree.length(sample) for sample in trunks]
    for chunk in packing.micro_batches(trunks, lengths, work.loss.micro_batch_tokens):
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
            own_loss = token_losses.own_loss(work, predictions, trees.padded, chunk, start)
        if trees.branches is not None and teacher_GNV is not None:
            student_GNV = predictions.logits(trees.student_GN)
            kl_loss = token_losses.targeted(work, hinted, student_GNV, teacher_GNV, trees.branches)
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
