"""A whole repository made into tasks: what is made, what is kept, and what a second call goes on with."""

from __future__ import annotations

import compileall
import dataclasses
import json
import os
import shutil
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import counting_provider
import pytest
from counting_provider import nobody_else
from test_synthesis import lay

from woodshed import synthesis
from woodshed.records import Task, TaskError
from woodshed.sandbox import SandboxSpec, open_sandbox
from woodshed.synthesis import baseline, mutation_runner, repository_context, sources, stats
from woodshed.synthesis.repository_context import lay as lay_out
from woodshed.tasks import folder

ZOO = {
    "LICENSE": "Permission is hereby granted, free of charge",
    "zoo/__init__.py": "from .sounds import *\nfrom .cage import Cage\n",
    "zoo/sounds.py": '''
        """Sounds."""

        __all__ = ["bark", "meow", "loud", "choir"]


        def loud(function):
            """Decorator: in capitals."""
            return lambda *a: function(*a).upper()


        def bark(times):
            """What a dog says.

            >>> bark(1)
            'woof'
            """
            return " ".join(["woof"] * times)


        @loud
        def meow(times):
            words = ["meow"] * times
            return " ".join(words)


        SOUNDS = {
            "dog": bark,  # wags
            "cat": meow,
        }


        def choir(*names):
            """All of them."""
            return [SOUNDS[name](1) for name in names]


        def unseen():
            return 1
        ''',
    "zoo/cage.py": '''
        import functools


        class Cage:
            """A cage."""

            def __init__(self, *animals):
                self.animals = list(animals)

            def count(self):
                """How many animals are inside."""
                return len(self.animals)

            @functools.lru_cache
            def noise(self):
                return count_noise(self.animals)


        def count_noise(animals):
            return len(animals)
        ''',
    "zoo/costs.py": """
        def fee():
            return 3


        def _prices():
            return {"cat": fee()}


        PRICES = _prices()


        def haggle(price):
            if price > 10:
                price = price - 1
            return price
        """,
    "zoo/tests/__init__.py": "",
    "zoo/tests/test_costs.py": """
        from zoo.costs import PRICES, fee, haggle


        def test_haggle():  # `return price` would do
            assert haggle(3) == 3


        def test_fee():
            assert fee() == 3


        def test_prices():
            assert PRICES == {"cat": 3}
        """,
    "zoo/tests/test_sounds.py": """
        import pytest

        from zoo import bark, choir, meow
        from zoo.sounds import SOUNDS


        @pytest.mark.parametrize(("n", "said"), [(1, "woof"), pytest.param(2, "woof woof", id="zwei: [ü] :: x")])
        def test_bark(n, said):
            assert bark(n) == said


        def test_meow():
            assert meow(1) == "MEOW"


        @pytest.mark.xfail
        def test_bark_softly():
            assert bark(1) == "wuff"


        def test_choir():  # neither loud nor unseen
            assert choir("dog", "cat") == ["woof", "MEOW"]


        def test_sounds():
            assert list(SOUNDS) == ["dog", "cat"]
        """,
    "zoo/tests/test_cage.py": """
        import unittest

        from zoo import Cage


        class CageTest(unittest.TestCase):
            def setUp(self):
                self.cage = Cage("cat", "dog")

            def test_count(self):
                with self.subTest("two"):
                    self.assertEqual(self.cage.count(), 2)

            def test_noise(self):
                self.assertEqual(self.cage.noise(), 2)

            def test_empty(self):
                self.assertEqual(Cage().animals, [])

            def test_order(self):
                self.assertEqual(Cage("b", "a").animals, ["b", "a"])


        def test_flaky():
            import time

            assert time.time_ns() < 0
        """,
}
SETTINGS = synthesis.SynthesisSettings(jobs=2, timeout_s=300, operators=("stub", "remove"))


@pytest.fixture(scope="module")
def zoo(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return lay(tmp_path_factory.mktemp("sources") / "zoo", ZOO)


@pytest.fixture(scope="module")
def made(zoo: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Everything that can be made of the zoo."""
    out = tmp_path_factory.mktemp("made") / "zoo"
    said: list[str] = []
    settings = SETTINGS.model_copy(update={"sandbox": counting_provider.SETTINGS})
    with nobody_else() as opened:  # one way to a sandbox, all along the way from a source to proven tasks
        report = synthesis.make([str(zoo)], out, settings, lambda done, total, text: said.append(text))
    assert opened["agent"] > len(report.accepted) and opened["grader"] > 2 * len(report.accepted)
    assert {task.name for task in report.accepted} == {path.parent.name for path in out.glob("*/task.toml")}
    assert any("without 1 that failed, such as zoo/tests/test_cage.py::test_flaky" in text for text in said)
    return out


def hashes(root: Path) -> dict[str, str]:
    """Of everything but logs, which hold seconds."""
    return {p.name: sources.tree_sha256(p) for p in root.iterdir() if p.is_dir() and p.name != ".logs"} | {
        p.name: p.read_text() for p in root.iterdir() if p.is_file()
    }


def test_what_is_made_of_the_zoo(made: Path):
    tasks = {task.name: task for task in folder.load_set(made)}
    repaired = tasks.pop("zoo-remove-fee")
    assert "`PRICES = _prices()` in zoo/costs.py" in repaired.instruction
    cascaded = tasks.pop("zoo-remove-loud")
    assert "meow" in cascaded.instruction and len(cascaded.fail_to_pass) == 5
    rejected = [json.loads(line) for line in (made / "rejections.jsonl").read_text().splitlines()]
    reasons = {entry["task"]: entry["reason"] for entry in rejected}
    assert set(tasks) == {
        *(f"zoo-{operator}-{name}" for operator in ("stub", "remove") for name in ("bark", "choir", "meow")),
        *(f"zoo-{operator}-Cage.{name}" for operator in ("stub", "remove") for name in ("count", "noise")),
        *(f"zoo-{operator}-count_noise" for operator in ("stub", "remove")),
    }
    # no test runs `unseen`, and stubs of `loud` and `fee` could not be imported: they are never tried
    assert reasons == {"zoo-stub-haggle": "trivial", "zoo-remove-haggle": "trivial"}
    bark = tasks["zoo-remove-bark"]
    assert bark.environment.packages == ("zoo",) and bark.allowed_paths == ("zoo",)
    assert bark.provenance["licence"] == "MIT" and bark.level == 2
    workspace = bark.folder / "environment" / "workspace"
    assert '"dog"' not in (workspace / "zoo/sounds.py").read_text()
    visible = (workspace / "zoo/tests/test_sounds.py").read_text()
    assert "from zoo import choir, meow\n" in visible and "bark" not in visible and "test_meow" in visible
    assert "test_flaky" not in (workspace / "zoo/tests/test_cage.py").read_text()
    original = (bark.folder / "tests/files/zoo/tests/test_sounds.py").read_text()
    assert original == textwrap.dedent(ZOO["zoo/tests/test_sounds.py"]).lstrip()
    assert "zoo/tests/test_sounds.py::test_bark[zwei: [\\xfc] :: x]" in bark.fail_to_pass
    assert "zoo/tests/test_cage.py::CageTest::test_count" in bark.pass_to_pass
    for text in ("`bark` to zoo/sounds.py", "def bark(times):", "What a dog says.", '`"dog": bark`'):
        assert text in bark.instruction
    stub = tasks["zoo-stub-Cage.count"]
    assert stub.fail_to_pass == ("zoo/tests/test_cage.py::CageTest::test_count",)
    lines = (stub.folder / "environment/workspace/zoo/cage.py").read_text().split("\n")
    assert lines[stub.target_lines[0] - 1] == '        raise NotImplementedError("Cage.count")'
    assert not any("flaky" in test or "softly" in test for test in stub.pass_to_pass)
    assert max(len(task.instruction.split()) for task in tasks.values()) <= 90


def test_the_hidden_tests_are_measured(made: Path):
    strength = folder.load(made / "zoo-stub-bark").provenance
    assert strength["mutants"] == strength["mutants_noticed"] == 2
    assert strength["visibility"] == "hidden" and strength["lines_removed"] >= 0


@pytest.mark.parametrize(
    ("code", "status"),
    [
        (
            "import socket; a, b = socket.socketpair(); a.recv(1)",
            -signal.SIGKILL,
        ),  # a mutant of boltons' sockets did this
        ("import time; began = time.monotonic()\nwhile time.monotonic() < began + 3.5: pass", 0),
        ("raise SystemExit(2)", 2),
    ],
)
def test_a_mutant_that_waits_for_ever_is_ended_and_one_that_works_is_not(code: str, status: int):
    child = os.posix_spawn(sys.executable, [sys.executable, "-c", code], {})
    began = time.monotonic()
    assert os.waitstatus_to_exitcode(mutation_runner.ended(child, 1.0)) == status
    assert time.monotonic() - began < 15


def test_every_task_is_proven_again_from_its_folder(made: Path):
    assert [reason for task in folder.load_set(made)[::3] for reason in synthesis.check(task)] == []


def test_making_goes_on_where_it_stopped(made: Path, zoo: Path, tmp_path: Path):
    """The whole set is made in two starts by the slow test of a build that was killed."""
    out = tmp_path / "zoo"
    shutil.copytree(made / ".baselines", out / ".baselines")
    limited = SETTINGS.model_copy(update={"jobs": 1})
    first = synthesis.make([str(zoo)], out, limited.model_copy(update={"limit": 2}))
    assert len(first.accepted) == 2
    shutil.copytree(made / first.accepted[0].name, out / ".make-left" / "behind")
    (out / "rejections.jsonl").write_text('{"torn')
    again = synthesis.make([str(zoo)], out, limited.model_copy(update={"limit": 3}))
    assert again.tried == len(again.accepted) - 2 + sum(again.rejected.values())
    found = hashes(out)
    rejected, all_rejected = found.pop("rejections.jsonl", ""), hashes(made)["rejections.jsonl"]
    assert len(again.accepted) == 3 and set(rejected.splitlines()) <= set(all_rejected.splitlines())
    assert found.items() <= hashes(made).items()
    with pytest.raises(TaskError, match="was made with seed 0, not 7; use another folder"):
        synthesis.make([str(zoo)], out, SETTINGS.model_copy(update={"seed": 7}))


def test_what_must_still_pass_can_be_kept_near(made: Path, zoo: Path, tmp_path: Path):
    near = SETTINGS.model_copy(update={"limit": 1, "jobs": 1, "pass_to_pass": "near"})
    (task,) = synthesis.make([str(zoo)], tmp_path / "zoo", near).accepted
    assert (
        hashes(tmp_path / "zoo")[".baselines"] == hashes(made)[".baselines"]
    )  # measured again, and the same
    whole = folder.load(made / task.name)
    files = {test.partition("::")[0] for test in task.fail_to_pass} | {task.test_command.split()[-1]}
    kept = tuple(test for test in whole.pass_to_pass if test.partition("::")[0] in files)
    assert task.pass_to_pass == kept != whole.pass_to_pass
    assert synthesis.check(task) == []


def test_what_a_busy_machine_refused_is_tried_again_but_not_for_ever(made: Path, zoo: Path, tmp_path: Path):
    out = tmp_path / "zoo"
    shutil.copytree(made, out)
    like = json.loads((made / "rejections.jsonl").read_text().splitlines()[0])
    tries = {"zoo-stub-bark": 1, "zoo-stub-choir": repository_context.MAX_TRIES}
    with (out / "rejections.jsonl").open("a") as log:
        for name, times in tries.items():
            shutil.rmtree(out / name)
            log.write(times * (json.dumps({**like, "task": name, "reason": "timeout", "detail": ""}) + "\n"))
    report = synthesis.make([str(zoo)], out, SETTINGS)
    assert report.tried == 1 and (out / "zoo-stub-bark").exists() and not (out / "zoo-stub-choir").exists()
    assert sources.tree_sha256(out / "zoo-stub-bark") == hashes(made)["zoo-stub-bark"]
    assert stats.summarise(report.accepted, out / "rejections.jsonl").rejected == {"trivial": 2, "timeout": 1}


def test_the_clock_is_told_from_the_code(tmp_path: Path):
    with open_sandbox(SandboxSpec((tmp_path,))) as sandbox:
        assert baseline.settled(sandbox.exec("exit 3"), "it").exit_code == 3
        with pytest.raises(TimeoutError, match="it took longer"):
            baseline.settled(sandbox.exec("sleep 9", timeout_s=0.1), "it")


def test_a_deleted_package_leaves_nothing_that_can_be_imported(tmp_path: Path):
    """toolz lost its sub-package `curried`, and the empty folder was still imported, as a namespace package."""
    for path in ("pkg/__init__.py", "pkg/kept.py", "pkg/sub/__init__.py", "pkg/sub/deep/__init__.py"):
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_text("")
    compileall.compile_dir(tmp_path / "pkg", quiet=1)
    deleted = dict.fromkeys(["pkg/sub/__init__.py", "pkg/sub/deep/__init__.py"])
    with open_sandbox(SandboxSpec((tmp_path,))) as sandbox:
        assert sandbox.exec("python3 -c 'import pkg.sub.deep'").exit_code == 0
        lay_out(sandbox, {**deleted, "pkg/kept.py": "x = 1"})
        assert sandbox.exec("python3 -c 'import pkg.sub'").exit_code == 1
        left = sandbox.exec("ls -A pkg pkg/__pycache__").stdout.decode()
        assert "sub" not in left and "kept.py" in left and "__init__" in left


@pytest.mark.slow
def test_the_same_seed_gives_the_same_folders_however_many_work_on_them(
    made: Path, zoo: Path, tmp_path: Path
):
    synthesis.make([str(zoo)], tmp_path / "zoo", SETTINGS.model_copy(update={"jobs": 1}))
    assert SETTINGS.jobs == 2 and hashes(tmp_path / "zoo") == hashes(made)


@pytest.mark.slow
def test_a_build_that_was_killed_ends_like_one_that_was_not(made: Path, zoo: Path, tmp_path: Path):
    out = tmp_path / "zoo"
    command = [sys.executable, "-m", "woodshed", "tasks", "make", str(zoo), "--out", str(out)]
    command += ["--operators", "stub,remove", "--jobs", "1", "timeout_s=300"]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as build:
        while not list(out.glob("zoo-*")):
            assert build.poll() is None
            time.sleep(0.05)
        build.kill()
    assert len(list(out.glob("zoo-*"))) < len(list(made.glob("zoo-*")))
    synthesis.make([str(zoo)], out, SETTINGS)
    assert hashes(out) == hashes(made)


def rewritten(task: Task, where: Path, code: str | None, gold: str | None) -> Task:
    """The same task with other code in the workspace, or another gold patch ("": none)."""
    workspace = where / "workspace"
    shutil.copytree(task.folder / "environment/workspace", workspace)
    if code is not None:
        (workspace / task.target_path).write_text(code)
    original = (task.folder / "solution/files" / task.target_path).read_bytes()
    solution = {task.target_path: original if gold is None else gold.encode()} if gold != "" else {}
    return folder.write(
        dataclasses.replace(task, folder=where),
        where / "bad",
        workspace=workspace,
        tests=folder.protected_files(task),
        gold=dict(solution),
    )


def test_broken_tasks_are_found(made: Path, tmp_path: Path):
    task = folder.load(made / "zoo-stub-bark")
    source = textwrap.dedent(ZOO["zoo/sounds.py"]).lstrip()
    absent = synthesis.check(rewritten(task, tmp_path / "absent", None, ""))
    assert absent == ["bad: the gold patch is absent: solution/files holds nothing"]
    (already,) = synthesis.check(rewritten(task, tmp_path / "passing", source, None))
    assert "3 of 3 hidden tests already pass before any edit, so there is nothing to learn" in already
    (failing,) = synthesis.check(rewritten(task, tmp_path / "failing", None, source.replace("woof", "wuff")))
    assert "3 tests fail after the gold patch: zoo/tests/test_sounds.py::test_bark[1-woof]" in failing
