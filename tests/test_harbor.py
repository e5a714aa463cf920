"""Harbor tasks made elsewhere: what a sandbox can be like is read, proven and graded; the rest is refused by name."""

from __future__ import annotations

import dataclasses
import importlib.metadata
import platform
from pathlib import Path

import pytest
from typer.testing import CliRunner

from woodshed import grading, synthesis
from woodshed.cli import app
from woodshed.records import Patch, Task, TaskError
from woodshed.sandbox import BUBBLEWRAP
from woodshed.tasks import folder, harbor
from woodshed.tasks.solution import solved

PYTHON = ".".join(platform.python_version_tuple()[:2])
DOCKERFILE = f"""\
# a Python with one package
FROM python:{PYTHON}-slim
WORKDIR /workspace
RUN pip install --no-cache-dir \\
    pytest=={importlib.metadata.version("pytest")}
ENV PYTHONPATH=/workspace/src PYTHONUNBUFFERED=1
COPY src/ src/
CMD ["bash"]
"""
FILES = {
    "instruction.md": "# Double it\nMake `twice` double its argument.\n",
    "task.toml": 'schema_version = "1.3"\n[verifier]\ntimeout_sec = 60.0\nenv = {WANTED = "6"}\n',
    "environment/Dockerfile": DOCKERFILE,
    "environment/src/numbers_of.py": "def twice(x):\n    return x\n",
    "tests/test.sh": "#!/bin/bash\npython /tests/check.py\necho $((1 - $?)) > /logs/verifier/reward.txt\n",
    "tests/check.py": "import os, numbers_of\nassert numbers_of.twice(3) == int(os.environ['WANTED'])\n",
    "solution/solve.sh": "#!/bin/bash\nset -e\nsed -i 's/return x/return 2 * x/' src/numbers_of.py\n",
}


def write(place: Path, **changed: str) -> Path:
    for name, text in {**FILES, **changed}.items():
        (place / name).parent.mkdir(parents=True, exist_ok=True)
        (place / name).write_text(text)
    return place


def test_a_foreign_task_is_imported_proven_and_graded(tmp_path: Path):
    write(tmp_path / "set" / "double")
    write(tmp_path / "set" / "image", **{"environment/Dockerfile": "FROM ubuntu:24.04\n"})
    done = CliRunner().invoke(
        app, ["tasks", "import", "harbor", str(tmp_path / "set"), "--out", str(tmp_path / "out")]
    )
    assert done.exit_code == 1 and "left out: " in done.output and "FROM ubuntu:24.04" in done.output
    task = folder.load(tmp_path / "out" / "double")
    assert (task.verifier, task.allowed_paths, task.verify_timeout_s) == ("command", ("src",), 60.0)
    gold = folder.gold_patch(task)
    assert gold.files == {"src/numbers_of.py": "def twice(x):\n    return 2 * x\n"}
    assert synthesis.check(task) == []
    other = Patch({"src/numbers_of.py": "def twice(x):\n    return x + x\n"})
    assert [grading.grade(task, patch).reward for patch in (Patch({}), gold, other)] == [0.0, 1.0, 1.0]


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("environment/Dockerfile", "FROM python:3.12\nRUN apt-get install -y gcc\n", "line 2: `RUN apt-get"),
        ("environment/Dockerfile", "FROM python:3.12\nRUN a \\\n b\nUSER x\n", "line 2: `RUN a"),
        ("environment/Dockerfile", "FROM python:3.12\nLABEL a \\\n b\nUSER x\n", "line 4: `USER x`"),
        ("environment/Dockerfile", "FROM python:3.12 AS a\nFROM a\n", "line 1: .* only one stage"),
        (
            "environment/Dockerfile",
            "FROM python:3.12\nWORKDIR /app\nCOPY src .\n",
            "/app.* lies outside of /workspace",
        ),
        ("environment/Dockerfile", "FROM python:3.12\nRUN pip install -r /x.txt\n", "name the packages"),
        ("environment/Dockerfile", "FROM python:3.12\nWORKDIR /workspace\nCOPY ../tests .\n", "is not there"),
        ("environment/Dockerfile", "FROM python:3.12\nENV TOKEN=1\n", "the variable TOKEN"),
        ("environment/docker-compose.yaml", "services: {}\n", "several containers"),
        ("task.toml", '[environment]\ndocker_image = "x/y"\n', "in the image 'x/y'"),
        ("task.toml", '[agent]\nnetwork_mode = "public"\n', "its agent wants a network"),
        ("task.toml", '[verifier]\nuser = "root"\n', "verifier.user = 'root'"),
        ("tests/test.sh", "curl -LsSf https://x | sh\n", "tests/test.sh, line 1: `curl` fetches"),
        ("tests/test.sh", "set -e\ncd /app && pytest\n", "tests/test.sh, line 2: it works in /app"),
    ],
)
def test_what_no_sandbox_can_be_like_is_refused_by_name(name: str, text: str, message: str, tmp_path: Path):
    with pytest.raises(TaskError, match=message):
        harbor.task_in(write(tmp_path / "task", **{name: text}))


@pytest.mark.parametrize("name", harbor.PARTS)
def test_a_part_that_is_missing_or_elsewhere_is_named(name: str, tmp_path: Path):
    part = write(tmp_path / "task") / name
    part.rename(tmp_path / "elsewhere")
    with pytest.raises(TaskError, match=f"has the file {name}"):
        harbor.task_in(tmp_path / "task")
    part.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(TaskError, match=f"{name} is a link that leaves the task"):
        harbor.task_in(tmp_path / "task")


@pytest.mark.parametrize(
    ("script", "message"),
    [("true", "solve.sh changes nothing"), ("echo no; exit 3", "solve.sh ended as nonzero in a sandbox: no")],
)
def test_a_solution_that_solves_nothing_is_refused(
    script: str, message: str, tiny_task: Task, tmp_path: Path
):
    read = harbor.task_in(write(tmp_path / "task", **{"solution/solve.sh": script}))
    with pytest.raises(TaskError, match=f"^task: solution/{message}"):
        solved(dataclasses.replace(read, environment=tiny_task.environment), BUBBLEWRAP)
