"""Time, memory and disk of a recipe, from measured runs scaled by the size of the model.

The constants are those of files in benchmarks/results (`tests/test_init.py` compares them). What a repository's own
tests take is not known before they run.
"""

from __future__ import annotations

from dataclasses import dataclass

from woodshed.stages.recipe import Recipe
from woodshed.tokens.model_facts import ModelFacts

SOURCES = "quickstart.json, targeted_feedback.json, grpo_side_by_side.json and task_factory.json in benchmarks/results"


@dataclass(frozen=True)
class Reference:
    """A measured kind of machine, and the model that it was measured with."""

    num_weights: float
    rollout_tokens: int
    attempt_s: float
    """Seconds of one attempt: sampled, graded and trained on."""
    fixed_s: float
    """Part of them that no model changes: tools and tests."""


CPU = Reference(num_weights=135e6, rollout_tokens=360, attempt_s=5.6, fixed_s=1.0)
"""Two cores: the quickstart's minutes over its 140 attempts."""
GPU = Reference(num_weights=494e6, rollout_tokens=768, attempt_s=0.45, fixed_s=0.1)
"""A third of one H200: the experiment's minutes over the 1,024 attempts of its 16 steps, three runs at once."""
TASK_CPU_S = 10.9
"""CPU seconds of a task, of eight packages whose suites take seconds (task_factory.json)."""
IMITATED = 0.5
"""Cost of training on an attempt, times that of sampling it and training on it."""
ACTIVATION_BYTES, ACTIVATION_SHAPE = 1.31e6, 24 * 896
"""Bytes of a position of a micro-batch in bfloat16, and layers x width of the model that it was measured on: the
difference of grpo_side_by_side.json between micro-batches of 64 and 16 rows of 768."""
PROCESS_BYTES = {False: 1.0e9, True: 2.0e9}
"""Python and PyTorch, without and with a GPU."""


@dataclass(frozen=True)
class CostEstimate:
    """Cost of a recipe; expect a factor of two."""

    tasks_min: float
    warm_up_min: float
    practice_min: float
    evaluation_min: float
    memory_gb: float
    """Of the GPU where there is one, else of the machine."""
    disk_gb: float

    @property
    def minutes(self) -> float:
        """All of them."""
        return self.tasks_min + self.warm_up_min + self.practice_min + self.evaluation_min


def estimate(recipe: Recipe, model: ModelFacts, *, num_tasks: int, is_gpu: bool, cores: int) -> CostEstimate:
    """Cost of a recipe with so many tasks."""
    known = GPU if is_gpu else CPU
    size = model.num_weights / known.num_weights * recipe.agent.rollout_tokens / known.rollout_tokens
    moving_s = (known.attempt_s - known.fixed_s) * size * (1 if is_gpu else 2 / cores)
    attempt_s = moving_s + known.fixed_s
    imitated = recipe.sft.steps * recipe.sft.batch if "sft" in recipe.stages else 0
    practised = recipe.rl.steps * recipe.rl.tasks_per_step * recipe.rollout.attempts
    measured = 2 * recipe.tasks.heldout_share * num_tasks * recipe.evaluation.attempts
    return CostEstimate(
        tasks_min=num_tasks * TASK_CPU_S / cores / 60,
        warm_up_min=imitated * IMITATED * moving_s / 60,
        practice_min=practised * attempt_s / 60,
        evaluation_min=measured * (IMITATED * moving_s + known.fixed_s) / 60,
        memory_gb=memory(recipe, model, is_gpu=is_gpu) / 1e9,
        disk_gb=_disk(recipe, model) / 1e9,
    )


def memory(recipe: Recipe, model: ModelFacts, *, is_gpu: bool) -> float:
    """Bytes at the peak of training."""
    width = 2 if recipe.policy.dtype == "bfloat16" else 4
    copies = 0 if is_gpu else 16  # of weight, moments and teacher, of which a checkpoint is written
    return (
        PROCESS_BYTES[is_gpu]
        + model.num_weights * width
        + _trained(recipe, model) * (20 + copies)  # float32 copy, gradient, two moments, teacher
        + recipe.engine.cache_mb * 2**20 * (1 if is_gpu else 0.5)
        + recipe.loss.micro_batch_tokens * per_token(model) * width / 2
    )


def per_token(model: ModelFacts) -> float:
    """Bytes of a position of a micro-batch in bfloat16."""
    return ACTIVATION_BYTES * max(model.layers * model.width, 1) / ACTIVATION_SHAPE


def _trained(recipe: Recipe, model: ModelFacts) -> float:
    """Trained weights: all, or an adapter's, some 18 matrix ends a layer."""
    rank = recipe.policy.lora_rank
    return 18 * model.layers * model.width * rank if rank else model.num_weights


def _disk(recipe: Recipe, model: ModelFacts) -> float:
    """Bytes of the model as it is kept here, two checkpoints of each stage, the policy, and environments of tasks."""
    checkpoints = 2 * len(recipe.stages) * _trained(recipe, model) * 16
    return model.num_weights * 4 + checkpoints + model.num_weights * 4 * (not recipe.policy.lora_rank) + 1e9
