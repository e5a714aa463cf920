"""The readable page of one or several runs: one file, no network, everything in it.

Everything on it came from a policy, a repository or a log, so it is hostile until proven otherwise. Jinja2 escapes
every value; transcripts travel as compressed data and enter the page as text nodes; control characters become visible
symbols; only the page's own three scripts run (a nonce), and nothing can be requested.
"""

from __future__ import annotations

import functools
import secrets
import urllib.parse
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from importlib.resources import files
from pathlib import Path
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from woodshed import __version__
from woodshed.evals import effort, ledger, measures
from woodshed.evals.conclusion import conclude
from woodshed.evals.effort import DifficultyBucket, Spent
from woodshed.evals.measures import BEHAVIOUR, MEASURES
from woodshed.records import RunError
from woodshed.report import curves, variants
from woodshed.report.gather import Line, RunRecords, gather
from woodshed.report.transcripts import Archives, clean, dump, pack
from woodshed.report.variants import Variant, VariantRow
from woodshed.report.visible import visible
from woodshed.runs.files import write_atomically
from woodshed.runs.folder import RunDir

NUM_NOTABLE = 5  # best, worst and flagged rollouts shown per run


@dataclass(frozen=True)
class Notable:
    """Rollouts worth a look, with the reason."""

    title: str
    lines: tuple[tuple[Line, str], ...]


@dataclass(frozen=True)
class StepTable:
    """Metrics of one phase, a row a metric, a column a step."""

    phase: str
    steps: tuple[int, ...]
    rows: tuple[tuple[str, tuple[str, ...]], ...]


@dataclass(frozen=True)
class CostTable:
    """Resources that runs used and their cost, a column a run."""

    runs: tuple[str, ...]
    rows: tuple[tuple[str, tuple[str, ...]], ...]
    notes: tuple[str, ...]


@dataclass(frozen=True)
class Figures:
    """Figures of the page for one variant."""

    arm: Variant
    conclusion: str
    """One line on what the headline shows and does not show; empty where there is one evaluation."""
    headline: list[VariantRow]
    behaviour: list[VariantRow]
    faults: list[tuple[str, list[str]]]
    against: list[tuple[measures.Measure, measures.Difference]]
    """The headline against the first arm's."""
    effort: list[DifficultyBucket]
    """Effort of the last evaluation on tasks of similar difficulty."""
    calibration: float | None
    refusals: list[str]
    """Why it is not compared with the first arm, or its seeds not with one another."""
    warnings: list[str]


def write(
    *runs: RunDir | Sequence[RunDir], path: Path | None = None, problems: list[str] | None = None
) -> Path:
    """Write the page of these runs and return its path. Works while runs are going on.

    Args:
        runs: each a run, or the seeds of one arm. Single runs that differ in their seed only are one arm, too.
        path: by default `report.html` in the run folder, or, for several runs, beside the first of them.
        problems: receives a sentence for everything that could not be read, and for a run without any measurement.

    Raises:
        RunError: a run is named twice or its recipe is damaged, or the page cannot be written.
    """
    groups = [[run] if isinstance(run, RunDir) else list(run) for run in runs]
    folders = [run.path for group in groups for run in group]
    for folder, times in Counter(folder.resolve() for folder in folders).items():
        if times > 1:
            raise RunError(f"{folder} is named twice; a run is one seed of one arm")
    path = path or (folders[0] if len(folders) == 1 else folders[0].parent) / "report.html"
    text = render(groups, problems if problems is not None else [])
    try:
        write_atomically(path, text)
    except OSError as error:
        raise RunError(f"{path} cannot be written: {error.strerror or error}") from error
    return path


def render(groups: Sequence[Sequence[RunDir]], problems: list[str]) -> str:
    """The page of groups of runs as text; `problems` receives what could not be read."""
    archives = Archives()
    stories = [gather(run, n, archives) for n, run in enumerate(run for group in groups for run in group)]
    stories = [_told_apart(story, stories) for story in stories]
    for story in stories:
        empty = [] if story.lines or story.metrics else ["nothing was measured yet"]
        problems += [f"{story.path}: {problem}" for problem in (*story.problems, *empty)]
    difficulty = effort.difficulties(_spent(line for story in stories for line in story.lines))
    left = iter(stories)
    found = variants.arms([[next(left) for _ in group] for group in groups])
    drawn, maps = curves.charts(found), curves.curriculum_maps(stories)
    blocks, num_left_out = _blocks(stories, archives)
    charts = [*drawn, *maps]
    if charts:
        blocks["plotly"] = _plotly()
    return (
        _environment()
        .get_template("page.html.j2")
        .render(
            stories=stories,
            arms=[_figures(arm, found[0], difficulty) for arm in found],
            charts=drawn,
            maps=maps,
            figures=Markup(_json([chart.figure for chart in charts])),
            notable=[notable(story) for story in stories],
            costs=_costs(stories),
            tables=[[_table(phase, steps) for phase, steps in story.metrics.items()] for story in stories],
            phases=sorted({line.phase for story in stories for line in story.lines}),
            num_rollouts=sum(len(story.lines) for story in stories),
            num_left_out=num_left_out,
            blocks={name: Markup(block) for name, block in blocks.items()},
            nonce=secrets.token_urlsafe(16),
        )
    )


def _told_apart(story: RunRecords, stories: Sequence[RunRecords]) -> RunRecords:
    """Names of the runs; runs with equal names are called by their folders."""
    is_alone = [other.name for other in stories].count(story.name) == 1
    return story if is_alone else replace(story, name=str(story.path))


SOLVED = {"solved": True, "failed": False}  # of other results it is not known


def _spent(lines: Iterable[Line]) -> list[Spent]:
    return [
        Spent(line.task_id, SOLVED.get(line.result), line.tokens, line.turns)
        for line in lines
        if line.phase == "eval" and not line.is_void
    ]


def _figures(arm: Variant, first: Variant, difficulty: Mapping[str, float]) -> Figures:
    refusals, warnings = first.doubts(arm)
    before, after = arm.sides()
    spent = _spent(line for lines in after or before for line in lines)
    headline = variants.rows(arm, MEASURES)
    return Figures(
        arm,
        conclude(headline, num_seeds=len(before)),
        measures.beside_the_average(headline, variants.pass_rows(arm)),
        variants.rows(arm, BEHAVIOUR),
        _faults(arm),
        variants.against(first, arm, MEASURES) if arm is not first and not refusals else [],
        effort.by_difficulty(spent, difficulty),
        effort.calibration(spent, difficulty),
        refusals,
        warnings,
    )


def _costs(stories: Sequence[RunRecords]) -> CostTable:
    """The ledgers of all runs side by side."""
    columns: dict[str, dict[str, str]] = {}
    notes: dict[str, None] = {}
    for story in stories:
        if (books := story.books) is None or not books.phases:
            continue
        evaluations = story.evaluations().values()
        made = [[(line.task_id, SOLVED.get(line.result)) for line in lines] for lines in evaluations]
        costs = ledger.costs(books, made, ledger.solve_change(made))
        rows = ledger.table(books, costs)[1:]
        columns[story.name] = {label: cost or amount for label, amount, cost in rows}
        notes[f"Prices of {books.prices.date}."] = None
        notes |= dict.fromkeys(
            f"No price for {missing}: totals are lower bounds." for missing in costs.unknown
        )
    labels = dict.fromkeys(label for column in columns.values() for label in column)
    table = tuple((label, tuple(column.get(label, "") for column in columns.values())) for label in labels)
    return CostTable(tuple(columns), table, tuple(notes))


def notable(story: RunRecords) -> list[Notable]:
    """Best, worst and flagged rollouts of a run, with what makes them so."""
    judged = [line for line in story.lines if line.result in ("solved", "failed")]
    best = sorted((line for line in judged if line.result == "solved"), key=lambda line: line.tokens)
    worst = sorted(
        (line for line in judged if line.result == "failed"),
        key=lambda line: (line.reward or 0.0, -sum(line.faults.values()), -line.tokens),
    )
    flagged = [line for line in story.lines if line.flags or line.integrity]
    groups: list[tuple[str, Sequence[Line], Callable[[Line], str]]] = [
        (
            "Best: solved with the fewest tokens",
            best,
            lambda line: f"{line.tokens} tokens, {line.turns} turns",
        ),
        ("Worst: least reward, most faults", worst, _why_bad),
        ("Flagged", flagged, _evidence),
    ]
    return [
        Notable(title, tuple((line, why(line)) for line in lines[:NUM_NOTABLE]))
        for title, lines, why in groups
        if lines
    ]


def _why_bad(line: Line) -> str:
    faults = ", ".join(f"{count} {kind}" for kind, count in line.faults.items())
    return f"reward {line.reward:.2f}, {faults or 'no faulty calls'}, {line.ended}"


def _evidence(line: Line) -> str:
    said = [f"{flag.rule} at turn {flag.turn}: {flag.quote}" for flag in line.flags]
    return "; ".join([*said, *line.integrity])[:300]


def _faults(arm: Variant) -> list[tuple[str, list[str]]]:
    """Every kind of call fault, its share of turns first and last over all seeds, the most frequent before first."""
    sides = [[line for lines in side for line in lines if not line.is_void] for side in arm.sides() if side]
    totals: Counter[str] = Counter()
    for line in (line for side in sides for line in side):
        totals.update(line.faults)
    found = []
    for kind, _ in totals.most_common():
        shares = []
        for side in sides:
            count, turns = sum(line.faults.get(kind, 0) for line in side), sum(line.turns for line in side)
            shares.append(f"{100 * count / max(turns, 1):.1f}% ({count} / {turns})")
        found.append((kind, shares))
    return found


def _table(phase: str, by_step: Mapping[int, Mapping[str, Any]]) -> StepTable:
    steps = tuple(sorted(by_step))
    names = dict.fromkeys(name for step in steps for name in by_step[step])
    rows = tuple(
        (name, tuple(curves.short(by_step[s][name][0]) if name in by_step[s] else "" for s in steps))
        for name in names
    )
    return StepTable(phase, steps, rows)


COLUMNS: tuple[tuple[str, Callable[[Line], Any]], ...] = (
    ("run", lambda line: line.run),
    ("phase", lambda line: line.phase),
    ("step", lambda line: line.step),
    ("id", lambda line: line.id),
    ("task", lambda line: line.task_name),
    ("task_id", lambda line: line.task_id),
    ("attempt", lambda line: line.attempt),
    ("ended", lambda line: line.ended),
    ("result", lambda line: line.result),
    ("reward", lambda line: line.reward),
    ("turns", lambda line: line.turns),
    ("tokens", lambda line: line.tokens),
    ("seconds", lambda line: round(line.seconds, 2)),
    ("faults", lambda line: dict(line.faults)),
    ("hints", lambda line: line.hints),
    ("targeted", lambda line: line.targeted),
    ("flags", lambda line: [[flag.rule, flag.turn, flag.quote, flag.confidence] for flag in line.flags]),
    ("integrity", lambda line: line.integrity),
    ("archive", lambda line: line.archive),
    ("place", lambda line: line.place),
)
"""Rows of the list of rollouts, for viewer.js."""


def _blocks(stories: Sequence[RunRecords], archives: Archives) -> tuple[dict[str, str], int]:
    """Everything big by the id of its element, packed; and how many transcripts were left out."""
    lines = [line for story in stories for line in story.lines]
    if not lines:
        return {}, 0
    rows = {
        "runs": [story.name for story in stories],
        "columns": [name for name, _ in COLUMNS],
        "rows": [[value(line) for _, value in COLUMNS] for line in lines],
        "instructions": {t.task.id: t.task.instruction for story in stories for t in story.tasks},
    }
    words, postings = archives.index.pack()
    packed, num_left_out = archives.pack()
    blocks = {"rows": pack(dump(rows)), "words": pack(words), "postings": pack(postings)}
    return blocks | {f"a{number}": text for number, text in enumerate(packed) if text}, num_left_out


def _json(value: Any) -> str:
    """JSON that may stand inside a script element."""
    return dump(value).decode().replace("<", "\\u003c")


@functools.cache
def _plotly() -> str:
    return pack((files("plotly") / "package_data" / "plotly.min.js").read_bytes())


@functools.cache
def _environment() -> Environment:
    environment = Environment(
        loader=PackageLoader("woodshed.report", "."),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= {"visible": visible, "flat": _flat}
    environment.filters["address"] = lambda text: urllib.parse.quote(clean(text), safe="")
    here = files("woodshed.report")
    environment.globals.update(
        measures=measures,
        by_key={measure.key: measure for measure in MEASURES},
        version=__version__,
        source={
            name: Markup((here / name).read_text("utf-8")) for name in ("style.css", "viewer.js", "charts.js")
        },
        now=lambda: f"{datetime.now(UTC):%Y-%m-%d %H:%M} UTC",
    )
    return environment


def _flat(tree: Mapping[str, Any], prefix: str = "") -> list[tuple[str, str]]:
    """Nested values as (dotted name, text)."""
    lines: list[tuple[str, str]] = []
    for name, value in tree.items():
        if isinstance(value, Mapping):
            lines += _flat(value, f"{prefix}{name}.")
        else:
            text = ", ".join(map(str, value)) if isinstance(value, list) else str(value)
            lines.append((f"{prefix}{name}", text))
    return lines
