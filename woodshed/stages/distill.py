"""The phase of studying: answer, compare with what was demonstrated, update, measure what was learnt and forgotten.

What is studied and how it is measured stands in `study`; here is the order in which it happens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from woodshed.engines.engine import WeightUpdate
from woodshed.experience import Collector, token_texts
from woodshed.learning import checkpoint, packing
from woodshed.learning.checkpoint import TrainState
from woodshed.learning.loss_settings import FeedbackSettings
from woodshed.learning.packing import Batch
from woodshed.learning.teacher import Teacher
from woodshed.learning.update import learning_rate, update
from woodshed.records import RecipeError, Rollout, Task
from woodshed.runs.folder import RunDir
from woodshed.stages import distill_samples
from woodshed.stages.distill_samples import Demonstration, DistillSettings
from woodshed.stages.session import Clock, Session, begin, forward_for, refuse_stale


@dataclass(frozen=True)
class Demonstrated:
    """What is studied, and what must not be forgotten over it."""

    known: Sequence[Demonstration]
    earlier: Sequence[Demonstration]
    tasks: Sequence[Task]
    """Practice tasks, whose solutions are demonstrations too."""
    answers: Sequence[Rollout] = ()
    """What the policy answered to the earlier prompts before the phase."""


def learn(session: Session, position: TrainState, subject: Demonstrated) -> None:
    """Learn from demonstrations (SDFT, OPSD), and measure what was learnt and forgotten."""
    settings, run, policy, engine = session.recipe.distill, session.run, session.policy, session.engine
    if not settings.steps:
        return
    optimizer, teacher = begin(session, position, settings.optimizer, settings.feedback, "before-study")
    engine.update_weights(WeightUpdate("shared"), position.step)
    before = run.once("rollouts", Rollout, "earlier", 0, lambda: first_answers(session, subject.earlier))
    subject = replace(subject, answers=before)
    how = forward_for(session, settings.feedback)
    session.progress(position.step, settings.steps, "distillation")
    for step in range(position.step, settings.steps):
        clock = Clock()
        metrics: dict[str, Any] = {} if step else {"before": learnt(session, subject)}
        made = run.once("rollouts", Rollout, "distill", step, lambda s=step: attempts(session, subject, s))
        refuse_stale(run, made, step)
        run.once("token_texts", dict, "distill", step, lambda m=made: [token_texts(m, session.renderer)])
        clock.lap("attempts")
        hints = distill_samples.hints(made, subject.known, subject.tasks)
        batch = distill_samples.pack(
            made, hints, session.renderer, settings.feedback, context_length=engine.context_length
        )
        engine.flush()
        metrics |= improve(session, position, optimizer, teacher, batch, how)
        clock.lap("update")
        run.append("divergences", metrics.pop("divergences"), "distill", step)
        engine.update_weights(WeightUpdate("shared"), step + 1)
        position = replace(position, step=step + 1)
        is_due = position.step % settings.every == 0 or position.step == settings.steps
        if is_due:
            metrics |= learnt(session, subject)
        run.append("metrics", [{**metrics, "seconds": clock.laps}], "distill", step)
        if is_due:
            checkpoint.save(run, policy, optimizer, position, teacher.state())
        session.progress(position.step, settings.steps, f"distillation, divergence {metrics['kl_loss']:.3f}")


def subject_of(run: RunDir, settings: DistillSettings, tasks: Sequence[Task]) -> Demonstrated:
    """What the recipe gives to study, from the run's own copies.

    Raises:
        RecipeError: nothing, or a file of demonstrations cannot be read.
    """
    if not settings.steps:
        return Demonstrated((), (), tasks)
    known, earlier = distill_samples.keep(run, settings)
    if not known and not (tasks and settings.tasks_per_step):
        raise RecipeError(
            f"distill.steps = {settings.steps}, but distill.demonstrations hold nothing and there are no practice "
            "tasks to attempt; name a file with demonstrations, or tasks.train and distill.tasks_per_step"
        )
    return Demonstrated(known, earlier, tasks)


def first_answers(session: Session, earlier: Sequence[Demonstration]) -> list[Rollout]:
    """What the policy answers to earlier prompts before it studies."""
    asked, settings = packing.subsample(earlier, distill_samples.SEEN), session.recipe.distill
    return distill_samples.answer(asked, session.engine, settings, name="earlier-0", seed=session.recipe.seed)


def attempts(session: Session, subject: Demonstrated, step: int) -> list[Rollout]:
    """A step's answers to prompts, and its attempts at practice tasks."""
    recipe, settings, engine = session.recipe, session.recipe.distill, session.engine
    asked = distill_samples.draw(subject.known, settings.answers_per_step, step, recipe.seed)
    made = distill_samples.answer(asked, engine, settings, name=f"distill-{step}", seed=recipe.seed)
    collector = Collector(
        engine,
        recipe.rollout,
        recipe.agent,
        seed=recipe.seed,
        prefix=f"distill-{step}",
        sandboxes=recipe.sandbox.create(),
    )
    tasks = distill_samples.draw(subject.tasks, settings.tasks_per_step, step, recipe.seed)
    groups = collector.collect(tasks, attempts=1)
    return made + [attempt for group in groups for attempt in group.rollouts]


def improve(
    session: Session,
    position: TrainState,
    optimizer: torch.optim.Optimizer,
    teacher: Teacher,
    batch: Batch,
    how: FeedbackSettings,
) -> dict[str, Any]:
    """One step by the divergence alone; what `update` says of it."""
    recipe, settings = session.recipe, session.recipe.distill
    return update(
        session.policy,
        optimizer,
        batch,
        scale=position.scale,
        teacher=teacher,
        learning_rate=learning_rate(settings.optimizer, position.step, settings.steps),
        message_tokens=settings.answer_tokens,
        temperature=recipe.sampler.temperature,
        objective=recipe.loss.model_copy(update={"weight": 0.0, "kl_coef": 0.0}),
        feedback=how,
        max_grad_norm=settings.optimizer.max_grad_norm,
    )


def learnt(session: Session, subject: Demonstrated) -> dict[str, float]:
    """What the policy knows of its subject and of earlier things, in nats a token (`study.measure`)."""
    recipe = session.recipe
    return distill_samples.measure(
        session.policy,
        session.renderer,
        subject.known,
        subject.earlier,
        [packing.rollout_row(made) for made in subject.answers if made.turns[0].sampled_ids],
        recipe.distill.system,
        recipe.sampler.temperature,
        recipe.loss.micro_batch_tokens,
    )
