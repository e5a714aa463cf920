from __future__ import annotations

import json
import random
from collections import Counter
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from learner import TASK, informative_share, practise

from woodshed.curriculum import Bandit, Curriculum, CurriculumSettings, refuse_dry
from woodshed.curriculum.levels import Levels
from woodshed.curriculum.posterior import below, deviation, informative, level_offset, sigmoid
from woodshed.records import RecipeError, Task, Verdict

TASKS = [replace(TASK, id=f"{n:02}", name=f"task-{n}") for n in range(7)]


EVENLY = CurriculumSettings(kind="even", repeats=True)
AGAIN = CurriculumSettings(repeats=True)


def verdicts(task: Task, solved: int, attempts: int = 8) -> list[Verdict]:
    return [
        Verdict(f"{task.id}-{n}", task.id, "graded", float(n < solved), n < solved, {})
        for n in range(attempts)
    ]


def test_drawn_evenly_every_task_comes_once_before_any_comes_twice_and_never_twice_in_a_step():
    curriculum = Curriculum(TASKS, EVENLY, seed=3)
    steps = [[task.id for task in curriculum.draw(3)] for _ in range(14)]  # 42 draws: six times around
    assert all(len(set(step)) == 3 for step in steps)
    assert set(Counter(task for step in steps for task in step).values()) == {6}
    flat = [task for step in steps for task in step]
    assert set(flat[:7]) == {task.id for task in TASKS}


def test_a_step_wider_than_the_pool_is_refused_with_both_numbers():
    with pytest.raises(RecipeError, match=r"tasks_per_step = 8.*only 7"):
        Curriculum(TASKS, AGAIN, seed=0).draw(8)


# -- a single epoch ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("even_share", [0.0, 0.1, 0.5, 1.0])
@pytest.mark.parametrize("solved", [0, 4, 8])
def test_in_a_single_epoch_no_task_is_drawn_twice_and_none_is_forgotten(even_share: float, solved: int):
    """Whatever is observed, retired, admitted later, put into quarantine or restored in the middle."""
    pool = [replace(TASK, id=f"{n:03}", name=f"task-{n}") for n in range(24)]
    settings = CurriculumSettings(kind="even" if even_share == 1 else "posterior")
    shares: dict[str, Any] = {"probe_share": 0.5, "even_share": even_share}
    curriculum = Curriculum(pool[:20], settings, seed=solved, **shares)
    drawn: list[str] = []
    for step in range(7):
        if step == 2:
            curriculum.quarantine([pool[0]], "a hole")
        if step == 3:
            curriculum.admit(pool[20:])
        if step == 4:
            again = Curriculum(pool, settings, seed=solved, **shares)
            again.restore(json.loads(json.dumps(curriculum.state())))
            curriculum = again
        tasks = curriculum.draw(3)
        drawn += [task.id for task in tasks]
        assert curriculum.repeated == 0
        for _ in range(3):
            for task in tasks:
                curriculum.observe(verdicts(task, solved))
    assert len(set(drawn)) == len(drawn) == 21
    left = {task.id for task in pool} - set(drawn) - {"000"}
    assert {task.id for task in curriculum.draw(len(left))} == left
    said = curriculum.why_dry(1)
    assert (
        f"0 of 24 training tasks are left to draw: 1 are in quarantine (a hole), {24 - ('000' not in drawn)} "
        in said
    )
    with pytest.raises(RecipeError, match=r"curriculum\.repeats = true"):
        curriculum.draw(1)


def test_tasks_that_come_again_are_counted():
    curriculum = Curriculum(TASKS, EVENLY, seed=1)
    seen: set[str] = set()
    for _ in range(9):
        step = {task.id for task in curriculum.draw(3)}
        assert curriculum.repeated == len(step & seen)
        seen |= step


@pytest.mark.parametrize(
    ("num_tasks", "steps", "each", "repeats", "message"),
    [
        (24, 6, 4, False, ""),
        (15, 6, 4, True, ""),
        (
            15,
            6,
            4,
            False,
            r"needs 24 tasks, and there are 15.*lower rl\.steps to 3, or .*curriculum\.repeats=true",
        ),
        (3, 1, 4, False, "only 3 training tasks"),
        (3, 1, 4, True, "only 3 training tasks"),
        (0, 1, 1, True, "only 0 training tasks"),
        (0, 0, 4, False, ""),
    ],
)
def test_a_pool_that_will_run_dry_is_refused_before_it_does(
    num_tasks: int, steps: int, each: int, repeats: bool, message: str
):
    settings = CurriculumSettings(repeats=repeats)
    if not message:
        refuse_dry(settings, num_tasks=num_tasks, steps=steps, tasks_per_step=each)
        return
    with pytest.raises(RecipeError, match=message):
        refuse_dry(settings, num_tasks=num_tasks, steps=steps, tasks_per_step=each)


def test_invalid_verdicts_and_unbelievable_ones_say_nothing():
    curriculum = Curriculum(TASKS, AGAIN, seed=0)
    before = curriculum.posterior("00")
    curriculum.observe(
        [
            Verdict("r0", "00", "invalid", 0.0, False, {}),
            Verdict("r1", "00", "graded", 1.0, True, {}, integrity=("sentinel passed",)),
            Verdict("r2", "elsewhere", "graded", 1.0, True, {}),
        ]
    )
    assert curriculum.posterior("00") == before


# -- what is believed ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("a", "b"), [(1.0, 1.0), (4.0, 4.0), (0.25, 24.25), (9.0, 1.0), (2.5, 0.7)])
def test_moments_and_tails_equal_numerical_integration(a: float, b: float):
    """Midpoint rule on u = p**a or (1-p)**b, which takes the poles away."""
    steps = 200_000
    grid = (np.arange(steps) + 0.5) / steps
    half = 0.5
    low = half * grid ** (1 / a)  # p in (0, 1/2)
    high = 1 - half * grid ** (1 / b)
    w_low = (1 - low) ** (b - 1) * half**a / a / steps
    w_high = high ** (a - 1) * half**b / b / steps
    p, w = np.concatenate([low, high]), np.concatenate([w_low, w_high])
    w /= w.sum()
    assert informative(a, b, 8) == pytest.approx(float(w @ (1 - p**8 - (1 - p) ** 8)), abs=1e-4)
    mean = float(w @ p)
    assert deviation(a, b) == pytest.approx(float(np.sqrt(w @ (p - mean) ** 2)), rel=1e-3)
    for x in (0.02, 0.3, 0.9):
        assert below(x, a, b) == pytest.approx(float(w[p < x].sum()), abs=1e-3)


def test_published_values_of_the_informative_probability():
    """For groups of eight; computed by hand from the closed form."""
    assert informative(1, 1, 8) == pytest.approx(1 - 2 / 9)
    assert [round(informative(a, b, 8), 2) for a, b in ((4, 4), (2, 2), (1, 9), (9, 1))] == [
        0.95,
        0.89,
        0.47,
        0.47,
    ]


def test_the_offset_makes_predicted_and_observed_solves_agree():
    tried = [(-1.0, 80.0, 60.0), (0.0, 80.0, 30.0), (2.0, 160.0, 20.0)]
    offset = level_offset(tried)
    assert sum(n * sigmoid(offset - d) for d, n, _ in tried) == pytest.approx(110.0, abs=0.5)
    assert level_offset([]) == pytest.approx(0.0, abs=1e-6)


def test_observations_fade_and_the_prior_stays():
    curriculum = Curriculum(TASKS, CurriculumSettings(repeats=True), seed=0)
    curriculum.observe(verdicts(TASKS[0], solved=8))
    a0, b0 = curriculum.posterior("00")
    assert a0 > 8 and a0 / (a0 + b0) > 0.8
    for _ in range(300):
        curriculum.draw(1)
    a1, b1 = curriculum.posterior("00")
    assert a1 + b1 == pytest.approx(4.0, abs=0.05)


# -- what is drawn -------------------------------------------------------------------------------------------------


def test_tasks_that_end_differently_are_drawn_most():
    curriculum = Curriculum(TASKS, AGAIN, seed=1, probe_share=0.0, even_share=0.0)
    counts: Counter[str] = Counter()
    for _ in range(120):
        (task,) = curriculum.draw(1)
        counts[task.id] += 1
        curriculum.observe(verdicts(task, solved={"00": 4, "01": 3}.get(task.id, 0)))
    assert counts["00"] + counts["01"] > 60
    assert len(counts) == 7, "every task is looked at"


def test_costly_tasks_are_drawn_less():
    curriculum = Curriculum(TASKS[:2], AGAIN, seed=1, even_share=0.0)
    counts: Counter[str] = Counter()
    for _ in range(300):
        (task,) = curriculum.draw(1)
        counts[task.id] += 1
        curriculum._beliefs["00"].tokens, curriculum._beliefs["01"].tokens = 9000.0, 1000.0
    assert 1.5 < counts["01"] / counts["00"] < 4.5


def test_solved_tasks_retire_are_probed_and_come_back_when_forgotten():
    curriculum = Curriculum(TASKS, AGAIN, seed=2, even_share=0.0)
    for task in TASKS[:6]:
        for _ in range(2):
            curriculum.observe(verdicts(task, solved=8))
    assert [curriculum.status(task.id) for task in TASKS] == ["retired"] * 6 + ["active"]
    drawn = Counter(curriculum.draw(1)[0].id for _ in range(200))
    assert 2 <= 200 - drawn["06"] <= 30, "about one in twenty is a probe"
    curriculum.observe(verdicts(TASKS[0], solved=3))
    assert curriculum.status("00") == "active"


@pytest.mark.parametrize(("sound", "status"), [(True, "active"), (False, "broken")])
def test_a_task_that_is_never_solved_is_parked_and_only_a_sound_one_comes_back(sound: bool, status: str):
    asked: list[str] = []

    def revalidate(task: Task) -> bool:
        asked.append(task.id)
        return sound

    curriculum = Curriculum(TASKS, AGAIN, seed=2, revalidate=revalidate)
    curriculum.observe(verdicts(TASKS[0], solved=0))
    assert curriculum.status("00") == "active", "eight failures prove nothing"
    for _ in range(4):
        curriculum.observe(verdicts(TASKS[0], solved=0))
    assert curriculum.status("00") == "parked" and not asked
    drawn = [curriculum.draw(2) for _ in range(20)]
    assert not any(task.id == "00" for step in drawn for task in step)
    curriculum.draw(2)
    assert asked == ["00"] and curriculum.status("00") == status


def test_counts_add_up_to_the_pool_and_survive_a_restart():
    curriculum = Curriculum(TASKS[:6], AGAIN, seed=2, even_share=0.0)
    for task in TASKS[:3]:
        for _ in range(2):
            curriculum.observe(verdicts(task, solved=8))
    curriculum.quarantine(TASKS[2:4], "a hole")
    counts = {"active": 2, "retired": 2, "parked": 0, "broken": 0, "quarantined": 2}
    assert curriculum.counts() == counts
    again = Curriculum(TASKS[:6], AGAIN, seed=2, even_share=0.0)
    again.restore(json.loads(json.dumps(curriculum.state())))
    assert again.counts() == counts
    again.admit(TASKS)
    assert again.counts() == counts | {"active": 3}


def test_neighbours_in_one_file_share_a_step_less_often_than_strangers():
    tasks = [replace(task, target_path="a.py" if n < 4 else f"{n}.py") for n, task in enumerate(TASKS)]
    curriculum = Curriculum(tasks, AGAIN, seed=5, even_share=0.0)
    pairs = [{task.target_path for task in curriculum.draw(2)} for _ in range(300)]
    assert sum(len(pair) == 1 for pair in pairs) / 300 < 0.85 * (4 * 3) / (7 * 6)


def test_levels_move_up_when_solved_down_when_not_and_none_takes_all():
    levels = Levels([("toolz", 1), ("toolz", 2), ("toolz", 4)])
    levels.observe(("toolz", 1), 64, 60)
    assert levels.share(("toolz", 1)) == 1.0, "one window is noise"
    levels.observe(("toolz", 1), 64, 60)
    assert (levels.share(("toolz", 1)), levels.share(("toolz", 2))) == pytest.approx((0.9, 1.1))
    for _ in range(2):
        levels.observe(("toolz", 4), 64, 3)
    assert (levels.share(("toolz", 4)), levels.share(("toolz", 2))) == pytest.approx((0.9, 1.2))
    factors = levels.capped({1: 8.0, 2: 1.0, 4: 1.0})
    assert 8.0 * factors[1] / (8.0 * factors[1] + 2.0) == pytest.approx(0.4)


def test_the_pool_says_whether_it_is_too_easy_or_too_hard():
    for solved, need in ((8, "harder"), (0, "easier"), (4, "")):
        curriculum = Curriculum(TASKS, AGAIN, seed=0)
        assert curriculum.need() == ""
        for task in TASKS:
            curriculum.observe(verdicts(task, solved))
        assert curriculum.need() == need
        assert len(curriculum.solved()) == (7 if solved == 8 else 0)
        assert len(curriculum.unsolved()) == (7 if solved == 0 else 0)


def test_arms_find_the_generator_whose_tasks_are_worth_most():
    arms = Bandit(["good", "invalid", "uniform", "slow"], seed=4)
    worth = {
        "good": (0.9, 0.8, 1.0),
        "invalid": (0.1, 0.8, 1.0),
        "uniform": (0.9, 0.05, 1.0),
        "slow": (0.9, 0.8, 20.0),
    }
    draw, counts = random.Random(1), Counter()
    for _ in range(200):
        name = arms.choose()
        valid, differ, seconds = worth[name]
        made = draw.random() < valid
        arms.record(name, valid=int(made), tried=1, seconds=seconds)
        if made:
            arms.observe(name, draw.random() < differ)
        counts[name] += 1
    assert counts["good"] > 120
    again = Bandit([], seed=4)
    again.restore(json.loads(json.dumps(arms.state())))
    assert [again.choose() for _ in range(9)] == [arms.choose() for _ in range(9)]


# -- the simulated learner -----------------------------------------------------------------------------------------


def test_a_restart_in_the_middle_changes_nothing():
    whole, _ = practise(AGAIN, seed=7, steps=40)
    half, state = practise(AGAIN, seed=7, steps=20)
    rest, _ = practise(AGAIN, seed=7, steps=40, resume=json.loads(json.dumps(state)))
    assert half + rest == whole


def test_informative_groups_are_at_least_1_3_times_those_of_uniform_sampling():
    """A pool whose difficulty is skewed: most tasks out of reach, some long solved. Seven seeds, 95% interval."""
    ratios = []
    for seed in range(7):
        shares = [
            informative_share(practise(settings, seed=seed, steps=60)[0]) for settings in (AGAIN, EVENLY)
        ]
        ratios.append(shares[0] / shares[1])
    mean, half = (
        float(np.mean(ratios)),
        2.447 * float(np.std(ratios, ddof=1)) / 7**0.5,
    )  # t, 6 degrees of freedom
    assert mean - half > 1.3, f"{mean:.2f} +- {half:.2f}: {ratios}"
