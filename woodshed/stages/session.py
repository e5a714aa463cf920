"""The ground that the stages of a run share: policy and engine, the beginning of a stage, the clock of a step."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from woodshed import parts
from woodshed.engines.create import create
from woodshed.engines.engine import Engine
from woodshed.engines.http import HttpEngine
from woodshed.learning import checkpoint
from woodshed.learning.checkpoint import TrainState
from woodshed.learning.loss_settings import FeedbackSettings, LossSettings
from woodshed.learning.optimizer import OptimizerSettings
from woodshed.learning.policy import Policy
from woodshed.learning.publish import publish, refuse_another_model, refuse_deaf_engine
from woodshed.learning.tensor_folder import EARLIER, read_saved
from woodshed.learning.trainer import Trainer
from woodshed.records import Rollout, RunError, Task
from woodshed.runs.folder import RunDir
from woodshed.stages.recipe import Recipe
from woodshed.tokens.codec import refuse_lossy
from woodshed.tokens.model_files import load_tokenizer
from woodshed.tokens.renderer import Renderer, create_renderer

Progress = Callable[[int, int, str], None]


@dataclass
class Session:
    """The run, its recipe, the policy, its tasks and the engine that samples for it: what every stage is given."""

    recipe: Recipe
    run: RunDir
    policy: Policy
    engine: Engine
    renderer: Renderer
    critic: Engine
    progress: Progress
    practice: Sequence[Task] = ()
    """Tasks to train on."""
    heldout: Sequence[Task] = ()
    """Tasks to measure on."""

    def close(self) -> None:
        """Close the engines."""
        try:
            if self.critic is not self.engine:
                self.critic.close()
        finally:
            self.engine.close()


def open_session(
    recipe: Recipe, run: RunDir, practice: Sequence[Task], heldout: Sequence[Task], progress: Progress
) -> Session:
    """Load the policy and start its engine.

    Raises:
        PolicyError, RecipeError: weights or a setting of the recipe cannot be used.
    """
    progress(0, 0, f"loading {recipe.policy.model}")
    policy, loaded = Policy.load(recipe.policy, seed=recipe.seed)
    renderer = create_renderer(loaded.tokenizer, codec=recipe.policy.codec, model_dir=loaded.directory)
    if parts.own(recipe):  # a codec or a tool
        refuse_lossy(renderer.codec, recipe.agent.tools.specs)
    engine = create(recipe.engine, renderer, policy.model)
    try:
        gap = recipe.stability.max_logp_gap
        refuse_deaf_engine(policy, engine, run.path / "weights", recipe.engine.temperature, gap)
        publish(policy, engine, run.path / "weights", 0)
        refuse_another_model(policy, engine, recipe.engine.temperature, gap)
        critic = critic_of(recipe, engine)
    except BaseException:
        engine.close()
        raise
    return Session(recipe, run, policy, engine, renderer, critic, progress, practice, heldout)


def critic_of(recipe: Recipe, engine: Engine) -> Engine:
    """The engine that reads attempts: a server's model, or the policy itself."""
    if recipe.critic.endpoint is None:
        return engine
    tokenizer, _ = load_tokenizer(recipe.critic.model)
    return HttpEngine(recipe.critic.endpoint, create_renderer(tokenizer, codec="plain"))


def newest_checkpoint(session: Session) -> Path | None:
    return checkpoint.latest(session.run, session.recipe.stage_labels)


def begin(
    session: Session,
    state: TrainState,
    optimizer: OptimizerSettings,
    loss: LossSettings,
    feedback: FeedbackSettings | None = None,
    *,
    steps: int,
    message_tokens: int = 1,
) -> Trainer:
    """The trainer of a stage: new on the weights that the stage before left, or as it was in the stage's middle.

    Args:
        feedback: None for a stage without a teacher; else the weights at the stage's beginning are kept as the
            checkpoint `before-STAGE`.
        steps, message_tokens: as of `Trainer`.
    """
    run, policy, newest = session.run, session.policy, newest_checkpoint(session)
    if newest is not None and not state.step:
        policy.load_weights(read_saved(newest / "policy", EARLIER, policy.trainable))
    trainer = Trainer(
        policy,
        optimizer,
        loss,
        feedback,
        start=checkpoint.start_weights(run, policy, f"before-{state.stage}") if feedback else None,
        steps=steps,
        temperature=session.recipe.engine.temperature,
        message_tokens=message_tokens,
    )
    if trainer.unpacked:
        session.progress(
            0, 0, f"each sample is padded to a row of its own: of this model, {trainer.unpacked}"
        )
    if newest is not None and state.step:
        trainer.load(newest)
    return trainer


def refuse_stale(run: RunDir, rollouts: Iterable[Rollout], version: int) -> None:
    """Check that attempts, perhaps read back from the run folder, are of the weights that are at hand.

    A step is on-policy: its log-probs, and what an evaluation claims about a step, hold for no other weights.

    Raises:
        RunError: an attempt was sampled by another version.
    """
    for rollout in rollouts:
        if others := {used for turn in rollout.turns for used, _ in turn.versions} - {version}:
            raise RunError(
                f"{run.path}: attempt {rollout.id} was sampled by version {min(others)} of the policy, and the weights "
                f"at hand are version {version}; attempts of other weights cannot be used. Copy its recipe.toml and "
                "start under another name"
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
