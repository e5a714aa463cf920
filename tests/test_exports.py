"""Exports: trajectories that Harbor accepts, and a model directory that gives the same log-probabilities."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from woodshed.agent.tools import TOOLS
from woodshed.cli import app
from woodshed.engines.local import invariant
from woodshed.evals import atif
from woodshed.records import (
    Call,
    Flag,
    Hint,
    Observation,
    Patch,
    Rollout,
    RunError,
    Task,
    Turn,
    Verdict,
    to_json,
)
from woodshed.runs.folder import RunDir
from woodshed.tasks import folder

ROOT = Path(__file__).parent.parent
HOSTILE = "<script>\x1b[31m\udcff\u202e\0"


def turn(*calls: Call, text: str = "", observations: tuple[Observation, ...] = ()) -> Turn:
    return Turn(
        (1, 2, 3), 1, (4, 5), (-0.5, -0.25), ((7, 2),), "stop", text, calls, observations, None, 1.0, 0.5
    )


def make_run(path: Path, task: Task) -> RunDir:
    """One attempt: a good call, calls that cannot be read, an unknown tool, a turn without any call."""
    run = RunDir.create(
        path,
        recipe='name = "first"\nmodel = "tiny"\n[agent]\nmax_calls = 4\n',
        manifest={"woodshed": "9", "tools": [to_json(tool) for tool in TOOLS]},
    )
    run.keep_tasks("eval", [task.folder])
    good, odd = Call("0", "read_file", {"path": "a.py"}, "<a>"), Call("1", "", {}, HOSTILE, "unparseable")
    unknown = Call("2", "cat", {"path": HOSTILE}, "<cat>", "unknown_tool")
    seen = tuple(Observation(c.id, HOSTILE, c.error_kind, 0.1) for c in (good, odd, unknown))
    turns = (
        turn(good, odd, unknown, text=HOSTILE, observations=seen),
        turn(text="no call", observations=(Observation("", "error", "no_call"),)),
    )
    rollout = Rollout(
        f"eval-0-{task.name}-0", task.id, task.name, 0, 3, turns, Patch({}, diff="-a"), "max_turns", 4.0
    )
    hostile = Rollout("../../eval", "gone", "gone", 0, 3, turns[1:], Patch({}), "max_turns", 4.0)
    run.append("rollouts", [rollout, hostile], "eval", 0)
    run.append(
        "verdicts", [Verdict(rollout.id, task.id, "graded", 0.5, False, {"t::x": "failed"})], "eval", 0
    )
    run.append("hints", [Hint(rollout.id, 1, "no_call", "Reminder: call a tool.")], "eval", 0)
    run.append("flags", [Flag(rollout.id, "reads_tests", 0, "cat tests", 0.75)], "eval", 0)
    run.unlock()
    return run


@pytest.fixture
def exported(tiny_task: Task, tmp_path: Path) -> list[dict[str, Any]]:
    run = make_run(tmp_path / "first", tiny_task)
    result = CliRunner().invoke(app, ["export", str(run.path), "--to", "atif"])
    assert result.exit_code == 0, result.output
    assert f"2 trajectories in {run.path / 'atif'}" in result.stdout
    return [json.loads(path.read_text("utf-8")) for path in sorted((run.path / "atif").iterdir())]


def test_a_trajectory_holds_everything_at_its_place(exported: list[dict[str, Any]], tiny_task: Task):
    made = next(document for document in exported if document["trajectory_id"].startswith("eval-0-"))
    assert made["schema_version"] == "ATIF-v1.8" and made["agent"]["version"] == "9"
    assert [t["function"]["name"] for t in made["agent"]["tool_definitions"]] == [tool.name for tool in TOOLS]
    system, user, first, second = made["steps"]
    assert [step["step_id"] for step in made["steps"]] == [1, 2, 3, 4]
    assert "up to 4 calls" in system["message"] and user["message"] == tiny_task.instruction.strip()
    assert [call["function_name"] for call in first["tool_calls"]] == ["read_file", "cat"]
    assert first["tool_calls"][1]["extra"]["error_kind"] == "unknown_tool"
    assert [call["error_kind"] for call in first["extra"]["unreadable_calls"]] == ["unparseable"]
    sources = [seen.get("source_call_id") for seen in first["observation"]["results"]]
    assert sources == [first["tool_calls"][0]["tool_call_id"], None, first["tool_calls"][1]["tool_call_id"]]
    assert first["extra"]["flags"][0]["rule"] == "reads_tests"
    assert second["extra"]["hints"] == [{"detector": "no_call", "text": "Reminder: call a tool."}]
    assert (second["metrics"]["prompt_tokens"], second["metrics"]["cached_tokens"]) == (8, 5)
    assert second["metrics"]["completion_token_ids"] == [4, 5] and second["metrics"]["logprobs"] == [
        -0.5,
        -0.25,
    ]
    final = made["final_metrics"]
    assert (final["total_prompt_tokens"], final["total_completion_tokens"], final["total_steps"]) == (
        11,
        4,
        4,
    )
    assert final["extra"] == {"reward": 0.5, "solved": False, "is_void": False}
    assert made["extra"]["verdict"]["outcomes"] == {"t::x": "failed"} and made["extra"]["patch"] == "-a"


def test_hostile_text_is_data(exported: list[dict[str, Any]]):
    texts = json.dumps(exported)
    assert (
        "\\udcff" in texts.replace("\\\\udcff", "\\udcff")
        and "\udcff" not in json.loads(texts)[0]["steps"][2]["message"]
    )
    assert not list(Path("/").glob("eval*.json"))


def test_what_cannot_be_read_is_left_out_and_exits_with_1(tiny_task: Task, tmp_path: Path):
    run = make_run(tmp_path / "first", tiny_task)
    run.append("rollouts", [{"id": "of another version"}], "eval", 1)
    result = CliRunner().invoke(
        app, ["export", str(run.path), "--to", "atif", "--out", str(tmp_path / "out")]
    )
    assert result.exit_code == 1 and "left out: rollouts.jsonl, eval 1 part 0" in result.stderr
    assert len(list((tmp_path / "out").iterdir())) == 2
    with pytest.raises(RunError, match="holds no rollout"):
        empty = RunDir.create(tmp_path / "empty", recipe="", manifest={})
        atif.export(empty, tmp_path / "none", problems=[])
    result = CliRunner().invoke(app, ["export", str(run.path), "--to", "csv"])
    assert result.exit_code == 2 and "known formats are atif and hf" in result.output


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_harbor_accepts_the_trajectories(tiny_task: Task, tmp_path: Path):
    """Of the run above, and of the real runs that are here: scripts/quickstart leaves one."""
    runs = [make_run(tmp_path / "first", tiny_task)]
    runs += [RunDir.open(path.parent) for path in ROOT.glob("runs/*/rollouts.jsonl")]
    for number, run in enumerate(runs):
        atif.export(run, tmp_path / str(number), problems=[])
    folders = [str(tmp_path / str(number)) for number in range(len(runs))]
    environment = {**os.environ, "HARBOR_TELEMETRY": "off", "LITELLM_LOCAL_MODEL_COST_MAP": "True"}
    environment.pop("PYTHONPATH", None)
    done = subprocess.run(
        [ROOT / "scripts" / "validate-atif", *folders],
        capture_output=True,
        text=True,
        env=environment,
        timeout=1700,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    count = sum(len(list(Path(path).iterdir())) for path in folders)
    assert f"{count} of {count} trajectories are valid" in done.stdout


def test_the_exported_model_gives_the_same_logps(tiny_model_dir: Path, tiny_task: Task, tmp_path: Path):
    """An adapter is merged; transformers alone reads the folder, tokenizer and chat template with it."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from woodshed.learning.policy import Policy, PolicySettings

    policy, loaded = Policy.load(PolicySettings(model=str(tiny_model_dir), lora_rank=4), seed=0)
    with torch.no_grad():
        for weight in policy.trainable.values():
            weight.normal_(0, 0.05)  # a new adapter's second matrix is zero
    recipe = f'name = "tuned | <b>"\nnote = "a ``` b"\n[policy]\nmodel = "{tiny_model_dir}"\n'
    run = RunDir.create(tmp_path / "run", recipe=recipe, manifest={})
    run.keep_tasks("train", [tiny_task.folder])
    result = CliRunner().invoke(app, ["export", str(run.path), "--to", "hf"])
    assert result.exit_code == 2 and "has no final weights" in result.stderr
    policy.export(run.path / "policy")
    out = tmp_path / "model"
    result = CliRunner().invoke(app, ["export", str(run.path), "--to", "hf", "--out", str(out)])
    assert result.exit_code == 0, result.output
    again = AutoModelForCausalLM.from_pretrained(out)
    tokenizer = AutoTokenizer.from_pretrained(out)
    ids = torch.randint(3, 200, (2, 24), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        expected, found = (
            m(input_ids=ids).logits.float().log_softmax(-1) for m in (policy.model.to("cpu"), again)
        )
    assert (expected - found).abs().max() < 1e-4  # float32, merged or not
    assert tokenizer.chat_template == loaded.tokenizer.chat_template
    assert (out / "model.safetensors").is_file() and invariant.NAME not in (out / "config.json").read_text()
    card = (out / "README.md").read_text("utf-8")
    assert card.startswith("---\nlibrary_name: transformers\n") and "# tuned \\| \\<b\\>" in card
    assert "| tally | MIT | 1 | train |" in card and "no monitor ran" in card and "Not measured." in card
    result = CliRunner().invoke(app, ["export", str(run.path), "--to", "hf", "--out", str(out)])
    assert result.exit_code == 2 and "is not an empty folder" in result.stderr


def test_the_card_of_a_measured_run(tiny_task: Task, tmp_path: Path):
    from woodshed.evals import card

    run = make_run(tmp_path / "first", tiny_task)
    text = card.write(run, problems=[])
    assert "invalid-call rate" in text and "1 held-out tasks" not in text.replace("2 held-out tasks", "")
    assert "Hack rate (rollouts that a monitor flagged): 50.0%" in text
    assert "| sampled tokens | 6 |" in text and folder.load(tiny_task.folder).provenance["licence"] in text


@pytest.mark.parametrize("rank", [0, 4], ids=["whole weights", "an adapter"])
def test_what_a_run_trained_is_named_as_a_model(tiny_model_dir: Path, tmp_path: Path, rank: int):
    """`policy.model = RUN/policy` and `eval --model RUN/policy`, for whole weights as for adapters."""
    import torch

    from woodshed import settings
    from woodshed.evals.suite import SuiteSettings
    from woodshed.learning.policy import Policy, PolicySettings
    from woodshed.records import RecipeError

    trained, loaded = Policy.load(PolicySettings(model=str(tiny_model_dir), lora_rank=rank), seed=0)
    with torch.no_grad():
        for weight in trained.trainable.values():
            weight.normal_(0, 0.05, generator=torch.Generator().manual_seed(2))
    written = tmp_path / "run" / "policy"
    trained.export(written)
    named = PolicySettings(model=str(written), lora_rank=rank)
    again, reloaded = Policy.load(named, seed=1)
    assert (named.adapter, again.is_adapter) == ((str(written), True) if rank else ("", False))
    assert settings.validate(PolicySettings, named.model_dump()) == named, "a resume reads what was split"
    ids = torch.arange(3, 90)[None]
    with torch.no_grad():
        assert torch.equal(trained.model(input_ids=ids).logits, again.model(input_ids=ids).logits)
    assert reloaded.tokenizer.chat_template == loaded.tokenizer.chat_template
    measured = settings.read(SuiteSettings, None, [f"model={written}", "name=x", 'tasks=["t"]'])
    assert (measured.model, measured.adapter) == (named.model, named.adapter)
    if rank:
        with pytest.raises(RecipeError, match="is an adapter itself; merge it with `woodshed export`"):
            settings.read(PolicySettings, None, [f"model={written}", "adapter=other"])
