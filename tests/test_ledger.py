"""The ledger: totals equal what was recorded, to the token; nothing twice; prices known and unknown."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from woodshed.evals import evaluation, ledger
from woodshed.evals.ledger import Prices, Usage
from woodshed.evals.statistics import Difference
from woodshed.records import Patch, RecipeError, Rollout, RunError, Turn, Verdict
from woodshed.runs.folder import RunDir

PRICES = Prices.model_validate(
    {
        "date": "2026-01-01",
        "gpu_hour": {"H100": 3.6},
        "core_hour": {"any": 0.36},
        "models": {"coder": {"prompt": 1.0, "cached": 0.1, "sampled": 4.0}},
    }
)


def attempt(phase: str, step: int, task: str, *turns: tuple[int, int]) -> Rollout:
    """Turns as (context tokens, sampled tokens); each was written in 2 s and ran tools for half a second."""
    made = tuple(
        Turn(
            (1,) * c, 0, (2,) * s, (-0.5,) * s, ((0, s),), "stop", "", (), (), None, sample_s=2.0, tools_s=0.5
        )
        for c, s in turns
    )
    return Rollout(f"{phase}-{step}-{task}-0", task, task, 0, 0, made, Patch({}), "finished", 9.0)


def verdict(rollout: Rollout, *, solved: bool = False, seconds: float = 4.0) -> Verdict:
    return Verdict(rollout.id, rollout.task_id, "graded", float(solved), solved, {}, seconds=seconds)


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    made = RunDir.create(
        tmp_path / "one",
        recipe='name = "one"\n',
        manifest={"cores": 2, "prices": PRICES.model_dump(mode="json")},
    )
    before, practice = attempt("eval", 0, "a", (10, 3), (5, 4)), attempt("train", 0, "b", (20, 6))
    after = attempt("eval", 1, "a", (10, 3), (6, 2))
    for phase, step, rollout, solved in (
        ("eval", 0, before, False),
        ("train", 0, practice, False),
        ("eval", 1, after, True),
    ):
        made.append("rollouts", [rollout], phase, step)
        made.append("verdicts", [verdict(rollout, solved=solved)], phase, step)
    made.append(
        "metrics", [{"teacher_tokens": 31, "trained_positions": 52, "seconds": {"update": 1.5}}], "train", 0
    )
    return made


WHOLE = Usage(
    prefill_tokens=15 + 20 + 16,
    cached_tokens=13 + 0 + 13,
    decode_tokens=7 + 6 + 5,
    teacher_tokens=31,
    trained_positions=52,
    sampling_s=10.0,
    update_s=1.5,
    tools_s=2.5,
    grading_s=12.0,
    attempts=3,
)


def test_totals_equal_the_records_to_the_token(run: RunDir):
    books = ledger.from_run(run)
    assert books.total == WHOLE and books.problems == ()
    assert books.of("train").decode_tokens == 6 and books.of("eval").attempts == 2
    rollouts = [r for _, _, r in run.read("rollouts", Rollout)]
    prompts = sum(len(r.turns[0].context_ids) for r in rollouts)
    for rollout in rollouts:  # the slow way: build every prompt
        ids = list(rollout.turns[0].context_ids)
        for earlier, turn in zip(rollout.turns, rollout.turns[1:], strict=False):
            ids += [*earlier.sampled_ids, *turn.context_ids]
            prompts += len(ids)
    assert books.total.prefill_tokens + books.total.cached_tokens == prompts


def test_a_resumed_run_counts_nothing_twice(run: RunDir):
    practice = attempt("train", 0, "b", (20, 6))
    run.append("rollouts", [practice], "train", 0)  # the same step made again after a kill
    run.append("verdicts", [verdict(practice)], "train", 0)
    run.append(
        "metrics", [{"teacher_tokens": 31, "trained_positions": 52, "seconds": {"update": 1.5}}], "train", 0
    )
    with (run.path / "rollouts.jsonl").open("a") as file:  # a batch that a kill cut off
        file.write(
            json.dumps({"phase": "train", "step": 1, "part": 0, "record": {"id": "half"}}) + '\n{"phase": "tr'
        )
    assert ledger.from_run(run).total == WHOLE


def test_equal_patches_share_one_verification(run: RunDir):
    twins = [attempt("eval", 2, "c", (3, 1)), attempt("eval", 2, "c", (3, 1))]
    run.append("verdicts", [verdict(twin, seconds=0.123456789) for twin in twins], "eval", 2)
    assert ledger.from_run(run).total.grading_s == pytest.approx(12.0 + 0.123456789)


def test_what_cannot_be_read_is_said_and_the_rest_is_counted(run: RunDir):
    path = run.path / "rollouts.jsonl"
    path.write_text(path.read_text().replace('"turns"', '"rounds"', 1))  # another version
    books = ledger.from_run(RunDir.open(run.path))
    assert books.total.attempts == 2 and "Rollout has no field 'rounds'" in books.problems[0]
    path.write_text(path.read_text().replace('{"id": "train-0', '{"id: "train-0', 1))  # a damaged line
    books = ledger.from_run(RunDir.open(run.path))
    assert books.total.attempts == 1 and len(books.problems) == 2


def test_a_damaged_manifest_is_named(run: RunDir):
    (run.path / "manifest.json").write_text("{")
    with pytest.raises(RunError, match=r"manifest\.json cannot be read"):
        ledger.from_run(run)
    (run.path / "manifest.json").unlink()
    assert ledger.from_run(run).prices == ledger.read_prices()


@pytest.mark.parametrize(
    ("key", "value", "said"),
    [
        ("cores", "x", "cores = 'x'"),
        ("cores", [2], r"cores = \[2\]"),
        ("cores", -1, "cores = -1"),
        ("gpus", "H100", "gpus = 'H100'"),
        ("gpus", [1], "gpus.0 = 1"),
        ("prices", 5, "prices = 5"),
        ("prices", {"date": "2026-11-28", "core_hour": {"any": "much"}}, "prices.core_hour.any = 'much'"),
        ("score", "good", "score = 'good'"),
        ("score", {"engine": []}, r"score.engine = \[\]"),
        ("score", {"engine": {"served": 1}}, "score.engine.served = 1"),
    ],
)
def test_a_manifest_value_of_a_wrong_kind_is_named(run: RunDir, key: str, value: object, said: str):
    run.write_manifest({**run.manifest, key: value})
    with pytest.raises(RecipeError, match=rf"manifest\.json: .*{said}"):
        ledger.from_run(run)
    if key == "prices":  # another table takes its place
        assert ledger.from_run(run, PRICES).prices == PRICES


def test_what_a_manifest_leaves_out_is_counted_as_before(run: RunDir):
    run.write_manifest({"cores": None, "gpus": None, "score": {"engine": {"kind": "local"}, "seed": 1}})
    books = ledger.from_run(run)
    assert (books.cores, books.gpus, books.served, books.prices) == (1, (), "", ledger.read_prices())


def test_prices_on_this_machine():
    used = Usage(sampling_s=3000.0, update_s=600.0, tools_s=36.0, grading_s=0.0)
    cpu = ledger.price(used, PRICES, cores=2)
    assert cpu.items == {"cores of the engine": pytest.approx(0.72), "sandboxes": pytest.approx(0.0036)}
    gpu = ledger.price(used, PRICES, gpus=("NVIDIA H100 80GB HBM3",) * 2)
    assert gpu.items["GPU"] == pytest.approx(7.2) and gpu.unknown == ()
    odd = ledger.price(used, PRICES, gpus=("NVIDIA B300",))
    assert "GPU" not in odd.items and "NVIDIA B300" in odd.unknown[0]


def test_prices_of_a_served_model():
    used = Usage(prefill_tokens=2_000_000, cached_tokens=10_000_000, decode_tokens=500_000, sampling_s=1e6)
    served = ledger.price(used, PRICES, served="coder")
    assert served.total == pytest.approx(2.0 + 1.0 + 2.0)  # somebody else's seconds cost nothing more
    unknown = ledger.price(used, PRICES, served="other")
    assert unknown.total == 0 and unknown.unknown == (
        """served model 'other': no [models."other"] with prompt and sampled""",
    )


def test_costs_of_tasks_and_solves(run: RunDir):
    books = ledger.from_run(run)
    attempts = [ledger.solves(found.graded) for found in evaluation.from_run(run)]
    change = ledger.solve_change(attempts)
    assert change is not None and change.value == 1.0
    costs = ledger.costs(books, attempts, change)
    evaluated, training = books.bill(books.of("eval")).total, books.bill(books.of("train")).total
    assert costs.total == pytest.approx(evaluated + training) and costs.training == pytest.approx(training)
    assert costs.per_task == costs.per_attempt == pytest.approx(evaluated / 2)
    assert costs.per_solved == pytest.approx(evaluated)
    assert costs.per_additional_solve == pytest.approx(training)
    assert ledger.costs(books, attempts, Difference(-0.5, -1.0, 0.0, 4)).per_additional_solve is None


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("date = 2026-01-01\n[gpu_hour]\nH100 = 'dear'", "gpu_hour.H100"),
        ("date = 2026-01-01\n[gpu_hours]\nH100 = 1", "did you mean 'gpu_hour'"),
        ("date = ", "cannot be read"),
    ],
)
def test_a_table_that_is_none_is_refused(tmp_path: Path, text: str, message: str):
    (tmp_path / "prices.toml").write_text(text)
    with pytest.raises(RecipeError, match=message):
        ledger.read_prices(tmp_path / "prices.toml")
    with pytest.raises(RecipeError, match="cannot be read"):
        ledger.read_prices(tmp_path / "none.toml")


def test_the_ledger_as_written(run: RunDir):
    books = ledger.from_run(run)
    table: list[list[Any]] = ledger.table(books, ledger.costs(books, []))
    assert {len(row) for row in table} == {3}
    assert ["sampled tokens", "18", ""] in table and ["teacher tokens", "31", ""] in table


def test_the_machine_is_paid_for_as_long_as_the_run_took(run: RunDir):
    """Two cores for 100 s. Evaluation and training share the rent as they share the work, 37.5 core seconds."""
    worked = ledger.from_run(run)
    run.write_manifest(run.manifest | {"wall_s": 100.0})
    books = ledger.from_run(run)
    assert books.bill(books.total).total == pytest.approx(2 * 100 / 3600 * 0.36)
    shares = [each.bill(each.of("eval")).total / each.bill(each.total).total for each in (worked, books)]
    assert shares[0] == pytest.approx(shares[1])
    said = dict(ledger.brief(books, ledger.costs(books, [])))
    assert said["time"] == "2 min (sampling 10 s, updates 2 s, sandboxes 14 s)"
    assert said["tokens"] == "77 read (34% again, from the cache), 18 sampled"
    assert said["cost"].startswith("0.020 USD, to rent such a machine for that long: nothing was billed")
    assert len(said) == 4 and said["cost for each"] == "nothing was measured"


def test_sampling_and_updates_at_the_same_time_take_no_more_than_the_wall_time(run: RunDir):
    books = ledger.from_run(run)
    two = [replace(books, gpus=("H200", "H200"), wall_s=wall_s) for wall_s in (0.0, 1e6, 3.0)]
    assert [each.gpu_s for each in two] == [2 * books.total.engine_s] * 2 + [6.0]


def test_a_served_model_is_billed_by_its_tokens_and_not_by_the_clock(run: RunDir):
    run.write_manifest(run.manifest | {"wall_s": 1e6, "score": {"engine": {"served": "coder"}}})
    books = ledger.from_run(run)
    items = books.bill(books.total).items
    assert items["sampled tokens"] == pytest.approx(18 / 1e6 * 4.0)
    assert items["sandboxes"] + items["cores of the engine"] == pytest.approx(2 * 1e6 / 3600 * 0.36)
    assert ", billed (prices of" in dict(ledger.brief(books, ledger.costs(books, [])))["cost"]
