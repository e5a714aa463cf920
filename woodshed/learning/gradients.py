"""The two gradients of a step: the policy gradient on whole rollouts, and the targeted divergence on hinted turns.

`separate` gives student and teacher a forward each; `packed` lets hinted turns branch off their rollout
(`branches`), shares the rollout's forward between both losses, and gives the same numbers. They are returned apart,
because one is capped by the other; `packed_joint` is one backward pass for both, with a factor that is known before.

Shapes: B sequences, N tokens that the policy wrote (padded), V vocabulary, G targets.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from woodshed.learning import divergences, losses, packing, prefix_tree, ranks
from woodshed.learning.estimators import WrittenTokens, loss_of
from woodshed.learning.logprobs import Reading, token_logps
from woodshed.learning.loss_settings import FeedbackSettings, LossSettings
from woodshed.learning.packing import Batch, Padded, Row, Target
from woodshed.learning.policy import Policy
from woodshed.learning.prefix_tree import Tree
from woodshed.learning.teacher import Teacher
from woodshed.records import TokenDivergence

Gradient = dict[str, Tensor]

STUCK = (math.log(0.99), math.log(0.01))
"""A token is stuck that the student gives at least the first log-prob, and the hinted teacher less than the second:
the reverse divergence is large there, and its gradient next to nothing."""


@dataclass
class Metrics:
    """What is seen over micro-batches: one metrics line, and what every targeted turn taught.

    Values stay on the device until they are asked for, so that it never waits for the next micro-batch's launches.
    """

    seen: dict[str, list[float | Tensor]] = field(default_factory=dict)
    taught: list[tuple[Sequence[Target], tuple[Tensor, ...]]] = field(default_factory=list)
    """Targeted turns of a micro-batch, and (G, N) each: log-probs without and with the hint, divergence."""

    def add(self, **values: float | Tensor) -> None:
        for name, value in values.items():
            self.seen.setdefault(name, []).append(value.detach() if isinstance(value, Tensor) else value)

    def teach(self, turns: Sequence[Target], *values_GN: Tensor) -> None:
        self.taught.append((turns, tuple(each.detach() for each in values_GN)))

    def means(self) -> dict[str, float]:
        """One number for each name, over the micro-batches of all ranks."""
        numbers: dict[str, list[float]] = {}
        for of_rank in ranks.gather([{name: [*map(float, values)] for name, values in self.seen.items()}]):
            for name, values in of_rank.items():
                numbers.setdefault(name, []).extend(values)
        sums = {name: sum(values) for name, values in numbers.items()}
        found = {n: sums.get(n, 0.0) for n in ("rl_loss", "kl_loss", "stuck_tokens", "trained_positions")}
        found["logp_gap_max"] = max(numbers.get("logp_gap_max", [0.0]))
        for mean, total, count in (
            ("logp_gap_mean", "gap_sum", "gap_tokens"),
            ("entropy", "entropy_sum", "rl_tokens"),
            ("kl_to_start", "kl_to_start_sum", "rl_tokens"),
            ("hint_gain", "hint_gain_sum", "targets"),
        ):
            if total in sums:
                found[mean] = sums[total] / max(sums[count], 1.0)
        return found

    def token_divergences(self) -> list[TokenDivergence]:
        """What every targeted turn taught, those of all ranks."""
        return ranks.gather([t for turns, values_GN in self.taught for t in _lessons(turns, *values_GN)])


@dataclass
class StepInputs:
    """Everything that a step's gradients depend on, and what is measured on the way."""

    policy: Policy
    teacher: Teacher
    batch: Batch
    objective: LossSettings
    feedback: FeedbackSettings
    temperature: float
    message_tokens: int
    metrics: Metrics = field(default_factory=Metrics)

    @property
    def rows(self) -> tuple[Row, ...]:
        return self.batch.rows if self.objective.weight else ()

    @property
    def targets(self) -> tuple[Target, ...]:
        return self.batch.targets if self.feedback.weight else ()

    @property
    def num_target_tokens(self) -> int:
        """Tokens of all targets that count."""
        rows = [target.student for target in self.targets]
        return sum(sum(row.counted) if row.counted else len(row.wanted) for row in rows)


def separate(work: StepInputs) -> tuple[Gradient, Gradient]:
    """(policy gradient, targeted gradient), a forward each for rollouts, students and teachers."""
    policy, budget = work.policy, work.objective.micro_batch_tokens
    start = _start(work)
    for rows, counts in ranks.deal(work.rows, [len(row.ids) for row in work.rows], budget):
        padded = packing.pad(rows, policy.device)
        if not counts:
            _nothing(policy.logps(padded, 1.0)).backward()
            continue
        _policy_gradient(work, policy.read(padded), padded, rows, start).backward()
        work.metrics.add(trained_positions=float(padded.positions))
    rl_gradient = _take(policy)
    for chunk, counts in ranks.deal(work.targets, [len(t.teacher.ids) for t in work.targets], budget):
        student = packing.pad([t.student for t in chunk], policy.device)
        teacher = packing.pad([t.teacher for t in chunk], policy.device)
        teacher_BNV = work.teacher.logits(policy, teacher)
        if not counts:
            _nothing(policy.logits(student)).backward()
            continue
        _targeted(work, chunk, policy.logits(student), teacher_BNV, student).backward()
        work.metrics.add(trained_positions=float(student.positions + teacher.positions))
    return rl_gradient, _take(policy)


def _nothing(values: Tensor) -> Tensor:
    """A loss of zero over these values: its backward pass takes part in what ranks exchange."""
    return (values * 0.0).sum()


def packed(work: StepInputs) -> tuple[Gradient, Gradient]:
    """The same numbers with one forward of each rollout: its hinted turns branch off it."""
    rl_gradient, kl_gradient = _take(work.policy), _take(work.policy)

    def backward(rl_loss: Tensor | None, kl_loss: Tensor | None) -> None:
        for loss, total in ((rl_loss, rl_gradient), (kl_loss, kl_gradient)):
            if loss is not None:
                loss.backward(retain_graph=loss is rl_loss and kl_loss is not None)
                for name, gradient in _take(work.policy).items():
                    total[name] += gradient

    _over_trees(work, backward)
    return rl_gradient, kl_gradient


def packed_joint(work: StepInputs, kl_factor: float) -> Gradient:
    """Policy gradient + factor x targeted gradient, in one backward pass."""

    def backward(rl_loss: Tensor | None, kl_loss: Tensor | None) -> None:
        parts = [rl_loss, None if kl_loss is None else kl_factor * kl_loss]
        torch.stack([loss for loss in parts if loss is not None]).sum().backward()

    _over_trees(work, backward)
    return _take(work.policy)


def _over_trees(work: StepInputs, backward: Callable[[Tensor | None, Tensor | None], None]) -> None:
    """Both losses of every micro-batch of rollouts with their branches."""
    made, start = prefix_tree.trees(Batch(work.rows, work.targets, work.batch.num_rollouts)), _start(work)
    is_live = work.teacher.kind == "live"
    for chunk in packing.chunks(made, [tree.length for tree in made], work.objective.micro_batch_tokens):
        hinted = any(tree.targets for tree in chunk)
        teacher_GNV = _other_teacher(work, chunk) if hinted and not is_live else None
        both = prefix_tree.pad(chunk, work.policy.device, with_branches=is_live and hinted)
        reading = work.policy.read(both.padded)
        if is_live and hinted:
            with torch.no_grad():
                teacher_GNV = reading.logits(both.teacher_GN)
        rl_loss = kl_loss = None
        if any(tree.has_advantage for tree in chunk):
            rl_loss = _policy_gradient(work, reading, both.padded, [tree.row for tree in chunk], start)
        if both.targets is not None and teacher_GNV is not None:
            student_GNV = reading.logits(both.student_GN)
            hinted_turns = [target for tree in chunk for target in tree.targets]
            kl_loss = _targeted(work, hinted_turns, student_GNV, teacher_GNV, both.targets)
        backward(rl_loss, kl_loss)
        work.metrics.add(trained_positions=float(both.padded.positions))


def _other_teacher(work: StepInputs, chunk: Sequence[Tree]) -> Tensor:
    """The logits (G, N, V) of a teacher with weights of its own: each trunk is read up to its last hint."""
    hinted = [tree for tree in chunk if tree.targets]
    cut = prefix_tree.pad(prefix_tree.prefixes(hinted), work.policy.device)
    work.metrics.add(trained_positions=float(cut.padded.positions))
    return work.teacher.logits(work.policy, cut.padded, cut.teacher_GN)


@dataclass(frozen=True)
class Start:
    """The starting weights' view of the rollouts: what the divergence inside the advantage is measured from."""

    logps: Mapping[str, Tensor]
    """Rollout id to the log-prob of each of its sampled tokens."""
    k1: Mapping[str, tuple[Tensor, int]]
    """... to (sum of k1 over the rest of its group, by the log-probs it was sampled with; attempts in the group)."""

    def penalty(self, logp_BN: Tensor, mask_BN: Tensor, rows: Sequence[Row]) -> tuple[Tensor, Tensor]:
        """(how far each row's k1 lies above its group's mean (B,), k1 of every token (B, N))."""
        start_BN, nothing = torch.zeros_like(logp_BN), (logp_BN.new_zeros(()), 1)
        for start_N, row in zip(start_BN, rows, strict=True):
            if row.rollout_id in self.logps:
                start_N[: len(row.wanted)] = self.logps[row.rollout_id]
        found = [self.k1.get(row.rollout_id, nothing) for row in rows]
        others_B = torch.stack([others for others, _ in found])
        size_B = packing.table([[size for _, size in found]], len(rows), logp_BN.device)[0]
        above_B = losses.sequence_k1(logp_BN, start_BN, mask_BN, others_B, size_B)
        return above_B, (logp_BN.detach() - start_BN) * mask_BN


@torch.no_grad()
def _start(work: StepInputs) -> Start | None:
    """A forward of every rollout by the starting weights, where the divergence from them counts. It comes before any
    gradient, as a rollout's baseline is made of its whole group."""
    if not work.objective.kl_coef:
        return None
    logps = {row.rollout_id: torch.zeros(len(row.wanted), device=work.policy.device) for row in work.rows}
    k1 = {row.rollout_id: torch.zeros((), device=work.policy.device) for row in work.rows}
    lengths = [len(row.ids) for row in work.rows]
    for rows, counts in ranks.deal(work.rows, lengths, work.objective.micro_batch_tokens):
        padded = packing.pad(rows, work.policy.device)
        with work.policy.using(work.teacher.start):
            start_BN = work.policy.logps(padded, work.temperature)
        if not counts:
            continue
        k1_B = ((padded.logp_sampler_BN - start_BN) * padded.counted_BN * padded.mask_BN).sum(-1)
        work.metrics.add(trained_positions=float(padded.positions))
        for row, start_N, own in zip(rows, start_BN, k1_B, strict=True):
            logps[row.rollout_id], k1[row.rollout_id] = start_N[: len(row.wanted)].contiguous(), own
    ranks.sum_replicated(logps)  # every rank knows its own rows only
    ranks.sum_replicated(k1)
    groups: dict[int, list[Tensor]] = {}
    for row in work.rows:
        groups.setdefault(row.group, []).append(k1[row.rollout_id])
    sums = {number: torch.stack(members).sum() for number, members in groups.items()}
    rest = {r.rollout_id: (sums[r.group] - k1[r.rollout_id], len(groups[r.group])) for r in work.rows}
    return Start(logps, rest)


def _policy_gradient(
    work: StepInputs, reading: Reading, padded: Padded, rows: Sequence[Row], start: Start | None
) -> Tensor:
    """The policy-gradient loss of one micro-batch, and what is seen on its tokens."""
    settings, mask_BN, advantage_BN = work.objective, padded.counted_BN, padded.advantage_BN
    logp_BN, entropy_BN = reading.score(padded.tokens_BN, work.temperature)
    if start is not None:
        above_B, k1_BN = start.penalty(logp_BN, mask_BN, rows)
        advantage_BN = advantage_BN - settings.kl_coef * above_B.unsqueeze(-1)
        work.metrics.add(kl_to_start_sum=k1_BN.sum())
    num_rollouts = max(work.batch.num_rollouts, 1)
    tokens = WrittenTokens(
        logp_BN, padded.logp_sampler_BN, advantage_BN, mask_BN, num_rollouts, work.message_tokens
    )
    loss = settings.weight * loss_of(tokens, settings)
    work.metrics.add(rl_loss=loss, rl_tokens=mask_BN.sum())
    _observe_logps(work, logp_BN.detach(), padded.logp_sampler_BN, mask_BN)
    work.metrics.add(entropy_sum=(entropy_BN * mask_BN).sum())
    return loss


def _targeted(
    work: StepInputs, turns: Sequence[Target], student_GNV: Tensor, teacher_GNV: Tensor, targets: Padded
) -> Tensor:
    """The targeted loss of one micro-batch; the logits are those that predict the targets' tokens."""
    settings = work.feedback
    student_GNV, teacher_GNV = (each.float() / work.temperature for each in (student_GNV, teacher_GNV))
    with torch.set_grad_enabled(settings.support == "sampled"):  # elsewhere only looked at
        logp_GN = token_logps(student_GNV, targets.tokens_BN, 1.0)
    hinted_GN = token_logps(teacher_GNV, targets.tokens_BN, 1.0)
    if settings.support == "sampled":
        divergence_GN = divergences.sampled_token(logp_GN, hinted_GN)
    else:
        pair = divergences.keep(
            student_GNV, teacher_GNV, settings.support, settings.top_k, tail=settings.tail
        )
        divergence_GN = divergences.divergence(
            *pair, settings.divergence, beta=settings.beta, clip=settings.pointwise_clip
        )
    if settings.max_ratio is not None:
        ratio_GN = (logp_GN.detach() - targets.logp_sampler_BN).exp().clamp(max=settings.max_ratio)
        divergence_GN = divergence_GN * ratio_GN
    loss = divergences.targeted_mean(
        divergence_GN,
        targets.counted_BN,
        reduction=settings.reduction,
        num_targets=len(work.targets),
        num_tokens=work.num_target_tokens,
        floor=settings.target_floor,
    )
    gain_G = ((hinted_GN - logp_GN.detach()) * targets.mask_BN).sum(-1)
    is_stuck_GN = (logp_GN.detach() > STUCK[0]) & (hinted_GN < STUCK[1])
    work.metrics.add(
        kl_loss=loss,
        hint_gain_sum=gain_G.sum(),
        targets=float(len(gain_G)),
        stuck_tokens=(is_stuck_GN * targets.counted_BN).sum(),
    )
    _observe_logps(work, logp_GN.detach(), targets.logp_sampler_BN, targets.mask_BN)
    work.metrics.teach(turns, logp_GN, hinted_GN, divergence_GN)
    return loss


def _lessons(
    turns: Sequence[Target], student_GN: Tensor, teacher_GN: Tensor, divergence_GN: Tensor
) -> list[TokenDivergence]:
    """What the turns of a micro-batch taught, in the five digits that people and colours can use."""

    def digits(values_GN: Tensor, index: int, begin: int, end: int) -> tuple[float, ...]:
        return tuple(float(f"{value:.5g}") for value in values_GN[index, begin:end].tolist())

    found = []
    for index, target in enumerate(turns):
        begin, hint = 0, target.hint
        for turn, tokens in target.spans:
            at = (index, begin, begin + tokens)
            values = (digits(values_GN, *at) for values_GN in (student_GN, teacher_GN, divergence_GN))
            found.append(TokenDivergence(hint.rollout_id, turn, hint.detector, *values))
            begin += tokens
    return found


def _take(policy: Policy) -> Gradient:
    """The gradient so far, summed over ranks, and a clean slate."""
    taken = gather(policy)
    for parameter in policy.trainable.values():
        parameter.grad = None
    return taken


def gather(policy: Policy) -> Gradient:
    """The gradient of every trainable weight, zeros where there is none, summed over ranks."""
    for parameter in policy.trainable.values():
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
    gradient = {name: p.grad for name, p in policy.trainable.items() if p.grad is not None}
    ranks.sum_replicated(gradient)
    return gradient


def _observe_logps(work: StepInputs, logp_BN: Tensor, logp_sampler_BN: Tensor, mask_BN: Tensor) -> None:
    """Engine against trainer: the canary for stale weights, wrong masks and wrong temperatures."""
    gap_BN = (logp_BN - logp_sampler_BN).abs() * mask_BN
    work.metrics.add(gap_sum=gap_BN.sum(), gap_tokens=mask_BN.sum(), logp_gap_max=gap_BN.max())
