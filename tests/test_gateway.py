"""The gateway: agents of others on its one side, an engine on the other, and exact turns between."""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest
from scripted import renderer

from woodshed.engines.engine import SampleRequest
from woodshed.engines.scripted import ScriptedEngine
from woodshed.gateway.recording import Quota, Recording
from woodshed.gateway.server import Gateway
from woodshed.records import Patch, Rollout, SamplerError, Turn
from woodshed.tokens.schema import foreign_tool

BASH = {
    "name": "bash",
    "description": "Run a command.",
    "parameters": {"type": "object", "properties": {"command": {"type": "string"}}, "required": ["command"]},
}
TOOLS = [{"type": "function", "function": BASH}]
RUN = "I look around. <call>bash ls</call>"
QUOTA = Quota(turns=100, turn_tokens=200, sampled_tokens=10_000, seconds=600.0)


def recording(quota: Quota = QUOTA, context_length: int = 1 << 20, name: str = "a") -> Recording:
    return Recording(name, renderer(), context_length, quota)


@pytest.fixture
def serve() -> Iterator[Callable[..., Gateway]]:
    """Gateways before scripted policies."""
    opened: list[Gateway] = []

    def start(script: Iterable[str] | Callable[[SampleRequest], str], **options: Any) -> Gateway:
        opened.append(Gateway(ScriptedEngine(renderer(), script), **options))
        return opened[-1]

    yield start
    for gateway in opened:
        gateway.close()


@pytest.fixture(autouse=True, scope="module")
def client() -> Iterator[httpx.Client]:
    with httpx.Client(verify=False, timeout=30) as http:
        Agent.http = http
        yield http


class Agent:
    """An agent that speaks chat completions and keeps its own history."""

    http: httpx.Client

    def __init__(self, gateway: Gateway, key: str, system: str = "Be good.", tools: Any = TOOLS) -> None:
        self.gateway, self.key = gateway, key
        self.messages: list[dict[str, Any]] = [{"role": "system", "content": system}]
        self.tools = tools

    def post(self, **more: Any) -> httpx.Response:
        body = {
            "model": "m",
            "messages": self.messages,
            **({"tools": self.tools} if self.tools else {}),
            **more,
        }
        headers = {"authorization": f"Bearer {self.key}"}
        return self.http.post(f"{self.gateway.url}/v1/chat/completions", json=body, headers=headers)

    def say(self, text: str = "", *results: str, **more: Any) -> dict[str, Any]:
        """Send results of the last calls, or a text of the user: the reply, which is kept as it came."""
        for call, result in zip(self.messages[-1].get("tool_calls") or (), results, strict=False):
            self.messages.append({"role": "tool", "tool_call_id": call["id"], "content": result})
        if text:
            self.messages.append({"role": "user", "content": text})
        answer = self.post(**more)
        assert answer.status_code == 200, answer.text
        self.messages.append(answer.json()["choices"][0]["message"])
        return answer.json()


def prompts(turns: Sequence[Turn]) -> list[tuple[int, ...]]:
    """The whole prompt of every turn, as the records have it."""
    rollout = Rollout("r", "t", "t", 0, 0, tuple(turns), Patch({}), "finished", 1.0)
    found: dict[int, tuple[int, ...]] = {}
    for segment in rollout.segments:
        ids: tuple[int, ...] = ()
        for index, turn in zip(segment.indices, segment.turns, strict=True):
            found[index] = ids + turn.context_ids
            ids += turn.context_ids + turn.sampled_ids
    return [found[index] for index in range(len(turns))]


def test_forty_turns_with_compaction_and_a_sub_agent_are_cut_into_segments_that_the_engine_saw(serve):
    seen: list[SampleRequest] = []

    def script(request: SampleRequest) -> str:
        seen.append(request)
        return RUN

    gateway, record = serve(script), recording()
    key = gateway.admit(record)
    main, other = Agent(gateway, key), Agent(gateway, key, system="You search.", tools=None)
    main.say("Mend it.")
    for number in range(1, 20):
        main.say("", f"file_{number}.py")
        if number == 9:
            other.say("Find it.")
        if number == 10:
            other.say("And the other one.")
    main.messages = [
        main.messages[0],
        {"role": "user", "content": "Summary: twenty files were read. Mend it."},
    ]
    for number in range(18):
        main.say("" if number else "Go on.", "more")
    kinds = [(turn.segment, turn.begins) for turn in record.turns if turn.begins or turn is record.turns[0]]
    assert kinds == [(0, ""), (1, "agent"), (2, "history")]
    assert [sum(turn.segment == n for turn in record.turns) for n in range(3)] == [20, 2, 18]
    assert prompts(record.turns) == [request.prompt_ids for request in seen]
    assert len({request.seed for request in seen}) == 40
    turn = record.turns[0]
    assert [call.tool for call in turn.calls] == ["bash"] and turn.text == RUN and turn.error_kind is None
    assert turn.observations[0].text == "file_1.py" and turn.observations[0].call_id == turn.calls[0].id


def test_what_agents_change_when_they_send_a_message_again_does_not_cut_a_segment(serve):
    gateway, record = serve([RUN, RUN, "Done.", "Yes.", "No."]), recording()
    agent = Agent(gateway, gateway.admit(record))
    agent.say("Mend it.")
    message = agent.messages[-1]
    message["content"] = f"  {message['content']}\n"
    message["tool_calls"][0]["function"]["arguments"] = '{ "command" :"ls"}'
    message["tool_calls"][0]["id"] = "renamed"
    message |= {"refusal": None, "audio": None}
    agent.say("", "a.py")
    agent.messages[-1]["content"] = [{"type": "text", "text": agent.messages[-1]["content"]}]
    agent.say("", "b.py")
    agent.say("Sure?")
    assert [turn.segment for turn in record.turns] == [0, 0, 0, 0]
    agent.messages[2]["content"] = "I did something else."
    agent.say("Really?")
    assert [(turn.segment, turn.begins) for turn in record.turns][-1] == (1, "history")


def test_two_answers_to_one_message_branch_and_both_are_exact(serve):
    gateway, record = serve([RUN, RUN, RUN]), recording()
    agent = Agent(gateway, gateway.admit(record))
    agent.say("Mend it.")
    kept = list(agent.messages)
    agent.say("", "one")
    agent.messages = kept
    agent.say("", "two")
    assert [turn.segment for turn in record.turns] == [0, 0, 1]
    first, second = prompts(record.turns)[1:]
    assert renderer().decode(first).replace("one", "two") == renderer().decode(second)


def test_calls_that_cannot_be_told_are_text_and_their_fault_is_recorded(serve):
    gateway = serve(["<call>bash", "<call>fly away</call>", "x" * 5000, "Done."])
    record = recording()
    agent = Agent(gateway, gateway.admit(record))
    assert agent.say("Mend it.")["choices"][0]["message"]["content"] == "<call>bash"
    called = agent.say("That was no call.")["choices"][0]
    assert (
        called["finish_reason"] == "tool_calls"
        and called["message"]["tool_calls"][0]["function"]["name"] == "fly"
    )
    assert agent.say("", "no such tool")["choices"][0]["finish_reason"] == "length"
    assert agent.say("Be short.")["choices"][0]["finish_reason"] == "stop"
    assert [turn.error_kind for turn in record.turns] == ["unparseable", "unknown_tool", "truncated", None]
    assert {turn.segment for turn in record.turns} == {0}


def test_arguments_beyond_a_schema_are_a_fault_only_where_it_says_so():
    open_schema = foreign_tool("bash", "", BASH["parameters"])
    closed_schema = foreign_tool("bash", "", {**BASH["parameters"], "additionalProperties": False})
    for arguments, tool, kind in (
        ({"command": "ls", "why": "x"}, open_schema, None),
        ({"command": "ls", "why": "x"}, closed_schema, "bad_arguments"),
        ({"why": "x"}, open_schema, "bad_arguments"),
        ({"command": 3}, open_schema, "bad_arguments"),
    ):
        text = f"<call>{json.dumps({'name': 'bash', 'arguments': arguments})}</call>"
        record = Recording("a", renderer("json"), 1 << 20, QUOTA)
        assert record._read(text, (tool,), "stop")[2] == kind


def test_keys_name_attempts_and_quotas_end_them(serve):
    gateway = serve(lambda request: "Done.")
    small = recording(Quota(turns=2, turn_tokens=200, sampled_tokens=1000, seconds=600.0))
    few = recording(Quota(turns=9, turn_tokens=200, sampled_tokens=1, seconds=600.0))
    late = recording(Quota(turns=9, turn_tokens=200, sampled_tokens=9, seconds=0.0))
    agents = [Agent(gateway, gateway.admit(each)) for each in (small, few, late)]
    for agent in agents:
        agent.messages.append({"role": "user", "content": "Hello"})
    statuses = [[agent.post().status_code for _ in range(3)] for agent in agents]
    assert statuses == [[200, 200, 403], [200, 403, 403], [403, 403, 403]]
    assert [each.ended for each in (small, few, late)] == ["max_turns", "max_tokens", "timeout"]
    assert few.turns[0].finish_reason == "length" and len(few.turns[0].sampled_ids) == 1
    assert agents[0].post().json()["error"]["code"] == "insufficient_quota"
    gateway.dismiss(agents[0].key)
    for agent in (agents[0], Agent(gateway, "made-up")):
        agent.messages.append({"role": "user", "content": "Hello"})
        assert agent.post().status_code == 401


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"messages": []}, "no message of the user"),
        (
            {"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]},
            "begun for it",
        ),
        ({"messages": [{"role": "robot", "content": "a"}]}, "role 'robot'"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "reads text only"),
        ({"messages": [{"role": "user", "content": 3}]}, "content must be a list"),
        ({"messages": ["hello"]}, "must be an object"),
        ({"n": 2}, "n = 2 is not supported"),
        ({"stop": ["\n"]}, "stop = "),
        ({"response_format": {"type": "json_object"}}, "response_format"),
        ({"tools": [{"type": "function"}]}, "tools.function must be an object"),
        ({"max_tokens": 0}, "max_tokens must be a whole number"),
        (
            {"messages": [{"role": "user", "content": "word " * 4000}]},
            "maximum context length is 2000 tokens",
        ),
    ],
)
def test_what_cannot_be_answered_is_refused_in_words_and_leaves_no_turn(
    change: dict[str, Any], said: str, serve
):
    record = recording(context_length=2000)
    gateway = serve(["Done."])
    key = gateway.admit(record)
    body = {"model": "m", "messages": [{"role": "user", "content": "a"}], **change}
    answer = Agent.http.post(
        f"{gateway.url}/v1/chat/completions", json=body, headers={"authorization": f"Bearer {key}"}
    )
    assert answer.status_code == 400 and said in answer.json()["error"]["message"], answer.text
    assert not record.turns and record._reserved == 0


def test_a_request_that_is_no_json_and_a_failing_engine_are_told(serve):
    def script(request: SampleRequest) -> str:
        raise SamplerError("the server is gone")

    gateway, record = serve(script), recording()
    key = gateway.admit(record)
    headers = {"x-api-key": key}
    for data in (b"{", b"[]", b"\xff"):
        assert Agent.http.post(f"{gateway.url}/v1/messages", content=data, headers=headers).status_code == 400
    body = {"messages": [{"role": "user", "content": "a"}], "max_tokens": 5}
    answer = Agent.http.post(f"{gateway.url}/v1/messages", json=body, headers=headers)
    assert answer.status_code == 500 and "the server is gone" in answer.json()["error"]["message"]
    assert isinstance(record.failure, SamplerError) and record._reserved == 0
    streamed = Agent.http.post(f"{gateway.url}/v1/messages", json={**body, "stream": True}, headers=headers)
    assert "event: error" in streamed.text


def told(text: str) -> list[tuple[str, Any]]:
    """(name, data) of server-sent events."""
    found = []
    for block in text.strip().split("\n\n"):
        lines = dict(line.split(": ", 1) for line in block.splitlines() if not line.startswith(":"))
        data = lines.get("data", "")
        found.append((lines.get("event", ""), data if data == "[DONE]" else json.loads(data)))
    return found


def test_anthropic_messages_whole_and_streamed_are_one_segment(serve):
    gateway, record = serve([RUN, RUN, "Done."]), recording()
    headers = {"x-api-key": gateway.admit(record), "anthropic-version": "2023-06-01"}
    tools = [
        {"name": "bash", "description": "Run.", "input_schema": BASH["parameters"]},
        {"type": "web_search_20250305"},
    ]
    messages: list[dict[str, Any]] = [{"role": "user", "content": "Mend it."}]
    body = {"model": "m", "max_tokens": 99, "tools": tools, "system": [{"type": "text", "text": "Be good."}]}

    def ask(**more: Any) -> httpx.Response:
        answer = Agent.http.post(
            f"{gateway.url}/v1/messages", json={**body, "messages": messages, **more}, headers=headers
        )
        assert answer.status_code == 200, answer.text
        return answer

    def answer_call(content: list[dict[str, Any]]) -> None:
        result = {
            "type": "tool_result",
            "tool_use_id": content[-1]["id"],
            "content": [{"type": "text", "text": "a.py"}],
        }
        reminder = {"type": "text", "text": "Be quick."}
        messages.extend(
            [{"role": "assistant", "content": content}, {"role": "user", "content": [result, reminder]}]
        )

    whole = ask().json()
    assert whole["stop_reason"] == "tool_use"
    assert [block["type"] for block in whole["content"]] == ["text", "tool_use"]
    assert whole["content"][1]["input"] == {"command": "ls"}
    answer_call(whole["content"])
    content: list[dict[str, Any]] = []
    names = []
    for name, data in told(ask(stream=True).text):
        names.append(name)
        if name == "content_block_start":
            content.append(dict(data["content_block"]))
        elif name == "content_block_delta" and "text" in data["delta"]:
            content[data["index"]]["text"] += data["delta"]["text"]
        elif name == "content_block_delta":
            content[data["index"]]["input"] = json.loads(data["delta"]["partial_json"])
    assert (names[0], names[-2:]) == ("message_start", ["message_delta", "message_stop"])
    assert content[1]["input"] == {"command": "ls"}
    answer_call(content)
    number = Agent.http.post(
        f"{gateway.url}/v1/messages/count_tokens", json={**body, "messages": messages}, headers=headers
    ).json()["input_tokens"]
    assert ask().json()["usage"]["input_tokens"] == number
    assert [turn.segment for turn in record.turns] == [0, 0, 0]
    assert record.turns[0].observations[0].text == "a.py\n\nBe quick."


def test_clients_of_openai_read_both_protocols_whole_and_streamed(serve):
    openai = pytest.importorskip("openai")
    gateway, record = serve(itertools.cycle([RUN, "Done."])), recording()
    options: Any = {"base_url": f"{gateway.url}/v1", "api_key": gateway.admit(record), "max_retries": 0}
    client = openai.OpenAI(http_client=Agent.http, **options)
    assert [model.id for model in client.models.list()] == ["policy"]
    messages: list[Any] = [{"role": "user", "content": "Mend it."}]
    chunks = list(client.chat.completions.create(model="m", messages=messages, tools=TOOLS, stream=True))
    call = next(
        c.choices[0].delta.tool_calls[0] for c in chunks if c.choices and c.choices[0].delta.tool_calls
    )
    text = "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)
    assert (call.function.name, json.loads(call.function.arguments), text) == (
        "bash",
        {"command": "ls"},
        "I look around.",
    )
    assert chunks[-2].choices[0].finish_reason == "tool_calls" and chunks[-1].usage.completion_tokens > 5
    spoken = {"role": "assistant", "content": text, "tool_calls": [call.model_dump(exclude={"index"})]}
    messages += [spoken, {"role": "tool", "tool_call_id": call.id, "content": "a.py"}]
    reply = client.chat.completions.create(model="m", messages=messages, tools=TOOLS)
    assert reply.choices[0].message.content == "Done."
    tools = [{"type": "function", **BASH}, {"type": "web_search"}]
    given: list[Any] = [{"role": "user", "content": "Mend it."}]
    first = client.responses.create(model="m", instructions="Be good.", input=given, tools=tools)
    given += [item.model_dump() for item in first.output]
    given.append({"type": "function_call_output", "call_id": first.output[1].call_id, "output": "a.py"})
    with client.responses.stream(model="m", instructions="Be good.", input=given, tools=tools) as stream:
        kinds = [each.type for each in stream]
        final = stream.get_final_response()
    assert final.output_text == "Done." and kinds[-1] == "response.completed"
    assert [turn.segment for turn in record.turns] == [0, 0, 1, 1]


def test_many_attempts_at_once_share_nothing(serve):
    gateway = serve(lambda request: f"<call>bash echo {request.seed % 1000}</call>")
    records = [recording(name=str(number)) for number in range(40)]

    def attempt(record: Recording) -> list[str]:
        agent = Agent(gateway, gateway.admit(record))
        agent.say(f"Mend number {record.attempt_id}.")
        for _ in range(4):
            agent.say("", f"result of {record.attempt_id}")
        return [m["content"] for m in agent.messages if m["role"] == "user"]

    with ThreadPoolExecutor(20) as pool:
        asked = list(pool.map(attempt, records))
    for record, (said,) in zip(records, asked, strict=True):
        assert [turn.segment for turn in record.turns] == [0] * 5
        text = renderer().decode(prompts(record.turns)[-1])
        assert said in text and text.count(f"result of {record.attempt_id}") == 4
        assert all(math.isclose(p, 0.0) for turn in record.turns for p in turn.logps)


def test_histories_that_the_policy_did_not_write_are_context_in_its_own_format(serve):
    gateway, record = serve(["Done."]), recording()
    agent = Agent(gateway, gateway.admit(record))
    call = {"id": "x", "type": "function", "function": {"name": "bash", "arguments": '{"command": "ls"}'}}
    odd = {"id": "y", "type": "function", "function": {"name": "fly", "arguments": "not json"}}
    agent.messages += [
        {"role": "user", "content": "Mend it."},
        {"role": "assistant", "content": "I look.", "tool_calls": [call, odd]},
        {"role": "tool", "tool_call_id": "y", "content": "no wings"},
        {"role": "tool", "tool_call_id": "x", "content": "a.py"},
        {"role": "assistant", "content": None},
        {"role": "assistant", "content": "Hm."},
    ]
    agent.say("Go on.")
    text = renderer().decode(record.turns[0].context_ids)
    places = [
        text.index(each)
        for each in (
            "Mend it.",
            "I look.",
            "<call>bash ls</call>",
            '"fly"',
            "a.py",
            "no wings",
            "Hm.",
            "Go on.",
        )
    ]
    assert places == sorted(places)


def test_a_port_that_is_taken_is_told(serve):
    gateway = serve([])
    with pytest.raises(SamplerError, match="take another port"):
        Gateway(gateway.engine, port=gateway.port)
