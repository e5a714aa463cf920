"""The trainer: one optimizer step on training samples, whatever they are for, down to its losses.

    loss = RL(samples) + CE(samples) + weight x D(policy(turn) || teacher(turn after the hint))

Each term has its own denominator: attempts x longest message, sum of the cross-entropy's weights, hinted turns (at
least `target_floor`) or their tokens. The last term's gradient may not outgrow that of the first two: its norm is cut
to `ratio` times their running norm (docs/decisions.md). To measure both norms takes a backward pass each; between
measurements, one pass is shared.

`separate` gives student and teacher a forward each; `branching` lets hinted turns branch off their sample
(`prefix_tree`), shares the sample's forward between all losses, and gives the same numbers. `branching_joint` is one
backward pass for both gradients, with a factor that is known before.

Shapes: B samples, N tokens that the policy wrote (padded), V vocabulary, G hint branches.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from woodshed.experience.samples import TrainingSample, student_view, teacher_view
from woodshed.learning import divergences, optimizer, packing, prefix_tree, ranks, tensor_folder
from woodshed.learning.estimators import WrittenTokens, loss_of
from woodshed.learning.grad_norms import GradNorms
from woodshed.learning.logprobs import Predictions, token_logps
from woodshed.learning.loss_settings import FeedbackSettings, LossSettings
from woodshed.learning.metrics import Metrics
from woodshed.learning.optimizer import OptimizerSettings, learning_rate, make_optimizer
from woodshed.learning.packing import Padded, PaddedBranches
from woodshed.learning.policy import Policy
from woodshed.learning.prefix_tree import Hinted
from woodshed.learning.ranks import DealtBatch, RankCalls
from woodshed.learning.step_inputs import StartLogps, StepInputs
from woodshed.learning.teacher import Teacher
from woodshed.learning.tensor_folder import EARLIER, copied, read_saved
from woodshed.muon.clip import clip_grad_norm_, grad_norm
from woodshed.records import RecipeError, RunError, from_json

Gradient = dict[str, Tensor]

MOST_LOST = 2
"""Steps in a row whose gradient may be NaN or infinite, as the backward pass of a library's attention now and then is
on a GPU in bfloat16, before the run ends."""


@dataclass(frozen=True)
class TrainerContents:
    """Everything that a trainer needs to go on, in host memory."""

    folders: Mapping[str, Mapping[str, Tensor]]
    progress: Mapping[str, Any]

    def write(self, folder: Path, group: dist.ProcessGroup | None = None) -> None:
        """Write it into a folder that exists, each rank its shards. `group`: see `ranks.agreed`."""
        for name, tensors in self.folders.items():
            tensor_folder.save(folder / name, tensors, group)
        if ranks.index() == 0:
            (folder / "trainer.json").write_text(json.dumps(self.progress, indent=2) + "\n")


class Trainer:
    """A policy with its optimizer, teacher and gradient norms. Every rank has one, and calls what is called.

    Args:
        start: weights at the start of the stage: what the teacher begins with, and the k1 reference. None where
            neither is needed (SFT).
        steps: optimizer steps of the stage, for the learning rate's schedule.
        temperature: of the sampler, at which the policy gradient and the divergence are taken.
        message_tokens: longest message a turn may have; with the number of attempts it makes the policy gradient's
            constant denominator.
    """

    def __init__(
        self,
        policy: Policy,
        settings: OptimizerSettings,
        loss: LossSettings | None = None,
        feedback: FeedbackSettings | None = None,
        *,
        start: Mapping[str, Tensor] | None = None,
        steps: int = 1,
        temperature: float = 1.0,
        message_tokens: int = 1,
    ) -> None:
        self.policy, self.settings, self.steps = policy, settings, steps
        self.loss, self.feedback = loss or LossSettings(), feedback or FeedbackSettings()
        self.temperature, self.message_tokens = temperature, message_tokens
        self.optimizer = make_optimizer(policy, settings)
        self.teacher = Teacher(policy, start, self.feedback) if start is not None else None
        self.unpacked = ranks.agreed(prefix_tree.why_not(policy))
        """The reason for which each sample has a row of its own; "" where several share one."""
        self.norms = GradNorms()
        self.taken = 0
        """Steps taken."""
        self.commands = RankCalls()
        """Rank 0's to the trainers of the other ranks."""

    def step(self, samples: Sequence[TrainingSample]) -> dict[str, Any]:
        """Take one optimizer step on the samples of the whole step, which rank 0 tells the others.

        Returns:
            Metrics, the same on every rank, and under "divergences" a `TokenDivergence` for each hinted turn.

        Raises:
            RecipeError: losses are not finite, or their gradient is not for the third step in a row; weights are left
                as they were. Up to two such steps are counted under "lost" and move nothing.
        """
        self.commands.tell("trainer.step", samples)
        work = self._inputs(samples)
        self.optimizer.zero_grad(set_to_none=True)
        gradient, kl_factor = self._joint_gradient(work)
        for name, parameter in self.policy.trainable.items():
            parameter.grad = gradient[name]
        norm = ranks.agreed(
            float(clip_grad_norm_(self.policy.trainable.values(), self.settings.max_grad_norm))
        )
        logged, dropped = self.policy.replay.take_counts()
        if logged:
            work.metrics.add(experts_logged=logged, experts_dropped=dropped)
        means = work.metrics.means()
        self._refuse_broken(norm, means)
        rate = learning_rate(self.settings, self.taken, self.steps)
        if (
            work.samples and not self.norms.lost
        ):  # without any signal, momentum alone must not move the weights
            self._move(rate)
        self.optimizer.zero_grad(set_to_none=True)
        self.taken += 1
        return {
            **means,
            "rl_grad_norm": self.norms.rl_last,
            "kl_grad_norm": self.feedback.weight * self.norms.kl_last,
            "kl_factor": kl_factor,
            "grad_norm": norm,
            "lost": self.norms.lost,
            "learning_rate": rate,
            "trained_rollouts": len(work.rl),
            "targets": len(work.hinted),
            "teacher_tokens": sum(branch.position + len(branch.ids) for _, branch in work.hinted),
            "ce_tokens": work.ce_tokens,
            "divergences": work.metrics.token_divergences(),
        }

    def _inputs(self, samples: Sequence[TrainingSample]) -> StepInputs:
        return StepInputs(
            self.policy,
            self.teacher,
            samples,
            self.loss,
            self.feedback,
            self.temperature,
            self.message_tokens,
            is_packed=not self.unpacked,
        )

    def _joint_gradient(self, work: StepInputs) -> tuple[Gradient, float]:
        """(own gradient + factor x targeted gradient, the factor): by one backward pass where that is enough."""
        feedback, norms, otherwise = self.feedback, self.norms, self.settings.max_grad_norm
        is_branching = work.is_packed and feedback.forward == "packed" and bool(work.hinted)
        kl_factor = norms.factor(feedback, otherwise=otherwise)
        if is_branching and work.own and not norms.is_due(feedback.measure_every):
            gradient = branching_joint(work, kl_factor)
            if norms.allows(_norm(gradient), kl_factor):
                return gradient, kl_factor
            work.metrics = Metrics(speaks=self.policy.speaks)
        # FSDP lets go of weights after a backward pass, and `branching` needs them for a second one.
        is_twice = is_branching and ranks.count() == 1
        own_gradient, kl_gradient = (branching if is_twice else separate)(work)
        norms.observe(_norm(own_gradient), _norm(kl_gradient))
        kl_factor = norms.factor(feedback, otherwise=otherwise)
        if not kl_gradient:
            return own_gradient, kl_factor
        return {name: own_gradient[name] + kl_factor * kl_gradient[name] for name in own_gradient}, kl_factor

    def _refuse_broken(self, norm: float, means: Mapping[str, float]) -> None:
        norms = self.norms
        norms.lost = 0 if math.isfinite(norm) else norms.lost + 1
        is_broken = not all(math.isfinite(means[name]) for name in ("rl_loss", "ce_loss", "kl_loss"))
        if norms.lost > MOST_LOST or (norms.lost and is_broken):
            self.optimizer.zero_grad(set_to_none=True)
            raise RecipeError(
                f"step {self.taken}: the gradient is {norm} (own {norms.rl_last}, targeted {norms.kl_last}; losses: "
                f"policy gradient {means['rl_loss']}, cross-entropy {means['ce_loss']}, divergence "
                f"{means['kl_loss']}); no step was taken. Lower the stage's learning_rate or look at the "
                "last rollouts for broken log-probs"
            )

    def _move(self, rate: float) -> None:
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        self.optimizer.step()
        self.policy.round_weights()
        if self.teacher is not None:
            self.teacher.follow(self.policy)

    @torch.no_grad()
    def logps(
        self,
        samples: Sequence[TrainingSample],
        weights: Mapping[str, Tensor] | None = None,
        *,
        temperature: float | None = None,
    ) -> list[tuple[float, ...]]:
        """Log-prob of every predicted token of each sample, in nats. Every rank calls it, and computes its share.

        Args:
            weights: other weights of the policy; None takes the live ones.
            temperature: None takes the sampler's.
        """
        known: list[tuple[int, tuple[float, ...]]] = []
        lengths, work = [len(sample.ids) for sample in samples], self._inputs(())
        with self.policy.using(weights):
            for share in work.deal(range(len(samples)), lengths):
                padded = work.pad([samples[i] for i in share.items])
                logp_BN = self.policy.logps(padded, temperature or self.temperature).tolist()
                if share.counts and self.policy.speaks:
                    rows = zip(share.items, logp_BN, strict=True)
                    known += [(i, tuple(row[: len(samples[i].predicted)])) for i, row in rows]
        scored = dict(ranks.gather(known))
        return [scored[i] for i in range(len(samples))]

    def contents(self) -> TrainerContents:
        """Copies of everything that `load` needs to go on, which later steps do not change: each rank its shards."""
        weights = self.policy.trainable
        folders: dict[str, Mapping[str, Tensor]] = {"policy": weights}
        if self.teacher is not None and self.teacher.state():
            folders["teacher"] = self.teacher.state()
        folders["optimizer"] = optimizer.state_of(self.optimizer, weights) | {"rng": torch.get_rng_state()}
        progress = {"taken": self.taken, "norms": asdict(self.norms)}
        return TrainerContents({name: copied(each) for name, each in folders.items()}, progress)

    def save(self, folder: Path) -> None:
        """Write everything that `load` needs to go on, into a folder that exists."""
        self.contents().write(folder)

    def load(self, folder: Path) -> None:
        """Go on from what `save` wrote, on any number of ranks.

        Raises:
            RunError: a file is absent or damaged, or of other weights.
            ModelError: the weights, or the teacher's, are of another model or kind of teacher.
        """
        weights = self.policy.trainable
        norms, taken = _read_progress(folder)
        self.policy.load_weights(read_saved(folder / "policy", EARLIER, weights))
        shapes = {f"{name}/{key}": weight for name, weight in weights.items() for key in optimizer.MOMENTS}
        for name, value in read_saved(folder / "optimizer", EARLIER, shapes).items():
            weight, _, key = name.rpartition("/")
            if name == "rng":
                torch.set_rng_state(value)
            elif weight not in weights:
                raise RunError(f"checkpoint {folder} is of other weights ({weight!r}); {EARLIER}")
            else:
                optimizer.restore(self.optimizer, weights[weight], key, value)
        if self.teacher is not None:
            average = folder / "teacher"
            self.teacher.restore(read_saved(average, EARLIER, weights) if average.is_dir() else {})
        self.norms, self.taken = norms, taken


def _read_progress(folder: Path) -> tuple[GradNorms, int]:
    try:
        progress = json.loads((folder / "trainer.json").read_text())
        return from_json(GradNorms, progress["norms"]), int(progress["taken"])
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise RunError(f"checkpoint {folder} is damaged (trainer.json: {error}); {EARLIER}") from None


def _norm(gradient: Mapping[str, Tensor]) -> float:
    """2-norm, the same number on every rank, so that all decide alike."""
    return ranks.agreed(float(grad_norm(list(gradient.values())))) if gradient else 0.0


# Gradients of a step -----------------------------------------------------------------------------------------------


def separate(work: StepInputs) -> tuple[Gradient, Gradient]:
    """(gradient of the samples' own tokens, targeted gradient), a forward each for samples, students and teachers. The
    second is empty where no turn is hinted."""
    policy = work.policy
    start = work.start_logps()
    for share in work.deal(work.own, [len(sample.ids) for sample in work.own]):
        padded = work.pad(share.items)
        predictions = policy.forward(padded)
        if not share.counts:
            _nothing(predictions, padded).backward()
            continue
        (_own_loss(work, predictions, padded, share.items, start) / policy.num_sharers).backward()
        work.metrics.add(trained_positions=float(padded.positions))
    own_gradient = ranks.sum_replicated(_take(policy))
    if not work.hinted:
        return own_gradient, {}
    lengths = [branch.position + len(branch.ids) for _, branch in work.hinted]
    for share in work.deal(work.hinted, lengths):
        student = work.pad([student_view(*each) for each in share.items])
        teacher = work.pad([teacher_view(*each) for each in share.items])
        teacher_GNV = work.teacher.logits(policy, teacher)
        predictions = policy.forward(student)
        if not share.counts:
            _nothing(predictions, student).backward()
            continue
        branches = packing.pad_branches(share.items, policy.device)
        loss = targeted(work, share.items, predictions.logits(), teacher_GNV, branches)
        (loss / policy.num_sharers).backward()
        work.metrics.add(trained_positions=float(student.positions + teacher.positions))
    return own_gradient, ranks.sum_replicated(_take(policy))


def _nothing(predictions: Predictions, padded: Padded) -> Tensor:
    """A loss of zero, whose backward pass takes part in what ranks exchange."""
    return (predictions.score(padded.tokens_BN, 1.0)[0] * 0.0).sum()


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
    return ranks.sum_replicated(own_gradient), ranks.sum_replicated(kl_gradient)


def branching_joint(work: StepInputs, kl_factor: float) -> Gradient:
    """Gradient of the samples' own tokens + factor x targeted gradient, in one backward pass."""

    def backward(own_loss: Tensor | None, kl_loss: Tensor | None) -> None:
        parts = [own_loss, None if kl_loss is None else kl_factor * kl_loss]
        torch.stack([loss for loss in parts if loss is not None]).sum().backward()

    _over_trees(work, backward)
    return ranks.sum_replicated(_take(work.policy))


def _over_trees(work: StepInputs, backward: Callable[[Tensor | None, Tensor | None], None]) -> None:
    """Both losses of every micro-batch of samples with their branches. All ranks make the same forward passes, also
    where only some of them have hints, and every micro-batch has a loss."""
    trunks, start = [prefix_tree.trunk(sample) for sample in work.samples], work.start_logps()
    is_live = work.teacher.kind == "live"
    lengths = [prefix_tree.length(sample) for sample in trunks]

    for share in work.deal(trunks, lengths):
        chunk, teacher_GNV = share.items, None
        if not is_live and any(sample.branches for sample in share.meanwhile):
            teacher_GNV = _other_teacher(work, share)
        trees = prefix_tree.pad(chunk, work.policy.device, with_branches=is_live)
        predictions = work.policy.forward(trees.padded)
        if not share.counts:
            backward(_nothing(predictions, trees.padded), None)
            continue
        own_loss = kl_loss = None
        if any(sample.rl_weights or sample.ce_weights for sample in chunk):
            own_loss = _own_loss(work, predictions, trees.padded, chunk, start)
        if trees.branches is not None:
            if is_live:
                with torch.no_grad():
                    teacher_GNV = predictions.logits(trees.teacher_GN)
            assert teacher_GNV is not None, (
                "the rank's own samples are among those that are computed meanwhile"
            )
            student_GNV = predictions.logits(trees.student_GN)
            kl_loss = targeted(
                work, prefix_tree.hinted_turns(chunk), student_GNV, teacher_GNV, trees.branches
            )
        backward(own_loss, kl_loss)
        work.metrics.add(trained_positions=float(trees.padded.positions))


def _other_teacher(work: StepInputs, share: DealtBatch[TrainingSample]) -> Tensor | None:
    """The logits (G, N, V) of a teacher with weights of its own: each trunk is read up to its last hint. None where
    other ranks alone have hints now, whose exchanges this one takes part in."""
    hinted = [sample for sample in share.items if sample.branches]
    if not hinted:
        work.teacher.logits(work.policy, packing.pack(share.items[:1], work.policy.device))
        return None
    cut = prefix_tree.pad(prefix_tree.prefixes(hinted), work.policy.device)
    if share.counts:
        work.metrics.add(trained_positions=float(cut.padded.positions))
    return work.teacher.logits(work.policy, cut.padded, cut.teacher_GN)


def _take(policy: Policy) -> Gradient:
    """This rank's gradient so far, zeros where there is none; and a clean slate."""
    gradient = {}
    for name, parameter in policy.trainable.items():
        gradient[name] = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
        parameter.grad = None
    return gradient


# Losses of one micro-batch -------------------------------------------------------------------------------------------


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
    work.metrics.observe_logps(logp_BN.detach(), padded.logp_sampler_BN, mask_BN, padded.old_BN)
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
    work.metrics.observe_branches(branches, logp_GN, hinted_GN)
    work.metrics.add(kl_loss=loss)
    work.metrics.compare([branch for _, branch in turns], logp_GN, hinted_GN, divergence_GN)
    return loss
