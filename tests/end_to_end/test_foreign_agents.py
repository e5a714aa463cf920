"""Unmodified agents of others, inside the sandbox, against the gateway. They are not installed by us:

WOODSHED_MINI      `mini` of a virtual environment with mini-swe-agent
WOODSHED_OPENCODE  the program of the npm package opencode-linux-x64

pytest -m slow tests/end_to_end/test_foreign_agents.py
"""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from pathlib import Path

import pytest
from scripted import SOLVED, calc_task, renderer
from test_gateway import prompts
from tiny_model import write_tiny_model

from woodshed import settings
from woodshed.agent import AgentSettings
from woodshed.cli.train import run_recipe
from woodshed.engines.engine import SampleRequest
from woodshed.engines.scripted import ScriptedEngine
from woodshed.gateway.harness import Harness
from woodshed.gateway.server import Gateway
from woodshed.records import Rollout, Task, Verdict
from woodshed.runs.folder import RunDir
from woodshed.sandbox import BUBBLEWRAP
from woodshed.stages.recipe import Recipe

MINI = os.environ.get("WOODSHED_MINI", "")
OPENCODE = os.environ.get("WOODSHED_OPENCODE", "")
MINI_LINE = (
    "/usr/bin/env LITELLM_LOCAL_MODEL_COST_MAP=True MSWEA_COST_TRACKING=ignore_errors MSWEA_CONFIGURED=true "
    f"{MINI} --yolo --exit-immediately -m openai/{{model}} -t {{instruction}}"
)
LOOK, MEND = "cat calc.py", "sed -i 's/raise NotImplementedError/return 2 * x/' calc.py"
pytestmark = pytest.mark.slow


@pytest.fixture
def calc(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Task:
    from woodshed.tasks import environment

    monkeypatch.setattr(environment, "prepare", lambda wanted, progress=None: None)
    return calc_task(tmp_path / "calc")


def attempt(task: Task, line: str, codec: str, messages: Sequence[str]) -> Rollout:
    """An attempt whose record is what the engine saw, whichever messages the agent asked for besides."""
    seen: list[SampleRequest] = []
    remaining = iter(messages)

    def script(request: SampleRequest) -> str:
        seen.append(request)
        is_title = "title" in renderer(codec).decode(request.prompt_ids)[:300]
        return "A title" if is_title else next(remaining)

    limits = AgentSettings(harness=line, max_turns=12, turn_tokens=1000, rollout_tokens=8000, timeout_s=240.0)
    with Gateway(ScriptedEngine(renderer(codec), script)) as gateway:
        rollout = Harness(gateway, limits, BUBBLEWRAP).attempt(task, "a")
    assert prompts(rollout.turns) == [request.prompt_ids for request in seen]
    assert rollout.ended == "finished" and rollout.patch.files == {"calc.py": SOLVED}
    return rollout


@pytest.mark.skipif(not MINI, reason="WOODSHED_MINI is not set")
def test_mini_swe_agent_is_recorded_and_messages_that_it_drops_are_not_lost(calc: Task):
    finish = "<call>bash echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT</call>"
    messages = [f"<call>bash {LOOK}</call>", "I forgot to call.", f"<call>bash {MEND}</call>", finish]
    rollout = attempt(calc, MINI_LINE, "plain", messages)
    assert [(turn.segment, turn.begins) for turn in rollout.turns] == [
        (0, ""),
        (0, ""),
        (1, "history"),
        (1, ""),
    ]
    assert [turn.text for turn in rollout.turns] == messages


@pytest.mark.skipif(not OPENCODE, reason="WOODSHED_OPENCODE is not set")
def test_opencode_is_recorded_and_the_agent_that_names_its_session_is_a_segment(calc: Task):
    options = {"baseURL": "{base_url}", "apiKey": "{api_key}"}
    models = {"policy": {"limit": {"context": 100_000, "output": 4096}}}
    provider = {"npm": "@ai-sdk/openai-compatible", "options": options, "models": models}
    config = json.dumps({"provider": {"ours": provider}, "permission": {"*": "allow"}, "autoupdate": False})
    line = f"/usr/bin/env 'OPENCODE_CONFIG_CONTENT={config}' {OPENCODE} run -m ours/policy {{instruction}}"

    def call(command: str) -> str:
        arguments = {"command": command, "description": "Work"}
        return f"<call>{json.dumps({'name': 'bash', 'arguments': arguments})}</call>"

    rollout = attempt(calc, line, "json", [call(LOOK), call(MEND), "Done."])
    assert sorted(len(segment.turns) for segment in rollout.segments) == [1, 3]
    assert {turn.error_kind for turn in rollout.turns} == {None}


RECIPE = """
name = "foreign"
runs = "{runs}"
stages = ["rl"]

[tasks]
train = ["{tasks}"]
heldout = ["{tasks}"]

[policy]
model = "{model}"
lora_rank = 4
codec = "plain"

[agent]
harness = '''{line}'''
max_turns = 3
turn_tokens = 24
rollout_tokens = 72
timeout_s = 300.0

[rollout]
attempts = 2
repeatable = false

[rl]
steps = 2
tasks_per_step = 1

[curriculum]
repeats = true
"""


@pytest.mark.skipif(not MINI, reason="WOODSHED_MINI is not set")
def test_two_steps_are_trained_on_attempts_of_mini_swe_agent(tiny_task: Task, tmp_path: Path):
    model = write_tiny_model(tmp_path / "model")
    file = tmp_path / "recipe.toml"
    file.write_text(
        RECIPE.format(runs=tmp_path / "runs", tasks=tiny_task.folder, model=model, line=MINI_LINE)
    )
    recipe = settings.read(Recipe, file)
    run = RunDir.create(recipe.runs / recipe.name, recipe=recipe.to_toml(), manifest={})
    run_recipe(recipe, run, lambda done, total, text: None)
    steps = [metrics for phase, _, metrics in run.read("metrics") if phase == "train"]
    assert [metrics["trained_rollouts"] + metrics["targets"] > 0 for metrics in steps] == [True, True]
    assert all(metrics["logp_gap_mean"] < 1e-3 for metrics in steps)
    rollouts = [rollout for phase, _, rollout in run.read("rollouts", Rollout) if phase == "train"]
    assert len(rollouts) == 4 and all(rollout.turns and rollout.tools for rollout in rollouts)
    graded = {verdict.rollout_id: verdict.status for _, _, verdict in run.read("verdicts", Verdict)}
    assert {graded[rollout.id] for rollout in rollouts} == {"graded"}
