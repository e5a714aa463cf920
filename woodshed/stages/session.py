"""What the phases of a run share: who writes tokens and who learns, how a phase begins, the clock of a step."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch

from woodshed.engines.engine import Engine
from woodshed.learning import checkpoint, prefix_tree
from woodshed.learning.checkpoint import TrainState
from woodshed.learning.loss_settings import FeedbackSettings
from woodshed.learning.optimizer import OptimizerSettings, make_optimizer
from woodshed.learning.policy import Policy
from woodshed.learning.teacher import Teacher
from woodshed.records import Rollout, RunError
from woodshed.runs.folder import RunDir
from woodshed.stages.recipe import Recipe
from woodshed.tokens.renderer import Renderer

Progress = Callable[[int, int, str], None]


@dataclass
class Session:
    """What every stage needs: the run, its recipe, the policy and who writes its tokens."""

    recipe: Recipe
    run: RunDir
    policy: Policy
    engine: Engine
    renderer: Renderer
    reader: Engine
    progress: Progress


def begin(
    session: Session,
    position: TrainState,
    optimizer: OptimizerSettings,
    feedback: FeedbackSettings,
    start: str,
) -> tuple[torch.optim.Optimizer, Teacher]:
    """Optimizer and teacher of a phase: new ones on the weights that the phase before left, or those of the
    checkpoint in its middle. `start` names where the weights at its beginning are kept."""
    run, policy = session.run, session.policy
    made, newest = make_optimizer(policy, optimizer), checkpoint.latest(run)
    if newest is not None:
        checkpoint.restore(newest, policy, made if position.step else None)
    teacher = Teacher(policy, checkpoint.start_weights(run, policy, start), feedback)
    if newest is not None and position.step:
        teacher.restore(checkpoint.teacher_weights(newest, policy))
    return made, teacher


def forward_for(session: Session, settings: FeedbackSettings) -> FeedbackSettings:
    """These settings, with separate forwards where the model's attention cannot take branches."""
    if settings.forward == "packed" and (reason := prefix_tree.why_not(session.policy)):
        session.progress(0, 0, f"feedback.forward = 'separate': the model cannot take branches, {reason}")
        return settings.model_copy(update={"forward": "separate"})
    return settings


def refuse_stale(run: RunDir, rollouts: Iterable[Rollout], version: int) -> None:
    """Check that attempts, perhaps read back from the run folder, are of the weights that are at hand.

    A step is on-policy: its log-probs, and what an evaluation claims about a step, hold for no other weights.

    Raises:
        RunError: an attempt was sampled by another version.
    """
    for made in rollouts:
        if others := {used for turn in made.turns for used, _ in turn.versions} - {version}:
            raise RunError(
                f"{run.path}: attempt {made.id} was sampled by version {min(others)} of the policy, and the weights at "
                f"hand are version {version}; attempts of other weights cannot be used. Copy its recipe.toml and start "
                "under another name"
            )


class Clock:
    """Seconds of each stage. They are the only thing in a metrics line that differs between equal runs."""

    def __init__(self) -> None:
        self.laps: dict[str, float] = {}
        self._last = time.monotonic()

    def lap(self, name: str) -> None:
        now = time.monotonic()
        self.laps[name] = now - self._last
        self._last = now
