"""Statistics of a set of tasks: counts by repository, operator and level, sizes, and reasons for rejection."""

from __future__ import annotations

import json
import statistics
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import Any

from woodshed.grading.decoys import blind_guess, covered
from woodshed.records import Task
from woodshed.synthesis.operators import LEVELS
from woodshed.tasks.folder import gold_patch, isolated_tests

UNREAD = "unread_file"
"""Reason code of a file that is no Python to us: no candidate, but nothing that is passed over either."""
MEANINGS = {
    "cascade": "it cannot be taken away cleanly",
    "command_broken": "a command of the package no longer starts",
    "conftest_broken": "conftest cannot be imported without it",
    "gold_fails": "the original code does not pass its tests in the task",
    "half_visible": "its tests cannot be shown by half",
    "honest": "tests that contradict each other can both be met",
    "import_broken": "the package cannot be imported without it",
    "instruction_too_long": "what is missing takes too many words to say",
    "leak": "its code also stands where an attempt can read it",
    "no_assertion": "no hidden test has an equality to contradict",
    "no_package_file": "the commit changes no file of the package",
    "no_test_fails": "all tests pass without it",
    "not_believable": "a run of the tests could not be believed",
    "not_proven": "its tests cannot stand alone",
    "not_text": "its file holds bytes that are not of its encoding",
    "not_utf8": "its file is not written in UTF-8",
    "odd_name": "its file has a name that a patch cannot hold",
    "sandbox_lost": "its sandbox was lost twice",
    "syntax": "the file no longer parses without it",
    "test_command_fails": "no command runs the tests that are shown",
    "timeout": "its tests ran out of time",
    "too_few_versions": "too few wrong versions to tell good tests by",
    "too_slow": "its tests use too much CPU time",
    "too_wide": "too many tests fail without it",
    "trivial": "its tests accept an answer that does nothing",
    "undefined_name": "code that stays uses a name that is gone",
    "unread_file": "a file that cannot be read as Python",
    "unstable_failure": "its tests do not always fail without it",
    "visible_tests_fail": "tests that are shown fail without it",
    "weak_tests": "its tests let too many wrong versions pass",
    "wrong_reason": "a test fails for another reason than the missing code",
}
"""Reason code of a rejected candidate, in words."""
COLOURS = ("#9ecae1", "#6baed6", "#3182bd", "#31a354", "#74c476", "#fd8d3c", "#de2d26")
"""One per level, 0 to 6."""


@dataclass(frozen=True)
class SetRow:
    """Tasks that share a repository, an operator or a level."""

    group: str
    """"repository", "operator" or "level"."""
    name: str
    tasks: int
    share: float
    fail_to_pass: float
    """Medians, of these and the following."""
    behaviour: float
    """Of the fail-to-pass tests, those that fail also where all names are back without their behaviour."""
    pass_to_pass: float
    with_decoy: float
    """Of the fail-to-pass tests, the share that has a copy which must fail (`grading.decoys`)."""
    blind_guess: float
    """Chance that code which knows no right value tells every copy of a graded run from its test."""
    isolated: float
    """Of the fail-to-pass tests, the share that is judged with the code in another process; 0 where nobody looked."""
    lines_removed: float
    words: float


@dataclass(frozen=True)
class Stats:
    """A set in figures."""

    rows: tuple[SetRow, ...]
    rejected: dict[str, int]
    """Number of candidates by reason code, the largest first."""
    num_tasks: int
    files: tuple[str, ...] = ()
    """Files of the repositories that no operator touches, each with the reason."""

    @property
    def acceptance(self) -> float:
        """Share of the tried candidates that became tasks."""
        return self.num_tasks / max(self.num_tasks + sum(self.rejected.values()), 1)


def rejected(log: Path) -> Iterator[dict[str, Any]]:
    """The entries of a rejections.jsonl, which need not exist; torn lines, and somebody else's, are passed over."""
    lines = log.read_text(encoding="utf-8", errors="replace").splitlines() if log.is_file() else []
    for line in lines:
        try:
            entry = json.loads(line)
        except (ValueError, RecursionError):
            continue
        if isinstance(entry, dict) and all(isinstance(entry.get(key), str) for key in ("task", "reason")):
            yield entry


def summarise(tasks: Sequence[Task], rejections: Path) -> Stats:
    """Figures of a set; `rejections` is its rejections.jsonl, which need not exist."""
    groups = {
        "repository": lambda task: str(task.provenance.get("source", "?")),
        "operator": lambda task: task.operator,
        "level": lambda task: str(task.level),
    }
    rows = []
    for group, key in groups.items():
        by_name: dict[str, list[Task]] = {}
        for task in tasks:
            by_name.setdefault(key(task), []).append(task)
        order = {name: index for index, name in enumerate(LEVELS)} if group == "operator" else {}
        for name in sorted(by_name, key=lambda n: (order.get(n, 0), n)):
            rows.append(_row(group, name, by_name[name], len(tasks)))
    last = {entry["task"]: entry for entry in rejected(rejections)}  # the last of several tries
    accepted = {task.name for task in tasks}
    files = sorted(str(entry.get("detail", "")) for entry in last.values() if entry["reason"] == UNREAD)
    others = {name: entry["reason"] for name, entry in last.items() if entry["reason"] != UNREAD}
    reasons = Counter(reason for name, reason in others.items() if name not in accepted)
    return Stats(tuple(rows), dict(reasons.most_common()), len(tasks), tuple(files))


def _row(group: str, name: str, tasks: Sequence[Task], total: int) -> SetRow:
    def median(values: Sequence[float]) -> float:
        return float(statistics.median(values))

    return SetRow(
        group,
        name,
        len(tasks),
        len(tasks) / total,
        median([len(task.fail_to_pass) for task in tasks]),
        median([len(task.behaviour_tests) for task in tasks]),
        median([len(task.pass_to_pass) for task in tasks]),
        median([covered(task.fail_to_pass, task.decoys) for task in tasks]),
        median([blind_guess(task.decoys) for task in tasks]),
        median([_isolated(task) for task in tasks]),
        median([float(_lines_removed(task)) for task in tasks]),
        median([len(task.instruction.split()) for task in tasks]),
    )


def _isolated(task: Task) -> float:
    """Share of the fail-to-pass tests that is known to be isolated."""
    known = isolated_tests(task)
    return len({*known[1]} & {*task.fail_to_pass}) / len(task.fail_to_pass) if known else 0.0


def _lines_removed(task: Task) -> int:
    """Lines that the gold patch brings back or puts right."""
    return sum(
        line.startswith("+") and not line.startswith("+++ ") for line in gold_patch(task).diff.splitlines()
    )


def table(stats: Stats) -> list[list[str]]:
    """The rows as text, for aligned columns."""
    head = ["", "", "tasks", "share", "F2P", "behaviour", "P2P", "decoys", "guess"]
    head += ["isolated", "lines removed", "words"]
    return [head] + [
        [row.group, row.name, str(row.tasks), f"{row.share:.0%}"]
        + [f"{value:g}" for value in (row.fail_to_pass, row.behaviour, row.pass_to_pass)]
        + [f"{row.with_decoy:.0%}", f"{row.blind_guess:.2g}", f"{row.isolated:.0%}"]
        + [f"{value:g}" for value in (row.lines_removed, row.words)]
        for row in stats.rows
    ]


def picture(tasks: Sequence[Task]) -> str:
    """An SVG: one bar per repository and per operator, divided by level."""
    bars: dict[str, Counter[int]] = {}
    for task in tasks:
        source = str(task.provenance.get("source", "?")).removeprefix("pypi:")
        for name in (source, task.operator):
            bars.setdefault(name, Counter())[task.level] += 1
    sources = sorted(name for name in bars if name not in LEVELS)
    names = [*sources, *(name for name in LEVELS if name in bars)]
    longest = max((sum(bar.values()) for bar in bars.values()), default=1)
    parts = []
    for index, name in enumerate(names):
        y, x = 18 + 20 * index + 10 * (index >= len(sources)), 190.0
        parts.append(f'<text x="184" y="{y + 12}" text-anchor="end">{escape(name)}</text>')
        for level in sorted(bars[name]):
            width = 400 * bars[name][level] / longest
            title = f"{name}, level {level}: {bars[name][level]}"
            parts.append(
                f'<rect x="{x:.1f}" y="{y}" width="{width:.1f}" height="15" fill="{COLOURS[level % 7]}">'
                f"<title>{escape(title)}</title></rect>"
            )
            x += width
        parts.append(f'<text x="{x + 4:.1f}" y="{y + 12}">{sum(bars[name].values())}</text>')
    legend = "".join(
        f'<rect x="{190 + 70 * level}" y="0" width="10" height="10" fill="{colour}"/>'
        f'<text x="{204 + 70 * level}" y="10">level {level}</text>'
        for level, colour in enumerate(COLOURS)
    )
    height = 40 + 20 * len(names)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 700 {height}" font-family="sans-serif" '
        f'font-size="11">{legend}{"".join(parts)}</svg>\n'
    )
