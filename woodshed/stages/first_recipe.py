"""A recipe for one repository, one model and one machine, with the reason for each of its settings."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from woodshed.agent.attempt import AgentSettings
from woodshed.agent.tools import ToolSettings
from woodshed.curriculum import CurriculumSettings
from woodshed.engines.create import EngineSettings
from woodshed.experience import RolloutSettings
from woodshed.grading.verifier import GradingSettings
from woodshed.learning.loss_settings import LossSettings
from woodshed.learning.optimizer import OptimizerSettings
from woodshed.learning.policy import PolicySettings
from woodshed.stages.cost_estimate import per_token
from woodshed.stages.recipe import EvaluationSettings, Recipe, RLSettings, SFTSettings, TaskSettings
from woodshed.tokens.model_facts import ModelFacts

HELDOUT = 0.4
MEASURED = 24
"""Attempts of a measurement at least; fewer tell nothing apart."""
CALL_TOKENS, LINE_TOKENS = 32, 14
"""Tokens of a short call, and of a line in an edit; of tokenizers with usual vocabularies."""
TRAINED_SHARE = 0.3
"""Of the memory, for the activations of a micro-batch."""


@dataclass(frozen=True)
class Hardware:
    """Processor, memory and card of a machine."""

    cores: int
    memory_gb: float
    """Of the GPU where there is one."""
    gpu: str = ""

    def __str__(self) -> str:
        size = f"{self.memory_gb:.0f} GB"
        return f"{self.gpu} ({size})" if self.gpu else f"{self.cores} cores, {size}, no GPU"


def choose(
    name: str, tasks: Path, model: ModelFacts, machine: Hardware, num_tasks: int, longest: int
) -> Recipe:
    """Settings for a first run: a warm-up where the model needs one, then RL, measured before and after.

    Args:
        tasks: folder that the tasks are in, or will be.
        longest: lines of the longest function that a task takes away.
    """
    is_gpu, practised = bool(machine.gpu), math.floor((1 - HELDOUT) * num_tasks)
    each = max(min(8 if is_gpu else 3, practised // 2), 1)  # fewer tasks may be made, and some are in no set
    return Recipe(
        name=name,
        stages=("sft", "rl") if model.why_warm_up else ("rl",),
        tasks=TaskSettings(train=(tasks,), heldout_share=HELDOUT),
        policy=_policy(model, is_gpu),
        engine=EngineSettings(max_rows=128, cache_mb=4096) if is_gpu else EngineSettings(),
        agent=_budgets(model, is_gpu, longest),
        curriculum=CurriculumSettings(repeats=True, kind="even"),
        rollout=RolloutSettings(
            attempts=8 if is_gpu else 4,
            max_in_flight=128 if is_gpu else 32,
            tool_threads=min(machine.cores, 8),
        ),
        grading=GradingSettings(shaped=model.is_small, jobs=min(machine.cores, 8)),
        sft=warm_up(model, is_gpu) if model.why_warm_up else SFTSettings(),
        rl=RLSettings(steps=min(max(practised // each, 2), 16), tasks_per_step=each),
        loss=LossSettings(micro_batch_tokens=_micro_batch(model, machine)),
        optimizer=OptimizerSettings(learning_rate=4e-4 if model.num_weights < 300e6 else 2e-4),
        evaluation=EvaluationSettings(attempts=math.ceil(MEASURED / max(HELDOUT * num_tasks, 1))),
    )


def only_warm_up(
    name: str, tasks: tuple[Path, ...], model: ModelFacts, machine: Hardware, num_tasks: int, longest: int
) -> Recipe:
    """Settings for the warm-up alone, measured afterwards; the arguments are those of `choose`."""
    usual = Recipe(name=name)
    whole = choose(name, tasks[0], model, machine, num_tasks, longest)
    changes = {
        "stages": ("sft", "evaluate"),
        "tasks": TaskSettings(train=tasks, heldout_share=HELDOUT),
        "sft": warm_up(model, bool(machine.gpu)),
        **{section: getattr(usual, section) for section in ("rl", "curriculum", "optimizer")},
    }
    return whole.model_copy(update=changes)


def warm_up(model: ModelFacts, is_gpu: bool) -> SFTSettings:
    """Settings of the warm-up; no fault is planted."""
    rate = 4e-3 if model.is_tiny else 1e-3 if model.num_weights < 300e6 else 5e-4
    if is_gpu:
        return SFTSettings(attempts=8, steps=320, reminder_share=0.7, learning_rate=rate)
    return SFTSettings(attempts=4, steps=60, batch=8, learning_rate=rate)


def _policy(model: ModelFacts, is_gpu: bool) -> PolicySettings:
    if model.is_tiny:
        return PolicySettings(model=model.spec, lora_rank=0)
    return PolicySettings(model=model.spec, dtype="bfloat16", lora_rank=16 if is_gpu else 8)


def _budgets(model: ModelFacts, is_gpu: bool, longest: int) -> AgentSettings:
    """Budgets of an attempt: the quickstart's on a CPU, the experiment's on a GPU, more for larger models there; and at
    least what the longest edit takes, which names the old lines and the new ones."""
    turns, turn, rollout, shown = (6, 96, 360, 500)
    if is_gpu:
        turns, turn, rollout, shown = (5, 192, 768, 1200) if model.is_small else (12, 512, 4096, 2400)
    edit = CALL_TOKENS + LINE_TOKENS * longest
    counts = max(turn, edit), max(rollout, 2 * edit + 6 * CALL_TOKENS)
    tokens = [math.ceil(count * model.wordiness / 8) * 8 for count in counts]
    return AgentSettings(
        max_turns=turns,
        turn_tokens=tokens[0],
        rollout_tokens=tokens[1],
        tools=ToolSettings(output_chars=shown),
    )


def _micro_batch(model: ModelFacts, machine: Hardware) -> int:
    """The power of two whose activations fit, from 1,024 to 16,384 positions."""
    fitting = TRAINED_SHARE * machine.memory_gb * 1e9 / per_token(model)
    return 2 ** int(math.log2(min(max(fitting, 1024), 16384 if machine.gpu else 2048)))


def reasons(recipe: Recipe, model: ModelFacts, machine: Hardware) -> Mapping[str, str]:
    """Comments for the settings that `choose` gave another value than usual, by their dotted names."""
    where = "a GPU" if machine.gpu else "a CPU"
    stages = "RL measures the policy before and after itself."
    if model.why_warm_up:
        stages = f"A warm-up on scripted attempts (sft) first, since {model.why_warm_up}; then RL. {stages}"
    return {
        "name": f"The run is {recipe.runs / recipe.name}.",
        "stages": stages,
        "tasks.train": "Tasks to practise on, made by the command above.",
        "tasks.heldout_share": "Share of them that is kept for measuring; no definition is on both sides.",
        "policy.model": f"{model.num_weights / 1e6:,.1f} million weights ({model.kind}), calls as {model.call_format}.",
        "policy.dtype": "Half the memory of float32; trained weights stay in float32.",
        "policy.lora_rank": "All weights are trained, as the model is tiny."
        if not recipe.policy.lora_rank
        else "Rank of the new LoRA adapter.",
        "agent": f"Budgets of an attempt, as they were measured on {where}; longer ones solve more and cost more.",
        "agent.max_turns": "Messages.",
        "agent.turn_tokens": "Tokens in one message.",
        "agent.rollout_tokens": "Tokens in all messages of an attempt.",
        "agent.tools.output_chars": "Characters shown of a command's output.",
        "curriculum.repeats": "Tasks may be drawn again, as there are few; false needs rl.steps x rl.tasks_per_step.",
        "curriculum.kind": "All tasks alike: a first run is too short to learn which are worth more.",
        "rollout.attempts": "Attempts at each task, which are compared with each other.",
        "rollout.max_in_flight": f"Attempts at the same time, as measured on {where}.",
        "rollout.tool_threads": "Sandboxes at the same time: one for each core.",
        "grading.shaped": "Reward for a share of the tests: a model of this size seldom passes all.",
        "grading.jobs": "Gradings at the same time: one for each core.",
        "sft": "The warm-up: scripted attempts at the practice tasks, no fault planted.",
        "sft.attempts": "Scripted attempts for each task.",
        "sft.steps": "Optimizer steps; the loss is shown.",
        "sft.batch": "Attempts in a step.",
        "sft.learning_rate": "Peak learning rate.",
        "sft.reminder_share": "Share of turns with a reminder, as the experiment's longer warm-up had it.",
        "rl.steps": "Steps until each practice task was drawn about once; more steps learn more.",
        "rl.tasks_per_step": "Tasks in a step.",
        "loss.micro_batch_tokens": "Positions in one forward-backward: what the memory holds.",
        "optimizer.learning_rate": "Peak learning rate of RL.",
        "evaluation.attempts": f"Attempts at each held-out task, so that a measurement has at least {MEASURED}.",
        "engine.max_rows": "Messages sampled at the same time.",
        "engine.cache_mb": "MiB for keys and values.",
    }
