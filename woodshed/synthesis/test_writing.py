"""Test-writing tasks: the code stays, and the agent is asked for checks of one function.

The checks must accept the function, and the same code printed another way, and fail for each of some wrong versions
that the original tests notice. An ordinary hidden test file judges them.
"""

from __future__ import annotations

import ast
import json
import random
import shutil

from woodshed.grading import grade
from woodshed.pysource import syntax
from woodshed.records import Patch, Task
from woodshed.synthesis import mutation_score
from woodshed.synthesis.coverage_map import AT_IMPORT
from woodshed.synthesis.operators import Symbol
from woodshed.synthesis.repository_context import Rejected, RepositoryContext, complain_of_the_machine
from woodshed.tasks import folder

MAX_VERSIONS = 6
HOME, JUDGE = "checks", "woodshed_judge"

JUDGE_TESTS = '''\
"""Checks must accept the code as it is, however it is printed, and notice every wrong version of it."""

import json
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

HERE = Path(__file__).parent
ROOT = HERE.parent
ASKED = json.loads((HERE / "asked.json").read_text("utf-8"))


def verdict(text):
    """The exit code of the checks against a version of the file: 0 all pass, 1 some fail."""
    with tempfile.TemporaryDirectory() as scratch:
        for place in ASKED["paths"]:
            if (ROOT / place).is_dir():
                shutil.copytree(ROOT / place, Path(scratch, place))
            else:
                Path(scratch, place).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy(ROOT / place, Path(scratch, place))
        Path(scratch, ASKED["path"]).write_bytes(text.encode())
        shutil.copy(ROOT / ASKED["checks"], Path(scratch, "test_checks.py"))
        roots = [str(Path(scratch, root)) for root in ASKED["roots"]]
        command = [sys.executable, "-P", "-s", "-B", "-m", "pytest", "-q", "-x", "-c", os.devnull]
        command += ["-p", "no:cacheprovider", "--rootdir", scratch, "test_checks.py"]
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(roots)}
        done = subprocess.run(command, cwd=scratch, env=environment, capture_output=True, timeout=60)
        return done.returncode


@pytest.mark.parametrize("version", range(len(ASKED["right"])))
def test_accepts(version):
    assert verdict(ASKED["right"][version]) == 0


@pytest.mark.parametrize("version", range(len(ASKED["wrong"])))
def test_notices(version):
    assert verdict(ASKED["wrong"][version]) == 1
'''


def write_tests(work: RepositoryContext, function: Symbol, name: str) -> Task:
    """Make a proven task that asks for checks of a function, which stays as it is.

    Raises:
        Rejected: not_utf8, too_few_versions, or not_proven if the original tests cannot stand alone.
    """
    baseline, code = work.baseline, work.code.texts[function.path]
    if syntax.encode(code) != code.encode(errors="replace"):
        raise Rejected("not_utf8", f"{function.path}: the judge writes its versions in UTF-8")
    covering = work.map.names(work.survey.tests(function) & ~AT_IMPORT)
    files = [test.partition("::")[0] for test in covering]
    home = max(sorted(set(files)), key=files.count)
    inside = [test for test in covering if test.partition("::")[0] == home]
    wrong = mutation_score.noticed(
        work.spec(),
        work.code,
        function,
        inside,
        work.settings.timeout_s,
        work.sandboxes,
        baseline.environment.pytest_options,
    )[:MAX_VERSIONS]
    if len(wrong) < 2:
        raise Rejected("too_few_versions", f"{len(wrong)} wrong versions are noticed by {home}")
    asked = {
        "paths": list(baseline.allowed_paths),
        "path": function.path,
        "roots": list(baseline.environment.source_roots),
        "checks": f"{HOME}/check_{function.short}.py",
        "right": [code, ast.unparse(syntax.parse(code)) + "\n"],
        "wrong": wrong,
    }
    tests = {
        f"{JUDGE}/test_judge.py": JUDGE_TESTS.encode(),
        f"{JUDGE}/asked.json": (json.dumps(asked, indent=1) + "\n").encode(),
    }
    task = _written(work, _test_task(work, function, name, len(asked["right"]), len(wrong)), tests, home)
    untouched = grade(task, Patch(files={}), work.sandboxes)
    solved = grade(task, folder.gold_patch(task), work.sandboxes)
    if any(untouched.outcomes[t] == "passed" for t in task.fail_to_pass) or not solved.solved:
        shutil.rmtree(task.folder)
        complain_of_the_machine(solved)
        failing = [test for test, outcome in solved.outcomes.items() if outcome != "passed"]
        raise Rejected("not_proven", ", ".join([*solved.integrity, *failing]))
    return task


def _written(work: RepositoryContext, task: Task, tests: dict[str, bytes], home: str) -> Task:
    """The task in its folder: the workspace without any tests, and the tests of the file `home` as the solution."""
    tree = work.baseline.repository.tree
    workspace = work.staging / f".{task.name}"
    shutil.copytree(tree, workspace, symlinks=True)
    for path in {*work.baseline.test_files, *work.tests}:
        (workspace / path).unlink(missing_ok=True)
    gold: dict[str, bytes | None] = {task.target_path: (tree / home).read_bytes()}
    written = folder.write(task, task.folder, workspace=workspace, tests=tests, gold=gold)
    shutil.rmtree(workspace)
    return written


def _test_task(work: RepositoryContext, function: Symbol, name: str, right: int, wrong: int) -> Task:
    judge = f"{JUDGE}/test_judge.py"
    checks = f"{HOME}/check_{function.short}.py"
    accepts = tuple(f"{judge}::test_accepts[{index}]" for index in range(right))
    notices = tuple(f"{judge}::test_notices[{index}]" for index in range(wrong))
    text = (
        f"Write tests for `{function.name}` in {function.path}: a pytest file {checks} that stands alone and imports "
        f"the function from `{function.module}`. It must pass with the code as it is, and fail for each of {wrong} "
        "wrong versions of the function that you are not shown. Do not read the source file in the tests, and do not "
        "change the code.\n"
    )
    return Task(
        id="",
        name=name,
        folder=work.staging / name,
        instruction=text,
        environment=work.baseline.environment,
        allowed_paths=(HOME,),
        fail_to_pass=(*accepts, *notices),
        stub_passes={"a check that always passes": accepts, "a check that always fails": notices},
        pass_to_pass=(),
        operator="write_tests",
        level=2,
        target_path=checks,
        target_symbol=function.name,
        target_lines=(1, 1),
        test_command=f'python -c "import {function.module}"',
        verify_timeout_s=max(work.settings.timeout_s, 300.0),
        provenance=work.provenance,
    )


def functions_to_test(work: RepositoryContext) -> list[Symbol]:
    """Public functions that tests run, in seeded order."""
    functions = [s for s in work.survey.functions if work.survey.tests(s) & ~AT_IMPORT and s.body_lines > 2]
    random.Random(f"{work.settings.seed} {work.baseline.repository.name} write_tests").shuffle(functions)
    return functions
