"""Transcripts of runs, ATIF files and chats become exact token ids, of which the policy's own are imitated."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from scripted import EDIT, TEST, calc_task, play, renderer
from tiny_model import write_tiny_model

from woodshed.agent.tools import TOOLS
from woodshed.cli.train import run_recipe
from woodshed.evals import atif
from woodshed.experience import transcripts
from woodshed.experience.transcripts import Transcript
from woodshed.records import Flag, RecipeError, Rollout, Verdict
from woodshed.runs.folder import RunDir
from woodshed.settings import validate
from woodshed.stages.recipe import Recipe


@pytest.fixture(scope="module")
def attempt(tmp_path_factory: pytest.TempPathFactory) -> Rollout:
    return play(calc_task(tmp_path_factory.mktemp("transcripts") / "calc"), EDIT, TEST)


@pytest.fixture
def run(attempt: Rollout, tmp_path: Path) -> RunDir:
    """Attempts of which "good" is solved and unflagged; the others lack the one or the other."""
    run = RunDir.create(tmp_path / "run", recipe='name = "run"\nmodel = "tiny"\n', manifest={})
    names = ("good", "flagged", "unsolved", "unjudged", "lost")
    rollouts = [replace(attempt, id=name) for name in names[:4]]
    run.append("rollouts", [*rollouts, replace(attempt, id="lost", ended="sandbox_lost")], "train", 0)
    verdicts = [
        Verdict(name, attempt.task_id, "graded", float(name != "unsolved"), name != "unsolved", {})
        for name in names
        if name != "unjudged"
    ]
    run.append("verdicts", verdicts, "train", 0)
    run.append("flags", [Flag("flagged", "reads_hidden_tests", 0, "cat /tests", 0.9)], "train", 0)
    run.unlock()
    return run


def exact(rollout: Rollout) -> Transcript:
    ids: list[int] = []
    imitated: list[int] = []
    for turn in rollout.turns:
        ids += turn.context_ids
        imitated += range(len(ids), len(ids) + len(turn.sampled_ids))
        ids += turn.sampled_ids
    return Transcript(rollout.id, tuple(ids), tuple(imitated))


@pytest.mark.parametrize("form", ["run", "atif"])
def test_attempts_are_taken_by_verdict_and_flags_token_by_token(
    run: RunDir, attempt: Rollout, form: str, tmp_path: Path
):
    path = run.path
    if form == "atif":
        path = tmp_path / "atif"
        atif.export(run, path, problems=[])
    assert transcripts.read(path, renderer()) == [exact(replace(attempt, id="good"))]


def test_attempts_at_held_out_tasks_are_never_imitated(run: RunDir, attempt: Rollout):
    with pytest.raises(RecipeError, match=r"holds nothing to imitate.*as \.jsonl"):
        transcripts.read(run.path, renderer(), frozenset({attempt.task_id}))


def test_attempts_of_another_tokenizer_are_refused(run: RunDir, attempt: Rollout):
    turn = attempt.turns[0]
    other = replace(turn, sampled_ids=tuple(i + 1 for i in turn.sampled_ids))
    run.append("rollouts", [replace(attempt, id="other", turns=(other,))], "train", 1)
    run.append("verdicts", [Verdict("other", attempt.task_id, "graded", 1.0, True, {})], "train", 1)
    with pytest.raises(RecipeError, match=r"attempt other was sampled with another tokenizer"):
        transcripts.read(run.path, renderer())


def schema(name: str) -> dict[str, Any]:
    return {"type": "function", "function": next(tool.schema for tool in TOOLS if tool.name == name)}


def call(name: str, arguments: dict[str, Any], number: int = 0) -> dict[str, Any]:
    return {"id": f"c{number}", "function": {"name": name, "arguments": json.dumps(arguments)}}


USER = {"role": "user", "content": "Double it."}
CHAT = {
    "messages": [
        {"role": "system", "content": "Be brief."},
        USER,
        {
            "role": "assistant",
            "content": "I look.",
            "tool_calls": [call("read_file", {"path": "calc.py", "start": 1, "count": 2})],
        },
        {"role": "tool", "tool_call_id": "c0", "content": "def double(x):"},
        {"role": "assistant", "content": "It doubles."},
        {"role": "user", "content": "Thanks."},
        {"role": "assistant", "content": "Welcome."},
    ],
    "tools": [schema("read_file")],
}


@pytest.mark.parametrize("codec", ["plain", "json"])
def test_a_chat_is_rendered_as_the_harness_renders_and_only_the_assistant_is_imitated(
    tmp_path: Path, codec: str
):
    (tmp_path / "chats.jsonl").write_text(json.dumps(CHAT) + "\n" + json.dumps(CHAT))
    using = renderer(codec)
    first, second = transcripts.read(tmp_path / "chats.jsonl", using)
    assert first.ids == second.ids and second.id == f"{tmp_path / 'chats.jsonl'}, line 2"
    tools = [tool for tool in TOOLS if tool.name == "read_file"]
    written = using.codec.format("read_file", {"path": "calc.py", "start": 1, "count": 2}, tools)
    said = [f"I look.\n{written}", "It doubles.", "Welcome."]
    assert [first.ids[i] for i in first.imitated] == [i for text in said for i in using.encode_message(text)]
    start = using.start("Be brief.", "Double it.", tools).ids
    assert first.ids[: len(start)] == start
    text = using.decode(first.ids)
    assert text.index("def double(x):") > text.index("I look.") and text.count("Thanks.") == 1


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", r"chats\.jsonl, line 2 cannot be read"),
        ("[]", r"line 2 cannot be read: not an object"),
        ('{"prompt": "x"}', r'line 2 is not of the form \{"messages"'),
        ('{"messages": [{"content": "x"}]}', r"line 2 is not of the form"),
        ('{"messages": []}', r"line 2: .*begins with user and assistant.*here roles are none"),
        (json.dumps({"messages": [USER]}), r"line 2: .*here roles are user"),
        (json.dumps({"messages": [USER, USER, *CHAT["messages"][4:5]]}), r"roles are user, user, assistant"),
        (json.dumps({"messages": [USER, {"role": "assistant", "content": ""}]}), r"line 2: .*is empty"),
        (json.dumps({"messages": [USER, {"role": "assistant", "content": 3}]}), r"content must be text.*'3'"),
        (
            json.dumps({"messages": CHAT["messages"]}),  # the tool is not described
            r"line 2: a call cannot be written.*no tool 'read_file'",
        ),
        (
            json.dumps({**CHAT, "messages": [*CHAT["messages"][:3], *CHAT["messages"][4:]]}),
            r"line 2: after an assistant's message with 1 calls",
        ),
    ],
)
def test_a_line_that_is_no_chat_is_named(tmp_path: Path, line: str, message: str):
    (tmp_path / "chats.jsonl").write_text(f"{json.dumps(CHAT)}\n{line}\n")
    with pytest.raises(RecipeError, match=message):
        transcripts.read(tmp_path / "chats.jsonl", renderer())


def test_what_is_no_source_is_named(tmp_path: Path, run: RunDir):
    with pytest.raises(RecipeError, match=r"gone is no run folder, no ATIF file.*\"scripted\" stands for"):
        transcripts.read(tmp_path / "gone", renderer())
    (tmp_path / "empty.jsonl").write_text("")
    with pytest.raises(RecipeError, match=r"empty\.jsonl holds nothing"):
        transcripts.read(tmp_path / "empty.jsonl", renderer())
    atif.export(run, tmp_path / "atif", problems=[])
    file = tmp_path / "atif" / "good.json"
    document = json.loads(file.read_text())
    del document["steps"][3]["metrics"]["completion_token_ids"]
    file.write_text(json.dumps(document))
    with pytest.raises(RecipeError, match=r"good\.json, step 4: no extra\.context_token_ids"):
        transcripts.read(file, renderer())
    file.write_text("{")
    with pytest.raises(RecipeError, match=r"good\.json cannot be read"):
        transcripts.read(file, renderer())


def recipe_for(tmp_path: Path, **sections: Any) -> Recipe:
    return validate(
        Recipe,
        {
            "name": "chats",
            "runs": str(tmp_path / "runs"),
            "stages": ["sft"],
            "checkpoint_every": 3,
            "policy": {"model": str(tmp_path / "model"), "lora_rank": 0, "codec": "plain"},
            "sft": {
                "imitate": [str(tmp_path / "chats.jsonl")],
                "steps": 6,
                "batch": 1,
                **sections,
            },
        },
    )


def test_chats_alone_train_a_policy_without_any_task_and_a_resume_reads_the_copy(tmp_path: Path):
    write_tiny_model(tmp_path / "model")
    (tmp_path / "chats.jsonl").write_text(json.dumps({"messages": [USER, CHAT["messages"][4]]}))
    recipe = recipe_for(tmp_path)
    run = RunDir.create(recipe.runs / recipe.name, recipe=recipe.to_toml(), manifest={})

    def stop(done: int, _total: int, text: str) -> None:
        if done == 5 and text.startswith("sft"):
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run_recipe(recipe, run, stop)
    (tmp_path / "chats.jsonl").unlink()
    run_recipe(recipe, run, lambda *_: None)
    losses = [metrics["sft_loss"] for _, _, metrics in run.read("metrics")]
    assert len(losses) == 6 and losses[-1] < losses[0] - 0.5
    assert (run.path / "policy").is_dir()


def test_a_mistake_in_a_source_is_told_before_the_model_is_loaded(tmp_path: Path):
    write_tiny_model(tmp_path / "model")
    (tmp_path / "chats.jsonl").write_text("{")
    recipe = recipe_for(tmp_path)
    run = RunDir.create(recipe.runs / recipe.name, recipe=recipe.to_toml(), manifest={})
    said: list[str] = []
    with pytest.raises(RecipeError, match=r"chats\.jsonl, line 1 cannot be read"):
        run_recipe(recipe, run, lambda _done, _total, text: said.append(text))
    assert said == []


def test_a_stage_of_ones_own_runs_in_its_place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    (tmp_path / "their_stage.py").write_text(
        "def run(session, state):\n"
        "    weights = sum(p.numel() for p in session.policy.trainable.values())\n"
        "    session.run.append('metrics', [{'weights': weights}], state.stage, state.step)\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    write_tiny_model(tmp_path / "model")
    (tmp_path / "chats.jsonl").write_text(json.dumps({"messages": [USER, CHAT["messages"][4]]}))
    recipe = recipe_for(tmp_path, steps=1).model_copy(update={"stages": ("their_stage:run", "sft")})
    run = RunDir.create(recipe.runs / recipe.name, recipe=recipe.to_toml(), manifest={})
    run_recipe(recipe, run, lambda *_: None)
    assert [(phase, step) for phase, step, _ in run.read("metrics")] == [("their_stage", 0), ("sft", 0)]
    assert next(iter(run.read("metrics")))[2]["weights"] > 0
