"""The runner's outcomes on a real repository, and the verdicts made of them."""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import itertools
import json
import math
import random
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

from woodshed import boundary, cli, grading, tasks
from woodshed.experience import regrade
from woodshed.grading import (
    GradingSettings,
    assert_hardening,
    compiled,
    patches,
    pytest_verifier,
    results,
    runner,
    verifier,
)
from woodshed.grading.command_verifier import CommandVerifier
from woodshed.grading.decision import decide, reward
from woodshed.grading.patches import crossing
from woodshed.grading.pytest_verifier import FreshSandboxes
from woodshed.grading.results import SessionRequest
from woodshed.grading.session import run_session, start, with_copies
from woodshed.records import Decoy, Flag, Group, Outcome, Patch, Rollout, Task, TaskError, Verdict
from woodshed.runs.folder import RunDir
from woodshed.sandbox import BUBBLEWRAP, Sandbox, SandboxProvider, SandboxSpec, open_sandbox
from woodshed.sandbox.bubblewrap import BubblewrapSandbox
from woodshed.tasks import environment, folder

KINDS = """\
import subprocess, sys
import pytest

def test_skips(): pytest.skip("not today")
@pytest.mark.xfail
def test_passes_unexpectedly(): pass
@pytest.mark.xfail(strict=True)
def test_passes_forbidden(): pass
@pytest.fixture
def broken(): raise ValueError("set-up")
def test_set_up(broken): pass
@pytest.fixture
def leaves():
    yield
    raise ValueError("tear-down")
def test_tear_down(leaves): pass
def test_fails(): assert [1] == [2]
def test_plugins(request):
    assert request.config.pluginmanager.has_plugin("timeout")
    assert not request.config.pluginmanager.has_plugin("cacheprovider")
def test_child_imports_the_package():
    subprocess.run([sys.executable, "-c", "import tally"], check=True)
def test_forks():
    import os
    if os.fork() == 0:
        raise SystemExit
class TestGroup:
    def test_inner(self): pass
"""


@pytest.fixture
def repository(tiny_task: Task, tiny_repository: Path):
    """A sandbox with the whole repository, ready for tests."""
    spec = grading.with_runner(tasks.sandbox_spec(tiny_task, extra_lowers=(tiny_repository,)))
    with open_sandbox(spec) as sandbox:
        yield sandbox


def run(sandbox: Sandbox, ids: list[str] | None = None, packages: tuple[str, ...] = ("tally",)):
    return grading.run_tests(sandbox, ids=ids, packages=packages, timeout_s=60)


def test_the_whole_suite(repository: Sandbox, tiny_task: Task):
    found = run(repository)
    expected = dict.fromkeys((*tiny_task.fail_to_pass, *tiny_task.pass_to_pass), "passed")
    assert found.outcomes == {**expected, "tests/test_words.py::test_count_knows_markup": "skipped"}
    assert found.integrity == ()
    assert found.package_files == {"tally": "/workspace/tally/__init__.py"}
    assert found.durations.keys() == found.outcomes.keys()
    assert not found.timed_out
    assert "sentinel" not in found.log


def test_a_loop_ends_by_the_cpu_seconds_it_used(repository: Sandbox):
    """Not by the clock alone, which says less about the code the busier the machine is."""
    repository.write("tests/test_loop.py", b"def test_loops():\n    while True:\n        pass\n")
    ids = ["tests/test_loop.py::test_loops"]
    found = grading.run_tests(repository, ids=ids, packages=(), timeout_s=300, cpu_s=2)
    assert found.out_of_cpu and not found.timed_out and found.outcomes == {ids[0]: "missing"}
    assert not run(repository, ["tests/test_table.py::test_top"]).out_of_cpu


def test_only_the_tests_asked_for(repository: Sandbox):
    ids = ["tests/test_table.py::test_top", "tests/test_table.py::test_gone", "tests/test_gone.py::test_x"]
    found = run(repository, ids)
    assert found.outcomes == dict(zip(ids, ["passed", "missing", "missing"], strict=True))
    assert found.integrity == ()


def test_what_plugins_repeat_is_run_once(tiny_task: Task, tiny_repository: Path):
    pins = ("py-cpuinfo2==10.1.1", "pytest-benchmark==5.3.1", "pytest-rerunfailures==16.7")
    pins = (*pins, *tiny_task.environment.requirements)
    environment = dataclasses.replace(tiny_task.environment, requirements=pins)
    task = dataclasses.replace(tiny_task, environment=environment)
    test = b"def test_speed(benchmark):\n    calls = []\n    benchmark(calls.append, 1)\n    assert calls == [1]\n"
    test += b"def test_fails(tries=[]):\n    tries.append(1)\n    assert tries[1:]\n"
    with open_sandbox(
        grading.with_runner(tasks.sandbox_spec(task, extra_lowers=(tiny_repository,)))
    ) as sandbox:
        sandbox.write("tests/test_speed.py", test)
        sandbox.write("pytest.ini", b"[pytest]\nreruns = 2\nfilterwarnings = error\nno_such_key = 1\n")
        ids = ["tests/test_speed.py::test_speed", "tests/test_speed.py::test_fails"]
        found = run(sandbox, ids)
        assert (found.outcomes, found.integrity) == (dict(zip(ids, ["passed", "failed"], strict=True)), ()), (
            found
        )


def test_every_kind_of_outcome(repository: Sandbox):
    repository.write("tests/test_kinds.py", KINDS.encode())
    repository.write("tests/test_broken.py", b"import nothing_of_that_name\n")
    found = run(repository)
    assert {
        test.partition("::")[2]: outcome for test, outcome in found.outcomes.items() if "kinds" in test
    } == {
        "test_skips": "skipped",
        "test_passes_unexpectedly": "skipped",
        "test_passes_forbidden": "failed",
        "test_set_up": "error",
        "test_tear_down": "error",
        "test_fails": "failed",
        "test_plugins": "passed",
        "test_child_imports_the_package": "passed",
        "test_forks": "passed",
        "TestGroup::test_inner": "passed",
    }
    assert found.messages["tests/test_kinds.py::test_fails"].endswith("/test_kinds.py:17: assert [1] == [2]")
    assert found.messages["tests/test_kinds.py::test_set_up"].endswith("ValueError: set-up")
    assert "nothing_of_that_name" in found.collection_errors["tests/test_broken.py"]
    assert found.integrity == ()


def test_packages_must_come_from_the_workspace(repository: Sandbox):
    found = run(repository, packages=("tally", "iniconfig", "absent"))
    assert found.package_files["absent"] == ""
    assert len(found.integrity) == 1
    assert found.integrity[0].startswith("iniconfig was imported from /env/")


def test_a_run_that_never_starts_is_nobodys_fault(tiny_task: Task):
    with open_sandbox(tasks.sandbox_spec(tiny_task)) as sandbox:  # without the runner
        found = run(sandbox)
    assert not found.started
    assert found.integrity == ("no start record",)


INI = b"""\
[tool.pytest.ini_options]
addopts = ["-x", "--import-mode=importlib"]
pythonpath = ["extra"]
"""
TEST_OF_INI = b"""\
import only_on_the_ini_path

def test_mode(request):
    assert request.config.option.importmode == "importlib"
    assert not request.config.option.maxfail
"""


def test_the_projects_configuration_holds_but_for_its_options(repository: Sandbox):
    repository.write("pyproject.toml", INI)
    repository.write("extra/only_on_the_ini_path.py", b"")
    repository.write("tests/test_ini.py", TEST_OF_INI)
    found = run(repository, ["tests/test_ini.py::test_mode"])
    assert (found.messages, found.collection_errors, found.integrity) == ({}, {}, ())


CONFTEST = b"""
import os
from pathlib import Path

import pytest

HERE = Path(__file__).parent / "tests"
pytest_plugins = ["tests.plugin"]


def name_of(item):
    return Path(item.path).relative_to(HERE).parts[0]


class Registered:
    def pytest_runtest_teardown(self, item):
        name_of(item)


def pytest_configure(config):
    config.pluginmanager.register(Registered())


def pytest_collect_file(file_path):
    file_path.relative_to(HERE.parent)


def pytest_itemcollected(item):
    item.add_marker(getattr(pytest.mark, name_of(item).removesuffix(".py")))


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config, items):
    assert all(name_of(item) for item in items)
    mine = [item for item in items if item.nodeid.startswith("tests/")]
    config.hook.pytest_deselected(items=[item for item in items if item not in mine])
    items[:] = mine[::-1]


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_protocol(item):
    name_of(item)
    yield


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_makereport(item):
    name_of(item)
    yield


def pytest_runtest_setup(item):
    if item.get_closest_marker("test_shapes") is None and item.get_closest_marker("shape_words") is None:
        pytest.skip("not of this repository")


def pytest_sessionfinish(session):
    assert all(name_of(item) for item in session.items)


@pytest.fixture(autouse=True)
def each(request):
    assert request.module.OURS and name_of(request.node)
"""
INI_OF_NAMES = b"""
[pytest]
python_files = shape_*.py
python_functions = should_* it_*
python_classes = Describe*
markers =
    shape_words
filterwarnings = error
required_plugins = pytest-nobody-has-this>=3
addopts = -p nobody.has.this --cov=tally -n 4 --strict-config
usefixtures = each
"""


def test_the_projects_naming_and_hooks_never_meet_the_sentinels(repository: Sandbox):
    shapes = "OURS = 1\nimport tally\ndef it_holds(): pass\nclass DescribeWords:\n    def should_be(self): assert 0\n"
    files = {
        "pytest.ini": INI_OF_NAMES,
        "conftest.py": CONFTEST,
        "tests/plugin.py": b"def pytest_runtest_call(item): item.path.relative_to('/workspace/tests')\n",
        "tests/__init__.py": b"",
        "tests/shape_words.py": shapes.encode(),
    }
    for path, content in files.items():
        repository.write(path, content)
    passes, fails = "tests/shape_words.py::it_holds", "tests/shape_words.py::DescribeWords::should_be"
    for ids in (None, [passes, fails]):
        found = run(repository, ids)
        assert (found.outcomes, found.integrity) == ({passes: "passed", fails: "failed"}, ()), found.log


# Verdicts


def partial(task: Task) -> Patch:
    """Right for one text only."""
    text = (task.folder / "environment/workspace/tally/words.py").read_text("utf-8")
    return Patch(
        {"tally/words.py": text.replace('raise NotImplementedError("count")', 'return {"a": 2, "b": 1}')}
    )


def test_rewards(tiny_task: Task):
    solved = grading.grade(tiny_task, tasks.gold_patch(tiny_task))
    assert (solved.status, solved.reward, solved.solved) == ("graded", 1.0, True)
    assert solved.task_id == tiny_task.id
    assert solved.outcomes.keys() == {*tiny_task.fail_to_pass, *tiny_task.pass_to_pass}
    half = grading.grade(tiny_task, partial(tiny_task), settings=grading.GradingSettings(shaped=True))
    assert (half.reward, half.solved) == (0.25, False)
    nothing = grading.grade(tiny_task, Patch({}))
    assert (nothing.status, nothing.reward) == ("graded", 0.0)
    assert "NotImplementedError: count" in nothing.detail


def test_a_task_whose_hidden_tests_cannot_be_believed_pays_nothing(tiny_task: Task):
    """Without isolation and decoys a pass proves little."""
    bare = dataclasses.replace(tiny_task, decoys=())
    passed: dict[str, Outcome] = dict.fromkeys((*bare.fail_to_pass, *bare.pass_to_pass), "passed")
    assert reward(bare, passed, (), (), shaped=True) == 0.0
    assert reward(bare, passed, (), bare.fail_to_pass[:1], shaped=True) == 1.0
    decoy = Decoy(bare.fail_to_pass[0], 0, 1, "x", "", "")
    assert reward(dataclasses.replace(bare, decoys=(decoy,)), passed, (), (), shaped=True) == 1.0


class Keeping:
    """Bubblewrap's sandboxes, kept in a list."""

    watches = True

    def __init__(self) -> None:
        self.opened: list[Sandbox] = []

    def open(self, spec: SandboxSpec) -> Sandbox:
        self.opened.append(open_sandbox(spec))
        return self.opened[-1]


def test_a_run_that_began_ahead_decides_as_one_that_waited(tiny_task: Task):
    for patch in (tasks.gold_patch(tiny_task), partial(tiny_task)):
        verdicts = []
        for is_idle in (True, False):
            provider = Keeping()
            box = FreshSandboxes(tiny_task, provider, is_idle=lambda answer=is_idle: answer)
            crossed, left = crossing(tiny_task, patch)
            verdict = decide(tiny_task, crossed, left, box, timeout_s=30.0, shaped=False)
            verdicts.append((verdict.reward, verdict.outcomes, verdict.integrity))
            assert not any(sandbox.alive() for sandbox in provider.opened)
        assert verdicts[0] == verdicts[1]
    assert len(provider.opened) == 1, "a busy machine began what was thrown away"


def test_a_broken_sandbox_is_no_verdict(tiny_task: Task, tmp_path: Path):
    lost = grading.grade(dataclasses.replace(tiny_task, folder=tmp_path), Patch({}))
    assert (lost.status, lost.reward, lost.solved) == ("invalid", 0.0, False)
    assert "no folder" in lost.detail


def test_who_loses_the_sandbox_with_the_patch_alone_is_judged(
    tiny_task: Task, monkeypatch: pytest.MonkeyPatch
):
    """Else a patch could choose "invalid" where it expects a 0."""

    def lost(sandbox: BubblewrapSandbox, now: Any) -> str:
        if (now.upper / "tally/here").exists():
            now.supervisor.process.kill()
        return ""

    monkeypatch.setattr(BubblewrapSandbox, "_excess", lost)
    hangs = Patch({"tally/words.py": "import time\nopen('/workspace/tally/here', 'w')\ntime.sleep(99)\n"})
    verdict = grading.grade(tiny_task, hangs)
    assert (verdict.status, verdict.reward, verdict.integrity) == ("graded", 0.0, (pytest_verifier.LOST,))
    assert set(verdict.outcomes.values()) == {"missing"}


@dataclasses.dataclass(frozen=True)
class Fussy:
    """A verifier that breaks over some patches."""

    broken: Callable[[Patch], bool]

    def grade(self, task: Task, patch: Patch, sandboxes: SandboxProvider) -> Verdict:
        if self.broken(patch):
            raise ValueError("no text")
        return Verdict("", task.id, "graded", 1.0, True, {})


def test_what_breaks_over_a_patch_alone_counts_0(tiny_task: Task, monkeypatch: pytest.MonkeyPatch):
    def status(broken: Callable[[Patch], bool]) -> tuple[str, float, tuple[str, ...]]:
        monkeypatch.setattr(verifier, "verifier_of", lambda *_: Fussy(broken))
        verdict = grading.grade(tiny_task, Patch({"\ud800": "x"}))
        return verdict.status, verdict.reward, verdict.integrity

    monkeypatch.setattr(boundary, "strict", False)
    assert status(lambda patch: bool(patch.files)) == ("graded", 0.0, (verifier.BLAMED,))
    once = iter([True, False])
    assert status(lambda patch: next(once)) == ("graded", 1.0, ())
    with pytest.raises(ValueError, match="no text"):  # a fault of ours, or of the verifier
        status(lambda patch: True)


def test_what_crosses(tiny_task: Task):
    patch = Patch(
        {
            "tally/words.py": "x = 1\n",
            "tally/table.py": None,
            "tally/data.txt": "naïve\n",
            "tally/data.txt/inner": "below a file",
            "tally/lone.py": "\ud800",
            "tally/../setup.py": "",
            "/etc/passwd": "",
            "tally//double.py": "",
            "tally/new\nline.py": "",
            f"tally/{'x' * 300}.py": "",
            "tallyho/x.py": "",
            "tally/test_x.py": "",
            "tally/big.py": "x" * (patches.MAX_PATCH_CHARS + 1),
        },
        skipped={"tally/link": "not a regular file"},
    )
    taken, left = grading.crossing(tiny_task, patch)
    assert taken == {
        "tally/words.py": b"x = 1\n",
        "tally/table.py": None,
        "tally/data.txt": "naïve\n".encode(),
    }
    assert left.keys() == (patch.files.keys() | patch.skipped.keys()) - taken.keys()


def test_deletions_cross(tiny_task: Task):
    files = {**tasks.gold_patch(tiny_task).files, "tally/table.py": None}
    verdict = grading.outcomes_of(tiny_task, Patch(files))
    assert verdict.outcomes["tests/test_table.py::test_render"] == "missing"
    assert verdict.outcomes["tests/test_words.py::test_split"] == "passed"
    assert verdict.integrity == ()


def rollout(task: Task, number: int, patch: Patch, **changes) -> Rollout:
    made = Rollout(f"r{number}", task.id, task.name, number, 0, (), patch, "finished", 1.0)
    return dataclasses.replace(made, **changes)


def test_judging_groups(tiny_task: Task):
    gold, calls = tasks.gold_patch(tiny_task), []
    attempts = [
        Group(tiny_task.id, (rollout(tiny_task, 0, gold), rollout(tiny_task, 1, Patch({})))),
        rollout(tiny_task, 2, gold),
        rollout(tiny_task, 3, gold, ended="sandbox_lost"),
        rollout(tiny_task, 4, Patch({**gold.files, "tally/empty.py": ""})),
        rollout(tiny_task, 5, Patch({}), ended="sandbox_broken"),
    ]
    verdicts = grading.judge(
        attempts, [tiny_task], GradingSettings(), progress=lambda done, total, _: calls.append((done, total))
    )
    assert list(verdicts) == ["r0", "r1", "r2", "r3", "r4", "r5"]
    assert [v.rollout_id for v in verdicts.values()] == list(verdicts)
    assert [(v.status, v.reward) for v in verdicts.values()] == [
        ("graded", 1.0),
        ("graded", 0.0),
        ("graded", 1.0),
        ("invalid", 0.0),
        ("graded", 1.0),
        ("graded", 0.0),
    ]
    assert verdicts["r5"].detail == "the attempt's own commands ended its sandbox"
    assert verdicts["r0"].seconds == verdicts["r2"].seconds  # the same patch was run once
    assert calls[-1] == (6, 6)
    with pytest.raises(TaskError, match="attempts at tally-stub-count cannot be judged"):
        grading.judge(attempts, [])


def test_judging_begins_before_all_attempts_are_there(tiny_task: Task, monkeypatch: pytest.MonkeyPatch):
    gold, begun = tasks.gold_patch(tiny_task), []
    made = [rollout(tiny_task, n, patch) for n, patch in enumerate((gold, Patch({}), gold))]

    grade_one = grading.Judging._grade

    def noted(self: grading.Judging, task: Task, made: Rollout) -> Verdict:
        begun.append(made.id)
        return grade_one(self, task, made)

    monkeypatch.setattr(grading.Judging, "_grade", noted)
    with grading.Judging([tiny_task]) as judging:
        judging.add(made[0])
        deadline = time.monotonic() + 10
        while not begun and time.monotonic() < deadline:
            time.sleep(0.01)
        assert begun == ["r0"]
        verdicts = judging.verdicts(made)
        with pytest.raises(TaskError, match="attempts at other cannot be judged"):
            judging.verdicts([*made, rollout(dataclasses.replace(tiny_task, id="x", name="other"), 4, gold)])
    assert [verdicts[r.id].reward for r in made] == [1.0, 0.0, 1.0]
    assert sorted(begun) == ["r0", "r1"]  # r2 is r0's patch


def test_what_is_raised_while_judging_waits_for_no_test(tiny_task: Task):
    slow = {"tally/__init__.py": "import time\ntime.sleep(60)\n"}
    began = time.monotonic()
    with pytest.raises(KeyboardInterrupt), grading.Judging([tiny_task]) as judging:
        for number in range(3):
            judging.add(rollout(tiny_task, number, Patch({**slow, f"tally/number{number}.py": ""})))
        time.sleep(2)  # the first one runs
        raise KeyboardInterrupt
    assert time.monotonic() - began < 12


def test_stored_attempts_are_judged_again(tiny_task: Task, tmp_path: Path):
    """A run from a time when its one false verdict was possible: what changed is said, and nothing is written."""
    run = RunDir.create(tmp_path / "run", recipe="[grading]\nshaped = true\njobs = 1\n", manifest={})
    run.keep_tasks("eval", [tiny_task.folder])
    attempts = [
        rollout(tiny_task, n, patch) for n, patch in enumerate((tasks.gold_patch(tiny_task), Patch({})))
    ]
    verdicts = grading.judge(attempts, [tiny_task])
    run.append("rollouts", attempts, "eval", 0)
    run.append(
        "verdicts", [verdicts["r0"], dataclasses.replace(verdicts["r1"], reward=1.0, solved=True)], "eval", 0
    )
    run.append("flags", [Flag("r0", "history", 0, "git log", 0.9)], "eval", 0)
    run.unlock()
    files = {path: path.stat().st_mtime_ns for path in run.path.rglob("*")}
    result = CliRunner().invoke(cli.app, ["grade", str(run.path)])
    assert result.exit_code == 0, result.output
    assert "r1: 1 -> 0" in result.output
    assert "r0: 1 -> 1  no longer flagged: history" in result.output
    assert "2 attempts graded again: 2 changed, 1 in reward, 1 in flags" in result.output
    assert {path: path.stat().st_mtime_ns for path in run.path.rglob("*")} == files
    assert regrade.settings_of(run, ["timeout_s=9"]) == GradingSettings(shaped=True, jobs=1, timeout_s=9)


@pytest.mark.parametrize(
    ("command", "status", "reward"),
    [
        ("true", "graded", 1.0),
        ("false", "graded", 0.0),
        ("echo 0.5 > /logs/verifier/reward.txt", "graded", 0.5),
        ("echo '{\"reward\": 0.25}' > /logs/verifier/reward.json; exit 1", "graded", 0.25),
        ("echo nan > /logs/verifier/reward.txt", "invalid", 0.0),
        ("echo '{\"tests\": 3}' > /logs/verifier/reward.json", "invalid", 0.0),
    ],
)
def test_a_command_grades_by_its_reward_file_or_its_exit_code(
    tiny_task: Task, command: str, status: str, reward: float
):
    verdict = CommandVerifier(command).grade(tiny_task, Patch({}), BUBBLEWRAP)
    assert (verdict.status, verdict.reward, verdict.solved) == (status, reward, reward == 1.0)


def test_what_harbor_says_of_a_verifier_holds(tiny_task: Task, tmp_path: Path):
    """Its variables and its time, also for a task that was read from a folder."""
    given = dataclasses.replace(
        tiny_task, verifier="command", verifier_env={"SHARE": "0.5"}, verify_timeout_s=3.0
    )
    task = tasks.write(
        given,
        tmp_path / "foreign",
        workspace=tasks.workspace(tiny_task),
        tests=tasks.protected_files(tiny_task),
        gold={path: (text or "").encode() for path, text in tasks.gold_patch(tiny_task).files.items()},
    )
    assert tasks.load(task.folder) == task
    assert (task.verifier_env, task.verify_timeout_s) == ({"SHARE": "0.5"}, 3.0)
    share = CommandVerifier("echo $SHARE > /logs/verifier/reward.txt").grade(task, Patch({}), BUBBLEWRAP)
    assert (share.status, share.reward) == ("graded", 0.5)
    late = CommandVerifier("echo 1 > /logs/verifier/reward.txt; sleep 99").grade(task, Patch({}), BUBBLEWRAP)
    assert (late.status, late.reward) == ("graded", 0.0) and late.seconds < 60


# The channel


def line(nonce: str, **record: object) -> bytes:
    return f"{nonce} {json.dumps(record)}\n".encode()


def test_a_session_compiles_no_program_of_ours(tiny_task: Task, tmp_path: Path):
    request = SessionRequest([], [], kind="isolated", programs=results.drawn("isolated"))
    names = request.programs
    with open_sandbox(with_copies(tasks.sandbox_spec(tiny_task), request, tmp_path / "copies")) as sandbox:
        command = start(request).replace("program.main()", f"import {names.hardening}").replace("del", "0,")
        said = sandbox.exec(command.replace("bin/python", "bin/python -v")).stderr.decode()
    for name in (names.runner, names.hardening):
        assert f".pyc matches {names.folder}/{name}.py" in said, said[-2000:]


def session(nonce: str = "n", *, count: int = 1, sentinels: tuple[str, ...] = results.SENTINELS) -> bytes:
    test = {"kind": "test", "id": "t", "outcome": "passed", "seconds": 0.1, "message": ""}
    parts = [line(nonce, kind="start"), line(nonce, **test)]
    parts += [line(nonce, kind="sentinel", name=name, outcome="failed") for name in sentinels]
    end = {"count": count, "workspace": "/workspace", "packages": {}, "patched": []}
    return b"".join([*parts, line(nonce, kind="end", **end)])


def test_a_whole_session_is_believed():
    report = results.read(session(), "n")
    assert report.faults == ()
    assert report.outcomes == {"t": "passed"}
    assert set(results.SENTINELS) == {name for name in vars(runner) if name.startswith("test_")}


@pytest.mark.parametrize(
    ("data", "fault"),
    [
        (b"", "no start record"),
        (session("other"), "no start record"),
        (session()[:-40], "no end record"),
        (session() + b"forged\n", "not the runner's"),
        (session(count=2), "the end record counts 2"),
        (session() + line("n", kind="end", count=1, workspace="/w", packages={}, patched=[]), "end record"),
        (session(sentinels=()), "tests that must fail did not"),
        (session() + line("n", kind="test"), "garbled"),
        (session() + line("n", kind="lie"), "not the runner's"),
    ],
)
def test_anything_less_is_not(data: bytes, fault: str):
    assert fault in "; ".join(results.read(data, "n").faults)


def test_noise_in_the_channel_neither_crashes_nor_convinces():
    chance = random.Random(0)
    whole = session()
    for _ in range(2000):
        noise = bytearray(whole)
        for _ in range(chance.randint(1, 8)):
            place = chance.randrange(len(noise))
            noise[place : place + chance.randint(0, 9)] = chance.randbytes(chance.randint(0, 9))
        report = results.read(bytes(noise), "n")
        assert report.faults or report.outcomes.keys() <= {"t"} or bytes(noise) == whole


class Pair:
    """Equal by value; other types may have their say."""

    def __init__(self, *items: int):
        self.items = items

    def __eq__(self, other: object) -> bool:
        return self.items == other.items if isinstance(other, Pair) else NotImplemented

    def __ne__(self, other: object) -> bool:
        same = self.__eq__(other)
        return NotImplemented if same is NotImplemented else not same


class Same(Pair):
    """Equal to everything, by either operator or by one of them."""

    def __eq__(self, other: object) -> bool:
        return True

    def __ne__(self, other: object) -> bool:
        return False


class Undenied(Pair):
    def __ne__(self, other: object) -> bool:
        return False


class Disguise(type):
    """Types of it say that they are int."""

    def __eq__(cls, other: object) -> bool:
        return True

    def __hash__(cls) -> int:
        return hash(int)


class Disguised(Same, metaclass=Disguise):
    pass


def test_files_that_were_compiled_before_are_tested_alike(tiny_task: Task, monkeypatch: pytest.MonkeyPatch):
    """Read by the session or made ready before: the same outcomes, reasons and doubts."""
    equal = "class Any:\n    __eq__ = lambda a, b: True\n    __hash__ = None\n"
    gold = folder.gold_patch(tiny_task)
    path = next(iter(gold.files))
    liar = Patch(files={path: f"{equal}\ndef count(*given):\n    return Any()\n"})
    for patch in (Patch(files={}), gold, liar):
        runs = []
        taken, _ = grading.crossing(tiny_task, patch)
        tests = (*tiny_task.fail_to_pass, *tiny_task.pass_to_pass)
        for made in (compiled.compiled_tests, lambda task, tests, sandboxes: {}):
            monkeypatch.setattr(pytest_verifier, "compiled_tests", made)
            runs.append(pytest_verifier.test_patch(tiny_task, taken, tests, 60, BUBBLEWRAP))
        ready, read = runs
        for part in ("outcomes", "messages", "collection_errors", "integrity", "package_files"):
            assert getattr(ready, part) == getattr(read, part), part
        assert (patch is gold) == all(outcome == "passed" for outcome in read.outcomes.values())


def test_what_was_compiled_is_run_whatever_lies_on_the_disk(repository: Sandbox, tiny_task: Task):
    tests = ["tests/test_table.py::test_top"]
    ready = compiled.compiled_tests(tiny_task, [*tests, "tests/test_absent.py::test_x"], BUBBLEWRAP)
    assert {"tests/test_table.py"} <= set(ready) <= {"tests/test_table.py", "tests/conftest.py"}
    repository.write("tests/test_table.py", b"def test_top(): assert False\n")
    asked = SessionRequest(tests, ("tally",))
    assert run_session(repository, asked, timeout_s=60).outcomes == {tests[0]: "failed"}
    asked = dataclasses.replace(asked, compiled=ready)
    assert run_session(repository, asked, timeout_s=60).outcomes == {tests[0]: "passed"}


def test_a_file_that_does_not_compile_is_left_to_the_session(tiny_task: Task):
    site = environment.prepare(tiny_task.environment)
    texts = {"tests/test_a.py": b"def (", "tests/test_b.py": b"assert 1 == 1\n"}
    found = compiled._compile(site, texts, BUBBLEWRAP)
    assert list(found) == ["tests/test_b.py"]


def test_the_fast_way_out_of_doubts_is_for_plain_values_alone():
    """Tests compare a million characters in a loop: without it one test of python-slugify took 26 s instead of 0.2."""
    assert all(assert_hardening.is_plain(value) for value in (1, True, 1.5, "a", b"a", None))
    assert not any(assert_hardening.is_plain(value) for value in (Same(), Disguised(), Flag, [1], (1,)))
    with pytest.raises(AssertionError, match="would hold for other values"):
        assert_hardening.compared("==", Disguised(), 1, __file__)


def test_a_no_that_means_equal_is_doubted_like_a_yes():
    """`assert not (a != b)` asks for equality: honest objects stand it however the doubts are drawn, others never."""
    for _ in range(50):
        assert assert_hardening.compared("!=", Pair(1), Pair(1), __file__) is False
        assert assert_hardening.compared("==", Pair(1), Pair(2), __file__) is False
        assert assert_hardening.compared("!=", Pair(1), 1, __file__) is True
        for spelled, liar in (("!=", Same()), ("==", Same()), ("!=", Undenied())):
            with pytest.raises(AssertionError, match="would hold for other values"):
                assert_hardening.compared(spelled, liar, 1, __file__)


class Counts:
    """Says yes at some of its comparisons, by their number, whatever it is compared with."""

    def __init__(self, pattern: int):
        self.pattern, self.asked = pattern, 0

    def __eq__(self, other: object) -> bool:
        self.asked += 1
        return bool(self.pattern >> (self.asked - 1) & 1)


class Remembers:
    """Equal to one of the values that it meets: the first, the second, ..."""

    def __init__(self, number: int):
        self.number, self.met = number, list[object]()

    def __eq__(self, other: object) -> bool:
        if not any(other is known for known in self.met):
            self.met.append(other)
        return self.met.index(other) == self.number


def pays(object_of_a_patch: object) -> bool:
    """Whether `assert object_of_a_patch == 1` passes."""
    try:
        return bool(assert_hardening.compared("==", object_of_a_patch, 1, __file__))
    except AssertionError:
        return False


def test_an_object_that_counts_its_comparisons_guesses_one_of_thousands(monkeypatch: pytest.MonkeyPatch):
    """All orders of three values asked twice, against every pattern of six answers and every choice of a value."""
    chance = 1 / math.comb((assert_hardening.DOUBTS + 1) * assert_hardening.REPEATS, assert_hardening.REPEATS)
    assert chance == 1 / 2016
    monkeypatch.setattr(assert_hardening, "DOUBTS", 2)
    orders = sorted(set(itertools.permutations((0, 0, 1, 1, 2, 2))))
    patterns, values = Counter[int](), Counter[int]()
    for asked in orders:
        own = asked.index(0)
        parts = list(asked[:own]), list(asked[own + 1 :])
        monkeypatch.setattr(assert_hardening, "order", lambda repeats, parts=parts: parts)
        patterns.update(pattern for pattern in range(1 << 6) if pays(Counts(pattern)))
        values.update(number for number in range(3) if pays(Remembers(number)))
    twice = [pattern for pattern in range(1 << 6) if pattern.bit_count() == 2]
    assert patterns == dict.fromkeys(twice, len(orders) // math.comb(6, 2))
    assert values == dict.fromkeys(range(3), len(orders) // 3)


def test_the_order_of_what_is_asked_is_drawn_evenly(monkeypatch: pytest.MonkeyPatch):
    """Each of the 8 values is as often at each of the 24 places, by chi squared."""
    monkeypatch.setattr(assert_hardening, "DRAW", random.Random(0))
    monkeypatch.setattr(assert_hardening, "DOUBTS", 7)
    monkeypatch.setattr(assert_hardening, "REPEATS", 3)
    places = Counter[tuple[int, int]]()
    for _ in range(2000):
        early, late = assert_hardening.order(assert_hardening.REPEATS)
        asked = [*early, 0, *late]
        assert Counter(asked) == dict.fromkeys(range(8), 3)
        places.update(enumerate(asked))
    chi_squared = sum((count - 250) ** 2 / 250 for count in places.values())
    assert len(places) == 24 * 8 and chi_squared < 220  # 161 degrees of freedom: 0.1%


class Holds:
    """Equal to its number, in a way that may be odd, as those of numeric libraries are."""

    def __init__(self, number: float):
        self.number = number

    def __eq__(self, other: object) -> Any:
        if isinstance(other, list):
            raise TypeError("no order of lists")
        if isinstance(other, tuple):
            return np.array([self.number == item for item in other])
        return self.number == other


class Letters:
    """Equal to every text of the same letters, whatever their case and what stands between them."""

    def __init__(self, text: str):
        self.letters = "".join(filter(str.isalnum, text.lower()))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, str) and Letters(other).letters == self.letters


class Named(Letters):
    """One that says its name, too."""

    def __init__(self, text: str):
        super().__init__(text)
        self.text = text

    def __str__(self) -> str:
        return self.text


def test_an_object_that_ignores_the_form_of_a_text_is_believed_only_if_it_says_the_text():
    for _ in range(20):
        assert assert_hardening.compared("==", Named("Active Record"), "Active Record", __file__) is True
        for ignorant in (Letters("active_record"), Named("active_record")):
            with pytest.raises(AssertionError, match="would hold for other values"):
                assert_hardening.compared("==", ignorant, "Active Record", __file__)


def test_inside_a_container_such_an_object_is_believed_once_in_sixty_times():
    """Of the other contents that are asked about, few have another form of one text.

    More than 6 of 40 would be luck that one run in a hundred thousand has.
    """
    believed = 0
    for _ in range(40):
        with contextlib.suppress(AssertionError):
            wanted = collections.deque(["A.b"])
            assert_hardening.compared("==", collections.deque([Letters("a b")]), wanted, __file__)
            believed += 1
    assert believed <= 6


@pytest.mark.parametrize("value", [9, 0, 0.5, "a", "a-b", b"ab", [1, 2], {"a": 1}, {1}, (), None, True])
def test_look_alikes_are_other_values_of_the_same_type(value: object):
    for _ in range(20):
        found = assert_hardening.values.look_alikes(value, 31)
        assert found and value not in found and len(found) <= 31
        if value is not None and value is not True:
            assert {type(other) for other in found} == {type(value)}


def test_honest_objects_stand_being_asked_again():
    asked = assert_hardening.compared
    approximate = pytest.approx(1.0)
    for _ in range(20):
        assert asked("==", Holds(2), 2, __file__) is True
        assert asked("==", Holds(math.inf), math.inf, __file__) is True
        assert asked("==", Holds(1e300), 1e300, __file__) is True
        assert asked("==", Holds(math.nan), math.nan, __file__) is False
        assert asked("==", Holds(1.0 + 1e-9), approximate, __file__) is True
        assert asked("==", {"a": [Holds(1)]}, {"a": [1]}, __file__) is True
        assert list(asked("==", Holds(2), (2, 3), __file__)) == [True, False]  # type: ignore[call-overload]
        assert asked("in", Holds(2), [1, 2], __file__) is True
        assert asked("in", Holds(2), iter([1, 2]), __file__) is True
        assert asked("not in", Holds(2), iter([1, 3]), __file__) is True
        with pytest.raises(TypeError, match="no order of lists"):
            asked("==", Holds(2), [2], __file__)


def test_an_assertion_that_holds_for_near_values_is_not_held_to_the_operator():
    """`assertAlmostEqual(a, b)` may hold where `a == b` does not."""
    doubts = assert_hardening.before("==", Pair(1), 1.0000001, __file__)
    assert_hardening.after(doubts, True, "assertAlmostEqual" in assert_hardening.LOOSE)
    with pytest.raises(AssertionError, match="yes and no to the same values"):
        assert_hardening.after(assert_hardening.before("==", Pair(1), 1.0000001, __file__))
