"""Every command of the README starts: its own lines, with a tiny model and repository in place of what they name.

A new command in a code block or in the table of verbs fails here until `STARTS` says how it is tried.
"""

from __future__ import annotations

import ast
import dataclasses
import importlib.util
import itertools
import os
import pty
import re
import select
import shlex
import shutil
import subprocess
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

import pytest
import typer.main
from test_docs import blocks
from tiny_model import write_tiny_model
from typer.testing import CliRunner, Result

import woodshed
from woodshed.cli import app
from woodshed.records import Task
from woodshed.runs import machine
from woodshed.tasks import folder

ROOT = Path(__file__).parents[1]
README = ROOT / "README.md"
TINY = [
    "policy.model=model",
    "policy.adapter=",
    "policy.codec=plain",
    "tasks.heldout=['tasks/quickstart']",
    "tasks.heldout_share=0",
    "rl.steps=1",
    "rl.tasks_per_step=1",
    "agent.max_turns=1",
    "agent.turn_tokens=8",
    "rollout.attempts=2",
]
WARMUP = ["--model", "model", "policy.codec=plain", "sft.steps=1", "tasks.heldout=['tasks/quickstart']"]
WARMUP += ["tasks.heldout_share=0", "agent.max_turns=1", "agent.turn_tokens=8"]
ELSEWHERE = {"train": "the world of the others", "view": "a terminal", "serve": "tests/test_serve.py"}
"""Verbs that are started by other tests, and where."""
STARTS: dict[str, Sequence[str]] = {
    "doctor": [],
    "init": ["--model", "model"],
    "warmup": ["tasks/quickstart", *WARMUP],
    "solve": [
        "shop",
        "count words",
        "--policy",
        "model",
        "--yes",
        "agent.max_turns=1",
        "agent.turn_tokens=8",
    ],
    "tasks make": ["--limit", "1"],
    "tasks check": [],
    "tasks stats": ["tasks/quickstart"],
    "tasks leaks": ["tasks/quickstart", "--own"],
    "tasks attack": ["tasks/quickstart", "--variants", "1"],
    "tasks harden": ["tasks/quickstart", "--out", "children", "--operators", "H9", "--limit", "1"],
    "tasks import": ["reader:read", "tasks/quickstart", "--out", "imported"],
    "tasks export": ["tasks/quickstart", "--out", "tasks.jsonl"],
    "eval": ["--model", "model", "--adapter", "", "agent.max_turns=1", "agent.turn_tokens=8"],
    "eval compare": ["runs/by-hand", "runs/by-hand"],
    "eval costs": ["runs/by-hand"],
    "train": TINY,
    "variants": ["variants.toml"],
    "settings": ["teacher"],
    "grade": ["runs/by-hand"],
    "report": [],
    "view": [],
    "export": ["runs/by-hand", "--to", "hf"],
    "monitor bench": ["--cases", "cases.jsonl"],
}
"""Verb to what is appended to its line."""
ARMS = """
name = "tiny"
[variants]
only = []
[policy]
model = "model"
lora_rank = 2
codec = "plain"
[tasks]
train = ["tasks/quickstart"]
heldout = ["tasks/quickstart"]
[rl]
steps = 1
tasks_per_step = 1
[agent]
max_turns = 1
turn_tokens = 8
[rollout]
attempts = 2
"""


HALVES = {
    "halves.py": "def twice(x):\n    return 2 * x\n\n\ndef half(x):\n    return x / 2\n",
    "test_halves.py": "from halves import half, twice\ndef test_twice(): assert twice(2) == 4\n"
    "def test_half(): assert half(2) == 1\n",
}
"""The repository of which a task is made: so small that no library holds its like."""
READER = """
from woodshed.tasks import folder
from woodshed.tasks.formats import ForeignTask
from woodshed.tasks.paths import tree

def read(path):
    for task in folder.load_set(path):
        workspace = {name: file.read_bytes() for name, file in tree(folder.workspace(task))}
        gold = {name: text and text.encode() for name, text in folder.gold_patch(task).files.items()}
        tests, ids = folder.protected_files(task), (task.fail_to_pass, task.pass_to_pass)
        yield ForeignTask(task.name, task.instruction, task.environment, workspace, tests, gold, *ids)
"""


def verb_of(words: Sequence[str]) -> str:
    """The verb that a command line names: "tasks make" of `woodshed tasks make X`."""
    command, found = typer.main.get_command(app), []
    for word in words:
        command = getattr(command, "commands", {}).get(word)
        if command is None:
            break
        found.append(word)
    return " ".join(found)


def typed() -> dict[str, list[str]]:
    """Verb to its line in the README, as words: the last of code blocks, else that of the table of verbs."""
    lines = re.findall(r"^\| `(woodshed [^`]*)` \|", README.read_text("utf-8"), re.M)
    lines += [line for line in blocks(README) if line.startswith("woodshed ")]
    split = [shlex.split(line, comments=True)[1:] for line in lines]
    return {verb_of(words): words for words in split}


def start(words: Sequence[str]) -> Result:
    return CliRunner().invoke(app, list(words))


@pytest.fixture(scope="module")
def world(tiny_task: Task, tiny_repository: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder in which every line of the README finds what it names, and in which its `train` line was run."""
    root = tmp_path_factory.mktemp("world")
    (root / "recipes").symlink_to(ROOT / "recipes")
    (root / "variants.toml").write_text(ARMS)
    (root / "cases.jsonl").write_text("")
    (root / "reader.py").write_text(READER)
    write_tiny_model(root / "model")
    folder.write(
        dataclasses.replace(tiny_task, id="", test_command="python -m pytest -q tests/test_words.py"),
        root / "tasks" / "quickstart" / tiny_task.name,
        workspace=tiny_task.folder / "environment" / "workspace",
        tests=folder.protected_files(tiny_task),
        gold={path: (text or "").encode() for path, text in folder.gold_patch(tiny_task).files.items()},
    )
    for path, text in HALVES.items():
        (root / "pypi:toolz==1.2.0" / path).parent.mkdir(exist_ok=True)
        (root / "pypi:toolz==1.2.0" / path).write_text(text)
    shutil.copytree(tiny_repository, root / "shop")
    for words in (
        ["init", "-q"],
        ["add", "."],
        ["-c", "user.name=a", "-c", "user.email=a@b.c", "commit", "-qm", "a"],
    ):
        subprocess.run(["git", *words], cwd=root / "shop", check=True)
    before = Path.cwd()
    os.chdir(root)
    try:
        trained = start([*typed()["train"], *STARTS["train"]])
        assert trained.exit_code == 0, trained.output
    finally:
        os.chdir(before)
    return root


@pytest.mark.parametrize("verb", [verb for verb in typed() if verb not in ELSEWHERE])
def test_every_command_of_the_first_page_starts(verb: str, world: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(world)
    monkeypatch.syspath_prepend(world)
    assert verb in STARTS, f"{verb}: say in STARTS how this command is tried"
    words = [word.replace("pypi:", "./pypi:").replace("~/", "./") for word in typed()[verb]]
    if verb == "tasks make":
        words[words.index("tasks/quickstart")] = "tasks/made"
    done = start([*words, *STARTS[verb]])
    assert done.exit_code == 0, f"{done.output}\n{done.exception!r}"
    if verb == "variants":
        assert "runs/tiny-only-0: woodshed train variants.toml --variant only seed=0" in done.stdout
        assert re.search(r"^only +1 +invalid-call rate", done.stdout, re.M)
        again = start([*words, *STARTS[verb]])
        assert again.exit_code == 0 and "runs/tiny-only-0: already finished" in again.stdout


def test_the_viewer_starts_at_a_terminal(world: Path):
    """It needs one, so it gets one. What keys do there stands in test_view."""
    ours, theirs = pty.openpty()
    with subprocess.Popen(
        [*machine.PROGRAM, *typed()["view"], *STARTS["view"]],
        cwd=world,
        stdin=theirs,
        stdout=theirs,
        stderr=theirs,
        env=os.environ | {"TERM": "xterm", "COLUMNS": "100", "LINES": "40", "PYTHONPATH": str(ROOT)},
    ) as process:
        os.close(theirs)
        shown, deadline = b"", time.monotonic() + 40
        while b"keys" not in shown and process.poll() is None and time.monotonic() < deadline:
            if select.select([ours], [], [], 0.2)[0]:
                with suppress(OSError):  # the terminal goes with its last user
                    shown += os.read(ours, 65536)
        ended = process.poll()
        process.kill()
    os.close(ours)
    assert b"keys" in shown and ended is None, shown[-500:]  # the keys at its foot


def test_the_table_of_starts_names_no_verb_that_is_gone():
    assert set(STARTS) | {"serve"} == set(typed()), "README and STARTS name the same verbs"


def started() -> list[tuple[str, str]]:
    """File and module wherever the package starts one by name: "-m" before a string in a list, tuple or call."""
    found = []
    for path in sorted((ROOT / "woodshed").rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text("utf-8"))):
            words = node.elts if isinstance(node, (ast.List, ast.Tuple)) else getattr(node, "args", [])
            values = [getattr(word, "value", None) for word in words] if isinstance(words, list) else []
            for flag, module in itertools.pairwise(values):
                if flag == "-m" and isinstance(module, str) and not module.startswith("-"):
                    found.append((path.relative_to(ROOT).as_posix(), module))
    return found


TRIED = {
    "woodshed.engines.guard": "tests/test_servers.py",
    "woodshed.synthesis.leaks.scanner": "tests/test_leaks.py",
    "woodshed.synthesis.leaks.exploit": "tests/test_leaks.py",
    "woodshed.synthesis.leaks.collected": "tests/test_odd_sources.py",
}
"""Modules of ours that are started by name, and the test that starts them."""
THEIRS = {
    "pip",
    "venv",
    "compileall",
    "pytest",
    "torch.distributed.run",
    "vllm.entrypoints.openai.api_server",
}


def test_nothing_is_started_by_a_name_that_no_test_starts():
    """The program itself is started as `machine.PROGRAM`, which the tests above run; a renamed module fails here."""
    found = started()
    assert found
    for path, module in found:
        assert module in {*TRIED, *THEIRS}, f"{path} starts {module}: name the test that does so too"
        if module in TRIED:
            assert importlib.util.find_spec(module) is not None, f"{path} starts {module}, which is not there"
    assert set(TRIED) <= {module for _, module in found}
    assert importlib.util.find_spec(f"{woodshed.__name__}.__main__") is not None
    assert machine.PROGRAM[1:] == ("-m", "woodshed")


@pytest.mark.parametrize(
    "module",
    sorted(
        {
            name
            for path in [
                *ROOT.glob("*.md"),
                *(ROOT / "docs").glob("*.md"),
                *(ROOT / "woodshed").rglob("*.py"),
            ]
            for name in re.findall(r"python -m (woodshed[\w.]*)", path.read_text("utf-8"))
        }
    ),
)
def test_modules_that_documents_start_are_programs(module: str):
    spec = importlib.util.find_spec(module)
    assert spec is not None, module
    if spec.submodule_search_locations is not None:
        spec = importlib.util.find_spec(f"{module}.__main__")
    assert spec is not None and spec.origin is not None
    assert 'if __name__ == "__main__":' in Path(spec.origin).read_text("utf-8")
