"""Tools beside the six, prompts from files, several calls in a message, and arguments that are mended."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from scripted import MODULE, SETTINGS, calc_task, renderer

from woodshed.agent import Attempt, tools
from woodshed.agent.attempt import AgentSettings
from woodshed.agent.effects import Effect, effect
from woodshed.agent.prompt import system_prompt, user_prompt
from woodshed.agent.tools import ToolSettings
from woodshed.engines.engine import Sample
from woodshed.evals import behaviour
from woodshed.feedback import detectors, rewards
from woodshed.records import Call, RecipeError, Task
from woodshed.sandbox import Sandbox, SandboxSpec, open_sandbox
from woodshed.tokens.codec import CODECS, refuse_lossy
from woodshed.tokens.schema import mend

OFFERED = ("bash", "str_replace_editor", "todo", "read_file", "finish")
LIMITS = ToolSettings(offered=OFFERED)


@pytest.fixture(scope="module")
def task(tmp_path_factory: pytest.TempPathFactory) -> Task:
    return calc_task(tmp_path_factory.mktemp("tasks") / "calc")


@pytest.fixture
def sandbox(task: Task) -> Iterator[Sandbox]:
    with open_sandbox(SandboxSpec((task.folder / "environment" / "workspace",))) as sandbox:
        yield sandbox


def called(sandbox: Sandbox, tool: str, **arguments: Any) -> tuple[str, str | None]:
    seen = tools.run(Call("c", tool, arguments, ""), sandbox, LIMITS)
    return seen.text, seen.error_kind


def test_the_editor_views_creates_replaces_and_inserts(sandbox: Sandbox):
    def edit(command: str, path: str = "calc.py", **arguments: Any) -> tuple[str, str | None]:
        return called(sandbox, "str_replace_editor", command=command, path=path, **arguments)

    assert edit("view", view_range=[1, 2]) == ("lines 1-2 of 6\n" + "\n".join(MODULE.splitlines()[:2]), None)
    assert edit("view", f"{sandbox.workspace}/calc.py", view_range=[5, -1])[0].startswith("lines 5-6 of 6")
    assert edit("view", ".")[0].splitlines()[:2] == [".", "./calc.py"]
    assert edit("view", view_range=[1])[1] == "bad_arguments"
    assert edit("view", "../../etc/passwd")[1] == "bad_path"
    assert edit("str_replace", old_str="x // 2", new_str="x / 2") == ("edited calc.py at line 6", None)
    assert edit("str_replace", old_str="nowhere", new_str="x")[1] == "old_missing"
    assert edit("create", "new/a.py", file_text="a = 1") == ("wrote new/a.py", None)
    assert edit("insert", "new/a.py", insert_line=1, new_str="b = 2") == (
        "inserted into new/a.py behind line 1",
        None,
    )
    assert edit("insert", "new/a.py", insert_line=0, new_str="# c\n")[1] is None
    assert sandbox.read("new/a.py", 100) == b"# c\na = 1\nb = 2\n"
    assert edit("insert", "new/a.py", insert_line=4, new_str="x")[1] == "bad_arguments"
    assert called(sandbox, "bash", command="cat new/a.py") == ("# c\na = 1\nb = 2", None)


def test_every_call_format_holds_calls_of_these_tools():
    for codec in CODECS.values():
        refuse_lossy(codec, LIMITS.specs)
    plain = CODECS["plain"]
    text = plain.format(
        "str_replace_editor",
        {"command": "insert", "path": "a.py", "insert_line": 3, "old_str": "", "new_str": "x"},
        LIMITS.specs,
    )
    assert plain.parse(text, LIMITS.specs)[2] is None


def test_effects_do_not_depend_on_the_names_of_tools():
    def of(tool: str, **arguments: Any) -> Effect:
        return effect(Call("c", tool, arguments, ""))

    assert of("bash", command="ls") == of("shell", command="ls") == Effect("command", command="ls")
    assert of("str_replace_editor", command="view", path="a") == of("read_file", path="a", start=2)
    assert of("str_replace_editor", command="create", path="a", file_text="x") == of(
        "write_file", path="a", content="x"
    )
    assert of("str_replace_editor", command="str_replace", path="a", old_str="x", new_str="y") == of(
        "edit_file", path="a", old="x", new="y"
    )
    assert of("finish") == of("todo", items="[ ] command") == Effect("")


def play(task: Task, *messages: str, is_strict: bool = True, **changes: Any):
    settings = SETTINGS.model_copy(update={"tools": LIMITS, "turn_tokens": 400, **changes})
    sandbox = open_sandbox(SandboxSpec((task.folder / "environment" / "workspace",)))
    attempt = Attempt(task, sandbox, renderer(), settings, rollout_id="r")
    attempt.is_strict = is_strict
    for message in messages:
        ids = renderer().encode_message(message)
        attempt.act(Sample(ids, (0.0,) * len(ids), "stop", ((0, len(ids)),)))
    return attempt.finish()


def test_open_items_of_the_to_do_list_are_charged_and_other_tools_are_understood(task: Task):
    todo = "<call>todo\n<<<<\n[x] look\n[ ] mend\n- [ ] test\n>>>>\n</call>"
    edit = (
        "<call>str_replace_editor str_replace calc.py\n<<<<\n    raise NotImplementedError\n====\n    return 2 * x\n"
        ">>>>\n</call>"
    )
    broken = todo.replace("[ ] mend", "mend")
    rollout = play(task, todo, broken, edit, "<call>bash python -m pytest -q</call>", "<call>finish</call>")
    assert [turn.observations[0].text for turn in rollout.turns[:3]] == [
        "3 items, 2 open",
        "error: 'mend' is no item; write [ ] or [x] before its text",
        "edited calc.py at line 2",
    ]
    assert rewards.auxiliary(task, rollout, {"open_todos": -0.1}) == {"open_todos": -0.2}
    assert not detectors.is_untested(rollout) and rollout.patch.files
    assert any(behaviour._is_test_run(turn) for turn in rollout.turns)


def test_reads_of_a_message_do_not_wait_for_each_other_and_changes_do(task: Task):
    read, missing = "<call>read_file calc.py 1 1</call>", "<call>read_file nowhere.py</call>"
    rollout = play(task, f"{missing}\n{read}\n<call>bash touch a</call>\n{read}", max_calls=4)
    texts = [seen.text for seen in rollout.turns[0].observations]
    assert texts[0].startswith("error: no file")
    assert texts[1] == texts[3] == "lines 1-1 of 6\ndef double(x):"
    assert texts[2] == "not executed: an earlier call failed" and not rollout.patch.files


def test_arguments_are_mended_in_use_and_refused_in_training(task: Task):
    schema = tools.TOOLS[0].parameters
    given = {"path": "calc.py", "start": "1", "count": 1.0, "why": "x"}
    assert mend(given, schema) == {"path": "calc.py", "start": 1, "count": 1}
    assert mend({"start": 1}, schema) is None and mend({"path": "a", "start": "one"}, schema) is None
    assert mend({"path": 3}, schema) == {"path": "3"} and mend({"path": ["a"]}, schema) is None
    message = "<call>read_file calc.py 1 1 2</call>"
    strict, lenient = (play(task, message, is_strict=is_strict).turns[0] for is_strict in (True, False))
    assert strict.error_kind == "bad_arguments" and lenient.error_kind is None
    assert lenient.observations[0].text == "lines 1-1 of 6\ndef double(x):"


def test_prompts_come_from_files(task: Task, tmp_path: Path):
    path = tmp_path / "rules.md"
    path.write_text("Be brief.\n")
    assert AgentSettings(system_prompt=path).rules == "Be brief."
    assert AgentSettings(max_calls=3).rules == system_prompt(max_calls=3)
    with pytest.raises(RecipeError, match=r"rules\.txt.*agent\.system_prompt must name a file"):
        AgentSettings(system_prompt=tmp_path / "rules.txt").rules  # noqa: B018


def test_the_repositorys_rules_for_agents_stand_before_the_instruction(task: Task, tmp_path: Path):
    home = tmp_path / "task" / "environment" / "workspace"
    home.mkdir(parents=True)
    ruled = replace(task, folder=tmp_path / "task")
    assert user_prompt(ruled) == task.instruction.strip()
    (home / "AGENTS.md").write_text("Use tabs.\x1b[1m\n")
    assert user_prompt(ruled) == f"AGENTS.md:\nUse tabs.\\x1b[1m\n\n{task.instruction.strip()}"
    (home / "AGENTS.md").write_text("x" * 9000)
    assert "[5000 characters cut]" in user_prompt(ruled)
    (home / "AGENTS.md").unlink()
    (home / "AGENTS.md").symlink_to("/etc/passwd")
    assert user_prompt(ruled) == task.instruction.strip()


SERVER = """
import json, sys
ADD = {"name": "add", "description": "Add numbers.", "inputSchema": {"type": "object", "properties": {
    "a": {"type": "integer"}, "b": {"type": "integer"}}, "required": ["a", "b"]}}
READ = {"name": "head", "description": "First line of a file.", "inputSchema": {"type": "object", "properties": {
    "path": {"type": "string"}}, "required": ["path"]}}
for line in sys.stdin:
    message = json.loads(line)
    if "id" not in message:
        continue
    print(json.dumps({"jsonrpc": "2.0", "method": "notifications/message", "params": {}}))
    if message["method"] == "tools/list":
        result = {"tools": [ADD, READ]}
    elif message["method"] == "tools/call":
        given = message["params"]["arguments"]
        try:
            text = str(given["a"] + given["b"]) if "a" in given else open(given["path"]).readline()
            result = {"content": [{"type": "text", "text": text}, {"type": "image", "data": ""}]}
        except OSError as error:
            result = {"content": [{"type": "text", "text": str(error)}], "isError": True}
    else:
        result = {"protocolVersion": "2025-06-18", "capabilities": {"tools": {}}, "serverInfo": {}}
    print(json.dumps({"jsonrpc": "2.0", "id": message["id"], "result": result}), flush=True)
"""


def test_servers_of_tools_run_inside_the_sandbox(task: Task, tmp_path: Path):
    path = tmp_path / "server.py"
    path.write_text(SERVER)
    limits = ToolSettings(offered=(f"mcp:{path}", "finish"))
    assert [spec.name for spec in limits.specs] == ["add", "head", "finish"]
    for codec in CODECS.values():
        refuse_lossy(codec, limits.specs)
    calls = "<call>add 2 40</call><call>head calc.py</call><call>head /etc/nothing</call><call>add 2</call>"
    rollout = play(task, calls, max_calls=4, tools=limits)
    texts = [seen.text for seen in rollout.turns[0].observations]
    assert texts[:2] == ["42\n[image]", "def double(x):\n\n[image]"] and "No such file" in texts[2]
    assert texts[3].startswith("not executed")
    assert not rollout.patch.files


@pytest.mark.parametrize(
    ("source", "why"),
    [
        (None, "is not there; agent.tools.offered has"),
        ("raise SystemExit", "ended without an answer"),
        (SERVER.replace("[ADD, READ]", "[{}]"), "another form than MCP's: KeyError"),
        (SERVER.replace("[ADD, READ]", "[]"), "lists no tools"),
        (SERVER.replace("[ADD, READ]", "[ADD, ADD]"), "is named 'add', too"),
    ],
)
def test_a_server_that_cannot_be_used_is_named(source: str | None, why: str, tmp_path: Path):
    path = tmp_path / "server.py"
    if source is not None:
        path.write_text(source)
    with pytest.raises(RecipeError, match=rf"server\.py.*{why}"):
        ToolSettings(offered=(f"mcp:{path}", "finish")).specs  # noqa: B018
