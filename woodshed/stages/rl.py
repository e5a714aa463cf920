"""The stage `rl`: reinforcement learning with targeted feedback.

    take attempts, judged and hinted -> compile -> step -> checkpoint -> publish the new weights

Every part of a step is kept in the run folder as it ends, so a run that is killed anywhere goes on where it was.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import replace
from functools import partial
from typing import Any

from woodshed.evals import summarize
from woodshed.experience import Occasion, collect
from woodshed.experience.annotations import Annotator, with_levels
from woodshed.experience.compile import Compiled, compile_samples, subsample
from woodshed.feedback.gate import GateMeasurement, switched_off
from woodshed.learning import hint_gate, stability
from woodshed.learning.checkpoint import TrainState
from woodshed.learning.publish import publish
from woodshed.monitors import flag_policy
from woodshed.records import Group, Hint, RewardTerms, Rollout, Task
from woodshed.runs.pace import Laps
from woodshed.stages import evaluate
from woodshed.stages.asynchronous.source import Tailing
from woodshed.stages.choosing import Choosing
from woodshed.stages.recipe import Recipe
from woodshed.stages.session import Clock, Session, begin, refuse_stale
from woodshed.stages.sources import ExperienceSource, StepExperience, hints_to_learn, is_measured


def run(session: Session, state: TrainState) -> None:
    """Practise on tasks; evaluate before, after, and every so many steps between."""
    recipe = session.recipe
    begin(
        session,
        state,
        recipe.optimizer,
        recipe.loss,
        recipe.feedback,
        steps=recipe.rl.steps,
        message_tokens=recipe.agent.turn_tokens,
    )
    laps, last = Laps(), recipe.rl.steps
    with closing(Tailing(session) if recipe.rl.staleness else Inline(session, state)) as source:
        source.publish(state, is_last=state.step == last)
        while state.step <= last and not state.stopped:
            if is_measured(recipe, state.step):
                with laps.timing("evaluation"):
                    source.measure(state, is_last=state.step == last)
            if state.step == last:
                break
            with laps.timing("step"):
                state = one_step(session, source, laps, state)
        if state.stopped and stability.DISAGREES not in state.stopped:
            source.publish(state, is_last=True)
            source.measure(state, is_last=True)


def time_left(recipe: Recipe, laps: Laps, step: int) -> str:
    """The rest of the stage after this step, by what steps and evaluations took so far; "" in the first one."""
    later = range(step + 1, recipe.rl.steps + 1)
    evaluations = sum(is_measured(recipe, each) for each in later)
    left = laps.left({"step": len(later) - 1, "evaluation": evaluations})
    return f", {left} after it" if left else ""


def one_step(session: Session, source: ExperienceSource, laps: Laps, state: TrainState) -> TrainState:
    """Take attempts, an update, and the checkpoint that the next step goes on from; publish the new weights."""
    clock = Clock()
    experience = source.take(state, clock)
    attempts = experience.attempts
    summary = summarize(attempts.rollouts, list(attempts.verdicts.values()), flags=attempts.flags)
    metrics = learn(session, laps, state, experience, summary)
    clock.lap("update")
    metrics |= summary | {"switched_off": experience.disabled_hints}
    if experience.reward_terms:
        metrics["reward_terms"] = mean_terms(experience.reward_terms)
    metrics["seconds"] = clock.laps
    told, kept = source.learned(state, experience)
    metrics |= told
    state = replace(state, step=state.step + 1, disabled_hints=experience.disabled_hints, **kept)
    state = record(session, source, state, metrics, attempts.rollouts)
    if not state.stopped:
        source.publish(state, is_last=state.step == session.recipe.rl.steps)
    return state


class Inline:
    """Attempts that this process makes between two updates, so that each is by the newest weights."""

    def __init__(self, session: Session, state: TrainState) -> None:
        """Make the choice of tasks, or restore it from the state of a checkpoint."""
        self.session, recipe = session, session.recipe
        self.choosing = Choosing(
            session.run,
            session.practice,
            recipe.curriculum,
            recipe.sandbox,
            seed=recipe.seed,
            attempts=recipe.rollout.attempts,
        )
        if state.step:
            self.choosing.restore(state.curriculum, state.growth)

    def publish(self, state: TrainState, *, is_last: bool) -> None:
        """See `ExperienceSource`."""
        session = self.session
        publish(session.worker, session.engine, session.run.path / "weights", state.version)

    def measure(self, state: TrainState, *, is_last: bool) -> None:
        """See `ExperienceSource`."""
        evaluate.measure(self.session, state.version)

    def take(self, state: TrainState, clock: Clock) -> StepExperience:
        """Draw the step's tasks, have them attempted and judged, and write hints and reward terms."""
        session, step = self.session, state.step
        recipe, run = session.recipe, session.run
        drawn = self.choosing.draw(recipe.rl.tasks_per_step)
        tasks, levels = with_levels(drawn, recipe.effort, step)
        occasion = Occasion("train", step, recipe.rollout.attempts, recipe.seed)
        attempts = collect(run, session.engine, tasks, recipe.harness, occasion, progress=session.progress)
        groups, verdicts = attempts.groups, attempts.verdicts
        refuse_stale(run, attempts.rollouts, state.version)
        clock.lap("attempts")
        annotator = annotator_of(session)
        hints = run.once("hints", Hint, "train", step, lambda: annotator.hints(groups, tasks, verdicts))
        chosen, disabled = hints_to_learn(recipe, hints, attempts.rollouts, tasks), state.disabled_hints
        if recipe.feedback.form.scope != "rollout":
            disabled = through_gate(session, state, chosen, groups, tasks)
        terms: list[RewardTerms] = []
        if annotator.counts(levels):
            terms = run.once(
                "reward_terms",
                RewardTerms,
                "train",
                step,
                lambda: annotator.reward_terms(groups, tasks, levels),
            )
        session.engine.flush()  # keys and values make room for the update
        clock.lap("feedback")
        chosen = [hint for hint in chosen if hint.detector not in disabled]
        return StepExperience(attempts, chosen, terms, disabled)

    def learned(self, state: TrainState, seen: StepExperience) -> tuple[Mapping[str, Any], dict[str, Any]]:
        """See `ExperienceSource`."""
        self.choosing.observe(seen.attempts)
        return self.choosing.told(), self.choosing.state()

    def why_dry(self, step: int) -> str:
        """See `ExperienceSource`."""
        return self.choosing.choice.why_dry(self.session.recipe.rl.tasks_per_step)

    def close(self) -> None:
        """See `ExperienceSource`."""
        self.choosing.close()


def annotator_of(session: Session) -> Annotator:
    """Writer of hints and reward terms, as the recipe asks for them."""
    recipe = session.recipe
    return Annotator(
        session.renderer,
        recipe.agent.tools.specs,
        recipe.feedback.detectors,
        recipe.rewards,
        recipe.effort,
        session.critic,
        recipe.critic.rollouts,
        recipe.seed,
    )


def learn(
    session: Session,
    laps: Laps,
    state: TrainState,
    experience: StepExperience,
    summary: Mapping[str, Any],
) -> dict[str, Any]:
    """Take one optimizer step; metrics as `Trainer.step` gives them."""
    recipe, step = session.recipe, state.step
    session.progress(
        0,
        0,
        f"train {step}: update {step + 1} of {recipe.rl.steps} ({in_words(summary)}){time_left(recipe, laps, step)}",
    )
    compiled = compiled_of(session, experience)
    samples = [sample.at(state.version) for sample in compiled.samples]
    metrics = session.trainer.step(samples) | {"skipped_hints": dict(compiled.skipped_hints)}
    if not (metrics["trained_rollouts"] or metrics["targets"]):
        nothing = "nothing to learn from: no group has attempts that count and differ and no turn has a hint"
        session.progress(step + 1, recipe.rl.steps, f"train {step}: {nothing}")
    session.run.append("divergences", metrics.pop("divergences"), "train", step)
    return metrics


def in_words(summary: Mapping[str, Any]) -> str:
    """A step's attempts in a few words for the progress line."""
    invalid, reward = (summary[name]["value"] for name in ("invalid_calls", "reward"))
    if invalid is None or reward is None:
        return "nothing counted"
    return f"{invalid:.0%} invalid calls, reward {reward:.2f}"


def mean_terms(reward_terms: Sequence[RewardTerms]) -> dict[str, float]:
    """Mean over attempts of every auxiliary reward term."""
    names = dict.fromkeys(name for each in reward_terms for name in each.terms)
    return {
        name: sum(each.terms.get(name, 0.0) for each in reward_terms) / len(reward_terms) for name in names
    }


def record(
    session: Session,
    source: ExperienceSource,
    state: TrainState,
    metrics: dict[str, Any],
    rollouts: Sequence[Rollout],
) -> TrainState:
    """Keep the step's metrics and checkpoint, and decide whether the run goes on."""
    recipe, run = session.recipe, session.run
    if reason := why_stop(session, source, state, metrics, rollouts):
        metrics["stopped"] = reason
        session.progress(state.step, recipe.rl.steps, reason)
        state = replace(state, stopped=reason)
    run.append("metrics", [metrics], "train", state.step - 1)
    session.worker.save(state, kept=stability.WINDOW + 1 + recipe.rl.staleness)
    return state


def compiled_of(session: Session, experience: StepExperience) -> Compiled:
    """Training samples of a step's experience."""
    recipe, attempts = session.recipe, experience.attempts
    return compile_samples(
        attempts.groups,
        attempts.verdicts,
        experience.hints,
        session.renderer,
        recipe.feedback.hint_options(session.engine.context_length),
        flagged_ids=flag_policy.without_gain(attempts.flags, recipe.monitors),
        reward_terms={each.rollout_id: each.total for each in experience.reward_terms},
    )


def through_gate(
    session: Session,
    state: TrainState,
    hints: Sequence[Hint],
    groups: Sequence[Group],
    tasks: Sequence[Task],
) -> dict[str, str]:
    """Classes of hints that are not trained on from this step on, with the reason; measured where it is due."""
    recipe, settings = session.recipe, session.recipe.gate
    if not settings.every or state.step % settings.every:
        return state.disabled_hints
    rollouts = {rollout.id: rollout for group in groups for rollout in group.rollouts}
    redrawing = hint_gate.Redrawing(
        session.engine,
        recipe.agent,
        state.step,
        recipe.seed,
        recipe.rollout.tool_threads,
        recipe.sandbox.create(),
    )
    known = {task.id: task for task in tasks}
    measured = session.run.once(
        "gate",
        GateMeasurement,
        "train",
        state.step,
        lambda: hint_gate.measure(hints, rollouts, known, session.worker.logps, settings, redrawing),
    )
    return switched_off(state.disabled_hints, measured)


def why_stop(
    session: Session,
    source: ExperienceSource,
    state: TrainState,
    metrics: dict[str, Any],
    rollouts: Sequence[Rollout],
) -> str:
    """The reason for which the run must end after the step that led here, or "": it is not well, or nothing is left to
    draw for another step."""
    if reason := watch(session, state, metrics, rollouts):
        return reason
    dry = source.why_dry(state.step) if state.step < session.recipe.rl.steps else ""
    return f"stopped after step {state.step - 1}: {dry}" if dry else ""


def watch(
    session: Session,
    state: TrainState,
    metrics: dict[str, Any],
    rollouts: Sequence[Rollout],
) -> str:
    """The reason for which the run must stop after the step that led here, or "". Where it must, the policy gets the
    weights of the window's best step back."""
    settings, worker = session.recipe.stability, session.worker
    if settings.max_kl_to_start is not None:
        measured = subsample(rollouts, stability.KL_ROLLOUTS)
        metrics["kl_to_start"] = stability.kl_to_start(measured, partial(worker.logps, from_start=True))
    rate = metrics["invalid_calls"]["value"]
    reason = state.watch.alarm(settings, rate, metrics.get("kl_to_start"), metrics.get("logp_gap_mean", 0.0))
    if reason:
        version = state.watch.healthy(state.step - 1, session.recipe.rl.staleness)
        worker.go_back(version)
        reason = f"stopped after step {state.step - 1}: {reason}; back to the weights of step {version}"
    return reason
