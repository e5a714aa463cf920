from __future__ import annotations

from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest

from woodshed.curriculum import Curriculum
from woodshed.records import Environment, RecipeError, Task, Verdict

TASK = Task(
    id="",
    name="",
    folder=Path(),
    instruction="",
    environment=Environment("3.11", (), ()),
    allowed_paths=(),
    fail_to_pass=(),
    pass_to_pass=(),
    operator="stub",
    level=1,
    target_path="",
    target_symbol="",
    target_lines=(1, 1),
    test_command="",
)
TASKS = [replace(TASK, id=f"{n:02}", name=f"task-{n}") for n in range(7)]


def test_every_task_comes_once_before_any_comes_twice_and_never_twice_in_a_step():
    curriculum = Curriculum(TASKS, seed=3)
    steps = [[task.id for task in curriculum.draw(3)] for _ in range(14)]  # 42 draws: six times around
    assert all(len(set(step)) == 3 for step in steps)
    assert set(Counter(task for step in steps for task in step).values()) == {6}
    flat = [task for step in steps for task in step]
    assert set(flat[:7]) == {task.id for task in TASKS}


def test_a_restored_curriculum_goes_on_as_if_never_stopped():
    whole = Curriculum(TASKS, seed=3)
    drawn = [[t.id for t in whole.draw(3)] for _ in range(6)]
    first = Curriculum(TASKS, seed=3)
    for _ in range(3):
        first.draw(3)
    second = Curriculum(list(reversed(TASKS)), seed=3)
    second.restore(first.state())
    assert [[t.id for t in second.draw(3)] for _ in range(3)] == drawn[3:]


def test_invalid_verdicts_are_not_counted():
    curriculum = Curriculum(TASKS, seed=0)
    curriculum.observe(
        [
            Verdict("r0", "00", "graded", 1.0, True, {}),
            Verdict("r1", "00", "graded", 0.0, False, {}),
            Verdict("r2", "00", "invalid", 0.0, False, {}),
        ]
    )
    assert curriculum.state()["observed"] == {"00": [2, 1]}


def test_a_step_wider_than_the_pool_is_refused_with_both_numbers():
    with pytest.raises(RecipeError, match=r"tasks_per_step = 8.*only 7"):
        Curriculum(TASKS, seed=0).draw(8)
