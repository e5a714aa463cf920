"""A simulated learner: skill against difficulty, no model. What a curriculum is measured with."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path
from typing import Any

from woodshed.curriculum import Curriculum, CurriculumSettings
from woodshed.curriculum.posterior import sigmoid
from woodshed.records import Environment, Task, Verdict

ATTEMPTS, TASKS_PER_STEP = 8, 8
RATE = 0.06
"""Skill gained by a step all of whose groups are informative."""
MIX = ((0.65, 5.0, 1.0), (0.20, -4.0, 1.0), (0.15, 0.5, 1.0))
"""Share, mean and spread of difficulty: out of reach, long solved, in reach. Skill starts at 0."""

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


def pool(seed: int, size: int) -> tuple[list[Task], dict[str, float]]:
    """Tasks that tell nothing about their difficulty, and the difficulty."""
    draw = random.Random(f"pool/{seed}")
    tasks, hard = [], {}
    for number in range(size):
        kind = draw.choices(MIX, [share for share, _, _ in MIX])[0]
        tasks.append(replace(TASK, id=f"{number:04}", name=f"task-{number}", target_path=f"{number % 40}.py"))
        hard[tasks[-1].id] = draw.gauss(kind[1], kind[2])
    return tasks, hard


def practise(
    settings: CurriculumSettings,
    *,
    seed: int,
    steps: int,
    size: int = 200,
    resume: dict[str, Any] | None = None,
) -> tuple[list[list[tuple[str, int]]], dict[str, Any]]:
    """Every step's groups as (task, solves of ATTEMPTS), and the state at the end.

    How an attempt ends depends on the seed, the step and the task alone.
    """
    tasks, hard = pool(seed, size)
    curriculum = Curriculum(tasks, settings, seed=seed, attempts=ATTEMPTS)
    skill, first = 0.0, 0
    if resume is not None:
        curriculum.restore(resume["curriculum"])
        skill, first = resume["skill"], resume["step"]
    history: list[list[tuple[str, int]]] = []
    for step in range(first, steps):
        groups: list[tuple[str, int]] = []
        verdicts: list[Verdict] = []
        for task in curriculum.draw(TASKS_PER_STEP):
            luck = random.Random(f"{seed}/{step}/{task.id}")
            ends = [luck.random() < sigmoid(skill - hard[task.id]) for _ in range(ATTEMPTS)]
            verdicts += [
                Verdict(f"{task.id}-{n}", task.id, "graded", float(end), end, {})
                for n, end in enumerate(ends)
            ]
            groups.append((task.id, sum(ends)))
        curriculum.observe(verdicts)
        skill += RATE * sum(0 < solved < ATTEMPTS for _, solved in groups) / TASKS_PER_STEP
        history.append(groups)
    return history, {"curriculum": curriculum.state(), "skill": skill, "step": steps}


def informative_share(history: list[list[tuple[str, int]]]) -> float:
    groups = [solved for step in history for _, solved in step]
    return sum(0 < solved < ATTEMPTS for solved in groups) / len(groups)
