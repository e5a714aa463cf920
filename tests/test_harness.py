"""Attempts by an agent of others in a sandbox, through the gateway: graded, hinted and compiled like ours."""

from __future__ import annotations

from pathlib import Path

import pytest
from scripted import SOLVED, calc_task, renderer

from woodshed import feedback, settings
from woodshed.agent import AgentSettings
from woodshed.agent.command_line import filled, installation, shown, words
from woodshed.engines.engine import SampleRequest
from woodshed.engines.scripted import ScriptedEngine
from woodshed.experience import Collector, RolloutSettings
from woodshed.experience.compile import compile_samples
from woodshed.gateway.harness import Harness
from woodshed.gateway.server import Gateway
from woodshed.records import RecipeError, Rollout, SamplerError, Task, Verdict, from_json, to_json
from woodshed.sandbox import BUBBLEWRAP
from woodshed.stages import preflight
from woodshed.stages.recipe import Recipe

AGENT = '''
"""A whole agent of others: bash is its one tool, and it starts afresh with a summary after some results."""
import json, os, subprocess, sys, urllib.request

url, key, task = sys.argv[1:4]
tool = {"name": "bash", "description": "Run.", "parameters": {"type": "object", "required": ["command"],
        "properties": {"command": {"type": "string"}}}}
start = [{"role": "system", "content": "You use bash."}, {"role": "user", "content": task}]
messages = list(start)
while True:
    body = {"model": "m", "messages": messages, "tools": [{"type": "function", "function": tool}]}
    request = urllib.request.Request(f"{url}/chat/completions", json.dumps(body).encode(),
                                     {"authorization": f"Bearer {key}", "content-type": "application/json"})
    message = json.load(urllib.request.urlopen(request))["choices"][0]["message"]
    messages.append(message)
    if not message.get("tool_calls"):
        if "call" in (message["content"] or ""):
            messages.append({"role": "user", "content": "No such call."})
            continue
        break
    for call in message["tool_calls"]:
        command = json.loads(call["function"]["arguments"])["command"]
        done = subprocess.run(command, shell=True, capture_output=True, text=True)
        messages.append({"role": "tool", "tool_call_id": call["id"], "content": done.stdout + done.stderr})
    if len(messages) > 6:
        messages = [*start, {"role": "user", "content": "Summary: you looked at the file."}]
'''
LOOK = "<call>bash cat calc.py</call>"
BROKEN = "<call>bash"
MEND = "<call>bash sed -i 's/raise NotImplementedError/return 2 * x/' calc.py</call>"


@pytest.fixture
def agent(tmp_path: Path) -> AgentSettings:
    (tmp_path / "agent.py").write_text(AGENT)
    line = f"/usr/bin/env python {tmp_path}/agent.py {{base_url}} {{api_key}} {{instruction}}"
    return AgentSettings(harness=line, max_turns=12, turn_tokens=160, rollout_tokens=2000, timeout_s=60.0)


@pytest.fixture
def task(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Task:
    """A task whose environment is this Python, so that none is built."""
    from woodshed.tasks import environment

    monkeypatch.setattr(environment, "prepare", lambda wanted, progress=None: None)
    return calc_task(tmp_path / "calc")


class Script:
    """A policy that does the same in every attempt, whatever the order in which attempts ask."""

    def __init__(self, *messages: str) -> None:
        self.messages, self.seen = messages, list[SampleRequest]()

    def __call__(self, request: SampleRequest) -> str:
        self.seen.append(request)
        said = sum(request.prompt_ids.count(stop) for stop in renderer().stop_ids)
        text = renderer().decode(request.prompt_ids)
        return self.messages[3 + (said > 3) if "Summary" in text else (said - 2) // 2]


def test_an_attempt_of_others_is_a_rollout_like_ours(task: Task, agent: AgentSettings):
    script = Script(LOOK, BROKEN, LOOK, MEND, "Done.")
    collector = Collector(
        ScriptedEngine(renderer(), script), RolloutSettings(attempts=2, max_in_flight=2), agent, seed=7
    )
    [group] = collector.collect([task])
    assert [rollout.ended for rollout in group.rollouts] == ["finished"] * 2
    for rollout in group.rollouts:
        assert rollout.patch.files == {"calc.py": SOLVED}
        assert [(turn.segment, turn.begins) for turn in rollout.turns] == [
            *[(0, "")] * 3,
            (1, "history"),
            (1, ""),
        ]
        assert [turn.error_kind for turn in rollout.turns] == [None, "unparseable", None, None, None]
        assert "raise NotImplementedError" in rollout.turns[0].observations[0].text
        assert any(each.path.endswith("calc.py") and each.mode == "write" for each in rollout.accesses)
        assert not any("agent.py" in each.path for each in rollout.accesses)
        assert from_json(Rollout, to_json(rollout)) == rollout
    seen = {request.prompt_ids for request in script.seen}
    for rollout in group.rollouts:
        for segment in rollout.segments:
            ids: tuple[int, ...] = ()
            for turn in segment.turns:
                assert ids + turn.context_ids in seen
                ids += turn.context_ids + turn.sampled_ids
    verdicts = {
        r.id: Verdict(r.id, task.id, "graded", float(n == 0), n == 0, {})
        for n, r in enumerate(group.rollouts)
    }
    hints = feedback.write([group], [task], renderer().codec)
    assert [(hint.turn, hint.detector) for hint in hints] == [(1, "unparseable")] * 2
    assert "<call>bash text</call>" in hints[0].text
    samples = compile_samples([group], verdicts, hints, renderer()).samples
    assert len(samples) == 4 and [len(sample.branches) for sample in samples] == [1, 0] * 2
    assert samples[0].advantages[0] == samples[1].advantages[0] == pytest.approx(1 / 2)


def test_budgets_end_the_agent_and_the_attempt_counts(task: Task, agent: AgentSettings):
    few = agent.model_copy(update={"max_turns": 2})
    with Gateway(ScriptedEngine(renderer(), lambda request: LOOK)) as gateway:
        rollout = Harness(gateway, few, BUBBLEWRAP).attempt(task, "a")
        assert (rollout.ended, len(rollout.turns)) == ("max_turns", 2)
        slow = agent.model_copy(update={"timeout_s": 1.0, "harness": f"{agent.harness} {{model}}"})
        waiting = Harness(
            gateway, slow.model_copy(update={"harness": "sh -c 'sleep 9' {instruction}"}), BUBBLEWRAP
        )
        with pytest.raises(RecipeError, match="made no model call: it ended with timeout"):
            waiting.attempt(task, "b")


def test_nothing_but_the_gateway_can_be_reached_and_only_with_a_key(
    task: Task, agent: AgentSettings, tmp_path: Path
):
    probe = tmp_path / "probe.py"
    probe.write_text(
        AGENT.replace("url, key, task = sys.argv[1:4]", "url, key, task = sys.argv[1:4]\n" + PROBE)
    )
    line = agent.harness.replace("agent.py", "probe.py")
    with Gateway(ScriptedEngine(renderer(), ["Done."])) as gateway:
        harness = Harness(gateway, agent.model_copy(update={"harness": f"{line} {gateway.port}"}), BUBBLEWRAP)
        rollout = harness.attempt(task, "a")
    assert rollout.patch.files == {
        "calc.py": "gateway refused others: 401, host: unreachable, internet: unreachable\n"
    }


PROBE = """
import socket, urllib.error
def reach(address):
    try:
        socket.create_connection(address, timeout=2).close()
        return "reached"
    except OSError:
        return "unreachable"
try:
    urllib.request.urlopen(urllib.request.Request(f"{url}/chat/completions", b"{}", {"authorization": "Bearer x"}))
except urllib.error.HTTPError as error:
    status = error.code
host, internet = reach(("127.0.0.1", int(sys.argv[4]))), reach(("1.1.1.1", 53))
open("calc.py", "w").write(f"gateway refused others: {status}, host: {host}, internet: {internet}\\\\n")
""".replace("\\\\n", "\\n")


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("python -c 'print(1)' {instruction}", "made no model call: it ended with 0, and said '1'"),
        ("no-such-program {instruction}", "it ended with 127, and said .cannot start: .*no-such-program"),
    ],
)
def test_a_command_line_that_does_not_work_stops_the_run_with_what_it_said(task: Task, line: str, said: str):
    engine = ScriptedEngine(renderer(), [])
    collector = Collector(engine, RolloutSettings(attempts=1), AgentSettings(harness=line))
    with pytest.raises(RecipeError, match=said):
        collector.collect([task])


def test_an_engine_that_fails_stops_the_run(task: Task, agent: AgentSettings):
    collector = Collector(ScriptedEngine(renderer(), []), RolloutSettings(attempts=1), agent)
    with pytest.raises(SamplerError, match="the script has 0 messages"):
        collector.collect([task])


def test_words_are_filled_and_programs_are_shown_with_what_belongs_to_them(tmp_path: Path):
    assert words("a 'b {instruction}' {model}") == ["a", "b {instruction}", "{model}"]
    assert filled("{a}{b}{c}", {"a": "{b}", "b": "1"}) == "{b}1{c}"
    for bad in ("mini 'x", "mini --task"):
        with pytest.raises(RecipeError, match="harness = "):
            settings.read(AgentSettings, None, [f'harness="{bad}"'])
    venv, modules = tmp_path / "venv", tmp_path / "app" / "node_modules"
    for file in (
        venv / "pyvenv.cfg",
        venv / "bin" / "mini",
        modules / "x" / "node_modules" / "y.js",
        tmp_path / "one",
    ):
        file.parent.mkdir(parents=True, exist_ok=True)
        file.touch()
    assert installation(venv / "bin" / "mini") == venv
    assert installation(modules / "x" / "node_modules" / "y.js") == modules
    assert shown(["/usr/bin/env", "x", str(tmp_path / "one"), "relative/path"]) == {
        str(tmp_path / "one"): tmp_path / "one"
    }
    with pytest.raises(RecipeError, match="is not there"):
        shown([str(tmp_path / "none")])


def test_recipes_that_an_agent_of_others_cannot_serve_are_refused():
    common = ["name=x", "agent.harness='mini {instruction}'"]
    preflight.refuse(settings.read(Recipe, None, common))
    with pytest.raises(RecipeError, match=r"gate\.every = 2"):
        preflight.refuse(settings.read(Recipe, None, [*common, "gate.every=2"]))
    with pytest.raises(RecipeError, match="names /none/mini, which is not there"):
        preflight.refuse(settings.read(Recipe, None, ["name=x", "agent.harness='/none/mini {instruction}'"]))
