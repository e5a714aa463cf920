"""The stage `rl`: reinforcement learning with targeted feedback.

    draw tasks -> attempt -> judge -> hint -> compile -> step -> load the new weights into the engine -> observe

Every part of a step is kept in the run folder as it ends, so a run that is killed anywhere goes on where it was.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from woodshed import feedback, synthesis
from woodshed.agent.prompt import Effort, with_effort
from woodshed.curriculum import Curriculum, TaskChoice, create, draw
from woodshed.evals import summarize
from woodshed.experience import Experience, Occasion, collect
from woodshed.experience.compile import Compiled, compile_samples, is_trainable, subsample
from woodshed.feedback import critic, demonstrations, rewards
from woodshed.feedback.gate import GateMeasurement, switched_off
from woodshed.grading import effort
from woodshed.grading.effort import EffortSettings
from woodshed.learning import hint_gate, stability
from woodshed.learning.checkpoint import TrainState
from woodshed.learning.publish import publish
from woodshed.monitors import flag_policy
from woodshed.pysource import syntax
from woodshed.records import Group, Hint, RewardTerms, Rollout, Task, Verdict
from woodshed.runs.pace import Laps
from woodshed.stages import evaluate
from woodshed.stages.recipe import Recipe
from woodshed.stages.session import Clock, Session, begin, refuse_stale
from woodshed.synthesis.task_generator import TaskGenerator
from woodshed.tasks import folder


@dataclass(frozen=True)
class LoopState:
    """State that the steps share beside the session."""

    curriculum: TaskChoice
    generator: TaskGenerator | None
    laps: Laps = field(default_factory=Laps)
    """Steps and evaluations of this process."""


@dataclass(frozen=True)
class StepExperience:
    """A step's attempts with hints and rewards: what it learns from."""

    attempts: Experience
    hints: Sequence[Hint]
    """Those that are trained on."""
    reward_terms: Sequence[RewardTerms]
    disabled_hints: dict[str, str]
    """Classes of hints that are not trained on, with the reason."""


def run(session: Session, state: TrainState) -> None:
    """Practise on tasks; evaluate before, after, and every so many steps between."""
    recipe, engine = session.recipe, session.engine
    loop = begin_loop(session, state)
    publish(session.worker, engine, session.run.path / "weights", state.version)
    while state.step <= recipe.rl.steps and not state.stopped:
        if is_measured(recipe, state.step):
            with loop.laps.timing("evaluation"):
                evaluate.measure(session, state.version)
        if state.step == recipe.rl.steps:
            break
        with loop.laps.timing("step"):
            state = one_step(session, loop, state)
    if loop.generator is not None:
        loop.generator.close()
    if state.stopped and stability.DISAGREES not in state.stopped:
        publish(session.worker, engine, session.run.path / "weights", state.version)
        evaluate.measure(session, state.version)


def is_measured(recipe: Recipe, step: int) -> bool:
    """True if the policy is evaluated before this step: at the beginning, at the end, and as the recipe says."""
    every = recipe.evaluation.every
    return step in (0, recipe.rl.steps) or bool(every and step % every == 0)


def time_left(recipe: Recipe, loop: LoopState, step: int) -> str:
    """The rest of the stage after this step, by what steps and evaluations took so far; "" in the first one."""
    later = range(step + 1, recipe.rl.steps + 1)
    evaluations = sum(is_measured(recipe, each) for each in later)
    left = loop.laps.left({"step": len(later) - 1, "evaluation": evaluations})
    return f", {left} after it" if left else ""


def begin_loop(session: Session, state: TrainState) -> LoopState:
    """Make what the steps share, or restore it from the state of a checkpoint."""
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
    choice = create(
        session.practice,
        recipe.curriculum,
        seed=recipe.seed,
        attempts=recipe.rollout.attempts,
        revalidate=lambda task: not synthesis.check(task, recipe.sandbox.create()),
    )
    generator = None
    if recipe.curriculum.grow:
        generator = TaskGenerator(session.run, seed=recipe.seed, sandbox=recipe.sandbox)
    if state.step:
        if generator is not None and isinstance(choice, Curriculum):
            generator.restore(state.growth, choice)
        choice.restore(state.curriculum)
    return LoopState(choice, generator)


def one_step(session: Session, loop: LoopState, state: TrainState) -> TrainState:
    """Attempts, an update, and the checkpoint that the next step goes on from."""
    clock = Clock()
    experience = gather(session, loop, state, clock)
    attempts = experience.attempts
    summary = summarize(attempts.rollouts, list(attempts.verdicts.values()), flags=attempts.flags)
    metrics = learn(session, loop, state, experience, summary)
    clock.lap("update")
    publish(session.worker, session.engine, session.run.path / "weights", state.version + 1)
    metrics |= summary | {"switched_off": experience.disabled_hints}
    if experience.reward_terms:
        metrics["reward_terms"] = mean_terms(experience.reward_terms)
    metrics["seconds"] = clock.laps
    metrics |= observe(session, loop, attempts)
    state = replace(
        state,
        step=state.step + 1,
        disabled_hints=experience.disabled_hints,
        curriculum=loop.curriculum.state(),
        growth=loop.generator.state() if loop.generator is not None else {},
    )
    return record(session, loop, state, metrics, attempts.rollouts)


def gather(session: Session, loop: LoopState, state: TrainState, clock: Clock) -> StepExperience:
    """Draw the step's tasks, have them attempted and judged, and write hints and reward terms."""
    recipe, run, step = session.recipe, session.run, state.step
    tasks, levels = with_levels(
        draw(loop.curriculum, session.practice, recipe.rl.tasks_per_step), recipe.effort, step
    )
    occasion = Occasion("train", step, recipe.rollout.attempts, recipe.seed)
    attempts = collect(run, session.engine, tasks, recipe.harness, occasion, progress=session.progress)
    groups, verdicts = attempts.groups, attempts.verdicts
    refuse_stale(run, attempts.rollouts, state.version)
    clock.lap("attempts")
    hints = run.once("hints", Hint, "train", step, lambda: hints_on(session, groups, tasks, verdicts))
    chosen, disabled = feedback.choose(hints, recipe.feedback.detectors), state.disabled_hints
    if recipe.feedback.form.scope == "rollout":
        chosen = demonstrations.solutions(attempts.rollouts, {task.id: task for task in tasks})
    else:
        disabled = through_gate(session, state, chosen, groups, tasks)
    reward_terms = reward_terms_of(session, groups, tasks, levels, step)
    session.engine.flush()  # keys and values make room for the update
    clock.lap("feedback")
    chosen = [hint for hint in chosen if hint.detector not in disabled]
    return StepExperience(attempts, chosen, reward_terms, disabled)


def learn(
    session: Session,
    loop: LoopState,
    state: TrainState,
    experience: StepExperience,
    summary: Mapping[str, Any],
) -> dict[str, Any]:
    """Take one optimizer step; metrics as `Trainer.step` gives them."""
    recipe, step = session.recipe, state.step
    session.progress(
        0,
        0,
        f"train {step}: update {step + 1} of {recipe.rl.steps} ({in_words(summary)}){time_left(recipe, loop, step)}",
    )
    compiled = compiled_of(session, experience)
    metrics = session.trainer.step(compiled.samples) | {"skipped_hints": dict(compiled.skipped_hints)}
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


def observe(session: Session, loop: LoopState, attempts: Experience) -> dict[str, Any]:
    """Tell curriculum and task generator how the attempts ended; metrics of the pool."""
    curriculum = loop.curriculum
    verdicts = list(attempts.verdicts.values())
    curriculum.observe(verdicts, attempts.rollouts)
    for proof in flag_policy.quarantined(attempts.flags, attempts.rollouts, session.practice):
        curriculum.quarantine(proof.tasks(session.practice), proof.reason)
    if loop.generator is not None and isinstance(curriculum, Curriculum):
        loop.generator.poll(curriculum, verdicts)
    return {"curriculum": curriculum.counts(), "repeated_tasks": curriculum.repeated}


def record(
    session: Session,
    loop: LoopState,
    state: TrainState,
    metrics: dict[str, Any],
    rollouts: Sequence[Rollout],
) -> TrainState:
    """Keep the step's metrics and checkpoint, and decide whether the run goes on."""
    recipe, run = session.recipe, session.run
    if reason := why_stop(session, loop, state, metrics, rollouts):
        metrics["stopped"] = reason
        session.progress(state.step, recipe.rl.steps, reason)
        state = replace(state, stopped=reason)
    run.append("metrics", [metrics], "train", state.step - 1)
    session.worker.save(state, kept=stability.WINDOW + 1)
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


def hints_on(
    session: Session, groups: Sequence[Group], tasks: Sequence[Task], verdicts: Mapping[str, Verdict]
) -> list[Hint]:
    """Hints of the rules, and the critic's on unsolved attempts about which the rules are silent."""
    settings, limit = session.recipe.feedback, session.recipe.critic.rollouts
    hints = feedback.write(
        groups,
        tasks,
        session.renderer.codec,
        tools=session.recipe.agent.tools.specs,
        detectors=feedback.named(settings.detectors),
    )
    known, hinted = {task.id: task for task in tasks}, {hint.rollout_id for hint in hints}
    silent = [
        rollout
        for group in groups
        for rollout in group.rollouts
        if rollout.id not in hinted and is_trainable(rollout, verdicts) and not verdicts[rollout.id].solved
    ]
    for rollout in subsample(silent, limit) if limit else []:
        task = known[rollout.task_id]
        secrets = [syntax.legible(data) for data in folder.protected_files(task).values()]
        secrets += [text for text in folder.gold_patch(task).files.values() if text]
        hint = critic.read(
            task,
            rollout,
            verdicts[rollout.id],
            session.critic,
            hidden=secrets,
            seed=session.recipe.seed,
        )
        hints += [hint] if hint else []
    return hints


def with_levels(
    tasks: Sequence[Task], settings: EffortSettings, step: int
) -> tuple[list[Task], dict[str, Effort]]:
    """The step's tasks as their prompts put them, and task id to the effort that the prompt asks for."""
    levels: dict[str, Effort] = {}
    for number, task in enumerate(tasks):
        if level := settings.level(step, number):
            levels[task.id] = level
    return [with_effort(task, levels[task.id]) if task.id in levels else task for task in tasks], levels


def reward_terms_of(
    session: Session, groups: Sequence[Group], tasks: Sequence[Task], levels: Mapping[str, Effort], step: int
) -> list[RewardTerms]:
    """Rewards and penalties of each attempt besides its verdict; nothing where the recipe asks for none."""
    recipe, known = session.recipe, {task.id: task for task in tasks}
    if not (recipe.rewards.terms or recipe.effort.weight or levels):
        return []

    def count() -> list[RewardTerms]:
        rollouts = [rollout for group in groups for rollout in group.rollouts]
        penalties = effort.penalties(rollouts, session.renderer, recipe.effort, levels)
        reward_terms = []
        for rollout in rollouts:
            terms = rewards.auxiliary(known[rollout.task_id], rollout, recipe.rewards.terms)
            terms |= {"effort": -penalties[rollout.id]} if rollout.id in penalties else {}
            reward_terms.append(RewardTerms(rollout.id, terms, levels.get(rollout.task_id, "")))
        return reward_terms

    return session.run.once("reward_terms", RewardTerms, "train", step, count)


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
    loop: LoopState,
    state: TrainState,
    metrics: dict[str, Any],
    rollouts: Sequence[Rollout],
) -> str:
    """The reason for which the run must end after the step that led here, or "": it is not well, or nothing is left to
    draw for another step."""
    if reason := watch(session, state, metrics, rollouts):
        return reason
    settings = session.recipe.rl
    dry = loop.curriculum.why_dry(settings.tasks_per_step) if state.step < settings.steps else ""
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
        version = state.watch.healthy(state.step - 1)
        worker.go_back(version)
        reason = f"stopped after step {state.step - 1}: {reason}; back to the weights of step {version}"
    return reason
