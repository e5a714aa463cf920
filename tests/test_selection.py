"""Tests as the repository runs them: its own selection, options of whoever makes the tasks, and variables."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from woodshed.records import Environment, TaskError
from woodshed.synthesis import SynthesisSettings, make, selection
from woodshed.tasks import environment


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ({"pytest.ini": "[pytest]\naddopts = -ra -m 'not slow' --cov=x -n auto\n"}, ["-m", "not slow"]),
        ({"setup.cfg": "[tool:pytest]\naddopts = -mfast -k=web\n"}, ["-m", "fast", "-k", "web"]),
        (
            {
                "pyproject.toml": "[tool.pytest.ini_options]\naddopts = ['--ignore', 'old', '--deselect=a.py::b']\n"
            },
            ["--ignore=old", "--deselect=a.py::b"],
        ),
        (
            {
                "tox.ini": "[pytest]\naddopts = --strict-markers --db sqlite --fast --slow -q\n",
                "tests/conftest.py": "def pytest_addoption(parser):\n    group = parser.getgroup('x')\n"
                "    group.addoption('--db', default='x')\n"
                "    parser.addoption('--fast', '-F', action='store_true')\n",
            },
            ["--db=sqlite", "--fast"],
        ),
        ({"pytest.ini": "[pytest]\naddopts = -m\n", "conftest.py": "def (:\n"}, ["-m", ""]),
        ({}, []),
    ],
)
def test_options_of_addopts_that_select_tests(tmp_path: Path, files: dict[str, str], expected: list[str]):
    for path, text in files.items():
        (tmp_path / path).parent.mkdir(exist_ok=True)
        (tmp_path / path).write_text(text)
    assert list(selection.of_addopts(tmp_path)) == expected
    (tmp_path / "test_a.py").write_text("def test_x(): pass")
    asked = selection.options(tmp_path, ["-k", "not web"], ["test_a.py::test_x"])
    assert list(asked) == [*expected, "-k", "not web", "--deselect=test_a.py::test_x"]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (
            {"pytest_args": ["--maxfail=1"]},
            "--pytest-args --maxfail=1: cannot be used, as every test has to run",
        ),
        ({"pytest_args": ["-n4"]}, "--pytest-args -n4: cannot be used, as tests run in one process"),
        ({"pytest_args": ["-q", "--tb=no", "tests/unit"]}, "--pytest-args tests/unit: options only"),
        ({"env": ["NOBODY_SET_THIS"]}, "--env NOBODY_SET_THIS: not set here. export NOBODY_SET_THIS=VALUE"),
        ({"env": ["PYTHONPATH=/x"]}, "--env PYTHONPATH: cannot be given to tests"),
        ({"env": ["LD_PRELOAD"]}, "--env LD_PRELOAD: cannot be given to tests"),
        ({"env": ["A-B=1"]}, "--env A-B: cannot be given to tests"),
    ],
)
def test_what_cannot_be_asked_for_is_refused_before_anything_is_fetched(settings, message, tmp_path: Path):
    with pytest.raises(TaskError) as raised:
        make([str(tmp_path / "none")], tmp_path / "out", SynthesisSettings(**settings))
    assert str(raised.value).startswith(message)


def test_a_deselected_test_lies_in_the_repository(tmp_path: Path):
    with pytest.raises(TaskError, match=r"--deselect test_b\.py::test_x: the repository has no test_b\.py"):
        selection.options(tmp_path, [], ["test_b.py::test_x"])
    (tmp_path / "test_b.py").write_text("class TestIt:\n    pass\n")
    assert selection.options(
        tmp_path, [], ["test_b.py", "test_b.py::TestI"]
    )  # pytest takes what ids begin with
    with pytest.raises(TaskError, match=r"test_b\.py names no TestThat; give the id"):
        selection.options(tmp_path, [], ["test_b.py::TestThat::test_x[1]"])


def test_a_task_reads_only_variables_that_were_allowed_here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """A stranger's task names a variable of whoever runs it."""
    monkeypatch.setenv("WOODSHED_CACHE", str(tmp_path))
    monkeypatch.delenv("WOODSHED_ENV", raising=False)
    asking = Environment("3.11", (), ("x",), variables=("ACME_KEY", "ACME_URL=http://x=1", "EMPTY="))
    with pytest.raises(TaskError, match="ACME_KEY, which is not set here: export ACME_KEY=VALUE"):
        environment.variables(asking)
    monkeypatch.setenv("ACME_KEY", "secret")
    with pytest.raises(
        TaskError, match=r"reads ACME_KEY from your environment.*export WOODSHED_ENV=ACME_KEY"
    ):
        environment.variables(asking)
    environment.allow_variable("ACME_KEY")
    environment.allow_variable("ACME_KEY")
    known = {"ACME_KEY": "secret", "ACME_URL": "http://x=1", "EMPTY": "", "PYTHONPATH": "/workspace"}
    assert environment.variables(asking) == known
    assert (tmp_path / "variables").read_text() == "ACME_KEY\n"  # the name, never the value
    for entry in ("LD_PRELOAD=/workspace/x.so", "PYTEST_ADDOPTS=-x", "PATH=.", "A B=1", "A\0=1"):
        with pytest.raises(TaskError, match="not a variable that tests may be given"):
            environment.prepare(replace(asking, variables=(entry,)))
