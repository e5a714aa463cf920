"""Figures of several attempts at a task, against trying every draw, on screen, in metrics, in curves and in pairs."""

from __future__ import annotations

import itertools
from fractions import Fraction
from pathlib import Path

import pytest
from lifelike import Shape, make_run

from woodshed import report
from woodshed.cli.app import say_run, say_summary
from woodshed.evals import measures, passes
from woodshed.evals.passes import Try
from woodshed.records import Patch, Rollout, Verdict
from woodshed.report import curves, variants
from woodshed.report.gather import gather
from woodshed.report.transcripts import Archives
from woodshed.runs.folder import RunDir

TASKS = {"a": [1, 0, 0], "b": [0, 0, 0], "c": [1, 1, 1], "d": [0, 1, 1]}


def tries(tasks: dict[str, list[int]]) -> list[Try]:
    """Attempts that look better the later they were made."""
    return [Try(task, bool(one), n) for task, made in tasks.items() for n, one in enumerate(made)]


def drawn(made: list[int], k: int) -> dict[str, Fraction]:
    """The three figures of one task, by trying every draw of k attempts."""
    draws = list(itertools.combinations(range(len(made)), k))
    return {
        f"pass@{k}": Fraction(sum(any(made[n] for n in draw) for draw in draws), len(draws)),
        f"pass^{k}": Fraction(sum(all(made[n] for n in draw) for draw in draws), len(draws)),
        f"best@{k}": Fraction(sum(made[max(draw)] for draw in draws), len(draws)),
    }


@pytest.mark.parametrize(("attempts", "sizes"), [(1, {1}), (2, {1, 2}), (3, {1, 2, 3}), (8, {1, 2, 4, 8})])
def test_every_k_up_to_the_attempts_and_the_attempts_themselves(attempts: int, sizes: set[int]):
    found = passes.by_task(tries({task: (made * 3)[:attempts] for task, made in TASKS.items()}))
    assert set(found) == {f"{kind}{k}" for kind in ("pass@", "pass^", "best@") for k in sizes}
    for k in sizes:
        for task, made in TASKS.items():
            for name, value in drawn((made * 3)[:attempts], k).items():
                assert found[name][task] == (pytest.approx(float(value)), 1.0)


def test_a_task_that_lost_an_attempt_leaves_k_as_it_was():
    """One void attempt neither changes which k a step reports nor enters it."""
    found = passes.estimates(tries(TASKS | {"d": [0, 1]}))
    assert found["pass@3"].num_tasks == 3 and found["pass@3"].value == pytest.approx(2 / 3)
    assert found["pass@2"].num_tasks == 4 and found["pass@2"].num_attempts == 11
    assert passes.estimates([]) == {} and passes.headline([]) == ()


def graded(tasks: dict[str, list[int]]) -> list[measures.Graded]:
    made = [
        (Rollout(f"eval-0-{task}-{n}", task, task, n, 0, (), Patch({}), "finished", 1.0), bool(one))
        for task, several in tasks.items()
        for n, one in enumerate(several)
    ]
    verdicts = [Verdict(one.id, one.task_id, "graded", float(ok), ok, {}) for one, ok in made]
    return measures.pair([one for one, _ in made], verdicts)


def test_compared_in_pairs_beside_the_average():
    after = {task: [1, *made[1:]] for task, made in TASKS.items()}
    listed = measures.compare(graded(TASKS), graded(after))
    keys = [row.measure.key for row in listed]
    assert keys[keys.index("solved") :][:3] == ["solved", "pass@3", "best@3"], "beside the average"
    rows = dict(zip(keys, listed, strict=True))
    row = rows["pass@3"]
    assert (row.before.value, row.after.value) == (0.75, 1.0) and row.change.value == 0.25
    assert (row.record.up, row.record.down, row.record.same) == (1, 0, 3)
    assert measures.write_counts(row.measure, row.before) == "3 / 4 tasks"
    alone = measures.summary(graded(TASKS)).passes["pass@3"]
    assert (row.before.low, row.before.high) == (alone.low, alone.high)
    assert "pass@1" not in rows, "with one attempt it is the solve rate"
    fewer = {row.measure.key for row in measures.compare(graded(TASKS), graded({t: [1] for t in TASKS}))}
    assert not any(key.startswith("pass@") for key in fewer)
    seeds = {row.measure.key: row for row in measures.compare_seeds([graded(TASKS)] * 2, [graded(after)] * 2)}
    assert seeds["pass@3"].change.value == 0.25


def test_the_screen_leaves_out_k_of_one_only(capsys: pytest.CaptureFixture[str]):
    say_summary(measures.summary(graded({task: (made * 4)[:11] for task, made in TASKS.items()})))
    said = capsys.readouterr().out
    assert "pass@11: solved by any of 11" in said and "pass@1:" not in said and "best@8" in said


def test_a_run_shows_them_on_screen_in_metrics_and_on_its_page(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    run = make_run(tmp_path / "run", Shape(tasks=4, steps=3, tasks_per_step=2, attempts=3))
    trained = [line for phase, _, line in run.read("metrics") if phase == "train"]
    assert trained and all({"pass@1", "pass@3", "best@3"} <= set(line["passes"]) for line in trained)
    assert all(line["passes"]["pass@3"]["low"] is not None for line in trained)
    story = gather(RunDir.open(run.path), 0, Archives())
    titles = [chart.title for chart in curves.charts(variants.by_recipe([[story]]))]
    assert sum(title.startswith("solved: on average, by any of k") for title in titles) == 2
    text = report.write(run).read_text("utf-8")
    assert "pass@3: solved by any of 3" in text and "best@3" in text
    say_run(run)
    said = capsys.readouterr().out
    assert "pass@3: solved by any of 3" in said
    first = said.splitlines()[0]
    assert "beyond noise" in first and first.endswith("1 seed.") and "solve rate" in first
    assert text.index('class="conclusion"') < text.index('class="headline"')
