"""A tiny real repository and a real task made from it, shared by every test file that needs one."""

from __future__ import annotations

import importlib.metadata
import os
import shutil
import signal
import sys
from pathlib import Path
from typing import Any

import pytest

from woodshed import boundary
from woodshed.records import Environment, Task
from woodshed.tasks import folder


def pytest_configure() -> None:
    """A shell that starts the suite in the background has it ignore Ctrl-C, which some tests are about. Without a GPU
    Triton's kernels are interpreted, which it must know before it is imported."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    boundary.strict = True
    if not Path("/dev/nvidiactl").exists():
        os.environ.setdefault("TRITON_INTERPRET", "1")


LONGEST_FIRST = (
    *("test_making", "test_learning_distributed", "test_red_team", "test_harden", "test_resume"),
    *("test_starts", "test_derived", "test_synthesis", "test_taken_away", "test_ranks"),
    *("test_hostile", "test_shipped", "test_stubs", "test_leaks", "test_cheats", "test_measuring"),
    *("test_odd_sources", "test_cli", "test_gate", "test_growth", "test_business", "test_tasks"),
    *("test_muon", "test_parallel_distributed", "test_muon_distributed", "test_variants"),
)
"""Files whose tests take longest. A worker that begins one of them last would leave the others idle."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    order = {name: index for index, name in enumerate(LONGEST_FIRST)}
    items.sort(key=lambda item: order.get(item.path.stem, len(order)))


@pytest.fixture
def triton_interpreter(monkeypatch: pytest.MonkeyPatch) -> None:
    """Triton 3.6 makes loop bounds of arrays of one element, which NumPy 2.4 refuses."""
    from triton.runtime import interpreter  # pyright: ignore[reportMissingImports]

    patch = interpreter._patch_lang_tensor

    def patched(tensor: Any, scope: Any) -> None:
        patch(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))

    monkeypatch.setattr(interpreter, "_patch_lang_tensor", patched)


PYPROJECT = """\
[project]
name = "tally"
version = "1.0"

[tool.pytest.ini_options]
addopts = "-x --strict-markers"
testpaths = ["tests"]
"""
WORDS = '''\
"""Words of a text."""


def split(text):
    """Words in lower case, without punctuation."""
    words = (part.strip(".,;:!?").lower() for part in text.split())
    return [word for word in words if word]


def count(text):
    """How often each word occurs, in order of appearance."""
    found = {}
    for word in split(text):
        found[word] = found.get(word, 0) + 1
    return found
'''
STUBBED = WORDS[: WORDS.index("    found = {}")] + '    raise NotImplementedError("count")\n'
TABLE = '''\
"""Tables of words."""

from tally.words import count


def top(text, limit=3):
    """The most frequent words and their counts; ties in alphabetical order."""
    ranked = sorted(count(text).items(), key=lambda item: (-item[1], item[0]))
    return ranked[:limit]


def render(rows):
    """One line for each row, counts aligned."""
    width = max((len(word) for word, _ in rows), default=0)
    return "\\n".join(f"{word:<{width}} {number}" for word, number in rows)
'''
TEST_WORDS_VISIBLE = """\
import pytest

from tally.words import split


def test_split():
    assert split("One, two; TWO!") == ["one", "two", "two"]
"""
TEST_WORDS = (
    TEST_WORDS_VISIBLE.replace("import split", "import count, split")
    + """

@pytest.mark.parametrize(
    ("text", "expected"),
    [("a b a", {"a": 2, "b": 1}), ("Grüße, grüße!", {"grüße": 2}), pytest.param("", {}, id="no words: [] :: x")],
)
def test_count(text, expected):
    assert count(text) == expected


@pytest.mark.xfail
def test_count_knows_markup():
    assert count("<b>a</b>") == {"a": 1}
"""
)
TEST_TABLE = """\
from tally.table import render, top


def test_top(sample):
    assert top(sample, 2) == [("the", 3), ("sea", 2)]


def test_render():
    assert render([("a", 1), ("sea", 2)]) == "a   1\\nsea 2"
"""
CONFTEST = """\
import pytest


@pytest.fixture
def sample():
    return "The sea, the sea; the waves."
"""
FILES = {
    "pyproject.toml": PYPROJECT,
    "tally/__init__.py": '"""Counting words."""\n',
    "tally/words.py": WORDS,
    "tally/table.py": TABLE,
    "tests/conftest.py": CONFTEST,
    "tests/test_words.py": TEST_WORDS,
    "tests/test_table.py": TEST_TABLE,
}
FAIL_TO_PASS = (
    "tests/test_table.py::test_top",
    "tests/test_words.py::test_count[Gr\\xfc\\xdfe, gr\\xfc\\xdfe!-expected1]",
    "tests/test_words.py::test_count[a b a-expected0]",
    "tests/test_words.py::test_count[no words: [] :: x]",
)
PASS_TO_PASS = ("tests/test_table.py::test_render", "tests/test_words.py::test_split")


def tiny_environment() -> Environment:
    """pytest and one plugin, in the versions that run this suite: nothing is looked up in an index once built."""
    names = ("iniconfig", "packaging", "pluggy", "pygments", "pytest", "pytest-timeout")
    return Environment(
        python=f"{sys.version_info.major}.{sys.version_info.minor}",
        requirements=tuple(f"{name}=={importlib.metadata.version(name)}" for name in names),
        packages=("tally",),
        distribution="tally==1.0",
    )


@pytest.fixture(scope="session")
def tiny_repository(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A package of two modules with eight tests: a fixture from conftest, ids with spaces and escapes, an xfail."""
    root = tmp_path_factory.mktemp("tally")
    for path, text in FILES.items():
        (root / path).parent.mkdir(exist_ok=True)
        (root / path).write_text(text, encoding="utf-8")
    return root


@pytest.fixture(scope="session")
def tiny_task(tiny_repository: Path, tmp_path_factory: pytest.TempPathFactory) -> Task:
    """A valid task on disk: `tally.words.count` is a stub, and the visible tests do not mention it."""
    root = tmp_path_factory.mktemp("tasks")
    workspace = root / "workspace"
    shutil.copytree(tiny_repository, workspace)
    (workspace / "tally/words.py").write_text(STUBBED, encoding="utf-8")
    (workspace / "tests/test_words.py").write_text(TEST_WORDS_VISIBLE, encoding="utf-8")
    task = Task(
        id="",
        name="tally-stub-count",
        folder=root,
        instruction="Implement `count` in tally/words.py, lines 10 to 12.\n\nHow often each word occurs.\n",
        environment=tiny_environment(),
        allowed_paths=("tally",),
        fail_to_pass=FAIL_TO_PASS,
        pass_to_pass=PASS_TO_PASS,
        operator="stub",
        level=1,
        target_path="tally/words.py",
        target_symbol="count",
        target_lines=(10, 12),
        test_command="python -m pytest -q tests",
        verify_timeout_s=30.0,
        provenance={"source": "tally", "licence": "MIT"},
    )
    tests = {path: text.encode() for path, text in FILES.items() if path.startswith("tests/")}
    return folder.write(
        task, root / task.name, workspace=workspace, tests=tests, gold={"tally/words.py": WORDS.encode()}
    )


@pytest.fixture(scope="session")
def tiny_model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Hugging Face folder with a random 2-layer Llama, its tokenizer and chat template."""
    from tiny_model import write_tiny_model  # imports torch

    return write_tiny_model(tmp_path_factory.mktemp("model") / "tiny")
