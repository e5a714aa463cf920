"""The stage `sft`: supervised fine-tuning on attempts that are worth imitating."""

from __future__ import annotations

import json
import random
import time
from collections.abc import Sequence
from pathlib import Path

from woodshed.experience import scripted_expert, transcripts
from woodshed.experience.compile import rollout_samples, sft_sample
from woodshed.experience.rename_augmentation import renamed
from woodshed.experience.samples import TrainingSample
from woodshed.experience.scripted_expert import SLIP, ExpertAttempt
from woodshed.experience.transcripts import Transcript
from woodshed.learning.checkpoint import TrainState
from woodshed.records import RecipeError, Task, from_json, to_json
from woodshed.runs.folder import RunDir
from woodshed.stages.recipe import Recipe
from woodshed.stages.session import Session, begin
from woodshed.tokens.model_files import load_tokenizer
from woodshed.tokens.renderer import Renderer, create_renderer
from woodshed.tokens.token_kinds import text_positions

SCRIPTED = "scripted"


def run(session: Session, state: TrainState) -> None:
    """Imitate scripted attempts, with reminders before a share of their turns, and transcripts.

    Raises:
        RecipeError: there is nothing to imitate, or the loss is not finite.
    """
    settings, recipe, folder = session.recipe.sft, session.recipe, session.run
    attempts = scripted_attempts(session)
    known = prepare(recipe, folder, session.heldout)
    refuse_long(known, session.engine.context_length)
    begin(session, state, settings.schedule(recipe.optimizer), recipe.loss, steps=settings.steps)
    for step in range(state.step, settings.steps):
        started = time.monotonic()
        taken = session.trainer.step(samples(session, attempts, known, step))
        metrics = {"sft_loss": taken["ce_loss"], "sft_tokens": taken["ce_tokens"]}
        metrics |= {name: taken[name] for name in ("grad_norm", "learning_rate")}
        seconds = {"update": time.monotonic() - started}
        folder.append("metrics", [{**metrics, "seconds": seconds}], state.stage, step)
        if (step + 1) % recipe.checkpoint_every == 0 or step + 1 == settings.steps:
            session.worker.save(TrainState(state.stage, step + 1, state.steps_before))
        session.progress(step + 1, settings.steps, f"sft, loss {metrics['sft_loss']:.3f}")


def prepare(recipe: Recipe, run: RunDir, heldout: Sequence[Task]) -> list[Transcript]:
    """Read the transcripts that the recipe names, from the run's own copy: made once, read by a resume.

    Raises:
        RecipeError: one cannot be read, or holds nothing to imitate.
    """
    copy = Path("demonstrations", "sft.jsonl")
    paths = [Path(name) for name in recipe.sft.imitate if name != SCRIPTED]
    if paths and not (run.path / copy).exists():
        tokenizer, folder = load_tokenizer(recipe.policy.model)
        renderer = create_renderer(tokenizer, codec=recipe.policy.codec, model_dir=folder)
        apart = frozenset(task.id for task in heldout)
        sources = [each for path in paths for each in transcripts.read(path, renderer, apart)]
        run.write_text(str(copy), "".join(f"{json.dumps(to_json(each))}\n" for each in sources))
    lines = (run.path / copy).read_text(encoding="utf-8").splitlines() if paths else []
    return [from_json(Transcript, json.loads(line)) for line in lines]


def refuse_long(known: Sequence[Transcript], context_length: int) -> None:
    """Check that every transcript fits the model.

    Raises:
        RecipeError: names one that does not.
    """
    for each in known:
        if len(each.ids) > context_length:
            raise RecipeError(
                f"sft.imitate: {each.id} has {len(each.ids)} tokens, and the model's context {context_length}; take it "
                "out or shorten it"
            )


def scripted_attempts(session: Session) -> list[ExpertAttempt]:
    """Play scripted attempts at the practice tasks, where the recipe imitates them."""
    recipe = session.recipe
    if SCRIPTED not in recipe.sft.imitate:
        return []

    def perform(task: Task, number: int) -> ExpertAttempt:
        return scripted_expert.expert_attempt(
            task,
            session.renderer,
            recipe.sft,
            recipe.agent,
            attempt=number,
            seed=recipe.seed,
            context_length=session.engine.context_length,
            sandboxes=recipe.sandbox.create(),
        )

    return scripted_expert.play(
        session.run,
        session.practice,
        perform,
        attempts=recipe.sft.attempts,
        threads=recipe.rollout.tool_threads,
        progress=session.progress,
    )


def samples(
    session: Session, attempts: Sequence[ExpertAttempt], transcripts: Sequence[Transcript], step: int
) -> list[TrainingSample]:
    """Training samples of step `step`. Scripted attempts are imitated under made-up names of the file, the function and
    its class, and other line numbers, others in every epoch: so a small model learns to copy them from the task instead
    of recalling those it was warmed up on."""
    recipe, settings, seed = session.recipe, session.recipe.sft, session.recipe.seed
    tasks = {task.id: task for task in session.practice}
    drawn: list[TrainingSample] = []
    for index, epoch in draw(len(attempts) + len(transcripts), settings.batch, step, seed):
        if index >= len(attempts):
            transcript = transcripts[index - len(attempts)]
            sample = TrainingSample(transcript.ids, transcript.imitated, rollout_id=transcript.id)
            drawn.append(sft_sample(sample))
            continue
        attempt = attempts[index]
        task, spelling = tasks[attempt.rollout.task_id], f"{seed}/{epoch}"
        attempt = renamed(attempt, task, session.renderer, settings, agent=recipe.agent, seed=spelling)
        code = random.Random(f"{seed}/{epoch}/{attempt.rollout.id}/code").random() < settings.code_share
        drawn += expert_samples(attempt, session.renderer, code=code)
    return drawn


def expert_samples(attempt: ExpertAttempt, renderer: Renderer, *, code: bool = True) -> list[TrainingSample]:
    """The attempt as training samples, reminders inserted; every message counts but slips, and none of the harness's
    tokens do. Without `code`, what edits write does not count either, also where a planted fault spoils the edit."""
    turns = attempt.rollout.turns
    reminders = {hint.turn: renderer.hint(hint.text) for hint in attempt.reminders}
    unwanted = {index for index, turn in enumerate(turns) if turn.oracle == SLIP}
    written = {
        call.arguments.get("new") or call.arguments.get("content") for turn in turns for call in turn.calls
    }
    texts = sorted(str(text) for text in written if text)
    masked = {} if code else {n: text_positions(turn, texts, renderer) for n, turn in enumerate(turns)}
    samples = rollout_samples(attempt.rollout, reminders=reminders, context_only=unwanted, masked=masked)
    return [sft_sample(sample) for sample in samples]


def draw(count: int, batch: int, step: int, seed: int) -> list[tuple[int, int]]:
    """Draw (number of an item, epoch) for step `step`: every item once before any twice, each time shuffled."""
    chosen: list[tuple[int, int]] = []
    for position in range(step * batch, (step + 1) * batch):
        epoch, index = divmod(position, count)
        order = list(range(count))
        random.Random(f"{seed}/{epoch}").shuffle(order)
        chosen.append((order[index], epoch))
    return chosen
