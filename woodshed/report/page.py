"""Report of one or several runs: one self-contained HTML file without network access.

Its contents come from a policy, a repository or a log, and are treated as hostile. Jinja2 escapes
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
from woodshed.evals.conclusion import HEADLINE, conclude, standing, why_unclear
from woodshed.evals.effort import DifficultyBucket, Spent
from woodshed.evals.measures import BEHAVIOUR, MEASURES
from woodshed.records import RunError
from woodshed.report import curves, effort_chart, variants
from woodshed.report.gather import SOLVED, Line, RunRecords, gather
from woodshed.report.terms import TERMS, anchor, key_of
from woodshed.report.transcripts import Archives, clean, dump, pack
from woodshed.report.variants import Variant, VariantRow
from woodshed.report.visible import visible
from woodshed.runs.files import reason, way_out, write_atomically
from woodshed.runs.folder import RunDir
from woodshed.synthesis.stats import MEANINGS

NUM_NOTABLE = 5  # best, worst and flagged rollouts shown per run


@dataclass(frozen=True)
class Notable:
    """Rollouts worth a look, with the reason."""

    title: str
    lines: tuple[tuple[Line, str], ...]


@dataclass(frozen=True)
class StepTable:
    """Metrics of one phase: a row per metric, a column per step."""

    phase: str
    steps: tuple[int, ...]
    rows: tuple[tuple[str, tuple[str, ...]], ...]


@dataclass(frozen=True)
class CostTable:
    """Resources that runs used and their cost: a column per run."""

    runs: tuple[str, ...]
    brief: tuple[tuple[str, tuple[str, ...]], ...]
    """Four lines for a first look."""
    rows: tuple[tuple[str, tuple[str, ...]], ...]
    notes: tuple[str, ...]


@dataclass(frozen=True)
class Figures:
    """Figures of the page for one variant."""

    variant: Variant
    conclusion: str
    """A sentence on the changes that the headline shows and does not show; of a single evaluation, its figures."""
    headline: list[VariantRow]
    behaviour: list[VariantRow]
    faults: list[tuple[str, list[str]]]
    against: list[tuple[measures.Measure, measures.Difference]]
    """Headline measures minus those of the first variant."""
    effort: list[DifficultyBucket]
    """Effort of the last evaluation on tasks of similar difficulty."""
    calibration: float | None
    refusals: list[str]
    """Why it is not compared with the first variant, or its seeds not with one another."""
    warnings: list[str]


def write(
    *runs: RunDir | Sequence[RunDir], path: Path | None = None, problems: list[str] | None = None
) -> Path:
    """Write the page of these runs and return its path. Works while runs are going on.

    Args:
        runs: each a run, or the seeds of one variant. Single runs that differ in their seed only are one variant, too.
        path: by default `report.html` in the run folder, or, for several runs, beside the first of them.
        problems: receives a sentence for everything that could not be read, and for a run without any measurement.

    Raises:
        RunError: a run is named twice or its recipe is damaged, or the page cannot be written.
    """
    groups = [[run] if isinstance(run, RunDir) else list(run) for run in runs]
    folders = [run.path for group in groups for run in group]
    for folder, times in Counter(folder.resolve() for folder in folders).items():
        if times > 1:
            raise RunError(f"{folder} is named twice; a run is one seed of one variant")
    path = path or (folders[0] if len(folders) == 1 else folders[0].parent) / "report.html"
    text = render(groups, problems if problems is not None else [])
    try:
        write_atomically(path, text)
    except OSError as error:
        raise RunError(f"{path} cannot be written: {reason(error)}. To have it, {way_out(error)}") from error
    return path


def render(groups: Sequence[Sequence[RunDir]], problems: list[str]) -> str:
    """The page of groups of runs as text; `problems` receives what could not be read."""
    archives = Archives()
    run_records = [gather(run, n, archives) for n, run in enumerate(run for group in groups for run in group)]
    run_records = [_told_apart(record, run_records) for record in run_records]
    for record in run_records:
        empty = [] if record.lines or record.metrics else ["nothing was measured yet"]
        problems += [f"{record.path}: {problem}" for problem in (*record.problems, *empty)]
    difficulty = effort.difficulties(_spent(line for record in run_records for line in record.lines))
    remaining = iter(run_records)
    variants_shown = variants.by_recipe([[next(remaining) for _ in group] for group in groups])
    constant: list[str] = []
    curve_charts, maps = curves.charts(variants_shown, constant), curves.curriculum_maps(run_records)
    blocks, num_left_out = _blocks(run_records, archives)
    curve_charts += effort_chart.charts(run_records)
    charts = [*curve_charts, *maps]
    if charts:
        blocks["plotly"] = _plotly()
    return (
        _environment()
        .get_template("page.html.j2")
        .render(
            run_records=run_records,
            variants=[_figures(variant, variants_shown[0], difficulty) for variant in variants_shown],
            charts=curve_charts,
            constant=constant,
            maps=maps,
            figures=Markup(_json([chart.figure for chart in charts])),
            notable=[notable(record) for record in run_records],
            costs=_costs(run_records),
            tables=[
                [_table(phase, steps) for phase, steps in record.metrics.items()] for record in run_records
            ],
            phases=sorted({line.phase for record in run_records for line in record.lines}),
            num_rollouts=sum(len(record.lines) for record in run_records),
            num_left_out=num_left_out,
            blocks={name: Markup(block) for name, block in blocks.items()},
            nonce=secrets.token_urlsafe(16),
        )
    )


def _told_apart(record: RunRecords, run_records: Sequence[RunRecords]) -> RunRecords:
    """Names of the runs; runs with equal names are called by their folders."""
    is_alone = [other.name for other in run_records].count(record.name) == 1
    return record if is_alone else replace(record, name=str(record.path))


def _spent(lines: Iterable[Line]) -> list[Spent]:
    return [
        Spent(line.task_id, SOLVED.get(line.result), line.tokens, line.turns)
        for line in lines
        if line.phase == "eval" and not line.is_void
    ]


def _figures(variant: Variant, first: Variant, difficulty: Mapping[str, float]) -> Figures:
    refusals, warnings = first.doubts(variant)
    before, after = variant.sides()
    spent = _spent(line for lines in after or before for line in lines)
    headline = variants.rows(variant, MEASURES)
    return Figures(
        variant,
        conclude(headline, num_seeds=len(before)) or measured_once(headline),
        measures.beside_the_average(headline, variants.pass_rows(variant)),
        variants.rows(variant, BEHAVIOUR),
        _faults(variant),
        variants.against(first, variant, MEASURES) if variant is not first and not refusals else [],
        effort.by_difficulty(spent, difficulty),
        effort.calibration(spent, difficulty),
        refusals,
        warnings,
    )


def measured_once(headline: Iterable[VariantRow]) -> str:
    """The figures of the only evaluation in a sentence; "" without one."""
    row_of = {row.measure.key: row for row in headline if row.before.value is not None}
    figures = [
        f"{row_of[key].measure.label} {measures.write_estimate(row_of[key].measure, row_of[key].before)}"
        for key in HEADLINE
        if key in row_of
    ]
    return f"Measured once, so nothing is compared: {', '.join(figures)}." if figures else ""


def _costs(run_records: Sequence[RunRecords]) -> CostTable:
    """The ledgers of all runs side by side."""
    brief: dict[str, dict[str, str]] = {}
    columns: dict[str, dict[str, str]] = {}
    notes: dict[str, None] = {}
    for record in run_records:
        if (run_ledger := record.ledger) is None or not run_ledger.phases:
            continue
        evaluations = record.evaluations().values()
        attempts = [[(line.task_id, SOLVED.get(line.result)) for line in lines] for lines in evaluations]
        costs = ledger.costs(run_ledger, attempts, ledger.solve_change(attempts))
        brief[record.name] = {name: text for name, text in ledger.brief(run_ledger, costs)}
        rows = ledger.table(run_ledger, costs)[1:]
        columns[record.name] = {label: cost or amount for label, amount, cost in rows}
        notes |= dict.fromkeys(
            f"No price for {missing}: totals are lower bounds." for missing in costs.unknown
        )
    return CostTable(tuple(columns), _side_by_side(brief), _side_by_side(columns), tuple(notes))


def _side_by_side(columns: Mapping[str, Mapping[str, str]]) -> tuple[tuple[str, tuple[str, ...]], ...]:
    labels = dict.fromkeys(label for column in columns.values() for label in column)
    return tuple((label, tuple(column.get(label, "") for column in columns.values())) for label in labels)


def notable(record: RunRecords) -> list[Notable]:
    """Best, worst and flagged rollouts of a run, with what makes them so."""
    judged = [line for line in record.lines if line.result in SOLVED]
    best = sorted((line for line in judged if line.result == "solved"), key=lambda line: line.tokens)
    worst = sorted(
        (line for line in judged if line.result in ("partly", "failed")),
        key=lambda line: (line.reward or 0.0, -sum(line.faults.values()), -line.tokens),
    )
    flagged = [line for line in record.lines if line.flags or line.integrity]
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
        Notable(title, tuple((line, reason(line)) for line in lines[:NUM_NOTABLE]))
        for title, lines, reason in groups
        if lines
    ]


def _why_bad(line: Line) -> str:
    faults = ", ".join(f"{count} {kind}" for kind, count in line.faults.items())
    return f"reward {line.reward:.2f}, {faults or 'no faulty calls'}, {line.ended}"


def _evidence(line: Line) -> str:
    flags = [f"{flag.rule} at turn {flag.turn}: {flag.quote}" for flag in line.flags]
    return "; ".join([*flags, *line.integrity])[:300]


def _faults(variant: Variant) -> list[tuple[str, list[str]]]:
    """Every kind of call fault, its share of turns first and last over all seeds, the most frequent before first."""
    sides = [
        [line for lines in side for line in lines if not line.is_void] for side in variant.sides() if side
    ]
    totals: Counter[str] = Counter()
    for line in (line for side in sides for line in side):
        totals.update(line.faults)
    rows = []
    for kind, _ in totals.most_common():
        shares = []
        for side in sides:
            count, turns = sum(line.faults.get(kind, 0) for line in side), sum(line.turns for line in side)
            shares.append(f"{100 * count / max(turns, 1):.1f}% ({count} / {turns})")
        rows.append((kind, shares))
    return rows


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
    ("archive_index", lambda line: line.archive_index),
)
"""Rows of the list of rollouts, for viewer.js."""


def _blocks(run_records: Sequence[RunRecords], archives: Archives) -> tuple[dict[str, str], int]:
    """Packed data by the id of its element, and the number of transcripts left out."""
    lines = [line for record in run_records for line in record.lines]
    if not lines:
        return {}, 0
    rows = {
        "runs": [record.name for record in run_records],
        "columns": [name for name, _ in COLUMNS],
        "rows": [[value(line) for _, value in COLUMNS] for line in lines],
        "instructions": {t.task.id: t.task.instruction for record in run_records for t in record.tasks},
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
    package = files("woodshed.report")
    environment.globals.update(
        measures=measures,
        by_key={measure.key: measure for measure in MEASURES},
        standing=standing,
        why_unclear=why_unclear,
        terms=TERMS,
        key_of=key_of,
        anchor=anchor,
        reasons=MEANINGS,
        version=__version__,
        source={
            name: Markup((package / name).read_text("utf-8"))
            for name in ("style.css", "viewer.js", "charts.js")
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
