"""A suite's attempts and verdicts: the same whether judging waits for all attempts or not, and kept by wave."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
from scripted import FINISH, SETTINGS, renderer

from woodshed.agent.attempt import turn_seed
from woodshed.engines.engine import SampleRequest
from woodshed.engines.scripted import ScriptedEngine
from woodshed.experience import Experience, HarnessSettings, Occasion, RolloutSettings, collect
from woodshed.grading import GradingSettings, Judging
from woodshed.monitors.flag_policy import MonitorSettings
from woodshed.records import Rollout, Task, Verdict
from woodshed.runs.folder import RunDir
from woodshed.tasks import folder

WAIT = "<call>shell sleep 3</call>"


def attempts(run: RunDir, task: Task, repeatable: bool, script: Any) -> Experience:
    rollout = RolloutSettings(repeatable=repeatable, tool_threads=3)
    settings = HarnessSettings(rollout, SETTINGS, GradingSettings(jobs=1), MonitorSettings())
    engine = ScriptedEngine(renderer(), script)
    return collect(run, engine, [task], settings, Occasion("train", 0, attempts=3, seed=0))


def script_of(task: Task) -> Any:
    """The first attempt waits and gives up, the second puts the original back, the third does nothing."""
    stub = (task.folder / "environment/workspace/tally/words.py").read_text().splitlines()
    (gold,) = folder.gold_patch(task).files.values()
    assert gold is not None
    old = next(line for line in stub if "NotImplementedError" in line)
    new = gold[gold.index("    found = {}") :].rstrip("\n")
    edit = f"<call>edit_file tally/words.py\n<<<<\n{old}\n====\n{new}\n>>>>\n</call>"
    first, second = (turn_seed(0, f"train-0-{task.name}-{attempt}", 0) for attempt in (0, 1))

    def following(request: SampleRequest) -> str:
        return {first: WAIT, second: edit}.get(request.seed, FINISH)

    return following


@pytest.fixture
def judged(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Attempts whose verdict has begun, in that order."""
    begun: list[str] = []
    grade_one = Judging._grade

    def noted(self: Judging, task: Task, made: Rollout) -> Verdict:
        begun.append(made.id)
        return grade_one(self, task, made)

    monkeypatch.setattr(Judging, "_grade", noted)
    return begun


def test_verdicts_begin_while_others_are_made_and_are_the_same(
    tiny_task: Task, tmp_path: Path, judged: list[str]
):
    found = {}
    for repeatable in (True, False):
        judged.clear()
        run = RunDir.create(tmp_path / str(repeatable), recipe="", manifest={})
        seen = attempts(run, tiny_task, repeatable, script_of(tiny_task))
        groups, verdicts = seen.groups, seen.verdicts
        found[repeatable] = [dataclasses.replace(v, seconds=0.0, detail="") for v in verdicts.values()]
        names = [rollout.id for rollout in groups[0].rollouts]
        assert list(verdicts) == names
        assert (judged[0] == names[0]) is repeatable  # else it was the last to end
    assert found[True] == found[False]
    assert [v.reward for v in found[False]] == [0.0, 1.0, 0.0]


def test_an_interrupted_wave_is_made_again_and_a_whole_one_is_not(
    tiny_task: Task, tmp_path: Path, judged: list[str]
):
    run = RunDir.create(tmp_path / "run", recipe="", manifest={})
    script = script_of(tiny_task)
    count = 0

    def breaks(request: SampleRequest) -> str:
        nonlocal count
        count += 1
        if count == 5:
            raise KeyboardInterrupt
        return script(request)

    with pytest.raises(KeyboardInterrupt):
        attempts(run, tiny_task, False, breaks)
    assert run.find("rollouts", Rollout, "train", 0) is None
    assert run.find("verdicts", Verdict, "train", 0) is None
    whole = attempts(run, tiny_task, False, script_of(tiny_task))
    judged.clear()
    assert attempts(run, tiny_task, False, []) == whole
    assert judged == []
