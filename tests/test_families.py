"""Families of models: the language of each is found in its template, and prompts are what transformers renders."""

from __future__ import annotations

import functools
import json
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from families import FAMILIES, HERMES_CALL, LISTED, chatml, tokenizer
from scripted import calc_task
from test_codec import TOOLS
from test_endpoint import Server, serving
from tiny_model import tiny_tokenizer, write_tiny_model

from woodshed.agent import AgentSettings, Attempt
from woodshed.agent.tools import TOOLS as AGENT_TOOLS
from woodshed.cli.app import open_engine
from woodshed.engines.engine import SampleRequest, sample_all
from woodshed.engines.scripted import ScriptedEngine
from woodshed.evals.suite import SuiteSettings
from woodshed.records import Call, ModelError, Observation
from woodshed.sandbox import SandboxSpec, open_sandbox
from woodshed.settings import read
from woodshed.tokens.chat_template import on_one_day
from woodshed.tokens.codec import CODECS
from woodshed.tokens.conversation import Conversation as Record
from woodshed.tokens.family import schemas
from woodshed.tokens.renderer import Renderer, create_renderer

SYSTEM, USER = "You fix code.", 'Fix "a.py".'


@functools.cache
def renderer_of(name: str) -> Renderer:
    return create_renderer(tokenizer(FAMILIES[name]))


@pytest.fixture(params=FAMILIES)
def name(request: pytest.FixtureRequest) -> str:
    return request.param


def test_the_format_is_found_in_the_template(name: str):
    assert renderer_of(name).codec.name == FAMILIES[name].codec


def test_calls_as_documentation_writes_them_are_read(name: str):
    codec = renderer_of(name).codec
    for before in ("", "I look at it.\n", FAMILIES[name].thought):
        _, calls, fault = codec.parse(before + FAMILIES[name].documented, TOOLS)
        assert fault is None
        assert [(c.tool, c.arguments) for c in calls] == [("read_file", {"path": "src/a.py", "count": 3})]


class Conversation:
    """An attempt through the renderer, and the same messages for transformers."""

    def __init__(self, name: str) -> None:
        self.family, self.renderer = FAMILIES[name], renderer_of(name)
        self.tokenizer = self.renderer._tokenizer  # type: ignore[attr-defined]
        self.record = Record(self.renderer, SYSTEM, USER, TOOLS)
        is_listed = not self.renderer.codec.describe(TOOLS)
        self.tools = schemas(TOOLS) if is_listed else None
        system = "\n\n".join(filter(None, [self.renderer.codec.describe(TOOLS), SYSTEM]))
        self.messages: list[dict[str, Any]] = [
            {"role": "system", "content": system},
            {"role": "user", "content": USER},
        ]

    def call(self, tool: str, arguments: dict[str, Any], result: str) -> None:
        """One turn with one call."""
        thought = self.family.thought
        text = thought + self.renderer.codec.format(tool, arguments, TOOLS)
        sampled = (*self.renderer._encode(text), self.renderer._stop_ids[1])  # type: ignore[attr-defined]
        _, calls, fault = self.renderer.codec.parse(self.renderer.decode(sampled), TOOLS)
        assert fault is None
        self.record.add(sampled, "stop", [Observation(calls[0].id, result)], calls)
        call_id = calls[0].id if calls[0].id in text else "call00000"
        message = self.renderer._template.calls([(tool, call_id, arguments)])  # type: ignore[attr-defined]
        thoughts = {"reasoning_content": "Hm.", "thinking": "Hm."} if thought.strip() else {}
        answer = {"role": "tool", "name": tool, "tool_call_id": call_id, "content": result}
        self.messages += [{**message, **thoughts}, answer]

    def say(self, prose: str, reply: str) -> None:
        """One turn without a call, which a message of the user answers."""
        sampled = self.renderer.encode_message(prose)
        if thought := self.family.thought.strip("\n"):
            text = self.renderer.decode(sampled)
            lead = "<|channel|>final<|message|>" * (self.family.codec == "harmony")
            text = f"{self.family.thought}{lead}{prose}"
            sampled = (*self.renderer._encode(text), sampled[-1])  # type: ignore[attr-defined]
        self.record.add(sampled, "stop", [Observation("", reply)], ())
        thoughts = {"reasoning_content": "Hm.", "thinking": "Hm."} if thought else {}
        self.messages += [
            {"role": "assistant", "content": prose, **thoughts},
            {"role": "user", "content": reply},
        ]

    def expected(self) -> list[int]:
        return self.tokenizer.apply_chat_template(
            self.messages,
            tools=self.tools,
            chat_template=on_one_day(self.tokenizer.chat_template),
            add_generation_prompt=True,
            return_dict=False,
        )


def test_prompts_are_those_of_transformers_token_for_token(name: str):
    conversation = Conversation(name)
    assert conversation.record.prompt == conversation.expected()
    for tool, arguments, result in (
        ("read_file", {"path": "a.py", "start": 3}, 'x = "1"\n\ty'),
        ("edit_file", {"path": "a.py", "old": "x <y>\n  z", "new": '"q"'}, "edited"),
        ("option", {"on": True, "mode": "a"}, "é世"),
        ("finish", {}, "finished"),
    ):
        conversation.call(tool, arguments, result)
        assert conversation.record.prompt == conversation.expected()


def test_thoughts_that_the_template_drops_begin_a_new_segment(name: str):
    conversation = Conversation(name)
    segments = []
    conversation.call("read_file", {"path": "a.py", "start": 3}, "x = 1")
    assert conversation.record.segment == 0
    for turn in range(2):
        conversation.say(f"Look, I am done {turn}.", "error: no call")
        assert conversation.record.prompt == conversation.expected()
        segments.append((conversation.record.segment, conversation.record.begins))
        conversation.call("option", {"on": True, "mode": "a"}, "set")
        assert conversation.record.prompt == conversation.expected()
        assert conversation.record.begins == ""
    is_dropped = name in ("qwen3", "qwen3.5", "gpt-oss")
    assert segments == ([(1, "thoughts"), (2, "thoughts")] if is_dropped else [(0, "")] * 2)


def test_hints_and_errors_show_the_form_of_the_family(name: str):
    from woodshed import feedback
    from woodshed.agent import tools

    renderer = renderer_of(name)
    mark = FAMILIES[name].documented[:6]
    form = tools.form("read_file", renderer.codec)
    assert mark in form or FAMILIES[name].codec == "harmony"
    hint = feedback.hint_text("unparseable", tools=feedback.TOOLS, codec=renderer.codec, tool="read_file")
    assert form in hint
    broken = Call("call_0", "", {}, "read_file, please", "unparseable")
    assert tools.refuse(broken, renderer.codec).text.endswith(f"write\n{form}")


def test_a_faulty_call_is_named_whatever_its_form(name: str):
    codec = renderer_of(name).codec
    written = FAMILIES[name].documented
    faults = {
        written.replace("read_file", "view"): "unknown_tool",
        written.replace("path", "file"): "bad_arguments",
        written.replace(
            "3", '"x"' if "json" in written or "{" in written or "(" in written else "x"
        ): "bad_arguments",
    }
    for text, kind in faults.items():
        assert codec.parse(text, TOOLS)[2] == kind, text
    assert codec.parse("Done.", TOOLS)[2] == "no_call"
    for length in range(len(written) - 1, len(written) // 2, -1):
        _, calls, fault = codec.parse(written[:length], TOOLS, truncated=True)
        assert fault == "truncated"
        assert all(call.error_kind == "truncated" or call.arguments for call in calls)


def test_several_calls_are_answered_each_or_together(name: str):
    renderer = renderer_of(name)
    call = Call("call_0", "read_file", {"path": "a"}, ""), Call("call_1", "shell", {"command": "ls"}, "")
    results = [Observation("call_0", "first"), Observation("call_1", "second")]
    text = renderer._tokenizer.decode(list(renderer.extend((), "length", results, call).ids))  # type: ignore[attr-defined]
    assert text.index("first") < text.index("second")
    assert ("[1] first" in text) == (FAMILIES[name].codec in ("llama-json", "llama-pythonic", "harmony"))
    three = renderer.extend((), "length", [*results, Observation("call_2", "third")], [*call, call[0]])
    assert "third" in renderer._tokenizer.decode(list(three.ids))  # type: ignore[attr-defined]


def test_ends_of_messages_come_from_the_folder_of_a_tokenizer_too(tmp_path: Path):
    tokens = tokenizer(FAMILIES["qwen2.5"])
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [0, tokens.eos_token_id]}))
    assert create_renderer(tokens, model_dir=tmp_path).stop_ids == {0, tokens.eos_token_id}


def recorded(codec: Any) -> list[str]:
    """Twelve messages of an attempt, half of them faulty."""
    tools, edit = AGENT_TOOLS, {"path": "calc.py", "old": "x // 2", "new": "x / 2  # <|im_end|>"}
    read = codec.format("read_file", {"path": "calc.py"}, tools)
    return [
        read,
        "I am done!",
        codec.format("edit_file", edit, tools),
        codec.format("edit_file", edit, tools),  # the old text is gone
        read.replace("read_file", "view"),
        read[: len(read) // 2],
        f"Look.\n{codec.format('shell', {'command': 'cat calc.py'}, tools)}",
        "word " * 400,  # cut at the limit
        read + codec.format("shell", {"command": "ls"}, tools),
        codec.format("write_file", {"path": "new.py", "content": 'x = "é世"\n\n'}, tools),
        codec.format("search", {"pattern": "def", "path": "nowhere"}, tools),
        codec.format("finish", {}, tools),
    ]


@pytest.mark.parametrize("name", ["qwen3-coder", "glm-4.5", "gpt-oss"])
def test_a_session_reads_the_same_here_and_behind_a_server(name: str, tmp_path: Path):
    with serving() as server:
        compare_sessions(name, server, tmp_path)


def compare_sessions(name: str, server: Server, tmp_path: Path) -> None:
    model = write_tiny_model(tmp_path / "model", tokenizer=tokenizer(FAMILIES[name]))
    common = [f"model={json.dumps(str(model))}", 'tasks=["none"]', 'name="none"']
    remote = [*common, "engine.kind=http", f"engine.servers=[{{url='{server.url}'}}]"]
    settings = AgentSettings(max_turns=12, turn_tokens=900, rollout_tokens=1 << 16, max_calls=2)
    settings = settings.model_copy(update={"max_errors": 12})
    task, prompts = calc_task(tmp_path / "task"), []
    spec = SandboxSpec(lowers=(task.folder / "environment" / "workspace",))
    with closing(open_engine(read(SuiteSettings, None, common))) as engine:
        renderer = engine.renderer
    texts = iter(recorded(renderer.codec))

    def following(request: SampleRequest) -> str:
        prompts.append(list(request.prompt_ids))
        return next(texts)

    rollouts = []
    with closing(open_engine(read(SuiteSettings, None, remote))) as served:
        server.bodies.clear()  # it was asked what it speaks
        server.recorded = [renderer.encode_message(text) for text in recorded(renderer.codec)]
        for engine in (ScriptedEngine(renderer, following), served):
            served.context_length = 1 << 20
            attempt = Attempt(task, open_sandbox(spec), engine.renderer, settings, rollout_id="r")
            while not attempt.done:
                attempt.act(sample_all(engine, [attempt.request()])[0])
            rollouts.append(attempt.finish())
    assert renderer.codec.name == FAMILIES[name].codec
    assert [body["prompt"] for body in server.bodies] == prompts
    assert len(prompts) == 12
    assert {body["stop_token_ids"][-1] for body in server.bodies} == {max(renderer.stop_ids)}
    here, there = ([segment.token_ids for segment in made.segments] for made in rollouts)
    assert here == there
    faults = [turn.error_kind for turn in rollouts[1].turns if turn.error_kind]
    assert {"no_call", "unknown_tool", "unparseable", "truncated", "old_missing", "bad_path"} <= set(faults)


def with_type(folder: Path, model_type: str) -> Path:
    (folder / "config.json").write_text(json.dumps({"model_type": model_type}))
    return folder


def test_a_template_of_another_family_than_the_model_is_refused(tmp_path: Path):
    qwen = tokenizer(FAMILIES["qwen2.5"])
    assert create_renderer(qwen, model_dir=with_type(tmp_path, "qwen3")).codec.name == "hermes"
    assert create_renderer(qwen, model_dir=with_type(tmp_path, "of_nobody")).codec.name == "hermes"
    with pytest.raises(
        ModelError, match="form hermes, but models of type 'qwen3_5' were trained on qwen3-coder"
    ):
        create_renderer(qwen, model_dir=with_type(tmp_path, "qwen3_5"))
    chosen = create_renderer(qwen, codec="hermes", model_dir=tmp_path)
    assert chosen.codec.name == "hermes"


@pytest.mark.parametrize(
    ("call", "shown"),
    [
        ("<<{{ c.name }}|{{ c.arguments | tojson }}>>", "<<probe_tool|"),
        ("{{ raise_exception('no calls here') }}", "nothing .*no calls here"),
        ("", "<.im_start.>assistant"),
    ],
)
def test_a_family_that_is_not_understood_is_an_error_with_the_choices(call: str, shown: str):
    strange = tiny_tokenizer(chatml(call))
    with pytest.raises(
        ModelError, match=f"(?s)writes a call of one as .*{shown}.*hermes, qwen3-coder.*plain or json"
    ):
        create_renderer(strange)
    assert create_renderer(strange, codec="plain").codec.name == "plain"


def test_a_call_in_the_form_of_another_family_is_unparseable_and_answered_in_the_right_one():
    from woodshed.agent import tools

    codec = renderer_of("qwen3-coder").codec
    _, calls, fault = codec.parse(FAMILIES["qwen2.5"].documented, TOOLS)
    assert fault == "unparseable"
    assert tools.refuse(calls[0], codec).text.endswith(tools.form("read_file", codec))
    assert "<function=read_file>" in tools.form("read_file", codec)


def test_calls_inside_a_thought_are_no_calls():
    for name, opening in (("qwen3.5", ""), ("qwen3", "<think>\n")):
        codec = renderer_of(name).codec
        written = FAMILIES[name].documented
        assert codec.parse(f"{opening}Shall I {written}?\n</think>\n\nNo.", TOOLS)[2] == "no_call"
        _, calls, fault = codec.parse(f"{opening}Shall I {written}?\n</think>\n\n{written}", TOOLS)
        assert (len(calls), fault) == (1, None)
        assert len(codec.parse(f"{opening}I will.\n{written}", TOOLS)[1]) == 1


def test_a_scripted_message_closes_the_thought_that_the_prompt_opened():
    renderer = renderer_of("qwen3.5")
    assert renderer.decode(renderer.encode_message("Look.")) == "\n</think>\n\nLook."
    harmony = renderer_of("gpt-oss")
    call = harmony.codec.format("finish", {}, TOOLS)
    assert harmony.decode(harmony.encode_message("Look.")) == "<|channel|>final<|message|>Look."
    assert harmony.decode(harmony.encode_message(call)) == call
    text = harmony.decode(harmony.encode_message(f"Look.\n{call}"))
    assert text == f"<|channel|>commentary<|message|>Look.<|end|><|start|>assistant{call}"
    assert harmony.codec.parse(text, TOOLS)[2] is None


OTHERS = {
    "qwen3": "hermes",
    "prime-qwen3": "qwen3-coder",
    "qwen3.5": "qwen3-coder",
    "glm-4.5": "glm-4.5",
    "glm-5": "glm-4.7",
    "minimax-m2": "minimax-m2",
    "llama-3": "llama-json",
    "deepseek-v3": "deepseek-v3",
    "kimi-k2": "kimi-k2",
}
"""Renderers of the package `renderers`, which are compared with the real templates there, and the codec of each."""
MORE_TOKENS = (
    *(
        "<arg_key>",
        "</arg_key>",
        "<arg_value>",
        "</arg_value>",
        "<|im_system|>",
        "<|eom_id|>",
        "<|end_of_text|>",
    ),
    *(
        "<|finetune_right_pad_id|>",
        "<｜tool▁outputs▁begin｜>",
        "<｜tool▁outputs▁end｜>",
        "[EOS]",
        "<think>",
        "</think>",
    ),
    *("]~!b[", "<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>"),
)


@pytest.mark.parametrize("other", OTHERS)
def test_calls_are_written_and_read_as_the_renderers_package_does(other: str):
    from renderers.base import create_renderer as create_other
    from renderers.configs import config_from_name

    codec = CODECS[OTHERS[other]]
    tokens = tokenizer(
        next(f for f in FAMILIES.values() if f.codec.startswith(codec.name.replace("4.7", "4.5")))
    )
    tokens.add_tokens([t for t in MORE_TOKENS if t not in tokens.get_vocab()], special_tokens=True)
    config: Any = config_from_name(other)
    package: Any = create_other(tokens, config)
    listed = [tool.schema for tool in TOOLS]
    for name, arguments in (
        ("read_file", {"path": "a.py", "start": 3}),
        ("edit_file", {"path": "a.py", "old": "x <y>\n  z", "new": '"q"'}),
        ("finish", {}),
    ):
        text = codec.format(name, arguments, TOOLS)
        call_id = codec.call_id.format(name=name, index=0)  # type: ignore[attr-defined]
        call = {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}
        messages = [
            {"role": "user", "content": "u"},
            {"role": "assistant", "content": "", "tool_calls": [call]},
        ]
        assert text in tokens.decode(package.render_ids(messages, tools=listed))
        read = package.parse_response(tokens.encode(text, add_special_tokens=False), tools=listed)
        assert [(each.name, each.arguments) for each in read.tool_calls] == [(name, arguments)]


def test_a_message_that_was_decoded_is_encoded_as_it_was(name: str):
    renderer = renderer_of(name)
    call = renderer.codec.format("read_file", {"path": "a.py"}, TOOLS)
    for text in ("Look.", call, f"Look.\n{call}", ""):
        ids = renderer.encode_message(text)
        assert renderer.encode_message(renderer.decode(ids)) == ids
        assert ids[-1] in renderer.stop_ids
        _, calls, _ = renderer.codec.parse(renderer.decode(ids), TOOLS)
        assert [c.tool for c in calls] == ["read_file"] * (call in text)


def test_every_family_has_a_stand_in():
    named = {family.codec for family in FAMILIES.values()} | {"plain", "json", "glm-4.7"}
    assert named == set(CODECS)
    assert LISTED in FAMILIES["qwen2.5"].template
    assert HERMES_CALL in FAMILIES["qwen2.5"].template
