"""The stage `sft`: supervised fine-tuning on attempts that are worth imitating."""

from __future__ import annotations

import json
import math
import random
import time
from collections.abc import Sequence
from pathlib import Path

import torch

from woodshed.experience import scripted_expert, transcripts
from woodshed.experience.rename_augmentation import renamed
from woodshed.experience.scripted_expert import SLIP, ExpertAttempt
from woodshed.experience.transcripts import Selection, Transcript
from woodshed.learning import checkpoint, gradients, packing, ranks
from woodshed.learning.checkpoint import TrainState
from woodshed.learning.optimizer import learning_rate, make_optimizer
from woodshed.learning.packing import Row, rollout_row
from woodshed.learning.policy import Policy
from woodshed.learning.update import MOST_LOST
from woodshed.muon import clip_grad_norm_
from woodshed.records import RecipeError, Task, from_json, to_json
from woodshed.runs.folder import RunDir
from woodshed.stages.recipe import Recipe, SFTSettings
from woodshed.stages.session import Session, newest_checkpoint
from woodshed.tokens.model_files import load_tokenizer
from woodshed.tokens.renderer import Renderer, create_renderer
from woodshed.tokens.token_kinds import text_positions

SCRIPTED = "scripted"


def run(session: Session, state: TrainState) -> None:
    """Imitate scripted attempts, with reminders before a share of their turns, and transcripts.

    Raises:
        RecipeError: there is nothing to imitate, or the loss is not finite.
    """
    settings, recipe, folder, policy = session.recipe.sft, session.recipe, session.run, session.policy
    attempts = scripted_attempts(session)
    known = prepare(recipe, folder, session.heldout)
    refuse_long(known, session.engine.context_length)
    optimizer, newest = make_optimizer(policy, settings.optimizer), newest_checkpoint(session)
    if newest is not None:
        checkpoint.restore(newest, policy, optimizer if state.step else None)
    lost = 0
    for step in range(state.step, settings.steps):
        started = time.monotonic()
        batch = rows(session, attempts, known, step)
        metrics = imitate(policy, optimizer, batch, step, settings)
        lost = 0 if math.isfinite(metrics["grad_norm"]) else lost + 1
        if lost > MOST_LOST or not math.isfinite(metrics["sft_loss"]):
            raise RecipeError(
                f"step {step} of sft has loss {metrics['sft_loss']} and a gradient of {metrics['grad_norm']}; "
                "lower sft.optimizer.learning_rate"
            )
        seconds = {"update": time.monotonic() - started}
        folder.append("metrics", [{**metrics, "seconds": seconds}], state.stage, step)
        if (step + 1) % settings.checkpoint_every == 0 or step + 1 == settings.steps:
            checkpoint.save(folder, policy, optimizer, TrainState(state.stage, step + 1, state.steps_before))
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
        wanted = Selection(recipe.sft.unsolved, recipe.sft.flagged, frozenset(task.id for task in heldout))
        sources = [each for path in paths for each in transcripts.read(path, renderer, wanted)]
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


def rows(
    session: Session, attempts: Sequence[ExpertAttempt], transcripts: Sequence[Transcript], step: int
) -> list[Row]:
    """Training rows of step `step`, scripted attempts under made-up names where the settings say so."""
    recipe, settings, seed = session.recipe, session.recipe.sft, session.recipe.seed
    tasks = {task.id: task for task in session.practice}
    batch: list[Row] = []
    for index, epoch in draw(len(attempts) + len(transcripts), settings.batch, step, seed):
        if index >= len(attempts):
            transcript = transcripts[index - len(attempts)]
            batch.append(Row(transcript.ids, transcript.imitated, rollout_id=transcript.id))
            continue
        attempt = attempts[index]
        if settings.rename:
            task, spelling = tasks[attempt.rollout.task_id], f"{seed}/{epoch}"
            attempt = renamed(attempt, task, session.renderer, settings, agent=recipe.agent, seed=spelling)
        code = random.Random(f"{seed}/{epoch}/{attempt.rollout.id}/code").random() < settings.code_share
        batch.append(sft_row(attempt, session.renderer, code=code))
    return batch


def sft_row(attempt: ExpertAttempt, renderer: Renderer, *, code: bool = True) -> Row:
    """The attempt as a training row, reminders inserted; every message counts but slips, and none of the harness's
    tokens do. Without `code`, what edits write does not count either, also where a planted fault spoils the edit."""
    turns = attempt.rollout.turns
    reminders = {hint.turn: renderer.hint(hint.text) for hint in attempt.reminders}
    unwanted = {index for index, turn in enumerate(turns) if turn.oracle == SLIP}
    written = {
        call.arguments.get("new") or call.arguments.get("content") for turn in turns for call in turn.calls
    }
    texts = sorted(str(text) for text in written if text)
    masked = {} if code else {n: text_positions(turn, texts, renderer) for n, turn in enumerate(turns)}
    return rollout_row(attempt.rollout, reminders=reminders, without=unwanted, masked=masked)


def draw(count: int, batch: int, step: int, seed: int) -> list[tuple[int, int]]:
    """Draw (number of an item, epoch) for step `step`: every item once before any twice, each time shuffled."""
    chosen: list[tuple[int, int]] = []
    for position in range(step * batch, (step + 1) * batch):
        epoch, index = divmod(position, count)
        order = list(range(count))
        random.Random(f"{seed}/{epoch}").shuffle(order)
        chosen.append((order[index], epoch))
    return chosen


def imitate(
    policy: Policy,
    optimizer: torch.optim.Optimizer,
    rows: Sequence[Row],
    step: int,
    settings: SFTSettings,
) -> dict[str, float]:
    """One step of SFT: mean negative log-prob over every imitated token of the step's attempts. A gradient that is not
    finite moves nothing."""
    tokens = sum(len(row.wanted) for row in rows)
    optimizer.zero_grad(set_to_none=True)
    losses = []
    for chunk, counts in ranks.deal(rows, [len(row.ids) for row in rows], settings.micro_batch_tokens):
        padded = packing.pad(chunk, policy.device)
        logp_BN = policy.logps(padded, 1.0)
        loss = -(logp_BN * padded.mask_BN * float(counts)).sum() / tokens
        loss.backward()
        losses.append(
            loss.detach()
        )  # asked for at the end: a device does not wait for the next one's launches
    gradients.gather(policy)
    norm = ranks.agreed(float(clip_grad_norm_(policy.trainable.values(), settings.optimizer.max_grad_norm)))
    rate = learning_rate(settings.optimizer, step, settings.steps)
    for group in optimizer.param_groups:
        group["lr"] = rate
    if math.isfinite(norm):
        optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    return {
        "sft_loss": sum(ranks.gather([*map(float, losses)])),
        "grad_norm": norm,
        "learning_rate": rate,
        "sft_tokens": float(tokens),
    }
