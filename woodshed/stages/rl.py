"""In which order everything happens: the loop, and nothing but the loop.

    draw tasks -> attempt -> judge -> hint -> pack -> update -> load the new weights into the sampler -> observe

Every stage of a step is kept in the run folder as it ends, so a run that is killed anywhere goes on where it was.
"""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from woodshed import feedback, synthesis
from woodshed.agent.prompt import Effort, with_effort
from woodshed.curriculum import Curriculum
from woodshed.engines.engine import Engine, WeightUpdate
from woodshed.engines.http import HttpEngine
from woodshed.engines.local import LocalEngine
from woodshed.evals import effort as calibration
from woodshed.evals import evaluation, suite, summarize
from woodshed.experience import Occasion, collect
from woodshed.feedback import critic, demonstrations, rewards
from woodshed.feedback.gate import Measured, switched_off
from woodshed.grading import effort
from woodshed.grading.effort import EffortSettings
from woodshed.learning import checkpoint, hint_gate, packing, stability
from woodshed.learning.checkpoint import TrainState
from woodshed.learning.loss_settings import FeedbackSettings
from woodshed.learning.packing import Batch
from woodshed.learning.policy import Policy
from woodshed.learning.teacher import Teacher
from woodshed.learning.update import MOST_LOST, learning_rate, make_optimizer, update
from woodshed.monitors import flag_policy
from woodshed.pysource import syntax
from woodshed.records import Flag, Group, Hint, RecipeError, RewardTerms, Rollout, Task, Verdict
from woodshed.runs.folder import RunDir
from woodshed.stages import preflight, sft
from woodshed.stages.distill import learn, subject_of
from woodshed.stages.recipe import Recipe
from woodshed.stages.session import Clock, Progress, Session, begin, forward_for, refuse_stale
from woodshed.stages.task_sets import task_sets
from woodshed.synthesis.task_generator import TaskGenerator
from woodshed.tasks import folder
from woodshed.tokens.model_files import load_tokenizer
from woodshed.tokens.renderer import create_renderer


def train(recipe: Recipe, run: RunDir, progress: Progress) -> None:
    """Warm up, study, evaluate, practise, evaluate. Resumes from whatever the run folder holds.

    Raises:
        WoodshedError: bad tasks, weights or settings, a full disk. The run folder stays resumable.
    """
    preflight.refuse(recipe)
    practice, heldout = task_sets(recipe, run)
    preflight.refuse(recipe, num_tasks=len(practice))
    subject = subject_of(run, recipe.distill, practice)
    progress(0, 0, f"loading {recipe.policy.model}")
    policy, loaded = Policy.load(recipe.policy, seed=recipe.seed)
    renderer = create_renderer(loaded.tokenizer, codec=recipe.policy.codec, model_dir=loaded.directory)
    engine = LocalEngine(policy.model, renderer, recipe.sampler)
    session = Session(recipe, run, policy, engine, renderer, critic_of(recipe, engine), progress)
    newest = checkpoint.latest(run)
    position = checkpoint.read_position(newest) if newest else TrainState()
    if position.phase == "sft":
        warm_up(session, position, practice)
        position = TrainState("distill")
    if position.phase == "distill":
        learn(session, position, subject)
        position = TrainState("rl")
    practise(session, position, practice, heldout)


def warm_up(session: Session, position: TrainState, tasks: Sequence[Task]) -> None:
    """Imitate oracle attempts (SFT), with reminders before a share of their turns."""
    settings, run, policy = session.recipe.sft, session.run, session.policy
    if not settings.steps:
        return
    played = sft.play(
        run,
        tasks,
        session.renderer,
        settings,
        session.recipe.agent,
        seed=session.recipe.seed,
        threads=session.recipe.rollout.tool_threads,
        context_length=session.engine.context_length,
        progress=session.progress,
        sandboxes=session.recipe.sandbox.create(),
    )
    optimizer = make_optimizer(policy, settings.optimizer)
    if newest := checkpoint.latest(run):
        checkpoint.restore(newest, policy, optimizer)
    lost = 0
    for step in range(position.step, settings.steps):
        started = time.monotonic()
        rows = sft.rows(
            played, tasks, session.renderer, step, settings, session.recipe.agent, seed=session.recipe.seed
        )
        metrics = sft.imitate(policy, optimizer, rows, step, settings)
        lost = 0 if math.isfinite(metrics["grad_norm"]) else lost + 1
        if lost > MOST_LOST or not math.isfinite(metrics["sft_loss"]):
            raise RecipeError(
                f"step {step} of the warm-up has loss {metrics['sft_loss']} and a gradient of {metrics['grad_norm']}; "
                "lower sft.optimizer.learning_rate"
            )
        seconds = {"update": time.monotonic() - started}
        run.append("metrics", [{**metrics, "seconds": seconds}], "sft", step)
        if (step + 1) % settings.checkpoint_every == 0 or step + 1 == settings.steps:
            checkpoint.save(run, policy, optimizer, TrainState("sft", step + 1))
        session.progress(step + 1, settings.steps, f"warm-up, loss {metrics['sft_loss']:.3f}")


@dataclass(frozen=True)
class LoopState:
    """What the steps of practice share beside the session."""

    tasks: Sequence[Task]
    optimizer: torch.optim.Optimizer
    teacher: Teacher
    feedback: FeedbackSettings
    """The recipe's, as far as the model can take them."""
    curriculum: Curriculum
    growth: TaskGenerator | None


@dataclass(frozen=True)
class Commented:
    """A step's attempts, and what is said and paid about them."""

    groups: Sequence[Group]
    verdicts: Mapping[str, Verdict]
    flags: Sequence[Flag]
    hints: Sequence[Hint]
    """Those that are trained on."""
    reward_terms: Sequence[RewardTerms]
    off: dict[str, str]
    """Classes of hints that are not trained on, with the reason."""

    @property
    def rollouts(self) -> list[Rollout]:
        return [made for group in self.groups for made in group.rollouts]


def practise(session: Session, position: TrainState, tasks: Sequence[Task], heldout: Sequence[Task]) -> None:
    """Reinforcement learning with targeted feedback."""
    recipe, run, engine = session.recipe, session.run, session.engine
    optimizer, teacher = begin(session, position, recipe.optimizer, recipe.feedback, "start")
    curriculum = Curriculum(
        tasks,
        recipe.curriculum,
        seed=recipe.seed,
        attempts=recipe.rollout.attempts,
        revalidate=lambda task: not synthesis.check(task),
    )
    growth = TaskGenerator(run, seed=recipe.seed) if recipe.curriculum.grow else None
    if position.step:
        if growth is not None:
            growth.restore(position.growth, curriculum)
        curriculum.restore(position.curriculum)
    how = forward_for(session, recipe.feedback)
    practice = LoopState(tasks, optimizer, teacher, how, curriculum, growth)
    engine.update_weights(WeightUpdate("shared"), position.step)

    steps, every = recipe.rl.steps, recipe.evaluation.every
    while position.step <= steps and not position.stopped:
        if position.step in (0, steps) or (every and position.step % every == 0):
            evaluate(session, heldout, step=position.step)
        if position.step == steps:
            break
        position = one_step(session, practice, position)
    if growth is not None:
        growth.close()
    if position.stopped and stability.DISAGREES not in position.stopped:
        engine.update_weights(WeightUpdate("shared"), position.step)
        evaluate(session, heldout, step=position.step)
    checkpoint.export(run, session.policy, dtype=recipe.policy.export_dtype)


def one_step(session: Session, practice: LoopState, position: TrainState) -> TrainState:
    """Attempts, an update, and the checkpoint that the next step goes on from."""
    recipe, run, policy, step = session.recipe, session.run, session.policy, position.step
    clock = Clock()
    seen = gather(session, practice, position, clock)
    curriculum, growth, verdicts = practice.curriculum, practice.growth, list(seen.verdicts.values())
    summary = summarize(seen.rollouts, verdicts, flags=seen.flags)
    invalid, reward = (summary[name]["value"] for name in ("invalid_calls", "reward"))
    seen_as = (
        "nothing counted"
        if None in (invalid, reward)
        else f"{invalid:.0%} invalid calls, reward {reward:.2f}"
    )
    session.progress(0, 0, f"train {step}: update {step + 1} of {recipe.rl.steps} ({seen_as})")
    metrics = update(
        policy,
        practice.optimizer,
        batch_of(session, practice, seen),
        scale=position.scale,
        teacher=practice.teacher,
        learning_rate=learning_rate(recipe.optimizer, step, recipe.rl.steps),
        message_tokens=recipe.agent.turn_tokens,
        temperature=recipe.sampler.temperature,
        objective=recipe.loss,
        feedback=practice.feedback,
        max_grad_norm=recipe.optimizer.max_grad_norm,
    )
    clock.lap("update")
    if not (metrics["trained_rollouts"] or metrics["targets"]):
        nothing = "nothing to learn from: no group has attempts that count and differ, no turn a hint"
        session.progress(step + 1, recipe.rl.steps, f"train {step}: {nothing}")
    run.append("divergences", metrics.pop("divergences"), "train", step)
    session.engine.update_weights(WeightUpdate("shared"), step + 1)
    curriculum.observe(verdicts, seen.rollouts)
    if recipe.monitors.quarantine:
        for proof in flag_policy.quarantined(seen.flags, seen.rollouts, practice.tasks):
            curriculum.quarantine(proof.tasks(practice.tasks), proof.reason)
    metrics |= summary | {"switched_off": seen.off}
    if seen.reward_terms:
        names = dict.fromkeys(name for found in seen.reward_terms for name in found.terms)
        metrics["reward_terms"] = {
            n: sum(p.terms.get(n, 0.0) for p in seen.reward_terms) / len(seen.reward_terms) for n in names
        }
    metrics["seconds"] = clock.laps
    if growth is not None:
        growth.poll(curriculum, verdicts)
    metrics |= {"curriculum": curriculum.counts(), "repeated_tasks": curriculum.repeated}
    position = replace(
        position,
        phase="rl",
        step=step + 1,
        off=seen.off,
        curriculum=curriculum.state(),
        growth=growth.state() if growth is not None else {},
    )
    if reason := why_stop(session, practice, position, metrics, seen.rollouts):
        metrics["stopped"] = reason
        session.progress(step + 1, recipe.rl.steps, reason)
        position = replace(position, stopped=reason)
    run.append("metrics", [metrics], "train", step)
    kept = recipe.stability.window + 1
    checkpoint.save(run, policy, practice.optimizer, position, practice.teacher.state(), kept=kept)
    return position


def gather(session: Session, practice: LoopState, position: TrainState, clock: Clock) -> Commented:
    """The step's tasks are drawn, attempted and judged, and the attempts commented on."""
    recipe, run, step = session.recipe, session.run, position.step
    drawn, asked = with_levels(practice.curriculum.draw(recipe.rl.tasks_per_step), recipe.effort, step)
    occasion = Occasion("train", step, recipe.rollout.attempts, recipe.seed)
    seen = collect(run, session.engine, drawn, recipe.harness, occasion, progress=session.progress)
    groups, verdicts = seen.groups, seen.verdicts
    refuse_stale(run, seen.rollouts, step)
    clock.lap("attempts")
    hints = run.once("hints", Hint, "train", step, lambda: hints_on(session, groups, drawn, verdicts))
    chosen, off = feedback.choose(hints, recipe.feedback.detectors), position.off
    if recipe.feedback.scope == "rollout":
        made = [rollout for group in groups for rollout in group.rollouts]
        chosen = demonstrations.solutions(made, {task.id: task for task in drawn})
    else:
        off = through_gate(session, position, chosen, groups, drawn)
    reward_terms = reward_terms_of(session, groups, drawn, asked, step)
    session.engine.flush()  # keys and values make room for the update
    clock.lap("feedback")
    return Commented(
        groups, verdicts, seen.flags, [h for h in chosen if h.detector not in off], reward_terms, off
    )


def batch_of(session: Session, practice: LoopState, seen: Commented) -> Batch:
    """What a step learns from."""
    recipe = session.recipe
    return packing.pack(
        seen.groups,
        seen.verdicts,
        seen.hints,
        session.renderer,
        scope=recipe.feedback.scope,
        placement=recipe.feedback.placement,
        max_targets=recipe.feedback.max_targets,
        keep_zero_advantage=recipe.loss.kl_coef > 0,
        excluded_ids=flag_policy.without_advantage(seen.flags, recipe.monitors),
        skip=practice.feedback.skip,
        skip_first=practice.feedback.skip_first,
        context_length=session.engine.context_length,
        reward_terms={found.rollout_id: found.total for found in seen.reward_terms},
    )


def hints_on(
    session: Session, groups: Sequence[Group], tasks: Sequence[Task], verdicts: Mapping[str, Verdict]
) -> list[Hint]:
    """What the rules say about the step's attempts, and a reader about the unsolved ones on which they are silent."""
    settings, asked = session.recipe.feedback, session.recipe.critic
    hints = feedback.write(
        groups,
        tasks,
        session.renderer.codec,
        detectors=feedback.named(settings.detectors),
        wordings=settings.wordings,
    )
    known, spoken = {task.id: task for task in tasks}, {hint.rollout_id for hint in hints}
    silent = [
        made
        for group in groups
        for made in group.rollouts
        if made.id not in spoken and packing.is_trainable(made, verdicts) and not verdicts[made.id].solved
    ]
    for made in packing.subsample(silent, asked.rollouts) if asked.rollouts else []:
        task = known[made.task_id]
        secrets = [syntax.legible(data) for data in folder.protected_files(task).values()]
        secrets += [text for text in folder.gold_patch(task).files.values() if text]
        said = critic.read(
            task, made, verdicts[made.id], session.reader, asked, hidden=secrets, seed=session.recipe.seed
        )
        hints += [said] if said else []
    return hints


def with_levels(
    tasks: Sequence[Task], settings: EffortSettings, step: int
) -> tuple[list[Task], dict[str, Effort]]:
    """The step's tasks as their prompts put them, and task id to the effort that the prompt asks for."""
    asked: dict[str, Effort] = {}
    for number, task in enumerate(tasks):
        if level := settings.level(step, number):
            asked[task.id] = level
    return [with_effort(task, asked[task.id]) if task.id in asked else task for task in tasks], asked


def reward_terms_of(
    session: Session, groups: Sequence[Group], tasks: Sequence[Task], asked: Mapping[str, Effort], step: int
) -> list[RewardTerms]:
    """What each attempt of the step is paid or charged besides its verdict; nothing where the recipe asks for none."""
    recipe, known = session.recipe, {task.id: task for task in tasks}
    if not (recipe.rewards.terms or recipe.effort.weight or asked):
        return []

    def count() -> list[RewardTerms]:
        rollouts = [made for group in groups for made in group.rollouts]
        charged = effort.penalties(rollouts, session.renderer, recipe.effort, asked)
        found = []
        for made in rollouts:
            terms = rewards.auxiliary(known[made.task_id], made, recipe.rewards.terms)
            terms |= {"effort": -charged[made.id]} if made.id in charged else {}
            found.append(RewardTerms(made.id, terms, asked.get(made.task_id, "")))
        return found

    return session.run.once("reward_terms", RewardTerms, "train", step, count)


def critic_of(recipe: Recipe, engine: Engine) -> Engine:
    """Who reads attempts: a server's model, or the policy itself."""
    if recipe.critic.endpoint is None:
        return engine
    tokenizer, _ = load_tokenizer(recipe.critic.model)
    return HttpEngine(recipe.critic.endpoint, create_renderer(tokenizer, codec="plain"))


def through_gate(
    session: Session,
    position: TrainState,
    hints: Sequence[Hint],
    groups: Sequence[Group],
    tasks: Sequence[Task],
) -> dict[str, str]:
    """The classes of hints that are not trained on from this step on, with the reason; measured where it is due."""
    recipe, settings = session.recipe, session.recipe.gate
    if not settings.every or position.step % settings.every:
        return position.off
    rollouts = {made.id: made for group in groups for made in group.rollouts}
    found = session.run.once(
        "gate",
        Measured,
        "train",
        position.step,
        lambda: hint_gate.measure(
            hints,
            rollouts,
            {task.id: task for task in tasks},
            session.policy,
            session.engine,
            settings,
            recipe.agent,
            step=position.step,
            seed=recipe.seed,
            temperature=recipe.sampler.temperature,
            micro_batch_tokens=recipe.loss.micro_batch_tokens,
            placement=recipe.feedback.placement,
            threads=recipe.rollout.tool_threads,
            sandboxes=recipe.sandbox.create(),
        ),
    )
    return switched_off(position.off, found, settings)


def why_stop(
    session: Session,
    practice: LoopState,
    position: TrainState,
    metrics: dict[str, Any],
    rollouts: Sequence[Rollout],
) -> str:
    """The reason for which the run must end after the step that led here, or "": it is not well, or nothing is left to
    draw for another step."""
    if reason := watch(session, position, metrics, rollouts, practice.teacher):
        return reason
    settings = session.recipe.rl
    dry = practice.curriculum.why_dry(settings.tasks_per_step) if position.step < settings.steps else ""
    return f"stopped after step {position.step - 1}: {dry}" if dry else ""


def watch(
    session: Session,
    position: TrainState,
    metrics: dict[str, Any],
    rollouts: Sequence[Rollout],
    teacher: Teacher,
) -> str:
    """The reason for which the run must stop after the step that led here, or "". Where it must, the policy gets the
    weights of the window's best step back."""
    settings, policy = session.recipe.stability, session.policy
    if settings.max_kl_to_start is not None:
        metrics["kl_to_start"] = stability.kl_to_start(
            policy,
            teacher.start,
            packing.subsample(rollouts, settings.kl_rollouts),
            temperature=session.recipe.sampler.temperature,
            micro_batch_tokens=session.recipe.loss.micro_batch_tokens,
        )
    rate = metrics["invalid_calls"]["value"]
    reason = position.watch.alarm(
        settings, rate, metrics.get("kl_to_start"), metrics.get("logp_gap_mean", 0.0)
    )
    if reason:
        version = position.watch.healthy(position.step - 1)
        policy.load_weights(checkpoint.version_weights(session.run, version))
        reason = f"stopped after step {position.step - 1}: {reason}; back to the weights of step {version}"
    return reason


def evaluate(session: Session, tasks: Sequence[Task], *, step: int) -> None:
    """Measure the policy on the held-out tasks; the run folder keeps it under phase "eval", and how effort follows
    difficulty, against the first evaluation, under "effort"."""
    if tasks:
        run = session.run
        recipe = session.recipe
        now = suite.evaluate(
            run,
            session.engine,
            tasks,
            recipe.harness,
            Occasion("eval", step, recipe.evaluation.attempts, recipe.seed),
            effort=recipe.evaluation.effort,
            progress=session.progress,
        )
        refuse_stale(run, [graded.rollout for graded in now.graded], step)
        first = now if step == 0 else evaluation.from_run(run)[0]
        if first.step < step:
            found = [calibration.change(first.graded, now.graded)]
            run.once("metrics", dict, "effort", step, lambda: found)
