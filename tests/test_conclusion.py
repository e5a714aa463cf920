"""The line that says what a run shows: a win, a loss, no change, nothing measured, and the published quickstart."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import pytest
from lifelike import Shape, make_run

from woodshed.evals import card, evaluation, statistics, variants
from woodshed.evals.conclusion import conclude
from woodshed.evals.measures import MEASURES, Figure
from woodshed.evals.statistics import Difference, Estimate

BY_KEY = {measure.key: measure for measure in MEASURES}


@dataclass(frozen=True)
class Row:
    measure: Figure
    before: Estimate
    after: Estimate | None
    change: Difference | None


def row(key: str, before: list[float], after: list[float], whole: float = 1.0) -> Row:
    """One attempt at each task on both sides."""
    tasks = [str(n) for n in range(len(before))]
    sides = [statistics.rate(side, [whole] * len(side), tasks, is_share=True) for side in (before, after)]
    sums = [statistics.sums(side, [whole] * len(side), tasks) for side in (before, after)]
    return Row(BY_KEY[key], sides[0], sides[1], statistics.difference(*sums, is_share=True))


FEWER_FAULTS = row("invalid_calls", [2.0] * 20 + [1.0] * 3, [0.0] * 18 + [1.0] * 5, whole=5.0)
NONE_SOLVED = row("solved", [0.0] * 23, [0.0] * 23)
LESS_REWARD = row("reward", [0.5, 0.5, 0.4] + [0.0] * 20, [0.0] * 23)


def test_a_win_does_not_hide_that_nothing_was_solved():
    assert conclude([FEWER_FAULTS, NONE_SOLVED, LESS_REWARD]) == (
        "Better beyond noise: invalid-call rate fell from 37.4% to 4.3%. Nothing got worse beyond noise. Within noise: "
        "solve rate (0 of 23 before, 0 of 23 after) and mean reward (0.06 before, 0.00 after). 23 tasks, 1 seed."
    )


def test_a_win_beside_a_loss():
    solved = row("solved", [0.0] * 20 + [1.0] * 3, [1.0] * 20 + [0.0] * 3)
    worse = row("invalid_calls", [0.0] * 23, [2.0] * 20 + [1.0] * 3, whole=5.0)
    assert conclude([worse, solved], num_seeds=3) == (
        "Better beyond noise: solve rate rose from 3 of 23 to 20 of 23. Worse beyond noise: invalid-call rate rose "
        "from 0.0% to 37.4%. 23 tasks, 3 seeds."
    )


def test_a_loss_comes_first():
    lost = conclude([row("solved", [1.0] * 23, [0.0] * 23), LESS_REWARD])
    assert lost == (
        "Worse beyond noise: solve rate fell from 23 of 23 to 0 of 23. Nothing got better beyond noise. Within noise: "
        "mean reward (0.06 before, 0.00 after). 23 tasks, 1 seed."
    )


def test_more_cheating_is_named_whatever_else_was_won():
    cheats = row("flagged", [0.0] * 23, [1.0] * 20 + [0.0] * 3)
    assert "Worse beyond noise: hack rate: rollouts with a flag rose from 0.0% to 87.0%." in conclude(
        [FEWER_FAULTS, cheats]
    )
    quiet = row("flagged", [0.0] * 23, [0.0] * 23)
    assert "hack rate" not in conclude([FEWER_FAULTS, quiet])


def test_no_change_and_nothing_measured():
    assert conclude([NONE_SOLVED]) == (
        "Nothing moved beyond noise. Within noise: solve rate (0 of 23 before, 0 of 23 after). 23 tasks, 1 seed."
    )
    unjudged = Row(BY_KEY["reward"], statistics.rate([], [], []), statistics.rate([], [], []), None)
    assert "Not measured: mean reward." in conclude([NONE_SOLVED, unjudged])
    assert conclude([]) == "" and conclude([Row(BY_KEY["solved"], NONE_SOLVED.before, None, None)]) == ""


@pytest.mark.parametrize("num_tasks", [1, 2, 5])
def test_few_tasks_show_nothing(num_tasks: int):
    """One task leaves no interval, and five that all go one way are still chance."""
    line = conclude([row("solved", [0.0] * num_tasks, [1.0] * num_tasks)])
    assert line.startswith("Nothing moved beyond noise. Too few tasks to tell: solve rate (0 of ")


def test_every_place_that_compares_begins_with_it(tmp_path: Path):
    """The tables of an experiment, one line an arm with its seeds; the card of an exported model."""
    runs = [make_run(tmp_path / str(seed), Shape(tasks=6, steps=2, attempts=2)) for seed in (0, 1)]
    (line,) = variants.conclusions({"kl-ema": runs})
    assert line.startswith("kl-ema: ") and line.endswith("6 tasks, 2 seeds.")
    rows = [row[2] for row in variants.table({"kl-ema": runs})]
    assert "pass@2: solved by any of 2" in rows and "best@2: solved by the most promising of 2" in rows
    first = evaluation.from_run(runs[0])
    said = conclude(evaluation.before_after(first[0], first[-1]))
    assert card.gather(runs[0], problems=[]).conclusion == said
    text = card.write(runs[0], problems=[]).replace("\\", "")
    assert said in text and text.index(said) < text.index("| before | after |")
