"""Codecs: what is written is what is read, and nothing that a policy writes makes reading fail."""

from __future__ import annotations

import random
from typing import Any

import pytest

from woodshed.tokens.codec import CODECS, ToolSpec, mismatch, problem

TEXT, COUNT = {"type": "string"}, {"type": "integer", "minimum": 1}


def schema(required: dict[str, Any], **optional: Any) -> dict[str, Any]:
    return {
        "type": "object",
        "properties": required | optional,
        "required": list(required),
        "additionalProperties": False,
    }


TOOLS = (
    ToolSpec(
        "read_file",
        "Show lines.",
        schema({"path": TEXT}, start=COUNT, count=COUNT),
        ("path", "start", "count"),
    ),
    ToolSpec(
        "edit_file",
        "Replace text.",
        schema({"path": TEXT, "old": TEXT, "new": TEXT}),
        ("path",),
        None,
        ("old", "new"),
    ),
    ToolSpec("write_file", "Write.", schema({"path": TEXT, "content": TEXT}), ("path",), None, ("content",)),
    ToolSpec("search", "Find.", schema({"path": TEXT, "pattern": TEXT}), ("path",), "pattern"),
    ToolSpec("shell", "Run.", schema({"command": TEXT}), (), "command"),
    ToolSpec(
        "option", "Set.", schema({"on": {"type": "boolean"}, "mode": {"enum": ["a", "b"]}}), ("on", "mode")
    ),
    ToolSpec("finish", "End.", schema({})),
)
PLAIN, JSON, HERMES = CODECS["plain"], CODECS["json"], CODECS["hermes"]
PIECES = (
    *(
        "{",
        "}",
        '"',
        "'",
        "\\",
        "\n",
        "\n\n",
        " ",
        "\t",
        "    ",
        "$(",
        "`",
        "é",
        "世",
        "\u2028",
        "\r\n",
        "=",
        "<",
        ">",
    ),
    *(
        "<call>",
        "</call>",
        "<tool_call>",
        "</tool_call>",
        "a.py",
        "x = {1: 2}",
        "```",
        "#",
        "<<<<",
        "====",
        ">>>>",
    ),
    *(
        "\n====\n",
        "\n>>>>\n",
        "\n</call>\n",
        "\n<call>finish</call>",
        '{"name": "x"}',
        "null",
        "\x00",
        "<|im_end|>",
        "\n</parameter>\n",
        "</function>",
        "</arg_value>",
        "<arg_key>",
        "</parameter></invoke>",
        "[TOOL_CALLS]",
        "<|call|>",
        "True",
    ),
)
QUOTED = {"json", "hermes", "harmony", "kimi-k2", "llama-json", "llama-pythonic"}
QUOTED |= {"mistral", "mistral-id", "mistral-json", "deepseek-v3", "deepseek-v3.1"}
"""Formats that hold every text."""
FENCES = ("<<<<", "====", ">>>>")


def some_text(rng: random.Random) -> str:
    return "".join(rng.choice(PIECES) for _ in range(rng.randrange(12)))


def some_call(rng: random.Random) -> tuple[str, dict[str, Any]]:
    name = rng.choice(("read_file", "edit_file", "write_file", "search", "shell", "option", "finish"))
    return name, {
        "read_file": lambda: {
            "path": some_text(rng),
            **({"start": rng.randrange(1, 99)} if rng.random() < 0.5 else {}),
        },
        "edit_file": lambda: {"path": some_text(rng), "old": some_text(rng), "new": some_text(rng)},
        "write_file": lambda: {"path": some_text(rng), "content": some_text(rng)},
        "search": lambda: {"path": some_text(rng), "pattern": some_text(rng)},
        "shell": lambda: {"command": some_text(rng)},
        "option": lambda: {"on": rng.random() < 0.5, "mode": rng.choice("ab")},
        "finish": dict,
    }[name]()


@pytest.mark.parametrize("codec", CODECS.values(), ids=CODECS)
def test_what_is_written_is_read(codec):
    rng = random.Random(0)
    refused = 0
    for _ in range(1000):
        name, arguments = some_call(rng)
        try:
            text = codec.format(name, arguments, TOOLS)
        except ValueError:
            refused += 1
            continue
        prose, calls, error = codec.parse(f"I will do it.\n{text}", TOOLS)
        assert [(c.tool, c.arguments, c.error_kind) for c in calls] == [(name, arguments, None)], text
        assert (prose, error, calls[0].raw) == ("I will do it.", None, text)
    assert refused == 0 if codec.name in QUOTED else 0 < refused < 700


def test_plain_blocks_express_everything():
    rng = random.Random(1)
    for _ in range(3000):
        arguments = {"path": "a b.py", "old": some_text(rng), "new": some_text(rng)}
        text = PLAIN.format("edit_file", arguments, TOOLS)
        assert PLAIN.parse(text, TOOLS)[1][0].arguments == arguments


@pytest.mark.parametrize(
    "line", ["====", ">>>>", "<<<<", "====  ", "<<<<<", "=====\n====\n>>>>>>>", "</call>", "<call>"]
)
def test_a_line_that_is_a_fence_is_written_between_longer_ones(line):
    for arguments in ({"old": line, "new": f"a\n{line}\nb"}, {"old": f"Head\n{line}", "new": ""}):
        text = PLAIN.format("edit_file", {"path": "a.rst", **arguments}, TOOLS)
        (call,) = PLAIN.parse(f"{text}\n{text}", TOOLS)[1][:1]
        assert (call.error_kind, call.arguments) == (None, {"path": "a.rst", **arguments})
    text = PLAIN.format("write_file", {"path": "a.rst", "content": line}, TOOLS)
    assert PLAIN.parse(text, TOOLS)[1][0].arguments["content"] == line


@pytest.mark.parametrize(
    ("body", "number", "line"),
    [
        ("<<<<\nold\n====\nHead\n====\n>>>>", 4, "===="),
        ("<<<<\nold\n====\na\n>>>>\nb\n>>>>", 6, ">>>>"),
        ("<<<<<\na\n=====\n=====\n>>>>>", 3, "====="),
    ],
)
def test_a_fence_in_the_text_is_named(body, number, line):
    raw = f"<call>edit_file a.rst\n{body}\n</call>"
    call = PLAIN.parse(raw, TOOLS)[1][0]
    assert call.error_kind == "unparseable"
    said = problem(call, TOOLS)
    assert f"line {number} of its text is {line}, which is a fence" in said
    assert f"write {'<' * (len(line) + 1)}, {'=' * (len(line) + 1)}" in said


@pytest.mark.parametrize(
    "text", ["", "\n", "a", "a\n", "\n\na\n\n", "    x = 1", "</call>\n<call>finish</call>", "a ===="]
)
def test_plain_block_keeps_its_lines(text):
    call = PLAIN.format("edit_file", {"path": "a.py", "old": text, "new": ""}, TOOLS)
    assert PLAIN.parse(call, TOOLS)[1][0].arguments == {"path": "a.py", "old": text, "new": ""}


def test_the_plain_form_is_the_documented_one():
    edit = PLAIN.format("edit_file", {"path": "toolz/a.py", "old": "old text", "new": "new text"}, TOOLS)
    assert edit == "<call>edit_file toolz/a.py\n<<<<\nold text\n====\nnew text\n>>>>\n</call>"
    assert PLAIN.format("read_file", {"path": "a.py", "start": 40, "count": 20}, TOOLS) == (
        "<call>read_file a.py 40 20</call>"
    )
    assert (
        PLAIN.format("shell", {"command": "python -m pytest -q"}, TOOLS)
        == "<call>shell python -m pytest -q</call>"
    )
    assert PLAIN.format("finish", {}, TOOLS) == "<call>finish</call>"
    assert (
        HERMES.format("finish", {}, TOOLS) == '<tool_call>\n{"name": "finish", "arguments": {}}\n</tool_call>'
    )


@pytest.mark.parametrize(
    ("text", "expected", "error"),
    [
        ("I am done.", [], "no_call"),
        ("<call>shell awk '{print $1}' a | sed 's/}//'</call>", [("shell", None)], None),
        ("<call>shell cat <<EOF\na\nEOF\n</call>", [("shell", None)], None),
        ("<call>edit_file a.py\n<<<<\n====\nnew\n>>>>\n</call>", [("edit_file", None)], None),
        ("<call>edit_file a.py\n<<<<\n====\n>>>>\n</call>", [("edit_file", None)], None),
        ("<call>write_file a.rst\n<<<<\nT\n====\n>>>>\n</call>", [("write_file", None)], None),
        ("<call>view a.py</call>", [("view", "unknown_tool")], "unknown_tool"),
        ("<call>patch a.py\n<<<<\n</call>\n>>>>\n</call>", [("patch", "unknown_tool")], "unknown_tool"),
        ("<call>read_file</call>", [("read_file", "bad_arguments")], "bad_arguments"),
        ("<call>read_file a.py ten</call>", [("read_file", "bad_arguments")], "bad_arguments"),
        ("<call>read_file a.py 0</call>", [("read_file", "bad_arguments")], "bad_arguments"),
        ("<call>read_file a.py 1 2 3</call>", [("read_file", "bad_arguments")], "bad_arguments"),
        ("<call>edit_file a.py</call>", [("edit_file", "bad_arguments")], "bad_arguments"),
        ("<call>shell</call>", [("shell", "bad_arguments")], "bad_arguments"),
        ("<call>option yes a</call>", [("option", "bad_arguments")], "bad_arguments"),
        ("<call>option true c</call>", [("option", "bad_arguments")], "bad_arguments"),
        ("<call>read_file it's</call>", [("read_file", "unparseable")], "unparseable"),
        ("<call>edit_file a.py\n<<<<\na\n>>>>\n</call>", [("edit_file", "unparseable")], "unparseable"),
        (
            "<call>edit_file a.py\n<<<<\na\n====\nb\n====\nc\n>>>>\n</call>",
            [("edit_file", "unparseable")],
            "unparseable",
        ),
        ("<call>edit_file a.py\n<<<<\na\n====\nb\n</call>", [("edit_file", "unparseable")], "unparseable"),
        ("<call>edit_file a.py\nold\nnew\n</call>", [("edit_file", "unparseable")], "unparseable"),
        ("<call>finish", [("finish", "unparseable")], "unparseable"),
        ("<call></call>", [("", "unparseable")], "unparseable"),
        ("<call>finish</call> <call>shell ls</call>", [("finish", None), ("shell", None)], None),
        (
            "<call>read_file a\n<call>finish</call>",
            [("read_file", "unparseable"), ("finish", None)],
            "unparseable",
        ),
        (
            "<call>edit_file a\n<<<<\nx\n</call>\n<call>edit_file a\n<<<<\nx\n====\ny\n>>>>\n</call>",
            [("edit_file", "unparseable"), ("edit_file", None)],
            "unparseable",
        ),
    ],
)
def test_plain_faults(text, expected, error):
    _, calls, found = PLAIN.parse(text, TOOLS)
    assert ([(call.tool, call.error_kind) for call in calls], found) == (expected, error)


@pytest.mark.parametrize(
    ("body", "tool", "error"),
    [
        ('{"name": "shell", "arguments": {"command": "echo </call> }}{{"}}', "shell", None),
        ('{"name": "finish"}', "finish", None),
        ('{"name": "view", "arguments": {}}', "view", "unknown_tool"),
        ('{"name": "read_file", "arguments": {"path": 3}}', "read_file", "bad_arguments"),
        ('{"name": "read_file", "arguments": {"path": "a", "start": true}}', "read_file", "bad_arguments"),
        ('{"name": "read_file", "arguments": {"path": "a", "start": 1.5}}', "read_file", "bad_arguments"),
        ('{"name": "read_file", "arguments": {"path": "a", "lines": 2}}', "read_file", "bad_arguments"),
        ('{"name": "shell", "arguments": "ls"}', "", "unparseable"),
        ('{"name": "shell", "arguments": {"command": "\\ud800"}}', "", "unparseable"),
        ('{"name": "shell", "arguments": {"command": "a\nb"}}', "", "unparseable"),
        ('{"name": "shell", "arguments": {"command": NaN}}', "", "unparseable"),
        ('{"name": "shell", "arguments": {"command": "ls"}', "", "unparseable"),
        ('["shell"]', "", "unparseable"),
        ("[" * 100_000, "", "unparseable"),
        ("1" * 10_000, "", "unparseable"),
        ("", "", "unparseable"),
    ],
)
@pytest.mark.parametrize(("codec", "tag"), [(JSON, "call"), (HERMES, "tool_call")], ids=["json", "hermes"])
def test_json_faults(codec, tag, body, tool, error):
    text = f'<{tag}> {body} </{tag}><{tag}>{{"name": "finish"}}</{tag}>'
    _, calls, found = codec.parse(text, TOOLS)
    assert [(call.tool, call.error_kind) for call in calls] == [(tool, error), ("finish", None)]
    assert found == error


@pytest.mark.parametrize(
    ("text", "arguments", "error"),
    [
        ('[shell(command="grep \\d+ a.py")]', {"command": "grep \\d+ a.py"}, None),
        ('[shell(command=r"\\d")]', {"command": "\\d"}, None),
        ("[option(on=True, mode='a'), finish()]", {"on": True, "mode": "a"}, None),
        ('[shell(command="a" "b")]', {"command": "ab"}, None),
        ('[shell(command=b"ls")]', {}, "unparseable"),
        ("[shell(command={1, 2})]", {}, "unparseable"),
        ("[shell(command=1e999)]", {}, "unparseable"),
        ("[shell(command=open('a'))]", {}, "unparseable"),
        ('[shell("ls")]', {}, "unparseable"),
        ('[shell(**{"command": "ls"})]', {}, "unparseable"),
        ("[shell(command=" + "[" * 5000 + "]" * 5000 + ")]", {}, "unparseable"),
        ('[shell(command="ls"', {}, "unparseable"),
    ],
)
def test_pythonic_calls(text, arguments, error):
    _, calls, found = CODECS["llama-pythonic"].parse(text, TOOLS)
    assert (calls[0].arguments, found) == (arguments, error)


@pytest.mark.parametrize("codec", CODECS.values(), ids=CODECS)
def test_any_text_can_be_read(codec):
    rng = random.Random(2)
    for _ in range(600):
        name, arguments = some_call(rng)
        try:
            text = some_text(rng) + codec.format(name, arguments, TOOLS) + some_text(rng)
        except ValueError:
            text = some_text(rng)
        text = text[: rng.randrange(len(text) + 1)]
        _, calls, error = codec.parse(text, TOOLS)
        assert (error == "no_call") == (not calls)
        assert all(call.raw in text for call in calls)
        _, calls, error = codec.parse(text, TOOLS, truncated=True)
        assert error == "truncated"


@pytest.mark.parametrize("codec", CODECS.values(), ids=CODECS)
def test_a_cut_call_is_truncated(codec):
    arguments = {"path": "a.py", "old": "x", "new": "y"}
    whole = codec.format("edit_file", arguments, TOOLS)
    for length in range(len(whole) - 1, whole.index("edit_file"), -1):
        _, calls, error = codec.parse(whole[:length], TOOLS, truncated=True)
        assert error == "truncated"
        if [call.arguments for call in calls] != [arguments]:  # what may end a call may be missing
            assert [call.error_kind for call in calls] in (["truncated"], [])
            assert codec.parse(whole[:length], TOOLS)[2] == ("unparseable" if calls else "no_call")


def test_what_cannot_be_written_is_refused():
    for name, arguments in [
        ("view", {}),
        ("read_file", {}),
        ("read_file", {"path": "a", "count": 3}),
        ("read_file", {"path": "a\nb"}),
        ("shell", {"command": " ls"}),
        ("shell", {"command": "echo </call>"}),
    ]:
        with pytest.raises(ValueError, match=r"view|argument|plain"):
            PLAIN.format(name, arguments, TOOLS)


def test_problems_are_told_in_words():
    def told(text: str) -> str:
        return problem(PLAIN.parse(text, TOOLS)[1][0], TOOLS)

    assert told("<call>view a</call>").startswith(
        "there is no tool 'view'; the tools are read_file, edit_file"
    )
    assert told("<call>read_file a x</call>") == "read_file: argument 'start' must be integer, not \"x\""
    assert told("<call>read_file a 1 2 3</call>").startswith("read_file: argument '#4' is not known")
    assert told("<call>edit_file a</call>") == "edit_file: argument 'old' is missing"
    assert told("<call>finish</call>") == ""
    assert mismatch({"on": 1}, TOOLS[5].parameters) == "argument 'mode' is missing"


def test_the_plain_description_is_short():
    lines = PLAIN.describe(TOOLS).splitlines()
    assert "<call>read_file path [start] [count]</call>  Show lines." in lines
    assert len(lines) == 1 + len(TOOLS) + 6 + 4  # one line a tool, more for those with blocks
    assert HERMES.describe(TOOLS) == ""
