"""`woodshed tasks`: commands that make, prove, search, harden, count and export practice tasks."""

from __future__ import annotations

import json
import shlex
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from woodshed.boundary import contained
from woodshed.cli.app import OUT_FILE, keeping, tasks_app
from woodshed.cli.making import OutFolder, Provider, Seed, say_rejected, say_skipped
from woodshed.cli.terminal import progress_bars, say, say_columns, say_next, tell
from woodshed.records import TaskError

if TYPE_CHECKING:
    from woodshed.sandbox import SandboxProvider

WARMUP = Path("recipes/adapters/smollm2-135m-warmup")
"""The shipped adapter of the default model, where the user stands in a checkout."""
COLUMNS = """\
medians over tasks: F2P, hidden tests that fail before and pass after (fail-to-pass); behaviour, those of them that an
empty body does not pass; P2P, tests that pass before and after; decoys, the share of F2P with a copy that must fail;
guess, the chance to tell all copies of a run from their tests blindly; isolated, the share of F2P that is judged with
the code in another process; words of the instruction"""


TaskFolders = Annotated[
    list[Path], typer.Argument(metavar="TASKS", help="Task folders, or folders that contain some.")
]
RulesFile = Annotated[
    Path | None,
    typer.Option(
        metavar="FILE",
        help="JSON file of further search rules, written by --learn; by default the one in the cache.",
    ),
]
WholeMachine = Annotated[
    bool,
    typer.Option(
        "--whole/--own", help="Also search the machine and the dependencies, or only each task's own files."
    ),
]
Exploit = Annotated[
    bool, typer.Option("--exploit", help="Also run a scripted exploit, which must get a reward of 0.")
]
LearnFrom = Annotated[
    Path | None,
    typer.Option(
        metavar="RUN",
        help="First add rules to --rules from the confirmed cheats of this run.",
    ),
]
Changes = Annotated[
    str,
    typer.Option(
        help="Separated by commas: H1 (a second deletion) to H12 (no test command), by default all of these; "
        "E1 and E2 make easier variants."
    ),
]
AttemptsOf = Annotated[
    Path | None,
    typer.Option(
        metavar="RUN", help="Run whose attempts say which tasks are solved, and how the others fail."
    ),
]


@tasks_app.command("check")
def check_tasks(
    folders: Annotated[
        list[Path], typer.Argument(metavar="TASKS", help="Task folders, or folders that contain some.")
    ],
    sandbox: Provider = "bubblewrap",
) -> None:
    """Prove tasks again.

    Hidden tests must fail before and pass after the original code is restored; all other tests must pass both times.
    Exits with 1 and one reason per bad task.
    """
    from woodshed import synthesis
    from woodshed.runs import machine
    from woodshed.tasks import folder

    sandboxes = sandbox_provider(sandbox)

    def reason_against(path: Path) -> str:
        try:
            return contained(
                lambda: "; ".join(synthesis.check(folder.load(path), sandboxes)),
                lambda error: f"{path}: {error}",
            )
        except TaskError as error:
            return str(error)

    paths = [path for root in folders for path in folder.task_folders(root)]
    bad: list[str] = []
    with (
        keeping("checking writes nothing"),
        progress_bars() as progress,
        ThreadPoolExecutor(machine.cores()) as pool,
    ):
        for done, reason in enumerate(pool.map(reason_against, paths), 1):
            bad += [reason] if reason else []
            progress(done, len(paths), "checking")
    for reason in bad:
        say(f"bad  {reason}")
    say(f"{len(paths) - len(bad)} of {len(paths)} tasks are proven")
    if bad:
        raise typer.Exit(1)
    adapter = ["--adapter", str(WARMUP)] if WARMUP.is_dir() else []
    say_next(shlex.join(["woodshed", "eval", *map(str, folders), *adapter, "--limit", "8"]))


@tasks_app.command("leaks")
def find_leaks(
    folders: TaskFolders,
    rules: RulesFile = None,
    whole: WholeMachine = True,
    exploit: Exploit = False,
    learn: LearnFrom = None,
    sandbox: Provider = "bubblewrap",
) -> None:
    """Search everything that an attempt can see for the code that its task removed.

    Prints one line per task, with the evidence of every leak. Exits with 1 if there is one.
    """
    from woodshed.synthesis import leaks
    from woodshed.synthesis.leaks.scan import SHARED
    from woodshed.tasks import folder

    sandboxes = sandbox_provider(sandbox)
    loaded = folder.load_set(*folders)
    if rules is not None and learn is None and not rules.is_file():
        raise TaskError(f"no rules at {rules}; --learn RUN creates the file")
    if learn is not None:
        _learn(learn, rules or leaks.rules_path())
    search_rules = leaks.read_rules(rules or leaks.rules_path())
    bad = 0
    with keeping("searching writes nothing"), progress_bars() as progress:
        shared = SHARED if whole else ()
        for report in leaks.scan(
            loaded, rules=search_rules, shared=shared, sandboxes=sandboxes, progress=progress
        ):
            bad += bool(report.leaks)
            say(f"{'LEAK ' if report.leaks else 'clean'} {report.task}: {report.files} files of its own")
            for leak in report.leaks:
                say(f"      {leak.kind}: {leak.what} in {leak.where}: {leak.quote[:120]}")
        for done, task in enumerate(loaded if exploit else ()):
            progress(done, len(loaded), f"running the exploit on {task.name}")
            result = leaks.run_exploit(task, sandboxes)
            bad += result.reward > 0
            verdict = "STOLEN" if result.reward else "safe"
            earned = f"{result.trick} earned a reward" if result.trick else "none earned a reward"
            tricks = f"{len(result.tricks)} tricks were tried, {earned}"
            say(f"{verdict:6} {task.name}: {tricks}")
    say(f"{bad} of {len(loaded)} tasks leak" if bad else f"no leak in {len(loaded)} tasks")
    if bad:
        raise typer.Exit(1)


@tasks_app.command("harden")
def harden_tasks(
    folders: TaskFolders,
    out: OutFolder,
    operators: Changes = "",
    run: AttemptsOf = None,
    limit: Annotated[int, typer.Option(min=0, help="Maximum number of variants; 0 makes all.")] = 0,
    seed: Seed = 0,
    sandbox: Provider = "bubblewrap",
) -> None:
    """Make harder variants of solved tasks, each proven.

    With --run, only tasks that at least half of its attempts solved are used; otherwise all tasks.
    Exits with 1 if no variant could be proven.
    """
    from woodshed.synthesis import harden
    from woodshed.tasks import folder

    sandboxes = sandbox_provider(sandbox)
    attempts = harden.outcomes_of(run) if run else harden.AttemptOutcomes()
    unknown = 0.0 if run else 1.0
    parents = [t for t in folder.load_set(*folders) if attempts.rates.get(t.name, unknown) >= 0.5]
    if not parents:
        tell(f"none of these tasks was solved by at least half of its attempts in {run}")
        raise typer.Exit(1)
    chosen = tuple(filter(None, operators.split(","))) or harden.HARDER
    with keeping(f"finished variants are in {out}"), progress_bars() as progress:
        report = harden.harden(
            parents,
            out,
            operators=chosen,
            attempts=attempts,
            limit=limit,
            seed=seed,
            sandboxes=sandboxes,
            progress=progress,
        )
    harden.write_report(report, out / "harden.json")
    say(f"{len(report.accepted)} variants of {len(parents)} tasks in {out}")
    for reason, count in report.rejected.most_common():
        say(f"{count:6} candidates rejected: {reason}")
    if not report.accepted:
        tell("no variant could be proven; try other tasks, or more --operators")
        raise typer.Exit(1)
    say_next(shlex.join(["woodshed", "tasks", "check", str(out)]))


@tasks_app.command("stats")
def show_stats(
    tasks: Annotated[Path, typer.Argument(metavar="TASKS", help="A folder of tasks.")],
) -> None:
    """Show statistics of a set of tasks.

    Prints counts by repository, operator and level, median sizes and reasons for rejection, and writes a picture to
    TASKS/stats.svg.
    """
    from woodshed.runs.files import write_atomically
    from woodshed.synthesis import stats
    from woodshed.tasks import folder

    loaded = folder.load_set(tasks)
    summary = stats.summarise(loaded, tasks / "rejections.jsonl")
    say_columns(stats.table(summary))
    tried = f", {summary.acceptance:.0%} of the candidates that were tried" if summary.rejected else ""
    say(COLUMNS)
    say(f"{summary.num_tasks} tasks{tried}")
    say_rejected(summary.rejected)
    say_skipped(summary.files, tasks)
    write_atomically(tasks / "stats.svg", stats.picture(loaded))
    say(f"picture: {tasks / 'stats.svg'}")


@tasks_app.command("export")
def export_tasks(
    tasks: Annotated[
        list[Path], typer.Argument(metavar="TASKS", help="Task folders, or folders that contain some.")
    ],
    out: Annotated[Path, typer.Option(metavar="FILE", help="Output file, one line per task.", **OUT_FILE)],
    format_: Annotated[str, typer.Option("--format", help="swebench or swesmith.")] = "swebench",
) -> None:
    """Write tasks as JSON lines for other harnesses.

    SWE-bench: `patch` solves the task. SWE-smith: `patch` breaks the repository, `gold_patch` repairs it.
    """
    from woodshed.tasks import export, folder

    if format_ not in ("swebench", "swesmith"):
        raise TaskError(f"unknown format {format_!r}; known are swebench and swesmith")
    count = export.export(folder.load_set(*tasks), format_, out)
    say(f"{count} tasks in {out}")


@tasks_app.command("import")
def import_tasks(
    format_: Annotated[
        str,
        typer.Argument(
            metavar="FORMAT", help="harbor, or a function of your own that reads tasks: package.module:name."
        ),
    ],
    source: Annotated[Path, typer.Argument(metavar="SOURCE", help="File or folder that it reads.")],
    out: OutFolder,
    sandbox: Provider = "bubblewrap",
) -> None:
    """Read tasks of another format: Harbor's, or one that a function of your own reads.

    Each is written as a task folder, which `tasks check` proves. Of Harbor's tasks those can be read whose Dockerfile
    is a Python with packages; their solution is run in a sandbox. A function of your own is imported from the working
    folder or an installed package. Exits with 1 if a task was left out.
    """
    from woodshed.tasks import formats

    count, refused = 0, 0
    for task in formats.import_tasks(format_, source, out, sandbox_provider(sandbox)):
        if isinstance(task, TaskError):
            refused += 1
            tell(f"left out: {task}")
            continue
        count += 1
        say(f"read {task.folder}")
    if not count + refused:
        raise TaskError(f"{format_} reads no task in {source}")
    say(f"{count} tasks in {out}")
    if count:
        say_next(shlex.join(["woodshed", "tasks", "check", str(out)]))
    if refused:
        raise typer.Exit(1)


def sandbox_provider(name: str) -> SandboxProvider:
    """The provider that an option names.

    Raises:
        RecipeError: there is none of that name, or it cannot be imported.
    """
    from woodshed import settings
    from woodshed.sandbox import SandboxSettings

    return settings.read(SandboxSettings, None, [f"provider={json.dumps(name)}"]).create()


def _learn(run: Path, rules: Path) -> None:
    """Add rules from the confirmed cheats of a run, and cases for `woodshed monitor bench --cases`."""
    from woodshed.monitors import confirmed_cases
    from woodshed.runs.folder import RunDir
    from woodshed.synthesis import leaks
    from woodshed.synthesis.leaks import leftovers

    patterns, cases = confirmed_cases.learn(RunDir.open(run))
    leaks.add_rules(rules, [leftovers.LeftoverRule(p.pattern, p.why, p.provenance) for p in patterns])
    cases_path = rules.with_name("confirmed-cheats.jsonl")
    confirmed_cases.keep_cases(cases_path, cases)
    say(f"learned {len(patterns)} places in {rules} and {len(cases)} cases in {cases_path}")
