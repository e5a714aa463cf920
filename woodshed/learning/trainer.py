"""The trainer: one optimizer step on training samples, whatever they are for.

    loss = RL(samples) + CE(samples) + weight x D(policy(turn) || teacher(turn after the hint))

Each term has its own denominator: attempts x longest message, sum of the cross-entropy's weights, hinted turns (at
least `target_floor`) or their tokens. The last term's gradient may not outgrow that of the first two: its norm is cut
to `ratio` times their running norm (docs/decisions.md). To measure both norms takes a backward pass each; between
measurements, one pass is shared.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from woodshed.experience.samples import TrainingSample
from woodshed.learning import gradients, optimizer, prefix_tree, ranks, tensor_folder
from woodshed.learning.grad_norms import GradNorms
from woodshed.learning.gradients import Gradient
from woodshed.learning.loss_settings import FeedbackSettings, LossSettings
from woodshed.learning.metrics import Metrics
from woodshed.learning.optimizer import OptimizerSettings, learning_rate, make_optimizer
from woodshed.learning.policy import Policy
from woodshed.learning.step_inputs import StepInputs
from woodshed.learning.teacher import Teacher
from woodshed.learning.tensor_folder import EARLIER, read_saved
from woodshed.muon.clip import clip_grad_norm_, grad_norm
from woodshed.records import RecipeError, RunError, from_json

MOST_LOST = 2
"""Steps in a row whose gradient may be NaN or infinite, as the backward pass of a library's attention now and then is
on a GPU in bfloat16, before the run ends."""


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

    def step(self, samples: Sequence[TrainingSample]) -> dict[str, Any]:
        """Take one optimizer step on the samples of the whole step, the same on every rank.

        Returns:
            Metrics, the same on every rank, and under "divergences" a `TokenDivergence` for each hinted turn.

        Raises:
            RecipeError: losses are not finite, or their gradient is not for the third step in a row; weights are left
                as they were. Up to two such steps are counted under "lost" and move nothing.
        """
        work = self._inputs(samples)
        self.optimizer.zero_grad(set_to_none=True)
        gradient, kl_factor = self._joint_gradient(work)
        for name, parameter in self.policy.trainable.items():
            parameter.grad = gradient[name]
        norm = ranks.agreed(
            float(clip_grad_norm_(self.policy.trainable.values(), self.settings.max_grad_norm))
        )
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
        # Over several ranks, samples of some have hints and of others none: unequal numbers of forwards.
        can_branch = work.is_packed and ranks.count() == 1
        is_branching = can_branch and feedback.forward == "packed" and bool(work.hinted)
        kl_factor = norms.factor(feedback, otherwise=otherwise)
        if is_branching and work.own and not norms.is_due(feedback.measure_every):
            gradient = gradients.branching_joint(work, kl_factor)
            if norms.allows(_norm(gradient), kl_factor):
                return gradient, kl_factor
            work.metrics = Metrics()
        own_gradient, kl_gradient = (gradients.branching if is_branching else gradients.separate)(work)
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
        """Log-prob of every predicted token of each sample, in nats.

        Args:
            weights: other weights of the policy; None takes the live ones.
            temperature: None takes the sampler's.
        """
        scored: dict[int, tuple[float, ...]] = {}
        lengths, work = [len(sample.ids) for sample in samples], self._inputs(())
        with self.policy.using(weights):
            for chunk in work.micro_batches(range(len(samples)), lengths):
                padded = work.pad([samples[i] for i in chunk])
                logp_BN = self.policy.logps(padded, temperature or self.temperature).tolist()
                scored |= {
                    i: tuple(row[: len(samples[i].predicted)]) for i, row in zip(chunk, logp_BN, strict=True)
                }
        return [scored[i] for i in range(len(samples))]

    def save(self, folder: Path) -> None:
        """Write everything that `load` needs to go on, into a folder that exists: each rank its shards."""
        weights = self.policy.trainable
        tensor_folder.save(folder / "policy", weights)
        if self.teacher is not None and self.teacher.state():
            tensor_folder.save(folder / "teacher", self.teacher.state())
        state = optimizer.state_of(self.optimizer, weights)
        tensor_folder.save(folder / "optimizer", state | {"rng": torch.get_rng_state()})
        if ranks.index() == 0:
            progress = {"taken": self.taken, "norms": asdict(self.norms)}
            (folder / "trainer.json").write_text(json.dumps(progress, indent=2) + "\n")

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
                self.optimizer.state[weights[weight]][key] = value
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
