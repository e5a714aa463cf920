"""A collector's process: the same tasks at any speed, and nothing lost or made twice when it is killed."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from pretend_trainer import PretendTrainer
from scripted import FINISH, renderer

from woodshed.engines.engine import SampleRequest, WeightUpdate
from woodshed.engines.scripted import ScriptedEngine
from woodshed.records import Hint, Patch, Rollout, SamplerError, Task, Verdict
from woodshed.runs.folder import RunDir
from woodshed.sandbox import SandboxProvider
from woodshed.settings import validate
from woodshed.stages.asynchronous.collector import CollectorProcess
from woodshed.stages.asynchronous.collector_recipe import CollectorRecipe
from woodshed.stages.asynchronous.messages import Collected, Draw, read_experience

STEPS, TASKS, ATTEMPTS, STALENESS = 4, 2, 2, 1
WRITE = "<call>shell echo more >> tally/extra.py</call>"


class ByPatch:
    """A verifier for which every change is a solution."""

    def grade(self, task: Task, patch: Patch, sandboxes: SandboxProvider) -> Verdict:
        solved = bool(patch.files)
        return Verdict(
            "", task.id, "graded", float(solved), solved, dict.fromkeys(task.fail_to_pass, "passed")
        )


VERIFIER = ByPatch()


class SlowToLoad(ScriptedEngine):
    """An engine that has other weights for a while after it was started."""

    def update_weights(self, update: WeightUpdate, version: int) -> None:
        time.sleep(0.4)
        super().update_weights(update, version)


def says(request: SampleRequest) -> str:
    """Two messages, of which the first writes something in about half of the attempts."""
    said = renderer().decode(request.prompt_ids).count("<|im_start|>assistant")
    return FINISH if said > 1 or request.seed % 2 else WRITE


def recipe() -> CollectorRecipe:
    sections = {
        name: {}
        for name in CollectorRecipe.model_fields
        if name not in ("seed", "policy", "feedback", "grading")
    }
    return validate(
        CollectorRecipe,
        sections
        | {
            "seed": 3,
            "policy": {"model": "none", "codec": "plain"},
            "feedback": {"detectors": []},
            "grading": {"verifier": f"{__name__}:VERIFIER"},
            "rollout": {"attempts": ATTEMPTS, "max_in_flight": 4},
            "agent": {"max_turns": 3, "turn_tokens": 60, "rollout_tokens": 200},
            "rl": {"steps": STEPS, "tasks_per_step": TASKS, "staleness": STALENESS},
        },
    )


def practice(task: Task) -> list[Task]:
    return [replace(task, id=f"{n:016}", name=f"task-{n}") for n in range(9)]


def collect(
    root: Path,
    task: Task,
    script: Callable[[SampleRequest], str],
    *,
    every_s: float = 0.0,
    kills: int = 0,
) -> RunDir:
    """A whole run; `kills` times the collector ends with an error and begins again."""
    RunDir.create(root, recipe="", manifest={}).unlock()
    trainer = PretendTrainer(root, STEPS, every_s=every_s, measured=frozenset({0, STEPS}))
    trainer.start()
    run = RunDir.open(root)
    run.lock("collector")
    for left in range(kills, -1, -1):
        engine = SlowToLoad(renderer(), script)
        process = CollectorProcess(run, recipe(), engine, practice(task), [task], lambda *_: None)
        if left:
            with pytest.raises(SamplerError, match="killed"):
                process.run()
        else:
            process.run()
    trainer.join()
    return run


def dying(script: Callable[[SampleRequest], str], *at: int) -> Callable[[SampleRequest], str]:
    """The script of an engine that fails at some of its messages."""
    count = 0

    def said(request: SampleRequest) -> str:
        nonlocal count
        count += 1
        if count in at:
            raise SamplerError("killed")
        return script(request)

    return said


def essence(run: RunDir) -> dict[str, list[tuple[int, ...]]]:
    """Attempts by id, as the tokens of their messages."""
    made = [record for _, _, record in run.read("rollouts", Rollout)]
    assert len({each.id for each in made}) == len(made), "no attempt is kept twice"
    return {each.id: [turn.sampled_ids for turn in each.turns] for each in made}


def test_same_tasks_and_attempts_at_another_speed_and_after_kills(tiny_task: Task, tmp_path: Path):
    def slowly(request: SampleRequest) -> str:
        time.sleep(0.02)
        return says(request)

    fast = collect(tmp_path / "fast", tiny_task, says, every_s=0.05)
    slow = collect(tmp_path / "slow", tiny_task, dying(slowly, 5, 6, 23), kills=3)
    draws = [[record.task_ids for _, _, record in run.read("draws", Draw)] for run in (fast, slow)]
    assert draws[0] == draws[1] and len({name for step in draws[0] for name in step}) == STEPS * TASKS
    assert essence(fast) == essence(slow)
    assert len(essence(fast)) == STEPS * TASKS * ATTEMPTS + 2
    replayed = sum(record.replayed for _, _, record in slow.read("collected", Collected))
    assert replayed > 0 and not any((slow.path / "turns").iterdir())
    for run in (fast, slow):
        assert run.batches("hints") and len(run.read("hints", Hint)) >= 0
        for step, names in enumerate(draws[0]):
            seen = read_experience(run, "train", step, names, ATTEMPTS)
            ages = {step - v for made in seen.rollouts for turn in made.turns for v, _ in turn.versions}
            assert ages <= set(range(STALENESS + 1)), ages
            assert len(seen.verdicts) == TASKS * ATTEMPTS
        for version in (0, STEPS):
            pinned = read_experience(run, "eval", version, [tiny_task.id], 1)
            assert {v for made in pinned.rollouts for turn in made.turns for v, _ in turn.versions} == {
                version
            }
    verdicts = {record.rollout_id: record.solved for _, _, record in fast.read("verdicts", Verdict)}
    assert 0 < sum(verdicts.values()) < len(verdicts)


def test_a_sandbox_that_answers_otherwise_restarts_the_attempt(tiny_task: Task, tmp_path: Path):
    def random(request: SampleRequest) -> str:
        return FINISH if says(request) == FINISH else "<call>shell cat /proc/sys/kernel/random/uuid</call>"

    run = collect(tmp_path / "run", tiny_task, dying(random, 12), kills=1)
    assert len(essence(run)) == STEPS * TASKS * ATTEMPTS + 2
    assert sum(record.restarted for _, _, record in run.read("collected", Collected)) > 0


def test_a_collector_needs_no_torch():
    code = (
        "import sys; import woodshed.cli.asynchronous, woodshed.stages.asynchronous.collector;"
        "import woodshed.stages.asynchronous.collector_recipe, woodshed.stages.asynchronous.launcher;"
        "print('torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert json.loads(done.stdout.lower()) is False
