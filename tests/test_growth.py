"""A pool that grows in the background: nothing waits for it, and what arrived survives a restart."""

from __future__ import annotations

import json
import time
from pathlib import Path

from woodshed.curriculum import Curriculum, CurriculumSettings
from woodshed.records import Task, Verdict
from woodshed.runs.folder import RunDir
from woodshed.sandbox import SandboxSettings
from woodshed.synthesis.task_generator import TaskGenerator


def solved(task: Task) -> list[Verdict]:
    return [Verdict(f"r{n}", task.id, "graded", 1.0, True, {}) for n in range(8)]


def test_a_pool_that_is_too_easy_gets_harder_tasks_without_waiting_for_them(tiny_task: Task, tmp_path: Path):
    run = RunDir.create(tmp_path / "run", recipe="", manifest={})
    curriculum = Curriculum([tiny_task], CurriculumSettings(grow=True, repeats=True), seed=0)
    growth = TaskGenerator(run, seed=3, sandbox=SandboxSettings())
    arrived: list[Task] = []
    deadline = time.monotonic() + 240
    while not arrived and time.monotonic() < deadline:
        curriculum.observe(solved(tiny_task))
        began = time.monotonic()
        arrived = growth.poll(curriculum, solved(tiny_task))
        assert time.monotonic() - began < 5, "the loop waited"
        time.sleep(0.5)
    growth.close()
    assert arrived and {task.id for task in arrived} <= {
        task.id for task in curriculum.draw(1 + len(arrived))
    }
    assert all(task.provenance["parent"] == tiny_task.id for task in arrived)

    state = json.loads(json.dumps([growth.state(), curriculum.state()]))
    again, other = (
        Curriculum([tiny_task], CurriculumSettings(grow=True, repeats=True), seed=0),
        TaskGenerator(run, seed=3, sandbox=SandboxSettings()),
    )
    other.restore(state[0], again)
    again.restore(state[1])
    assert [t.id for t in again.draw(2)] == [t.id for t in curriculum.draw(2)]
    assert other.state() == growth.state()


def test_a_balanced_pool_orders_nothing(tiny_task: Task, tmp_path: Path):
    run = RunDir.create(tmp_path / "run", recipe="", manifest={})
    curriculum = Curriculum([tiny_task], seed=0)
    half = [Verdict(f"r{n}", tiny_task.id, "graded", float(n % 2), n % 2 == 1, {}) for n in range(8)]
    curriculum.observe(half)
    growth = TaskGenerator(run, seed=0, sandbox=SandboxSettings())
    assert growth.poll(curriculum, half) == [] and growth.state()["orders"] == 0
