"""The stage `sft`: supervised fine-tuning on attempts that are worth imitating."""

from __future__ import annotations

import math
import random
import time
from collections.abc import Sequence

import torch

from woodshed.agent.attempt import AgentSettings
from woodshed.experience import scripted_expert
from woodshed.experience.rename_augmentation import renamed
from woodshed.experience.scripted_expert import SLIP, ExpertAttempt
from woodshed.learning import checkpoint, packing
from woodshed.learning.checkpoint import TrainState
from woodshed.learning.packing import Row, rollout_row
from woodshed.learning.policy import Policy
from woodshed.learning.update import MOST_LOST, learning_rate, make_optimizer
from woodshed.records import RecipeError, Task
from woodshed.stages.recipe import SFTSettings
from woodshed.stages.session import Session, newest_checkpoint
from woodshed.tokens.renderer import Renderer
from woodshed.tokens.token_kinds import text_positions


def run(session: Session, state: TrainState) -> None:
    """Imitate scripted attempts, with reminders before a share of their turns.

    Raises:
        RecipeError: there is nothing to imitate, or the loss is not finite.
    """
    settings, recipe, folder, policy = session.recipe.sft, session.recipe, session.run, session.policy
    played = scripted_expert.play(
        folder,
        session.practice,
        session.renderer,
        settings,
        recipe.agent,
        seed=recipe.seed,
        threads=recipe.rollout.tool_threads,
        context_length=session.engine.context_length,
        progress=session.progress,
    )
    optimizer, newest = make_optimizer(policy, settings.optimizer), newest_checkpoint(session)
    if newest is not None:
        checkpoint.restore(newest, policy, optimizer if state.step else None)
    lost = 0
    for step in range(state.step, settings.steps):
        started = time.monotonic()
        batch = rows(
            played, session.practice, session.renderer, step, settings, recipe.agent, seed=recipe.seed
        )
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


def rows(
    played: Sequence[ExpertAttempt],
    tasks: Sequence[Task],
    renderer: Renderer,
    step: int,
    settings: SFTSettings,
    agent: AgentSettings,
    *,
    seed: int,
) -> list[Row]:
    """What step `step` imitates, as training rows, under made-up names where the settings say so."""
    known = {task.id: task for task in tasks}
    made: list[Row] = []
    for index, around in draw(len(played), settings.batch, step, seed):
        attempt = played[index]
        if settings.rename:
            task, spelling = known[attempt.rollout.task_id], f"{seed}/{around}"
            attempt = renamed(attempt, task, renderer, settings, max_calls=agent.max_calls, seed=spelling)
        code = random.Random(f"{seed}/{around}/{attempt.rollout.id}/code").random() < settings.code_share
        made.append(sft_row(attempt, renderer, code=code))
    return made


def sft_row(oracle: ExpertAttempt, renderer: Renderer, *, code: bool = True) -> Row:
    """The attempt as a training row, reminders inserted; every message counts but slips, and none of the harness's
    tokens do. Without `code`, what edits write does not count either, also where a planted fault spoils the edit."""
    turns = oracle.rollout.turns
    reminders = {hint.turn: renderer.hint(hint.text) for hint in oracle.reminders}
    unwanted = {index for index, turn in enumerate(turns) if turn.oracle == SLIP}
    written = {
        call.arguments.get("new") or call.arguments.get("content") for turn in turns for call in turn.calls
    }
    texts = sorted(str(text) for text in written if text)
    masked = {} if code else {n: text_positions(turn, texts, renderer) for n, turn in enumerate(turns)}
    return rollout_row(oracle.rollout, reminders=reminders, without=unwanted, masked=masked)


def draw(count: int, batch: int, step: int, seed: int) -> list[tuple[int, int]]:
    """(attempt, time around) that step `step` imitates: every attempt once before any twice, each time shuffled."""
    chosen: list[tuple[int, int]] = []
    for position in range(step * batch, (step + 1) * batch):
        around, index = divmod(position, count)
        order = list(range(count))
        random.Random(f"{seed}/{around}").shuffle(order)
        chosen.append((order[index], around))
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
    for chunk in packing.row_batches(rows, settings.micro_batch_tokens):
        padded = packing.pad(chunk, policy.device)
        logp_BN = policy.logps(padded, 1.0)
        loss = -(logp_BN * padded.mask_BN).sum() / tokens
        loss.backward()
        losses.append(
            loss.detach()
        )  # asked for at the end: a device does not wait for the next one's launches
    norm = float(torch.nn.utils.clip_grad_norm_(policy.trainable.values(), settings.optimizer.max_grad_norm))
    rate = learning_rate(settings.optimizer, step, settings.steps)
    for group in optimizer.param_groups:
        group["lr"] = rate
    if math.isfinite(norm):
        optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    return {
        "sft_loss": sum(map(float, losses)),
        "grad_norm": norm,
        "learning_rate": rate,
        "sft_tokens": float(tokens),
    }
