"""The ground that the stages of a run share: policy and engine, the beginning of a stage, the clock of a step."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from woodshed import parts
from woodshed.engines.create import create, needs_model, starts_servers
from woodshed.engines.elsewhere import EngineElsewhere
from woodshed.engines.engine import Engine
from woodshed.engines.servers import ServedModel
from woodshed.experience.annotations import critic_of
from woodshed.learning import checkpoint, ranks
from woodshed.learning.checkpoint import TrainState
from woodshed.learning.layout import shard
from woodshed.learning.loss_settings import FeedbackSettings, LossSettings
from woodshed.learning.optimizer import OptimizerSettings
from woodshed.learning.policy import Policy
from woodshed.learning.publish import publish, refuse_another_model, refuse_deaf_engine
from woodshed.learning.ranks import RankCalls
from woodshed.learning.stability import MAX_LOGP_GAP
from woodshed.learning.trainer import Trainer
from woodshed.learning.worker import StageSettings, Worker
from woodshed.records import RecipeError, Rollout, RunError, Task
from woodshed.runs.folder import RunDir
from woodshed.stages.recipe import Recipe
from woodshed.tokens.codec import refuse_lossy
from woodshed.tokens.renderer import Renderer, create_renderer

Progress = Callable[[int, int, str], None]

FINISH_S = 60.0
"""Seconds that the end of a run waits for its newest checkpoint."""


@dataclass
class Session:
    """The run, its recipe, the policy, its tasks and the engine that samples for it: what every stage is given."""

    recipe: Recipe
    run: RunDir
    worker: Worker
    """This rank's part in training, by which those of the other ranks do the same."""
    engine: Engine
    renderer: Renderer
    critic: Engine
    progress: Progress
    practice: Sequence[Task] = ()
    """Tasks to train on."""
    heldout: Sequence[Task] = ()
    """Tasks to measure on."""

    @property
    def policy(self) -> Policy:
        """The policy in training, where this process has it whole.

        Raises:
            RecipeError: each of several ranks has a part of it.
        """
        if ranks.count() > 1:
            raise RecipeError(
                f"{ranks.count()} ranks share the policy, and a stage reaches it through session.worker, whose methods "
                "all of them follow; or train on one rank, with layout.fsdp = 1 and layout.replicate = 1"
            )
        return self.worker.policy

    @property
    def trainer(self) -> Trainer:
        """The trainer of the stage at hand; all ranks take its steps."""
        return self.worker.trainer

    def close(self) -> None:
        """Close the engines, and let a checkpoint be completed that the ranks can still complete."""
        with suppress(Exception):  # what ended the run is told already
            self.worker.checkpoints.finish(FINISH_S)
        try:
            if self.critic is not self.engine:
                self.critic.close()
        finally:
            self.engine.close()


def open_session(
    recipe: Recipe,
    run: RunDir,
    practice: Sequence[Task],
    heldout: Sequence[Task],
    progress: Progress,
    commands: RankCalls,
) -> Session:
    """Load the policy and start its engine.

    Args:
        commands: to the ranks that share the policy.

    Raises:
        PolicyError, RecipeError: weights or a setting of the recipe cannot be used.
    """
    progress(0, 0, f"loading {recipe.policy.model}")
    policy, loaded = Policy.load(recipe.policy, seed=recipe.seed, is_whole=ranks.count() == 1)
    copied = None
    if ranks.count() > 1:
        shard(policy, recipe.layout)
        if needs_model(recipe.engine) and not recipe.rl.staleness:  # sampling is no exchange between ranks
            copied = Policy.load(recipe.policy, seed=recipe.seed)[0].model
    worker = Worker(policy, run, commands, copied)
    renderer = create_renderer(loaded.tokenizer, codec=recipe.policy.codec, model_dir=loaded.directory)
    if parts.own(recipe):  # a codec or a tool
        refuse_lossy(renderer.codec, recipe.agent.tools.specs)
    if recipe.rl.staleness:
        longest = int(policy.model.config.get_text_config().max_position_embeddings)
        engine = EngineElsewhere(renderer, longest)
        return Session(recipe, run, worker, engine, renderer, engine, progress, practice, heldout)
    served = served_model(recipe, policy, loaded.directory)
    if starts_servers(recipe.engine):
        progress(0, 0, f"starting {recipe.engine.kind}, which takes minutes at times")
    sampled = policy.model if copied is None else copied
    engine = create(recipe.engine, renderer, sampled, served, run.path / "engines")
    try:
        refuse_deaf_engine(worker, engine, run.path / "weights", recipe.engine.temperature, MAX_LOGP_GAP)
        publish(worker, engine, run.path / "weights", 0)
        refuse_another_model(worker, engine, recipe.engine.temperature, MAX_LOGP_GAP)
        critic = critic_of(recipe.critic, engine)
    except BaseException:
        engine.close()
        raise
    return Session(recipe, run, worker, engine, renderer, critic, progress, practice, heldout)


def served_model(recipe: Recipe, policy: Policy, folder: Path) -> ServedModel:
    """The policy as servers are to sample from it.

    Args:
        folder: of the model that training begins with.
    """
    rank = policy.model.peft_config["default"].r if policy.is_adapter else 0
    is_cuda = policy.device.type == "cuda"
    return ServedModel(
        folder, recipe.policy.dtype, lora_rank=rank, trained_gpus=ranks.started_here() if is_cuda else 0
    )


def begin(
    session: Session,
    state: TrainState,
    optimizer: OptimizerSettings,
    loss: LossSettings,
    feedback: FeedbackSettings | None = None,
    *,
    steps: int,
    message_tokens: int = 1,
) -> None:
    """Let the workers make the trainer of a stage; see `Worker.begin`.

    Args:
        feedback: None for a stage without a teacher.
        steps, message_tokens: as of `Trainer`.
    """
    settings = StageSettings(
        optimizer,
        loss,
        feedback,
        steps=steps,
        temperature=session.recipe.engine.temperature,
        message_tokens=message_tokens,
    )
    session.worker.settle()
    newest = checkpoint.latest(session.run, session.recipe.stage_labels)
    session.worker.begin(state.stage, settings, newest, resumes=state.step > 0)
    if unpacked := session.worker.trainer.unpacked:
        session.progress(0, 0, f"each sample is padded to a row of its own, since of this model {unpacked}")


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
