"""The stage `distill`: learning from demonstrations by one's own words (SDFT and OPSD), with forgetting measured.

The policy answers without the demonstration; the teacher, the same model that was shown it, scores the same tokens; the
divergence between the two is the loss (SDFT, arXiv 2601.19897). With attempts at practice tasks the demonstration is
the task's solution (OPSD, arXiv 2601.18734). Nothing is imitated token by token: what the policy would never say is
never trained on, which is why it forgets less than fine-tuning, and why forgetting is measured and not assumed.
"""

from __future__ import annotations

import hashlib
import json
import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

from woodshed import documents
from woodshed.agent.attempt import turn_seed
from woodshed.engines.engine import Engine, SampleRequest, sample_all
from woodshed.experience import Collector, token_texts
from woodshed.experience.compile import (
    Compiled,
    HintOptions,
    hint_branches,
    rollout_sample,
    rollout_samples,
    subsample,
    with_branches,
)
from woodshed.experience.samples import TrainingSample
from woodshed.feedback import demonstrations
from woodshed.learning.checkpoint import TrainState
from woodshed.learning.publish import publish
from woodshed.records import Hint, Patch, RecipeError, Rollout, Task, Turn
from woodshed.runs.folder import RunDir
from woodshed.stages.recipe import DistillSettings, Recipe
from woodshed.stages.session import Clock, Session, begin, refuse_stale
from woodshed.tokens.renderer import Renderer

T = TypeVar("T")

SYSTEM = "You are a helpful assistant."
ANSWER_TOKENS = 256
"""Length of the longest answer."""
"""System prompt of the answers."""
MEASURED = 32  # demonstrations on which likelihoods are measured, spread evenly


@dataclass(frozen=True)
class Demonstration:
    """A question with an example of a good answer, or with the knowledge that an answer needs."""

    prompt: str
    demonstration: str

    @property
    def id(self) -> str:
        """16 hex digits of its content's SHA-256."""
        return hashlib.sha256(json.dumps([self.prompt, self.demonstration]).encode()).hexdigest()[:16]


@dataclass(frozen=True)
class Material:
    """The demonstrations that a run learns from, and what it must not forget over them."""

    known: Sequence[Demonstration]
    earlier: Sequence[Demonstration]
    tasks: Sequence[Task]
    """Practice tasks, whose solutions are demonstrations too."""
    answers: Sequence[Rollout] = ()
    """The policy's answers to the earlier prompts before the stage."""


def run(session: Session, state: TrainState) -> None:
    """Learn from demonstrations, and measure what was learned and forgotten."""
    settings, folder, engine = session.recipe.distill, session.run, session.engine
    material = prepare(session.recipe, folder, session.practice)
    begin(
        session,
        state,
        session.recipe.optimizer,
        session.recipe.loss.model_copy(update={"weight": 0.0, "kl_coef": 0.0}),
        settings.feedback,
        steps=settings.steps,
        message_tokens=ANSWER_TOKENS,
    )
    publish(session.worker, engine, folder.path / "weights", state.step)
    before = folder.once("rollouts", Rollout, "earlier", 0, lambda: first_answers(session, material.earlier))
    material = replace(material, answers=before)
    session.progress(state.step, settings.steps, "distillation")
    for step in range(state.step, settings.steps):
        clock = Clock()
        metrics: dict[str, Any] = {} if step else {"before": measured(session, material)}
        rollouts = gather(session, state, material)
        clock.lap("attempts")
        compiled = compiled_of(session, rollouts, material)
        metrics |= session.trainer.step(compiled.samples) | {"skipped_hints": dict(compiled.skipped_hints)}
        clock.lap("update")
        folder.append("divergences", metrics.pop("divergences"), state.stage, step)
        publish(session.worker, engine, folder.path / "weights", step + 1)
        state = replace(state, step=step + 1)
        is_due = state.step % session.recipe.checkpoint_every == 0 or state.step == settings.steps
        if is_due:
            metrics |= measured(session, material)
        folder.append("metrics", [{**metrics, "seconds": clock.laps}], state.stage, step)
        if is_due:
            session.worker.save(state)
        session.progress(state.step, settings.steps, f"distillation, divergence {metrics['kl_loss']:.3f}")


def prepare(recipe: Recipe, run: RunDir, tasks: Sequence[Task]) -> Material:
    """Read what the recipe gives to learn from, from the run's own copies.

    Raises:
        RecipeError: there is nothing, or a file of demonstrations cannot be read.
    """
    settings = recipe.distill
    known, earlier = keep(run, settings)
    if not (known and settings.answers_per_step) and not (tasks and settings.tasks_per_step):
        raise RecipeError(
            'stages has "distill", but distill.demonstrations hold nothing and there are no practice tasks to attempt; '
            "name a file with demonstrations, or tasks.train and distill.tasks_per_step"
        )
    return Material(known, earlier, tasks)


def first_answers(session: Session, earlier: Sequence[Demonstration]) -> list[Rollout]:
    """Answer earlier prompts with the weights before the stage."""
    asked = subsample(earlier, MEASURED)
    return answer(asked, session.engine, name="earlier-0", seed=session.recipe.seed)


def gather(session: Session, state: TrainState, material: Material) -> list[Rollout]:
    """A step's answers and attempts, from the run folder where it holds them."""
    folder, step = session.run, state.step
    rollouts = folder.once("rollouts", Rollout, state.stage, step, lambda: attempts(session, state, material))
    refuse_stale(folder, rollouts, step)
    folder.once("token_texts", dict, state.stage, step, lambda: [token_texts(rollouts, session.renderer)])
    return rollouts


def attempts(session: Session, state: TrainState, material: Material) -> list[Rollout]:
    """Answer prompts, and attempt practice tasks once each."""
    recipe, settings, engine = session.recipe, session.recipe.distill, session.engine
    name, step = f"{state.stage}-{state.step}", state.step
    asked = draw(material.known, settings.answers_per_step, step, recipe.seed)
    answers = answer(asked, engine, name=name, seed=recipe.seed)
    collector = Collector(
        engine,
        recipe.rollout,
        recipe.agent,
        seed=recipe.seed,
        prefix=name,
        sandboxes=recipe.sandbox.create(),
    )
    groups = collector.collect(draw(material.tasks, settings.tasks_per_step, step, recipe.seed), attempts=1)
    return answers + [rollout for group in groups for rollout in group.rollouts]


def compiled_of(session: Session, rollouts: Sequence[Rollout], material: Material) -> Compiled:
    """A step's answers with their demonstrations as hints."""
    hints, engine = hints_for(rollouts, material.known, material.tasks), session.engine
    options = session.recipe.distill.feedback.hint_options(engine.context_length)
    options = replace(options, scope="rollout")  # a demonstration is about nothing less
    compiled = compile_answers(rollouts, hints, session.renderer, options)
    engine.flush()  # keys and values make room for the update
    return compiled


def measured(session: Session, material: Material) -> dict[str, float]:
    """Log-probs of new and earlier demonstrations, in nats a token (`measure`)."""
    answers = [rollout_sample(rollout) for rollout in material.answers if rollout.turns[0].sampled_ids]
    return measure(session.worker.logps, session.renderer, material.known, material.earlier, answers, SYSTEM)


def read_demonstrations(paths: Sequence[Path]) -> list[Demonstration]:
    """Read the demonstrations of some files, in order.

    Raises:
        RecipeError: a file that cannot be read, or a line that is not a demonstration; names file and line.
    """
    read: list[Demonstration] = []
    for path in paths:
        for number, line in enumerate(_lines(path), 1):
            try:
                data = json.loads(line)
                each = Demonstration(data["prompt"], data["demonstration"])
                assert all(isinstance(text, str) and text for text in (each.prompt, each.demonstration))
            except (ValueError, KeyError, TypeError, RecursionError, AssertionError):
                form = '{"prompt": "...", "demonstration": "..."}'
                raise RecipeError(f"{path}, line {number} is not of the form {form}: {line[:60]!r}") from None
            read.append(each)
    return read


def keep(run: RunDir, settings: DistillSettings) -> tuple[list[Demonstration], list[Demonstration]]:
    """Read what is learned from and what must not be forgotten, from the run's own copies: made once, read by a resume.

    Raises:
        RecipeError: as `read_demonstrations`.
        RunError: the copies cannot be written.
    """
    kept = []
    for name, paths in (("distill", settings.demonstrations), ("earlier", settings.earlier)):
        copy = Path("demonstrations", f"{name}.jsonl")
        if not (run.path / copy).exists():
            read_demonstrations(paths)  # a mistake is told with the name of the file that holds it
            run.write_text(str(copy), "".join(f"{line}\n" for path in paths for line in _lines(path)))
        kept.append(read_demonstrations([run.path / copy]))
    return kept[0], kept[1]


def _lines(path: Path) -> list[str]:
    try:
        text = documents.read(path, RecipeError, most=documents.MOST_DATA_BYTES)
    except FileNotFoundError:
        raise RecipeError(f"{path} cannot be read: it is not there") from None
    return text.removesuffix("\n").split("\n") if text else []  # JSON may hold what `splitlines` splits at


def draw(items: Sequence[T], count: int, step: int, seed: int) -> list[T]:
    """Draw the items of a step: every item once before any twice, each time shuffled."""
    chosen: list[T] = []
    for position in range(step * count, (step + 1) * count if items else 0):
        around, index = divmod(position, len(items))
        order = list(range(len(items)))
        random.Random(f"{seed}/{around}/study").shuffle(order)
        chosen.append(items[order[index]])
    return chosen


def answer(asked: Sequence[Demonstration], engine: Engine, *, name: str, seed: int) -> list[Rollout]:
    """Answer prompts without their demonstrations, as rollouts of one turn.

    Raises:
        SamplerError: the engine failed, or a prompt does not fit its context.
    """
    contexts = [engine.renderer.start(SYSTEM, each.prompt, ()) for each in asked]
    ids = [f"{name}-{each.id}-{number}" for number, each in enumerate(asked)]
    requests = [
        SampleRequest(context.ids, ANSWER_TOKENS, turn_seed(seed, rollout_id, 0))
        for context, rollout_id in zip(contexts, ids, strict=True)
    ]
    engine.flush()  # answers made again after a kill must come out the same
    rollouts = []
    samples = sample_all(engine, requests)
    for rollout_id, each, context, sample in zip(ids, asked, contexts, samples, strict=True):
        turn = Turn(
            context_ids=tuple(context.ids),
            opening=context.opening,
            sampled_ids=tuple(sample.ids),
            logps=tuple(sample.logps),
            versions=sample.versions,
            finish_reason=sample.finish_reason,
            text=engine.renderer.decode(sample.ids),
            calls=(),
            observations=(),
            error_kind=None,
            experts=sample.experts,
        )
        ended = "finished" if sample.finish_reason == "stop" else "max_tokens"
        rollouts.append(Rollout(rollout_id, each.id, each.id, 0, seed, (turn,), Patch({}), ended, 0.0))
    return rollouts


def hints_for(
    rollouts: Sequence[Rollout], known: Sequence[Demonstration], tasks: Sequence[Task]
) -> list[Hint]:
    """Hints for the teacher: for each answer its demonstration, for each attempt its task's solution."""
    texts = {each.id: each.demonstration for each in known}
    attempts = [rollout for rollout in rollouts if rollout.task_id not in texts]
    solutions = demonstrations.solutions(attempts, {task.id: task for task in tasks})
    answers = [rollout for rollout in rollouts if rollout.task_id in texts]
    return [demonstrations.example(rollout, texts[rollout.task_id]) for rollout in answers] + solutions


def compile_answers(
    rollouts: Sequence[Rollout], hints: Sequence[Hint], renderer: Renderer, options: HintOptions
) -> Compiled:
    """A step's samples: no policy gradient, every answer a branch. What cannot be used is counted."""
    usable = {
        rollout.id: rollout
        for rollout in rollouts
        if rollout.ended != "sandbox_lost" and any(turn.sampled_ids for turn in rollout.turns)
    }
    branches, skipped = hint_branches(usable, hints, renderer, options)
    samples = with_branches(
        [sample for rollout in usable.values() for sample in rollout_samples(rollout)], branches
    )
    return Compiled(tuple(samples), skipped)


def example_sample(each: Demonstration, renderer: Renderer, system: str) -> TrainingSample:
    """A demonstration as if it had been the policy's answer: likelihoods are measured on it."""
    context, text = renderer.start(system, each.prompt, ()), renderer.encode_message(each.demonstration)
    ids = (*context.ids, *text)
    return TrainingSample(ids, tuple(range(len(context.ids), len(ids))))


def measure(
    logps: Callable[..., Sequence[Sequence[float]]],
    renderer: Renderer,
    known: Sequence[Demonstration],
    earlier: Sequence[Demonstration],
    answers: Sequence[TrainingSample],
    system: str,
) -> dict[str, float]:
    """Log-probs that say what was learned and forgotten, in nats a token.

    `demonstrated_logp`: log-prob of the demonstrations as answers, without having read them; up is learned.
    `earlier_logp`: the same of earlier ones; down is forgotten. `earlier_kl`: KL(before || now), estimated without
    bias on the policy's answers to the earlier prompts before the stage (`answers`); 0 is nothing forgotten.
    """
    measures: dict[str, float] = {}
    for name, several in (("demonstrated_logp", known), ("earlier_logp", earlier)):
        if several:
            samples = [example_sample(each, renderer, system) for each in subsample(several, MEASURED)]
            measures[name] = _mean(logps(samples, temperature=1.0))
    if answers:
        sampled = _mean([answer.logps for answer in answers])
        measures["earlier_kl"] = sampled - _mean(logps(answers))
    return measures


def _mean(logps: Sequence[Sequence[float]]) -> float:
    return math.fsum(map(math.fsum, logps)) / max(sum(map(len, logps)), 1)
