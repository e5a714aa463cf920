"""`woodshed tasks make`: practice tasks from repositories, and the options that it shares with other commands."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from woodshed.cli.app import apart, keeping, tasks_app
from woodshed.cli.terminal import progress_bars, say, say_next, tell
from woodshed.records import RecipeError, Task, TaskError

if TYPE_CHECKING:
    from woodshed.synthesis import SynthesisSettings
    from woodshed.synthesis.make import MakeReport

MAX_FILES_SHOWN = 20
"""Number of skipped files that are printed."""
ISOLATING_S = 5.0
"""Seconds for finding the isolated tests of a task, before the first one says it better."""

Sources = Annotated[
    list[str],
    typer.Argument(
        metavar="SOURCE",
        help="A folder, pypi:NAME==VERSION, or git: https://HOST/OWNER/NAME, git@HOST:OWNER/NAME or "
        "git+file:///PATH, with @REV or #subdirectory=FOLDER behind it. A root without a package stands for its "
        "members. Then settings to change, such as "
        "max_body_lines=4; a wrong name lists all of them.",
    ),
]
OutFolder = Annotated[Path, typer.Option(help="Folder that receives one folder per task.")]
MostTasks = Annotated[int, typer.Option(min=0, help="Maximum number of tasks per source; 0 makes all.")]
Levels = Annotated[
    str,
    typer.Option(
        help="Levels of difficulty, such as 0-6 or 1,3; level 0 removes one branch, level 6 a sub-package."
    ),
]
Operators = Annotated[
    str,
    typer.Option(help="Ways to remove code, separated by commas, such as stub,remove_class; by default all."),
]
Seed = Annotated[int, typer.Option(help="Seed of the order in which candidates are tried.")]
Jobs = Annotated[int, typer.Option(min=1, help="Candidates proven at the same time.")]
PytestArgs = Annotated[
    str,
    typer.Option(
        metavar="OPTIONS",
        help="Options of every run of pytest, such as \"-m 'not slow'\"; those of the repository's own addopts that "
        "select tests are used anyway.",
    ),
]
Deselected = Annotated[
    list[str] | None,
    typer.Option(
        "--deselect",
        metavar="ID",
        help="Leave out tests whose ids begin so, such as tests/test_web.py::TestLogin; may be repeated.",
    ),
]
Variables = Annotated[
    list[str] | None,
    typer.Option(
        "--env",
        metavar="KEY[=VALUE]",
        help="An environment variable that the tests need; may be repeated. Without a value it is read from yours "
        "whenever tests run, and no task holds it.",
    ),
]
Provider = Annotated[
    str,
    typer.Option(
        "--sandbox",
        metavar="PROVIDER",
        help="Who opens sandboxes: bubblewrap, or an object of your own (package.module:name).",
    ),
]


@tasks_app.command("make")
def make_tasks(
    sources: Sources,
    out: OutFolder,
    limit: MostTasks = 0,
    levels: Levels = "0-6",
    operators: Operators = "",
    seed: Seed = 0,
    jobs: Jobs = 2,
    pytest_args: PytestArgs = "",
    deselect: Deselected = None,
    env: Variables = None,
    sandbox: Provider = "bubblewrap",
) -> None:
    """Make practice tasks from repositories.

    Each task is proven in a sandbox: its hidden tests fail without the removed code and pass with it. Every rejected
    candidate is logged with one reason. Run the same command again to resume.
    Exits with 1 if no candidate became a task.
    """
    from woodshed import synthesis
    from woodshed.synthesis.git_sources import without_secrets
    from woodshed.synthesis.progress import QUIET_S

    sources, changes = apart(sources)
    if not sources:
        raise typer.BadParameter("name a source before the settings: a folder, or pypi:NAME==VERSION")
    values = [f"limit={limit}", f"seed={seed}", f"jobs={jobs}", f"levels={_levels(levels)}"]
    values.append(f"sandbox.provider={json.dumps(sandbox)}")
    lists = {"operators": operators.split(",") if operators else [], "pytest_args": _words(pytest_args)}
    lists |= {"deselect": deselect or [], "env": env or []}
    values += [f"{key}={json.dumps(listed)}" for key, listed in lists.items() if listed]
    chosen = _settings_of([*values, *changes])
    with keeping(f"finished tasks are in {out}"), progress_bars(every_s=QUIET_S - 1) as progress:
        report = synthesis.make(sources, out, chosen, progress)
        _find_isolated_tests(report.accepted, chosen, progress)
    say(f"{len(report.accepted)} tasks of {without_secrets(', '.join(sources))} in {out}")
    _say_report(report, out)
    if not report.accepted:
        tell(
            "no candidate became a task; try more levels and operators (--levels 0-6, no --operators), or another "
            "source"
        )
        raise typer.Exit(1)
    say_next(shlex.join(["woodshed", "tasks", "check", str(out)]))


def _words(options: str) -> list[str]:
    """The options as a shell would take them apart.

    Raises:
        TaskError: a quotation mark without its other half.
    """
    try:
        return shlex.split(options)
    except ValueError as error:
        raise TaskError(f"--pytest-args {options!r} cannot be read: {str(error).lower()}") from None


def _say_report(report: MakeReport, out: Path) -> None:
    """Print what was left out, rejected and skipped."""
    for note in report.notes:
        say(note)
    say_rejected(dict(report.rejected.most_common()))
    say_skipped([f"{path}: {reason}" for path, reason in sorted(report.files.items())], out)
    if report.rejected or report.files:
        say(f"every rejected candidate is in {out / 'rejections.jsonl'}")


def _find_isolated_tests(
    tasks: Sequence[Task], settings: SynthesisSettings, progress: Callable[[int, int, str], None]
) -> None:
    """Note in each task the hidden tests that pass with tests and code in two processes."""
    from woodshed import grading
    from woodshed.synthesis.progress import Phases

    sandboxes, phases = settings.sandbox.create(), Phases(progress)
    phases.expect("tasks", ISOLATING_S * len(tasks) / settings.jobs)
    told = phases.named("tasks")
    with ThreadPoolExecutor(settings.jobs) as pool, phases.repeated():
        kept = pool.map(lambda task: grading.keep_isolated_tests(task, sandboxes), tasks)
        for done in range(len(tasks) + 1):
            told(done, len(tasks), "finding the tests that pass in two processes")
            next(kept, None)
    for task in tasks:
        if task.verifier == "pytest" and not grading.believed_tests(task):
            tell(
                f"{task.name} pays nothing: none of its hidden tests can be isolated or has a decoy; delete it"
            )


def _settings_of(values: Sequence[str]) -> SynthesisSettings:
    """Settings of making tasks.

    Raises:
        TaskError: a value that cannot be used, in words that know no recipe.
    """
    from woodshed import settings, synthesis

    try:
        return settings.read(synthesis.SynthesisSettings, None, values)
    except RecipeError as error:
        text = str(error).replace("section.key=value (rl.steps=4)", "KEY=VALUE")
        raise TaskError(text.replace("override", "setting")) from None


def say_rejected(reasons: Mapping[str, int]) -> None:
    """Print the reasons for rejections: number, code and meaning."""
    from woodshed.synthesis.stats import MEANINGS

    for reason, count in reasons.items():
        say(f"{count:6} rejected: {reason}{f' ({MEANINGS[reason]})' if reason in MEANINGS else ''}")


def say_skipped(files: Sequence[str], out: Path) -> None:
    """Print the files of the repositories that no task is made from, as many as fit on a screen."""
    for file in files[:MAX_FILES_SHOWN]:
        say(f"   skipped: {' '.join(file.split())}")
    if len(files) > MAX_FILES_SHOWN:
        say(f"   skipped: {len(files) - MAX_FILES_SHOWN} more files; {out / 'rejections.jsonl'} has all")


def _levels(text: str) -> list[int]:
    """[0, 1, 2, 4] for "0-2,4".

    Raises:
        TaskError: anything else, or a level that does not exist.
    """
    levels: list[int] = []
    for part in text.split(","):
        ends = re.fullmatch(r"\s*([0-9]{1,4})(?:\s*-\s*([0-9]{1,4}))?\s*", part)
        if ends is None:
            raise TaskError(
                f"levels {text[:80]!r} cannot be read; write a range such as 0-6, or a list such as 1,3"
            )
        levels += range(int(ends[1]), int(ends[2] or ends[1]) + 1)
    if not levels or max(levels) > 6:
        raise TaskError(f"levels {text!r} are outside 0 to 6")
    return sorted(set(levels))
