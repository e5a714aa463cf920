"""Evaluation of a policy on a set of tasks: attempts, graded in fresh sandboxes, kept in a run folder."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from pydantic import Field

from woodshed import experience, feedback
from woodshed.agent.deployment import DeploymentSettings
from woodshed.agent.prompt import Effort, with_effort
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
from woodshed.settings import FolderName, FolderPath

Progress = Callable[[int, int, str], None]


class SuiteSettings(DeploymentSettings):
    """An evaluation outside of training."""

    name: FolderName
    """Name of the run folder below `runs`."""
    note: str = ""
    """Remarks that are shown with the results."""
    runs: FolderPath = Path("runs")
    """Parent folder of run folders."""
    tasks: tuple[Path, ...] = Field(min_length=1)
    """Task folders, or folders of them."""
    attempts: int = Field(default=1, ge=1)
    """Attempts per task."""
    limit: int = Field(default=0, ge=0)
    """Tasks used, a seeded sample spread over their repositories; 0 uses all."""
    effort: Effort | None = None
    """Effort that the prompts ask for (low, medium, high); unset, they do not mention it."""
    tracking: Tracker = "none"
    """Also send metrics to trackio, tensorboard or wandb; metrics.jsonl is written always."""
    rollout: RolloutSettings = RolloutSettings()
    grading: GradingSettings = GradingSettings()
    monitors: MonitorSettings = MonitorSettings()


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
