"""A tiny policy, four real attempts, and one optimizer step: what tests of training share."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from scripted import EDIT, PROSE, READ, TEST, UNKNOWN, calc_task, play, renderer
from transformers import LlamaConfig, LlamaForCausalLM

from woodshed.experience.compile import (
    Compiled,
    HintOptions,
    compile_samples,
    hint_branch,
    rollout_sample,
)
from woodshed.experience.samples import TrainingSample
from woodshed.learning import packing
from woodshed.learning.logprobs import token_logps
from woodshed.learning.loss_settings import FeedbackSettings, TargetForm
from woodshed.learning.optimizer import OptimizerSettings
from woodshed.learning.policy import Policy, add_adapter
from woodshed.learning.trainer import Trainer
from woodshed.records import Group, Hint, Rollout, Verdict

HINT = "Reminder: the only tools are read_file, edit_file, write_file, search, shell, finish."


def tiny_policy(seed: int = 0, rank: int = 4) -> Policy:
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=renderer().vocab_size,
        hidden_size=48,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=4096,
        initializer_range=0.2,
        tie_word_embeddings=True,
    )
    model = LlamaForCausalLM(config)
    return Policy(add_adapter(model, rank) if rank else model, is_adapter=bool(rank))


def last_norm(policy: Policy) -> torch.nn.Module:
    """What hands the output layer its hidden states."""
    return policy.model.base_model.model.model.norm


def four_attempts(folder: Path) -> list[Rollout]:
    """Four attempts at one task: two with an unknown tool, one with prose, one clean."""
    task = calc_task(folder / "calc")
    scripts = [(READ, EDIT, TEST), (UNKNOWN, READ, EDIT), (PROSE, EDIT, TEST), (READ, UNKNOWN, TEST)]
    made = [play(task, *messages) for messages in scripts]
    policy = tiny_policy()
    named = [replace(r, id=f"train-0-calc-{n}") for n, r in enumerate(made)]
    return [with_logps(policy, r) for r in named]


def with_logps(policy: Policy, made: Rollout) -> Rollout:
    """The attempt as if the policy had sampled it."""
    padded = packing.pad([rollout_sample(made)])
    logps = token_logps(policy.logits(padded), padded.tokens_BN, 1.0)[0].tolist()
    turns = []
    for turn in made.turns:
        turns.append(replace(turn, logps=tuple(logps[: len(turn.sampled_ids)])))
        logps = logps[len(turn.sampled_ids) :]
    return replace(made, turns=tuple(turns))


def verdicts(rollouts: list[Rollout], rewards: list[float]) -> dict[str, Verdict]:
    return {
        r.id: Verdict(r.id, r.task_id, "graded", reward, reward == 1.0, {})
        for r, reward in zip(rollouts, rewards, strict=True)
    }


def hint_for(made: Rollout, turn: int, text: str = HINT) -> Hint:
    return Hint(made.id, turn, "unknown_tool", text)


def compiled(rollouts, rewards, hints=(), *, reward_terms=None, **options) -> Compiled:
    group = Group(rollouts[0].task_id, tuple(rollouts))
    return compile_samples(
        [group],
        verdicts(rollouts, rewards),
        hints,
        renderer(),
        HintOptions(**options),
        reward_terms=reward_terms,
    )


def samples_of(rollouts, rewards, hints=(), **options) -> tuple[TrainingSample, ...]:
    return compiled(rollouts, rewards, hints, **options).samples


def hinted_sample(made: Rollout, hint: Hint, **options) -> TrainingSample:
    """The rollout with one branch, in no policy gradient."""
    branch = hint_branch(made.segments[0], hint, renderer(), HintOptions(**options))
    return replace(rollout_sample(made), branches=(branch,))


def feedback_of(
    form: Mapping[str, Any] | None = None, *, measure_every: int = 8, ratio: float = 1.0, **settings: Any
) -> FeedbackSettings:
    """Settings of the divergence with a form that no preset has, or with other constants."""

    class Changed(FeedbackSettings):
        @property
        def form(self) -> TargetForm:
            return replace(super().form, **(form or {}))

    Changed.measure_every, Changed.ratio = measure_every, ratio
    return Changed(**settings)


def trainer_of(
    policy: Policy, *, feedback=None, loss=None, rate=1e-2, start=None, temperature=1.0, **settings
) -> Trainer:
    settings = OptimizerSettings(learning_rate=rate, warmup_steps=0, **settings)
    start = start or policy.snapshot()
    return Trainer(policy, settings, loss, feedback, start=start, temperature=temperature, message_tokens=160)


def step(policy: Policy, samples, *, steps=1, **settings):
    """Metrics of the last of some steps on the same samples; the settings are `trainer_of`'s."""
    trainer = trainer_of(policy, **settings)
    for _ in range(steps):
        metrics = trainer.step(samples)
    return metrics
