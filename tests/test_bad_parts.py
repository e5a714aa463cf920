"""Every kind of part that a recipe or a command names by import path: wrong ones cost one clear message."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from scripted import NO_ENVIRONMENT, calc_task, play, renderer

from woodshed import boundary, curriculum, feedback, grading, parts
from woodshed.agent.attempt import AgentSettings, Attempt
from woodshed.curriculum import CurriculumSettings
from woodshed.engines.engine import SampleRequest, sample_all
from woodshed.engines.scripted import ScriptedEngine
from woodshed.experience import regrade
from woodshed.feedback import rewards
from woodshed.learning import divergences
from woodshed.learning.estimators import WrittenTokens, loss_of
from woodshed.learning.loss_settings import LossSettings
from woodshed.records import Group, Patch, RecipeError, RunError, Task, Turn
from woodshed.runs.folder import RunDir
from woodshed.sandbox import SandboxSettings, SandboxSpec, open_sandbox
from woodshed.settings import validate
from woodshed.stages import preflight
from woodshed.stages.recipe import Recipe
from woodshed.tasks import formats, workspace
from woodshed.tokens.codec import CODECS, refuse_lossy

KINDS: dict[str, Any] = {
    "detector": {"feedback": {"detectors": ["NAME"]}},
    "reward term": {"rewards": {"terms": {"NAME": 1.0}}},
    "estimator": {"loss": {"estimator": "NAME"}},
    "divergence": {"feedback": {"divergence": "NAME"}},
    "engine": {"engine": {"kind": "NAME"}},
    "sandbox provider": {"sandbox": {"provider": "NAME"}},
    "stage": {"stages": ["NAME"]},
    "curriculum": {"curriculum": {"kind": "NAME"}},
    "codec": {"policy": {"codec": "NAME"}},
    "tool": {"agent": {"tools": {"offered": ["NAME", "finish"]}}},
    "verifier": {"grading": {"verifier": "NAME"}},
    "task format": None,
}
"""Kind of part to the settings of a recipe that name one; a task format is named by a command."""


def named(tree: Any, name: str) -> Any:
    if isinstance(tree, dict):
        return {key.replace("NAME", name): named(value, name) for key, value in tree.items()}
    if isinstance(tree, list):
        return [named(value, name) for value in tree]
    return name if tree == "NAME" else tree


@pytest.fixture
def own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The file of the module `mine` in the working folder."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setattr(boundary, "strict", False)
    parts._imported.cache_clear()
    yield tmp_path / "mine.py"
    sys.modules.pop("mine", None)


def check(kind: str, name: str) -> None:
    """What `woodshed train` or `woodshed tasks import` does first."""
    if KINDS[kind] is None:
        formats.FORMAT.resolve(name)
    else:
        preflight.refuse(validate(Recipe, {"name": "r", **named(KINDS[kind], name)}))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("text", "name", "message"),
    [
        ("", "no_such_module:part", "there is no module 'no_such_module'"),
        ("PART = 3", "mine:parts", "has no 'parts'; it has PART"),
        ("part = 3", "mine:part", "is 3, which cannot be called|has no '"),
        (
            "def part(one, two, three, *, more): ...",
            "mine:part",
            r"takes \(one, two, three, \*, more\), and it is called with|has no '",
        ),
        ("class part: ...", "mine:part", "is a class; name an object of it|takes .*and it is called with"),
        ("part = 1 / 0", "mine:part", "cannot be imported: ZeroDivisionError: .*mine.py, line 1"),
    ],
    ids=["no module", "no attribute", "not callable", "signature", "class", "raises when imported"],
)
def test_a_part_that_cannot_be_used_is_refused_by_one_message(
    kind: str, text: str, name: str, message: str, own: Path
):
    own.write_text(text)
    with pytest.raises(RecipeError, match=message) as raised:
        check(kind, name)
    assert f"{kind} {name!r}" in str(raised.value) and "\n" not in str(raised.value)


TOKENS = WrittenTokens(
    torch.tensor([[-1.0, -2.0]], requires_grad=True),
    torch.tensor([[-1.0, -2.0]]),
    torch.ones(1, 2),
    torch.ones(1, 2),
    num_rollouts=1,
    message_tokens=4,
)
TEACHER = torch.tensor([0.25, 0.75]).log()


def loss() -> None:
    loss_of(TOKENS, LossSettings(estimator="mine:part"))


def divergence() -> None:
    divergences.divergence(TEACHER, TEACHER, "mine:part")


def draw() -> None:
    tasks: list[Any] = [replace(TASK, id=f"{number}") for number in range(3)]
    choice = curriculum.create(tasks, CurriculumSettings(kind="mine:part"), seed=0, attempts=2)
    curriculum.draw(choice, tasks, 2)


def opened() -> None:
    SandboxSettings(provider="mine:part").create().open(SandboxSpec(()))


def codec() -> None:
    refuse_lossy(parts.resolve("codec", "mine:part", {}), AgentSettings().tools.specs)


def tasks_read() -> None:
    list(formats.import_tasks("mine:part", Path("mine.py"), Path("out")))


TASK = Task("1", "t", Path(), "", NO_ENVIRONMENT, (), (), (), "", 1, "", "", (1, 1), "")

CHOICE = """
class Choice:
    repeated = 0
    def __init__(self, tasks): self.tasks = tasks
    def draw(self, count): return {draw}
    def why_dry(self, count): return ""
    def observe(self, verdicts, rollouts=()): pass
    def quarantine(self, tasks, reason): pass
    def counts(self): return {{}}
    def state(self): return {state}
    def restore(self, state): pass
def part(tasks, settings, *, seed, attempts, revalidate): return {made}
"""


def choice(draw: str = "self.tasks[:count]", state: str = "{}", made: str = "Choice(tasks)") -> str:
    return CHOICE.format(draw=draw, state=state, made=made)


CODEC = """
import json
from woodshed.tokens.codec import CODECS
class Own:
    name = "own"
    def describe(self, tools): return {describe}
    def parse(self, text, tools, *, truncated=False): return {parse}
    def format(self, name, arguments, tools): return CODECS["json"].format(name, arguments, tools)
part = Own()
"""


@pytest.mark.parametrize(
    ("use", "text", "message"),
    [
        (
            loss,
            "def part(tokens, settings): return 3.0",
            "estimator 'mine:part' returned 3.0; it must return a sc",
        ),
        (loss, "def part(tokens, settings): return tokens.logp_BN", "returned tensor.* must return a scalar"),
        (loss, "def part(tokens, settings): return tokens.mask_BN.sum()", "that depends on logp_BN"),
        (
            loss,
            "def part(tokens, settings): return tokens.nothing",
            "estimator 'mine:part' failed: AttributeError",
        ),
        (divergence, "def part(student, teacher, beta): return 0", "divergence 'mine:part' returned 0"),
        (divergence, "def part(student, teacher, beta): return student.sum()", r"of the shape \(2,\)"),
        (
            divergence,
            "def part(student, teacher, beta): return beta[0]",
            "'mine:part' failed: TypeError.*line 1",
        ),
        (draw, choice(made="None"), "curriculum 'mine:part' opened a NoneType, which has no 'repeated'"),
        (draw, choice(state="{1, 2}"), "has a state that is not JSON"),
        (draw, choice(state="[]"), r"returned \[\]; it must return a dict as its state"),
        (draw, choice(draw="self.tasks[:1]"), "it must return 2 different tasks of this run"),
        (draw, choice(draw="[self.tasks[0]] * 2"), "it must return 2 different tasks of this run"),
        (draw, choice(draw="None"), "returned None; it must return 2 different tasks"),
        (draw, choice(draw="1 / 0"), "curriculum 'mine:part' failed: ZeroDivisionError.*line 5"),
        (
            opened,
            "class P:\n    watches = False\n    def open(self, spec): return 3\npart = P()",
            "sandbox provider 'mine:part' opened a int, which has no 'workspace'",
        ),
        (
            opened,
            "class P:\n    watches = False\n    def open(self, spec): return spec.no\npart = P()",
            "'mine:part' raised AttributeError in open",
        ),
        (
            codec,
            CODEC.format(describe="''", parse="('', (), 'no_call')"),
            r"and reads \[\] in it; `parse` must give",
        ),
        (
            codec,
            CODEC.format(describe="3", parse="CODECS['json'].parse(text, tools)"),
            "`describe` return text",
        ),
        (
            codec,
            CODEC.format(describe="''", parse="None"),
            "cannot write and read a call of read_file.*TypeError",
        ),
        (tasks_read, "def part(path): return 3", "task format 'mine:part' returned 3"),
        (tasks_read, "def part(path): yield 3", "returned 3; it must return an iterable of ForeignTask"),
        (tasks_read, "def part(path): yield path.no", "task format 'mine:part' failed: AttributeError"),
    ],
)
def test_a_part_that_does_something_else_ends_the_run_by_one_message(
    use: Any, text: str, message: str, own: Path
):
    own.write_text(text)
    with pytest.raises(RecipeError, match=message), parts.blamed():
        use()


@pytest.fixture
def task(tmp_path: Path) -> Task:
    return calc_task(tmp_path / "calc")


@pytest.mark.parametrize(
    ("body", "said"),
    [
        ("raise KeyError(1)", "KeyError in part"),
        ("yield 3", "TypeError in _faults: yielded 3; it must yield a Fault"),
        ("yield Fault(9)", "must yield a Fault of one of 1 turns"),
        ("return None\n    yield", ""),
    ],
)
def test_a_detector_that_fails_costs_its_hints_only(body: str, said: str, own: Path, task: Task):
    own.write_text(
        "from woodshed.feedback import Fault, with_hint\n@with_hint('be careful.')\n"
        f"def part(task, rollout):\n    {body}\n"
    )
    turn = Turn((), 0, (), (), (), "stop", "", (), (), "no_call")
    rollout = replace(play(task), turns=(turn,))
    look = feedback.named(["mine:part"])

    def hints() -> list[str]:
        written = feedback.write([Group(task.id, (rollout,))], [task], CODECS["plain"], detectors=look)
        return [hint.detector for hint in written]

    if not said:
        assert hints() == ["no_call"]
        return
    with pytest.warns(UserWarning, match=f"detector 'mine:part' could not read the attempt: .*{said}"):
        assert hints() == ["no_call"]


@pytest.mark.parametrize("result", ["'three'", "None", "float('nan')", "1 / 0"])
def test_a_reward_term_that_fails_never_pays(result: str, own: Path, task: Task):
    own.write_text(f"def part(task, rollout):\n    return {result}\n")
    rollout = play(task)
    with pytest.warns(UserWarning, match="a reward term could not be counted"):
        paid = rewards.auxiliary(task, rollout, {"mine:part": 0.5})
    assert paid == {"mine:part": 0.0}


TOOL = """
from woodshed.agent.tools import Tool
from woodshed.tokens.schema import ToolSpec
def run(sandbox, settings, path): return {result}
SCHEMA = {{"type": "object", "properties": {{"path": {{"type": "string"}}}}, "required": ["path"]}}
part = Tool(ToolSpec({name!r}, "Look.", SCHEMA, ("path",), example={example}), {run})
"""


def tool(result: str = "''", name: str = "look", example: str = "{'path': 'a'}", run: str = "run") -> str:
    return TOOL.format(result=result, name=name, example=example, run=run)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (tool(example="{}"), "has an example that does not fit its parameters: argument 'path' is missing"),
        (tool(run="lambda sandbox: ''"), r"has a 'run' that takes \(sandbox\), and it is called with"),
        (tool(run="3"), "has a 'run' that is 3, which cannot be called"),
        (tool(name="finish"), "another offered tool is named 'finish', too"),
        (tool().replace('("path",)', '("file",)'), "writes 'file' in its plain form"),
    ],
)
def test_a_tool_that_cannot_be_called_as_it_says_is_refused(text: str, message: str, own: Path):
    own.write_text(text)
    with pytest.raises(RecipeError, match=message):
        check("tool", "mine:part")


def test_what_a_tool_raises_is_read_by_the_policy_and_no_fault_of_its_call(own: Path, task: Task):
    settings = validate(AgentSettings, {"tools": {"offered": ["mine:part", "finish"]}, "turn_tokens": 64})
    own.write_text(tool(result="1 / len(path[1:])"))
    (turn, *_) = play(task, "<call>look a</call>", settings=settings).turns
    (seen,) = turn.observations
    assert seen.text == "error: look failed: ZeroDivisionError in run: division by zero"
    assert seen.error_kind == "nonzero_exit" and turn.error_kind is None
    (turn, *_) = play(task, "<call>shell ls</call>", settings=settings).turns
    assert turn.error_kind == "unknown_tool" and "the tools are look, finish" in turn.observations[0].text
    with pytest.raises(RecipeError, match=r"tool 'look' returned 0.5; it must return the text"):
        play(task, "<call>look abc</call>", settings=settings)


@pytest.mark.parametrize(
    ("result", "message"),
    [("None", "verifier 'mine:part' returned None; it must return a Verdict on task"), ("1 / 0", "")],
)
def test_a_verifier_that_fails_voids_the_verdict(result: str, message: str, own: Path, task: Task):
    own.write_text(
        f"class V:\n    def grade(self, task, patch, sandboxes):\n        return {result}\npart = V()\n"
    )
    settings = grading.GradingSettings(verifier="mine:part")
    if message:
        with pytest.raises(RecipeError, match=message):
            grading.grade(task, Patch({}), settings=settings)
        return
    verdict = grading.grade(task, Patch({}), settings=settings)
    assert verdict.status == "invalid" and "verifier 'mine:part' failed: ZeroDivisionError" in verdict.detail


def test_grading_again_imports_a_verifier_only_if_the_person_names_it(tmp_path: Path):
    recipe = validate(Recipe, {"name": "r", "grading": {"verifier": "theirs:part"}})
    run = RunDir.create(tmp_path / "run", recipe=recipe.to_toml(), manifest={})
    with pytest.raises(RunError, match=r"was graded by 'theirs:part'.*verifier=theirs:part if you trust it"):
        regrade.settings_of(run)
    assert regrade.settings_of(run, ["verifier=theirs:part"]).verifier == "theirs:part"


def test_a_codec_that_breaks_on_a_message_costs_that_turn(task: Task, monkeypatch: pytest.MonkeyPatch):
    words = renderer()
    sample = sample_all(ScriptedEngine(words, ["<call>finish</call>"]), [SampleRequest((1,), 64, 0)])[0]
    monkeypatch.setattr(boundary, "strict", False)
    monkeypatch.setattr(type(words.codec), "parse", lambda *_, **__: 1 / 0)
    with open_sandbox(SandboxSpec((workspace(task),))) as sandbox:
        attempt = Attempt(task, sandbox, words, AgentSettings(), rollout_id="r")
        with pytest.warns(UserWarning, match="the codec could not read a message: ZeroDivisionError"):
            attempt.act(sample)
    assert [turn.error_kind for turn in attempt.turns] == ["unparseable"]
